"""Mask and layout to a plan: who computes which block of the attention matrix, and what moves.

Pure: a plan is made and checked before anything is communicated.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol
from weakref import ref

from ._blocks import (
    Block,
    Document,
    Look,
    Part,
    Tiles,
    cut_documents,
    gathered_part,
    make_part,
    pieces_of,
    places_of,
)
from ._errors import InputError, described
from ._layouts import (
    Auto,
    Chunks,
    Contiguous,
    Layout,
    check_size,
    checked_chunks,
    checked_layout,
    cut,
    even_edges,
    lengths_of,
)
from ._masks import MaskMod, MaskSpec, check_mask, pairs_of
from ._ranges import Piece, Ranges, members, size, union, within
from ._routes import SCHEDULES, Ring, Schedule, check_schedule, name_of, ring_of

_BATCHES = 16  # plans that are kept: packed data brings another mask with every batch
_SHOWN = 8  # blocks of a rank that an explanation lists


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """One rank's query heads, and the kv heads that these read.

    ``repeats`` says of each kv head how many query heads, one behind the other, read it, where
    these are no equal groups; else it is None.
    """

    q: range
    kv: range
    repeats: tuple[int, ...] | None


def split_heads(q_heads: int, kv_heads: int, ranks: int) -> tuple[HeadShare, ...]:
    """Return each rank's share: consecutive query heads, at most one more on the first ranks.

    A kv head that query heads of several ranks read is in the share of each.
    """
    group = q_heads // kv_heads
    return tuple(_share(q, group) for q in cut(even_edges(0, q_heads, ranks)))


def _share(q: range, group: int) -> HeadShare:
    kv = range(q.start // group, (q.stop - 1) // group + 1)
    repeats = tuple(len(within(q, range(h * group, (h + 1) * group))) for h in kv)
    return HeadShare(q=q, kv=kv, repeats=None if len(set(repeats)) == 1 else repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """The blocks, the communication and the work of every rank, made by `plan_attention`.

    One position of a tensor is called a row; the local rows of a rank are the positions that it
    holds.

    With ``ulysses_degree=u``, groups of ``u`` neighbouring ranks exchange rows for heads: each rank
    computes all rows of its group for a part of the heads. The schedule then runs over the
    ``n / u`` groups: it counts rank ``r`` of the mesh as rank ``r // u``.

    If the rows of the batch have different documents, they are concatenated to one sequence; see
    `executed`. The indices of local rows in blocks and fetches then count the positions of
    batch row 0 first, then the positions of batch row 1, and so on.

    Attributes:
        mask: Attention mask.
        layout: Layout of the sequence.
        n: Number of ranks that share the sequence.
        seq_len: Length of the whole sequence, in positions.
        schedule: How keys and values reach other ranks, as in `context_parallel_attention`.
        ulysses_degree: Number of neighbouring ranks that exchange rows for heads.
        keep_kv: True if received keys and values are kept for the backward.
        load_balance: True if each rank swaps half of its queries with another rank.
        batch: Number of rows of the batch.
        q_heads: Number of query heads of all ranks.
        kv_heads: Number of KV heads of all ranks.
        head_size: Head size of queries and keys.
        value_size: Head size of values and outputs.
        itemsize: Bytes per element of the tensors.
        chunks: Positions of each rank: one tuple of ranges per rank.
        lengths: Number of positions of each rank.
        sequences: Number of batch rows that were concatenated to one sequence; see `executed`. 1 if
            none were.

    Examples:
        >>> plan = plan_attention(MaskSpec(causal=True), Zigzag(), n=2, seq_len=16)
        >>> plan.imbalance(), plan.bytes_received(rank=0)
        (1.0, 40)
        >>> plan.fetches(rank=0)  # local rows, by owner
        {1: (range(0, 8),)}
    """

    mask: MaskSpec
    layout: Layout
    n: int
    seq_len: int
    schedule: Schedule
    ulysses_degree: int
    keep_kv: bool
    load_balance: bool
    batch: int
    q_heads: int
    kv_heads: int
    head_size: int
    value_size: int
    itemsize: int
    chunks: Chunks = field(hash=False, compare=False, repr=False)
    lengths: tuple[int, ...] = field(hash=False, compare=False, repr=False)
    sequences: int = field(default=1, repr=False)

    @property
    def rest(self) -> "AttentionPlan":
        """This plan without the ``mask_mod`` of its mask."""
        return self if self.mask.mask_mod is None else replace(self, mask=self.mask.rest)

    @property
    def executed(self) -> "AttentionPlan":
        """The plan that ranks execute: this plan, or a plan for one concatenated sequence.

        If ``cu_seqlens`` of the mask has separate documents for each of the ``B`` rows of the
        batch, ranks execute a plan for one sequence of ``B * seq_len`` positions. Each row is split
        over the ranks as before.
        """
        return _with(_executed(self.rest), self.mask.mask_mod) if self.mask.per_row else self

    @property
    def row_length(self) -> int:
        """Number of positions in one row of the batch."""
        return self.seq_len // self.sequences

    @property
    def row_chunks(self) -> Chunks:
        """Positions of each rank in one row of the batch: one tuple of ranges per rank."""
        if self.sequences == 1:
            return self.chunks
        return tuple(tuple(c for c in held if c.stop <= self.row_length) for held in self.chunks)

    @property
    def groups(self) -> Chunks:
        """Positions of the keys in each group of ``ulysses_degree`` ranks: one tuple per group."""
        u = self.ulysses_degree
        return tuple(
            union(chunk for held in self.chunks[i : i + u] for chunk in held)
            for i in range(0, self.n, u)
        )

    @property
    def queries(self) -> Chunks:
        """Positions of the queries of each group of ``ulysses_degree`` ranks: one tuple per group.

        They differ from `groups` only with ``load_balance``.
        """
        if not self.load_balance:
            return self.groups
        half = cut(range(0, self.seq_len + 1, max(1, self.seq_len // (2 * self.n))))
        return tuple(
            union([half[2 * rank], half[2 * (self.n - 1 - rank) + 1]]) if half else ()
            for rank in range(self.n)
        )

    @property
    def ring(self) -> Ring | None:
        """Order in which keys and values are passed on from rank to rank.

        None for the schedules ``"direct"`` and ``"gather"``, which have no ring.
        """
        return ring_of(self.schedule, self.n // self.ulysses_degree)

    @property
    def heads(self) -> tuple[HeadShare, ...]:
        """Heads of each rank in a group of ``ulysses_degree`` ranks: one object per rank.

        Its attribute ``q`` is the range of the rank's query heads. ``kv`` is the range of the KV
        heads that these query heads use.
        """
        return split_heads(self.q_heads, self.kv_heads, self.ulysses_degree)

    def blocks(self, rank: int) -> tuple[Block, ...]:
        """Return the blocks that a rank computes, in the order in which their keys arrive.

        Blocks do not overlap, and together they cover all query-key pairs that the mask shows to
        the queries of the rank. In a block that is not ``"masked"``, every query sees at least one
        key of the block. A ``mask_mod`` is called with CPU tensors. With ``schedule="gather"``, one
        kernel launch may compute several blocks.

        Args:
            rank: Rank of the mesh, from 0 to ``n - 1``.

        Returns:
            Blocks with the rank's own keys first. Empty for a rank without positions.

        Raises:
            InputError: ``rank`` is not an int from 0 to ``n - 1``.
        """
        check_rank(rank, self.n)
        by_source = part_of(self.executed, rank // self.ulysses_degree).blocks
        return tuple(block for blocks in by_source.values() for block in blocks)

    def fetches(self, rank: int) -> dict[int, Ranges]:
        """Return which keys and values a rank receives from each other rank.

        With ``schedule="direct"``, these are the rows that the mask shows to the queries of the
        rank. With the other schedules, these are all rows.

        Args:
            rank: Rank of the mesh, from 0 to ``n - 1``.

        Returns:
            A dict from the source to ranges of indices into its local keys. The source is a rank of
            the schedule, ``rank // ulysses_degree``. Sources are in the order of their use.

        Raises:
            InputError: ``rank`` is not an int from 0 to ``n - 1``.
        """
        check_rank(rank, self.n)
        fetched = part_of(self.executed, rank // self.ulysses_degree).receive_rows
        return {source: keys for source, keys in fetched.items() if keys}

    def bytes_received(self, rank: int) -> int:
        """Return the number of bytes that a rank receives in one forward and backward.

        The table holds if all ranks have equal lengths. ``U`` is the size of one rank's keys and
        values together, in bytes. ``Q`` is the mean of the sizes of its queries and of its outputs,
        in bytes. ``a`` is the element size of gradient sums divided by the element size of the
        tensors.

        | mode | bytes |
        |---|---|
        | gather | ``2 (n - 1) U`` |
        | ring, double ring | ``2 (n - 1) U + (n - 1) U a`` |
        | direct | 3 times the fetched rows |
        | another ``keep_kv`` than the default | ``(n - 1) U`` less if True, more if False |
        | ``load_balance`` | ``2 Q`` more |
        | Ulysses | ``2 (n - 1) / n (2 Q + U)``; a KV head counts once for each rank that reads it |

        Args:
            rank: Rank of the mesh, from 0 to ``n - 1``.

        Returns:
            Bytes received by all collectives of one attention.

        Raises:
            InputError: ``rank`` is not an int from 0 to ``n - 1``.
        """
        check_rank(rank, self.n)
        if (plan := self.executed) is not self:
            return plan.bytes_received(rank)
        group, place = divmod(rank, self.ulysses_degree)
        element = self.batch * self.itemsize
        both = self.head_size + self.value_size  # of queries and outputs, or of keys and values
        keys = len(self.heads[place].kv) * both * self._key_rows(group)
        halves = 0
        if self.load_balance and rank != self.n - 1 - rank:
            halves = 2 * self.q_heads * both * (self.lengths[rank] // 2)
        return (self._exchanged_rows(rank) * both + keys + halves) * element

    def imbalance(self) -> float:
        """Return the largest work of a rank divided by the mean work.

        The work of a rank is the number of query-key pairs that the mask shows to its queries,
        times its number of query heads. A ``mask_mod`` is ignored.

        Returns:
            A number of at least 1. It is 1.0 if all ranks have equal work or if there is no work.
        """
        pairs = [pairs_of(rows, self.mask, self.seq_len) for rows in self.queries]
        heads = [len(share.q) for share in self.heads]
        work = [p * h for p in pairs for h in heads]
        return max(work) * self.n / sum(work) if sum(work) else 1.0

    def explain(self) -> str:
        """Describe the plan in text.

        Returns:
            One line for the plan, then one line per rank: number of rows, query-key pairs, received
            bytes, rows of keys received from each source, and blocks.
        """
        layout = repr(self.layout)
        if isinstance(self.layout, Auto):
            layout += f" -> {self.layout.choice(self.n, self.seq_len, self.mask.rest)!r}"
        title = (
            f"{layout}, {self.mask!r}, n={self.n}, seq_len={self.seq_len}, "
            f"schedule={self.schedule!r}, ulysses_degree={self.ulysses_degree}: "
            f"imbalance {self.imbalance():.3f}"
        )
        return "\n".join([title, *(_line(self, rank) for rank in range(self.n))])

    def _exchanged_rows(self, rank: int) -> int:
        """Return the rows of pairs of heads, of q and out or of k and v, that Ulysses brings."""
        group, place = divmod(rank, self.ulysses_degree)
        mine = self.lengths[rank]
        others = sum(self.lengths[group * self.ulysses_degree :][: self.ulysses_degree]) - mine
        into = [len(h.q) + len(h.kv) for h in self.heads]
        # In: others' rows of this rank's heads of q, k and v. Out: this rank's rows of the other
        # ranks' heads of the output. The backward moves the gradients of the same, the other way
        # round.
        return into[place] * others + mine * (sum(into) - into[place])

    def _key_rows(self, group: int) -> int:
        """Return the rows of keys and values that the schedule brings, weighted by their size."""
        part = part_of(self, group)
        passes = 1 if self.keep_kv else 2
        fetched = passes * sum(map(size, part.receive_rows.values()))
        if self.ring is None:
            return fetched + sum(map(size, part.send_rows.values()))
        sums = [self.ring.source(group, step) for step in range(2, self.ring.n)]
        returned = sum(part.lengths[source] for source in sums)
        returned += part.lengths[group] if self.ring.n > 1 else 0
        return fetched + returned * max(self.itemsize, 4) // self.itemsize


def _with(plan: AttentionPlan, mask_mod: MaskMod | None) -> AttentionPlan:
    """Return a plan without a function with this one."""
    return plan if mask_mod is None else replace(plan, mask=replace(plan.mask, mask_mod=mask_mod))


class PartOf(Protocol):
    """What makes the part of a rank of a plan."""

    def __call__(
        self, plan: AttentionPlan, rank: int, windows: bool = False, device: str = "cpu"
    ) -> Part:
        """Return it."""
        ...


# What functions of masks show, by the id of the function; only as long as it lives.
_PARTS: dict[int, tuple[ref[MaskMod], dict[tuple[object, ...], Part]]] = {}


def _kept(make: PartOf) -> PartOf:
    """Return ``make``, which keeps the latest parts; those of a function as long as it lives."""
    plain = lru_cache(maxsize=4 * _BATCHES)(make)  # simulated ranks live in one process

    def kept(plan: AttentionPlan, rank: int, windows: bool = False, device: str = "cpu") -> Part:
        function = plan.mask.mask_mod
        if function is None:
            return plain(plan, rank, windows, device)
        known = _parts_of(function)
        key = make, plan.rest, rank, windows, device
        part = known.get(key)
        if part is None:
            if len(known) >= 4 * _BATCHES:
                known.clear()
            part = known[key] = make(plan, rank, windows, device)
        return part

    return kept


def _parts_of(function: MaskMod) -> dict[tuple[object, ...], Part]:
    place = id(function)
    known = _PARTS.get(place)
    if known is None or known[0]() is not function:
        try:
            seen = ref(function, lambda _: _PARTS.pop(place, None))
        except TypeError:  # nobody can tell when it is gone
            return {}
        known = _PARTS[place] = seen, {}
    return known[1]


@_kept
def part_of(plan: AttentionPlan, rank: int, windows: bool = False, device: str = "cpu") -> Part:
    """Return the row and the column of a rank of the schedule.

    ``windows`` leaves windows whole, for kernels that take them; ``device`` is where the function
    of a mask is asked.
    """
    if plan.mask.mask_mod is not None and plan.n > 1:
        _ask_corners(plan, device)
    lengths = plan.lengths
    if plan.ulysses_degree > 1:
        groups = range(0, plan.n, plan.ulysses_degree)
        lengths = tuple(sum(lengths[i : i + plan.ulysses_degree]) for i in groups)
    return make_part(
        rank,
        sources_of(plan, rank),
        _documents(plan.rest),
        plan.mask.band,
        lengths,
        all_keys=SCHEDULES[name_of(plan.schedule)].all_keys,
        windows=windows,
        look=None if plan.mask.mask_mod is None or not plan.batch else _look_of(plan, device),
    )


def _ask_corners(plan: AttentionPlan, device: str) -> None:
    """Ask the function of a mask for the first and the last pair, so that every rank sees it fail.

    Each rank asks for its own rows only then, of which it may have none.
    """
    import torch

    from ._mask_mod import shown

    length, where = plan.row_length, torch.device(device)
    if plan.mask.mask_mod is None or not (plan.batch and length):
        return
    rows = plan.batch if plan.sequences == 1 else plan.sequences
    ends = (torch.tensor([0, size - 1], device=where) for size in (rows, plan.q_heads, length))
    batch, heads, positions = ends
    shown(plan.mask.mask_mod, batch, heads, positions, positions)


def _look_of(plan: AttentionPlan, device: str) -> Look:
    """Return what tells of tiles what the function of the mask shows, of all heads and rows."""
    import torch

    from ._mask_mod import tiles_of

    queries, groups, where = plan.queries, plan.groups, torch.device(device)
    length, batch = plan.row_length, range(plan.batch)

    def look(rank: int, source: int, piece: Piece, side: int) -> Tiles:
        sides = members(queries[rank], piece.rows), members(groups[source], piece.keys)
        row = sides[0][0].start // length  # of the batch, where its rows are one sequence
        rows, keys = (
            tuple(range(x.start - row * length, x.stop - row * length) for x in held)
            for held in sides
        )
        of_batch = batch if plan.sequences == 1 else range(row, row + 1)
        return tiles_of(plan.mask, of_batch, plan.q_heads, rows, keys, side, where)

    return look


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank does, of all that a plan says: made once for a plan and a rank.

    ``queries`` are the positions of its rows in the schedule and ``keys`` those of each rank's keys
    there; ``chunks`` are those of its Ulysses neighbours, and ``shares`` their heads, among which
    it has the place ``place``. Where all keys are gathered they are one more source, behind the
    ranks, and ``places`` says where each rank's chunks are.
    """

    ring: Ring | None
    queries: Ranges
    keys: Chunks
    chunks: Chunks
    shares: tuple[HeadShare, ...]
    place: int
    places: tuple[Ranges, ...] = ()

    @property
    def share(self) -> HeadShare:
        """Return this rank's heads."""
        return self.shares[self.place]


