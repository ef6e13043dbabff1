"""Layers whose parts have different dtypes, and layers that get their memory after a style."""

import copy
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_ep import (
    AllToAll,
    Dedup,
    ExpertParallel,
    MoE,
    Placement,
    TopKRouter,
    migrate_experts,
    update_router_bias,
)

from .reference import assert_close, build_moe, dense_moe, grads

COPIES = Placement(num_ranks=2, num_experts=4, experts=(3, 0, 1, 2, 3, 0))


def _ep() -> DeviceMesh:
    return cached("ep", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))


def _mixed(dispatcher: str = "Local", dtype: torch.dtype = torch.bfloat16) -> MoE:
    router = TopKRouter(8, 4, 2, load_balance_loss=0.01, dtype=torch.float32)
    layer = MoE(8, 16, 4, 2, router=router, num_shared_experts=1, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    if dispatcher != "Local":
        given = AllToAll(_ep(), 4) if dispatcher == "AllToAll" else Dedup(_ep(), 4)
        ExpertParallel(given, token_axes=_ep()).apply(layer, _ep())
    return layer


def _tokens() -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(1)).bfloat16()


def _mixed_step(rank: int, dispatcher: str) -> dict[str, Any]:
    layer = _mixed(dispatcher)
    x = _tokens() if dispatcher == "Local" else _tokens().chunk(2)[rank]
    x.requires_grad_()
    seen: list[tuple[Tensor, Tensor]] = []
    layer.router.register_forward_hook(lambda _m, _x, out: seen.append(out))
    y = layer(x)
    y.float().square().sum().backward()
    dtypes = [t.dtype for t in (y, *grads([x, layer.router.weight, layer.experts.gate_up_proj]))]
    weights, expert_ids = seen[0]
    return dict(dtypes=dtypes, weights=weights.detach(), ids=expert_ids, y=y.detach())


@pytest.mark.parametrize("dispatcher", ["Local", "AllToAll", "Dedup"])
def test_a_float32_router_in_a_bfloat16_layer_scores_in_float32(
    ranks: Any, dispatcher: str
) -> None:
    results = ranks(2).run(_mixed_step, dispatcher)
    if dispatcher == "Local":
        results = results[:1]
    exact = _mixed(dtype=torch.float32)
    with torch.no_grad():
        logits = _tokens().double() @ exact.router.weight.double().t()
        scores, ids = logits.softmax(-1).topk(2)
        expected = scores / scores.sum(-1, keepdim=True)
        whole = _mixed().float()(_tokens().float())
    assert torch.equal(torch.cat([r["ids"] for r in results]), ids)
    got = torch.cat([r["weights"] for r in results])
    assert got.dtype == torch.float32
    # Sums of 8 products of float32: far from the 4e-3 of bfloat16.
    assert (got - expected).abs().max() < 1e-5
    assert_close(torch.cat([r["y"] for r in results]).float(), whole, 5e-2)
    for r in results:
        assert r["dtypes"] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("bits", [torch.bfloat16, torch.float16, torch.float64])
def test_the_bias_stays_float32_when_the_model_is_cast(bits: torch.dtype) -> None:
    router = TopKRouter(8, 4, 1, score="sigmoid", bias_rate=1e-3)
    assert router.bias is not None
    router.bias.copy_(torch.tensor([1.0, 0.5, 1e-3, 0.0]))
    before = router.bias.clone()
    router.to(bits)
    assert router.weight.dtype == bits
    assert router.bias.dtype == torch.float32
    assert torch.equal(router.bias, before)
    x = torch.ones(4, 8, dtype=bits, requires_grad=True)
    router(x)[0].sum().backward()  # all tokens choose one expert
    update_router_bias(router)
    (chosen,) = (before > router.bias).nonzero()[:, 0].tolist()
    steps = torch.full((4,), 1e-3)
    steps[chosen] = -1e-3
    assert torch.equal(router.bias, before + steps)
    assert sorted(router.state_dict()) == ["bias", "weight"]


def test_the_bias_follows_to_another_device() -> None:
    router = TopKRouter(8, 4, 1, bias_rate=1e-3).to("meta", torch.bfloat16)
    assert router.bias is not None
    assert router.bias.is_meta
    assert router.bias.dtype == torch.float32
    assert not router.to_empty(device="cpu").bias.is_meta  # type: ignore[union-attr]


def _late_memory(rank: int, migrates: bool) -> dict[str, Tensor]:
    layer = MoE(4, 6, 4, 2, device="meta", dtype=torch.float64)
    assert layer.router.weight.is_meta
    ExpertParallel(placement=COPIES).apply(layer, _ep())
    layer.to_empty(device="cpu")
    values = build_moe(9)
    with torch.no_grad():
        layer.router.weight.copy_(values.router.weight)
        for name, p in layer.experts.named_parameters():
            assert isinstance(p, DTensor)
            whole = values.experts.get_parameter(name)
            p.to_local().copy_(whole[list(COPIES.on_rank(rank))])
    layer.router.load.zero_()
    if migrates:
        turned = tuple(reversed(COPIES.experts))
        migrate_experts(layer, Placement(num_ranks=2, num_experts=4, experts=turned))
        layer = copy.deepcopy(layer)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64).chunk(2)[rank].requires_grad_()
    y = layer(x)
    (y**2).sum().backward()
    w1 = layer.experts.gate_up_proj
    assert isinstance(w1.grad, DTensor)
    return dict(y=y.detach(), x=grads([x])[0], w1=w1.grad.full_tensor())


@pytest.mark.parametrize("migrates", [False, True])
def test_a_placed_layer_that_gets_its_memory_late_equals_one_process(
    ranks: Any, migrates: bool
) -> None:
    results = ranks(2).run(_late_memory, migrates)
    layer, generator = build_moe(9), torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64).requires_grad_()
    y = dense_moe(layer, x)
    (y**2).sum().backward()
    assert_close(torch.cat([r["y"] for r in results]), y)
    assert_close(torch.cat([r["x"] for r in results]), x.grad)
    order = list(reversed(COPIES.experts)) if migrates else list(COPIES.experts)
    assert layer.experts.gate_up_proj.grad is not None
    for r in results:
        assert_close(r["w1"], layer.experts.gate_up_proj.grad[order])
