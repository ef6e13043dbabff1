"""Partial values that only torch knows how to reduce: its own redistribution takes that step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed.tensor as theirs
from torch.distributed.tensor import DTensor

from . import _placements as ours
from ._convert import AnyPlacement, is_torch_partial
from ._errors import LayoutError
from ._layout import check_count
from ._placements import in_tuple
from ._prepare import TensorSpec, dense_spec
from ._transfer import check_kept


class TorchStep(NamedTuple):
    """What torch does first: to these placements; ``then`` is what is left, on ``spec``.

    Where a target keeps such values nothing is left to plan, and torch goes all the way.
    """

    placements: tuple[theirs.Placement, ...]
    spec: TensorSpec
    then: tuple[AnyPlacement, ...]
    axes: tuple[int, ...]
    whole: bool

    @property
    def note(self) -> str:
        """Return what to say of it in a plan."""
        end = ", which takes all steps" if self.whole else " before these steps"
        return f"the mesh axes {self.axes} are reduced by torch's own redistribution{end}"

    def run(self, x: DTensor) -> DTensor:
        """Return the tensor after torch's part, recorded by autograd as torch does."""
        return x.redistribute(placements=list(self.placements))


def torch_step(x: Any, placements: Sequence[AnyPlacement] | None, other_mesh: bool) -> TorchStep:
    """Return torch's part of a redistribution; communicates nothing.

    Values go straight to the shards of the target where no other axis shards the same dim, and
    become replicated otherwise. Raises `LayoutError` for a target that asks for such values where
    ``x`` has none.
    """
    mesh = x.device_mesh
    held = tuple(x.placements)
    axes = tuple(axis for axis, p in enumerate(held) if is_torch_partial(p))
    ndim = len(held)
    wanted: tuple[AnyPlacement, ...] = (ours.Replicate(),) * ndim
    if placements is not None:
        wanted = in_tuple(placements)
    if not other_mesh:
        check_count(wanted, tuple(mesh.shape))
    kept = []
    for axis, placement in enumerate(wanted):
        if not is_torch_partial(placement):
            continue
        old = "another mesh" if other_mesh else held[axis]
        check_kept(axis, old, placement)
        if hasattr(old, "mask_buffer") and any(p != q for p, q in zip(held, wanted, strict=True)):
            raise LayoutError(
                f"{old} stays on axis {axis} while others go from {held} to {wanted}; its mask is "
                "that of the parts as they are: reduce it, with Replicate() or Shard(dim)"
            )
        kept.append(axis)
    whole = bool(kept)
    steps = [
        _onto(held, wanted, axis, x.ndim) if axis in axes and not other_mesh else p
        for axis, p in enumerate(held)
    ]
    if other_mesh:
        steps = [theirs.Replicate() if axis in axes else p for axis, p in enumerate(held)]
    # What is planned, and checked, has those values reduced on both sides.
    plain = [theirs.Replicate() if axis in kept else p for axis, p in enumerate(steps)]
    then = tuple(ours.Replicate() if axis in kept else p for axis, p in enumerate(wanted))
    spec = dense_spec(mesh, tuple(plain), x._spec.tensor_meta, None)
    if whole:
        steps = [_spelled(p, x.ndim) for p in wanted]
    return TorchStep(tuple(steps), replace(spec, dtype=x.dtype), then, axes, whole)


def _onto(
    held: Sequence[theirs.Placement], wanted: Sequence[AnyPlacement], axis: int, ndim: int
) -> theirs.Placement:
    """Return what torch makes of one axis: the target's shard, if that can be its place at once."""
    new = wanted[axis]
    if not isinstance(new, ours.Shard | theirs.Shard) or not -ndim <= new.dim < ndim:
        return theirs.Replicate()
    dim = new.dim % ndim
    others = [p for side in (held, wanted) for at, p in enumerate(side) if at != axis]
    taken = any(isinstance(p, ours.RaggedShard) for p in others)
    taken |= any(getattr(p, "dim", dim - ndim) % ndim == dim for p in others if hasattr(p, "dim"))
    return theirs.Replicate() if taken else theirs.Shard(dim)


def _spelled(placement: AnyPlacement, ndim: int) -> theirs.Placement:
    if isinstance(placement, theirs.Placement):
        return placement
    if isinstance(placement, ours.Shard):
        return theirs.Shard(placement.dim % ndim)
    if isinstance(placement, ours.Replicate):
        return theirs.Replicate()
    raise LayoutError(
        f"{placement} beside partial values that stay and that only torch reduces; reduce these "
        "first, with Replicate() or Shard(dim) on their axes"
    )
