"""Execute a plan: keys come, blocks are computed with them, and their gradients return.

`MOVEMENTS` says of each schedule how keys come and gradients go. Forward and backward are one
autograd function, which meets keys in the schedule's order, each next part on its way while the
last one is computed with.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hp_dtensor import Work
from hp_dtensor.torch_compat import backward_keeps_graph, without_autocast

from ._blocks import Part, local_rows
from ._blockwise import (
    Batch,
    BlockKernel,
    KVGradient,
    OnlineSoftmax,
    Positions,
    RowSum,
    RowViews,
    accumulator,
    backward_batch,
    batches_of,
    first_order,
    forward_batch,
    gradient_of_sinks,
)
from ._lineage import Origin
from ._mask_mod import whole_function
from ._mesh import Pair, Peers, RankGroups
from ._plan import AttentionPlan, executed_part_of, rank_plan_of
from ._ranges import Ranges, size, within
from ._routes import Ring, ScheduleName, name_of
from ._torch import as_one
from .kernels._choose import Backends
from .kernels._interface import ScoreOptions, ints_on


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSchedule:
    """What one rank of a schedule computes, receives and sends; keeps no tensors and no groups.

    ``batches``: by source, the blocks as they are launched and merged. The others are for
    ``gather``, whose buffer has all ranks' key rows: ``rows`` of them. ``places``: by rank, where
    its pieces are in the buffer. ``sent``: this rank's pieces as local rows. ``regions``: the part
    of the buffer that each all-gathered piece fills; None if ranks' lengths differ and rows are
    sent point to point. ``by_rank``: for each row of the buffer, in order, its position if rows
    were sorted by rank.
    """

    plan: AttentionPlan
    part: Part
    batches: Mapping[int, tuple[Batch, ...]]
    movement: "Movement"
    ring: Ring | None
    rank: int
    n: int
    kernel: BlockKernel
    places: tuple[Ranges, ...]
    rows: int
    sent: Ranges
    regions: Ranges | None
    by_rank: Ranges
    own_rows: Ranges
    own_place: range | None  # of this rank's rows in those that are gathered, if they are one range
    origin: Origin


def rank_schedule_of(
    plan: AttentionPlan,
    groups: RankGroups,
    backends: Backends,
    options: ScoreOptions,
    device: torch.device,
    *,
    fuse_merges: bool,
) -> RankSchedule:
    """Return the part of this rank in a plan that is carried out.

    Asks the function of the mask for this rank's rows and keys, on ``device``, the first time.
    """
    mine, positions = rank_plan_of(plan, groups.rank), None
    mask_mod = None if backends.masked is None else whole_function(plan.mask)
    if options.placed or mask_mod is not None:
        positions = Positions(mine.queries, mine.keys, mine.share.q, plan.row_length)
    kernel = BlockKernel(
        backend=backends.blocks,
        repeats=mine.share.repeats,
        options=options,
        masked=backends.masked,
        mask_mod=mask_mod,
        positions=positions,
        fused=fuse_merges,
    )
    where, rank = str(device) if mask_mod is not None else "cpu", groups.ring.index
    part = executed_part_of(plan, rank, backends.windows, where)
    own_rows = whole(part.lengths[rank])
    one = mine.places and len(mine.places[rank]) <= 1
    alike = groups.ring.whole and len({tuple(map(len, held)) for held in mine.places}) == 1
    return RankSchedule(
        plan=plan,
        part=part,
        batches=batches_of(
            part.blocks, {**part.receive_rows, rank: own_rows}, part.lengths[rank], kernel
        ),
        movement=MOVEMENTS[name_of(plan.schedule)],
        ring=mine.ring,
        rank=rank,
        n=groups.ring.size,
        kernel=kernel,
        places=mine.places,
        rows=sum(part.lengths),
        sent=local_rows(map(len, mine.places[rank])) if mine.places else (),
        regions=tuple(
            range(held[0].start, held[-1].stop) for held in zip(*mine.places, strict=True)
        )
        if alike
        else None,
        by_rank=_by_rank(mine.places),
        own_rows=own_rows,
        own_place=next(iter(mine.places[rank]), range(0)) if one else None,
        origin=Origin(plan),
    )


def _by_rank(places: Sequence[Ranges]) -> Ranges:
    gathered = [place for held in places for place in held]
    both = zip(gathered, local_rows(map(len, gathered)), strict=True)
    return tuple(rows for _, rows in sorted(both, key=lambda x: x[0].start))


def whole(rows: int) -> Ranges:
    """Return all of a number of rows."""
    return (range(rows),) if rows else ()


def room_for(rows: Ranges, like: Pair, dtype: torch.dtype | None = None) -> Pair:
    """Return empty keys and values ``[batch, rows, kv_heads, size]``, as pairs travel."""
    k, v = like
    batch, _, heads, width = k.shape
    length, dtype = size(rows), dtype or k.dtype
    return (
        k.new_empty((batch, length, heads, width), dtype=dtype),
        v.new_empty((batch, length, heads, v.shape[3]), dtype=dtype),
    )


def packed(k: Tensor, v: Tensor, rows: Ranges) -> Pair:
    """Return some rows of k and v as dense tensors, which may be k and v."""
    return _dense(k, rows), _dense(v, rows)


def _dense(x: Tensor, rows: Ranges) -> Tensor:
    parts = [x[:, part.start : part.stop] for part in rows]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts or [x[:, :0]], 1)


class PendingWork:
    """Passes calls on to peers, and waits for those under way where the pass raises.

    What a peer has sent already would else be taken for the answer to a later call. Where waiting
    itself fails the group is broken, and the rest is not waited for: each call under way would take
    another timeout. The pass raises what it raised first, with a note of what waiting said.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._under_way: set[_Call] = set()

    def all_gather(self, parts: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
        """Start one; see `Peers.all_gather`."""
        return _Call(self.peers.all_gather(parts, outputs), self._under_way)

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> Work:
        """Start one; see `Peers.exchange`."""
        return _Call(self.peers.exchange(sends, receives), self._under_way)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Work:
        """Start one; see `Peers.all_to_all`."""
        return _Call(self.peers.all_to_all(x, send, receive), self._under_way)

    def __enter__(self) -> "PendingWork":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception):  # an interrupt does not wait
            return
        try:
            while self._under_way:
                next(iter(self._under_way)).wait()
        except RuntimeError as other:
            error.add_note(f"while waiting for the peers' calls: {other}")


