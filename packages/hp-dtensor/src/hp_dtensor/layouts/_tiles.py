"""Who holds a region of a tensor under a layout, found without asking every rank."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TypeAlias

from ._boxes import Box, intersect, place_in, run_boxes, volume
from ._intervals import Interval, chunk, chunk_at, held_at, ravel
from ._layout import Layout
from ._placements import RaggedShard, Replicate, Shard, StridedShard

Assignment: TypeAlias = tuple[tuple[int, int], ...]  # (axis, coordinate) of the axes that shard


class Tiles:
    """The tiles into which a layout cuts a tensor of ``shape``; a tile is one box of some ranks.

    The tiles of a position are the boxes of `Layout.boxes_at`, and so in number few.
    """

    def __init__(self, layout: Layout, shape: tuple[int, ...]) -> None:
        self.layout, self.shape = layout, shape
        dims = range(len(shape))
        self.chains = [layout.chain(dim) for dim in dims]
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
        return bool(self.chains[dim]) or dim < self.leading

    def at(self, coordinate: Sequence[int]) -> tuple[Box, ...]:
        """Return the tiles at a position."""
        if not self.is_plain:
            return self.layout.boxes_at(self.shape, coordinate)
        box = tuple(
            [
                chunk(length, degrees, [coordinate[a] for a in chain]) if chain else (0, length)
                for length, degrees, chain in zip(
                    self.shape, self.degrees, self.chains, strict=True
                )
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
        length, chain = self.shape[dim], self.chains[dim]
        if not chain:
            yield (), (0, length), region
            return
        while lo < hi:
            if self.plain[dim]:
                index = chunk_at(length, self.degrees[dim], lo)
                whole = chunk(length, self.degrees[dim], index)
            else:
                index, whole = self._block(dim, lo)
            yield tuple(zip(chain, index, strict=True)), whole, (lo, min(hi, whole[1]))
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

        Chunks are counted row-major in the order of `Layout.chain`. Where a dim is cut into blocks
        this is all of them.
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
        if any(self.chains[dim] for dim in range(self.leading)):
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
