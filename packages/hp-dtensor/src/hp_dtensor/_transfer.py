"""Who sends which box to whom, from interval arithmetic: the cost grows with peers, not ranks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ._errors import CrossMeshError, PartialSourceError, PartialTargetError, PlacementTypeError
from ._layout import (
    Box,
    Layout,
    check_sizes,
    chunk,
    chunk_at,
    intersect,
    ravel,
    unravel,
    volume,
)
from ._placements import Partial, Replicate, Shard


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
    """Return what ``rank`` sends and receives to take a tensor from ``src`` to ``dst``.

    Every rank receives exactly the elements that it needs and does not hold. Among replicas the
    source is chosen by a rule that both sides evaluate alone: axes that both layouts replicate keep
    the receiver's coordinate, as do axes along which all receivers need the tile alike (near); over
    the other replicas a tile's receivers are dealt out in turn (balanced). An axis with the same
    partial values in both layouts takes no part: each coordinate moves its own values.

    Communicates nothing. Raises `CrossMeshError`, `PartialSourceError`, `PartialTargetError`,
    `ShardDimError`, `RankNotInMesh`, `PlacementTypeError` for what is no `Layout`, and
    `LayoutError` for negative sizes.
    """
    check_pair(src, dst, shape)
    for axis in range(len(src.mesh_shape)):
        if isinstance(src.placements[axis], Partial) and (
            src.placements[axis] != dst.placements[axis] and src.mesh_shape[axis] > 1
        ):
            raise PartialSourceError(
                f"a transfer moves data and reduces none: axis {axis} goes from "
                f"{src.placements[axis]} to {dst.placements[axis]}; reduce it first"
            )
    pair = _Pair(src, dst, tuple(shape))
    coordinate = src.coordinate(rank)
    recvs = []
    local = []
    for source, box in pair.sources(coordinate):
        if source is None:
            local.append(box)
        else:
            recvs.append((src.rank_at(source), box))
    sends = [(dst.rank_at(target), box) for target, box in pair.targets(coordinate)]
    return Transfer(sends=tuple(sorted(sends)), recvs=tuple(sorted(recvs)), local=tuple(local))


def check_pair(src: Layout, dst: Layout, shape: Sequence[int]) -> None:
    """Raise unless a tensor of ``shape`` can go from ``src`` to ``dst``."""
    for side, layout in (("source", src), ("target", dst)):
        if not isinstance(layout, Layout):
            raise PlacementTypeError(
                f"the {side} must be a Layout, got {layout!r}; use Layout(mesh_shape, placements)"
            )
    check_sizes(shape)
    if src.mesh_shape != dst.mesh_shape or src.ranks != dst.ranks:
        raise CrossMeshError(
            f"source and target lie on different meshes: shape {src.mesh_shape} and shape "
            f"{dst.mesh_shape}{'' if src.ranks == dst.ranks else ', or of different ranks'}; "
            "use one mesh for both"
        )
    src.check(len(shape))
    dst.check(len(shape))
    for axis, (old, new) in enumerate(zip(src.placements, dst.placements, strict=True)):
        if isinstance(new, Partial) and new != old and src.mesh_shape[axis] > 1:
            raise PartialTargetError(
                f"axis {axis} goes from {old} to {new}; a target can keep partial values but not "
                "make them: use Replicate() or Shard(dim)"
            )


class _Pair:
    """The roles that the axes play in one change of layout; see `plan_transfer`."""

    def __init__(self, src: Layout, dst: Layout, shape: tuple[int, ...]) -> None:
        self.src, self.dst, self.shape = src, dst, shape
        self.mesh_shape = src.mesh_shape
        self.chains = [src.chain(dim) for dim in range(len(shape))]
        self.src_degrees = [src.degrees(dim) for dim in range(len(shape))]
        self.dst_chains = [dst.chain(dim) for dim in range(len(shape))]
        self.dst_degrees = [dst.degrees(dim) for dim in range(len(shape))]
        self.owners = [a for chain in self.chains for a in chain]
        self.pool: list[int] = []  # replicas among which a tile's receivers are dealt out
        self.free: list[int] = []  # axes of receivers that say nothing about which tile they need
        for axis, (old, new) in enumerate(zip(src.placements, dst.placements, strict=True)):
            if isinstance(old, Shard):
                if not isinstance(new, Shard) or not self.chains[new.dim]:
                    self.free.append(axis)
            elif isinstance(old, Replicate) and isinstance(new, Shard) and self.chains[new.dim]:
                self.pool.append(axis)
        self.pool_degrees = [self.mesh_shape[a] for a in self.pool]
        self.free_degrees = [self.mesh_shape[a] for a in self.free]
        self.split = [dim for dim, chain in enumerate(self.chains) if chain]

    def sources(self, me: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...] | None, Box]]:
        """Yield where each piece of my target box comes from; None is here."""
        needed = self._target_box(me)
        if volume(needed) == 0:
            return
        tiles = [list(self._tiles(dim, *needed[dim])) for dim in range(len(self.shape))]
        for combination in product(*tiles):
            source = list(me)
            for dim, (index, _) in enumerate(combination):
                for axis, i in zip(self.chains[dim], index, strict=True):
                    source[axis] = i
            tile = tuple(interval for _, interval in combination)
            piece = intersect(tile, needed)
            if all(source[axis] == me[axis] for axis in self.owners):
                yield None, piece
                continue
            turn = self._turn(tile, me) % math.prod(self.pool_degrees)
            for axis, i in zip(self.pool, unravel(turn, self.pool_degrees), strict=True):
                source[axis] = i
            yield tuple(source), piece

    def targets(self, me: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Box]]:
        """Yield who gets which piece of my source box from me."""
        tile = self.src.box_at(self.shape, me)
        if volume(tile) == 0:
            return
        radices = self._radices(tile)
        mine = ravel([me[a] for a in self.pool], self.pool_degrees)
        for turn in range(mine, math.prod(radices), math.prod(self.pool_degrees)):
            target = list(me)
            digits = unravel(turn, radices)
            for axis, i in zip(self.free, digits, strict=False):
                target[axis] = i
            for dim, digit in zip(self.split, digits[len(self.free) :], strict=True):
                first = ravel(
                    chunk_at(self.shape[dim], self.dst_degrees[dim], tile[dim][0]),
                    self.dst_degrees[dim],
                )
                index = unravel(first + digit, self.dst_degrees[dim])
                for axis, i in zip(self.dst_chains[dim], index, strict=True):
                    target[axis] = i
            if all(target[axis] == me[axis] for axis in self.owners):
                continue  # it holds this tile itself
            piece = intersect(tile, self._target_box(target))
            if volume(piece):
                yield tuple(target), piece

    def _target_box(self, coordinate: Sequence[int]) -> Box:
        return tuple(
            chunk(length, degrees, [coordinate[a] for a in chain])
            for length, degrees, chain in zip(
                self.shape, self.dst_degrees, self.dst_chains, strict=True
            )
        )

    def _tiles(
        self, dim: int, lo: int, hi: int
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
        while lo < hi:
            index = chunk_at(self.shape[dim], self.src_degrees[dim], lo)
            interval = chunk(self.shape[dim], self.src_degrees[dim], index)
            yield index, interval
            lo = interval[1]

    def _span(self, dim: int, tile: Box) -> tuple[int, int]:
        """Return the first and last target chunk of ``dim`` that meets the tile."""
        length, degrees = self.shape[dim], self.dst_degrees[dim]
        lo, hi = tile[dim]
        return (
            ravel(chunk_at(length, degrees, lo), degrees),
            ravel(chunk_at(length, degrees, hi - 1), degrees),
        )

    def _radices(self, tile: Box) -> list[int]:
        spans = [self._span(dim, tile) for dim in self.split]
        # Chunks come last: where replicas and chunks are many, neighbours in turn differ in chunk,
        # while along a free axis one receiver may hold the tile itself.
        return self.free_degrees + [last - first + 1 for first, last in spans]

    def _turn(self, tile: Box, target: tuple[int, ...]) -> int:
        """Return a receiver's place among those that need the tile; `targets` inverts it."""
        digits = [target[a] for a in self.free]
        for dim in self.split:
            mine = ravel([target[a] for a in self.dst_chains[dim]], self.dst_degrees[dim])
            digits.append(mine - self._span(dim, tile)[0])
        return ravel(digits, self._radices(tile))