def rank_plan_of(plan: AttentionPlan, rank: int) -> RankPlan:
    """Return what a rank of a plan that is carried out does."""
    return _rank_plan_of(plan.rest, rank)


@lru_cache(maxsize=4 * _BATCHES)  # simulated ranks live in one process
def _rank_plan_of(plan: AttentionPlan, rank: int) -> RankPlan:
    group, place = divmod(rank, plan.ulysses_degree)
    keys = plan.groups
    places: tuple[Ranges, ...] = ()
    if gathers(plan):
        pieces = pieces_of(keys)
        places = places_of(pieces)
        starts = [place.start for held in places for place in held]
        in_memory = sorted(zip(starts, (x for held in pieces for x in held), strict=True))
        keys = (*keys, tuple(chunk for _, piece in in_memory for chunk in piece))
    return RankPlan(
        ring=plan.ring,
        queries=plan.queries[group],
        keys=keys,
        places=places,
        chunks=plan.chunks[rank - place : rank - place + plan.ulysses_degree],
        shares=plan.heads,
        place=place,
    )


def gathers(plan: AttentionPlan) -> bool:
    """Return whether all keys of several ranks come at once, as one more source."""
    return SCHEDULES[name_of(plan.schedule)].gathers and plan.n > plan.ulysses_degree


