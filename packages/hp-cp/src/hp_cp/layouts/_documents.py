"""Layouts for packed documents: every document over all ranks, or chunks by their work."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .._errors import LayoutError
from .._masks import MaskSpec, pairs_of
from .._ranges import Ranges, joined
from ._interface import Chunks, Layout, check_given, check_size, cut, gathered


@dataclass(frozen=True, slots=True)
class PerDocument(Layout):
    """Each document lies in zigzag over all ranks: even work, at the price of much traffic.

    Document ``d`` at ``[a, b)`` is cut at ``a + (b - a) i // 2n``, so that no padding is needed.
    Its first chunk goes to rank ``d % n``, so that short documents do not all fall to one rank.
    """

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return up to two ranges per document and rank."""
        check_size(n, seq_len)
        return _per_document(n, check_given(mask, self).documents(seq_len))


@dataclass(frozen=True, slots=True)
class Greedy(Layout):
    """Chunks of equal length, each given in turn to the rank with the least work so far.

    There are ``n * chunks_per_rank`` chunks, cut as ``torch.chunk`` cuts. The chunk with the most
    visible pairs comes first (longest processing time; Graham 1969, SIAM J. Appl. Math. 17); no
    rank gets more than ``chunks_per_rank``, and ties go to the lowest rank.
    """

    chunks_per_rank: int = 8

    def __post_init__(self) -> None:
        if type(self.chunks_per_rank) is not int or self.chunks_per_rank < 1:
            raise LayoutError(
                f"chunks_per_rank={self.chunks_per_rank!r} leaves ranks without rows; use an int "
                f"of at least 1"
            )

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return up to ``chunks_per_rank`` ranges per rank."""
        check_size(n, seq_len)
        return _greedy(n, seq_len, check_given(mask, self), self.chunks_per_rank)


def held_per_document(n: int, documents: Ranges) -> Iterator[Ranges]:
    """Yield each rank's chunks under `PerDocument`."""
    parts = 2 * n
    for rank in range(n):
        pieces = []
        for turn, document in enumerate(documents):
            start, length = document.start, len(document)
            i = (rank - turn) % n
            for place in (i, parts - 1 - i):
                first, stop = length * place // parts, length * (place + 1) // parts
                if first < stop:
                    pieces.append(range(start + first, start + stop))
        yield joined(pieces)


@lru_cache(maxsize=16)
def _per_document(n: int, documents: Ranges) -> Chunks:
    return tuple(held_per_document(n, documents))


@lru_cache(maxsize=16)
def _greedy(n: int, seq_len: int, mask: MaskSpec, chunks_per_rank: int) -> Chunks:
    length = max(1, -(-seq_len // (n * chunks_per_rank)))
    pieces = cut([*range(0, seq_len, length), seq_len])
    work = [pairs_of([piece], mask, seq_len) for piece in pieces]
    ranks = [(0, rank, chunks_per_rank) for rank in range(n)]
    owners = []
    for i in sorted(range(len(pieces)), key=lambda i: -work[i]):
        done, rank, room = heapq.heappop(ranks)
        owners.append((rank, pieces[i]))
        if room > 1:
            heapq.heappush(ranks, (done + work[i], rank, room - 1))
    return gathered(owners, n)
