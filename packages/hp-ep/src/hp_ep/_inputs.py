"""Whether ranks hold the tokens that the axes given to a style say they hold."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor import Axis, AxisMesh, Collectives, TorchCollectives

from ._errors import ExpertConfigError

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_different_tokens(
    expert_axis: Axis | None, axes: AxisMesh | Sequence[Axis] | None
) -> None:
    """Raise an `ExpertConfigError` where ranks that split experts would hold the same tokens.

    ``axes`` split the tokens. Of several axes without their mesh nothing is known about their
    product. Communicates nothing.
    """
    if expert_axis is None or expert_axis.size == 1 or axes is None:
        return
    if not isinstance(axes, Sequence):
        names = list(axes.mesh_dim_names or ())
        different = set(torch.tensor(axes.mesh.tolist()).flatten().tolist())
    elif len(axes) <= 1:
        names = [axis.name for axis in axes]
        different = {rank for axis in axes for rank in axis.ranks}
    else:
        return
    alike = [rank for rank in expert_axis.ranks if rank not in different]
    if alike:
        what = f"{expert_axis.name}={expert_axis.size}"
        raise ExpertConfigError(
            f"token_axes {names} do not split tokens between all ranks {list(expert_axis.ranks)} "
            f"of {what}, which split the experts: gradients of experts would count a token once "
            "for each rank that holds it; cut the input over all these ranks and say "
            "token_axes= of that mesh, or cut experts inside over the ranks that hold the same "
            "tokens (TensorParallel, ExpertTensorParallel)"
        )


def comparison(
    sequence_axes: Sequence[Axis],
    sequence_mesh: DeviceMesh | None,
    token_axes: Sequence[Axis] | None,
    collectives: Collectives | None,
) -> Callable[[Tensor], None] | None:
    """Return what raises on all ranks where some hold the same input, None if nobody can tell.

    Ranks of ``sequence_axes`` and ``sequence_mesh`` hold parts of the same sequences. Data parallel
    ranks may have the same data. What is returned is to be called by all ranks, until it does not
    raise; it waits for the host once. It takes what a layer computes: ``[..., dim]`` of a floating
    dtype of two bytes or more.
    """
    parts = {axis.ranks: axis for axis in sequence_axes if axis.size > 1}
    if sequence_mesh is not None and sequence_mesh.size() > 1:
        axis = Axis.of(sequence_mesh, 0)
        parts[axis.ranks] = axis
    if not parts:
        return None
    used: Collectives = TorchCollectives() if collectives is None else collectives
    others = [axis for axis in token_axes or () if axis.size > 1 and axis.ranks not in parts]

    @torch.no_grad()
    def compare(x: Tensor) -> None:
        mine = _fingerprint(x)
        found = []
        for axis in parts.values():
            (every,) = used.all_gather(axis, [mine[None]]).wait()
            alike = (every[:, None] == every).all(-1).triu(1).any(1)
            found.append((every[:, 0] * alike).max())  # a rank without tokens is like no other
        found_alike = torch.stack(found)
        for axis in (*parts.values(), *others):
            (told,) = used.all_gather(axis, [found_alike[None]]).wait()
            found_alike = told.amax(0)
        for axis, tokens in zip(parts.values(), found_alike.tolist(), strict=True):
            if tokens:
                raise ExpertConfigError(
                    f"the same {tokens} tokens on several ranks of {axis.name}={axis.size}, which "
                    "are to hold different parts of a sequence: gradients of experts would count "
                    f"them once for each; cut the input by sequence over {axis.name}, or leave "
                    "sequence_mesh and sequence_axes out where sequences repeat themselves"
                )

    return compare


def _fingerprint(x: Tensor) -> Tensor:
    """Return the number of tokens, and a hash of their bits: ``[2]`` int64."""
    rows = x.reshape(-1, x.shape[-1])
    bits = rows.detach().contiguous().view(_BITS[x.element_size()])
    # Sums along both dimensions, not a copy of all bits as int64.
    sums = (bits.sum(dim, dtype=torch.int64) for dim in (0, 1))
    odd = ((s, 2 * torch.arange(s.shape[0], device=s.device) + 1) for s in sums)
    columns, tokens = ((s * n * n).sum() for s, n in odd)
    return torch.stack([tokens.new_full((), rows.shape[0]), columns * 31 + tokens])
