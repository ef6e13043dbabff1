"""Autocast, gradients of float32 routers in narrow layers, and losses whose scale changes."""

from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hp_ep import Dedup, ExpertParallel, GroupedExperts, Local, MoE, TopKRouter, bag_sum
from hp_ep._bags import bags_of, collect

from .reference import assert_close, build_moe, dense_balance_loss, dense_moe, grads


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
    assert [g.dtype for g in grads([rows, experts.w1])] == [stored, stored]
    if stored == torch.float32:
        assert torch.equal(y, experts.bfloat16()(rows.bfloat16(), counts))


def _products(kind: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of routing weights of narrow rows, and the exact one."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(32, 512, generator=generator).bfloat16()
    grad = torch.randn(4, 512, generator=generator).bfloat16()
    weights = torch.rand(4, 8, generator=generator).requires_grad_()
    order = torch.arange(32)
    if kind == "bag_sum":
        y = bag_sum(rows, order, order.view(4, 8), weights)
    else:
        y = collect(rows, bags_of(order // 8, 4), weights.view(-1))
    y.backward(grad)
    exact = (rows.double().view(4, 8, 512) * grad.double()[:, None]).sum(-1)
    return grads([weights])[0], exact


@pytest.mark.parametrize("kind", ["bag_sum", "collect"])
def test_gradients_of_float32_weights_of_narrow_rows_are_float32(kind: str) -> None:
    got, exact = _products(kind)
    assert got.dtype == torch.float32
    assert (got - exact).abs().max() / exact.abs().max() < 1e-6


def _router_grads(loss: float, scale: float) -> Tensor:
    router = TopKRouter(4, 4, 2, load_balance_loss=0.3, z_loss=0.2, sequence_loss=0.1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    router.loss_scale = scale
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    weights, _ = router(x)
    (weights[:, 0].sum() * loss).backward()
    return grads([router.weight])[0]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_gradient_scaler_scales_the_losses_of_routing_too(as_tensor: bool) -> None:
    factor = 65536.0
    plain = _router_grads(1.0, 1.0)
    given: Any = torch.tensor(factor) if as_tensor else factor
    # A power of two: no rounding at all.
    assert torch.equal(_router_grads(factor, given) / factor, plain)
    assert not torch.equal(_router_grads(factor, 1.0) / factor, plain)


def _averaged(rank: int) -> Tensor:
    mesh = cached("ep", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    layer = build_moe(5, balance=0.4)
    layer.router.loss_scale = 2.0
    ExpertParallel(Dedup(mesh, 4), token_axes=mesh).apply(layer, mesh)
    (layer(_batch().chunk(2)[rank]) ** 2).mean().backward()
    return grads([layer.router.weight])[0]


def _batch() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


def test_losses_are_whole_where_gradients_are_averaged_over_ranks(ranks: Any) -> None:
    layer, x = build_moe(5, balance=0.4), _batch()
    ((dense_moe(layer, x) ** 2).mean() + dense_balance_loss(layer, x)).backward()
    averaged = torch.stack(ranks(2).run(_averaged)).mean(0)
    assert_close(averaged, layer.router.weight.grad)


def test_a_layer_under_autocast_keeps_the_dtype_of_its_tokens() -> None:
    layer = MoE(16, 32, 4, 2, num_shared_experts=1)
    layer.dispatcher = Local(4)
    x = torch.randn(5, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert [y.dtype, *(g.dtype for g in grads([x, layer.experts.w1]))] == [torch.float32] * 3


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
