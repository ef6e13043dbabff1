"""Boxes of a tensor: one half-open global range for each dim."""

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Box: TypeAlias = tuple[tuple[int, int], ...]


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod([hi - lo for lo, hi in box])


def extent(box: Box) -> tuple[int, ...]:
    """Return the lengths of a box."""
    return tuple([hi - lo for lo, hi in box])


def intersect(a: Box, b: Box) -> Box:
    """Return the common part of two boxes, of volume zero where they do not meet."""
    ranges = []
    for (lo, hi), (other_lo, other_hi) in zip(a, b, strict=True):
        start = max(lo, other_lo)
        ranges.append((start, max(start, min(hi, other_hi))))
    return tuple(ranges)


def run_boxes(frame: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield, in row-major order, the boxes that make up places ``start .. stop`` of ``frame``.

    Of a frame with ``n`` dims at most ``2 n - 1``; the elements of each are consecutive places.
    """
    if start >= stop:
        return
    if len(frame) == 1:
        yield ((frame[0][0] + start, frame[0][0] + stop),)
        return
    lo = frame[0][0]
    row = volume(frame[1:])
    first, begin = divmod(start, row)
    last, end = divmod(stop, row)
    if first == last:
        for rest in run_boxes(frame[1:], begin, end):
            yield ((lo + first, lo + first + 1), *rest)
        return
    if begin:
        for rest in run_boxes(frame[1:], begin, row):
            yield ((lo + first, lo + first + 1), *rest)
        first += 1
    if first < last:
        yield ((lo + first, lo + last), *frame[1:])
    for rest in run_boxes(frame[1:], 0, end):
        yield ((lo + last, lo + last + 1), *rest)


def place_in(frame: Box, corner: Sequence[int]) -> int:
    """Return the row-major place of a global position in ``frame``."""
    place = 0
    for (lo, hi), at in zip(frame, corner, strict=True):
        place = place * (hi - lo) + at - lo
    return place
