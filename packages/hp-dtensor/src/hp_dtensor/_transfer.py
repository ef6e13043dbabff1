"""Transfers: the messages between ranks that change the layout of a tensor.

Each rank computes only the messages that it sends or receives. The time for this depends on the
number of ranks with which it exchanges data, not on the number of ranks in the mesh.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple, TypeAlias

from ._boxes import (
    Box,
    Interval,
    held_at,
    intersect,
    place_in,
    ravel,
    run_boxes,
    unravel,
    volume,
)
from ._errors import LayoutError, MeshError
from ._layout import Layout
from ._placements import Partial, Replicate

Assignment: TypeAlias = tuple[tuple[int, int], ...]  # pairs (mesh axis, coordinate on this axis)
Span: TypeAlias = tuple[int, int]  # (first value, number of consecutive values)


class Tiles:
    """The boxes into which a layout divides a tensor, and the ranks that hold each box.

    These boxes are called tiles. If the layout has `Replicate` on an axis, several ranks hold the
    same tile.

    Attributes:
        layout: The layout.
        shape: Global shape of the tensor.
        splits: For each tensor dim, the pairs ``(degree, split factor)`` of `Layout.splits`.
        sharded_axes: Mesh axes that split a dim.
        replica_axes: Mesh axes with `Replicate`.
        ragged_axis: Mesh axis with the `RaggedShard`. -1 if there is none.
        flattened: Number of dims that the `RaggedShard` flattens. 0 if there is none.
        starts: For each coordinate on the ragged axis, the start of the slice in the flattened
            dims. The last number is the end of the last slice.
    """

    def __init__(self, layout: Layout, shape: tuple[int, ...]) -> None:
        self.layout, self.shape = layout, shape
        self.splits = [layout.splits(dim) for dim in range(len(shape))]
        self.sharded_axes = [a for a, p in enumerate(layout.placements) if p.split_dims]
        self.replica_axes = [a for a, p in enumerate(layout.placements) if isinstance(p, Replicate)]
        self.ragged_axis, self.flattened = -1, 0
        self.starts: tuple[int, ...] = ()
        if layout.ragged is not None:
            self.ragged_axis, placement = layout.ragged
            self.flattened, self.starts = len(placement.dims), placement.starts

    def is_divided(self, dim: int) -> bool:
        """Return whether any mesh axis splits a tensor dim."""
        return bool(self.splits[dim]) or dim < self.flattened

    def overlapping(self, region: Box) -> Iterator[tuple[Assignment, Box, Box]]:
        """Yield the tiles that overlap the box ``region``, as ``(holder, tile, overlap)``.

        - ``holder``: One pair ``(mesh axis, coordinate)`` for each sharded axis. The ranks with
          these coordinates hold the tile.
        - ``tile``: The tile, a box.
        - ``overlap``: Intersection of ``tile`` and ``region``.
        """
        grid = [list(self._ranges(dim, interval)) for dim, interval in enumerate(region)]
        for combination in product(*grid):
            holder: Assignment = tuple([pair for who, _, _ in combination for pair in who])
            tile = tuple([whole for _, whole, _ in combination])
            part = tuple([common for _, _, common in combination])
            if self.ragged_axis < 0:
                yield holder, tile, part
            else:
                yield from self._runs(holder, tile, part)

    def span(self, dim: int, tile: Box) -> Span:
        """Return which shards of a dim can overlap the box ``tile``, as ``(first, count)``.

        These are the shards ``first`` to ``first + count - 1``. Shards are numbered in row-major
        order of their coordinates on the axes of `Layout.shard_axes`. If a split factor of the dim
        is not 1, the result covers all shards.
        """
        splits = self.splits[dim]
        degrees = [degree for degree, _ in splits]
        if any(factor != 1 for _, factor in splits):
            return 0, math.prod(degrees)
        lo, hi = tile[dim]
        first, last = (
            ravel(held_at(self.shape[dim], splits, at)[0], degrees) for at in (lo, hi - 1)
        )
        return first, last - first + 1

    def ragged_span(self, tile: Box) -> Span:
        """Return which slices of the `RaggedShard` can overlap ``tile``, as ``(first, count)``.

        These are the slices at the coordinates ``first`` to ``first + count - 1`` on the ragged
        axis. If other axes shard the flattened dims too, the result covers all coordinates.
        """
        if any(self.splits[: self.flattened]):
            return 0, self.layout.mesh_shape[self.ragged_axis]
        outer = tuple((0, length) for length in self.shape[: self.flattened])
        first, stop = self._ragged_range(outer, tile[: self.flattened])
        return first, stop - first

    def _ranges(
        self, dim: int, interval: Interval
    ) -> Iterator[tuple[Assignment, Interval, Interval]]:
        """Yield the index ranges into which `Shard` and `StridedShard` split one dim.

        Only ranges that overlap ``interval`` are yielded, in ascending order. A `RaggedShard` is
        ignored; see `_runs` for it. Each item is ``(holder, range, overlap)``:

        - ``holder``: One pair ``(mesh axis, coordinate)`` for each axis that splits the dim. The
          ranks with these coordinates hold ``range``.
        - ``range``: Half-open range of global indices.
        - ``overlap``: Intersection of ``range`` and ``interval``.
        """
        lo, hi = interval
        length, splits = self.shape[dim], self.splits[dim]
        if not splits:
            yield (), (0, length), interval
            return
        axes = self.layout.shard_axes(dim)
        while lo < hi:
            index, stop = held_at(length, splits, lo)
            held = self.layout.intervals_of(self.shape, dim, index)
            start = held[bisect_right(held, lo, key=lambda each: each[0]) - 1][0]
            yield tuple(zip(axes, index, strict=True)), (start, stop), (lo, min(hi, stop))
            lo = stop

    def _runs(
        self, holder: Assignment, tile: Box, part: Box
    ) -> Iterator[tuple[Assignment, Box, Box]]:
        """Divide the box ``tile`` by the `RaggedShard`, and yield the tiles that overlap ``part``.

        ``tile`` is a box into which the other axes divide the tensor, and ``holder`` has the
        coordinates on these axes. Each item is ``(holder, tile, overlap)`` as in `overlapping`,
        also with the coordinate on the ragged axis.
        """
        outer, region = tile[: self.flattened], part[: self.flattened]
        for i in range(*self._ragged_range(outer, region)):
            for run in run_boxes(outer, self.starts[i], self.starts[i + 1]):
                common = intersect(run, region)
                if volume(common):
                    whole = (*run, *tile[self.flattened :])
                    yield (
                        (*holder, (self.ragged_axis, i)),
                        whole,
                        (*common, *part[self.flattened :]),
                    )

    def _ragged_range(self, outer: Box, region: Box) -> tuple[int, int]:
        """Return which slices of the `RaggedShard` can overlap ``region``, as ``(first, stop)``.

        These are the slices at the coordinates ``first`` to ``stop - 1`` on the ragged axis.
        ``outer`` is the box that the `RaggedShard` splits. ``region`` is a box inside it. Both
        boxes have only the flattened dims.
        """
        first = place_in(outer, [lo for lo, _ in region])
        last = place_in(outer, [hi - 1 for _, hi in region])
        return bisect_right(self.starts, first) - 1, bisect_left(self.starts, last + 1)


class _Component(NamedTuple):
    """One dim of the grid in which `Pairing` arranges the receivers of a tile.

    The grid has one component for each group of mesh axes that the placements of the target use
    together. For example, if axes 0 and 1 both shard dim 0, they form one component.

    Attributes:
        axes: Mesh axes of the target. The position of a receiver along this dim of the grid is its
            row-major coordinate on these axes.
        degrees: Number of ranks on each of these axes.
        span: Function that takes a tile and returns ``(first, count)``. The receivers of the tile
            have positions from ``first`` to ``first + count - 1``.
    """

    axes: tuple[int, ...]
    degrees: tuple[int, ...]
    span: Callable[[Box], Span]


def _whole_span(degree: int, tile: Box) -> Span:
    return 0, degree


class Pairing:
    """Chooses which rank sends an element, if several ranks hold it.

    Senders and receivers compute the same choice, without communication.

    - A tile is a box into which the source layout divides the tensor; see `Tiles`.
    - The replicas of a tile are the ranks among which a sender is chosen. They hold the same tile,
      and their coordinates differ only on ``replica_axes``.
    - The receivers of a tile are the ranks that can need a part of it. They form a grid, with one
      dim for each item of ``components``, and are numbered in row-major order.
    - Each receiver gets one replica by its number: round-robin if both layouts are on one mesh, in
      consecutive blocks between two meshes.

    On one mesh, sender and receiver have the same coordinates on all other axes.
    """

    def __init__(self, src: Layout, dst: Layout, shape: tuple[int, ...], one_mesh: bool) -> None:
        self.src, self.dst, self.one_mesh = src, dst, one_mesh
        self.held, self.needed = Tiles(src, shape), Tiles(dst, shape)
        self.replica_axes = self.held.replica_axes
        if one_mesh:
            # On other replicated axes, the replica with the receiver's coordinate always sends.
            self.replica_axes = [
                axis
                for axis in self.held.replica_axes
                if any(map(self.held.is_divided, dst.placements[axis].split_dims))
            ]
        self.replica_degrees = [src.mesh_shape[axis] for axis in self.replica_axes]
        self.replicas = math.prod(self.replica_degrees)
        self.components = self._components()

    def sources(self, rank: int) -> Iterator[tuple[int, Box]]:
        """Yield ``(sender, box)`` for each box that ``rank`` needs in the target layout.

        The sender is ``rank`` itself if it already holds the box.
        """
        if not self.dst.holds(rank):
            return
        me = self.dst.coordinate(rank)
        mine = self._coordinate_as_holder(rank)
        for region in self.dst.boxes_at(self.needed.shape, me):
            for holder, tile, part in self.held.overlapping(region):
                if mine is not None and all(mine[axis] == i for axis, i in holder):
                    yield rank, part
                    continue
                source = list(me) if self.one_mesh else [0] * len(self.src.mesh_shape)
                for axis, i in holder:
                    source[axis] = i
                if self.replica_axes:
                    spans = self._spans(tile)
                    replica = self._replica_for(self._number(me, spans), spans)
                    at = unravel(replica, self.replica_degrees)
                    for axis, i in zip(self.replica_axes, at, strict=True):
                        source[axis] = i
                yield self.src.rank_at(source), part

    def targets(self, rank: int) -> Iterator[tuple[int, Box]]:
        """Yield ``(receiver, box)`` for each box that ``rank`` sends to another rank."""
        if not self.src.holds(rank):
            return
        me = self.src.coordinate(rank)
        replica = ravel([me[axis] for axis in self.replica_axes], self.replica_degrees)
        target = list(me) if self.one_mesh else [0] * len(self.dst.mesh_shape)
        for tile in self.src.boxes_at(self.held.shape, me):
            spans = self._spans(tile)
            counts = [count for _, count in spans]
            for number in self._numbers_of(replica, spans):
                values = unravel(number, counts)
                for component, (first, _), value in zip(
                    self.components, spans, values, strict=True
                ):
                    at = unravel(first + value, component.degrees)
                    for axis, i in zip(component.axes, at, strict=True):
                        target[axis] = i
                receiver = self.dst.rank_at(target)
                mine = self._coordinate_as_holder(receiver)
                if mine is not None and all(mine[a] == me[a] for a in self.held.sharded_axes):
                    continue  # the receiver holds this tile itself
                for region in self.dst.boxes_at(self.needed.shape, target):
                    part = intersect(tile, region)
                    if volume(part):
                        yield receiver, part

    def _coordinate_as_holder(self, rank: int) -> tuple[int, ...] | None:
        return self.src.coordinate(rank) if self.one_mesh or self.src.holds(rank) else None

    def _components(self) -> list[_Component]:
        degrees = self.dst.mesh_shape
        parts = []
        for dim, splits in self.dst.axis_splits.items():
            if not self.one_mesh or self.held.is_divided(dim):
                axes, counts, _ = zip(*splits, strict=True)
                parts.append(_Component(axes, counts, partial(self.needed.span, dim)))
        ragged = self.needed.ragged_axis
        kept = set(self.held.replica_axes) - set(self.replica_axes) if self.one_mesh else set[int]()
        if ragged >= 0 and ragged not in kept:
            parts.append(_Component((ragged,), (degrees[ragged],), self.needed.ragged_span))
        used = {axis for component in parts for axis in component.axes}
        others = self.held.sharded_axes if self.one_mesh else self.needed.replica_axes
        # Receivers of one tile can also have different coordinates on these other axes.
        same = [
            _Component((axis,), (degrees[axis],), partial(_whole_span, degrees[axis]))
            for axis in others
            if axis not in used
        ]
        # The axes that split the target are last, so that receivers with consecutive numbers need
        # different parts of the tile. If they needed the same part, one of them could already hold
        # the tile, and the replicas would send unequal amounts.
        components = same + parts
        return components if self.one_mesh else sorted(components, key=lambda each: each.axes)

    def _spans(self, tile: Box) -> list[Span]:
        return [component.span(tile) for component in self.components]

    def _number(self, receiver: Sequence[int], spans: Sequence[Span]) -> int:
        """Return the number of a receiver among all receivers of a tile, from 0.

        ``receiver`` is the coordinate of the receiver in the target mesh. ``spans`` is the result
        of `_spans` for the tile.
        """
        number = 0
        for component, (first, count) in zip(self.components, spans, strict=True):
            value = ravel([receiver[axis] for axis in component.axes], component.degrees)
            number = number * count + value - first
        return number

    def _replica_for(self, number: int, spans: Sequence[Span]) -> int:
        """Return which replica of a tile sends to the receiver with number ``number``.

        The result is the row-major position of the replica on ``replica_axes``. ``spans`` is the
        result of `_spans` for the tile.
        """
        if self.one_mesh:
            return number % self.replicas
        # Each replica sends to consecutive receivers. If both meshes list their ranks in ascending
        # order, most messages stay between nearby ranks.
        return number * self.replicas // math.prod([count for _, count in spans])

    def _numbers_of(self, replica: int, spans: Sequence[Span]) -> range:
        """Return the numbers of the receivers to which one replica of a tile sends.

        This is the inverse of `_replica_for`: ``replica`` and ``spans`` are the same.
        """
        total = math.prod([count for _, count in spans])
        if self.one_mesh:
            return range(replica, total, self.replicas)
        first, stop = (-(-each * total // self.replicas) for each in (replica, replica + 1))
        return range(first, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The point-to-point messages of one rank that change the layout of a tensor.

    A box is a rectangular region of the tensor: one half-open range ``(start, stop)`` of global
    indices for each dim.

    Attributes:
        sends: Pairs ``(receiver, box)`` for the boxes that the rank sends, ordered by receiver.
        recvs: Pairs ``(sender, box)`` for the boxes that the rank receives, ordered by sender.
        local: Boxes that the rank needs and already holds.
    """

    sends: tuple[tuple[int, Box], ...]
    recvs: tuple[tuple[int, Box], ...]
    local: tuple[Box, ...]


