"""The positions of one view and the ranks that sit there, in closed form."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One way to cut the world: axis names and sizes, and which rank sits at each position.

    A position counts row-major over the view's axes. ``digits`` are (size, stride) pairs, outermost
    first: the position's digits in these sizes, times the strides, sum up to a rank. Where these
    would not ascend along one axis, ``sorted_axis`` is that one, and its groups are sorted.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    digits: tuple[tuple[int, int], ...]
    sorted_axis: int | None = None

    def rank_at(self, position: int) -> int:
        """Return the rank at a position."""
        if self.sorted_axis is not None:
            return self.along(self.sorted_axis, position)[self.index_of(self.sorted_axis, position)]
        return self._sum_digits(position)

    def position_of(self, rank: int) -> int:
        """Return the position of a rank, the inverse of `rank_at`."""
        position, weights = 0, strides_of([size for size, _ in self.digits])
        for (size, stride), weight in zip(self.digits, weights, strict=True):
            position += rank // stride % size * weight
        if self.sorted_axis is None:
            return position
        moved = self.along(self.sorted_axis, position).index(rank)
        moved -= self.index_of(self.sorted_axis, position)
        return position + moved * self.stride(self.sorted_axis)

    def along(self, axis: int, position: int) -> Sequence[int]:
        """Return the ranks at the positions that differ from this one only along an axis."""
        size, stride = self.shape[axis], self.stride(axis)
        first = position - self.index_of(axis, position) * stride
        positions = range(first, first + size * stride, stride)
        if self.in_rank_order:
            return positions
        if self.sorted_axis not in (None, axis):
            return [*map(self.rank_at, positions)]
        digits = _cut_digits(self.digits, stride, size * stride)
        if digits is None:
            ranks = [*map(self._sum_digits, positions)]
        else:
            ranks = _spell(self._sum_digits(first), digits)
        return ranks if self.sorted_axis is None else sorted(ranks)

    def ranks(self) -> Sequence[int]:
        """Return the rank at every position."""
        if self.in_rank_order:
            return range(prod(self.shape))
        ranks = _spell(0, self.digits)
        if self.sorted_axis is not None:
            size, stride = self.shape[self.sorted_axis], self.stride(self.sorted_axis)
            for block in range(0, len(ranks), size * stride):
                for first in range(block, block + stride):
                    along = slice(first, first + size * stride, stride)
                    ranks[along] = sorted(ranks[along])
        return ranks

    @property
    def in_rank_order(self) -> bool:
        """Return whether every rank is its own position."""
        return len(self.digits) == 1 and self.sorted_axis is None

    def stride(self, axis: int) -> int:
        """Return how many positions lie between neighbours on an axis."""
        return prod(self.shape[axis + 1 :])

    def index_of(self, axis: int, position: int) -> int:
        """Return a position's coordinate on an axis."""
        return position // self.stride(axis) % self.shape[axis]

    def _sum_digits(self, position: int) -> int:
        rank = 0
        for size, stride in reversed(self.digits):
            position, digit = divmod(position, size)
            rank += digit * stride
        return rank


def strides_of(sizes: Sequence[int]) -> list[int]:
    """Return how far apart neighbours are on each of some axes, row-major."""
    return [prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _spell(first: int, digits: Sequence[tuple[int, int]]) -> list[int]:
    """Return ``first`` plus what the digits sum up to, for all their values, in order."""
    ranks = [first]
    for size, stride in digits:
        ranks = [rank + digit * stride for rank in ranks for digit in range(size)]
    return ranks


def _cut_digits(
    digits: Sequence[tuple[int, int]], low: int, high: int
) -> list[tuple[int, int]] | None:
    """Return the digits between two weights, None where a weight falls inside a digit's unit."""
    between, upper = [], prod(size for size, _ in digits)
    for size, stride in digits:
        lower = upper // size
        bottom, top = max(lower, low), min(upper, high)
        if bottom < top:
            if bottom % lower or top % bottom or upper % top:
                return None
            between.append((top // bottom, stride * (bottom // lower)))
        upper = lower
    return between