class _Call:
    """A work that is under way until it is waited for, and holds no tensors afterwards."""

    def __init__(self, work: Work, under_way: "set[_Call]") -> None:
        self._work = work
        self._under_way = under_way
        under_way.add(self)

    def wait(self) -> list[Tensor]:
        rest = self._under_way - {self}
        self._under_way.clear()  # if this fails, none is left to wait for
        outputs = self._work.wait()
        self._under_way |= rest
        return outputs


Arrivals = Iterator[tuple[int, Tensor, Tensor]]  # a source, and its keys and values


def _gather(k: Tensor, v: Tensor, schedule: RankSchedule, calls: PendingWork) -> Arrivals:
    """One all-gather; point to point where lengths differ or not all of an axis takes part.

    Memory is ``[rows, batch, kv_heads, size]``, so that what all ranks send is one range of it.
    """
    places, rank = schedule.places, schedule.rank
    given = k.transpose(0, 1), v.transpose(0, 1)
    shapes = [(schedule.rows, *x.shape[1:]) for x in given]
    memory = k.new_empty(sum(map(math.prod, shapes)))  # one, which gradients can take later
    sides = zip(memory.split([*map(math.prod, shapes)]), shapes, strict=True)
    every = tuple([side.view(shape) for side, shape in sides])
    mine = _ranges_of(given, schedule.sent)
    if schedule.regions is not None:
        work = calls.all_gather(mine, _ranges_of(every, schedule.regions))
    else:
        parts = {s: _ranges_of(every, held) for s, held in enumerate(places) if held}
        for room, part in zip(parts.pop(rank, ()), mine, strict=True):
            room.copy_(part)
        peers = range(len(places)) if mine else ()
        work = calls.exchange({peer: mine for peer in peers if peer != rank}, parts)
    yield rank, k, v
    work.wait()
    all_k, all_v = (x.transpose(0, 1) for x in every)
    for source in schedule.part.receive_rows:
        yield source, all_k, all_v


def _ranges_of(tensors: Sequence[Tensor], rows: Sequence[range]) -> list[Tensor]:
    """Return ranges of the first dim of each tensor, dense."""
    return [x[part.start : part.stop].contiguous() for x in tensors for part in rows]