def plan_transfer(src: Layout, dst: Layout, shape: Sequence[int], rank: int) -> Transfer:
    """Plan the point-to-point messages of one rank that change the layout of a tensor.

    The layouts may be on different meshes. Every rank receives only elements that it needs and does
    not hold. If several ranks hold an element, they share the work of sending it. All ranks compute
    the same senders, without communication.

    If both layouts have the same `Partial` on an axis, partial values are moved without a
    reduction.

    Args:
        src: Layout of the source.
        dst: Layout of the target.
        shape: Global shape.
        rank: Global rank, in the mesh of ``src`` or of ``dst``.

    Returns:
        The messages of the rank. ``sends`` has pairs ``(receiver, box)``, and ``recvs`` has pairs
        ``(sender, box)``, both in ascending order of ranks. ``local`` has the boxes that the rank
        needs and already holds. A box is a rectangular region of the tensor: one half-open range
        ``(start, stop)`` of global indices per dim.

    Raises:
        LayoutError: ``src`` or ``dst`` is not a `Layout`. Or a tensor of this shape cannot have one
            of the layouts. Or partial values would have to be reduced or created.
        MeshError: The rank is in neither mesh.

    Examples:
        >>> rows, columns = Layout((2,), (Shard(0),)), Layout((2,), (Shard(1),))
        >>> plan = plan_transfer(rows, columns, (4, 4), rank=0)
        >>> plan.sends, plan.local
        (((1, ((0, 2), (2, 4))),), (((0, 2), (0, 2)),))
    """
    check_pair(src, dst, shape)
    for axis, placement in enumerate(src.placements):
        if not isinstance(placement, Partial) or src.mesh_shape[axis] == 1:
            continue
        if not same_mesh(src, dst) or placement != dst.placements[axis]:
            new = f"to {dst.placements[axis]}" if same_mesh(src, dst) else "to another mesh"
            raise LayoutError(
                f"a transfer moves data and reduces none: axis {axis} goes from {placement} "
                f"{new}; reduce it first"
            )
    if not (src.holds(rank) or dst.holds(rank)):
        raise MeshError(
            f"rank {rank} is neither in the source's mesh of shape {src.mesh_shape} nor in the "
            f"target's of shape {dst.mesh_shape}"
        )
    pairing = Pairing(src, dst, tuple(shape), same_mesh(src, dst))
    pieces = list(pairing.sources(rank))
    return Transfer(
        sends=tuple(sorted(pairing.targets(rank))),
        recvs=tuple(sorted((peer, box) for peer, box in pieces if peer != rank)),
        local=tuple(box for peer, box in pieces if peer == rank),
    )


