"""Next-token labels and a loss that does not depend on how tokens lie over ranks."""

import torch
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives, TorchCollectives

from ._errors import InputError
from ._masks import MaskSpec

IGNORED = -100  # what torch.nn.functional.cross_entropy leaves out by default


def shift_labels(
    labels: Tensor, mask: MaskSpec | None = None, *, seq_dim: int = -1, ignored: int = IGNORED
) -> Tensor:
    """Return a copy that holds at each position the label of the next, ``ignored`` at the end.

    With a mask of packed documents each document's last label is ignored. For whole sequences,
    before `shard_sequence`: a rank's last label belongs to another rank. Raises `LayoutError` where
    the mask's documents are those of another length.
    """
    shifted = labels.roll(-1, seq_dim)
    whole = MaskSpec(causal=True) if mask is None else mask
    for document in whole.documents(labels.shape[seq_dim]):
        shifted.select(seq_dim, document.stop - 1).fill_(ignored)
    return shifted


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
    ``loss_sum``, which is then zero. Raises `InputError`, before it communicates, for a number of
    tokens that is no integer.
    """
    _check_count(n_tokens)
    door: Collectives = TorchCollectives() if collectives is None else collectives
    count = torch.as_tensor(n_tokens, device=loss_sum.device, dtype=torch.int64).detach().clone()
    for position in range(loss_mesh.ndim):
        door.all_reduce(Axis.of(loss_mesh, position), [count]).wait()
    return loss_sum / count.clamp_(min=1)


def _check_count(n_tokens: object) -> None:
    if isinstance(n_tokens, Tensor):
        counts = n_tokens.numel() == 1 and not (
            n_tokens.is_floating_point() or n_tokens.is_complex() or n_tokens.dtype == torch.bool
        )
        given = f"a tensor of {n_tokens.dtype} and shape {tuple(n_tokens.shape)}"
    else:
        counts = isinstance(n_tokens, int) and not isinstance(n_tokens, bool)
        given = repr(n_tokens)
    if not counts:
        raise InputError(
            f"n_tokens is {given}; give the number of counted tokens, an int or an integer tensor "
            f"of one element, as (labels != {IGNORED}).sum()"
        )
