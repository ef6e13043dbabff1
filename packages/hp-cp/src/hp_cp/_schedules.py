"""Carry out a plan: keys come, blocks are computed with them, and their gradients go home.

`MOVEMENTS` says of each schedule how keys come and gradients go. Forward and backward are one
autograd function, which meets keys in the schedule's order, each next part on its way while the
last one is computed with.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_dtensor import Work

from ._blocks import Block, Part
from ._blockwise import (
    BlockKernel,
    Held,
    KeySum,
    Positions,
    RowsOut,
    RowSum,
    accumulator,
    backward_blocks,
    forward_blocks,
    gradient_of_sinks,
)
from ._lineage import Origin
from ._mesh import Pair, Peers
from ._plan import AttentionPlan, part_of
from ._ranges import Ranges, size
from ._routes import Ring, ScheduleName, name_of
from .kernels._interface import AttentionBackend, ScoreOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one rank of a schedule computes, receives and sends; keeps no tensors."""

    plan: AttentionPlan
    part: Part
    movement: "Movement"
    ring: Ring | None
    peers: Peers
    kernel: BlockKernel

    @property
    def rank(self) -> int:
        """Return this rank's place in the schedule."""
        return self.peers.index

    @property
    def own_rows(self) -> Ranges:
        """Return all local rows."""
        return whole(self.part.lengths[self.rank])


def run_of(
    plan: AttentionPlan, place: int, peers: Peers, backend: AttentionBackend, options: ScoreOptions
) -> Run:
    """Return the part of the rank at ``peers.index`` that has head share ``place``."""
    share, positions = plan.heads[place], None
    if options.dropout is not None:
        positions = Positions(plan.queries[peers.index], plan.groups, share.q)
    kernel = BlockKernel.of(backend, share.repeats, options, positions)
    return Run(
        plan=plan,
        part=part_of(plan, peers.index),
        movement=MOVEMENTS[name_of(plan.schedule)],
        ring=plan.ring,
        peers=peers,
        kernel=kernel,
    )


def whole(rows: int) -> Ranges:
    """Return all of a number of rows."""
    return (range(rows),) if rows else ()


def room_for(rows: Ranges, like: Pair, dtype: torch.dtype | None = None) -> Pair:
    """Return empty keys and values ``[batch, kv_heads, rows, size]``, as pairs travel."""
    k, v = like
    batch, heads, _, width = k.shape
    length, dtype = size(rows), dtype or k.dtype
    return (
        k.new_empty((batch, heads, length, width), dtype=dtype),
        v.new_empty((batch, heads, length, v.shape[3]), dtype=dtype),
    )


def packed(k: Tensor, v: Tensor, rows: Ranges) -> Pair:
    """Return some rows of k and v as dense tensors, which may be k and v."""
    return _dense(k, rows), _dense(v, rows)


def _dense(x: Tensor, rows: Ranges) -> Tensor:
    parts = [x[:, :, part.start : part.stop] for part in rows]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts or [x[:, :, :0]], 2)