def same_mesh(src: Layout, dst: Layout) -> bool:
    """Return whether both layouts have the same mesh shape and the same global ranks."""
    return src.mesh_shape == dst.mesh_shape and src.ranks == dst.ranks


def check_pair(src: Layout, dst: Layout, shape: Sequence[int]) -> None:
    """Raise `LayoutError` if a tensor of ``shape`` cannot change from ``src`` to ``dst``.

    Both layouts must be possible for this shape. If ``dst`` has a `Partial` on an axis with several
    ranks, ``src`` must be on the same mesh and have the same `Partial` on this axis.
    """
    for side, layout in (("source", src), ("target", dst)):
        if not isinstance(layout, Layout):
            raise LayoutError(
                f"the {side} must be a Layout, got {layout!r}; use Layout(mesh_shape, placements)"
            )
    src.check_shape(shape)
    dst.check_shape(shape)
    same = same_mesh(src, dst)
    for axis, new in enumerate(dst.placements):
        if not isinstance(new, Partial) or dst.mesh_shape[axis] == 1:
            continue
        check_kept(axis, src.placements[axis] if same else "another mesh", new)


def check_kept(axis: int, old: object, new: object) -> None:
    """Raise `LayoutError` if the `Partial` of the target on a mesh axis is not in the source.

    ``old`` is the placement of the source on the axis. ``new`` is the `Partial` of the target.
    """
    if new != old:
        raise LayoutError(
            f"axis {axis} goes from {old} to {new}; a target can keep partial values but not "
            "make them: use Replicate() or Shard(dim)"
        )
