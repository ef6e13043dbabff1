"""Autocast, gradients of float32 routers in narrow layers, and losses whose scale changes."""

import pytest
import torch
from torch import Tensor

from hp_ep import GroupedExperts, Local, MoE, TopKRouter, scatter_rows
from hp_ep._permutation import TokenGroups, scatter_tokens

from .reference import grads


@pytest.mark.parametrize("dim", [16, 15])
@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
def test_autocast_reaches_grouped_and_single_products(dim: int, stored: torch.dtype) -> None:
    experts = GroupedExperts(dim, dim, 2, dtype=stored)
    rows = torch.randn(5, dim, generator=torch.Generator().manual_seed(0), dtype=stored)
    rows.requires_grad_()
    counts = torch.tensor([2, 3])
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(rows, counts)
    y.float().sum().backward()
    assert y.dtype == (torch.bfloat16 if stored == torch.float32 else torch.float64)
    assert [g.dtype for g in grads([rows, experts.gate_up_proj])] == [stored, stored]
    if stored == torch.float32:
        assert torch.equal(y, experts.bfloat16()(rows.bfloat16(), counts))


def _products(kind: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of routing weights of narrow rows, and the exact one."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(32, 512, generator=generator).bfloat16()
    grad = torch.randn(4, 512, generator=generator).bfloat16()
    weights = torch.rand(4, 8, generator=generator).requires_grad_()
    order = torch.arange(32)
    if kind == "equal groups":
        y = scatter_rows(rows, order, order.view(4, 8), weights)
    else:
        groups = TokenGroups(tokens=order // 8, rows=order, starts=torch.arange(0, 32, 8))
        y = scatter_tokens(rows, groups, weights.view(-1))
    y.backward(grad)
    exact = (rows.double().view(4, 8, 512) * grad.double()[:, None]).sum(-1)
    return grads([weights])[0], exact


@pytest.mark.parametrize("kind", ["equal groups", "any groups"])
def test_gradients_of_float32_weights_of_narrow_rows_are_float32(kind: str) -> None:
    got, exact = _products(kind)
    assert got.dtype == torch.float32
    assert (got - exact).abs().max() / exact.abs().max() < 1e-6


def test_a_layer_under_autocast_keeps_the_dtype_of_its_tokens() -> None:
    layer = MoE(16, 32, 4, 2, num_shared_experts=1)
    layer.dispatcher = Local(4)
    x = torch.randn(5, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert [y.dtype, *(g.dtype for g in grads([x, layer.experts.gate_up_proj]))] == [
        torch.float32
    ] * 3


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_a_float32_router_scores_in_float32_under_autocast(given: torch.dtype) -> None:
    router = TopKRouter(64, 16, 4, z_loss=0.1)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).to(given)
    weights, ids = router(x)
    (weights**2).sum().backward()
    plain = grads([router.weight])[0].clone()
    router.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        cast_weights, cast_ids = router(x)
        assert torch.mm(x, x.t()).dtype == torch.bfloat16  # elsewhere it goes on
    (cast_weights**2).sum().backward()
    assert torch.equal(cast_ids, ids)
    assert torch.equal(cast_weights, weights)
    assert torch.equal(grads([router.weight])[0], plain)
