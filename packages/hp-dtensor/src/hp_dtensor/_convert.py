"""Convert between layouts and torch's placements.

Some `Partial` placements of torch can be reduced only by torch. If a tensor has one of them, torch
does a part of the redistribution. `torch_step` describes this part.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, cast, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import placement_types as theirs

from . import _placements as ours
from ._errors import LayoutError
from ._layout import Layout, ShardOrder, check_count, checked_order
from ._torch import order_of, spec_of, split_factor, strided_shard
from ._transfer import check_kept

AnyPlacement: TypeAlias = ours.Placement | theirs.Placement
# The placements that a DTensor can have.
DensePlacement: TypeAlias = (
    ours.Replicate | ours.Shard | ours.StridedShard | ours.Partial | theirs.Placement
)


class TorchPartial(LayoutError):
    """Raised if a tensor has a `Partial` that only torch can reduce; see `is_torch_partial`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The layout, mesh, global shape and dtype of a distributed tensor.

    In ``layout``, a rank is its row-major position in ``mesh``. For a `NonMember`, ``mesh`` is None
    and ``layout`` has global ranks.
    """

    layout: Layout
    mesh: DeviceMesh | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def is_torch_partial(placement: object) -> bool:
    """Return whether ``placement`` is a `Partial` of torch that only torch can reduce.

    It is True for subclasses of torch's ``Partial``, and for reduce ops that this package does not
    have. An example is the placement of the output of an embedding with a sharded vocabulary.
    """
    if not isinstance(placement, theirs.Partial):
        return False
    known = {*get_args(ours.PartialOp), ours.torch_op("prod")}
    return type(placement) is not theirs.Partial or placement.reduce_op not in known


def to_layout(
    placements: Sequence[AnyPlacement],
    mesh_shape: Sequence[int],
    ndim: int,
    shard_order: ShardOrder | Mapping[int, Sequence[int]] | None = None,
    ranks: Sequence[int] | None = None,
) -> Layout:
    """Return the layout of a tensor with ``ndim`` dims.

    Args:
        placements: One placement for each mesh axis, of this package or of torch. Negative dims are
            relative to the last dim. If torch's strided shards are equivalent to a shard order, the
            layout has this shard order; otherwise it has a `StridedShard`.
        mesh_shape: Number of ranks on each mesh axis.
        ndim: Number of dims of the tensor.
        shard_order: Order in which mesh axes split the same tensor dim, as in `Layout`. If given
            for a dim, the split factors of torch's strided shards of this dim are ignored.
        ranks: Global ranks of the mesh, as in `Layout`.

    Raises:
        LayoutError: The placements do not fit the mesh or the tensor.
        TorchPartial: Only torch can reduce a placement.
    """
    check_count(placements, mesh_shape)
    ordered = {dim for dim, _ in checked_order(shard_order)}
    converted: list[ours.Placement] = []
    for axis, given in enumerate(placements):
        placement = _converted(given, axis, ndim)
        split = placement.split
        if split is not None and split[0] in ordered and isinstance(given, theirs.Placement):
            placement = ours.Shard(split[0])
        converted.append(placement)
    layout = Layout(tuple(mesh_shape), tuple(converted), shard_order, ranks)
    layout.check(ndim)
    return layout


def to_torch(layout: Layout) -> tuple[theirs.Placement, ...]:
    """Return torch's placements for a layout, one for each mesh axis.

    A shard order becomes strided shards.

    Raises:
        LayoutError: torch has no equivalent placements. There are two cases: the layout has a
            `RaggedShard`; or a tensor dim has a `StridedShard` and its mesh axes do not split it in
            ascending order.
    """
    result: list[theirs.Placement] = []
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, ours.StridedShard):
            result.append(strided_shard(placement.dim, placement.split_factor))
        elif isinstance(placement, ours.Shard):
            order = layout.shard_axes(placement.dim)
            before = order[: order.index(axis)]
            factor = math.prod(layout.mesh_shape[other] for other in before if other > axis)
            result.append(
                strided_shard(placement.dim, factor) if factor > 1 else theirs.Shard(placement.dim)
            )
        elif isinstance(placement, ours.Partial):
            result.append(theirs.Partial(ours.torch_op(placement.op)))
        elif isinstance(placement, ours.RaggedShard):
            raise LayoutError(
                f"torch's DTensor cannot hold {placement} on mesh axis {axis}; use a RaggedTensor"
            )
        else:
            result.append(theirs.Replicate())
    if not layout.is_plain:
        dims = [p.dim for p in layout.placements if isinstance(p, ours.Shard | ours.StridedShard)]
        if to_layout(result, layout.mesh_shape, max(dims) + 1, ranks=layout.ranks) != layout:
            raise LayoutError(
                f"torch's placements cannot represent {layout}: split factors there are read in "
                "mesh order; leave shard_order= out, or use Shard(dim) on one of the axes"
            )
    return tuple(result)


def dense_spec(mesh: DeviceMesh, placements: Any, meta: Any, order: Any) -> TensorSpec:
    """Return the `TensorSpec` of a DTensor.

    The arguments are the attributes ``mesh``, ``placements``, ``tensor_meta`` and ``shard_order``
    of torch's ``DTensorSpec``. ``order`` is None if the spec has no shard order.
    """
    shape = tuple(meta.shape)
    layout = to_layout(placements, tuple(mesh.shape), len(shape), order_of(order))
    return TensorSpec(layout=layout, mesh=mesh, shape=shape, dtype=meta.dtype)


def _converted(placement: AnyPlacement, axis: int, ndim: int) -> ours.Placement:
    if isinstance(placement, ours.Replicate | ours.Partial | ours.RaggedShard):
        return placement
    if isinstance(placement, ours.Shard):
        return ours.Shard(_dim(placement.dim, ndim))
    if isinstance(placement, ours.StridedShard):
        return ours.StridedShard(_dim(placement.dim, ndim), placement.split_factor)
    if is_torch_partial(placement):
        raise TorchPartial(
            f"{placement} on mesh axis {axis} is of a kind that only torch reduces; redistribute a "
            "DTensor that has it, or reduce it with its own redistribute first"
        )
    # Subclasses of torch's placements can mean something else, so only exact types are converted.
    if type(placement) is theirs.Replicate:
        return ours.Replicate()
    if type(placement) is theirs.Partial:
        return ours.Partial(cast(ours.PartialOp, placement.reduce_op))
    if type(placement) is theirs.Shard:
        return ours.Shard(_dim(placement.dim, ndim))
    if (factor := split_factor(cast(theirs.Placement, placement))) is not None:
        return ours.StridedShard(_dim(cast(theirs.Shard, placement).dim, ndim), factor)
    raise LayoutError(
        f"no layout for {placement!r} on mesh axis {axis}; use Replicate(), Shard(dim), "
        "Partial(op) or torch's placements of these names"
    )


def _dim(dim: int, ndim: int) -> int:
    ours.check_dim(dim)
    return dim + ndim if -ndim <= dim < 0 else dim


class TorchStep(NamedTuple):
    """The first part of a redistribution, if only torch can reduce a `Partial` of the tensor.

    torch does this first part. This package does the second part.

    Attributes:
        placements: Placements after the first part.
        spec: Layout, mesh, shape and dtype of the tensor after the first part.
        then: Placements after the second part.
        axes: Mesh axes with a `Partial` that only torch can reduce.
        whole: Whether torch does the whole redistribution, because the target keeps such a
            `Partial`. ``spec`` and ``then`` are then used only for checks and for `Plan`.
    """

    placements: tuple[theirs.Placement, ...]
    spec: TensorSpec
    then: tuple[AnyPlacement, ...]
    axes: tuple[int, ...]
    whole: bool

    @property
    def note(self) -> str:
        """Text for `Plan.note`, which names the mesh axes that torch reduces."""
        end = ", which takes all steps" if self.whole else " before these steps"
        return f"the mesh axes {self.axes} are reduced by torch's own redistribution{end}"

    def run(self, x: DTensor) -> DTensor:
        """Redistribute ``x`` to ``placements`` with ``DTensor.redistribute``. Differentiable."""
        return x.redistribute(placements=list(self.placements))


def torch_step(x: Any, placements: Sequence[AnyPlacement] | None, other_mesh: bool) -> TorchStep:
    """Return the part of a redistribution that torch does. Communicates nothing.

    torch reduces each `Partial` that this package cannot reduce. The result has `Shard` or
    `Replicate` on this axis; see `_onto`.

    Args:
        x: DTensor with a `Partial` that only torch can reduce.
        placements: Target placements, as in `redistribute`.
        other_mesh: Whether the target is on another mesh. If True, torch reduces to `Replicate`.

    Raises:
        LayoutError: The target has such a `Partial` on an axis where ``x`` does not have it. Or the
            target keeps a `Partial` with a mask, which the output of an embedding has, and the
            placement of another axis changes.
    """
    mesh = x.device_mesh
    held = tuple(x.placements)
    axes = tuple(axis for axis, p in enumerate(held) if is_torch_partial(p))
    target: tuple[AnyPlacement, ...] = ours.in_tuple(placements, len(held))
    if not other_mesh:
        check_count(target, tuple(mesh.shape))
    kept = []
    for axis, placement in enumerate(target):
        if not is_torch_partial(placement):
            continue
        old = "another mesh" if other_mesh else held[axis]
        check_kept(axis, old, placement)
        if hasattr(old, "mask_buffer") and any(p != q for p, q in zip(held, target, strict=True)):
            raise LayoutError(
                f"{old} stays on axis {axis} while others go from {held} to {target}; its mask is "
                "that of the parts as they are: reduce it, with Replicate() or Shard(dim)"
            )
        kept.append(axis)
    whole = bool(kept)
    steps = [
        _onto(held, target, axis, x.ndim) if axis in axes and not other_mesh else p
        for axis, p in enumerate(held)
    ]
    if other_mesh:
        steps = [theirs.Replicate() if axis in axes else p for axis, p in enumerate(held)]
    # For plans and checks, kept partial values are replicated before and after the redistribution.
    plain = [theirs.Replicate() if axis in kept else p for axis, p in enumerate(steps)]
    then = tuple(ours.Replicate() if axis in kept else p for axis, p in enumerate(target))
    spec = dense_spec(mesh, tuple(plain), spec_of(x).tensor_meta, None)
    if whole:
        steps = [_torch_placement(p, x.ndim) for p in target]
    return TorchStep(tuple(steps), replace(spec, dtype=x.dtype), then, axes, whole)


def _onto(
    held: Sequence[theirs.Placement], target: Sequence[AnyPlacement], axis: int, ndim: int
) -> theirs.Placement:
    """Return the placement to which torch reduces the `Partial` on mesh axis ``axis``.

    Usually this is `Replicate`. It is ``Shard(dim)`` if all of these conditions hold:

    - The target placement of this axis is ``Shard(dim)``, and the tensor has this dim.
    - No other axis splits this dim, neither in ``held`` nor in ``target``.
    - No other axis has a `RaggedShard` in ``target``.

    Args:
        held: Placements before the redistribution.
        target: Placements after the redistribution.
        axis: Mesh axis of the `Partial`.
        ndim: Number of dims of the tensor.
    """
    new = target[axis]
    if not isinstance(new, ours.Shard | theirs.Shard) or not -ndim <= new.dim < ndim:
        return theirs.Replicate()
    dim = new.dim % ndim
    others = [p for side in (held, target) for at, p in enumerate(side) if at != axis]
    taken = any(isinstance(p, ours.RaggedShard) for p in others)
    taken |= any(getattr(p, "dim", dim - ndim) % ndim == dim for p in others if hasattr(p, "dim"))
    return theirs.Replicate() if taken else theirs.Shard(dim)


def _torch_placement(placement: AnyPlacement, ndim: int) -> theirs.Placement:
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
