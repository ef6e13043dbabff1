"""Sets of integers as ascending, disjoint, non-empty ranges."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

Ranges = tuple[range, ...]

_stop = attrgetter("stop")


def joined(pieces: Iterable[range]) -> Ranges:
    """Return ascending pieces without the empty ones, neighbours and overlaps joined."""
    out: list[range] = []
    for piece in pieces:
        if not piece:
            continue
        if out and piece.start <= out[-1].stop:
            out[-1] = range(out[-1].start, max(out[-1].stop, piece.stop))
        else:
            out.append(piece)
    return tuple(out)


def union(pieces: Iterable[range]) -> Ranges:
    """Return the set that pieces in any order cover."""
    return joined(sorted(pieces, key=lambda piece: piece.start))


def within(piece: range, *others: range) -> range:
    """Return the part of ``piece`` that lies in every other range; it may be empty."""
    start = max(piece.start, *(other.start for other in others))
    return range(start, max(start, min(piece.stop, *(other.stop for other in others))))


def overlaps(a: Iterable[range], b: Sequence[range]) -> Iterator[tuple[int, int, range]]:
    """Yield ``(i, j, a[i] and b[j])`` for each pair of the two sets that overlaps, ascending.

    Members of ``b`` that no member of ``a`` overlaps are leapt over.
    """
    j = 0
    for i, piece in enumerate(a):
        start, stop = piece.start, piece.stop
        if j < len(b) and b[j].stop <= start:
            j = bisect_right(b, start, lo=j, key=_stop)
        while j < len(b) and b[j].start < stop:
            other = b[j]
            yield i, j, range(max(start, other.start), min(stop, other.stop))
            if other.stop >= stop:
                break
            j += 1


def size(pieces: Iterable[range]) -> int:
    """Return how many integers disjoint pieces hold."""
    return sum(map(len, pieces))


class Ranks:
    """The order of the members of a set: how many members come before a position."""

    def __init__(self, pieces: Sequence[range]) -> None:
        self._pieces = pieces
        self._starts = [piece.start for piece in pieces]
        self._before = [0]
        for piece in pieces:
            self._before.append(self._before[-1] + len(piece))

    def of(self, piece: range) -> range:
        """Return the ranks of a range that lies inside one of the set's pieces."""
        i = bisect_right(self._starts, piece.start) - 1
        start = self._before[i] + piece.start - self._starts[i]
        return range(start, start + len(piece))
