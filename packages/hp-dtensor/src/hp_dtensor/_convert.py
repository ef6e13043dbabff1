"""Layouts from and to torch's placements."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast, get_args

from torch.distributed.tensor import placement_types as theirs

from . import _placements as ours
from ._errors import LayoutError
from ._layout import Layout, ShardOrder, check_count, checked_order
from ._torch import split_factor, strided_shard

AnyPlacement: TypeAlias = ours.Placement | theirs.Placement
# What a DTensor can have.
DensePlacement: TypeAlias = (
    ours.Replicate | ours.Shard | ours.StridedShard | ours.Partial | theirs.Placement
)

_OPS: dict[str, ours.PartialOp] = {"product": "prod"}


class TorchPartial(LayoutError):
    """Partial values that only torch knows how to reduce."""


def is_torch_partial(placement: object) -> bool:
    """Return whether only torch knows how to reduce it, such as the result of an embedding."""
    if not isinstance(placement, theirs.Partial):
        return False
    op = placement.reduce_op
    return type(placement) is not theirs.Partial or _OPS.get(op, op) not in get_args(ours.PartialOp)


def to_layout(
    placements: Sequence[AnyPlacement],
    mesh_shape: Sequence[int],
    ndim: int,
    shard_order: ShardOrder | Mapping[int, Sequence[int]] | None = None,
    ranks: Sequence[int] | None = None,
) -> Layout:
    """Return the layout that ``placements``, ours or torch's, give a tensor with ``ndim`` dims.

    Negative dims count from the end. torch's strided shards become a shard order where one explains
    them, as in `StridedShard`; where ``shard_order`` is given it says all.
    """
    check_count(placements, mesh_shape)
    ordered = {dim for dim, _ in checked_order(shard_order)}
    converted: list[ours.Placement] = []
    for axis, given in enumerate(placements):
        placement = _converted(given, axis, ndim)
        theirs_too = isinstance(given, theirs.Placement)
        if theirs_too and isinstance(placement, ours.StridedShard) and placement.dim in ordered:
            placement = ours.Shard(placement.dim)
        converted.append(placement)
    layout = Layout(tuple(mesh_shape), tuple(converted), shard_order, ranks)
    layout.check(ndim)
    return layout


def to_torch(layout: Layout) -> tuple[theirs.Placement, ...]:
    """Return torch's placements for ``layout``; a shard order becomes strided shards.

    Raises `LayoutError` for a layout that torch cannot spell: ragged shards, and blocks
    within another order of axes than the mesh's.
    """
    result: list[theirs.Placement] = []
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, ours.StridedShard):
            result.append(strided_shard(placement.dim, placement.split_factor))
        elif isinstance(placement, ours.Shard):
            chain = layout.shard_axes(placement.dim)
            before = chain[: chain.index(axis)]
            factor = math.prod(layout.mesh_shape[other] for other in before if other > axis)
            result.append(
                strided_shard(placement.dim, factor) if factor > 1 else theirs.Shard(placement.dim)
            )
        elif isinstance(placement, ours.Partial):
            result.append(theirs.Partial("product" if placement.op == "prod" else placement.op))
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
                f"torch's placements cannot say {layout}: split factors there are read in mesh "
                "order; leave shard_order= out, or use Shard(dim) on one of the axes"
            )
    return tuple(result)


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
    # Exact types: subclasses of torch's placements mean something else.
    if type(placement) is theirs.Replicate:
        return ours.Replicate()
    if type(placement) is theirs.Partial:
        op = placement.reduce_op
        return ours.Partial(_OPS.get(op, cast(ours.PartialOp, op)))
    if type(placement) is theirs.Shard:
        return ours.Shard(_dim(placement.dim, ndim))
    if (factor := split_factor(placement)) is not None:
        return ours.StridedShard(_dim(cast(theirs.Shard, placement).dim, ndim), factor)
    raise LayoutError(
        f"no layout for {placement!r} on mesh axis {axis}; use Replicate(), Shard(dim), "
        "Partial(op) or torch's placements of these names"
    )


def _dim(dim: int, ndim: int) -> int:
    ours.check_dim(dim)
    return dim + ndim if -ndim <= dim < 0 else dim
