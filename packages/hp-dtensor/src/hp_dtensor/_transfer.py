"""Who holds a region of a tensor under a layout, found without asking every rank."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeAlias

from ._boxes import (
    Box,
    Interval,
    chunk,
    chunk_at,
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
from ._placements import Partial, RaggedShard, Replicate, Shard, StridedShard, split_dims

Assignment: TypeAlias = tuple[tuple[int, int], ...]  # (axis, coordinate) of the axes that shard


class Tiles:
    """The tiles into which a layout cuts a tensor of ``shape``; a tile is one box of some ranks.

    The tiles of a position are the boxes of `Layout.boxes_at`, and so in number few.
    """

    def __init__(self, layout: Layout, shape: tuple[int, ...]) -> None:
        self.layout, self.shape = layout, shape
        dims = range(len(shape))
        self.axes = [layout.shard_axes(dim) for dim in dims]
        self.degrees = [layout.degrees(dim) for dim in dims]
        self.splits = [layout.splits(dim) for dim in dims]
        self.plain = [all(factor == 1 for _, factor in splits) for splits in self.splits]
        self.ragged_axis = -1
        self.leading = 0
        self.starts: tuple[int, ...] = ()
        if layout.ragged is not None:
            self.ragged_axis, placement = layout.ragged
            self.leading = len(placement.dims)
            self.starts = placement.starts

    @property
    def is_plain(self) -> bool:
        """Return whether every rank holds at most one box."""
        return self.ragged_axis < 0 and all(self.plain)

    @property
    def sharding(self) -> tuple[int, ...]:
        """Return the axes along which ranks hold different tiles."""
        return tuple(
            axis
            for axis, p in enumerate(self.layout.placements)
            if isinstance(p, Shard | StridedShard | RaggedShard)
        )

    def divided(self, dim: int) -> bool:
        """Return whether ranks hold different parts of ``dim``."""
        return bool(self.axes[dim]) or dim < self.leading

    def at(self, coordinate: Sequence[int]) -> tuple[Box, ...]:
        """Return the tiles at a position."""
        if not self.is_plain:
            return self.layout.boxes_at(self.shape, coordinate)
        box = tuple(
            [
                chunk(length, degrees, [coordinate[a] for a in axes]) if axes else (0, length)
                for length, degrees, axes in zip(self.shape, self.degrees, self.axes, strict=True)
            ]
        )
        return (box,) if volume(box) else ()

    def meeting(self, region: Box) -> Iterator[tuple[Assignment, Box, Box]]:
        """Yield each tile that meets a region: who holds it, the tile, and the common part."""
        grid = [list(self._ranges(dim, lo, hi, region[dim])) for dim, (lo, hi) in enumerate(region)]
        for combination in product(*grid):
            held: Assignment = tuple([pair for who, _, _ in combination for pair in who])
            tile = tuple([whole for _, whole, _ in combination])
            piece = tuple([common for _, _, common in combination])
            if self.ragged_axis < 0:
                yield held, tile, piece
            else:
                yield from self._runs(held, tile, piece)

    def _ranges(
        self, dim: int, lo: int, hi: int, region: Interval
    ) -> Iterator[tuple[Assignment, Interval, Interval]]:
        length, axes = self.shape[dim], self.axes[dim]
        if not axes:
            yield (), (0, length), region
            return
        while lo < hi:
            if self.plain[dim]:
                index = chunk_at(length, self.degrees[dim], lo)
                whole = chunk(length, self.degrees[dim], index)
            else:
                index, whole = self._block(dim, lo)
            yield tuple(zip(axes, index, strict=True)), whole, (lo, min(hi, whole[1]))
            lo = whole[1]

    def _block(self, dim: int, position: int) -> tuple[tuple[int, ...], Interval]:
        index, stop = held_at(self.shape[dim], self.splits[dim], position)
        held = self.layout.intervals_of(self.shape, dim, index)
        start = held[bisect_right(held, position, key=lambda interval: interval[0]) - 1][0]
        return index, (start, stop)

    def _runs(
        self, held: Assignment, tile: Box, piece: Box
    ) -> Iterator[tuple[Assignment, Box, Box]]:
        frame = tile[: self.leading]
        for i in range(*self._run_span(frame, piece[: self.leading])):
            for run in run_boxes(frame, self.starts[i], self.starts[i + 1]):
                common = intersect(run, piece[: self.leading])
                if volume(common):
                    whole = (*run, *tile[self.leading :])
                    part = (*common, *piece[self.leading :])
                    yield (*held, (self.ragged_axis, i)), whole, part

    def _run_span(self, frame: Box, region: Box) -> tuple[int, int]:
        """Return the ragged coordinates, as a range, outside of which no run meets the region."""
        first = place_in(frame, [lo for lo, _ in region])
        last = place_in(frame, [hi - 1 for _, hi in region])
        return bisect_right(self.starts, first) - 1, bisect_left(self.starts, last + 1)

    def span(self, dim: int, interval: Interval) -> tuple[int, int]:
        """Return the first chunk of ``dim`` that meets an interval, and how many from there on.

        Chunks are counted row-major in the order of `Layout.shard_axes`. Where a dim is cut into
        blocks this is all of them.
        """
        length, degrees = self.shape[dim], self.degrees[dim]
        if not self.plain[dim]:
            count = 1
            for degree in degrees:
                count *= degree
            return 0, count
        first = ravel(chunk_at(length, degrees, interval[0]), degrees)
        last = ravel(chunk_at(length, degrees, interval[1] - 1), degrees)
        return first, last - first + 1

    def run_span(self, region: Box) -> tuple[int, int]:
        """Return the first ragged coordinate that may meet a region, and how many from there on."""
        degree = self.layout.mesh_shape[self.ragged_axis]
        if any(self.axes[dim] for dim in range(self.leading)):
            return 0, degree
        frame = tuple((0, length) for length in self.shape[: self.leading])
        first, stop = self._run_span(frame, region[: self.leading])
        return first, stop - first

    @property
    def free(self) -> tuple[int, ...]:
        """Return the axes along which ranks hold the same tiles."""
        return tuple(
            axis for axis, p in enumerate(self.layout.placements) if isinstance(p, Replicate)
        )


class _Digit(NamedTuple):
    """One part of a receiver's place among those that need a tile.

    It is the coordinate on ``axes``, row-major. Where ``dim`` is not negative these are the axes
    that shard the dim; a dim of -2 stands for ragged runs, of -1 for nothing of the tensor.
    """

    axes: tuple[int, ...]
    degrees: tuple[int, ...]
    dim: int


class Pairing:
    """The roles that mesh axes play in one change of layout.

    A tile is held by ranks that differ along the source's ``pool`` axes, and needed by ranks that
    differ along the target's axes in ``digits``; the n-th receiver is dealt one of the holders. On
    one mesh all other axes keep the receiver's coordinate.
    """

    def __init__(self, src: Layout, dst: Layout, shape: tuple[int, ...], same: bool) -> None:
        self.src, self.dst, self.same = src, dst, same
        self.held, self.needed = Tiles(src, shape), Tiles(dst, shape)
        self.owners = self.held.sharding
        self.pool = self._pool() if same else self.held.free
        self.pool_degrees = tuple(src.mesh_shape[axis] for axis in self.pool)
        self.copies = math.prod(self.pool_degrees)
        self.digits = self._digits()

    def sources(self, rank: int) -> Iterator[tuple[int, Box]]:
        """Yield where each piece of what ``rank`` needs comes from, the rank itself included."""
        if not self.dst.holds(rank):
            return
        me = self.dst.coordinate(rank)
        mine = self._holder(rank)
        for region in self.needed.at(me):
            for who, tile, piece in self.held.meeting(region):
                if mine is not None and all(mine[axis] == i for axis, i in who):
                    yield rank, piece
                    continue
                source = list(me) if self.same else [0] * len(self.src.mesh_shape)
                for axis, i in who:
                    source[axis] = i
                if self.pool:
                    ranges = self._ranges(tile)
                    copy = self._copy(self._turn(me, ranges), ranges)
                    for axis, i in zip(self.pool, unravel(copy, self.pool_degrees), strict=True):
                        source[axis] = i
                yield self.src.rank_at(source), piece

    def targets(self, rank: int) -> Iterator[tuple[int, Box]]:
        """Yield who gets which piece of what ``rank`` holds from it, without what it keeps."""
        if not self.src.holds(rank):
            return
        me = self.src.coordinate(rank)
        copy = ravel([me[axis] for axis in self.pool], self.pool_degrees)
        target = list(me) if self.same else [0] * len(self.dst.mesh_shape)
        for tile in self.held.at(me):
            ranges = self._ranges(tile)
            radices = [count for _, count in ranges]
            for turn in self._turns(copy, ranges):
                for digit, (first, _), value in zip(
                    self.digits, ranges, unravel(turn, radices), strict=True
                ):
                    place = unravel(first + value, digit.degrees)
                    for axis, i in zip(digit.axes, place, strict=True):
                        target[axis] = i
                receiver = self.dst.rank_at(target)
                holder = self._holder(receiver)
                if holder is not None and all(holder[a] == me[a] for a in self.owners):
                    continue  # it holds this tile itself
                for region in self.needed.at(target):
                    piece = intersect(tile, region)
                    if volume(piece):
                        yield receiver, piece

    def _holder(self, rank: int) -> tuple[int, ...] | None:
        return self.src.coordinate(rank) if self.same or self.src.holds(rank) else None

    def _pool(self) -> tuple[int, ...]:
        """Return the axes of replicas over which receivers are dealt out on one mesh."""
        found = []
        for axis in self.held.free:
            dims = split_dims(self.dst.placements[axis])
            if any(self.held.divided(dim) for dim in dims):
                found.append(axis)
        return tuple(found)

    def _digits(self) -> tuple[_Digit, ...]:
        degrees = self.dst.mesh_shape
        kept = set(self.held.free) - set(self.pool) if self.same else set[int]()
        parts = [
            _Digit(axes, self.needed.degrees[dim], dim)
            for dim, axes in enumerate(self.needed.axes)
            if axes and (not self.same or self.held.divided(dim))
        ]
        axis = self.needed.ragged_axis
        if axis >= 0 and axis not in kept:
            parts.append(_Digit((axis,), (degrees[axis],), -2))
        taken = {axis for digit in parts for axis in digit.axes}
        alike = [
            _Digit((axis,), (degree,), -1)
            for axis, degree in enumerate(degrees)
            if axis in (self.owners if self.same else self.needed.free) and axis not in taken
        ]
        # Parts come last: where replicas and parts are many, neighbours in turn differ in part,
        # while along an axis of receivers alike one of them may hold the tile itself.
        digits = alike + parts
        return tuple(digits if self.same else sorted(digits))

    def _ranges(self, tile: Box) -> list[tuple[int, int]]:
        """Return the first value of each digit among the receivers of a tile, and their number."""
        return [
            self.needed.span(digit.dim, tile[digit.dim])
            if digit.dim >= 0
            else self.needed.run_span(tile)
            if digit.dim == -2
            else (0, digit.degrees[0])
            for digit in self.digits
        ]

    def _turn(self, receiver: Sequence[int], ranges: Sequence[tuple[int, int]]) -> int:
        """Return a receiver's place among those that need a tile."""
        turn = 0
        for digit, (first, count) in zip(self.digits, ranges, strict=True):
            mine = ravel([receiver[axis] for axis in digit.axes], digit.degrees)
            turn = turn * count + mine - first
        return turn

    def _copy(self, turn: int, ranges: Sequence[tuple[int, int]]) -> int:
        """Return which replica serves a receiver."""
        if self.same:
            return turn % self.copies
        # In blocks: where both meshes list their ranks in order, neighbours serve neighbours.
        return turn * self.copies // math.prod([count for _, count in ranges])

    def _turns(self, copy: int, ranges: Sequence[tuple[int, int]]) -> range:
        """Return the receivers that a replica serves; the inverse of `_copy`."""
        total = math.prod([count for _, count in ranges])
        if self.same:
            return range(copy, total, self.copies)
        return range(-(-copy * total // self.copies), -(-(copy + 1) * total // self.copies))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One rank's part in a change of layout; boxes are global half-open ranges.

    ``sends`` and ``recvs`` pair a peer with what goes there and comes from there, by ascending
    peer, never the rank itself; ``local`` is what it keeps.
    """

    sends: tuple[tuple[int, Box], ...]
    recvs: tuple[tuple[int, Box], ...]
    local: tuple[Box, ...]


def plan_transfer(src: Layout, dst: Layout, shape: Sequence[int], rank: int) -> Transfer:
    """Plan the point-to-point messages of one rank that change the layout of a tensor.

    The layouts may be on different meshes. Every rank receives only elements that it needs and does
    not hold. If several ranks hold an element, sender and receiver choose the same source, and
    receivers are distributed over the replicas. If both layouts have the same `Partial` on an axis,
    partial values are moved without a reduction. Communicates nothing.

    Args:
        src: Layout of the source.
        dst: Layout of the target.
        shape: Global shape.
        rank: Global rank, in the mesh of ``src`` or of ``dst``.

    Returns:
        The messages of this rank. A box is a rectangular region of the tensor: one half-open range
        ``(start, stop)`` of global indices per dim. ``sends`` and ``recvs`` are pairs
        ``(peer rank, box)``, in the order of peers. ``local`` has the boxes that the rank keeps.

    Raises:
        LayoutError: ``src`` or ``dst`` is not a `Layout`, or is impossible for this shape, or
            partial values would have to be reduced or created.
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
    recvs: list[tuple[int, Box]] = []
    local = []
    for peer, box in pairing.sources(rank):
        if peer == rank:
            local.append(box)
        else:
            recvs.append((peer, box))
    sends = sorted(pairing.targets(rank))
    return Transfer(sends=tuple(sends), recvs=tuple(sorted(recvs)), local=tuple(local))


def same_mesh(src: Layout, dst: Layout) -> bool:
    """Return whether both layouts are on the same ranks in the same shape."""
    return src.mesh_shape == dst.mesh_shape and src.ranks == dst.ranks


def check_pair(src: Layout, dst: Layout, shape: Sequence[int]) -> None:
    """Raise unless a tensor of ``shape`` can go from ``src`` to ``dst``."""
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
    """Raise `LayoutError` unless a target's partial values are those that the source has."""
    if new != old:
        raise LayoutError(
            f"axis {axis} goes from {old} to {new}; a target can keep partial values but not "
            "make them: use Replicate() or Shard(dim)"
        )
