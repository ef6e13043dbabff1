"""The router's choice, its load-balancing loss and its load statistics."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import ExpertConfigError, TopKRouter
from hp_ep._losses import load_balancing_share

from .reference import assert_close, grads


def _router(experts: int, top_k: int, balance: float = 0.0) -> TopKRouter:
    router = TopKRouter(4, experts, top_k, load_balance_loss=balance, dtype=torch.float64)
    generator = torch.Generator().manual_seed(experts)
    with torch.no_grad():
        router.weight.copy_(torch.randn(experts, 4, generator=generator, dtype=torch.float64))
    return router


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6), st.data(), st.integers(0, 5), st.integers(0, 2**31))
def test_weights_are_the_largest_probabilities_made_to_sum_to_one(
    experts: int, data: st.DataObject, tokens: int, seed: int
) -> None:
    top_k = data.draw(st.integers(1, experts))
    router = _router(experts, top_k)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 4, generator=generator, dtype=torch.float64)
    weights, ids = router(x)
    assert weights.shape == ids.shape == (tokens, top_k)
    exponentials = (x @ router.weight.t()).exp()
    for t in range(tokens):
        order = sorted(range(experts), key=lambda e: -exponentials[t, e].item())[:top_k]
        assert ids[t].tolist() == order
        expected = exponentials[t, order] / exponentials[t, order].sum()
        assert_close(weights[t], expected)


@pytest.mark.parametrize(
    ("dtype", "scores"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_scores_are_at_least_float32(dtype: torch.dtype, scores: torch.dtype) -> None:
    weights, ids = TopKRouter(4, 3, 2, dtype=dtype)(torch.randn(5, 4, dtype=dtype))
    assert (weights.dtype, ids.dtype) == (scores, torch.int64)


def test_uniform_routing_has_a_balance_loss_of_one() -> None:
    probabilities = torch.full((8, 4), 0.25, dtype=torch.float64)
    counts, tokens = torch.full((4,), 4), torch.tensor(8)
    assert load_balancing_share(probabilities, counts, tokens, 2).item() == 1.0


def test_all_tokens_to_one_expert_have_the_largest_balance_loss() -> None:
    probabilities = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64).expand(6, 4)
    counts, tokens = torch.tensor([6, 0, 0, 0]), torch.tensor(6)
    assert load_balancing_share(probabilities, counts, tokens, 1).item() == 4.0


def test_no_tokens_have_no_balance_loss() -> None:
    share = load_balancing_share(torch.zeros(0, 3), torch.zeros(3).long(), torch.tensor(0), 1)
    assert share.item() == 0.0


def _balance(router: TopKRouter, x: Tensor) -> Tensor:
    """Write the loss out: E times the sum of f_e P_e, times its coefficient."""
    probabilities = (x @ router.weight.t()).softmax(-1)
    ids = probabilities.topk(router.top_k).indices
    loss = x.new_zeros(())
    for e in range(router.num_experts):
        fraction = (ids == e).double().mean()
        loss = loss + fraction * probabilities[:, e].mean()
    return router.load_balance_loss * router.num_experts * loss


def test_the_loss_reaches_the_gradient_whatever_the_scale_of_the_main_loss() -> None:
    router, reference = _router(5, 2, 0.3), _router(5, 2, 0.3)
    x = torch.randn(7, 4, dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights, _ = router(mine)
    (weights.sum() * 0).backward()
    _balance(reference, theirs).backward()
    assert theirs.grad is not None
    assert theirs.grad.abs().max() > 1e-4
    for a, b in zip(grads([mine, router.weight]), grads([theirs, reference.weight]), strict=True):
        assert_close(a, b)


def test_without_a_coefficient_there_is_no_loss_and_no_communication() -> None:
    def rank(me: int, door: SimulatedCollectives) -> tuple[float, int]:
        recording = RecordingCollectives(door)
        router = _router(4, 2)
        router.split_tokens_over(door.mesh((2,), ("dp",)), recording)
        (router(torch.ones(3, 4, dtype=torch.float64))[0].sum() * 0).backward()
        return grads([router.weight])[0].abs().max().item(), len(recording.by_call)

    assert SimulatedWorld(2).run(rank) == [(0.0, 0)] * 2


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
    st.integers(1, 3),
    st.integers(0, 2**31),
    st.sampled_from([((4,), ("dp",)), ((2, 2), ("dp", "cp"))]),
)
def test_gradients_over_split_tokens_are_those_of_the_whole_batch(
    tokens: list[int], top_k: int, seed: int, mesh: tuple[tuple[int, ...], tuple[str, ...]]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(tokens), 4, generator=generator, dtype=torch.float64)
    parts = x.split(tokens)

    def rank(me: int, door: SimulatedCollectives) -> tuple[Tensor, Tensor]:
        router = _router(3, top_k, 0.7)
        router.split_tokens_over(door.mesh(*mesh), door)
        mine = parts[me].clone().requires_grad_()
        (router(mine)[0] * torch.arange(1.0, 1.0 + top_k)).sum().backward()
        gx, gw = grads([mine, router.weight])
        return gx, gw

    results = SimulatedWorld(4).run(rank)
    reference, whole = _router(3, top_k, 0.7), x.clone().requires_grad_()
    weights = reference.eval()(whole)[0]
    loss = (weights * torch.arange(1.0, 1.0 + top_k)).sum()
    if sum(tokens):
        loss = loss + _balance(reference, whole)
    loss.backward()
    gx, gw = grads([whole, reference.weight])
    assert_close(torch.cat([r[0] for r in results]), gx)
    assert_close(torch.stack([r[1] for r in results]).sum(0), gw)


def test_load_counts_every_choice_of_a_training_step_once() -> None:
    router = _router(4, 2)
    x = torch.randn(6, 4, dtype=torch.float64)
    for _ in range(2):
        router(x)[0].sum().backward()
    _, ids = router(x)  # no backward: not a step
    assert router.load.tolist() == [2 * int((ids == e).sum()) for e in range(4)]
    router.eval()
    router(x)[0].sum().backward()
    with torch.no_grad():
        router.train()(x)
    assert router.load.sum() == 2 * 6 * 2


def test_load_is_counted_once_where_one_forward_has_two_backwards() -> None:
    router = _router(4, 2)
    weights, ids = router(torch.randn(6, 4, dtype=torch.float64))
    weights.sum().backward(retain_graph=True)
    weights.sum().backward()
    assert router.load.tolist() == [int((ids == e).sum()) for e in range(4)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_repeats_the_ids_and_counts_load_and_loss_once(reentrant: bool) -> None:
    plain, recomputed = _router(4, 2, 0.5), _router(4, 2, 0.5)
    seen: list[Tensor] = []

    def squares(x: Tensor) -> Tensor:
        weights, ids = recomputed(x)
        seen.append(ids)
        return torch.square(weights)

    x = torch.randn(6, 4, dtype=torch.float64)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    (plain(first)[0] ** 2).sum().backward()
    checkpoint(squares, second, use_reentrant=reentrant).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(plain.load, recomputed.load)
    for a, b in zip(grads([first, plain.weight]), grads([second, recomputed.weight]), strict=True):
        assert torch.equal(a, b)


def test_load_is_not_saved() -> None:
    assert list(_router(3, 1).state_dict()) == ["weight"]


@pytest.mark.parametrize("top_k", [0, 4, -1, 1.5, "2", True, None])
def test_more_choices_than_experts_or_none_are_refused(top_k: Any) -> None:
    text = rf"top_k={top_k!r} of num_experts=3 .* use an integer from 1 to 3"
    with pytest.raises(ExpertConfigError, match=text):
        TopKRouter(4, 3, top_k)


@pytest.mark.parametrize("balance", [-0.1, float("nan"), float("inf"), "0.1", None, True])
def test_a_coefficient_that_is_no_finite_number_of_at_least_0_is_refused(balance: Any) -> None:
    with pytest.raises(ExpertConfigError, match=f"^load_balance_loss={balance!r} must be"):
        TopKRouter(4, 3, 1, load_balance_loss=balance)


@pytest.mark.parametrize("size", [0, -3, 2.0, "2", True, None])
def test_sizes_that_are_no_positive_integers_are_refused_together(size: Any) -> None:
    text = rf"^dim={size!r} must be a positive integer"
    with pytest.raises(ExpertConfigError, match=text):
        TopKRouter(size, 3, 1)
    text = rf"^dim={size!r}, num_experts={size!r} must be a positive integer"
    with pytest.raises(ExpertConfigError, match=text):
        TopKRouter(size, size, 1)


def test_integers_and_numbers_of_other_types_are_taken() -> None:
    dim: Any = np.int64(4)
    top_k: Any = np.int32(2)
    balance: Any = np.float32(0.5)
    weights, _ = TopKRouter(dim, 3, top_k, load_balance_loss=balance)(torch.ones(5, 4))
    weights.sum().backward()
    assert weights.shape == (5, 2)


def test_printing_a_router_shows_its_sizes() -> None:
    shown = "TopKRouter(dim=4, num_experts=3, top_k=2, load_balance_loss=0.5)"
    assert repr(_router(3, 2, 0.5)) == shown


def test_axes_that_are_only_names_are_refused() -> None:
    with pytest.raises(ExpertConfigError, match=r"\['dp'\] are not a mesh or a sequence of Axis"):
        _router(3, 1).split_tokens_over(["dp"])  # type: ignore[list-item]


def test_an_unknown_score_is_refused() -> None:
    with pytest.raises(
        ExpertConfigError, match=r"score='tanh' is not one of \['softmax', 'sigmoid'\]"
    ):
        TopKRouter(4, 3, 1, score="tanh")  # type: ignore[arg-type]
