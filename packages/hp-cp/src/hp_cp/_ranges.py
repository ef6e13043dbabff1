"""Sets of positions as ascending, disjoint, non-empty ranges, and the pieces of a band.

A band shows query ``i`` the keys ``i + lowest <= j <= i + highest``. Its two edges are diagonals.
A tile of rows no taller than the band is wide meets, from left to right, a triangle above the
diagonal, a rectangle and a triangle below the diagonal: no kernel has to read a mask.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

Ranges = tuple[range, ...]
Band = tuple[int | None, int | None]  # the least and the greatest `j - i`, where there is one
Kind = Literal["full", "causal", "anticausal", "window", "masked"]
Window = tuple[int | None, int | None]  # how far left and right of the diagonal, where bounded
Kernel = Literal["full", "causal"]  # an anticausal square is a causal one, read from its end

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


def members(pieces: Iterable[range], places: range) -> Ranges:
    """Return the members of a set that are at some places of its order."""
    found, before = [], 0
    for piece in pieces:
        found.append(piece[max(0, places.start - before) : max(0, places.stop - before)])
        before += len(piece)
    return tuple(filter(None, found))


@dataclass(frozen=True, slots=True)
class Piece:
    """Query rows and key columns, by position, and which of the pairs are seen.

    ``full``: all. Squares: ``causal``, row ``r`` sees the keys up to the ``r``-th; ``anticausal``,
    from the ``r``-th on. ``window``: those ``window`` places left and right of the diagonal that
    ends in the last row and the last key, None where that side is open. ``masked``: those that the
    mask shows at their positions.
    """

    rows: range
    keys: range
    kind: Kind
    window: Window = (None, None)


def banded(rows: range, keys: range, band: Band) -> Piece | None:
    """Return what the band shows of ``rows`` x ``keys`` as one piece; None where that is nothing.

    Without the rows that see no key and the keys that no row sees, so that the diagonal of a window
    is inside of it.
    """
    lowest, highest = band
    if highest is not None:
        rows = rows[max(0, keys.start - highest - rows.start) :]
        keys = keys[: max(0, rows.stop + highest - keys.start)]
    if lowest is not None:
        rows = rows[: max(0, keys.stop - lowest - rows.start)]
        keys = keys[max(0, rows.start + lowest - keys.start) :]
    if not rows or not keys:
        return None
    left = right = None
    if lowest is not None and rows.stop - 1 + lowest > keys.start:
        left = keys.stop - rows.stop - lowest
    if highest is not None and rows.start + highest < keys.stop - 1:
        right = rows.stop + highest - keys.stop
    if left is None and right is None:
        return Piece(rows, keys, "full")
    if (left, right) == (None, 0) and len(rows) == len(keys):
        return Piece(rows, keys, "causal")
    return Piece(rows, keys, "window", (left, right))


def band_of(window: Window, diagonal: int) -> Band:
    """Return the band of a window around the diagonal of ``j - i = diagonal``."""
    left, right = window
    return None if left is None else diagonal - left, None if right is None else diagonal + right


def cut_window(piece: Piece) -> Iterator[Piece]:
    """Yield disjoint pieces without windows that together are what a ``window`` shows."""
    left, right = piece.window
    band = band_of(piece.window, piece.keys.stop - piece.rows.stop)
    height = len(piece.rows)
    if left is not None and right is not None:
        height = max(1, left + right)
    for i in range(0, len(piece.rows), height):
        yield from _cut_tile(piece.rows[i : i + height], piece.keys, *band)


def _cut_tile(rows: range, keys: range, lowest: int | None, highest: int | None) -> Iterator[Piece]:
    left, right = keys.start, keys.stop
    if lowest is not None:
        left = rows.stop + lowest
        if lowest != highest:  # a band of one diagonal has one triangle, of one row
            yield from _anticausal(rows, rows.start + lowest, keys)
    if highest is not None:
        right = rows.start + highest
    if middle := within(keys, range(left, max(left, right))):
        yield Piece(rows, middle, "full")
    if highest is not None:
        yield from _causal(rows, rows.start + highest, keys)


def _anticausal(rows: range, start: int, keys: range) -> Iterator[Piece]:
    """Yield what ``keys`` leave of the square over ``rows`` and the keys from ``start`` on."""
    seen = within(range(start, start + len(rows)), keys)
    shift = rows.start - start
    if seen:
        if above := range(rows.start, seen.start + shift):
            yield Piece(above, seen, "full")
        yield Piece(range(seen.start + shift, seen.stop + shift), seen, "anticausal")


def _causal(rows: range, start: int, keys: range) -> Iterator[Piece]:
    seen = within(range(start, start + len(rows)), keys)
    shift = rows.start - start
    if seen:
        yield Piece(range(seen.start + shift, seen.stop + shift), seen, "causal")
        if below := range(seen.stop + shift, rows.stop):
            yield Piece(below, seen, "full")
