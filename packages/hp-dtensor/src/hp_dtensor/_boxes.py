"""Boxes of a tensor: rectangular regions, as one half-open range of global indices per dim.

Example: the box ``((0, 2), (4, 8))`` has rows 0 and 1 and columns 4 to 7 of a matrix.

Several mesh axes can split the same dim, one after the other. Functions take such nested splits as
pairs ``(degree, split factor)``. Each split divides the elements that are left into
``split factor`` blocks, and each block into ``degree`` chunks. Rank ``i`` on the mesh axis holds
chunk ``i`` of every block.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[Interval, ...]
Split: TypeAlias = tuple[int, int]  # (degree, split factor)


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod([hi - lo for lo, hi in box])


def extent(box: Box) -> tuple[int, ...]:
    """Return the length of each dim of a box."""
    return tuple([hi - lo for lo, hi in box])


def intersect(a: Box, b: Box) -> Box:
    """Return the intersection of two boxes. Its volume is 0 if they do not overlap."""
    ranges = []
    for (lo, hi), (other_lo, other_hi) in zip(a, b, strict=True):
        start = max(lo, other_lo)
        ranges.append((start, max(start, min(hi, other_hi))))
    return tuple(ranges)


def run_boxes(outer: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that together cover elements ``start`` to ``stop - 1`` of the box ``outer``.

    The elements of ``outer`` are numbered in row-major order. The boxes are yielded in the same
    order. If ``outer`` has ``n`` dims, there are at most ``2 * n - 1`` boxes.
    """
    if start >= stop:
        return
    if len(outer) == 1:
        yield ((outer[0][0] + start, outer[0][0] + stop),)
        return
    lo = outer[0][0]
    row = volume(outer[1:])
    first, begin = divmod(start, row)
    last, end = divmod(stop, row)
    if first == last:
        for rest in run_boxes(outer[1:], begin, end):
            yield ((lo + first, lo + first + 1), *rest)
        return
    if begin:
        for rest in run_boxes(outer[1:], begin, row):
            yield ((lo + first, lo + first + 1), *rest)
        first += 1
    if first < last:
        yield ((lo + first, lo + last), *outer[1:])
    for rest in run_boxes(outer[1:], 0, end):
        yield ((lo + last, lo + last + 1), *rest)


def place_in(outer: Box, position: Sequence[int]) -> int:
    """Return the row-major offset of an element within a box.

    ``position`` is the element's global index in each dim.
    """
    return ravel([at - lo for (lo, _), at in zip(outer, position, strict=True)], extent(outer))