class Calls:
    """Passes calls on to peers, and waits for those under way where the pass raises.

    What a peer has sent already would else be taken for the answer to a later call. Where waiting
    itself fails the group is broken, and the rest is not waited for: each call under way would take
    another timeout. The pass raises what it raised first, with a note of what waiting said.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._under_way: set[_Call] = set()

    def all_gather(self, x: Pair, output: Pair) -> Work:
        """Start one; see `Peers.all_gather`."""
        return _Call(self._peers.all_gather(x, output), self._under_way)

    def exchange(self, sends: Mapping[int, Pair], receives: Mapping[int, Pair]) -> Work:
        """Start one; see `Peers.exchange`."""
        return _Call(self._peers.exchange(sends, receives), self._under_way)

    def __enter__(self) -> "Calls":
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


Arrivals = Iterator[tuple[int, Held]]


def _gather(k: Tensor, v: Tensor, run: Run, calls: Calls) -> Arrivals:
    """One all-gather; point to point where lengths differ or not all of an axis takes part."""
    mine = packed(k, v, run.own_rows)
    if len(set(run.part.lengths)) == 1 and run.peers.whole:
        all_k, all_v = (x.new_empty((run.peers.size, *x.shape)) for x in mine)
        work = calls.all_gather(mine, (all_k.flatten(0, 1), all_v.flatten(0, 1)))
        parts = dict(enumerate(zip(all_k.unbind(0), all_v.unbind(0), strict=True)))
    else:
        parts = {s: room_for(rows, (k, v)) for s, rows in run.part.wanted.items()}
        sends = {peer: mine for peer in run.part.wanted if run.own_rows}
        receives = {s: part for s, part in parts.items() if run.part.wanted[s]}
        work = calls.exchange(sends, receives)
    yield run.rank, Held(k, v, run.own_rows)
    work.wait()
    for source, rows in run.part.wanted.items():
        yield source, Held(*parts[source], rows)


def _direct(k: Tensor, v: Tensor, run: Run, calls: Calls) -> Arrivals:
    """One exchange per step: from the owner ``step`` ranks before, to that ``step`` ranks after."""
    n, last = run.peers.size, packed(k, v, ())
    sent: Ranges = ()

    def start(step: int) -> tuple[Pair, Work]:
        nonlocal last, sent
        source, target = (run.rank - step) % n, (run.rank + step) % n
        if run.part.given[target] != sent:
            last, sent = packed(k, v, run.part.given[target]), run.part.given[target]
        part = room_for(run.part.wanted[source], (k, v))
        sends = {target: last} if sent else {}
        receives = {source: part} if run.part.wanted[source] else {}
        return part, calls.exchange(sends, receives)

    arriving = start(1)
    yield run.rank, Held(k, v, run.own_rows)
    for step in range(1, n):
        source = (run.rank - step) % n
        part, work = arriving
        work.wait()
        if step + 1 < n:
            arriving = start(step + 1)
        yield source, Held(*part, run.part.wanted[source])


def _around(k: Tensor, v: Tensor, run: Run, calls: Calls) -> Arrivals:
    """Pass on what is held: to the neighbour at once, and once per round to the next ring."""
    ring = _ring_in(run)
    held = packed(k, v, run.own_rows)
    inside: tuple[Pair, Work] | None = None
    outside: tuple[Pair, Work] | None = None

    def start(step: int, to: int, origin: int) -> tuple[Pair, Work]:
        rows = whole(run.part.lengths[ring.source(run.rank, step)])
        part = room_for(rows, (k, v))
        sends = {to: held} if held[0].shape[2] else {}
        return part, calls.exchange(sends, {origin: part} if rows else {})

    for step in range(ring.n):
        arrived = outside if step % ring.inner == 0 else inside
        if arrived is not None:
            held, work = arrived
            work.wait()
        if step % ring.inner == 0 and step + ring.inner < ring.n:
            neighbours = ring.next_outside(run.rank), ring.next_outside(run.rank, -1)
            outside = start(step + ring.inner, *neighbours)
        if (step + 1) % ring.inner:
            neighbours = ring.next_inside(run.rank), ring.next_inside(run.rank, -1)
            inside = start(step + 1, *neighbours)
        source = ring.source(run.rank, step)
        yield source, Held(*held, whole(run.part.lengths[source]))


class Returns(Protocol):
    """What takes a rank's shares of the others' gradients; calls come in the schedule's order.

    What the others computed is added to this rank's own sum, always in the same order.
    """

    def add(self, source: int, share: Pair | None) -> None:
        """Take the gradients of the rows of ``source`` that were fetched; None where nothing was
        computed with them.
        """
        ...

    def finish(self) -> None:
        """Wait for what has not arrived."""
        ...


class _Straight:
    """To the owner at once, in the dtype of the keys; added there from the next rank on.

    What comes is taken one step later, so that few parts are held at a time.
    """

    def __init__(self, run: Run, own: KeySum, like: Pair, calls: Calls) -> None:
        self._run = run
        self._own = own
        self._like = like
        self._dtype = like[0].dtype
        self._calls = calls
        self._coming: tuple[int, Pair, Work] | None = None

    def add(self, source: int, share: Pair | None) -> None:
        run, n = self._run, self._run.peers.size
        peer = (2 * run.rank - source) % n  # as far after this rank as the source is before
        sends, receives = {}, {}
        if share is not None:
            dk, dv = share
            sends[source] = dk.to(self._dtype), dv.to(self._dtype)
        elif run.part.wanted[source]:  # gathered, but not seen by any row here
            sends[source] = _zeros(room_for(run.part.wanted[source], self._like))
        part = room_for(run.part.given[peer], self._like)
        if run.part.given[peer]:
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
        start = 0
        for rows in self._run.part.given[peer]:
            stop = start + len(rows)
            self._own.add(rows, dk[:, :, start:stop], dv[:, :, start:stop])
            start = stop


class _Around:
    """Around the ring behind the keys: each rank adds to a sum, which the last one sends home."""

    def __init__(self, run: Run, own: KeySum, like: Pair, calls: Calls) -> None:
        self._run = run
        self._ring = _ring_in(run)
        self._own = own
        self._like = like
        self._calls = calls
        self._wide = accumulator(like[0].dtype)
        self._step = 0
        self._coming: tuple[Pair, Work] | None = None

    def add(self, source: int, share: Pair | None) -> None:
        run, ring = self._run, self._ring
        self._step += 1
        total = self._arrived()
        if total is None and share is not None:
            total = share
        elif total is None:
            total = _zeros(room_for(whole(run.part.lengths[source]), self._like, self._wide))
        elif share is not None:
            total[0].add_(share[0])
            total[1].add_(share[1])
        home = self._step + 1 == ring.n
        next_source = run.rank if home else ring.source(run.rank, self._step + 1)
        part = room_for(whole(run.part.lengths[next_source]), self._like, self._wide)
        sends = {ring.next_gradient(run.rank, self._step): total} if total[0].shape[2] else {}
        origin = ring.next_gradient(run.rank, self._step, -1)
        receives = {origin: part} if part[0].shape[2] else {}
        self._coming = part, self._calls.exchange(sends, receives)

    def finish(self) -> None:
        total = self._arrived()
        if total is not None and total[0].shape[2]:
            self._own.add(range(total[0].shape[2]), total[0], total[1])

    def _arrived(self) -> Pair | None:
        if self._coming is None:
            return None
        part, work = self._coming
        self._coming = None
        work.wait()
        return part


def _ring_in(run: Run) -> Ring:
    if run.ring is None:
        raise RuntimeError(f"schedule {run.plan.schedule!r} has no ring to go around")
    return run.ring


def _zeros(pair: Pair) -> Pair:
    return pair[0].zero_(), pair[1].zero_()


class Movement(NamedTuple):
    """How keys come, and how gradients go home, where they add to this rank's sum."""

    fetch: Callable[[Tensor, Tensor, Run, Calls], Arrivals]
    returns: Callable[[Run, KeySum, Pair, Calls], Returns]


