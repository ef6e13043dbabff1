"""Layouts from and to torch's placements."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

from torch.distributed.tensor import placement_types as theirs

from . import _placements as ours
from ._errors import PlacementCountError, PlacementTypeError, ShardDimError
from ._layout import Layout, ShardOrder
from ._torch import split_factor, strided_shard

AnyPlacement: TypeAlias = ours.Placement | theirs.Placement

_OPS: dict[str, ours.PartialOp] = {"product": "prod"}


def to_layout(
    placements: Sequence[AnyPlacement],
    mesh_shape: Sequence[int],
    ndim: int,
    shard_order: ShardOrder | Mapping[int, Sequence[int]] | None = None,
) -> Layout:
    """Return the layout that ``placements``, ours or torch's, give a tensor with ``ndim`` dims.

    Negative dims count from the end. torch's strided shards become a shard order; those that no
    order explains raise `PlacementTypeError`.
    """
    if len(placements) != len(mesh_shape):
        raise PlacementCountError(
            f"{len(placements)} placements for a mesh of shape {tuple(mesh_shape)}; give "
            f"{len(mesh_shape)}, one for each axis"
        )
    converted: list[ours.Placement] = []
    chains: dict[int, list[int]] = {}
    strided = False
    for axis in reversed(range(len(placements))):
        placement = _converted(placements[axis], axis, ndim)
        converted.insert(0, placement)
        if not isinstance(placement, ours.Shard):
            continue
        chain = chains.setdefault(placement.dim, [])
        factor = _factor(placements[axis])
        strided |= factor is not None
        chain.insert(_place(chain, mesh_shape, factor or 1, placements), axis)
    order = shard_order
    if order is None and strided:
        order = {dim: tuple(chain) for dim, chain in chains.items()}
    layout = Layout(tuple(mesh_shape), tuple(converted), order)
    layout.check(ndim)
    return layout


def to_torch(layout: Layout) -> tuple[theirs.Placement, ...]:
    """Return torch's placements for ``layout``; a shard order becomes strided shards."""
    result: list[theirs.Placement] = []
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, ours.Shard):
            chain = layout.chain(placement.dim)
            before = chain[: chain.index(axis)]
            factor = math.prod(layout.mesh_shape[other] for other in before if other > axis)
            result.append(
                strided_shard(placement.dim, factor) if factor > 1 else theirs.Shard(placement.dim)
            )
        elif isinstance(placement, ours.Partial):
            result.append(theirs.Partial("product" if placement.op == "prod" else placement.op))
        else:
            result.append(theirs.Replicate())
    return tuple(result)


def _converted(placement: AnyPlacement, axis: int, ndim: int) -> ours.Placement:
    if isinstance(placement, ours.Replicate | ours.Partial):
        return placement
    if isinstance(placement, ours.Shard):
        return ours.Shard(_dim(placement.dim, ndim))
    # Exact types: subclasses of torch's placements mean something else.
    if type(placement) is theirs.Replicate:
        return ours.Replicate()
    if type(placement) is theirs.Partial:
        op = placement.reduce_op
        return ours.Partial(_OPS.get(op, cast(ours.PartialOp, op)))
    if type(placement) is theirs.Shard or split_factor(placement) is not None:
        return ours.Shard(_dim(cast(theirs.Shard, placement).dim, ndim))
    raise PlacementTypeError(
        f"no layout for {placement!r} on mesh axis {axis}; use Replicate(), Shard(dim), "
        "Partial(op) or torch's placements of these names"
    )


def _dim(dim: int, ndim: int) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ShardDimError(f"Shard takes the number of a tensor dim, got {dim!r}")
    return dim + ndim if -ndim <= dim < 0 else dim


def _factor(placement: AnyPlacement) -> int | None:
    return split_factor(placement) if isinstance(placement, theirs.Placement) else None


def _place(
    chain: Sequence[int],
    mesh_shape: Sequence[int],
    factor: int,
    placements: Sequence[AnyPlacement],
) -> int:
    """Return how many of the later axes split first: those whose degrees multiply to ``factor``."""
    degrees = 1
    for place, axis in enumerate(chain):
        if degrees == factor:
            return place
        degrees *= mesh_shape[axis]
    if degrees == factor:
        return len(chain)
    raise PlacementTypeError(
        f"no order of axes of mesh shape {tuple(mesh_shape)} gives the split factor {factor} in "
        f"{tuple(placements)}; it must be the product of the degrees of later axes that split the "
        "dim first"
    )