@_kept
def executed_part_of(
    plan: AttentionPlan, rank: int, windows: bool = False, device: str = "cpu"
) -> Part:
    """Return what a rank of the schedule carries out, with the arguments of `part_of`.

    Over gathered keys, which are not in the order of positions, windows are cut.
    """
    if not gathers(plan):
        return part_of(plan, rank, windows=windows, device=device)
    part = part_of(plan, rank, device=device)
    return gathered_part(part, rank, plan.queries, pieces_of(plan.groups))


@lru_cache(maxsize=_BATCHES)
def _executed(plan: AttentionPlan) -> AttentionPlan:
    def of_all(chunks: Ranges) -> Ranges:
        starts = range(0, plan.batch * plan.seq_len, plan.seq_len) if plan.seq_len else ()
        return tuple(range(at + c.start, at + c.stop) for at in starts for c in chunks)

    return replace(
        plan,
        mask=plan.mask.one_behind_the_other(plan.seq_len),
        seq_len=plan.batch * plan.seq_len,
        batch=1,
        sequences=plan.batch,
        chunks=tuple(map(of_all, plan.chunks)),
        lengths=tuple(plan.batch * length for length in plan.lengths),
    )


@lru_cache(maxsize=_BATCHES)
def _documents(plan: AttentionPlan) -> tuple[Document, ...]:
    documents = plan.mask.documents(plan.seq_len)
    return cut_documents(plan.chunks, documents, plan.ulysses_degree, plan.load_balance)


