"""Tokens that travel to their experts come back as if all experts were at home."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import AllToAll, DispatchStateError, ExpertConfigError, RoutingError

from .dispatching import ROUTINGS, Result, check, rank_result
from .reference import assert_close
from .strategies import MISFITS, Routing, routings


def _dispatcher(collectives: SimulatedCollectives, ranks: int, experts: int) -> AllToAll:
    return AllToAll(collectives.mesh((ranks,), ("ep",)), experts, collectives)


@settings(deadline=None, max_examples=80)
@given(routings())
def test_outputs_and_all_gradients_equal_the_dense_layer(routing: Routing) -> None:
    def rank(me: int, collectives: SimulatedCollectives) -> Result:
        dispatcher = _dispatcher(collectives, routing.num_ranks, routing.num_experts)
        return rank_result(me, dispatcher, routing)

    check(routing, SimulatedWorld(routing.num_ranks).run(rank))


def _on_gloo(rank: int, routing: Routing) -> Result:
    mesh = cached("ep mesh", lambda: _mesh(routing.num_ranks))
    return rank_result(rank, AllToAll(mesh, routing.num_experts), routing)


def _mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))


@pytest.mark.nccl
@pytest.mark.parametrize("name", ROUTINGS)
def test_real_ranks_equal_the_dense_layer(ranks: Any, name: str) -> None:
    routing = ROUTINGS[name]
    check(routing, ranks(routing.num_ranks).run(_on_gloo, routing))


@settings(deadline=None, max_examples=25)
@given(routings())
def test_two_calls_in_flight_may_be_combined_in_any_order(routing: Routing) -> None:
    def rank(me: int, collectives: SimulatedCollectives) -> list[Tensor]:
        dispatcher = _dispatcher(collectives, routing.num_ranks, routing.num_experts)
        x, w, ids = routing.x[me], routing.weights[me], routing.expert_ids[me]
        first, _, first_state = dispatcher.dispatch(x, w, ids)
        second, _, second_state = dispatcher.dispatch(-3 * x, w, ids.flip(1))
        y2 = dispatcher.combine(second, second_state)
        y1 = dispatcher.combine(first, first_state)
        return [y1 - x * w.sum(1, keepdim=True), y2 + 3 * x * w.sum(1, keepdim=True)]

    for first, second in SimulatedWorld(routing.num_ranks).run(rank):
        assert_close(first, torch.zeros_like(first))
        assert_close(second, torch.zeros_like(second))


@settings(deadline=None, max_examples=40)
@given(routings())
def test_calls_and_bytes_are_those_of_the_formula(routing: Routing) -> None:
    def rank(me: int, collectives: SimulatedCollectives) -> dict[tuple[str, str], Any]:
        recording = RecordingCollectives(collectives)
        mesh = collectives.mesh((routing.num_ranks,), ("ep",))
        rank_result(me, AllToAll(mesh, routing.num_experts, recording), routing)
        return recording.by_call

    local = routing.num_experts // routing.num_ranks
    for me, calls in enumerate(SimulatedWorld(routing.num_ranks).run(rank)):
        if routing.num_ranks == 1:
            assert calls == {}
            continue
        sent = int((routing.expert_ids[me] // local != me).sum())
        received = sum(
            int((ids // local == me).sum()) for i, ids in enumerate(routing.expert_ids) if i != me
        )
        row = 3 * 8
        traffic = calls.pop(("ep", "all_to_all"))
        assert calls == {}
        assert traffic.calls == 5
        # Rows one way and results the other in forward, gradients the opposite ways in backward.
        assert traffic.bytes == (routing.num_ranks - 1) * (local + 4) * 8 + 2 * row * (
            received + sent
        )


DISTINCT = "its choices must be distinct, or all but one have weight 0"
FAULTS = [
    ([[0, 4]], r"rank 1: expert id 4 is not one of 0 .. 3"),
    ([[0, -1]], r"rank 1: expert id -1 is not one of 0 .. 3"),
    ([[2, 2]], f"rank 1: a token names expert 2 twice; {DISTINCT}"),
]


def _faulty(rank: int, dispatcher: AllToAll, ids: list[list[int]]) -> str:
    mine = torch.tensor([[0, 1], [2, 3]] if rank != 1 else ids)
    try:
        dispatcher.dispatch(torch.ones(len(mine), 2), torch.ones(mine.shape), mine)
    except RoutingError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("ids", "text"), FAULTS)
def test_a_fault_on_one_rank_is_raised_by_all_and_names_it(ids: list[list[int]], text: str) -> None:
    errors = SimulatedWorld(4).run(lambda me, door: _faulty(me, _dispatcher(door, 4, 4), ids))
    assert errors == [text] * 4


def _faulty_on_gloo(rank: int, ids: list[list[int]]) -> list[str]:
    dispatcher = AllToAll(cached("ep mesh", lambda: _mesh(2)), 4)
    return [_faulty(rank, dispatcher, ids), _faulty(rank, dispatcher, [[0, 1]])]


def test_real_ranks_raise_together_and_go_on_with_the_next_call(ranks: Any) -> None:
    ids, text = FAULTS[0]
    assert ranks(2).run(_faulty_on_gloo, ids) == [[text, "no error"]] * 2


def test_faults_of_several_ranks_are_all_named() -> None:
    def rank(me: int, door: SimulatedCollectives) -> str:
        return _faulty(1 if me in (1, 2) else 0, _dispatcher(door, 4, 4), [[0, me + 3]])

    text = "rank 1: expert id 4 is not one of 0 .. 3; rank 2: expert id 5 is not one of 0 .. 3"
    assert SimulatedWorld(4).run(rank) == [text] * 4


def _raised(dispatcher: AllToAll, x: Tensor, weights: tuple[int, ...], ids: tuple[int, ...]) -> str:
    try:
        dispatcher.dispatch(x, torch.ones(weights), torch.zeros(ids, dtype=torch.int64))
    except RoutingError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize(("x", "weights", "ids", "text"), MISFITS)
def test_shapes_that_do_not_fit_on_one_rank_are_raised_by_all(
    x: tuple[int, ...], weights: tuple[int, ...], ids: tuple[int, ...], text: str, validate: bool
) -> None:
    def rank(me: int, door: SimulatedCollectives) -> str:
        dispatcher = AllToAll(door.mesh((3,), ("ep",)), 3, door, validate=validate)
        if me == 1:
            return _raised(dispatcher, torch.ones(x), weights, ids)
        return _raised(dispatcher, torch.ones(2, 1), (2, 1), (2, 1))

    errors = SimulatedWorld(3).run(rank)
    assert errors == [errors[0]] * 3
    assert errors[0].startswith("rank 1: " + text)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (torch.ones(2, 4), "rank 1: 4 of torch.float32"),
        (torch.ones(2, 3).double(), "rank 1: 3 of torch.float64"),
        (torch.ones(0, 4), "rank 1: 4 of torch.float32"),
    ],
)
def test_ranks_that_give_rows_of_different_kinds_all_raise(other: Tensor, text: str) -> None:
    def rank(me: int, door: SimulatedCollectives) -> str:
        x = other if me == 1 else torch.ones(2, 3)
        return _raised(_dispatcher(door, 2, 2), x, (len(x), 1), (len(x), 1))

    errors = SimulatedWorld(2).run(rank)
    assert errors[0] == errors[1]
    assert errors[0].startswith("all ranks must give rows of one length and dtype")
    assert errors[0].endswith("got rank 0: 3 of torch.float32; " + text)


def _misfit_on_gloo(rank: int) -> list[str]:
    dispatcher = AllToAll(cached("ep mesh", lambda: _mesh(2)), 2)
    small = torch.zeros(2, 1, dtype=torch.int32 if rank else torch.int64)
    try:
        dispatcher.dispatch(torch.ones(2, 1), torch.ones(2, 1), small)
        dtype = "no error"
    except RoutingError as error:
        dtype = str(error)
    tokens = _raised(dispatcher, torch.ones(2 + rank, 1), (2, 1), (2, 1))
    return [dtype, tokens, _raised(dispatcher, torch.ones(2, 1), (2, 1), (2, 1))]


def test_real_ranks_raise_shape_and_dtype_faults_together_and_go_on(ranks: Any) -> None:
    expected = [
        "rank 1: expert_ids are torch.int32; they must be torch.int64",
        "rank 1: weights are for 2 tokens, but x has 3; they must be equal",
        "no error",
    ]
    assert ranks(2).run(_misfit_on_gloo) == [expected] * 2


def test_validation_can_be_turned_off() -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[int]:
        dispatcher = AllToAll(door.mesh((2,), ("ep",)), 4, door, validate=False)
        ids = torch.tensor([[2, 2]])
        _, counts, _ = dispatcher.dispatch(torch.ones(1, 1), torch.ones(1, 2), ids)
        return counts.tolist()

    assert SimulatedWorld(2).run(rank) == [[0, 0], [4, 0]]


def test_states_are_checked() -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[str]:
        first, second = _dispatcher(door, 2, 2), _dispatcher(door, 2, 2)
        x, w, ids = torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
        rows, _, state = first.dispatch(x, w, ids)
        with pytest.raises(DispatchStateError) as foreign:
            second.combine(rows, state)
        first.combine(rows, state)
        with pytest.raises(DispatchStateError) as twice:
            first.combine(rows, state)
        return [str(foreign.value).partition(";")[0], str(twice.value).partition(";")[0]]

    expected = [
        "combine got a state that another dispatcher made",
        "this state was combined before",
    ]
    assert SimulatedWorld(2).run(rank) == [expected] * 2


def test_experts_that_do_not_divide_are_refused_with_the_degrees_that_do() -> None:
    with pytest.raises(ExpertConfigError, match=r"ep=4 .*=6; use one of \[1, 2, 3, 6\]"):
        SimulatedWorld(4).run(lambda me, door: _dispatcher(door, 4, 6))


def test_the_axis_ep_of_a_larger_mesh_is_taken() -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[int]:
        dispatcher = AllToAll(door.mesh((2, 2), ("efsdp", "ep")), 2, door)
        ids = torch.tensor([[me % 2]])
        _, counts, _ = dispatcher.dispatch(torch.ones(1, 1), torch.ones(1, 1), ids)
        return counts.tolist()

    assert SimulatedWorld(4).run(rank) == [[1]] * 4


def test_a_larger_mesh_without_that_axis_is_refused() -> None:
    with pytest.raises(ExpertConfigError, match=r"no axis 'ep' .* \['dp', 'tp'\]"):
        SimulatedWorld(4).run(
            lambda me, door: AllToAll(door.mesh((2, 2), ("dp", "tp")), 4, door).num_experts
        )


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_take_no_memory_that_others_still_read(size: int) -> None:
    """Results are kept for the weights' gradient, and a graph may be walked again."""

    def rank(me: int, collectives: SimulatedCollectives) -> None:
        dispatcher = _dispatcher(collectives, size, 4)
        generator = torch.Generator().manual_seed(me)
        x, w = (torch.randn(6, n, generator=generator).requires_grad_() for n in (3, 2))
        ids = torch.rand(6, 4, generator=generator).topk(2).indices
        rows, _, state = dispatcher.dispatch(x, w, ids)
        results = rows.exp()  # whose backward reads them
        before = results.detach().clone()
        y = dispatcher.combine(results, state)
        first = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
        second = torch.autograd.grad(y.sum(), (x, w))
        assert torch.equal(results, before)
        expected = (w.sum(1, keepdim=True) * x.exp()).sum()
        for a, b, c in zip(first, second, torch.autograd.grad(expected, (x, w)), strict=True):
            assert torch.equal(a, b)
            assert_close(a, c, 1e-6)

    SimulatedWorld(size).run(rank)


def test_rows_whose_expert_is_here_are_not_sent() -> None:
    def rank(me: int, collectives: SimulatedCollectives) -> list[int]:
        sent: list[int] = []

        class Noted:
            def all_to_all(self, axis: Any, input: Tensor, *more: Any) -> Any:
                if input.is_floating_point():
                    sent.append(input.shape[0])
                return collectives.all_to_all(axis, input, *more)

        noted: Any = Noted()
        dispatcher = AllToAll(collectives.mesh((2,), ("ep",)), 4, noted)
        x, w = torch.ones(5, 3, requires_grad=True), torch.ones(5, 1)
        ids = torch.tensor([[0], [1], [2], [0], [1]])  # four on the first rank
        rows, _, state = dispatcher.dispatch(x, w, ids)
        dispatcher.combine(rows * 2, state).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((5, 3), 2.0))
        return sent

    # Rows there, results back, and both ways once more for gradients.
    assert SimulatedWorld(2).run(rank) == [[1, 4, 1, 4], [4, 1, 4, 1]]