def _direct(k: Tensor, v: Tensor, schedule: RankSchedule, calls: PendingWork) -> Arrivals:
    """One exchange per step: from the owner ``step`` ranks before, to that ``step`` ranks after."""
    n, rank, part = schedule.n, schedule.rank, schedule.part
    if k.shape[0] == 1 and any(part.send_rows.values()):
        k, v = packed(k, v, schedule.own_rows)  # whose ranges are dense then
    packs: dict[Ranges, Pair] = {}

    def start(step: int) -> tuple[Pair, Work]:
        source, target = (rank - step) % n, (rank + step) % n
        room = room_for(part.receive_rows[source], (k, v))
        sends = {}
        if rows := part.send_rows[target]:
            if rows not in packs:
                packs.clear()  # only the last one is kept
                packs[rows] = packed(k, v, rows)
            sends[target] = packs[rows]
        return room, calls.exchange(sends, {source: room} if part.receive_rows[source] else {})

    arriving = start(1)
    yield rank, k, v
    for step in range(1, n):
        source = (rank - step) % n
        room, work = arriving
        work.wait()
        if step + 1 < n:
            arriving = start(step + 1)
        yield source, *room


def _around(k: Tensor, v: Tensor, schedule: RankSchedule, calls: PendingWork) -> Arrivals:
    """Pass on what is held: to the neighbour at once, and once per round to the next ring."""
    ring = _ring_in(schedule)
    held = packed(k, v, schedule.own_rows)
    inside: tuple[Pair, Work] | None = None
    outside: tuple[Pair, Work] | None = None

    def start(step: int, to: int, origin: int) -> tuple[Pair, Work]:
        rows = whole(schedule.part.lengths[ring.source(schedule.rank, step)])
        part = room_for(rows, (k, v))
        sends = {to: held} if held[0].shape[1] else {}
        return part, calls.exchange(sends, {origin: part} if rows else {})

    for step in range(ring.n):
        arrived = outside if step % ring.inner == 0 else inside
        if arrived is not None:
            held, work = arrived
            work.wait()
        if step % ring.inner == 0 and step + ring.inner < ring.n:
            neighbours = ring.next_outer(schedule.rank), ring.next_outer(schedule.rank, -1)
            outside = start(step + ring.inner, *neighbours)
        if (step + 1) % ring.inner:
            neighbours = ring.next_inner(schedule.rank), ring.next_inner(schedule.rank, -1)
            inside = start(step + 1, *neighbours)
        yield ring.source(schedule.rank, step), *held


class Returns(Protocol):
    """What takes a rank's shares of the others' gradients; calls come in the schedule's order.

    What the others computed is added to this rank's own sum, always in the same order.
    """

    def add(self, source: int, share: KVGradient | None, spent: Pair | None) -> None:
        """Add this rank's gradients of the rows fetched from ``source``.

        Args:
            source: Rank of the schedule that owns the rows.
            share: Gradients of the rows; None if no block used them.
            spent: Keys and values of the rows if nothing needs them any more. Their memory may be
                reused.
        """
        ...

    def finish(self) -> None:
        """Wait for what has not arrived."""
        ...


class _Straight:
    """To the owner at once, in the dtype of the keys; added there from the next rank on.

    What comes is taken one step later, so that few parts are held at a time.
    """

    def __init__(
        self, schedule: RankSchedule, own: KVGradient, like: Pair, calls: PendingWork
    ) -> None:
        self._schedule = schedule
        self._own = own
        self._like = like
        self._dtype = like[0].dtype
        self._calls = calls
        self._coming: tuple[int, Pair, Work] | None = None

    def add(self, source: int, share: KVGradient | None, spent: Pair | None) -> None:
        schedule, n = self._schedule, self._schedule.n
        peer = (2 * schedule.rank - source) % n  # as far after this rank as the source is before
        sends, receives = {}, {}
        if share is None and (rows := schedule.part.receive_rows[source]):
            share = KVGradient(self._like, size(rows))  # seen by no row here; the owner waits
        if share is not None:
            dk, dv = share.pair
            sends[source] = dk.to(self._dtype), dv.to(self._dtype)
        part = room_for(schedule.part.send_rows[peer], self._like)
        if schedule.part.send_rows[peer]:
            receives[peer] = part
        work = self._calls.exchange(sends, receives)
        self.finish()
        self._coming = peer, part, work

    def finish(self) -> None:
        if self._coming is None:
            return
        peer, (dk, dv), work = self._coming
        self._coming = None
        work.wait()
        if rows := self._schedule.part.send_rows[peer]:
            self._own.add(rows, dk, dv)