def sources_of(plan: AttentionPlan, rank: int) -> list[int]:
    """Return all ranks of the schedule as ``rank`` meets their keys: itself, then the others."""
    n = plan.n // plan.ulysses_degree
    if plan.ring is not None:
        return [plan.ring.source(rank, step) for step in range(n)]
    return [(rank - step) % n for step in range(n)]


def plan_attention(
    mask: MaskSpec,
    layout: Layout | None,
    n: int,
    seq_len: int,
    *,
    schedule: Schedule = "direct",
    ulysses_degree: int = 1,
    keep_kv: bool | None = None,
    load_balance: bool = False,
    batch: int = 1,
    q_heads: int | None = None,
    kv_heads: int | None = None,
    head_size: int = 1,
    value_size: int | None = None,
    itemsize: int = 1,
) -> AttentionPlan:
    """Plan one attention: the blocks, the communication and the work of every rank.

    The function is pure: it needs neither torch nor a process group. The latest 16 plans are
    cached.

    Args:
        mask: Attention mask.
        layout: Layout of the sequence. None means `Contiguous`.
        n: Number of ranks that share the sequence.
        seq_len: Length of the whole sequence, in positions.
        schedule: ``"direct"``, ``"gather"``, ``"ring"``, ``"double_ring"`` or a `DoubleRing`, as
            for `context_parallel_attention`. Defaults to ``"direct"``.
        ulysses_degree: Number of neighbouring ranks that exchange rows for heads. It must divide
            ``n``. Defaults to 1: no exchange.
        keep_kv: If True, received keys and values are kept for the backward. If False, the backward
            fetches them again. Defaults to None: True for ``"gather"``, else False.
        load_balance: If True, rank ``r`` swaps the second half of its queries with rank
            ``n - 1 - r``, as in `ContextParallel`. Defaults to False.
        batch: Number of rows of the batch. Defaults to 1.
        q_heads: Number of query heads of all ranks. Defaults to ``ulysses_degree``.
        kv_heads: Number of KV heads of all ranks. Defaults to ``q_heads``.
        head_size: Head size of queries and keys. Defaults to 1.
        value_size: Head size of values and outputs. Defaults to ``head_size``.
        itemsize: Bytes per element of the tensors. Defaults to 1.

    Returns:
        The plan of all ranks.

    Raises:
        InputError: An argument has the wrong type or an invalid value; the documents of the mask do
            not end at ``seq_len``, or their number of rows is not ``batch``; the layout does not
            partition the sequence; ``ulysses_degree`` does not divide ``n`` or is larger than
            ``q_heads``; or ``kv_heads`` does not divide ``q_heads``.

    Examples:
        >>> plan = plan_attention(
        ...     MaskSpec(causal=True), Zigzag(), n=4, seq_len=64, q_heads=8, kv_heads=2
        ... )
        >>> plan.imbalance()
        1.0
        >>> print(plan.explain())
        Zigzag(), MaskSpec(causal=True, ...), n=4, seq_len=64, ...
        rank 0: 16 rows, 520 pairs, ...
    """
    given = (mask, layout, n, seq_len, schedule, ulysses_degree, keep_kv, load_balance, batch)
    sizes = (q_heads, kv_heads, head_size, value_size, itemsize)
    asked: object = mask  # which may be another object
    mask_mod = asked.mask_mod if isinstance(asked, MaskSpec) else None
    rest = mask if mask_mod is None else mask.rest
    try:
        return _with(_known(rest, *given[1:], *sizes), mask_mod)  # type: ignore[arg-type]  # a hash
    except TypeError:  # something has none, which the checks name
        return _checked(*given, *sizes)


