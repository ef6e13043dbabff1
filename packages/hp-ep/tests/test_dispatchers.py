"""Every dispatcher does what all experts at home would do, with its own bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import (
    AxisMesh,
    Collectives,
    RecordingCollectives,
    SimulatedCollectives,
    SimulatedWorld,
)
from hp_ep import (
    AllToAll,
    Dedup,
    DispatchStateError,
    ExpertConfigError,
    Hierarchical,
    Padded,
    Placed,
    Placement,
    RoutingError,
    TokenDispatcher,
    plan_placement,
)

from .dispatching import ROUTINGS, Result, check, rank_result
from .reference import assert_close
from .strategies import MISFITS, Routing, routings

Meshes = Callable[[tuple[int, ...], tuple[str, ...]], AxisMesh]
NAMES = ["AllToAll", "Dedup", "Hierarchical", "Padded"]


def _make(
    name: str, meshes: Meshes, ranks: int, experts: int, door: Collectives | None, **options: Any
) -> TokenDispatcher:
    if name == "Hierarchical":
        nodes = 2 if ranks % 2 == 0 else ranks
        mesh = meshes((nodes, ranks // nodes), ("node", "inside"))
        return Hierarchical(mesh, experts, door, **options)
    mesh = meshes((ranks,), ("ep",))
    if name == "Padded":
        return Padded(mesh, experts, door, **{"capacity": 7, **options})
    if name == "Dedup":
        return Dedup(mesh, experts, door, **options)
    return AllToAll(mesh, experts, door, **options)


def _simulated(name: str, door: SimulatedCollectives, routing: Routing) -> TokenDispatcher:
    return _make(name, door.mesh, routing.num_ranks, routing.num_experts, door)


@pytest.mark.parametrize("name", NAMES[1:])
@settings(deadline=None, max_examples=50)
@given(routings())
def test_outputs_and_all_gradients_equal_the_dense_layer(name: str, routing: Routing) -> None:
    def rank(me: int, door: SimulatedCollectives) -> Result:
        return rank_result(me, _simulated(name, door, routing), routing)

    results = SimulatedWorld(routing.num_ranks).run(rank)
    check(routing, results, counted=name != "Padded")


def _on_gloo(rank: int, size: int) -> dict[str, Result]:
    def meshes(shape: tuple[int, ...], names: tuple[str, ...]) -> AxisMesh:
        return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))

    return {
        f"{name}, {title}": rank_result(
            rank, _make(name, meshes, size, routing.num_experts, None), routing
        )
        for title, routing in ROUTINGS.items()
        if routing.num_ranks == size
        for name in NAMES[1:]
    }


@pytest.mark.parametrize("size", [2, 4])
def test_real_ranks_equal_the_dense_layer(ranks: Any, size: int) -> None:
    results = ranks(size).run(_on_gloo, size)
    titles = {k.partition(", ")[2] for k in results[0]}
    assert titles == {title for title, r in ROUTINGS.items() if r.num_ranks == size}
    for key in results[0]:
        name, _, title = key.partition(", ")
        check(ROUTINGS[title], [r[key] for r in results], counted=name != "Padded")


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(routings())
def test_states_in_flight_may_be_combined_in_any_order_and_once(
    name: str, routing: Routing
) -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        dispatcher = _simulated(name, door, routing)
        x, w, ids = routing.x[me], routing.weights[me], routing.expert_ids[me]
        first, _, first_state = dispatcher.dispatch(x, w, ids)
        second, _, second_state = dispatcher.dispatch(-3 * x, w, ids.flip(1))
        y2 = dispatcher.combine(second, second_state)
        y1 = dispatcher.combine(first, first_state)
        with pytest.raises(DispatchStateError, match="combined before"):
            dispatcher.combine(first, first_state)
        with pytest.raises(DispatchStateError, match="another dispatcher"):
            _simulated(name, door, routing).combine(first, first_state)
        for other in (torch.cat([first, first, x.new_zeros(1, 3)]), first[:, :2], first[:, 0]):
            with pytest.raises(ExpertConfigError, match=r"shape .*, but its dispatch gave \("):
                dispatcher.combine(other, second_state)
        total = x * w.sum(1, keepdim=True)
        return [y1 - total, y2 + 3 * total]

    for differences in SimulatedWorld(routing.num_ranks).run(rank):
        for difference in differences:
            assert_close(difference, torch.zeros_like(difference))


FAULTS = [([[0, 4]], "expert id 4 is not one of 0 .. 3"), ([[2, 2]], "a token names expert 2")]


def _text(call: Callable[[], object]) -> str:
    try:
        call()
    except RoutingError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("guilty", range(4))
def test_a_fault_on_one_rank_is_raised_by_all_and_names_it(name: str, guilty: int) -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[str]:
        dispatcher = _make(name, door.mesh, 4, 4, door)
        found = []
        for ids, _ in FAULTS:
            mine = torch.tensor([[0, 1], [2, 3]] if me != guilty else ids)
            x, w = torch.ones(len(mine), 2), torch.ones(mine.shape)
            found.append(_text(lambda x=x, w=w, mine=mine: dispatcher.dispatch(x, w, mine)))  # type: ignore[misc]
        shapes = [(2, 1), (2, 1), (2, 1)] if me != guilty else [(3, 1), (2, 1), (3, 1)]
        x, w, i = (torch.zeros(s) for s in shapes)
        found.append(_text(lambda: dispatcher.dispatch(x, w, i.long())))
        wide = torch.ones(2, 3 + (me == guilty))
        two = torch.zeros(2, 1)
        found.append(_text(lambda: dispatcher.dispatch(wide, two, two.long())))
        found.append(_text(lambda: dispatcher.dispatch(two, two, two.long())))
        return found

    results = SimulatedWorld(4).run(rank)
    assert results == [results[0]] * 4
    starts = [f"rank {guilty}: {text}" for _, text in FAULTS]
    starts += [f"rank {guilty}: weights are for 2 tokens, but x has 3"]
    starts += ["all ranks must give rows of one length and dtype", "no error"]
    for found, start in zip(results[0], starts, strict=True):
        assert found.startswith(start)
    assert f"rank {guilty}: 4 of torch.float32" in results[0][3]


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize(("x", "weights", "ids", "text"), MISFITS)
def test_shapes_that_do_not_fit_are_raised_by_all(
    name: str, x: tuple[int, ...], weights: tuple[int, ...], ids: tuple[int, ...], text: str
) -> None:
    def rank(me: int, door: SimulatedCollectives) -> str:
        dispatcher = _make(name, door.mesh, 3, 3, door)
        shapes = (x, weights, ids) if me == 1 else ((2, 1),) * 3
        a, b, c = (torch.zeros(s) for s in shapes)
        return _text(lambda: dispatcher.dispatch(a, b, c.long()))

    errors = SimulatedWorld(3).run(rank)
    assert errors == [errors[0]] * 3
    assert errors[0].startswith("rank 1: " + text)


def _traffic(name: str, routing: Routing, **options: Any) -> list[dict[tuple[str, str], Any]]:
    narrow = replace(
        routing,
        x=[x.float() for x in routing.x],
        weights=[w.float() for w in routing.weights],
    )

    def rank(me: int, door: SimulatedCollectives) -> dict[tuple[str, str], Any]:
        record = RecordingCollectives(door)
        dispatcher = _make(
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


@settings(deadline=None, max_examples=30)
@given(routings())
def test_hierarchical_crosses_to_each_node_once(routing: Routing) -> None:
    size = routing.num_ranks
    nodes = 2 if size % 2 == 0 else size
    inside = size // nodes
    block = routing.num_experts // nodes
    for me, calls in enumerate(_traffic("Hierarchical", routing)):
        if nodes == 1:
            continue
        mine, position = divmod(me, inside)
        rows = slots_in = slots_out = 0
        for i, ids in enumerate(routing.expert_ids):
            if i == me:
                rows += sum(n != mine for _, n in _pairs(ids, block))
                slots_out += int((ids // block != mine).sum())
            elif i % inside == position:
                rows += sum(n == mine for _, n in _pairs(ids, block))
                slots_in += int((ids // block == mine).sum())
        counts = (nodes - 1) * (1 + block + 3) * 8
        expected = counts + 2 * 3 * 4 * rows + 8 * slots_in + 4 * slots_out
        assert calls[("node", "all_to_all")].bytes == expected


@pytest.mark.parametrize("name", ["AllToAll", "Dedup", "Padded"])
def test_a_narrower_payload_halves_the_bytes_of_rows_and_rounds(name: str) -> None:
    routing = ROUTINGS["four ranks"]
    wide, half = (_traffic(name, routing, payload=p) for p in (None, torch.bfloat16))
    meta = {"AllToAll": 3 * 8 * (2 + 3), "Dedup": 3 * 8 * (1 + 2 + 3), "Padded": 3 * 8 * 3}[name]
    for me, (a, b) in enumerate(zip(wide, half, strict=True)):
        slots = 0
        if name == "Dedup":
            away = [int((ids // 2 == me).sum()) for ids in routing.expert_ids]
            slots = 8 * (sum(away) - away[me])
            slots += 4 * int((routing.expert_ids[me] // 2 != me).sum())
        both = [t[("ep", "all_to_all")].bytes - meta - slots for t in (a, b)]
        assert both[0] == 2 * both[1] > 0

    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        found = []
        for payload in (None, torch.bfloat16):
            dispatcher = _make(name, door.mesh, 4, 8, door, payload=payload)
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


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_that_holds_no_rows_is_refused(name: str) -> None:
    with pytest.raises(ExpertConfigError, match=r"payload=torch.int8 is not one of"):
        SimulatedWorld(1).run(
            lambda me, door: _make(name, door.mesh, 1, 2, door, payload=torch.int8)
        )


@settings(deadline=None, max_examples=40)
@given(routings())
def test_replicas_change_nothing_but_the_load(routing: Routing) -> None:
    size, experts = routing.num_ranks, routing.num_experts
    load = [float((torch.cat(routing.expert_ids) == e).sum()) for e in range(experts)]
    placement = plan_placement(load, size, num_replicas=(size - 1) * size * (experts // size > 0))

    def rank(me: int, door: SimulatedCollectives) -> Result:
        inner = Dedup(door.mesh((size,), ("ep",)), len(placement.experts), door)
        held = placement.on_rank(me)
        return rank_result(me, Placed(inner, placement, me), routing, held)

    results = SimulatedWorld(size).run(rank)
    slots = torch.tensor(placement.experts)
    for name in ("w1", "w2", "w3", "counts"):  # what an expert's replicas got belongs together
        every = torch.cat([r[name] for r in results])
        whole = every.new_zeros(experts, *every.shape[1:]).index_add_(0, slots, every)
        for me, r in enumerate(results):
            r[name] = whole.chunk(size)[me]
    check(routing, results)


def test_tokens_take_turns_at_replicas() -> None:
    placement = Placement(num_ranks=2, num_experts=3, experts=(0, 1, 0, 2))

    def rank(me: int, door: SimulatedCollectives) -> list[int]:
        inner = AllToAll(door.mesh((2,), ("ep",)), 4, door)
        dispatcher = Placed(inner, placement, me)
        ids = torch.zeros(3, 1, dtype=torch.int64)
        _, counts, _ = dispatcher.dispatch(torch.ones(3, 1), torch.ones(3, 1), ids)
        return counts.tolist()

    assert SimulatedWorld(2).run(rank) == [[3, 0], [3, 0]]  # six tokens, three for each replica


def test_a_fault_with_a_placement_is_raised_by_all() -> None:
    placement = Placement(num_ranks=2, num_experts=3, experts=(0, 1, 0, 2))

    def rank(me: int, door: SimulatedCollectives) -> list[str]:
        dispatcher = Placed(AllToAll(door.mesh((2,), ("ep",)), 4, door), placement, me)
        one = torch.ones(1, 1)
        return [
            _text(lambda i=i: dispatcher.dispatch(one, one, torch.tensor([[i if me else 0]])))  # type: ignore[misc]
            for i in (3, -1, 2)
        ]

    expected = [
        "rank 1: expert id 4 is not one of 0 .. 3",
        "rank 1: expert id -1 is not one of 0 .. 3",
        "no error",
    ]
    assert SimulatedWorld(2).run(rank) == [expected] * 2
