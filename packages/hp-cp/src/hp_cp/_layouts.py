"""Layouts: the positions of the sequence that each rank holds, as pure functions of integers."""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Protocol, runtime_checkable

from ._errors import InputError, described
from ._masks import MaskSpec, check_mask, keys_of, pairs_of
from ._ranges import Ranges, joined, overlaps, size

Chunks = tuple[Ranges, ...]


@runtime_checkable
class Layout(Protocol):
    """Assigns the positions of a sequence to ranks.

    To write a layout, subclass this protocol, or implement both methods. Layouts that compare equal
    must have equal hashes and return equal chunks.

    Attributes:
        chunks: Returns each rank's positions as ranges.
        indices: Returns each rank's positions as integers.

    Examples:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Reversed(Layout):
        ...     def chunks(self, n, seq_len, mask=None):
        ...         return Contiguous().chunks(n, seq_len)[::-1]
        >>> Reversed().chunks(2, 8)
        ((range(4, 8),), (range(0, 4),))
    """

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return each rank's positions as ranges.

        Args:
            n: Number of ranks.
            seq_len: Length of the whole sequence, in positions.
            mask: Attention mask. Layouts that depend on the mask require it; others ignore it.

        Returns:
            One tuple for each rank: non-empty ranges of positions in ascending order. Local tensors
            of the rank have these positions in this order. The ranges of all ranks partition
            ``range(seq_len)``; `plan_attention` checks this.

        Raises:
            InputError: ``n`` is below 1, ``seq_len`` is negative, or the layout requires a mask and
                ``mask`` is None.
        """
        ...

    def indices(
        self, n: int, seq_len: int, mask: MaskSpec | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Return each rank's positions as integers.

        Args:
            n: Number of ranks.
            seq_len: Length of the whole sequence, in positions.
            mask: Attention mask, as for `chunks`.

        Returns:
            One tuple for each rank: its positions in ascending order, as ints.

        Raises:
            InputError: The arguments are invalid; see `chunks`.
        """
        chunks = self.chunks(n, seq_len, mask)
        return tuple(tuple(i for chunk in rank for i in chunk) for rank in chunks)


@dataclass(frozen=True, slots=True)
class Contiguous(Layout):
    """Splits the sequence into one block per rank, as ``torch.chunk`` and ``Shard`` split.

    Rank ``r`` holds the ``r``-th block. On ``n`` ranks, each block has ``ceil(seq_len / n)``
    positions. The last blocks may be shorter or empty. With a causal mask, the last rank has nearly
    twice the mean work.

    Attributes:
        chunks: Returns each rank's positions as ranges.
        indices: Returns each rank's positions as integers.

    Examples:
        >>> Contiguous().chunks(2, 8)
        ((range(0, 4),), (range(4, 8),))
    """

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return the positions of each rank: at most one range per rank.

        Args:
            n: Number of ranks.
            seq_len: Length of the whole sequence, in positions.
            mask: Not used.

        Returns:
            One tuple for each rank, with the range of its block. The tuple is empty if the block is
            empty.

        Raises:
            InputError: ``n`` is below 1, or ``seq_len`` is negative.
        """
        check_size(n, seq_len)
        length = -(-seq_len // n)
        pieces = cut(min(rank * length, seq_len) for rank in range(n + 1))
        return tuple(joined([piece]) for piece in pieces)


@dataclass(frozen=True, slots=True)
class Zigzag(Layout):
    """Splits the sequence so that each rank has an early and a late chunk.

    On ``n`` ranks, there are ``2n`` chunks. Rank ``r`` holds chunks ``r`` and ``2n - 1 - r``. With
    a causal mask, all ranks have equal work. If ``2n`` does not divide ``seq_len``, the first
    chunks are one position longer, as in ``torch.tensor_split``, and the lengths of ranks differ by
    at most one position. Llama 3 uses this split (arXiv 2407.21783, section 3.3.2).

    Attributes:
        chunks: Returns each rank's positions as ranges.
        indices: Returns each rank's positions as integers.

    Examples:
        >>> Zigzag().chunks(2, 8)
        ((range(0, 2), range(6, 8)), (range(2, 6),))
    """

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return the positions of each rank: at most two ranges per rank.

        Args:
            n: Number of ranks.
            seq_len: Length of the whole sequence, in positions.
            mask: Not used.

        Returns:
            One tuple for each rank, with the ranges of its two chunks in ascending order.
            Neighbouring chunks are joined to one range.

        Raises:
            InputError: ``n`` is below 1, or ``seq_len`` is negative.
        """
        check_size(n, seq_len)
        pieces = cut(even_edges(0, seq_len, 2 * n))
        return gathered(
            ((min(i, 2 * n - 1 - i), piece) for i, piece in enumerate(pieces)),
            n,
        )


