"""The same results the slow, plain way: every expert computes every token, in one process."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_ep import MoE


def dense_experts(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return what each expert makes of each token, ``[experts, tokens, dim]``."""
    gate, up = torch.einsum("td,eghd->geth", x, gate_up)
    return torch.einsum("eth,edh->etd", F.silu(gate) * up, down)


def dense_combine(
    x: Tensor, weights: Tensor, expert_ids: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Return each token's weighted sum over its experts, ``[tokens, dim]``."""
    every = dense_experts(x, gate_up, down)
    mask = F.one_hot(expert_ids, down.shape[0]).to(x.dtype)
    return torch.einsum("tk,tke,etd->td", weights.to(x.dtype), mask, every)


def dense_moe(layer: MoE, x: Tensor) -> Tensor:
    """Return the layer's output for ``x [tokens, dim]``; see `dense_balance_loss` for its loss."""
    router, experts = layer.router, layer.experts
    probabilities = (x @ router.weight.t()).softmax(-1)
    chosen, ids = probabilities.topk(router.top_k)
    shares = chosen / chosen.sum(-1, keepdim=True)
    y = dense_combine(x, shares, ids, experts.gate_up_proj, experts.down_proj)
    if layer.shared_experts is not None:
        shared = layer.shared_experts
        gate, up = (x @ shared.gate_up_proj.t()).chunk(2, -1)
        y = y + (F.silu(gate) * up) @ shared.down_proj.t()
    return y


def dense_balance_loss(layer: MoE, x: Tensor) -> Tensor:
    """Return the coefficient times the load-balancing loss of the batch ``x [tokens, dim]``."""
    router = layer.router
    if x.shape[0] == 0:
        return x.sum() * 0
    probabilities = (x @ router.weight.t()).softmax(-1)
    ids = probabilities.topk(router.top_k).indices
    fractions = F.one_hot(ids, router.num_experts).to(x.dtype).sum(1).mean(0) / router.top_k
    balance = router.num_experts * (fractions * probabilities.mean(0)).sum()
    return router.load_balance_loss * balance


def build_moe(
    seed: int,
    dim: int = 4,
    hidden: int = 6,
    experts: int = 4,
    top_k: int = 2,
    shared: int = 0,
    balance: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> MoE:
    """Return a layer whose values depend on the seed alone, threads or not."""
    layer = MoE(
        dim,
        hidden,
        experts,
        top_k,
        num_shared_experts=shared,
        load_balance_loss=balance,
        dtype=dtype,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.5)
    return layer


def assert_close(actual: Tensor | None, expected: Tensor | None, tolerance: float = 1e-12) -> None:
    """Assert that the largest difference is within ``tolerance`` of the largest value (or of 1)."""
    assert actual is not None
    assert expected is not None
    assert actual.shape == expected.shape
    if expected.numel():
        scale = max(1.0, expected.abs().max().item())
        difference = (actual - expected).abs().max().item()
        assert difference <= tolerance * scale  # False for NaN


def grads(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients, each of which must be there."""
    found = [p.grad for p in parameters if p.grad is not None]
    assert len(found) == len(parameters)
    return found