MOVEMENTS: dict[ScheduleName, Movement] = {
    "gather": Movement(_gather, _Straight),
    "direct": Movement(_direct, _Straight),
    "ring": Movement(_around, _Around),
    "double_ring": Movement(_around, _Around),
}


def fetch(k: Tensor, v: Tensor, run: Run, calls: Calls) -> Arrivals:
    """Yield each source of the schedule with its keys and values, this rank first.

    What comes next is asked for before a part is yielded. Every rank must go to the end.
    """
    if run.peers.size == 1:
        return iter([(run.rank, Held(k, v, run.own_rows))])
    return run.movement.fetch(k, v, run, calls)


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, run: Run, *, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the attention of this rank's rows ``[batch, q_heads, rows, value_size]``.

    With ``return_lse`` also their log-sum-exp ``[batch, q_heads, rows]``, without gradient, else
    None. Communicates what the schedule does, in the forward and again in the backward, whose
    kernels get the output and log-sum-exp over all keys, and over ``sinks`` ``[q_heads]``.
    """
    result = _Attend.apply(q, k, v, sinks, run, return_lse)  # type: ignore[no-untyped-call]
    return result if return_lse else (result, None)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        run: Run,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        rows = RowsOut(q, v.shape[3])
        kept: list[Tensor] = []
        keep = run.plan.keep_kv and any(ctx.needs_input_grad)
        with Calls(run.peers) as calls:
            for source, held in fetch(k, v, run, calls):
                if keep and source != run.rank:
                    kept += (held.k, held.v)
                forward_blocks(run.part.blocks[source], q, held, run.kernel, rows.merge)
        out, lse = rows.result(sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *kept)
        ctx.run, ctx.origin = run, Origin(run.plan)
        if not return_lse:
            return out
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, *kept = ctx.saved_tensors
        run: Run = ctx.run
        grad = grad.contiguous()
        dq = RowSum(q)
        own = KeySum((k, v), run.own_rows)

        with Calls(run.peers) as calls:
            returns = run.movement.returns(run, own, (k, v), calls)
            for source, held in _kept_or_fetched(k, v, kept, run, calls):
                share = own if source == run.rank else KeySum((k, v), held.rows)
                blocks = run.part.blocks[source]

                def add(
                    block: Block, part: Tensor, dk: Tensor, dv: Tensor, share: KeySum = share
                ) -> None:
                    dq.add(block.queries, part)
                    share.add(block.keys, dk, dv)

                backward_blocks(blocks, grad, q, held, out, lse, run.kernel, add)
                if source != run.rank:
                    returns.add(source, share.pair if blocks else None)
            returns.finish()
        own_k, own_v = own.pair
        to_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
        shares = dq.total.to(q.dtype), own_k.to(k.dtype), own_v.to(v.dtype)
        return *shares, to_sinks, None, None


def _kept_or_fetched(
    k: Tensor, v: Tensor, kept: Sequence[Tensor], run: Run, calls: Calls
) -> Arrivals:
    """Return all parts of keys; own last where all are here, while the others' gradients travel."""
    if not kept:
        return fetch(k, v, run, calls)
    return _from_kept(Held(k, v, run.own_rows), kept, run)


def _from_kept(own: Held, kept: Sequence[Tensor], run: Run) -> Iterator[tuple[int, Held]]:
    pairs = zip(kept[::2], kept[1::2], strict=True)
    others = (source for source in run.part.blocks if source != run.rank)
    for source, (k, v) in zip(others, pairs, strict=True):
        yield source, Held(k, v, run.part.wanted[source])
    yield run.rank, own
