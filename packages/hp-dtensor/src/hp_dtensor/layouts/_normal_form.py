"""One spelling for each layout: placements, order of axes and ranks, checked."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from .._errors import (
    LayoutError,
    MixedPartialError,
    PlacementCountError,
    PlacementTypeError,
    RaggedSizesError,
    RankNotInMesh,
    ShardDimError,
    ShardOrderError,
)
from ._placements import (
    Partial,
    Placement,
    RaggedShard,
    Shard,
    StridedShard,
    in_tuple,
)

ShardOrder: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]


def checked_shape(mesh_shape: object) -> tuple[int, ...]:
    """Return the shape of a mesh as a tuple; raises `LayoutError` for what is none."""
    if isinstance(mesh_shape, Iterable):
        shape = tuple(mesh_shape)
        if all(hasattr(degree, "__index__") for degree in shape):
            return shape
    raise LayoutError(
        f"mesh_shape={mesh_shape!r} is no shape of a mesh; give a sequence of degrees, one for "
        "each axis, such as (2, 4) or (8,)"
    )


def checked_placements(placements: object, mesh_shape: Sequence[int]) -> tuple[Placement, ...]:
    """Return the placements as a tuple; raises what is wrong with them on a mesh of this shape."""
    result = in_tuple(placements)
    if any(degree < 1 for degree in mesh_shape):
        raise RankNotInMesh(f"a mesh of shape {tuple(mesh_shape)} has no ranks")
    if len(result) != len(mesh_shape):
        raise PlacementCountError(
            f"{len(result)} placements for a mesh of shape {tuple(mesh_shape)}; give "
            f"{len(mesh_shape)}, one for each axis"
        )
    for placement in result:
        if not isinstance(placement, Placement):
            raise PlacementTypeError(
                f"{placement!r} is no placement of a layout; use Replicate(), Shard(dim), "
                "StridedShard(dim, split_factor), RaggedShard(dims, sizes) or Partial(op)"
            )
    ops = {p.op for p in result if isinstance(p, Partial)}
    # Sums and averages are both linear, and so may be taken in any order.
    if len(ops) > 1 and ops != {"sum", "avg"}:
        raise MixedPartialError(
            f"partial values with {' and '.join(sorted(ops))} have no defined order of "
            "reduction; use one op on all axes, or reduce one axis first"
        )
    ragged = [axis for axis, p in enumerate(result) if isinstance(p, RaggedShard)]
    for axis in ragged:
        if len(result[axis].sizes) != mesh_shape[axis]:
            raise RaggedSizesError(
                f"{result[axis]} on mesh axis {axis} of degree {mesh_shape[axis]}; give "
                f"{mesh_shape[axis]} sizes, one for each coordinate"
            )
    if len(ragged) > 1:
        raise ShardDimError(
            f"the mesh axes {ragged} all hold ragged runs, which begin at dim 0; only one axis can"
        )
    return result


def ordered(
    placements: tuple[Placement, ...],
    mesh_shape: Sequence[int],
    given: ShardOrder | Mapping[int, Sequence[int]] | None,
) -> tuple[tuple[Placement, ...], ShardOrder | None]:
    """Return the placements and the order in which axes shard each dim, in one spelling.

    The order lists dims that are not split in mesh order, and those that some axis splits into
    blocks. Raises `ShardOrderError`.
    """
    wanted = dict(checked_order(given))
    spelled: list[Placement] = [
        Shard(p.dim) if isinstance(p, StridedShard) and p.split_factor == 1 else p
        for p in placements
    ]
    kept = []
    sharded = {p.dim for p in placements if isinstance(p, Shard | StridedShard)}
    for dim in sorted(sharded | set(wanted)):
        in_mesh_order = tuple(
            axis
            for axis, p in enumerate(placements)
            if isinstance(p, Shard | StridedShard) and p.dim == dim
        )
        axes = wanted.get(dim)
        if axes is None:
            axes = _spelled_order(dim, in_mesh_order, spelled, mesh_shape)
        elif tuple(sorted(axes)) != in_mesh_order:
            raise ShardOrderError(
                f"shard order {axes} for dim {dim}, which the axes {in_mesh_order} shard; "
                "list each of them once, the one that splits first in front"
            )
        if axes != in_mesh_order or any(isinstance(spelled[a], StridedShard) for a in axes):
            kept.append((dim, axes))
    return tuple(spelled), tuple(kept) or None


def checked_order(given: object) -> ShardOrder:
    """Return a shard order as pairs of a dim and its axes; raises `ShardOrderError`."""
    pairs: Any = () if given is None else given.items() if isinstance(given, Mapping) else given
    try:
        order = tuple((dim, tuple(axes)) for dim, axes in pairs)
        whole = all(isinstance(number, int) for dim, axes in order for number in (dim, *axes))
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise ShardOrderError(
            f"shard_order={given!r} gives no axes for each dim; write {{0: (1, 0)}} or "
            "((0, (1, 0)),) where axis 1 splits dim 0 first, axis 0 then"
        )
    return order


def checked_ranks(
    ranks: Sequence[int] | None, mesh_shape: Sequence[int]
) -> range | tuple[int, ...] | None:
    """Return the ranks, evenly spaced ones as a range; None for ``0 .. n-1``."""
    if ranks is None:
        return None
    size = math.prod(mesh_shape)
    given = ranks if isinstance(ranks, range) else tuple(ranks)
    if len(given) != size or (not isinstance(given, range) and len(set(given)) != size):
        raise RankNotInMesh(
            f"a mesh of shape {tuple(mesh_shape)} needs {size} different ranks, got {len(given)}"
        )
    step = given[1] - given[0] if size > 1 else 1
    spaced = range(given[0], given[0] + step * size, step)
    if spaced == range(size):
        return None
    return spaced if isinstance(given, range) or given == tuple(spaced) else given


def _spelled_order(
    dim: int, axes: Sequence[int], placements: list[Placement], mesh_shape: Sequence[int]
) -> tuple[int, ...]:
    """Return the order that split factors spell, and put plain shards where they do.

    An axis whose factor is the product of the degrees of later axes that split the dim first splits
    next after these. Any other factor means what it says, in mesh order.
    """
    order: list[int] = []
    for axis in reversed(axes):
        placement = placements[axis]
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        before = 1
        place = 0
        while before != factor and place < len(order):
            if isinstance(placements[order[place]], StridedShard):
                break
            before *= mesh_shape[order[place]]
            place += 1
        if before == factor:
            placements[axis] = Shard(dim)
            order.insert(place, axis)
        else:
            order.insert(0, axis)
    return tuple(order)
