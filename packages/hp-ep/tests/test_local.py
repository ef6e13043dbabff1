"""Dispatch without communication equals every expert computing every token."""

import pytest
import torch
from hypothesis import given, settings

from hp_ep import DispatchStateError, ExpertConfigError, GroupedExperts, Local, RoutingError

from .reference import assert_close, dense_combine, grads
from .strategies import MISFITS, Routing, routings


def _experts(num_experts: int) -> GroupedExperts:
    torch.manual_seed(num_experts)
    return GroupedExperts(3, 5, num_experts, dtype=torch.float64)


@settings(deadline=None, max_examples=60)
@given(routings(max_ranks=1))
def test_outputs_and_all_gradients_equal_the_dense_layer(routing: Routing) -> None:
    experts, reference = _experts(routing.num_experts), _experts(routing.num_experts)
    x, w = routing.x[0].clone().requires_grad_(), routing.weights[0].clone().requires_grad_()
    rx, rw = routing.x[0].clone().requires_grad_(), routing.weights[0].clone().requires_grad_()
    ids = routing.expert_ids[0]
    local = Local(routing.num_experts)
    rows, counts, state = local.dispatch(x, w, ids)
    assert counts.tolist() == [int((ids == e).sum()) for e in range(routing.num_experts)]
    y = local.combine(experts(rows, counts), state)
    expected = dense_combine(rx, rw, ids, reference.gate_up_proj, reference.down_proj)
    assert_close(y, expected)
    scale = torch.arange(1.0, 1.0 + y.numel()).view(y.shape)
    (y * scale).sum().backward()
    (expected * scale).sum().backward()
    pairs = zip(
        grads([x, w, *experts.parameters()]), grads([rx, rw, *reference.parameters()]), strict=True
    )
    for mine, dense in pairs:
        assert_close(mine, dense)


def test_a_state_is_combined_once_and_only_by_its_own_dispatcher() -> None:
    first, second = Local(2), Local(2)
    x, w, ids = torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    rows, _, state = first.dispatch(x, w, ids)
    with pytest.raises(DispatchStateError, match=r"another dispatcher"):
        second.combine(rows, state)
    with pytest.raises(ExpertConfigError, match=r"shape \(2, 1\), but its dispatch gave \(1, 1\)"):
        first.combine(torch.ones(2, 1), state)
    assert first.combine(rows, state).tolist() == [[1.0]]
    with pytest.raises(DispatchStateError, match=r"combined before"):
        first.combine(rows, state)


@pytest.mark.parametrize(("x", "weights", "ids", "text"), MISFITS)
def test_shapes_that_do_not_fit_are_named(
    x: tuple[int, ...], weights: tuple[int, ...], ids: tuple[int, ...], text: str
) -> None:
    with pytest.raises(RoutingError) as error:
        Local(3).dispatch(torch.ones(x), torch.ones(weights), torch.zeros(ids, dtype=torch.int64))
    assert str(error.value).startswith(text)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bool])
def test_ids_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(RoutingError, match=rf"^expert_ids are {dtype}; they must be torch.int64$"):
        Local(3).dispatch(torch.ones(2, 1), torch.ones(2, 1), torch.zeros(2, 1, dtype=dtype))


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([[0, 1], [3, 0]], r"expert id 3 is not one of 0 \.\. 2"),
        ([[0, 1], [-2, 0]], r"expert id -2 is not one of 0 \.\. 2"),
        ([[0, 1], [2, 2]], r"names expert 2 twice"),
    ],
)
def test_unknown_and_repeated_ids_are_refused(ids: list[list[int]], match: str) -> None:
    with pytest.raises(RoutingError, match=match):
        Local(3).dispatch(torch.ones(2, 1), torch.ones(2, 2), torch.tensor(ids))


def test_the_result_has_the_dtype_of_the_tokens_under_autocast() -> None:
    experts = GroupedExperts(3, 5, 2)  # lengths that no grouped product takes: one by one
    x, w = torch.ones(4, 3, requires_grad=True), torch.ones(4, 1)
    local = Local(2)
    with torch.autocast("cpu", torch.bfloat16):
        rows, counts, state = local.dispatch(x, w, torch.tensor([[0], [1], [1], [0]]))
        results = experts(rows, counts)
        y = local.combine(results, state)
    assert results.dtype == torch.bfloat16
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad is not None


def test_validation_can_be_turned_off() -> None:
    local = Local(3, validate=False)
    rows, counts, state = local.dispatch(torch.ones(1, 1), torch.ones(1, 2), torch.tensor([[2, 2]]))
    assert counts.tolist() == [0, 0, 2]
    assert local.combine(rows, state).tolist() == [[2.0]]
