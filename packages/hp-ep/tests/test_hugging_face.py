"""A Hugging Face mixture of experts, random weights, with its experts on several ranks."""

from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_ep import ExpertParallel, GroupedExperts, Local, MoE, TopKRouter

from .reference import assert_close

STEPS = 3
ROUNDING = 1e-5  # the library computes norms, routing weights and the loss in float32


class _Experts(nn.Module):
    """Takes the place of the library's experts: tokens, ids and weights in, sums out."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.experts = _grouped(theirs)
        self.local = Local(theirs.num_experts)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows, counts, state = self.local.dispatch(x, weights, ids)
        return self.local.combine(self.experts(rows, counts), state)


def _grouped(theirs: Any) -> GroupedExperts:
    """Return the same experts; the library keeps gate and up projections as one tensor."""
    ours = GroupedExperts(
        theirs.hidden_dim, theirs.intermediate_dim, theirs.num_experts, dtype=torch.float64
    )
    ours.load_state_dict(
        {"gate_up_proj": theirs.gate_up_proj, "down_proj": theirs.down_proj}, strict=True
    )
    return ours


def _model() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    make: Any = Qwen3MoeConfig
    config = make(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        output_router_logits=False,
        use_cache=False,
    )
    model: Any = Qwen3MoeForCausalLM(config).double()
    model.set_experts_implementation("eager")  # its grouped products take no float64
    with torch.no_grad():  # routers start at zero, where all experts are alike
        for name, p in model.named_parameters():
            if name.endswith("gate.weight"):
                p.normal_()
    return model


def _tokens() -> Tensor:
    return torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(1))


def _step(model: Any, tokens: Tensor, share: float) -> float:
    loss = model(input_ids=tokens, labels=tokens).loss * share
    loss.backward()
    return float(loss.detach())


def _single() -> list[Any]:
    """Return each step's loss and gradients."""
    model, found = _model(), []
    for _ in range(STEPS):
        loss = _step(model, _tokens(), 1.0)
        named: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            named[name] = p.grad.clone()
        found.append((loss, named))
        _update(model)
    return found


def _update(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    model.zero_grad()


def _mesh(size: int) -> DeviceMesh:
    return cached(("ep", size), lambda: init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)))


def _spread(rank: int, size: int, whole_layer: bool) -> list[Any]:
    model, mesh = _model(), _mesh(size)
    for block in model.model.layers:
        theirs = block.mlp
        if whole_layer:
            router = TopKRouter(16, 8, 3, dtype=torch.float64)
            with torch.no_grad():
                router.weight.copy_(theirs.gate.weight)
            layer = MoE(16, 8, 8, 3, router=router, dtype=torch.float64)
            layer.experts = _grouped(theirs.experts)
            block.mlp = ExpertParallel().apply(layer, mesh)
        else:
            theirs.experts = _Experts(theirs.experts)
            ExpertParallel().apply(theirs.experts.experts, mesh)
    mine, found = _tokens().chunk(size)[rank], []
    for _ in range(STEPS):
        loss = _step(model, mine, 1 / size)
        named: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            ours = name.replace("experts.experts.", "experts.").replace("mlp.router", "mlp.gate")
            grad: Any = p.grad
            if isinstance(p, DTensor):
                named[ours] = grad.full_tensor()
            else:
                torch.distributed.all_reduce(grad)  # what data parallelism would do
                named[ours] = grad.clone()
        found.append((loss, named))
        _update(model)
    return found


def _both(rank: int, size: int) -> list[Any]:
    return [_spread(rank, size, whole_layer) for whole_layer in (False, True)]


def test_losses_and_gradients_equal_one_process(ranks: Any) -> None:
    single, spread = _single(), ranks(2).run(_both, 2)
    for step, (loss, expected) in enumerate(single):
        for way in range(2):  # experts alone, and the whole layer
            found = [rank[way][step] for rank in spread]
            assert sum(r[0] for r in found) == pytest.approx(loss, rel=ROUNDING)
            for _, named in found:
                assert sorted(named) == sorted(expected)
                for name, grad in expected.items():
                    # Gate and up have an axis of their own here.
                    assert_close(named[name].view_as(grad), grad, ROUNDING)
