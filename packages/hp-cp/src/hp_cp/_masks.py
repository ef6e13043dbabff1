"""Which keys a query sees, and how many pairs and which keys that makes for some rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ._errors import LayoutError, described
from ._ranges import Band, Ranges, overlaps, union, within


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSpec:
    """The attention mask as a rule on global positions, the same for every batch row and head.

    ``causal``: query ``i`` sees key ``j`` where ``j <= i``. ``window`` of ``w``: where
    ``i - w < j <= i`` if causal, else where ``|i - j| < w``. ``cu_seqlens``: packed documents end
    at these positions, from 0 to the length of the sequence, and see only themselves. Every query
    sees at least its own position. Raises `LayoutError` for other values.
    """

    causal: bool
    window: int | None = None
    cu_seqlens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if type(self.causal) is not bool:
            raise LayoutError(f"causal is {described(self.causal)}; use True or False")
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise LayoutError(
                f"window={described(self.window)} is no number of keys; use an int of at least 1, "
                f"or None"
            )
        if self.cu_seqlens is not None:
            _check_documents(self.cu_seqlens)

    @property
    def band(self) -> Band:
        """Return the least and the greatest ``j - i`` that is seen, None where there is none."""
        reach = None if self.window is None else self.window - 1
        return (None if reach is None else -reach), (0 if self.causal else reach)

    def documents(self, seq_len: int) -> Ranges:
        """Return the documents' positions, in order, without empty ones.

        Raises `LayoutError` where ``cu_seqlens`` are those of another length.
        """
        ends = (0, seq_len) if self.cu_seqlens is None else self.cu_seqlens
        if ends[-1] != seq_len:
            raise LayoutError(
                f"cu_seqlens end at {ends[-1]} but the sequence has {seq_len} positions; give the "
                f"ends of the documents of the whole sequence, from 0 to {seq_len}"
            )
        return _between(ends)


def check_mask(mask: object) -> None:
    """Raise `LayoutError` unless ``mask`` is a `MaskSpec`."""
    if not isinstance(mask, MaskSpec):
        raise LayoutError(
            f"mask must be a MaskSpec, got {described(mask)}; use MaskSpec(causal=True) or "
            f"MaskSpec(causal=False)"
        )


@lru_cache(maxsize=64)
def _between(ends: tuple[int, ...]) -> Ranges:
    return tuple(range(*pair) for pair in pairwise(ends) if pair[0] < pair[1])


def _check_documents(ends: object) -> None:
    if isinstance(ends, tuple) and any(isinstance(end, (tuple, list)) for end in ends):
        raise LayoutError(
            "cu_seqlens are shared by all rows of the batch, got documents of several rows; pack "
            "the rows into one, one behind the other, or attend each with its own mask"
        )
    if not isinstance(ends, tuple) or not all(type(end) is int for end in ends):
        raise LayoutError(
            f"cu_seqlens must be a tuple of ints, got {described(ends)}; of a tensor use "
            f"tuple(cu_seqlens.tolist())"
        )
    if len(ends) < 2 or ends[0] != 0 or any(a > b for a, b in pairwise(ends)):
        raise LayoutError(
            f"cu_seqlens must ascend from 0 to the length of the sequence, got {_short(ends)}"
        )


def _short(ends: tuple[object, ...]) -> str:
    shown = ", ".join(map(str, ends[:8]))
    return f"({shown}, ... {len(ends)} numbers)" if len(ends) > 8 else f"({shown})"


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
