"""Schedules that are added to the tables, whose sources come in an order of their own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_cp import Contiguous, Layout, MaskSpec, Zigzag, context_parallel_attention
from hp_cp._routes import SCHEDULES, ScheduleSpec
from hp_cp._schedules import MOVEMENTS, Arrivals, Movement, _Straight, packed, room_for
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import dense_attention, inputs, leaves, single, with_gradients

N, ROWS, TILE = 4, 24, 4
SEQ = N * ROWS
Order = Callable[[int], Iterator[int]]


def both_ways(n: int) -> Iterator[int]:
    """Yield the neighbours on both sides in turn."""
    for i in range(1, n // 2 + 1):
        yield from (i,) if 2 * i == n else (i, -i)


def backwards(n: int) -> Iterator[int]:
    """Yield the ranks after this one."""
    yield from range(n - 1, 0, -1)


def movement(order: Order, own_last: bool) -> Movement:
    """Return how keys come from ``rank - step`` for each step of ``order``."""

    def fetch(k: Tensor, v: Tensor, schedule: Any, calls: Any) -> Arrivals:
        n, rank, part = schedule.n, schedule.rank, schedule.part
        if not own_last:
            yield rank, k, v
        for step in order(n):
            source, target = (rank - step) % n, (rank + step) % n
            room = room_for(part.receive_rows[source], (k, v))
            sends = {target: packed(k, v, schedule.own_rows)}
            calls.exchange(sends, {source: room}).wait()
            yield source, *room
        if own_last:
            yield rank, k, v

    return Movement(fetch, _Straight)


def by_distance(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Hide own keys; show those of one other rank to every second tile of rows, else of two."""
    behind = (q_idx // ROWS - kv_idx // ROWS) % N
    return torch.where(q_idx // TILE % 2 == 0, (behind == 1) | (behind == 3), behind == 2)


@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize(("order", "own_last"), [(both_ways, False), (backwards, True)])
@pytest.mark.parametrize(
    ("mask", "layout"),
    [
        (MaskSpec(causal=True), Zigzag()),
        (MaskSpec(causal=True, cu_seqlens=(0, 5, 9, 31, 40, SEQ)), Zigzag()),
        (MaskSpec(causal=False, mask_mod=by_distance), Contiguous()),
    ],
    ids=["causal", "documents", "function"],
)
def test_a_schedule_may_yield_sources_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
    mask: MaskSpec,
    layout: Layout,
    order: Order,
    own_last: bool,
    keep_kv: bool,
) -> None:
    tables: Any = (SCHEDULES, ScheduleSpec(all_keys=True)), (MOVEMENTS, movement(order, own_last))
    for table, row in tables:
        monkeypatch.setitem(table, "added", row)
    monkeypatch.setattr("hp_cp._blocks._TILE", TILE)
    tensors = inputs(2, 2, SEQ, batch=1, size=4)

    def rank(rank: int, collectives: SimulatedCollectives) -> list[Tensor]:
        mine = list(layout.indices(N, SEQ)[rank])
        q, k, v, grad = (x[:, :, mine] for x in tensors)
        local = leaves(q, k, v)
        schedule: Any = "added"
        out = context_parallel_attention(
            *local,
            collectives.mesh((N,), ("cp",)),
            mask=mask,
            layout=layout,
            schedule=schedule,
            seq_len=SEQ,
            keep_kv=keep_kv,
            collectives=collectives,
        )
        return with_gradients(out, local, grad)

    indices = [i for held in layout.indices(N, SEQ) for i in held]
    expected = single(tensors, mask, dense_attention)
    parts = zip(*SimulatedWorld(N).run(rank), strict=True)
    for part, reference in zip(parts, expected, strict=True):
        whole = torch.cat(part, 2)
        torch.testing.assert_close(whole, reference[:, :, indices], rtol=0, atol=1e-12)
