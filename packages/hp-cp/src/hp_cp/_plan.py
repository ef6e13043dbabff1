"""Mask and layout to a plan: who computes which block of the attention matrix, and what moves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ._errors import DegreeError, LayoutError
from ._layouts import Chunks, Contiguous, Layout, check_layout, check_partition, lengths_of
from ._masks import MaskSpec, check_mask

Kind = Literal["full", "causal"]
Schedule = Literal["gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A rectangle of the attention matrix: local query rows of a rank, key rows of ``source``.

    ``causal`` blocks are square and row ``i`` sees the first ``i + 1`` keys; in ``full`` ones every
    row sees every key. ``source`` counts the ranks of the schedule (``n / ulysses_degree``).
    """

    source: int
    queries: range
    keys: range
    kind: Kind

    @property
    def pairs(self) -> int:
        """Return the number of query-key pairs that are computed."""
        rows = len(self.queries)
        return rows * (rows + 1) // 2 if self.kind == "causal" else rows * len(self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Every rank's blocks, bytes and work; made by `plan_attention`.

    With the gather schedule each rank receives all keys and values once, keeps them for the
    backward, and sends each rank the gradient of that rank's keys and values. With
    ``ulysses_degree = n`` each rank attends the whole sequence on its share of the heads.
    """

    mask: MaskSpec
    layout: Layout
    n: int
    seq_len: int
    schedule: Schedule
    ulysses_degree: int
    batch: int
    q_heads: int
    kv_heads: int
    head_size: int
    itemsize: int
    chunks: Chunks

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return each rank's number of local positions."""
        return lengths_of(self.chunks)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return every kind of block that some rank may compute."""
        if not self.mask.causal:
            return ("full",)
        return ("causal",) if self.n == self.ulysses_degree else ("causal", "full")

    def blocks(self, rank: int) -> tuple[Block, ...]:
        """Return what ``rank`` computes: its own keys first, then those of the ranks before it.

        The first block covers every row, and no row of any block is without keys. A rank without
        positions has no blocks.
        """
        chunks = self.chunks if self.ulysses_degree == 1 else ((range(self.seq_len),),)
        me, n = rank // self.ulysses_degree, len(chunks)
        rows = range(lengths_of(chunks)[me])
        if not rows:
            return ()
        own = Block(
            source=me, queries=rows, keys=rows, kind="causal" if self.mask.causal else "full"
        )
        others = (
            block
            for step in range(1, n)
            for block in _against((me - step) % n, chunks, chunks[me], self.mask)
        )
        return (own, *others)

    def bytes_received(self, rank: int) -> int:
        """Return the bytes that ``rank`` receives in one forward and backward.

        ``U`` bytes of keys and values and ``Q`` of queries per rank make ``2 (n - 1) U`` (gather)
        and ``2 (n - 1) / n (2 Q + U)`` (Ulysses, with at least one kv head per rank in ``U``) where
        lengths are equal. The backward moves what the forward moved, the other way round.
        """
        per_row = self.batch * self.head_size * self.itemsize
        mine = self.lengths[rank]
        others = self.seq_len - mine
        if self.ulysses_degree == 1:
            return 2 * self.kv_heads * per_row * (others + (self.n - 1) * mine)
        q_heads = self.q_heads // self.n
        kv_heads = max(self.kv_heads, self.n) // self.n
        into_heads = (q_heads + 2 * kv_heads) * per_row
        into_rows = q_heads * per_row
        # Forward and backward receive other ranks' rows of this rank's heads, and this rank's rows
        # of the other ranks' heads, once each: as inputs and as outputs, or the gradients of those.
        return (into_heads + into_rows) * (others + (self.n - 1) * mine)

    def imbalance(self) -> float:
        """Return the most work of a rank over the mean work; 1 is perfect, and that of no work."""
        work = [sum(block.pairs for block in self.blocks(rank)) for rank in range(self.n)]
        return max(work) * self.n / sum(work) if sum(work) else 1.0

    def explain(self) -> str:
        """Return the plan as text: what it is, then each rank's rows, work, bytes and blocks."""
        title = (
            f"{self.layout!r}, {self.mask!r}, n={self.n}, seq_len={self.seq_len}, "
            f"schedule={self.schedule!r}, ulysses_degree={self.ulysses_degree}: "
            f"imbalance {self.imbalance():.3f}"
        )
        return "\n".join([title, *(self._line(rank) for rank in range(self.n))])

    def _line(self, rank: int) -> str:
        blocks = self.blocks(rank)
        shapes = ", ".join(
            f"{b.kind} {len(b.queries)}x{len(b.keys)} from {b.source}" for b in blocks
        )
        return (
            f"rank {rank}: {self.lengths[rank]} rows, {sum(b.pairs for b in blocks)} pairs, "
            f"{self.bytes_received(rank)} bytes received: {shapes or 'nothing'}"
        )


