"""How one tensor lies over a whole mesh: which boxes of it each rank holds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from .._errors import LayoutError, RaggedSizesError, RankNotInMesh, ShardDimError
from ._boxes import Box as Box
from ._boxes import run_boxes
from ._intervals import Interval, Split, chunk, pieces, ravel, unravel
from ._normal_form import ShardOrder as ShardOrder
from ._normal_form import checked_placements, checked_ranks, checked_shape, ordered
from ._placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard


@dataclass(frozen=True, slots=True)
class Layout:
    """One placement for each axis of a mesh, with the order in which axes shard the same dim.

    ``shard_order`` maps a tensor dim to the axes that shard it, the first splits first. Dims left
    out are split in mesh order, or in the order that split factors spell; see `StridedShard`. A
    ragged axis splits what the others leave. ``ranks`` are the mesh's ranks in row-major order,
    ``0 .. prod(mesh_shape) - 1`` unless given. Equal layouts compare equal however they were
    spelled.
    """

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    shard_order: ShardOrder | Mapping[int, Sequence[int]] | None = None
    ranks: Sequence[int] | None = None
    _positions: Mapping[int, int] | None = field(
        init=False, repr=False, compare=False, default=None
    )

    def __post_init__(self) -> None:
        _set(self, "mesh_shape", checked_shape(self.mesh_shape))
        placements = checked_placements(self.placements, self.mesh_shape)
        placements, order = ordered(placements, self.mesh_shape, self.shard_order)
        _set(self, "placements", placements)
        _set(self, "shard_order", order)
        ranks = checked_ranks(self.ranks, self.mesh_shape)
        _set(self, "ranks", ranks)
        if isinstance(ranks, tuple):
            _set(self, "_positions", {rank: place for place, rank in enumerate(ranks)})

    def __hash__(self) -> int:
        # Many ranks would make each look-up in a cache slow; the first and last tell enough.
        ends = None if self.ranks is None else (self.ranks[0], self.ranks[-1])
        return hash((self.mesh_shape, self.placements, self.shard_order, ends))

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.mesh_shape)

    @property
    def has_partial(self) -> bool:
        """Return whether any axis holds partial values."""
        return any(isinstance(p, Partial) for p in self.placements)

    @property
    def is_plain(self) -> bool:
        """Return whether every rank holds at most one box, whatever the shape."""
        return not any(isinstance(p, StridedShard | RaggedShard) for p in self.placements)

    @property
    def ragged(self) -> tuple[int, RaggedShard] | None:
        """Return the axis that holds ragged runs, with its placement; None if there is none."""
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, RaggedShard):
                return axis, placement
        return None

    def chain(self, dim: int) -> tuple[int, ...]:
        """Return the axes that shard tensor dim ``dim``, the one that splits first in front."""
        for dim_in_order, axes in _pairs(self):
            if dim_in_order == dim:
                return axes
        return tuple(
            a for a, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == dim
        )

    def degrees(self, dim: int) -> tuple[int, ...]:
        """Return the degrees of `chain`."""
        return tuple(self.mesh_shape[a] for a in self.chain(dim))

    def splits(self, dim: int) -> tuple[Split, ...]:
        """Return the degree of each axis of `chain` with its split factor, 1 for a plain shard."""
        found = []
        for axis in self.chain(dim):
            placement = self.placements[axis]
            factor = placement.split_factor if isinstance(placement, StridedShard) else 1
            found.append((self.mesh_shape[axis], factor))
        return tuple(found)

    def check(self, ndim: int) -> None:
        """Raise `ShardDimError` unless every sharded dim is one of a tensor with ``ndim`` dims."""
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, RaggedShard):
                wrong = len(placement.dims) > ndim
            else:
                wrong = isinstance(placement, Shard | StridedShard) and not (
                    0 <= placement.dim < ndim
                )
            if wrong:
                legal = f"0 to {ndim - 1}" if ndim else "none, as it is a scalar"
                raise ShardDimError(
                    f"{placement} on mesh axis {axis} of a tensor with {ndim} dims; "
                    f"dims that can be sharded: {legal}"
                )

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise unless a tensor of ``shape`` can lie so.

        `LayoutError` for negative sizes, `ShardDimError`, and `RaggedSizesError` where ragged runs
        are not all of what they divide.
        """
        check_sizes(shape)
        self.check(len(shape))
        if self.ragged is None:
            return
        axis, placement = self.ragged
        count = 1
        for dim in placement.dims:
            others = math.prod(self.degrees(dim))
            plain = all(factor == 1 for _, factor in self.splits(dim))
            if shape[dim] % others or not plain:
                raise RaggedSizesError(
                    f"{placement} on mesh axis {axis} runs over dim {dim} of length {shape[dim]}, "
                    f"which the axes {self.chain(dim)} split; they must cut it into {others} equal "
                    "consecutive parts"
                )
            count *= shape[dim] // others
        if placement.starts[-1] != count:
            raise RaggedSizesError(
                f"the sizes of {placement} on mesh axis {axis} sum to {placement.starts[-1]}; they "
                f"must sum to {count}, the elements of dims {placement.dims} of {tuple(shape)} "
                "there"
            )

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the rank's position on each axis; raises `RankNotInMesh`."""
        if (position := self._position(rank)) is None:
            held = f"0 to {self.size - 1}" if self.ranks is None else f"{self.ranks}"
            raise RankNotInMesh(
                f"rank {rank} is not in the mesh of shape {self.mesh_shape}; its ranks: {held}"
            )
        return unravel(position, self.mesh_shape)

    def holds(self, rank: int) -> bool:
        """Return whether the mesh has the rank."""
        return self._position(rank) is not None

    def _position(self, rank: int) -> int | None:
        if self._positions is not None:
            return self._positions.get(rank)
        ranks = range(self.size) if self.ranks is None else self.ranks
        return ranks.index(rank) if rank in ranks else None

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a position."""
        position = ravel(coordinate, self.mesh_shape)
        return position if self.ranks is None else self.ranks[position]

    def intervals_at(
        self, shape: Sequence[int], coordinate: Sequence[int]
    ) -> list[tuple[Interval, ...]]:
        """Return the ranges of each dim at a position, before a ragged axis divides them."""
        return [
            self.intervals_of(shape, dim, [coordinate[a] for a in self.chain(dim)])
            for dim in range(len(shape))
        ]

    def intervals_of(
        self, shape: Sequence[int], dim: int, index: Sequence[int]
    ) -> tuple[Interval, ...]:
        """Return the ranges of one dim at a place in its chain, ascending."""
        return pieces(shape[dim], self.splits(dim), index)

    def run_at(self, coordinate: Sequence[int]) -> Interval:
        """Return the places, in what a ragged axis divides, that a position holds."""
        if self.ragged is None:
            raise LayoutError(f"{self} has no ragged axis")
        axis, placement = self.ragged
        return placement.starts[coordinate[axis]], placement.starts[coordinate[axis] + 1]

    def box_at(self, shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        """Return the box at a position of a layout that `is_plain`, empty where it holds none."""
        return tuple(
            chunk(length, self.degrees(dim), [coordinate[a] for a in self.chain(dim)])
            for dim, length in enumerate(shape)
        )

    def boxes_at(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[Box, ...]:
        """Return the boxes at a position, in the order in which the local tensor holds them."""
        grid = self.intervals_at(shape, coordinate)
        if self.ragged is None:
            return tuple(product(*grid))
        leading = len(self.ragged[1].dims)
        if not all(grid[:leading]):
            return ()
        frame = tuple(ranges[0] for ranges in grid[:leading])
        runs = run_boxes(frame, *self.run_at(coordinate))
        return tuple((*run, *rest) for run in runs for rest in product(*grid[leading:]))

    def boxes(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        """Return the boxes of a tensor of ``shape`` that ``rank`` holds; none if it holds nothing.

        Raises `ShardDimError`, `RaggedSizesError`, `RankNotInMesh`, and `LayoutError` for negative
        sizes.
        """
        self.check_shape(shape)
        return self.boxes_at(shape, self.coordinate(rank))

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of ``shape`` that ``rank`` holds."""
        self.check_shape(shape)
        coordinate = self.coordinate(rank)
        lengths = [
            sum(hi - lo for lo, hi in ranges) for ranges in self.intervals_at(shape, coordinate)
        ]
        if self.ragged is not None:
            start, stop = self.run_at(coordinate)
            lengths[: len(self.ragged[1].dims)] = [stop - start]
        return tuple(lengths)

    def is_even(self, shape: Sequence[int]) -> bool:
        """Return whether all ranks hold one box of one shape, without remainders on the way."""
        return self.is_plain and all(
            n % math.prod(self.degrees(dim)) == 0 for dim, n in enumerate(shape)
        )

    def with_chains(self, chains: Mapping[int, Sequence[int]]) -> "Layout":
        """Return this layout with dims sharded as ``chains`` says; other axes keep what they have.

        Axes that were sharded and are in no chain become replicated; an axis that stays on its dim
        keeps its split factor.
        """
        placements: list[Placement] = [
            Replicate() if isinstance(p, Shard | StridedShard) else p for p in self.placements
        ]
        for dim, axes in chains.items():
            for axis in axes:
                old = self.placements[axis]
                strided = isinstance(old, StridedShard) and old.dim == dim
                placements[axis] = old if strided else Shard(dim)
        order = tuple((dim, tuple(axes)) for dim, axes in chains.items() if axes)
        return replace(self, placements=tuple(placements), shard_order=order)

    def __str__(self) -> str:
        text = "(" + ", ".join(map(str, self.placements)) + ")"
        for dim, axes in _pairs(self):
            text += f" dim {dim} by axes {axes}"
        return text


def check_sizes(shape: Sequence[int]) -> None:
    """Raise `LayoutError` for a global shape with negative sizes."""
    if any(length < 0 for length in shape):
        raise LayoutError(f"shape={tuple(shape)} has negative sizes; give sizes of 0 or more")


def _pairs(layout: Layout) -> ShardOrder:
    order = layout.shard_order
    # __post_init__ leaves a normalised tuple or None.
    return order if isinstance(order, tuple) else ()


def _set(layout: Layout, name: str, value: object) -> None:
    object.__setattr__(layout, name, value)
