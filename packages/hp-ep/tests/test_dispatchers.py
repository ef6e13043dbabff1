"""Every dispatcher does what all experts at home would do."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import AxisMesh
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import (
    DispatchState,
    DispatchStateError,
    ExpertConfigError,
    GroupedExperts,
    Local,
    Placement,
    TokenDispatcher,
)
from hp_ep.dispatch._wrappers import Placed, Summed

from .dispatching import (
    NAMES,
    OVER_RANKS,
    ROUTINGS,
    Result,
    check,
    error_of,
    make_dispatcher,
    rank_result,
    simulated,
)
from .reference import assert_close, grads
from .strategies import Routing, routings


@pytest.mark.parametrize("name", OVER_RANKS[1:])
@settings(deadline=None, max_examples=50)
@given(routings())
def test_outputs_and_all_gradients_equal_the_dense_layer(name: str, routing: Routing) -> None:
    def rank(me: int, door: SimulatedCollectives) -> Result:
        return rank_result(me, simulated(name, door, routing), routing)

    results = SimulatedWorld(routing.num_ranks).run(rank)
    check(routing, results, counted=name != "Padded")


@pytest.mark.parametrize("name", OVER_RANKS)
@settings(deadline=None, max_examples=25)
@given(routings())
def test_rows_that_the_experts_weigh_give_the_same_output_and_gradients(
    name: str, routing: Routing
) -> None:
    def rank(me: int, door: SimulatedCollectives) -> Result:
        return rank_result(me, simulated(name, door, routing), routing, weigh_rows=True)

    results = SimulatedWorld(routing.num_ranks).run(rank)
    check(routing, results, counted=name != "Padded")


@settings(deadline=None, max_examples=25)
@given(routings(max_ranks=1))
def test_rows_that_the_experts_here_weigh_give_the_same_output_and_gradients(
    routing: Routing,
) -> None:
    dispatcher = Local(routing.num_experts)
    check(routing, [rank_result(0, dispatcher, routing, weigh_rows=True)])


def _repeated(routing: Routing) -> Routing:
    """Return the routing with choices behind the first that repeat it with weight zero."""
    ids, weights = [], []
    for own, weight in zip(routing.expert_ids, routing.weights, strict=True):
        repeats = torch.arange(routing.top_k) % 2 == 1
        ids.append(torch.where(repeats, own[:, :1], own))
        weights.append(torch.where(repeats, 0, weight))
    return replace(routing, expert_ids=ids, weights=weights)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weigh_rows", [False, True])
def test_an_expert_may_be_repeated_with_weight_zero(name: str, weigh_rows: bool) -> None:
    routing = _repeated(ROUTINGS["four ranks" if name != "Local" else "one rank"])

    def rank(me: int, door: SimulatedCollectives) -> Result:
        dispatcher = simulated(name, door, routing)
        return rank_result(me, dispatcher, routing, weigh_rows=weigh_rows)

    results = SimulatedWorld(routing.num_ranks).run(rank)
    check(routing, results, counted=name != "Padded")


@pytest.mark.parametrize("name", NAMES)
def test_a_repeated_expert_with_two_weights_is_a_fault(name: str) -> None:
    ids = torch.tensor([[0, 1, 1], [1, 0, 1]])
    weights = torch.tensor([[1.0, 1.0, 0.0], [0.5, 0.0, 0.5]])

    def rank(me: int, door: SimulatedCollectives) -> list[str]:
        dispatcher = make_dispatcher(name, door.mesh, 1, 4, door)
        return [
            error_of(partial(dispatcher.dispatch, torch.ones(1, 3), weights[i, None], ids[i, None]))
            for i in range(2)
        ]

    (texts,) = SimulatedWorld(1).run(rank)
    rule = "its choices must be distinct, or all but one have weight 0"
    text = f"a token names expert 1 twice; {rule}"
    assert [t.removeprefix("rank 0: ") for t in texts] == ["no error", text]


class _Plain:
    """A dispatcher of a user's own: it has both halves whole, and weighs in ``combine``."""

    def __init__(self, inner: Local) -> None:
        self._inner = inner

    def dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor
    ) -> tuple[Tensor, Tensor, DispatchState]:
        return self._inner.dispatch(x, weights, expert_ids)

    def combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        return self._inner.combine(rows, state)


@settings(deadline=None, max_examples=10)
@given(routings(max_ranks=1))
def test_a_dispatcher_that_cannot_let_the_experts_weigh_does_it_itself(routing: Routing) -> None:
    plain = _Plain(Local(routing.num_experts))
    check(routing, [rank_result(0, plain, routing, weigh_rows=True)])


