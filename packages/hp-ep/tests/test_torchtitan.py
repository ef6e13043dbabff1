"""The layer is that of torchtitan 0.3.0, whose formulas are written out here, weights renamed.

``benchmarks/check_torchtitan.py`` compares with that library itself, which tests do not install.
"""

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hp_ep import ExpertParallel, MoE, TopKRouter

from .reference import assert_close

DIM, HIDDEN, EXPERTS = 8, 12, 16
TOKENS = {1: [13], 4: [5, 0, 1, 7]}
State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Options of torchtitan's router."""

    top_k: int
    score_func: Literal["softmax", "sigmoid"] = "sigmoid"
    num_expert_groups: int | None = None
    num_limited_groups: int | None = None
    route_norm: bool = False
    route_scale: float = 1.0
    bias: bool = False
    shared: int = 0


CASES = {
    "softmax": Case(top_k=3, score_func="softmax"),
    "sigmoid, normalised": Case(top_k=2, route_norm=True, route_scale=2.5, shared=2),
    "one group of two": Case(top_k=2, num_expert_groups=2, num_limited_groups=1, bias=True),
    "two groups of four": Case(
        top_k=4, num_expert_groups=4, num_limited_groups=2, route_norm=True, bias=True, shared=1
    ),
    "softmax in three groups": Case(
        top_k=6, score_func="softmax", num_expert_groups=4, num_limited_groups=3, route_norm=True
    ),
    "groups of two experts": Case(
        top_k=3, num_expert_groups=8, num_limited_groups=2, route_scale=1.5, bias=True
    ),
}


def _state(case: Case) -> State:
    """Return a state dict by torchtitan's names."""
    generator = torch.Generator().manual_seed(case.top_k)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.6

    inner = "routed_experts.inner_experts."
    state = {
        "router.gate.weight": draw(EXPERTS, DIM),
        inner + "w1_EFD": draw(EXPERTS, HIDDEN, DIM),
        inner + "w2_EDF": draw(EXPERTS, DIM, HIDDEN),
        inner + "w3_EFD": draw(EXPERTS, HIDDEN, DIM),
    }
    if case.bias:
        state["expert_bias_E"] = draw(EXPERTS).float().double()  # a float32 buffer, here and there
    if case.shared:
        wide = HIDDEN * case.shared
        state["shared_experts.w1.weight"] = draw(wide, DIM)
        state["shared_experts.w2.weight"] = draw(DIM, wide)
        state["shared_experts.w3.weight"] = draw(wide, DIM)
    return state


def _renamed(theirs: State) -> State:
    """Return a state dict by the names of this package."""
    inner, shared = "routed_experts.inner_experts.", "shared_experts."
    state = {
        "router.weight": theirs["router.gate.weight"],
        "experts.gate_up_proj": torch.stack([theirs[inner + f"w{i}_EFD"] for i in (1, 3)], 1),
        "experts.down_proj": theirs[inner + "w2_EDF"],
    }
    if "expert_bias_E" in theirs:
        state["router.bias"] = theirs["expert_bias_E"]
    if shared + "w1.weight" in theirs:
        gate_up = [theirs[f"{shared}w{i}.weight"] for i in (1, 3)]
        state["shared_experts.gate_up_proj"] = torch.cat(gate_up)
        state["shared_experts.down_proj"] = theirs[shared + "w2.weight"]
    return state


