"""A fixed capacity: what does not fit is dropped or refused, what is not used is not seen."""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor import AxisMesh, Collectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import ExpertConfigError, Padded, RoutingError, choose_capacity

from .reference import assert_close, grads
from .strategies import Routing, routings


def _best(ids: Tensor, weights: Tensor, capacity: int) -> Tensor:
    """Return which choices have one of the ``capacity`` largest weights for their expert."""
    kept = torch.zeros(ids.shape, dtype=torch.bool)
    for e in set(ids.flatten().tolist()):
        places = (ids == e).nonzero().tolist()
        for t, k in sorted(places, key=lambda at: -float(weights[at[0], at[1]]))[:capacity]:
            kept[t, k] = True
    return kept


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
@given(routings(), st.integers(1, 4), st.sampled_from(["position", "probability"]))
def test_the_first_or_best_tokens_of_each_expert_are_kept_and_the_others_dropped(
    routing: Routing, capacity: int, policy: Any
) -> None:
    size = routing.num_ranks

    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        mesh = door.mesh((size,), ("ep",))
        dispatcher = Padded(mesh, routing.num_experts, door, capacity=capacity, drop_policy=policy)
        x, w = (t[me].clone().requires_grad_() for t in (routing.x, routing.weights))
        rows, counts, state = dispatcher.dispatch(x, w, routing.expert_ids[me])
        y = dispatcher.combine(rows, state)
        (y * torch.arange(1.0, 4.0)).sum().backward()
        return [y.detach(), *grads([x, w]), counts]

    for me, (y, gx, gw, counts) in enumerate(SimulatedWorld(size).run(rank)):
        kept = _kept(routing.expert_ids[me], capacity)
        if policy == "probability":
            kept = _best(routing.expert_ids[me], routing.weights[me], capacity)
        x, w = (t[me].clone().requires_grad_() for t in (routing.x, routing.weights))
        expected = x * (w * kept).sum(1, keepdim=True)
        (expected * torch.arange(1.0, 4.0)).sum().backward()
        assert_close(y, expected)
        assert_close(gx, x.grad)
        assert_close(gw, w.grad)
        assert counts.tolist() == [size * capacity] * (routing.num_experts // size)


class _Filled(NamedTuple):
    """What one rank gives and gets at a factor: its gradients, and the rows of its experts."""

    y: Tensor
    x: Tensor
    weights: Tensor
    counts: Tensor
    used: Tensor


FACTORS = [0.25, 0.5, 1.0, 4.0]
TOKENS, TOP_K, EXPERTS = 16, 2, 8


def _inputs(me: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(me)
    skew = torch.rand(TOKENS, EXPERTS, generator=generator) * torch.arange(1.0, EXPERTS + 1)
    x = torch.randn(TOKENS, 3, generator=generator, dtype=torch.float64)
    w = torch.rand(TOKENS, TOP_K, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), w.requires_grad_(), skew.topk(TOP_K).indices


def _fill(me: int, mesh: AxisMesh, door: Collectives | None, factor: float) -> _Filled:
    capacity = choose_capacity(factor, num_tokens=TOKENS, top_k=TOP_K, num_experts=EXPERTS)
    dispatcher = Padded(mesh, EXPERTS, door, capacity=capacity)
    x, w, ids = _inputs(me)
    rows, counts, state = dispatcher.dispatch(x, w, ids)
    y = dispatcher.combine(rows, state)
    (y * torch.arange(1.0, 4.0)).sum().backward()
    used = rows.detach().abs().sum(1).gt(0).view(len(counts), -1).sum(1)
    gx, gw = grads([x, w])
    return _Filled(y.detach(), gx, gw, counts, used)


def _check_filled(results: list[_Filled], factor: float) -> None:
    size, total = len(results), 0
    for me, found in enumerate(results):
        x, w, ids = _inputs(me)
        kept = _kept(ids, round(factor * TOKENS * TOP_K / EXPERTS))
        expected = x * (w * kept).sum(1, keepdim=True)
        (expected * torch.arange(1.0, 4.0)).sum().backward()
        assert_close(found.y, expected)
        assert_close(found.x, x.grad)
        assert_close(found.weights, w.grad)
        assert kept.sum() <= factor * TOKENS * TOP_K
        assert (kept.sum() < kept.numel()) == (factor < 4)
        total += int(kept.sum())
    # Rows are exactly as many as the factor says, and those that were kept are among them.
    assert sum(int(r.counts.sum()) for r in results) == size * factor * TOKENS * TOP_K
    assert all((r.used <= r.counts).all() for r in results)
    assert sum(int(r.used.sum()) for r in results) == total


@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_keeps_its_share_of_the_rows(factor: float) -> None:
    results = SimulatedWorld(4).run(
        lambda me, door: _fill(me, door.mesh((4,), ("ep",)), door, factor)
    )
    _check_filled(results, factor)


def _fill_on_gloo(me: int) -> list[_Filled]:
    mesh = cached("ep mesh", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    return [_fill(me, mesh, None, factor) for factor in FACTORS]


def test_a_factor_keeps_its_share_of_the_rows_of_real_ranks(ranks: Any) -> None:
    first, second = ranks(2).run(_fill_on_gloo)
    for factor, *results in zip(FACTORS, first, second, strict=True):
        _check_filled(results, factor)


@given(st.integers(1, 4096), st.integers(1, 8), st.integers(8, 256), st.floats(0.01, 16))
def test_a_capacity_is_the_least_that_holds_the_factor(
    tokens: int, top_k: int, experts: int, factor: float
) -> None:
    capacity = choose_capacity(factor, num_tokens=tokens, top_k=top_k, num_experts=experts)
    share = factor * tokens * top_k / experts
    assert capacity >= 1
    assert capacity >= share - 1e-6
    assert capacity == 1 or capacity - 1 < share


@pytest.mark.parametrize(
    ("factor", "numbers", "text"),
    [
        (0.0, (4, 2, 8), "factor=0 leaves room for no row"),
        (-1.0, (4, 2, 8), "factor=-1.0 must be a finite number"),
        (math.nan, (4, 2, 8), "factor=nan must be a finite number"),
        (1.0, (0, 2, 8), "num_tokens=0 must be a positive integer"),
        (1.0, (4, 9, 8), "top_k=9 of num_experts=8 experts"),
    ],
)
def test_numbers_that_make_no_capacity_are_refused(
    factor: float, numbers: tuple[int, int, int], text: str
) -> None:
    tokens, top_k, experts = numbers
    with pytest.raises(ExpertConfigError, match=text):
        choose_capacity(factor, num_tokens=tokens, top_k=top_k, num_experts=experts)


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


class _BagLengths(TorchDispatchMode):
    """Notes how many rows each sum of rows adds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lengths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "embedding_bag" in str(func) and args[1].dtype == torch.int64:
            starts = [*args[2].tolist(), args[1].numel()]
            self.lengths += [end - start for start, end in pairwise(starts)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("factor", FACTORS)
def test_no_sum_has_more_rows_than_a_token_has_experts(factor: float) -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[int]:
        seen = _BagLengths()
        with seen, torch.autograd.set_multithreading_enabled(False):
            _fill(me, door.mesh((2,), ("ep",)), door, factor)
        return seen.lengths

    for lengths in SimulatedWorld(2).run(rank):
        assert len(lengths) >= 2 * TOKENS  # of the results, and of the gradients of the tokens
        assert max(lengths) <= TOP_K