def _checked(
    mask: MaskSpec,
    layout: Layout | None,
    n: int,
    seq_len: int,
    schedule: Schedule,
    ulysses_degree: int,
    keep_kv: bool | None,
    load_balance: bool,
    batch: int,
    q_heads: int | None,
    kv_heads: int | None,
    head_size: int,
    value_size: int | None,
    itemsize: int,
) -> AttentionPlan:
    check_schedule(schedule)
    check_mask(mask)
    layout = checked_layout(layout)
    check_size(n, seq_len)
    check_degree(ulysses_degree, n)
    q_heads = ulysses_degree if q_heads is None else q_heads
    kv_heads = q_heads if kv_heads is None else kv_heads
    check_heads(q_heads, kv_heads, ulysses_degree, n)
    value_size = head_size if value_size is None else value_size
    check_sizes(batch=batch, head_size=head_size, value_size=value_size, itemsize=itemsize)
    check_flags(keep_kv=keep_kv, load_balance=load_balance)
    ring_of(schedule, n // ulysses_degree)
    if load_balance:
        check_balance(layout, n, seq_len, ulysses_degree, schedule)
    check_documents(mask, batch, load_balance)
    return AttentionPlan(
        mask=mask,
        layout=layout,
        n=n,
        seq_len=seq_len,
        schedule=schedule,
        ulysses_degree=ulysses_degree,
        keep_kv=SCHEDULES[name_of(schedule)].keeps_kv if keep_kv is None else keep_kv,
        load_balance=load_balance,
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        value_size=value_size,
        itemsize=itemsize,
        chunks=checked_chunks(layout, n, seq_len, mask),
        lengths=_lengths(layout, n, seq_len, mask.rest),  # type: ignore[arg-type]  # it has a hash
    )


_known = lru_cache(maxsize=_BATCHES, typed=True)(_checked)  # typed: True is no 1


@lru_cache(maxsize=_BATCHES)
def _lengths(layout: Layout, n: int, seq_len: int, mask: MaskSpec) -> tuple[int, ...]:
    return lengths_of(checked_chunks(layout, n, seq_len, mask))


def check_degree(ulysses_degree: int, n: int) -> None:
    """Raise `InputError` unless ``n`` ranks can run at ``ulysses_degree``."""
    given = ulysses_degree
    if type(given) is not int or not 1 <= given <= n or n % given:
        legal = [u for u in range(1, n + 1) if n % u == 0]
        where = "one context parallel rank" if n == 1 else f"{n} context parallel ranks"
        raise InputError(
            f"ulysses_degree={ulysses_degree!r} does not divide {where}; use {_listed(legal)}"
        )


def check_heads(q_heads: int, kv_heads: int, ulysses_degree: int, n: int) -> None:
    """Raise `InputError` unless the heads group, and every Ulysses rank gets one."""
    if type(q_heads) is not int or type(kv_heads) is not int:
        raise InputError(
            f"numbers of heads are ints, got q_heads={q_heads!r} and kv_heads={kv_heads!r}"
        )
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise InputError(
            f"{q_heads} query heads do not form equal groups over {kv_heads} kv heads; the number "
            f"of query heads must be a multiple of the number of kv heads"
        )
    if q_heads < ulysses_degree:
        legal = [u for u in range(1, q_heads + 1) if n % u == 0]
        raise InputError(
            f"{q_heads} query heads and {kv_heads} kv heads cannot give each of {ulysses_degree} "
            f"Ulysses ranks a head; use ulysses_degree={_listed(legal)}, and a schedule across the "
            f"others"
        )


def check_sizes(*, batch: int, head_size: int, value_size: int, itemsize: int) -> None:
    """Raise `InputError` unless these can be the sizes of a tensor, which may be empty."""
    least = {
        "batch": (batch, 0),
        "head_size": (head_size, 0),
        "value_size": (value_size, 0),
        "itemsize": (itemsize, 1),
    }
    for name, (value, lowest) in least.items():
        if type(value) is not int or value < lowest:
            raise InputError(f"{name}={described(value)} is no size; use an int from {lowest} on")


def check_flags(*, keep_kv: object, load_balance: object) -> None:
    """Raise `InputError` for flags that are neither True nor False; ``keep_kv`` may be None."""
    if keep_kv is not None and type(keep_kv) is not bool:
        raise InputError(f"keep_kv is {described(keep_kv)}; use True, False or None")
    if type(load_balance) is not bool:
        raise InputError(f"load_balance is {described(load_balance)}; use True or False")


def check_documents(mask: MaskSpec, batch: int, load_balance: bool) -> None:
    """Raise unless a mask with documents of each row has as many rows as the batch."""
    if mask.per_row and len(mask.ends) != batch:
        raise InputError(
            f"cu_seqlens have the documents of {len(mask.ends)} rows, but the batch has {batch}; "
            f"give one tuple for each row of the batch, or one for all of them"
        )
    if mask.per_row and load_balance:
        raise InputError(
            "load_balance swaps the halves of rows that share their documents; use layout=Zigzag() "
            "where each row of the batch has its own"
        )


def check_rank(rank: int, n: int) -> None:
    """Raise `InputError` unless ``rank`` is one of ``n``."""
    if type(rank) is not int or not 0 <= rank < n:
        raise InputError(f"a plan of {n} ranks has no rank {rank!r}; use 0 to {n - 1}")


def check_balance(
    layout: Layout | None, n: int, seq_len: int, ulysses_degree: int, schedule: object
) -> None:
    """Raise unless every rank can swap half of its queries under ``load_balance``."""
    if ulysses_degree != 1 or schedule != "gather":
        raise InputError(
            f"load_balance swaps queries around gathered keys, got ulysses_degree="
            f"{ulysses_degree} and schedule={schedule!r}; use ulysses_degree=1 and "
            f"schedule='gather', or layout=Zigzag() without load_balance"
        )
    if not isinstance(layout, Contiguous):
        raise InputError(f"load_balance is for Contiguous sequences, got {layout!r}; leave it out")
    if seq_len % (2 * n):
        raise InputError(
            f"load_balance halves equal local lengths, but {seq_len} positions on {n} ranks do not "
            f"give each an even number; pad to a multiple of {2 * n}, or use layout=Zigzag()"
        )


def _listed(values: list[int]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def _line(plan: AttentionPlan, rank: int) -> str:
    blocks = plan.blocks(rank)
    shown = ", ".join(map(_named, blocks[:_SHOWN]))
    if len(blocks) > _SHOWN:
        shown += f" and {len(blocks) - _SHOWN} more"
    fetched = ", ".join(f"{size(rows)} of {s}" for s, rows in plan.fetches(rank).items())
    return (
        f"rank {rank}: {plan.lengths[rank]} rows, {sum(b.pairs for b in blocks)} pairs, "
        f"{plan.bytes_received(rank)} bytes received, key rows fetched: {fetched or 'none'}; "
        f"computes {shown or 'nothing'}"
    )


def _named(block: Block) -> str:
    side = f"{len(block.queries) // block.tiles}x{len(block.keys) // block.tiles}"
    times = f"{block.tiles} times " if block.tiles > 1 else ""
    return f"{times}{block.kind} {side} from {block.source}"
