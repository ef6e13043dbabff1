"""How much a rank computes and which keys it needs, in closed form for each chunk of rows."""

from collections.abc import Iterator, Sequence

from ._intervals import Ranges, overlaps, union, within
from ._masks import MaskSpec


def pairs_of(chunks: Sequence[range], mask: MaskSpec, seq_len: int) -> int:
    """Return the number of query-key pairs that the mask shows the positions in ``chunks``."""
    lowest, highest = mask.band
    total = 0
    for rows, document in _by_document(chunks, mask, seq_len):
        last = len(rows) * (document.stop - 1)
        first = len(rows) * document.start
        if highest is not None:
            last = _sum_of_min(rows, highest, document.stop - 1)
        if lowest is not None:  # the sum of maxima is minus that of minima of the negatives
            mirrored = range(1 - rows.stop, 1 - rows.start)
            first = -_sum_of_min(mirrored, -lowest, -document.start)
        total += last - first + len(rows)
    return total


def keys_of(chunks: Sequence[range], mask: MaskSpec, seq_len: int) -> Ranges:
    """Return the positions that some position in ``chunks`` sees."""
    lowest, highest = mask.band
    seen = []
    for rows, document in _by_document(chunks, mask, seq_len):
        start = document.start if lowest is None else rows.start + lowest
        stop = document.stop if highest is None else rows.stop + highest
        seen.append(within(document, range(start, stop)))
    return union(seen)


def _by_document(
    chunks: Sequence[range], mask: MaskSpec, seq_len: int
) -> Iterator[tuple[range, range]]:
    documents = mask.documents(seq_len)
    for _, j, rows in overlaps(chunks, documents):
        yield rows, documents[j]


def _sum_of_min(rows: range, shift: int, cap: int) -> int:
    """Return the sum over ``i`` in ``rows`` of ``min(i + shift, cap)``."""
    turn = min(max(cap - shift, rows.start), rows.stop)
    climbing = (turn - rows.start) * (rows.start + turn - 1) // 2 + shift * (turn - rows.start)
    return climbing + (rows.stop - turn) * cap