@dataclass(frozen=True, slots=True)
class PerDocument(Layout):
    """Splits each document over all ranks, so that ranks have equal work in every document.

    On ``n`` ranks, a document has ``2n`` chunks, and each rank gets an early and a late one, as in
    `Zigzag`. Nearly all keys travel between ranks, so this layout needs much communication. A
    document at positions ``[a, b)`` is split at ``a + (b - a) * i // 2n``, so no padding is needed.
    The first chunk of document ``d`` goes to rank ``d % n``, so that chunks of short documents are
    spread over all ranks. All rows of the batch must have the same documents.

    Attributes:
        chunks: Returns each rank's positions as ranges.
        indices: Returns each rank's positions as integers.

    Examples:
        >>> mask = MaskSpec(causal=True, cu_seqlens=(0, 4, 8))
        >>> PerDocument().chunks(2, 8, mask)[0]
        (range(0, 1), range(3, 4), range(5, 7))
    """

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return the positions of each rank: at most two ranges per document and rank.

        Args:
            n: Number of ranks.
            seq_len: Length of the whole sequence, in positions.
            mask: Attention mask. Required.

        Returns:
            One tuple for each rank, with the ranges of its chunks in ascending order.

        Raises:
            InputError: ``mask`` is not a `MaskSpec`, ``mask`` has different documents in different
                rows of the batch, ``n`` is below 1, or ``seq_len`` is invalid.
        """
        check_size(n, seq_len)
        mask = check_given(mask, self)
        if len(mask.ends) > 1:
            raise InputError(
                f"{self!r} cuts documents, which are others in each row of the batch; use Greedy() "
                f"or Auto(), which cut all rows alike by their work"
            )
        return _per_document(n, mask.documents(seq_len))


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


@dataclass(frozen=True, slots=True)
class Greedy(Layout):
    """Splits the sequence into equal chunks and balances their work over the ranks.

    On ``n`` ranks, the sequence is split into ``n * chunks_per_rank`` chunks, as ``torch.chunk``
    splits. The work of a chunk is its number of visible query-key pairs. Chunks are assigned in
    descending order of their work. Each chunk goes to the rank with the least work so far, among
    the ranks that have fewer than ``chunks_per_rank`` chunks (longest processing time first, Graham
    1969, SIAM J. Appl. Math. 17). If several ranks have equal work, the lowest rank gets the chunk.

    Args:
        chunks_per_rank: Number of chunks that a rank can get. More chunks balance the work better
            and need more communication. Defaults to 8.

    Raises:
        InputError: ``chunks_per_rank`` is not an int of at least 1.

    Examples:
        >>> Greedy(chunks_per_rank=2).chunks(2, 8, MaskSpec(causal=True))
        ((range(0, 2), range(6, 8)), (range(2, 6),))
    """

    chunks_per_rank: int = 8

    def __post_init__(self) -> None:
        if type(self.chunks_per_rank) is not int or self.chunks_per_rank < 1:
            raise InputError(
                f"chunks_per_rank={self.chunks_per_rank!r} leaves ranks without rows; use an int "
                f"of at least 1"
            )

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return the positions of each rank: at most ``chunks_per_rank`` ranges per rank.

        Args:
            n: Number of ranks.
            seq_len: Length of the whole sequence, in positions.
            mask: Attention mask. Required.

        Returns:
            One tuple for each rank, with the ranges of its chunks in ascending order. Neighbouring
            chunks are joined to one range.

        Raises:
            InputError: ``mask`` is not a `MaskSpec`, ``n`` is below 1, or ``seq_len`` is invalid.
        """
        check_size(n, seq_len)
        return _greedy(n, seq_len, check_given(mask, self), self.chunks_per_rank)


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


