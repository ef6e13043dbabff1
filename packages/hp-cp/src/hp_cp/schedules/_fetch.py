"""Bring the others' keys and values here, each next part while the last one is computed with."""

from collections.abc import Iterator

from torch import Tensor

from hp_dtensor import Work

from .._mesh import Pair
from .._ranges import Ranges
from .._routes import Ring
from ._calls import Calls
from ._run import Held, Run, as_held, packed, room_for, whole

Arrivals = Iterator[tuple[int, Held]]


def fetch(k: Tensor, v: Tensor, run: Run, calls: Calls) -> Arrivals:
    """Yield each source of the schedule with its keys and values, this rank first.

    What comes next is asked for before a part is yielded. Every rank must go to the end.
    """
    if run.peers.size == 1:
        return iter([(run.rank, Held(k, v, run.own_rows))])
    if run.ring is not None:
        return _around(k, v, run, run.ring, calls)
    return _gather(k, v, run, calls) if run.gathers else _direct(k, v, run, calls)


def _gather(k: Tensor, v: Tensor, run: Run, calls: Calls) -> Arrivals:
    """One all-gather; point to point where lengths differ or not all of an axis takes part."""
    mine = packed(k, v, run.own_rows)
    if len(set(run.lengths)) == 1 and run.peers.whole:
        all_k, all_v = (x.new_empty((run.peers.size, *x.shape)) for x in mine)
        work = calls.all_gather(mine, (all_k.flatten(0, 1), all_v.flatten(0, 1)))
        parts = dict(enumerate(zip(all_k.unbind(0), all_v.unbind(0), strict=True)))
    else:
        parts = {s: room_for(rows, k) for s, rows in run.wanted.items()}
        sends = {peer: mine for peer in run.wanted if run.own_rows}
        receives = {s: part for s, part in parts.items() if run.wanted[s]}
        work = calls.exchange(sends, receives)
    yield run.rank, Held(k, v, run.own_rows)
    work.wait()
    for source, rows in run.wanted.items():
        yield source, as_held(parts[source], rows)


def _direct(k: Tensor, v: Tensor, run: Run, calls: Calls) -> Arrivals:
    """One exchange per step: from the owner ``step`` ranks before, to that ``step`` ranks after."""
    n, last = run.peers.size, packed(k, v, ())
    sent: Ranges = ()

    def start(step: int) -> tuple[Pair, Work]:
        nonlocal last, sent
        source, target = (run.rank - step) % n, (run.rank + step) % n
        if run.given[target] != sent:
            last, sent = packed(k, v, run.given[target]), run.given[target]
        part = room_for(run.wanted[source], k)
        sends = {target: last} if sent else {}
        receives = {source: part} if run.wanted[source] else {}
        return part, calls.exchange(sends, receives)

    arriving = start(1)
    yield run.rank, Held(k, v, run.own_rows)
    for step in range(1, n):
        source = (run.rank - step) % n
        part, work = arriving
        work.wait()
        if step + 1 < n:
            arriving = start(step + 1)
        yield source, as_held(part, run.wanted[source])


def _around(k: Tensor, v: Tensor, run: Run, ring: Ring, calls: Calls) -> Arrivals:
    """Pass on what is held: to the neighbour at once, and once per round to the next ring."""
    held = packed(k, v, run.own_rows)
    inside: tuple[Pair, Work] | None = None
    outside: tuple[Pair, Work] | None = None

    def start(step: int, to: int, origin: int) -> tuple[Pair, Work]:
        rows = whole(run.lengths[ring.source(run.rank, step)])
        part = room_for(rows, k)
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
        yield source, as_held(held, whole(run.lengths[source]))
