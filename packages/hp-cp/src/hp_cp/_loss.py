"""Next-token labels and a loss that does not depend on how tokens lie over ranks."""

import torch
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives, TorchCollectives

from ._errors import InputError, described
from ._masks import MaskSpec, check_mask
from ._mesh import check_mesh
from ._sequence import check_local, checked_dim

IGNORED = -100  # what torch.nn.functional.cross_entropy leaves out by default


def shift_labels(
    labels: Tensor, mask: MaskSpec | None = None, *, seq_dim: int = -1, ignored: int = IGNORED
) -> Tensor:
    """Return a copy that holds at each position the label of the next, ``ignored`` at the end.

    With a mask of packed documents each document's last label is ignored. For whole sequences,
    before `shard_sequence`: a rank's last label belongs to another rank. Raises `InputError` for
    labels that are no tensor with that dim or whose dtype has no ``ignored``, and `LayoutError` for
    a mask that is no `MaskSpec` or whose documents are those of another length.
    """
    if not isinstance(labels, Tensor):
        raise InputError(f"labels must be a tensor, got {described(labels)}; use torch.tensor(...)")
    dim = checked_dim(labels, seq_dim)
    _check_ignored(labels.dtype, ignored)
    whole = MaskSpec(causal=True) if mask is None else mask
    check_mask(whole)
    ends = [document.stop - 1 for document in whole.documents(labels.shape[dim])]
    last = torch.tensor(ends, dtype=torch.int64, device=labels.device)
    return labels.roll(-1, dim).index_fill_(dim, last, ignored)


def _check_ignored(dtype: torch.dtype, ignored: int) -> None:
    if dtype.is_floating_point or dtype.is_complex:
        return
    least, most = (
        (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    )
    if not least <= ignored <= most:
        raise InputError(
            f"ignored={ignored} is no {dtype}, and would become a label; give labels as int64, or "
            f"an ignored from {least} to {most}"
        )


def cp_loss(
    loss_sum: Tensor,
    n_tokens: int | Tensor,
    loss_mesh: AxisMesh,
    *,
    collectives: Collectives | None = None,
) -> Tensor:
    """Return this rank's share of the mean loss: its sum over the number of tokens of all ranks.

    ``loss_sum`` sums the loss over this rank's ``n_tokens`` counted tokens. Shares of all ranks of
    ``loss_mesh`` sum to the mean, so gradients are to be summed, not averaged, over it. One
    all-reduce of the count per axis, outside autograd. Without any token the share is
    ``loss_sum``, which is then zero. Raises `InputError`, before it communicates, for a sum that is
    no tensor, what is no mesh, and a number of tokens that is no integer or an int below zero.
    """
    if not isinstance(loss_sum, Tensor):
        raise InputError(
            f"loss_sum must be a tensor, got {described(loss_sum)}; use cross_entropy(..., "
            f"reduction='sum')"
        )
    check_local("loss_sum", loss_sum)
    check_local("n_tokens", n_tokens)
    check_mesh(loss_mesh)
    _check_count(n_tokens)
    door: Collectives = TorchCollectives() if collectives is None else collectives
    count = _own_count(n_tokens, loss_sum.device)
    for position in range(loss_mesh.ndim):
        door.all_reduce(Axis.of(loss_mesh, position), [count]).wait()
    return loss_sum / count.clamp_(min=1)


def _own_count(n_tokens: int | Tensor, device: torch.device) -> Tensor:
    """Return a new count without dims; an int is filled in, where a copy would wait."""
    if isinstance(n_tokens, Tensor):
        return n_tokens.detach().to(device, torch.int64, copy=True).reshape(())
    return torch.full((), n_tokens, device=device, dtype=torch.int64)


def _check_count(n_tokens: object) -> None:
    if isinstance(n_tokens, Tensor):
        counts = n_tokens.numel() == 1 and not (
            n_tokens.is_floating_point() or n_tokens.is_complex() or n_tokens.dtype == torch.bool
        )
        given = f"a tensor of {n_tokens.dtype} and shape {tuple(n_tokens.shape)}"
    else:
        counts = type(n_tokens) is int and n_tokens >= 0
        given = repr(n_tokens)
    if not counts:
        raise InputError(
            f"n_tokens is {given}; give the number of counted tokens, an int or an integer tensor "
            f"of one element, at least 0, as (labels != {IGNORED}).sum()"
        )