def plan_attention(
    mask: MaskSpec,
    layout: Layout | None,
    n: int,
    seq_len: int,
    *,
    schedule: Schedule = "gather",
    ulysses_degree: int = 1,
    batch: int = 1,
    q_heads: int = 1,
    kv_heads: int = 1,
    head_size: int = 1,
    itemsize: int = 1,
) -> AttentionPlan:
    """Return the plan of one attention over ``seq_len`` positions on ``n`` ranks; pure.

    ``layout=None`` means `Contiguous`. Head counts are those of all heads a rank holds before any
    exchange, ``head_size`` and ``itemsize`` (bytes) those of every tensor. Raises `DegreeError` for
    a ``ulysses_degree`` that ranks or heads do not allow, `LayoutError` for a mask that is no
    `MaskSpec`, an unknown schedule, and a layout that is none or does not partition the sequence.
    """
    if schedule not in get_args(Schedule):
        raise LayoutError(f"no schedule {schedule!r}; use one of {list(get_args(Schedule))}")
    layout = Contiguous() if layout is None else layout
    check_mask(mask)
    check_layout(layout)
    check_degree(ulysses_degree, n)
    check_heads(q_heads, kv_heads, ulysses_degree)
    chunks = layout.chunks(n, seq_len)
    check_partition(chunks, n, seq_len, layout)
    return AttentionPlan(
        mask=mask,
        layout=layout,
        n=n,
        seq_len=seq_len,
        schedule=schedule,
        ulysses_degree=ulysses_degree,
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        itemsize=itemsize,
        chunks=chunks,
    )


def check_degree(ulysses_degree: int, n: int) -> None:
    """Raise `DegreeError` unless ``n`` ranks can run at ``ulysses_degree``."""
    if ulysses_degree not in (1, n):
        where = "one context parallel rank" if n == 1 else f"{n} context parallel ranks"
        legal = "1" if n == 1 else f"1 (gather keys and values) or {n} (exchange heads)"
        raise DegreeError(
            f"ulysses_degree={ulysses_degree} is not possible on {where}; use {legal}"
        )


def check_heads(q_heads: int, kv_heads: int, ulysses_degree: int) -> None:
    """Raise `DegreeError` unless the heads group, and every Ulysses rank gets equal shares."""
    if kv_heads < 1 or q_heads % kv_heads:
        raise DegreeError(
            f"{q_heads} query heads do not form equal groups over {kv_heads} kv heads; the number "
            f"of query heads must be a multiple of the number of kv heads"
        )
    u = ulysses_degree
    if q_heads < u:
        raise DegreeError(
            f"{q_heads} query heads and {kv_heads} kv heads cannot give each of {u} Ulysses ranks "
            f"a head; use ulysses_degree=1 or at most {q_heads} ranks"
        )
    if q_heads % u or (kv_heads % u and u % kv_heads):
        raise DegreeError(
            f"{q_heads} query heads and {kv_heads} kv heads do not split evenly over {u} Ulysses "
            f"ranks; use ulysses_degree=1, or query heads that {u} divides and kv heads that "
            f"divide {u} or that {u} divides"
        )


def _against(
    source: int, chunks: Chunks, queries: Sequence[range], mask: MaskSpec
) -> Iterator[Block]:
    """Yield the blocks of one rank's query chunks against another rank's keys.

    Chunks of different ranks do not overlap, so a causal mask shows a query chunk a prefix of the
    source's ascending chunks, whole; neighbouring query chunks with one prefix make one block.
    """
    row = start = 0
    shown = -1
    for chunk in queries:
        visible = sum(len(k) for k in chunks[source] if not mask.causal or k.stop <= chunk.start)
        if visible != shown:
            if shown > 0:
                yield _full(source, range(start, row), shown)
            start, shown = row, visible
        row += len(chunk)
    if shown > 0:
        yield _full(source, range(start, row), shown)


def _full(source: int, queries: range, keys: int) -> Block:
    return Block(source=source, queries=queries, keys=range(keys), kind="full")
