"""Cut what a band shows of a rectangle into rectangles and triangles.

A band shows query ``i`` the keys ``i + lowest <= j <= i + highest``. Its two edges are diagonals.
A tile of rows no taller than the band is wide meets, from left to right, a triangle above the
diagonal, a rectangle and a triangle below the diagonal: no kernel has to read a mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ._intervals import within
from ._masks import Band

Kind = Literal["full", "causal", "anticausal"]
Kernel = Literal["full", "causal"]  # an anticausal square is a causal one, read from its end


@dataclass(frozen=True, slots=True)
class Piece:
    """Query rows and key columns, by position, and which of the pairs are seen.

    ``full``: all. Squares: ``causal``, row ``r`` sees the keys up to the ``r``-th; ``anticausal``,
    from the ``r``-th on.
    """

    rows: range
    keys: range
    kind: Kind


def cut_band(rows: range, keys: range, band: Band) -> Iterator[Piece]:
    """Yield disjoint pieces that together are what the band shows of ``rows`` x ``keys``."""
    lowest, highest = band
    first = rows.start if highest is None else keys.start - highest
    last = rows.stop if lowest is None else keys.stop - lowest
    rows = within(rows, range(first, max(first, last)))
    height = max(1, len(rows))
    if lowest is not None and highest is not None:
        height = max(1, highest - lowest)
    for start in range(rows.start, rows.stop, height):
        yield from _cut_tile(range(start, min(start + height, rows.stop)), keys, lowest, highest)


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
