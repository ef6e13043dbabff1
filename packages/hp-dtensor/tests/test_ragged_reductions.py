"""Sums, means and norms of ragged tensors equal torch's results for the whole tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import RaggedShard, RaggedTensor

Ranks = Callable[[int], RankPool]
VALUES = torch.tensor([[0.0, -2.0, 3.0], [0.0, 0.5, -1.0], [4.0, 0.0, 0.0]], dtype=torch.double)


def ragged(rank: int, values: torch.Tensor = VALUES) -> RaggedTensor:
    mesh = init_device_mesh("cpu", (2,))
    part = values[:1] if rank == 0 else values[1:]
    return RaggedTensor.from_local(part.clone(), mesh, (RaggedShard((0,), (1, 2)),), shape=(3, 3))


def norm_and_gradient(rank: int, order: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = ragged(rank).requires_grad_()
    total = x.norm(order)
    total.backward()
    grad: Any = x.grad
    return total.detach(), grad.full_tensor()


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.0, float("inf")])
def test_the_norm_of_any_order_has_torchs_gradient_also_at_zeros(
    ranks: Ranks, order: float
) -> None:
    whole = VALUES.clone().requires_grad_()
    expected = whole.norm(order)
    expected.backward()
    for total, gradient in ranks(2).run(norm_and_gradient, order):
        torch.testing.assert_close(total, expected.detach())
        torch.testing.assert_close(gradient, whole.grad)


def refusals(rank: int) -> list[str]:
    x = ragged(rank)
    out = torch.full((), -1.0, dtype=torch.double)
    calls: list[Callable[[], Any]] = [
        lambda: torch.sum(x, (0, 1), out=out),
        lambda: torch.linalg.vector_norm(x, out=out),
        lambda: torch.any(x, out=out.bool()),
        lambda: x.sum((0, 3)),
        lambda: x.mean(2),
    ]
    found = []
    for call in calls:
        try:
            call()
        except (TypeError, IndexError) as error:
            found.append(f"{type(error).__name__} {error}")
        else:
            found.append("")
    return found


def test_invalid_arguments_of_reductions_raise(ranks: Ranks) -> None:
    for found in ranks(2).run(refusals):
        for text in found[:3]:
            assert text.startswith("TypeError")
            assert "out=" in text
        for text in found[3:]:
            assert text.startswith("IndexError")


def any_and_all(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    x = ragged(rank, VALUES.to(dtype))
    return [torch.any(x), torch.all(x)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.float32])
def test_any_and_all_have_torchs_dtype(ranks: Ranks, dtype: torch.dtype) -> None:
    whole = VALUES.to(dtype)
    for found in ranks(2).run(any_and_all, dtype):
        for mine, expected in zip(found, (torch.any(whole), torch.all(whole)), strict=True):
            assert mine.dtype == expected.dtype
            assert torch.equal(mine, expected)


def largest(rank: int, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = ragged(rank, values).requires_grad_()
    result = x.norm(float("inf"))
    result.backward()
    grad: Any = x.grad
    return result.detach(), grad.full_tensor()


@pytest.mark.parametrize(
    "values",
    [
        torch.full((3, 3), 0.1, dtype=torch.double),
        torch.full((3, 3), 3e38),
        torch.tensor([[1.0, 2.0, 3.0], [float("nan"), 1.0, 2.0], [3.0, 0.0, 0.0]]),
    ],
    ids=["equal", "large", "nan"],
)
def test_the_largest_element_is_exact_however_many_ranks_hold_it(
    ranks: Ranks, values: torch.Tensor
) -> None:
    whole = values.clone().requires_grad_()
    expected = whole.norm(float("inf"))
    expected.backward()
    assert whole.grad is not None
    for result, gradient in ranks(2).run(largest, values):
        assert torch.equal(result, expected.detach()) or (result.isnan() and expected.isnan())
        if not expected.isnan():
            torch.testing.assert_close(gradient, whole.grad)
        assert not gradient.isnan().any()
