"""Match receivers with senders among replicas, by a rule that each side evaluates alone."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..layouts._boxes import Box, intersect, volume
from ..layouts._intervals import ravel, unravel
from ..layouts._layout import Layout
from ..layouts._placements import RaggedShard, Shard, StridedShard
from ..layouts._tiles import Tiles


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
            new = self.dst.placements[axis]
            dims: tuple[int, ...] = ()
            if isinstance(new, RaggedShard):
                dims = new.dims
            elif isinstance(new, Shard | StridedShard):
                dims = (new.dim,)
            if any(self.held.divided(dim) for dim in dims):
                found.append(axis)
        return tuple(found)

    def _digits(self) -> tuple[_Digit, ...]:
        degrees = self.dst.mesh_shape
        kept = set(self.held.free) - set(self.pool) if self.same else set[int]()
        parts = [
            _Digit(chain, self.needed.degrees[dim], dim)
            for dim, chain in enumerate(self.needed.chains)
            if chain and (not self.same or self.held.divided(dim))
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
