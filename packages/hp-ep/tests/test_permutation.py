"""Moves of rows are permutations, and each one's backward is its transpose."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_ep import (
    ExpertConfigError,
    _permutation,
    gather_rows,
    permute,
    permute_indices,
    scatter_rows,
    unpermute,
)

from .strategies import group_counts


@settings(deadline=None, max_examples=150)
@given(group_counts())
def test_rows_become_expert_major_and_keep_the_order_of_their_ranks(
    drawn: tuple[Tensor, int, int],
) -> None:
    counts, experts, ranks = drawn
    labels = [
        (expert, rank, i)
        for rank in range(ranks)
        for expert in range(experts)
        for i in range(counts[rank * experts + expert])
    ]
    indices, per_expert = permute_indices(counts, experts, ranks)
    assert [labels[i] for i in indices] == sorted(labels)
    assert per_expert.tolist() == counts.view(ranks, experts).sum(0).tolist()
    assert indices.dtype == per_expert.dtype == torch.int64


@settings(deadline=None, max_examples=50)
@given(group_counts())
def test_knowing_the_number_of_rows_changes_nothing(drawn: tuple[Tensor, int, int]) -> None:
    counts, experts, ranks = drawn
    told = permute_indices(counts, experts, ranks, num_rows=int(counts.sum()))
    untold = permute_indices(counts.int(), experts, ranks)
    assert all(torch.equal(a, b) for a, b in zip(told, untold, strict=True))


@pytest.mark.parametrize(("experts", "ranks"), [(1, 3), (3, 1), (1, 1)])
def test_one_rank_or_one_expert_needs_no_move(experts: int, ranks: int) -> None:
    indices, _ = permute_indices(torch.tensor([2, 0, 3][: experts * ranks]), experts, ranks)
    assert indices.tolist() == list(range(len(indices)))


@settings(deadline=None, max_examples=100)
@given(st.permutations(range(7)), st.integers(0, 2**31))
def test_unpermute_is_the_inverse_and_the_transpose_of_permute(order: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.tensor(order)
    x, y = torch.randn(2, 7, 3, generator=generator, dtype=torch.float64)
    assert torch.equal(unpermute(permute(x, indices), indices), x)
    assert torch.equal(permute(unpermute(x, indices), indices), x)
    assert torch.equal(permute(x, indices), x[indices])
    left, right = (permute(x, indices) * y).sum(), (x * unpermute(y, indices)).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_gradients_of_permute_and_unpermute_are_right() -> None:
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([3, 0, 4, 1, 2])  # not its own inverse
    assert torch.autograd.gradcheck(lambda rows: permute(rows, indices), x)
    assert torch.autograd.gradcheck(lambda rows: unpermute(rows, indices), x)
    assert torch.autograd.gradgradcheck(lambda rows: permute(rows, indices) ** 2, x)


def test_no_rows_stay_connected_to_their_input() -> None:
    x = torch.zeros(0, 3, requires_grad=True)
    indices, per_expert = permute_indices(torch.zeros(4, dtype=torch.int64), 2, 2)
    unpermute(permute(x, indices), indices).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 3)
    assert indices.dtype == torch.int64
    assert per_expert.tolist() == [0, 0]


def _orders(tokens: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(tokens * k, generator=torch.Generator().manual_seed(seed))
    return order, order.argsort().view(tokens, k)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_gather_and_scatter_are_each_others_transposes(tokens: int, k: int, seed: int) -> None:
    order, places = _orders(tokens, k, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(tokens * k, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(tokens, k, generator=generator, dtype=torch.float64)
    rows = gather_rows(x, order, places)
    for choice in range(tokens * k):
        assert torch.equal(rows[places.view(-1)[choice]], x[choice // k])
    slow = (y[places] * weights[..., None]).sum(1)
    torch.testing.assert_close(
        scatter_rows(y, order, places, weights), slow, rtol=1e-12, atol=1e-12
    )
    left, right = (rows * y).sum(), (x * scatter_rows(y, order, places)).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", [0, 3])
def test_gradients_of_gather_and_scatter_are_right(tokens: int) -> None:
    order, places = _orders(tokens, 2, 7)
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2 * tokens, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, order, places), x)
    assert torch.autograd.gradcheck(lambda y: scatter_rows(y, order, places), y)
    assert torch.autograd.gradcheck(lambda y, w: scatter_rows(y, order, places, w), (y, weights))
    (fixed,) = torch.autograd.grad(scatter_rows(y, order, places, weights.detach()).sum(), y)
    (free,) = torch.autograd.grad(scatter_rows(y, order, places, weights).sum(), y)
    assert torch.equal(fixed, free)


def test_the_weights_gradient_of_many_rows_is_that_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    order, places = _orders(9, 2, 1)
    y = torch.randn(18, 3, dtype=torch.float64)
    weights = torch.rand(9, 2, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(9, 3, dtype=torch.float64)
    (whole,) = torch.autograd.grad(scatter_rows(y, order, places, weights), weights, grad)
    monkeypatch.setattr(_permutation, "_BLOCK", 4 * 3)  # blocks of 4, 4, 4, 4 and 2 rows
    (blocked,) = torch.autograd.grad(scatter_rows(y, order, places, weights), weights, grad)
    torch.testing.assert_close(blocked, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole, (y[places] * grad[:, None]).sum(2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scatter_takes_rows_narrower_than_the_weights(dtype: torch.dtype) -> None:
    order, places = _orders(4, 2, 3)
    y = torch.randn(8, 3).to(dtype).requires_grad_()
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    total = scatter_rows(y, order, places, weights)
    total.sum().backward()
    assert total.dtype == dtype
    assert y.grad is not None
    assert weights.grad is not None
    assert (y.grad.dtype, weights.grad.dtype) == (dtype, torch.float64)
    torch.testing.assert_close(
        weights.grad.float(), y.detach().float().sum(1)[places], rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize(
    ("indices", "missing"),
    [([0, 0, 1, 2], 3), ([3, 1, 2, 1], 0), ([0, 1, 2, 4], 3), ([-1, 0, 1, 2], 3)],
)
@pytest.mark.parametrize("move", [permute, unpermute])
def test_indices_that_are_no_permutation_are_refused(
    move: Callable[[Tensor, Tensor], Tensor], indices: list[int], missing: int
) -> None:
    with pytest.raises(ExpertConfigError, match=rf"no permutation of 4 rows: {missing} is not"):
        move(torch.zeros(4, 2), torch.tensor(indices))


def test_indices_of_another_dtype_are_refused() -> None:
    with pytest.raises(ExpertConfigError, match=r"indices are torch.int32; they must be torch.int"):
        unpermute(torch.zeros(2, 1), torch.tensor([1, 0], dtype=torch.int32))


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ExpertConfigError, match=r"\(5,\); 2 ranks x 2 experts per rank need \(4,"):
        permute_indices(torch.zeros(5), 2, 2)
    with pytest.raises(ExpertConfigError, match=r"permutation of 3 rows .* got indices \(2,\)"):
        permute(torch.zeros(3, 1), torch.tensor([1, 0]))
    with pytest.raises(ExpertConfigError, match=r"permutation of 3 rows"):
        unpermute(torch.zeros(3, 1), torch.tensor([1, 0]))
    order, places = _orders(2, 2, 0)
    with pytest.raises(ExpertConfigError, match=r"for 3 tokens"):
        gather_rows(torch.zeros(3, 1), order, places)
    with pytest.raises(ExpertConfigError, match=r"got 5 rows for \(2, 2\) token assignments"):
        scatter_rows(torch.zeros(5, 1), order, places)
    with pytest.raises(ExpertConfigError, match=r"weights \(2, 1\) and places \(2, 2\)"):
        scatter_rows(torch.zeros(4, 1), order, places, torch.zeros(2, 1))


def test_rows_of_the_cpu_are_moved_whatever_the_default_device() -> None:
    indices, (order, places) = torch.tensor([1, 0]), _orders(2, 2, 0)
    x = torch.arange(2.0)[:, None]
    with torch.device("meta"):
        assert torch.equal(unpermute(permute(x, indices), indices), x)
        assert gather_rows(x, order, places).shape == (4, 1)
