"""How one tensor lies over a whole mesh: which box of it each rank holds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ._errors import (
    LayoutError,
    MixedPartialError,
    PlacementCountError,
    PlacementTypeError,
    RankNotInMesh,
    ShardDimError,
    ShardOrderError,
)
from ._placements import Partial, Placement, Replicate, Shard, in_tuple

Box: TypeAlias = tuple[tuple[int, int], ...]
ShardOrder: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """One placement for each axis of a mesh, with the order in which axes shard the same dim.

    ``shard_order`` maps a tensor dim to the axes that shard it, the first splits first; dims left
    out are split in mesh order. ``ranks`` are the mesh's ranks in row-major order, ``0 ..
    prod(mesh_shape) - 1`` unless given. Equal layouts compare equal however the order was spelled.
    """

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    shard_order: ShardOrder | Mapping[int, Sequence[int]] | None = None
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _set(self, "mesh_shape", tuple(self.mesh_shape))
        _set(self, "placements", in_tuple(self.placements))
        if any(degree < 1 for degree in self.mesh_shape):
            raise RankNotInMesh(f"a mesh of shape {self.mesh_shape} has no ranks")
        if len(self.placements) != len(self.mesh_shape):
            raise PlacementCountError(
                f"{len(self.placements)} placements for a mesh of shape {self.mesh_shape}; give "
                f"{len(self.mesh_shape)}, one for each axis"
            )
        for placement in self.placements:
            if not isinstance(placement, Replicate | Shard | Partial):
                raise PlacementTypeError(
                    f"{placement!r} is no placement of a layout; use Replicate(), Shard(dim) or "
                    "Partial(op)"
                )
        if len(ops := {p.op for p in self.placements if isinstance(p, Partial)}) > 1:
            raise MixedPartialError(
                f"partial values with {' and '.join(sorted(ops))} have no defined order of "
                "reduction; use one op on all axes, or reduce one axis first"
            )
        _set(self, "shard_order", self._checked_order())
        if self.ranks is not None:
            ranks = tuple(self.ranks)
            if len(set(ranks)) != math.prod(self.mesh_shape) or len(set(ranks)) != len(ranks):
                raise RankNotInMesh(
                    f"a mesh of shape {self.mesh_shape} needs {math.prod(self.mesh_shape)} "
                    f"different ranks, got {len(ranks)}"
                )
            _set(self, "ranks", None if ranks == tuple(range(len(ranks))) else ranks)

    def _checked_order(self) -> ShardOrder | None:
        given = self.shard_order
        if given is None:
            return None
        pairs = given.items() if isinstance(given, Mapping) else given
        kept = []
        for dim, axes in sorted((dim, tuple(axes)) for dim, axes in pairs):
            in_mesh_order = tuple(a for a, p in enumerate(self.placements) if p == Shard(dim))
            if tuple(sorted(axes)) != in_mesh_order:
                raise ShardOrderError(
                    f"shard order {axes} for dim {dim}, which the axes {in_mesh_order} shard; "
                    "list each of them once, the one that splits first in front"
                )
            if axes != in_mesh_order:
                kept.append((dim, axes))
        return tuple(kept) or None

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.mesh_shape)

    @property
    def has_partial(self) -> bool:
        """Return whether any axis holds partial values."""
        return any(isinstance(p, Partial) for p in self.placements)

    def chain(self, dim: int) -> tuple[int, ...]:
        """Return the axes that shard tensor dim ``dim``, the one that splits first in front."""
        for ordered, axes in _pairs(self):
            if ordered == dim:
                return axes
        return tuple(
            a for a, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == dim
        )

    def degrees(self, dim: int) -> tuple[int, ...]:
        """Return the degrees of `chain`."""
        return tuple(self.mesh_shape[a] for a in self.chain(dim))

    def check(self, ndim: int) -> None:
        """Raise `ShardDimError` unless every sharded dim is one of a tensor with ``ndim`` dims."""
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard) and not 0 <= placement.dim < ndim:
                legal = f"0 to {ndim - 1}" if ndim else "none, as it is a scalar"
                raise ShardDimError(
                    f"{placement} on mesh axis {axis} of a tensor with {ndim} dims; "
                    f"dims that can be sharded: {legal}"
                )

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the rank's position on each axis; raises `RankNotInMesh`."""
        position = rank
        if self.ranks is not None:
            position = self.ranks.index(rank) if rank in self.ranks else -1
        if not 0 <= position < self.size:
            held = f"0 to {self.size - 1}" if self.ranks is None else f"{self.ranks}"
            raise RankNotInMesh(
                f"rank {rank} is not in the mesh of shape {self.mesh_shape}; its ranks: {held}"
            )
        return unravel(position, self.mesh_shape)

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a position."""
        position = ravel(coordinate, self.mesh_shape)
        return position if self.ranks is None else self.ranks[position]

    def box_at(self, shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        """Return the half-open global ranges held at a position, one for each tensor dim."""
        box = []
        for dim, length in enumerate(shape):
            axes = self.chain(dim)
            box.append(chunk(length, self.degrees(dim), [coordinate[a] for a in axes]))
        return tuple(box)

    def boxes(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        """Return the boxes of a tensor of ``shape`` that ``rank`` holds; none if it holds nothing.

        Raises `ShardDimError`, `RankNotInMesh`, and `LayoutError` for negative sizes.
        """
        check_sizes(shape)
        self.check(len(shape))
        box = self.box_at(shape, self.coordinate(rank))
        return () if volume(box) == 0 else (box,)

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of ``shape`` that ``rank`` holds."""
        check_sizes(shape)
        self.check(len(shape))
        return tuple(hi - lo for lo, hi in self.box_at(shape, self.coordinate(rank)))

    def is_even(self, shape: Sequence[int]) -> bool:
        """Return whether all ranks hold parts of one shape, without remainders on the way."""
        return all(n % math.prod(self.degrees(dim)) == 0 for dim, n in enumerate(shape))

    def with_chains(self, chains: Mapping[int, Sequence[int]]) -> "Layout":
        """Return this layout with dims sharded as ``chains`` says; other axes keep what they have.

        Axes that were sharded and are in no chain become replicated.
        """
        placements: list[Placement] = [
            Replicate() if isinstance(p, Shard) else p for p in self.placements
        ]
        for dim, axes in chains.items():
            for axis in axes:
                placements[axis] = Shard(dim)
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