@dataclass(frozen=True, slots=True)
class Auto(Layout):
    """Chooses the simplest layout with a cost within 2 % of the lowest cost.

    The candidates are ``Contiguous()``, ``Zigzag()``, ``Greedy(4)``, ``Greedy(8)`` and
    ``PerDocument()``, simplest first. `PerDocument` is skipped if the rows of the batch have
    different documents. The cost of a layout is the cost of its slowest rank: ``pairs +
    pairs_per_row * rows``. ``pairs`` is the number of query-key pairs that the mask shows to the
    queries of the rank. ``rows`` is the number of positions whose keys and values the rank receives
    from other ranks.

    Args:
        pairs_per_row: Time to receive the keys and values of one position, divided by the time to
            compute one query-key pair. Both times include forward and backward. On accelerators, a
            good value is ``flops / (2 * bandwidth * heads)``, with ``flops`` in operations per
            second, ``bandwidth`` between ranks in bytes per second, and ``heads`` query heads per
            KV head. Defaults to 256.

    Raises:
        InputError: ``pairs_per_row`` is negative or not finite.

    Examples:
        >>> Auto().choice(4, 1024, MaskSpec(causal=True))
        Zigzag()
    """

    pairs_per_row: float = 256.0

    def __post_init__(self) -> None:
        price = self.pairs_per_row
        if type(price) not in (int, float) or not 0 <= price < math.inf:
            raise InputError(
                f"pairs_per_row={price!r} is no price of a row; use a finite number of at least 0"
            )

    def choice(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Layout:
        """Return the chosen layout.

        Args:
            n: Number of ranks.
            seq_len: Length of the whole sequence, in positions.
            mask: Attention mask. Required.

        Returns:
            One of the candidates, such as ``Zigzag()``.

        Raises:
            InputError: ``mask`` is not a `MaskSpec`, ``n`` is below 1, or ``seq_len`` is invalid.
        """
        check_size(n, seq_len)
        return _cheapest(n, seq_len, check_given(mask, self), self.pairs_per_row)

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return the positions of each rank in the chosen layout.

        Args:
            n: Number of ranks.
            seq_len: Length of the whole sequence, in positions.
            mask: Attention mask. Required.

        Returns:
            One tuple of ranges for each rank, in ascending order.

        Raises:
            InputError: ``mask`` is not a `MaskSpec`, ``n`` is below 1, or ``seq_len`` is invalid.
        """
        return self.choice(n, seq_len, mask).chunks(n, seq_len, mask)


# Plain ones first: fewer chunks make fewer and larger blocks, which the cost does not see.
_CANDIDATES: tuple[Layout, ...] = (Contiguous(), Zigzag(), Greedy(4), Greedy(8), PerDocument())
_TIE = 1.02


@lru_cache(maxsize=16)
def _cheapest(n: int, seq_len: int, mask: MaskSpec, pairs_per_row: float) -> Layout:
    costs: dict[Layout, float] = {}
    for layout in _CANDIDATES:
        if isinstance(layout, PerDocument) and len(mask.ends) > 1:
            continue
        cost, limit = 0.0, min(costs.values(), default=math.inf)
        for held in _held(layout, n, seq_len, mask):
            pairs = pairs_of(held, mask, seq_len)
            cost = max(cost, pairs + pairs_per_row * rows_fetched(held, mask, seq_len))
            if cost >= limit:  # a plainer one costs no more: the other ranks do not matter
                break
        else:
            costs[layout] = cost
    enough = _TIE * min(costs.values())
    return next(layout for layout, needed in costs.items() if needed <= enough)


def _held(layout: Layout, n: int, seq_len: int, mask: MaskSpec) -> Iterable[Ranges]:
    """Return each rank's chunks, one rank at a time where they are many."""
    if isinstance(layout, PerDocument):
        return held_per_document(n, mask.documents(seq_len))
    return layout.chunks(n, seq_len, mask)


def rows_fetched(held: tuple[range, ...], mask: MaskSpec, seq_len: int) -> int:
    """Return how many rows of other ranks the positions ``held`` see, in all rows of the batch."""
    rows = 0
    for row in mask.rows:
        seen = keys_of(held, row, seq_len)
        rows += size(seen) - sum(len(both) for _, _, both in overlaps(seen, held))
    return rows


@dataclass(frozen=True, slots=True)
class Pinned(Layout):
    """Splits the sequence as ``layout`` does for a fixed mask, whatever mask the attention uses.

    `Greedy`, `PerDocument` and `Auto` split by the mask that they receive. If the layers of a model
    have different masks, for example a window in some layers, these layouts would split each layer
    differently. Pass the same ``Pinned`` to all layers instead.

    Args:
        layout: Layout to apply.
        mask: Mask for ``layout``. Its ``mask_mod`` is dropped, because layouts ignore it.

    Raises:
        InputError: ``layout`` is not a `Layout`, or ``mask`` is not a `MaskSpec`.

    Examples:
        >>> layout = Pinned(Greedy(2), MaskSpec(causal=True))
        >>> layout.chunks(2, 8, MaskSpec(causal=True, window=2))
        ((range(0, 2), range(6, 8)), (range(2, 6),))
    """

    layout: Layout
    mask: MaskSpec

    def __post_init__(self) -> None:
        checked_layout(self.layout)
        check_mask(self.mask)
        # Layouts follow the rest; what is kept by a layout is not to keep a function alive.
        object.__setattr__(self, "mask", self.mask.rest)

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return the positions of each rank in the layout, for the fixed mask.

        Args:
            n: Number of ranks.
            seq_len: Length of the whole sequence, in positions.
            mask: Not used.

        Returns:
            One tuple of ranges for each rank, in ascending order.

        Raises:
            InputError: ``n`` or ``seq_len`` is invalid for the layout and the fixed mask.
        """
        return self.layout.chunks(n, seq_len, self.mask)


def told_length(layout: Layout | None, mask: MaskSpec | None) -> int | None:
    """Return where the documents of a mask end, or of the mask that a layout is pinned to."""
    if isinstance(mask, MaskSpec) and mask.ends:
        return mask.ends[0][-1]
    return told_length(layout.layout, layout.mask) if isinstance(layout, Pinned) else None


def checked_layout(layout: object) -> Layout:
    """Return the layout that is meant: `Contiguous` for None.

    Raises `InputError` for what is no `Layout`, as the name or class of one, or has no hash.
    """
    layout = Contiguous() if layout is None else layout
    if isinstance(layout, type) or not isinstance(layout, Layout):
        raise InputError(
            f"layout must be a Layout, got {described(layout)}; use Contiguous(), Zigzag() or an "
            f"object with chunks and indices, and a hash"
        )
    try:
        hash(layout)
    except TypeError as error:
        raise InputError(
            f"{layout!r} has no hash, by which plans are kept: {error}; make it a frozen dataclass "
            f"of hashable fields"
        ) from error
    return layout


def check_size(n: int, seq_len: int) -> None:
    """Raise `InputError` unless there are ranks and no negative length, both ints."""
    if type(n) is not int or type(seq_len) is not int or n < 1 or seq_len < 0:
        raise InputError(
            f"a layout needs ints n >= 1 and seq_len >= 0, got n={n!r}, seq_len={seq_len!r}"
        )


def check_partition(chunks: Chunks, n: int, seq_len: int, layout: Layout) -> None:
    """Raise `InputError` unless the chunks keep the contract of `Layout.chunks`."""
    kept = {*map(type, (chunks, *chunks))} <= {tuple}  # what plans are kept by has a hash
    flat = sorted((chunk for rank in chunks for chunk in rank), key=lambda chunk: chunk.start)
    edges = [0, *(chunk.stop for chunk in flat)]
    whole = edges[-1] == seq_len and len(chunks) == n
    touching = all(
        c.step == 1 and len(c) > 0 and c.start == at for at, c in zip(edges, flat, strict=False)
    )
    ascending = all(a.stop <= b.start for rank in chunks for a, b in pairwise(rank))
    if not (kept and whole and touching and ascending):
        raise InputError(
            f"{layout!r}.chunks({n}, {seq_len}) must be {n} tuples of ascending, non-empty ranges "
            f"that partition range({seq_len})"
        )


def check_given(mask: MaskSpec | None, layout: Layout) -> MaskSpec:
    """Return the mask that a layout follows, or raise `InputError` for none or another object."""
    if mask is None:
        raise InputError(
            f"{layout!r} follows the mask; give the mask, mask=MaskSpec(...), or use "
            f"Contiguous() or Zigzag()"
        )
    check_mask(mask)
    return mask


def checked_chunks(layout: Layout | None, n: int, seq_len: int, mask: MaskSpec | None) -> Chunks:
    """Return the chunks of a layout, which partition the sequence; the same object every time.

    Raises `InputError` for what is no layout or mask, for a number of ranks or a length that is
    none, for documents of another length, and for chunks that are no partition.
    """
    layout = checked_layout(layout)
    check_size(n, seq_len)
    if mask is not None:
        check_mask(mask)
    rest = None if mask is None else mask.rest
    return _chunks(layout, n, seq_len, rest)  # type: ignore[arg-type]  # its hash was seen


@lru_cache(maxsize=32)  # packed data brings another mask with every batch
def _chunks(layout: Layout, n: int, seq_len: int, mask: MaskSpec | None) -> Chunks:
    if mask is not None:
        mask.check_length(seq_len)
    chunks = layout.chunks(n, seq_len, mask)
    check_partition(chunks, n, seq_len, layout)
    return chunks


@lru_cache(maxsize=32)
def lengths_of(chunks: Chunks) -> tuple[int, ...]:
    """Return each rank's number of positions."""
    return tuple(sum(map(len, rank)) for rank in chunks)


@lru_cache(maxsize=32)
def out_of_order(chunks: Chunks) -> tuple[int, ...]:
    """Return the order that sorts all chunks, listed rank by rank, by their global start.

    Empty where they are in order as they are listed.
    """
    starts = [chunk.start for rank in chunks for chunk in rank]
    order = tuple(sorted(range(len(starts)), key=starts.__getitem__))
    return () if order == tuple(range(len(starts))) else order


def cut(edges: Iterable[int]) -> list[range]:
    """Return the ranges between neighbouring edges; some may be empty."""
    return [range(*pair) for pair in pairwise(edges)]


def even_edges(start: int, stop: int, parts: int) -> list[int]:
    """Return the edges of ``parts`` ranges, of which the first ones are one longer."""
    length, longer = divmod(stop - start, parts)
    return [start + i * length + min(i, longer) for i in range(parts + 1)]


def gathered(owners: Iterable[tuple[int, range]], n: int) -> Chunks:
    """Return the pieces, given with their rank, as chunks."""
    held: list[list[range]] = [[] for _ in range(n)]
    for rank, piece in owners:
        held[rank].append(piece)
    return tuple(joined(sorted(pieces, key=lambda piece: piece.start)) for pieces in held)
