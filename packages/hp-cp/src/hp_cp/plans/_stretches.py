"""The sequence as stretches of positions that one rank holds, document by document."""

from collections.abc import Iterator
from typing import NamedTuple

from .._layouts import Chunks
from .._ranges import Ranges, overlaps


class Stretch(NamedTuple):
    """Positions of one document whose keys ``holder`` has and whose rows ``reader`` attends.

    ``key`` and ``row`` are the first of their local rows there. Without swapped queries ``holder``
    and ``reader`` are one rank.
    """

    start: int
    stop: int
    holder: int
    key: int
    reader: int
    row: int


Document = tuple[Stretch, ...]


def cut_documents(
    chunks: Chunks, documents: Ranges, ulysses_degree: int, load_balance: bool
) -> tuple[Document, ...]:
    """Return the stretches of each document, ascending; ranks are those of the schedule.

    ``chunks`` partition the sequence. Local rows are in the order of positions, so that what a rank
    has of one document is one range of them.
    """
    pieces: list[range] = []
    ranks: list[tuple[int, int]] = []
    for start, stop, *both in sorted(_owned(chunks, ulysses_degree, load_balance)):
        if ranks and ranks[-1] == (both[0], both[1]):
            pieces[-1] = range(pieces[-1].start, stop)
        else:
            pieces.append(range(start, stop))
            ranks.append((both[0], both[1]))
    cut: list[list[Stretch]] = [[] for _ in documents]
    keys, rows = [0] * len(chunks), [0] * len(chunks)
    for i, j, part in overlaps(documents, pieces):
        holder, reader = ranks[j]
        cut[i].append(Stretch(part.start, part.stop, holder, keys[holder], reader, rows[reader]))
        keys[holder] += len(part)
        rows[reader] += len(part)
    return tuple(map(tuple, cut))


def _owned(
    chunks: Chunks, ulysses_degree: int, load_balance: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the start, the stop, the holder and the reader of every chunk, or of its halves."""
    for rank, held in enumerate(chunks):
        group = rank // ulysses_degree
        for chunk in held:
            if load_balance:
                half = chunk.start + len(chunk) // 2
                yield chunk.start, half, rank, rank
                yield half, chunk.stop, rank, len(chunks) - 1 - rank
            else:
                yield chunk.start, chunk.stop, group, group