def chunk(length: int, degrees: Sequence[int], index: Sequence[int]) -> tuple[int, int]:
    """Return the range left of ``0 .. length`` after one ``torch.chunk`` for each degree."""
    lo, hi = 0, length
    for degree, i in zip(degrees, index, strict=True):
        step = -(-(hi - lo) // degree)
        lo = min(lo + step * i, hi)
        hi = min(lo + step, hi)
    return lo, hi


def chunk_at(length: int, degrees: Sequence[int], position: int) -> tuple[int, ...]:
    """Return the index of the chunk that holds ``position``; the inverse of `chunk`."""
    lo, hi = 0, length
    index = []
    for degree in degrees:
        step = -(-(hi - lo) // degree)
        index.append((position - lo) // step)
        lo += step * index[-1]
        hi = min(lo + step, hi)
    return tuple(index)


def ravel(index: Sequence[int], degrees: Sequence[int]) -> int:
    """Return the row-major position of ``index``."""
    position = 0
    for i, degree in zip(index, degrees, strict=True):
        position = position * degree + i
    return position


def unravel(position: int, degrees: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major index at ``position``; the inverse of `ravel`."""
    index = []
    for degree in reversed(degrees):
        position, i = divmod(position, degree)
        index.append(i)
    return tuple(reversed(index))


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(hi - lo for lo, hi in box)


def intersect(a: Box, b: Box) -> Box:
    """Return the common part of two boxes, of volume zero where they do not meet."""
    ranges = []
    for (lo, hi), (other_lo, other_hi) in zip(a, b, strict=True):
        start = max(lo, other_lo)
        ranges.append((start, max(start, min(hi, other_hi))))
    return tuple(ranges)


def _pairs(layout: Layout) -> ShardOrder:
    order = layout.shard_order
    # __post_init__ leaves a normalised tuple or None.
    return order if isinstance(order, tuple) else ()


def _set(layout: Layout, name: str, value: object) -> None:
    object.__setattr__(layout, name, value)