def chunk(length: int, degrees: Sequence[int], index: Sequence[int]) -> Interval:
    """Return the index range of a dim that one rank holds after nested `Shard` splits.

    The first split divides the dim into ``degrees[0]`` chunks, as ``torch.chunk`` does, and keeps
    chunk ``index[0]``. Each later split divides the chunk that was kept in the same way. For splits
    by `StridedShard`, use `pieces`.

    Example: ``chunk(8, (2, 2), (1, 0))`` is ``(4, 6)``. Chunk 1 of ``(0, 8)`` is ``(4, 8)``, and
        chunk
    0 of ``(4, 8)`` is ``(4, 6)``.
    """
    lo, hi = 0, length
    for degree, i in zip(degrees, index, strict=True):
        step = -(-(hi - lo) // degree)
        lo = min(lo + step * i, hi)
        hi = min(lo + step, hi)
    return lo, hi


def pieces(length: int, splits: Sequence[Split], index: Sequence[int]) -> tuple[Interval, ...]:
    """Return the index ranges of a dim that one rank holds after nested splits, in ascending order.

    Each split is a pair ``(degree, split factor)``. ``index`` has the coordinate of the rank for
    each split. Empty ranges are left out.

    Example: ``pieces(8, [(2, 2)], [0])`` is ``((0, 2), (4, 6))``: the rank holds chunk 0 of each of
    2 blocks.
    """
    lo, hi = 0, length
    for (degree, factor), i in zip(splits, index, strict=True):
        if factor != 1:
            return _strided_pieces(length, splits, index)
        step = -(-(hi - lo) // degree)
        lo = min(lo + step * i, hi)
        hi = min(lo + step, hi)
    return ((lo, hi),) if lo < hi else ()


def _strided_pieces(
    length: int, splits: Sequence[Split], index: Sequence[int]
) -> tuple[Interval, ...]:
    held: list[Interval] = [(0, length)] if length else []
    for (degree, factor), i in zip(splits, index, strict=True):
        total = sum(hi - lo for lo, hi in held)
        block = -(-total // factor) or 1
        kept = []
        for start in range(0, total, block):
            lo, hi = chunk(min(block, total - start), (degree,), (i,))
            kept.append((start + lo, start + hi))
        held = _subranges(held, kept)
    return tuple(held)


def held_at(length: int, splits: Sequence[Split], position: int) -> tuple[tuple[int, ...], int]:
    """Find the rank that holds index ``position`` of a dim after nested splits.

    Returns ``(index, stop)``. ``index`` has the coordinate of the rank for each split. ``stop`` is
    the end of the rank's range that contains ``position``.

    Example: ``held_at(8, [(2, 2)], 5)`` is ``((0,), 6)``, because rank 0 holds ``(0, 2)`` and
    ``(4, 6)``.
    """
    index = []
    # After each split, ranks with the coordinates in `index` hold `total` elements, and the
    # position is element `offset` of these. `run` is the number of elements from the position to
    # the end of its range.
    total, offset, run = length, position, length - position
    for degree, factor in splits:
        block = -(-total // factor)
        number, in_block = divmod(offset, block)
        this_block = min(block, total - number * block)
        step = -(-this_block // degree)
        i, in_chunk = divmod(in_block, step)
        run = min(run, min(step * (i + 1), this_block) - in_block)
        index.append(i)
        # All blocks before this one are full.
        full, last = divmod(total, block)
        length_of_chunk = _chunk_length(block, degree, i)
        offset = number * length_of_chunk + in_chunk
        total = full * length_of_chunk + _chunk_length(last, degree, i)
    return tuple(index), position + run


def longest(length: int, splits: Sequence[Split]) -> int:
    """Return the number of elements in the largest shard of a dim after nested splits."""
    # Splitting the largest shard is not enough: if a split factor is above 1, a smaller shard can
    # give a larger one. For example, `[(2, 1), (2, 3)]` first splits 7 elements into shards of 4
    # and 3. The second split divides each shard into 3 blocks, and each block into 2 chunks. The
    # shard of 4 elements has blocks of 2, 2 and 0 elements, so each rank gets 2 elements. The shard
    # of 3 elements has 3 blocks of 1 element, and rank 0 gets all 3 elements.
    lengths = {length}
    for degree, factor in splits:
        lengths = {n for total in lengths for n in _part_lengths(total, degree, factor)}
    return max(lengths)


def ravel(index: Sequence[int], degrees: Sequence[int]) -> int:
    """Return the row-major position of an index in a grid with the lengths ``degrees``.

    Example: ``ravel((1, 2), (2, 4))`` is 6.
    """
    position = 0
    for i, degree in zip(index, degrees, strict=True):
        position = position * degree + i
    return position


def unravel(position: int, degrees: Sequence[int]) -> tuple[int, ...]:
    """Return the index at a row-major position in a grid with the lengths ``degrees``.

    This is the inverse of `ravel`: ``unravel(6, (2, 4))`` is ``(1, 2)``.
    """
    index = []
    for degree in reversed(degrees):
        position, i = divmod(position, degree)
        index.append(i)
    return tuple(reversed(index))


def _chunk_length(length: int, degree: int, i: int) -> int:
    lo, hi = chunk(length, (degree,), (i,))
    return hi - lo


def _part_lengths(total: int, degree: int, factor: int) -> set[int]:
    """Return the distinct sizes of the shards of one split, in elements.

    The split divides ``total`` elements into ``factor`` blocks, and each block into ``degree``
    chunks. Shard ``i`` is chunk ``i`` of every block.
    """
    block = -(-total // factor) or 1
    full, last = divmod(total, block)
    # `ends` has the number of chunks of full length, once for a full block and once for the last
    # block. Only at these numbers, and at the numbers after them, the size of shard `i` changes.
    ends = [length // -(-length // degree) for length in (block, last) if length]
    return {
        full * _chunk_length(block, degree, i) + _chunk_length(last, degree, i)
        for i in (0, *ends, *(end + 1 for end in ends))
        if i < degree
    }


def _subranges(held: Sequence[Interval], kept: Sequence[Interval]) -> list[Interval]:
    """Convert local index ranges of a dim to global index ranges.

    ``held`` has the global ranges that a rank holds. The rank stores them one after the other.
    ``kept`` has ranges of local indices. All ranges are in ascending order.

    Example: if ``held`` is ``[(0, 2), (4, 6)]``, the rank stores the global indices 0, 1, 4 and 5.
    If ``kept`` is ``[(1, 3)]``, the result is ``[(1, 2), (4, 5)]``.
    """
    found = []
    start, number = 0, 0  # `held[number]` starts at position `start` of the concatenation
    for lo, hi in kept:
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