def _route(case: Case, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return each token's scores and experts."""
    logits = x @ state["router.gate.weight"].t()
    scores = logits.sigmoid() if case.score_func == "sigmoid" else logits.softmax(-1)
    ranked = (scores + state.get("expert_bias_E", torch.zeros(EXPERTS))).detach()
    if case.num_expert_groups is not None and case.num_limited_groups is not None:
        each = EXPERTS // case.num_expert_groups
        for row in ranked:
            worth = [float(group.sort().values[-2:].sum()) for group in row.split(each)]
            best = sorted(range(len(worth)), key=worth.__getitem__)[-case.num_limited_groups :]
            for group in set(range(len(worth))) - set(best):
                row[group * each : (group + 1) * each] = -torch.inf
    ids = ranked.topk(case.top_k).indices
    weights = scores.gather(1, ids)
    if case.route_norm:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * case.route_scale, ids


def _dense(case: Case, x: Tensor, state: State) -> Tensor:
    """Return the layer's result for ``x [tokens, dim]``, one expert after the other."""
    weights, ids = _route(case, x, state)
    y, inner = torch.zeros_like(x), "routed_experts.inner_experts."
    w1, w2, w3 = (state[inner + name] for name in ("w1_EFD", "w2_EDF", "w3_EFD"))
    for expert in range(EXPERTS):
        result = (F.silu(x @ w1[expert].t()) * (x @ w3[expert].t())) @ w2[expert].t()
        y = y + result * (weights * (ids == expert)).sum(1, keepdim=True)
    if case.shared:
        a, b, c = (state[f"shared_experts.w{i}.weight"] for i in (1, 2, 3))
        y = y + (F.silu(x @ a.t()) * (x @ c.t())) @ b.t()
    return y


def _layer(case: Case) -> MoE:
    router = TopKRouter(
        DIM,
        EXPERTS,
        case.top_k,
        score=case.score_func,
        norm_topk_prob=case.route_norm,
        routed_scaling_factor=case.route_scale,
        n_group=case.num_expert_groups or 1,
        topk_group=case.num_limited_groups,
        bias=case.bias,
    )
    sizes = DIM, HIDDEN, EXPERTS, case.top_k
    layer = MoE(*sizes, router=router, num_shared_experts=case.shared).double()
    layer.load_state_dict(_renamed(_state(case)))
    return layer


def _tokens(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(sum(TOKENS[size]), DIM, generator=generator, dtype=torch.float64)
    return list(x.split(TOKENS[size]))


def _on_rank(rank: int, size: int, name: str) -> list[Any]:
    """Return a rank's results and token gradients, gradients of weights, and all ranks' loads."""
    layer = _layer(CASES[name])
    if size > 1:
        mesh = cached(
            ("ep", size), lambda: init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
        )
        ExpertParallel().apply(layer, mesh)
    x = _tokens(size)[rank].clone().requires_grad_()
    y = layer(x)
    (y**2).sum().backward()
    found = {}
    for key, p in layer.named_parameters():
        assert p.grad is not None
        if isinstance(p.grad, DTensor):
            found[key] = p.grad.full_tensor()
        else:
            torch.distributed.all_reduce(p.grad)
            found[key] = p.grad
    load = layer.router.load.clone()
    torch.distributed.all_reduce(load)
    return [y.detach(), x.grad, found, load]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_results_gradients_and_loads_are_those_of_its_formulas(
    ranks: Any, name: str, size: int
) -> None:
    case = CASES[name]
    state = {key: value.requires_grad_() for key, value in _state(case).items()}
    x = torch.cat(_tokens(size)).requires_grad_()
    y = _dense(case, x, state)
    (y**2).sum().backward()
    grads = {key: v.grad for key, v in state.items() if v.grad is not None}
    load = _route(case, x, state)[1].flatten().bincount(minlength=EXPERTS)
    every = ranks(size).run(_on_rank, size, name)
    assert_close(torch.cat([found[0] for found in every]), y.detach())
    assert_close(torch.cat([found[1] for found in every]), x.grad)
    for _, _, named, total in every:
        expected = _renamed(grads)
        assert sorted(named) == sorted(expected)
        for key, grad in expected.items():
            assert_close(named[key], grad)
        assert torch.equal(total, load)


def test_a_group_is_worth_its_two_best_experts_and_not_its_best_one() -> None:
    """What tells the group routing of these cases from others."""
    for name, case in CASES.items():
        if case.num_expert_groups is None:
            continue
        x = torch.cat([_tokens(1)[0] * scale for scale in range(-9, 9)])
        router = _layer(case).router
        expected = _route(case, x, _state(case))[1].sort(1).values
        assert torch.equal(router(x)[1].sort(1).values, expected), name
        router.group_score_experts = 1
        assert not torch.equal(router(x)[1].sort(1).values, expected), name
