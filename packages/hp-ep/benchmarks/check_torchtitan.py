"""The layer against torchtitan's own, weights renamed: results and all gradients.

    python check_torchtitan.py

On 1 and 4 gloo ranks, without groups and in the four kinds of group routing below. That library's
experts cast to bfloat16 whatever the layer's dtype; here these casts are left out (``--bfloat16``
leaves them in), so both sides compute in float32. Prints the largest difference of each, relative
to the largest number; fails above 1e-5 (0.05). In ``tests/test_torchtitan.py`` that library's
formulas are written out, in float64.
"""

import argparse
import sys
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from peers import is_missing, layer_like, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_ep import ExpertParallel, MoE, TopKRouter

DIM, HIDDEN, EXPERTS, TOKENS = 64, 96, 16, 200
CASES: dict[str, dict[str, Any]] = {
    "softmax": dict(top_k=3, norm_topk_prob=False),
    "sigmoid, shared experts": dict(top_k=2, score="sigmoid", routed_scaling_factor=2.5, shared=2),
    "groups: one of two": dict(top_k=2, score="sigmoid", n_group=2, topk_group=1, bias=True),
    "groups: two of four": dict(
        top_k=4, score="sigmoid", n_group=4, topk_group=2, bias=True, shared=1
    ),
    "groups: three of four": dict(top_k=6, n_group=4, topk_group=3),
    "groups: two of eight": dict(
        top_k=3, score="sigmoid", norm_topk_prob=False, n_group=8, topk_group=2
    ),
}


def main() -> int:
    """Compare all cases; 1 where the other side is not there or they differ."""
    parser = argparse.ArgumentParser(description="the layer against torchtitan's")
    parser.add_argument("--bfloat16", action="store_true", help="with that library's own casts")
    narrow = parser.parse_args().bfloat16
    if is_missing("check_torchtitan"):
        return 1
    bound, good = 0.05 if narrow else 1e-5, True
    for size in (1, 4):
        every = run_ranks(_compare, size, narrow)
        for name in CASES:
            found = {what: max(rank[name][what] for rank in every) for what in every[0][name]}
            good = good and all(error <= bound for error in found.values())  # False for NaN
            text = "  ".join(f"{what} {error:.1e}" for what, error in found.items())
            print(f"{size} ranks, {name}: {text}", flush=True)
    return int(not good)


def _compare(rank: int, mesh: DeviceMesh, narrow: bool) -> dict[str, dict[str, float]]:
    if narrow:
        return {name: _errors(rank, mesh, case) for name, case in CASES.items()}
    with patch.object(Tensor, "bfloat16", lambda x: x):
        return {name: _errors(rank, mesh, case) for name, case in CASES.items()}


def _errors(rank: int, mesh: DeviceMesh, case: dict[str, Any]) -> dict[str, float]:
    """Return the relative error of the result and of each gradient on this rank."""
    torch.manual_seed(0)
    options = {key: value for key, value in case.items() if key != "shared"}
    router = TopKRouter(DIM, EXPERTS, **options)
    if router.bias is not None:
        router.bias.normal_(std=0.1)
    shared = case.get("shared", 0)
    ours = MoE(DIM, HIDDEN, EXPERTS, router.top_k, router=router, num_shared_experts=shared)
    theirs: Any = layer_like(ours, mesh)
    if mesh.size() > 1:
        ExpertParallel(token_axes=mesh).apply(ours, mesh)
    torch.manual_seed(rank + 1)
    x, grad = torch.randn(1, TOKENS - 40 * rank, DIM), torch.randn(1, TOKENS - 40 * rank, DIM)
    found = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(grad)
        found.append((y.detach(), leaf.grad))
    inner = theirs.routed_experts.inner_experts
    gate, up = _grad(ours.experts.gate_up_proj).unbind(1)
    pairs = {
        "result": tuple(each[0] for each in found),
        "tokens": tuple(each[1] for each in found),
        "router": (_grad(ours.router.weight), theirs.router.gate.weight.grad),
        "w1": (gate, inner.w1_EFD.grad),
        "w2": (_grad(ours.experts.down_proj), inner.w2_EDF.grad),
        "w3": (up, inner.w3_EFD.grad),
    }
    if ours.shared_experts is not None:
        beside = theirs.shared_experts
        w13 = torch.cat([beside.w1.weight.grad, beside.w3.weight.grad])
        pairs["shared w1, w3"] = (_grad(ours.shared_experts.gate_up_proj), w13)
        pairs["shared w2"] = (_grad(ours.shared_experts.down_proj), beside.w2.weight.grad)
    dist.barrier()
    return {what: float((a - b).abs().max() / b.abs().max()) for what, (a, b) in pairs.items()}


def _grad(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter without a gradient")
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad


if __name__ == "__main__":
    sys.exit(main())