class _Scattered:
    """Returns gradients by one all-to-all in the dtype of the keys; the owner sums them.

    The owner sums in the accumulator's dtype and in a fixed order. A reduce-scatter would move as
    many bytes, but would sum in the dtype of the keys and in no fixed order. Each row of the
    message holds the gradient of a key, then that of its value.
    """

    def __init__(
        self, schedule: RankSchedule, own: KVGradient, like: Pair, calls: PendingWork
    ) -> None:
        self._schedule = schedule
        self._own = own
        self._like = like
        self._calls = calls
        self._shapes = [(x.shape[0], *x.shape[2:]) for x in like]  # of a row in memory
        self._widths = [*map(math.prod, self._shapes)]
        self._coming: Work | None = None

    def add(self, source: int, share: KVGradient | None, spent: Pair | None) -> None:
        schedule = self._schedule
        room = None if spent is None else as_one(*spent)
        increment_version(spent or ())
        if room is None:
            room = self._like[0].new_empty(schedule.rows * sum(self._widths))
        room = room.view(schedule.rows, sum(self._widths))
        # Owners wait for a gradient of every gathered row: send zeros for those unused here.
        rows, sums = (range(0), None) if share is None else share.take()
        if len(rows) < schedule.rows:
            room.zero_()
        if sums is not None:
            self._pack(room, rows, sums)
        del sums
        lengths = schedule.part.lengths
        mine = [lengths[schedule.rank]] * len(lengths)
        self._coming = self._calls.all_to_all(room, lengths, mine)

    def _pack(self, room: Tensor, rows: range, sums: Pair) -> None:
        """Copy the gradients ``sums`` of the gathered ``rows`` to ``room``, sorted by rank."""
        n, regions = self._schedule.n, self._schedule.regions
        cuts = [(x, within(rows, x), len(x) // n) for x in regions or ()]
        # If `rows` holds whole pieces of ranks only, each region is one strided copy.
        even = regions is not None and not any(
            length and ((cut.start - x.start) % length or len(cut) % length)
            for x, cut, length in cuts
        )
        for x, to in zip(sums, self._split(room), strict=True):
            x = x.transpose(0, 1)
            if not even:
                order = ints_on(self._schedule.by_rank, torch.int64, x)[rows.start : rows.stop]
                to.index_copy_(0, order, x.to(to.dtype))
                continue
            pieces = to.unflatten(0, (n, -1)).split([length for _, _, length in cuts], 1)
            for (region, cut, length), piece in zip(cuts, pieces, strict=True):
                if cut:
                    first = (cut.start - region.start) // length
                    part = x[cut.start - rows.start : cut.stop - rows.start]
                    part = part.unflatten(0, (-1, length))
                    piece[first : first + len(part)].copy_(part)

    def _split(self, rows: Tensor) -> list[Tensor]:
        """Return views of the key and the value gradients in the rows of a message."""
        parts = zip(rows.split(self._widths, -1), self._shapes, strict=True)
        return [part.unflatten(-1, shape) for part, shape in parts]

    def finish(self) -> None:
        if self._coming is None:
            return
        (came,), self._coming = self._coming.wait(), None
        n, mine = self._schedule.n, self._schedule.part.lengths[self._schedule.rank]
        parts = self._split(came.view(n, mine, sum(self._widths)))
        for total, part in zip((self._own.k, self._own.v), parts, strict=True):
            total.add((range(mine),), part.sum(0, dtype=accumulator(came.dtype)).transpose(0, 1))


class _Around:
    """Around the ring behind the keys: each rank adds to a sum, which the last one returns."""

    def __init__(
        self, schedule: RankSchedule, own: KVGradient, like: Pair, calls: PendingWork
    ) -> None:
        self._schedule = schedule
        self._ring = _ring_in(schedule)
        self._own = own
        self._like = like
        self._calls = calls
        self._wide = accumulator(like[0].dtype)
        self._step = 0
        self._coming: tuple[Pair, Work] | None = None

    def add(self, source: int, share: KVGradient | None, spent: Pair | None) -> None:
        schedule, ring = self._schedule, self._ring
        self._step += 1
        total = self._arrived()
        if total is None:
            none = KVGradient(self._like, schedule.part.lengths[source])
            total = (none if share is None else share).pair
        elif share is not None:
            dk, dv = share.pair
            total[0].add_(dk)
            total[1].add_(dv)
        returned = self._step + 1 == ring.n
        next_source = schedule.rank if returned else ring.source(schedule.rank, self._step + 1)
        part = room_for(whole(schedule.part.lengths[next_source]), self._like, self._wide)
        sends = {ring.next_gradient(schedule.rank, self._step): total} if total[0].shape[1] else {}
        origin = ring.next_gradient(schedule.rank, self._step, -1)
        receives = {origin: part} if part[0].shape[1] else {}
        self._coming = part, self._calls.exchange(sends, receives)

    def finish(self) -> None:
        total = self._arrived()
        if total is not None and total[0].shape[1]:
            self._own.add((range(total[0].shape[1]),), total[0], total[1])

    def _arrived(self) -> Pair | None:
        if self._coming is None:
            return None
        part, work = self._coming
        self._coming = None
        work.wait()
        return part


def _ring_in(schedule: RankSchedule) -> Ring:
    if schedule.ring is None:
        raise RuntimeError(f"schedule {schedule.plan.schedule!r} has no ring to go around")
    return schedule.ring


class Movement(NamedTuple):
    """How keys come, and how gradients return to their owner, who adds them to its sum."""

    fetch: Callable[[Tensor, Tensor, RankSchedule, PendingWork], Arrivals]
    returns: Callable[[RankSchedule, KVGradient, Pair, PendingWork], Returns]


MOVEMENTS: dict[ScheduleName, Movement] = {
    "gather": Movement(_gather, _Scattered),
    "direct": Movement(_direct, _Straight),
    "ring": Movement(_around, _Around),
    "double_ring": Movement(_around, _Around),
}


def fetch(k: Tensor, v: Tensor, schedule: RankSchedule, calls: PendingWork) -> Arrivals:
    """Yield each source of the schedule once, with its keys and values.

    The transfer of the next source is started before a source is yielded. Every rank must exhaust
    the iterator, else its peers wait.
    """
    if schedule.n == 1:
        return iter([(schedule.rank, k, v)])
    return schedule.movement.fetch(k, v, schedule, calls)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    schedule: RankSchedule,
    peers: Peers,
    *,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention of this rank's rows ``[batch, rows, q_heads, value_size]``.

    With ``return_lse`` also their log-sum-exp ``[batch, rows, q_heads]``, without gradient, else
    None. Communicates what the schedule does, in the forward and again in the backward, whose
    kernels get the output and log-sum-exp over all keys, and over ``sinks`` ``[q_heads]``.
    """
    result = _Attend.apply(q, k, v, sinks, schedule, peers, return_lse)  # type: ignore[no-untyped-call]
    return result if return_lse else (result, None)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        schedule: RankSchedule,
        peers: Peers,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        kernel = schedule.kernel
        rows = OnlineSoftmax(q, v.shape[3], fused=kernel.fused, hides=kernel.masked is not None)
        queries = RowViews(q)
        kept: list[Tensor] = []
        sources: list[int] = []  # of the kept keys and values
        keep = schedule.plan.keep_kv and any(ctx.needs_input_grad)
        with without_autocast(q.device), PendingWork(peers) as calls:
            for source, held_k, held_v in fetch(k, v, schedule, calls):
                if keep and source != schedule.rank:
                    kept += held_k, held_v
                    sources.append(source)
                for batch in schedule.batches[source]:
                    forward_batch(batch, queries, held_k, held_v, kernel, rows)
        out, lse = rows.result(sinks)
        own = (None, None) if kept and schedule.own_place is not None else (k, v)
        ctx.save_for_backward(q, *own, sinks, out, lse, *kept)
        ctx.schedule, ctx.peers, ctx.origin = schedule, peers, schedule.origin
        ctx.sources = sources
        if not return_lse:
            return out
        lse = lse.transpose(1, 2)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, *kept = ctx.saved_tensors
        schedule: RankSchedule = ctx.schedule
        if k is None and (place := schedule.own_place) is not None:
            # Copies: gradients overwrite the gathered keys while this rank's keys are still needed.
            k, v = (x[:, place.start : place.stop].clone() for x in kept)
        grad = grad.contiguous()
        finished = RowViews(grad, q, out, lse)
        dq = RowSum(q)
        own = KVGradient((k, v), k.shape[1])

        with without_autocast(q.device), PendingWork(ctx.peers) as calls:
            returns = schedule.movement.returns(schedule, own, (k, v), calls)
            # If others' keys are kept, own keys come last: others' gradients travel meanwhile.
            others = zip(ctx.sources, kept[::2], kept[1::2], strict=True)
            parts = [*others, (schedule.rank, k, v)] if kept else fetch(k, v, schedule, calls)
            for source, held_k, held_v in parts:
                share = own if source == schedule.rank else KVGradient((k, v), held_k.shape[1])
                batches = schedule.batches[source]
                for batch in batches:
                    part, dk, dv = backward_batch(batch, finished, held_k, held_v, schedule.kernel)
                    dq.add(batch.queries, part)
                    share.add(batch.keys, dk, dv)
                    del part, dk, dv
                if source != schedule.rank:
                    spent = (held_k, held_v) if not (kept and backward_keeps_graph()) else None
                    returns.add(source, share if batches else None, spent)
            returns.finish()
        own_k, own_v = own.pair
        to_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
        shares = dq.total.to(q.dtype), own_k.to(k.dtype), own_v.to(v.dtype)
        return *shares, to_sinks, None, None, None
