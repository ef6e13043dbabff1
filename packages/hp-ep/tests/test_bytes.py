"""Every dispatcher moves as many bytes as it says."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import ExpertConfigError, RoutingError

from .dispatching import OVER_RANKS, ROUTINGS, make_dispatcher
from .reference import assert_close
from .strategies import Routing, routings


def _traffic(name: str, routing: Routing, **options: Any) -> list[dict[tuple[str, str], Any]]:
    narrow = replace(
        routing,
        x=[x.float() for x in routing.x],
        weights=[w.float() for w in routing.weights],
    )

    def rank(me: int, door: SimulatedCollectives) -> dict[tuple[str, str], Any]:
        record = RecordingCollectives(door)
        dispatcher = make_dispatcher(
            name, door.mesh, routing.num_ranks, routing.num_experts, record, **options
        )
        x, w = (t[me].clone().requires_grad_() for t in (narrow.x, narrow.weights))
        rows, _, state = dispatcher.dispatch(x, w, routing.expert_ids[me])
        dispatcher.combine(rows, state).sum().backward()
        return record.by_call

    return SimulatedWorld(routing.num_ranks).run(rank)


def _pairs(ids: Tensor, block: int) -> set[tuple[int, int]]:
    """Return the distinct (token, block of experts) pairs."""
    return {(t, e // block) for t, row in enumerate(ids.tolist()) for e in row}


@settings(deadline=None, max_examples=30)
@given(routings())
def test_dedup_sends_a_token_once_to_each_rank_and_eight_bytes_per_choice(
    routing: Routing,
) -> None:
    size = routing.num_ranks
    local = routing.num_experts // size
    for me, calls in enumerate(_traffic("Dedup", routing)):
        if size == 1:
            assert calls == {}
            continue
        rows_in = rows_out = slots_in = slots_out = 0
        for i, ids in enumerate(routing.expert_ids):
            if i == me:
                rows_out += sum(r != me for _, r in _pairs(ids, local))
                slots_out += int((ids // local != me).sum())
            else:
                rows_in += sum(r == me for _, r in _pairs(ids, local))
                slots_in += int((ids // local == me).sum())
        traffic = calls[("ep", "all_to_all")]
        assert len(calls) == 1
        assert traffic.calls == 7
        counts = (size - 1) * (1 + local + 3) * 8
        rows = 2 * 3 * 4 * (rows_in + rows_out)
        assert traffic.bytes == counts + rows + 8 * slots_in + 4 * slots_out


def _between_nodes(routing: Routing, nodes: int, me: int) -> tuple[int, int, int]:
    """Return the rows that cross to and from a rank, and the slots that come and go."""
    inside, block = routing.num_ranks // nodes, routing.num_experts // nodes
    mine, position = divmod(me, inside)
    rows = slots_in = slots_out = 0
    for i, ids in enumerate(routing.expert_ids):
        if i == me:
            rows += sum(n != mine for _, n in _pairs(ids, block))
            slots_out += int((ids // block != mine).sum())
        elif i % inside == position:
            rows += sum(n == mine for _, n in _pairs(ids, block))
            slots_in += int((ids // block == mine).sum())
    return rows, slots_in, slots_out


@settings(deadline=None, max_examples=30)
@given(routings())
def test_hierarchical_crosses_to_each_node_once(routing: Routing) -> None:
    size = routing.num_ranks
    nodes = 2 if size % 2 == 0 else size
    for me, calls in enumerate(_traffic("Hierarchical", routing)):
        if nodes == 1:
            continue
        rows, slots_in, slots_out = _between_nodes(routing, nodes, me)
        counts = (nodes - 1) * (1 + routing.num_experts // nodes + size // nodes + 3) * 8
        expected = counts + 2 * 3 * 4 * rows + 8 * slots_in + 4 * slots_out
        traffic = calls[("node", "all_to_all")]
        assert traffic.bytes == expected
        assert traffic.calls == 7


def test_a_narrower_payload_halves_the_bytes_of_rows_between_nodes_and_inside() -> None:
    routing = ROUTINGS["four ranks"]
    wide, half = (_traffic("Hierarchical", routing, payload=p) for p in (None, torch.bfloat16))
    for me, (a, b) in enumerate(zip(wide, half, strict=True)):
        saved = {axis: a[axis, call].bytes - b[axis, call].bytes for axis, call in a}
        assert saved["node"] == 2 * 3 * 2 * _between_nodes(routing, 2, me)[0] > 0
        assert saved["inside"] > 0


@pytest.mark.parametrize("name", ["AllToAll", "Dedup", "Padded"])
def test_a_narrower_payload_halves_the_bytes_of_rows(name: str) -> None:
    routing = ROUTINGS["four ranks"]
    wide, half = (_traffic(name, routing, payload=p) for p in (None, torch.bfloat16))
    meta = 3 * 8 * (1 + 2 + 3)
    for me, (a, b) in enumerate(zip(wide, half, strict=True)):
        slots = 0
        if name == "Dedup":
            away = [int((ids // 2 == me).sum()) for ids in routing.expert_ids]
            slots = 8 * (sum(away) - away[me])
            slots += 4 * int((routing.expert_ids[me] // 2 != me).sum())
        both = [t[("ep", "all_to_all")].bytes - meta - slots for t in (a, b)]
        assert both[0] == 2 * both[1] > 0


@pytest.mark.parametrize("name", OVER_RANKS)
def test_a_narrower_payload_rounds_and_keeps_the_dtypes(name: str) -> None:
    routing = ROUTINGS["four ranks"]

    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        found = []
        for payload in (None, torch.bfloat16):
            dispatcher = make_dispatcher(name, door.mesh, 4, 8, door, payload=payload)
            x, w = routing.x[me].clone().requires_grad_(), routing.weights[me]
            rows, _, state = dispatcher.dispatch(x, w, routing.expert_ids[me])
            y = dispatcher.combine(rows, state)
            y.sum().backward()
            assert y.dtype == rows.dtype == torch.float64
            assert x.grad is not None
            found += [y.detach(), x.grad]
        return found

    for y, gx, y16, gx16 in SimulatedWorld(4).run(rank):
        assert_close(y16, y, 2e-2)
        assert_close(gx16, gx, 2e-2)
        assert not len(y) or not torch.equal(y16, y)


@pytest.mark.parametrize("name", OVER_RANKS)
def test_gradients_that_travelled_in_a_narrower_payload_are_summed_in_the_dtype_of_the_tokens(
    name: str,
) -> None:
    # Two of them fit float16, as the ranks of a node may send them; all four do not.
    each, ids = 30000.0, torch.tensor([[0, 3, 4, 7], [6, 2, 1, 5]])

    def rank(me: int, door: SimulatedCollectives) -> Tensor:
        dispatcher = make_dispatcher(name, door.mesh, 4, 8, door, payload=torch.float16)
        x = torch.zeros(2, 3, requires_grad=True)
        rows, _, _ = dispatcher.dispatch(x, torch.ones(2, 4), ids)
        (rows * each).sum().backward()
        assert x.grad is not None
        return x.grad

    for grad in SimulatedWorld(4).run(rank):
        assert torch.equal(grad, torch.full((2, 3), 4 * each))


@pytest.mark.parametrize("name", OVER_RANKS)
def test_a_payload_that_differs_between_ranks_is_refused_by_all(name: str) -> None:
    def rank(me: int, door: SimulatedCollectives) -> str:
        payload = torch.bfloat16 if me else torch.float16
        dispatcher = make_dispatcher(name, door.mesh, 2, 4, door, payload=payload)
        with pytest.raises(RoutingError) as error:
            dispatcher.dispatch(torch.ones(1, 3), torch.ones(1, 2), torch.tensor([[0, 3]]))
        return str(error.value)

    first, second = SimulatedWorld(2).run(rank)
    assert first == second
    assert "give rows one payload, also without tokens; got rank 0: torch.float16; rank 1" in first


@pytest.mark.parametrize("name", OVER_RANKS)
def test_a_payload_that_holds_no_rows_is_refused(name: str) -> None:
    with pytest.raises(ExpertConfigError, match=r"payload=torch.int8 is not one of"):
        SimulatedWorld(1).run(
            lambda me, door: make_dispatcher(name, door.mesh, 1, 2, door, payload=torch.int8)
        )