@pytest.mark.parametrize("around", ["Placed", "Summed"])
def test_the_experts_weigh_behind_a_dispatcher_around_another(around: str) -> None:
    routing = ROUTINGS["four ranks"]

    def rank(me: int, door: SimulatedCollectives) -> Result:
        dispatcher = _around(around, simulated("Dedup", door, routing), me, door, routing)
        return rank_result(me, dispatcher, routing, weigh_rows=True)

    check(routing, SimulatedWorld(4).run(rank))


def _on_gloo(rank: int, size: int) -> dict[str, Result]:
    def meshes(shape: tuple[int, ...], names: tuple[str, ...]) -> AxisMesh:
        return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))

    return {
        f"{name}, {title}": rank_result(
            rank,
            make_dispatcher(name, meshes, size, routing.num_experts, None),
            routing,
            weigh_rows=title == "uneven",
        )
        for title, routing in ROUTINGS.items()
        if routing.num_ranks == size
        for name in OVER_RANKS[1:]
    }


@pytest.mark.nccl
@pytest.mark.parametrize("size", [2, 4])
def test_real_ranks_equal_the_dense_layer(ranks: Any, size: int) -> None:
    results = ranks(size).run(_on_gloo, size)
    titles = {k.partition(", ")[2] for k in results[0]}
    assert titles == {title for title, r in ROUTINGS.items() if r.num_ranks == size}
    for key in results[0]:
        name, _, title = key.partition(", ")
        check(ROUTINGS[title], [r[key] for r in results], counted=name != "Padded")


@pytest.mark.parametrize("name", NAMES)
def test_results_narrower_than_the_tokens_are_summed_in_the_dtype_of_the_tokens(name: str) -> None:
    small = 2**-10  # 1 + this is no bfloat16

    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        dispatcher = make_dispatcher(name, door.mesh, 4, 8, door)
        x = torch.ones(2, 3, requires_grad=True)
        w = torch.tensor([[1.0, small]] * 2)
        rows, _, state = dispatcher.dispatch(x, w, torch.tensor([[0, 1], [3, 7]]))
        y = dispatcher.combine(rows.bfloat16(), state)
        y.sum().backward()
        return [y, *grads([x])]

    for y, gx in SimulatedWorld(4).run(rank):
        assert torch.equal(y, torch.full((2, 3), 1 + small))
        assert_close(gx, torch.full((2, 3), 1 + small), 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # grouped, and one by one
@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_experts_without_tokens_get_a_gradient_of_zeros(
    name: str, tokens: int, dtype: torch.dtype
) -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        experts = GroupedExperts(4, 8, 4 if name == "Local" else 2, dtype=dtype)
        dispatcher = make_dispatcher(name, door.mesh, 2, 4, door)
        x = torch.ones(tokens, 4, dtype=dtype, requires_grad=True)
        w = torch.ones(tokens, 1, dtype=dtype, requires_grad=True)
        rows, counts, state = dispatcher.dispatch(x, w, torch.zeros(w.shape, dtype=torch.int64))
        dispatcher.combine(experts(rows, counts), state).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        return grads([*experts.parameters()])

    for me, found in enumerate(SimulatedWorld(2).run(rank)):
        for grad in found:
            busy = tokens > 0 and (me == 0 or name == "Local")
            assert grad[0].any() == busy  # expert 0 gets all
            assert not grad[1:].any()


def _around(
    what: str, inner: TokenDispatcher, me: int, door: SimulatedCollectives, routing: Routing
) -> TokenDispatcher:
    if what == "Placed":
        return Placed(inner, Placement.contiguous(routing.num_experts, routing.num_ranks), me)
    return Summed(inner, door.axis("tp", [me]), door) if what == "Summed" else inner


@pytest.mark.parametrize("around", ["", "Placed", "Summed"])
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=8)
@given(routings())
def test_states_in_flight_may_be_combined_in_any_order_and_once(
    name: str, around: str, routing: Routing
) -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        dispatcher = _around(around, simulated(name, door, routing), me, door, routing)
        x, w, ids = routing.x[me], routing.weights[me], routing.expert_ids[me]
        first, _, first_state = dispatcher.dispatch(x, w, ids)
        second, _, second_state = dispatcher.dispatch(-3 * x, w, ids.flip(1))
        y2 = dispatcher.combine(second, second_state)
        y1 = dispatcher.combine(first, first_state)
        with pytest.raises(DispatchStateError, match="combined before"):
            dispatcher.combine(first, first_state)
        with pytest.raises(DispatchStateError, match="another dispatcher"):
            simulated(name, door, routing).combine(first, first_state)
        for other in (torch.cat([first, first, x.new_zeros(1, 3)]), first[:, :2], first[:, 0]):
            with pytest.raises(ExpertConfigError, match=r"shape .*, but its dispatch gave \("):
                dispatcher.combine(other, second_state)
        total = x * w.sum(1, keepdim=True)
        return [y1 - total, y2 + 3 * total]

    for differences in SimulatedWorld(routing.num_ranks).run(rank):
        for difference in differences:
            assert_close(difference, torch.zeros_like(difference))
