"""A fixed capacity: what does not fit is dropped or refused, what is not used is not seen."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_dtensor import SimulatedCollectives, SimulatedWorld
from hp_ep import ExpertConfigError, Padded, RoutingError

from .reference import assert_close, grads
from .strategies import Routing, routings


def _kept(ids: Tensor, capacity: int) -> Tensor:
    """Return which choices are among the first ``capacity`` for their expert, one by one."""
    seen: dict[int, int] = {}
    kept = torch.zeros(ids.shape, dtype=torch.bool)
    for t, row in enumerate(ids.tolist()):
        for k, e in enumerate(row):
            seen[e] = seen.get(e, 0) + 1
            kept[t, k] = seen[e] <= capacity
    return kept


@settings(deadline=None, max_examples=60)
@given(routings(), st.integers(1, 4))
def test_the_first_tokens_of_each_expert_are_kept_and_the_others_dropped(
    routing: Routing, capacity: int
) -> None:
    size = routing.num_ranks

    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        mesh = door.mesh((size,), ("ep",))
        dispatcher = Padded(mesh, routing.num_experts, door, capacity=capacity)
        x, w = (t[me].clone().requires_grad_() for t in (routing.x, routing.weights))
        rows, counts, state = dispatcher.dispatch(x, w, routing.expert_ids[me])
        y = dispatcher.combine(rows, state)
        (y * torch.arange(1.0, 4.0)).sum().backward()
        return [y.detach(), *grads([x, w]), counts]

    for me, (y, gx, gw, counts) in enumerate(SimulatedWorld(size).run(rank)):
        kept = _kept(routing.expert_ids[me], capacity)
        x, w = (t[me].clone().requires_grad_() for t in (routing.x, routing.weights))
        expected = x * (w * kept).sum(1, keepdim=True)
        (expected * torch.arange(1.0, 4.0)).sum().backward()
        assert_close(y, expected)
        assert_close(gx, x.grad)
        assert_close(gw, w.grad)
        assert counts.tolist() == [size * capacity] * (routing.num_experts // size)


@settings(deadline=None, max_examples=40)
@given(routings(), st.integers(1, 5))
def test_overflow_is_refused_by_all_ranks_where_drops_are(routing: Routing, capacity: int) -> None:
    def rank(me: int, door: SimulatedCollectives) -> str:
        mesh = door.mesh((routing.num_ranks,), ("ep",))
        dispatcher = Padded(mesh, routing.num_experts, door, capacity=capacity, overflow="error")
        try:
            dispatcher.dispatch(routing.x[me], routing.weights[me], routing.expert_ids[me])
        except RoutingError as error:
            return str(error)
        return "no error"

    most = [
        max((int((ids == e).sum()) for e in range(routing.num_experts)), default=0)
        for ids in routing.expert_ids
    ]
    found = SimulatedWorld(routing.num_ranks).run(rank)
    assert found == [found[0]] * routing.num_ranks
    for me, number in enumerate(most):
        text = f"rank {me}: an expert was chosen {number} times by this rank's tokens, but has room"
        assert (text in found[0]) == (number > capacity)
    assert (found[0] == "no error") == (max(most) <= capacity)


@pytest.mark.parametrize("tokens", [[2, 3], [0, 0], [0, 4]])
def test_rows_that_nobody_uses_never_reach_a_result_or_a_gradient(
    nan_in_new_memory: None, tokens: list[int]
) -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        dispatcher = Padded(door.mesh((2,), ("ep",)), 4, door, capacity=5)
        generator = torch.Generator().manual_seed(me)
        ids = torch.rand(tokens[me], 4, generator=generator).topk(2).indices
        x = torch.ones(tokens[me], 3, requires_grad=True)
        w = torch.ones(ids.shape, requires_grad=True)
        rows, _, state = dispatcher.dispatch(x, w, ids)
        used = rows.detach().abs().sum(1, keepdim=True) > 0
        poisoned = torch.where(used, rows, torch.nan)
        y = dispatcher.combine(poisoned, state)
        y.sum().backward()
        return [y.detach(), *grads([x, w])]

    for y, gx, gw in SimulatedWorld(2).run(rank):
        assert torch.equal(y, torch.full_like(y, 2))  # two choices of weight 1
        assert torch.equal(gx, torch.full_like(gx, 2))
        assert torch.equal(gw, torch.full_like(gw, 3))  # rows of three ones


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(capacity=0), "capacity=0 must be a positive integer"),
        (dict(capacity=1.5), "capacity=1.5 must be a positive integer"),
        (dict(capacity=1, overflow="wrap"), "overflow='wrap' is not 'drop' or 'error'"),
    ],
)
def test_options_that_make_no_buffer_are_refused(options: Any, text: str) -> None:
    with pytest.raises(ExpertConfigError, match=text):
        SimulatedWorld(2).run(lambda me, door: Padded(door.mesh((2,), ("ep",)), 4, door, **options))
