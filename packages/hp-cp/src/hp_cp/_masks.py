"""Which keys a query sees, and how many pairs and which keys that makes for some rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING

from ._errors import InputError, described
from ._ranges import Band, Ranges, overlaps, union, within

if TYPE_CHECKING:
    from torch import Tensor

# What FlexAttention calls a mask_mod: of the row of the batch, the query head and the positions of
# the query and the key, each a tensor without dims, whether the query sees the key.
MaskMod = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskSpec:
    """Describes an attention mask by positions in the whole sequence.

    A query sees a key if all given arguments allow it. Without ``mask_mod``, every query sees at
    least the key at its own position.

    Args:
        causal: If True, query ``i`` sees key ``j`` only if ``j <= i``.
        window: Size ``w`` of a sliding window. Query ``i`` sees key ``j`` if ``i - w < j <= i``
            with ``causal=True``, else if ``|i - j| < w``. Defaults to None: no window.
        cu_seqlens: Boundaries of packed documents, ascending from 0 to the length of the sequence.
            Queries do not see keys of other documents. A tuple of ints applies to all rows of the
            batch. A tuple of such tuples has the boundaries of each row. Defaults to None: one
            document.
        mask_mod: Function that hides more pairs, as in FlexAttention:
            ``mask_mod(b, h, q_idx, kv_idx)`` returns True if the query sees the key. The arguments
            are tensors without dimensions: the row of the batch, the query head among the heads of
            all ranks, and the positions of query and key in the whole sequence. Defaults to None.

    Raises:
        InputError: A value has the wrong type, ``window`` is below 1, or ``cu_seqlens`` does not
            ascend from 0.

    Examples:
        >>> MaskSpec(causal=True, window=4096)  # sliding window
        MaskSpec(causal=True, window=4096, cu_seqlens=None, mask_mod=None)
        >>> packed = MaskSpec(causal=True, cu_seqlens=(0, 300, 1024))  # two documents
        >>> prefix = torch.tensor([5, 9])  # prefix length of each row of the batch
        >>> prefix_lm = MaskSpec(
        ...     causal=False, mask_mod=lambda b, h, q, k: (k <= q) | (k < prefix[b])
        ... )

    Note:
        - ``mask_mod`` must return the same values on every rank and in every call. The tensors that
          it reads must be on the device of ``q``.
        - A query that sees no key has the output 0 and the log-sum-exp minus infinity.
        - Layouts and load balance ignore ``mask_mod``.
        - Plans are cached by the function object of ``mask_mod``. Create the function once, not in
          every call.
    """

    causal: bool
    window: int | None = None
    cu_seqlens: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    mask_mod: MaskMod | None = None

    def __post_init__(self) -> None:
        if type(self.causal) is not bool:
            raise InputError(f"causal is {described(self.causal)}; use True or False")
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise InputError(
                f"window={described(self.window)} is no number of keys; use an int of at least 1, "
                f"or None"
            )
        if self.cu_seqlens is not None:
            _check_documents(self.cu_seqlens)
        if self.mask_mod is not None:
            _check_function(self.mask_mod)

    def __eq__(self, other: object) -> bool:
        # Methods of one object are equal also after it changed: plans are kept for this one.
        return isinstance(other, MaskSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        # The function is held here, so that no other one has its id.
        return self.causal, self.window, self.cu_seqlens, id(self.mask_mod)

    @property
    def rest(self) -> "MaskSpec":
        """This mask without ``mask_mod``."""
        return self if self.mask_mod is None else replace(self, mask_mod=None)

    @property
    def ends(self) -> tuple[tuple[int, ...], ...]:
        """Document boundaries: one tuple per row of the batch, or only one if all rows share it.

        Empty if ``cu_seqlens`` is None.
        """
        if self.cu_seqlens is None:
            return ()
        return self.cu_seqlens if self.per_row else (self.cu_seqlens,)  # type: ignore[return-value]

    @property
    def per_row(self) -> bool:
        """Whether ``cu_seqlens`` has separate boundaries for each row of the batch."""
        return self.cu_seqlens is not None and isinstance(self.cu_seqlens[0], tuple)

    @property
    def rows(self) -> "tuple[MaskSpec, ...]":
        """One mask for each row of the batch, or only this mask if all rows share it."""
        if len(self.ends) < 2:
            return (self,)
        # Not kept with a function, which a cache is not to keep alive.
        return _rows_of(self) if self.mask_mod is None else _rows_of.__wrapped__(self)

    @property
    def band(self) -> Band:
        """Bounds of ``j - i`` between which query ``i`` sees key ``j``: ``(smallest, largest)``.

        A bound is None if there is no limit on this side.
        """
        reach = None if self.window is None else self.window - 1
        return (None if reach is None else -reach), (0 if self.causal else reach)

    def documents(self, seq_len: int) -> Ranges:
        """Return the positions of each document.

        Args:
            seq_len: Length of the whole sequence, in positions.

        Returns:
            One range per document, in order, without empty documents.

        Raises:
            InputError: ``cu_seqlens`` does not end at ``seq_len``, or has separate boundaries for
                several rows of the batch.
        """
        self.check_length(seq_len)
        if len(self.ends) > 1:
            raise InputError(
                f"cu_seqlens have the documents of {len(self.ends)} rows of the batch, where those "
                f"that all rows share are needed; use the masks of each row, mask.rows"
            )
        return _between(self.ends[0] if self.ends else (0, seq_len))

    def check_length(self, seq_len: int) -> None:
        """Check that ``cu_seqlens`` ends at the length of the sequence.

        Args:
            seq_len: Length of the whole sequence, in positions.

        Raises:
            InputError: ``cu_seqlens`` ends at another position.
        """
        if self.ends and self.ends[0][-1] != seq_len:
            raise InputError(
                f"cu_seqlens end at {self.ends[0][-1]} but the sequence has {seq_len} positions; "
                f"give the ends of the documents of the whole sequence, from 0 to {seq_len}"
            )

    def one_behind_the_other(self, seq_len: int) -> "MaskSpec":
        """Return the mask for all rows of the batch concatenated to one sequence.

        Use it for a mask with separate boundaries for each row.

        Args:
            seq_len: Length of one row, in positions.

        Returns:
            A mask with the documents of all rows, for ``len(rows) * seq_len`` positions.
        """
        ends = [row * seq_len + end for row, own in enumerate(self.ends) for end in own[1:]]
        return replace(self, cu_seqlens=(0, *ends))


@lru_cache(maxsize=16)
def _rows_of(mask: MaskSpec) -> tuple[MaskSpec, ...]:
    return tuple(replace(mask, cu_seqlens=ends) for ends in mask.ends)


def check_mask(mask: object) -> None:
    """Raise `InputError` unless ``mask`` is a `MaskSpec`."""
    if not isinstance(mask, MaskSpec):
        raise InputError(
            f"mask must be a MaskSpec, got {described(mask)}; use MaskSpec(causal=True) or "
            f"MaskSpec(causal=False), with mask_mod= a function of positions in place of a dense "
            f"mask"
        )


def _check_function(mask_mod: object) -> None:
    """Raise `InputError` unless it can be called with four arguments, and has a hash."""
    remedy = (
        "give a function of the row of the batch, the head and the positions of query and key, as "
        "lambda b, h, q_idx, kv_idx: kv_idx <= q_idx"
    )
    if not callable(mask_mod) or isinstance(mask_mod, type):
        raise InputError(f"mask_mod is {described(mask_mod)}, no mask function; {remedy}")
    try:
        hash(mask_mod)
        signature(mask_mod).bind(*range(4))
    except (TypeError, ValueError) as error:
        raise InputError(f"{mask_mod!r} is no mask function: {error}; {remedy}") from error


@lru_cache(maxsize=64)
def _between(ends: tuple[int, ...]) -> Ranges:
    return tuple(range(*pair) for pair in pairwise(ends) if pair[0] < pair[1])


def _check_documents(given: object) -> None:
    if not isinstance(given, tuple) or not given or not isinstance(given[0], tuple):
        _check_row(given)
        return
    for row in given:
        _check_row(row)
    if len(lengths := {row[-1] for row in given}) > 1:
        raise InputError(
            f"cu_seqlens of the rows of a batch end at {sorted(lengths)}, but all rows are of one "
            f"length; let each end there, with padding as a document of its own"
        )


def _check_row(ends: object) -> None:
    if not isinstance(ends, tuple) or not all(type(end) is int for end in ends):
        wrong = next(x for x in ends if type(x) is not int) if isinstance(ends, tuple) else ends
        raise InputError(
            f"cu_seqlens must be a tuple of ints, got {described(wrong)}; of a tensor or an "
            f"array use tuple(cu_seqlens.tolist()), or give such a tuple for each row of the batch"
        )
    if len(ends) < 2 or ends[0] != 0 or any(a > b for a, b in pairwise(ends)):
        raise InputError(
            f"cu_seqlens must ascend from 0 to the length of the sequence, got {_short(ends)}"
        )


def _short(ends: tuple[object, ...]) -> str:
    shown = ", ".join(map(str, ends[:8]))
    return f"({shown}, ... {len(ends)} numbers)" if len(ends) > 8 else f"({shown})"


def pairs_of(chunks: Sequence[range], mask: MaskSpec, seq_len: int) -> int:
    """Return the number of query-key pairs that the mask shows the positions in ``chunks``.

    Of all rows of the batch, where each has its documents.
    """
    return sum(_pairs_of(chunks, row, seq_len) for row in mask.rows)


def _pairs_of(chunks: Sequence[range], mask: MaskSpec, seq_len: int) -> int:
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
