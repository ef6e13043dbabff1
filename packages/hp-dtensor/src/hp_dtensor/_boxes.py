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


Interval: TypeAlias = tuple[int, int]
Split: TypeAlias = tuple[int, int]  # (degree, factor)


def chunk(length: int, degrees: Sequence[int], index: Sequence[int]) -> Interval:
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


def pieces(length: int, splits: Sequence[Split], index: Sequence[int]) -> tuple[Interval, ...]:
    """Return the ascending ranges of ``0 .. length`` that ``index`` holds after all splits."""
    if all(factor == 1 for _, factor in splits):
        lo, hi = chunk(length, [degree for degree, _ in splits], index)
        return ((lo, hi),) if lo < hi else ()
    held: list[Interval] = [(0, length)] if length else []
    for (degree, factor), i in zip(splits, index, strict=True):
        total = sum(hi - lo for lo, hi in held)
        block = -(-total // factor) or 1
        places = []
        for start in range(0, total, block):
            lo, hi = chunk(min(block, total - start), (degree,), (i,))
            places.append((start + lo, start + hi))
        held = _taken(held, places)
    return tuple(held)


def held_at(length: int, splits: Sequence[Split], position: int) -> tuple[tuple[int, ...], int]:
    """Return who holds ``position`` after all splits, and the end of the range it is held in.

    Ranges are those of `pieces`.
    """
    index = []
    total, place, run = length, position, length - position
    for degree, factor in splits:
        block = -(-total // factor)
        number, offset = divmod(place, block)
        here = min(block, total - number * block)
        step = -(-here // degree)
        i, within = divmod(offset, step)
        run = min(run, min(step * (i + 1), here) - offset)
        index.append(i)
        # Blocks before the one that holds a position are full.
        full, last = divmod(total, block)
        mine = _chunk_length(block, degree, i)
        place = number * mine + within
        total = full * mine + _chunk_length(last, degree, i)
    return tuple(index), position + run


def longest(length: int, splits: Sequence[Split]) -> int:
    """Return the most places that some index holds after all splits.

    It may be any: of 7 places halves are 4 and 3, of whose 3 blocks halves hold 2 and at most 3.
    """
    lengths = {length}
    for degree, factor in splits:
        lengths = {n for total in lengths for n in _held_lengths(total, degree, factor)}
    return max(lengths)


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


def _chunk_length(length: int, degree: int, i: int) -> int:
    lo, hi = chunk(length, (degree,), (i,))
    return hi - lo


def _held_lengths(total: int, degree: int, factor: int) -> set[int]:
    """Return how many of ``total`` places the indices of one split hold, each number once."""
    block = -(-total // factor) or 1
    full, last = divmod(total, block)
    # Along the indices they change where the chunks of a block end, and nowhere else.
    ends = [length // -(-length // degree) for length in (block, last) if length]
    return {
        full * _chunk_length(block, degree, i) + _chunk_length(last, degree, i)
        for i in (0, *ends, *(end + 1 for end in ends))
        if i < degree
    }


def _taken(held: Sequence[Interval], places: Sequence[Interval]) -> list[Interval]:
    """Return the global ranges of ``places`` places in the row of ``held`` ranges; both ascend."""
    found = []
    start, number = 0, 0
    for lo, hi in places:
        while lo < hi:
            first, last = held[number]
            if lo >= start + last - first:
                start += last - first
                number += 1
                continue
            stop = min(hi, start + last - first)
            found.append((first + lo - start, first + stop - start))
            lo = stop
    return found
