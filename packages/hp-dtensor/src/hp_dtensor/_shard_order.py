"""Layouts as nested splits: for each dim the axes that split it in turn, with their factors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from ._layout import Layout
from ._placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard

AxisSplit: TypeAlias = tuple[int, int]  # (axis, split factor)
AxisSplits: TypeAlias = dict[int, tuple[AxisSplit, ...]]


def axis_splits(layout: Layout, dim: int) -> tuple[AxisSplit, ...]:
    """Return the axes that split ``dim`` in turn, each with its factor."""
    return tuple(
        (axis, factor)
        for axis, (_, factor) in zip(layout.shard_axes(dim), layout.splits(dim), strict=True)
    )


def all_axis_splits(layout: Layout) -> AxisSplits:
    """Return `axis_splits` of each dim that is split."""
    dims = {p.dim for p in layout.placements if isinstance(p, Shard | StridedShard)}
    return {dim: axis_splits(layout, dim) for dim in sorted(dims)}


def with_axis_splits(layout: Layout, splits: Mapping[int, Sequence[AxisSplit]]) -> Layout:
    """Return the layout with dims split as ``splits`` say; axes in none become replicated.

    Partial and ragged axes that are in none keep what they have.
    """
    placements: list[Placement] = [
        Replicate() if isinstance(p, Shard | StridedShard) else p for p in layout.placements
    ]
    for dim, of_dim in splits.items():
        for axis, factor in of_dim:
            placements[axis] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    order = tuple((dim, tuple(a for a, _ in of_dim)) for dim, of_dim in splits.items() if of_dim)
    return replace(layout, placements=tuple(placements), shard_order=order)


def with_split(layout: Layout, dim: int, split: AxisSplit) -> Layout:
    """Return the layout with one more split of ``dim``, after the others."""
    splits = all_axis_splits(layout)
    splits[dim] = (*splits.get(dim, ()), split)
    return with_axis_splits(layout, splits)


def without_last_split(layout: Layout, dim: int) -> Layout:
    """Return the layout without the last split of ``dim``."""
    splits = all_axis_splits(layout)
    splits[dim] = splits[dim][:-1]
    return with_axis_splits(layout, splits)


def without(layout: Layout, dim: int, place: int) -> Layout:
    """Return the layout without one split of ``dim``, each rank keeping all that it holds.

    Later splits then cut every block that the split had made; for lengths that divide evenly.
    """
    splits = all_axis_splits(layout)
    of_dim = splits[dim]
    degree = layout.mesh_shape[of_dim[place][0]]
    later = tuple((axis, factor * degree) for axis, factor in of_dim[place + 1 :])
    splits[dim] = (*of_dim[:place], *later)
    return with_axis_splits(layout, splits)


def with_placement(layout: Layout, axis: int, placement: Placement) -> Layout:
    """Return the layout with another placement, that splits no dim in turn, on one axis."""
    placements = list(layout.placements)
    placements[axis] = placement
    return replace(layout, placements=tuple(placements))


def common(a: Sequence[AxisSplit], b: Sequence[AxisSplit]) -> int:
    """Return how many splits both begin with."""
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def same_runs(a: Layout, b: Layout) -> bool:
    """Return whether both hold the same ragged runs, of parts split alike."""
    if a.ragged is None or a.ragged != b.ragged:
        return False
    return all(axis_splits(a, dim) == axis_splits(b, dim) for dim in a.ragged[1].dims)


def replicated(layout: Layout) -> Layout:
    """Return the layout with axes of degree one, which mean nothing, replicated."""
    if 1 not in layout.mesh_shape:
        return layout
    splits = {
        dim: [split for split in of_dim if layout.mesh_shape[split[0]] > 1]
        for dim, of_dim in all_axis_splits(layout).items()
    }
    placements = tuple(
        Replicate() if degree == 1 and isinstance(p, Partial | RaggedShard) else p
        for degree, p in zip(layout.mesh_shape, layout.placements, strict=True)
    )
    return with_axis_splits(replace(layout, placements=placements), splits)


def is_local(src: Layout, dst: Layout, ndim: int) -> bool:
    """Return whether every rank holds all that it needs, whatever the shape."""
    if src.ragged is not None and not same_runs(src, dst):
        return False
    return all(
        common(axis_splits(src, dim), axis_splits(dst, dim)) == len(src.shard_axes(dim))
        for dim in range(ndim)
    )


def moving_axes(src: Layout, dst: Layout, ndim: int) -> tuple[int, ...]:
    """Return the axes on which senders and receivers of `plan_transfer` can differ."""
    divided = {dim for dim in range(ndim) if src.shard_axes(dim)}
    if src.ragged is not None:
        divided.update(src.ragged[1].dims)
    still = set()
    for axis, (old, new) in enumerate(zip(src.placements, dst.placements, strict=True)):
        if src.mesh_shape[axis] == 1 or isinstance(old, Partial):
            still.add(axis)
        elif isinstance(old, Replicate):
            dims: tuple[int, ...] = ()
            if isinstance(new, Shard | StridedShard):
                dims = (new.dim,)
            elif isinstance(new, RaggedShard):
                dims = new.dims
            if not divided.intersection(dims):
                still.add(axis)
    for dim in range(ndim):
        of_dim = axis_splits(src, dim)
        still.update(axis for axis, _ in of_dim[: common(of_dim, axis_splits(dst, dim))])
    if src.ragged is not None and same_runs(src, dst):
        still.add(src.ragged[0])
    return tuple(axis for axis in range(len(src.mesh_shape)) if axis not in still)


def unchanged_axes(src: Layout, dst: Layout, ndim: int) -> frozenset[int]:
    """Return the axes along which every rank keeps its part: no step may involve their ranks.

    Both layouts replicate them or hold the same partial values there, or they split a dim first and
    alike in both.
    """
    kept = {
        axis
        for axis, (old, new) in enumerate(zip(src.placements, dst.placements, strict=True))
        if src.mesh_shape[axis] == 1 or (old == new and isinstance(old, Replicate | Partial))
    }
    for dim in range(ndim):
        of_dim = axis_splits(src, dim)
        kept.update(axis for axis, _ in of_dim[: common(of_dim, axis_splits(dst, dim))])
    if src.ragged is not None and same_runs(src, dst):
        kept.add(src.ragged[0])
    return frozenset(kept)
