"""The options of published models, each against its formula in one process."""

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hp_ep import (
    ExpertConfigError,
    ExpertParallel,
    ExpertTensorParallel,
    GroupedExperts,
    MoE,
    TensorParallel,
    TopKRouter,
)

from .reference import assert_close, grads

WIDE = torch.float64


def _fill(module: torch.nn.Module) -> Any:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=WIDE) * 0.5)
    return module


def _x(tokens: int, seed: int = 1) -> Tensor:
    return torch.randn(tokens, 4, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def _layer(**options: Any) -> MoE:
    experts = GroupedExperts(4, 8, 4, dtype=WIDE, **options)
    router = TopKRouter(4, 4, 2, gate_bias=True, dtype=WIDE)
    layer: MoE = _fill(MoE(4, 8, 4, 2, router=router, experts=experts, dtype=WIDE))
    return layer


def _act(name: str, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    if name == "swiglu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=0.6), up.clamp(-0.6, 0.6)
    return (up + 1) * gate * torch.sigmoid(1.5 * gate)


def _dense(layer: MoE, x: Tensor) -> Tensor:
    """Return what the layer's options say, every expert on every token."""
    experts, router = layer.experts, layer.router
    assert router.gate_bias is not None
    chosen, ids = (x @ router.weight.t() + router.gate_bias).softmax(-1).topk(2)
    weights = chosen / chosen.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for e in range(4):
        weight = (weights * (ids == e)).sum(-1, keepdim=True)
        rows = x * weight if experts.score_before_experts else x
        hidden = rows @ experts.gate_up_proj[e].flatten(0, 1).t()
        if experts.gate_up_proj_bias is not None:
            hidden = hidden + experts.gate_up_proj_bias[e].flatten()
        out = _act(str(experts.activation), hidden) @ experts.down_proj[e].t()
        if experts.down_proj_bias is not None:
            out = out + experts.down_proj_bias[e]
        used = (ids == e).any(-1, keepdim=True).to(x.dtype)
        y = y + out * (used if experts.score_before_experts else weight)
    return y


CLAMPED: dict[str, Any] = dict(activation="clamped_swiglu", swiglu_alpha=1.5, swiglu_limit=0.6)
OPTIONS: list[dict[str, Any]] = [
    dict(),
    dict(bias=True),
    dict(bias=True, **CLAMPED),
    dict(bias=True, score_before_experts=True),
    dict(bias=True, row_multiple=8, **CLAMPED),
    dict(row_multiple=16, score_before_experts=True),
]


def _results(layer: MoE, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    (y**2).sum().backward()
    found = {"y": y.detach(), "x": grads([x])[0]}
    for name, p in layer.named_parameters():
        assert p.grad is not None
        found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_experts_are_those_of_the_dense_layer(options: dict[str, Any]) -> None:
    layer, reference = _layer(**options), _layer(**options)
    x, rx = (_x(9).requires_grad_() for _ in range(2))
    mine = _results(layer, layer(x), x)
    for name, expected in _results(reference, _dense(reference, rx), rx).items():
        assert_close(mine[name], expected)


SPLITS: dict[str, Any] = {
    "ep": (ExpertParallel, (2,)),
    "tp": (TensorParallel, (2,)),
    "ep x etp": (ExpertTensorParallel, (2, 2)),
}


def _spread(rank: int, split: str, options: dict[str, Any]) -> dict[str, Tensor]:
    style, shape = SPLITS[split]
    names = ("ep", "etp")[: len(shape)]
    mesh = cached((split,), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))
    layer = _layer(**options)
    style().apply(layer, mesh)
    parts = 1 if split == "tp" else 2
    x = _x(9).chunk(parts)[mesh.get_local_rank(0) if parts > 1 else 0].clone().requires_grad_()
    return _results(layer, layer(x), x)


def _all_spread(rank: int, split: str) -> list[dict[str, Tensor]]:
    return [_spread(rank, split, options) for options in OPTIONS]


@pytest.mark.parametrize("split", SPLITS)
def test_options_are_the_same_on_ranks(ranks: Any, split: str) -> None:
    size = 4 if split == "ep x etp" else 2
    every = ranks(size).run(_all_spread, split)
    blocks = {"ep": [0, 1], "tp": [0], "ep x etp": [0, 2]}[split]  # ranks with tokens of their own
    for i, options in enumerate(OPTIONS):
        reference, x = _layer(**options), _x(9).requires_grad_()
        expected = _results(reference, _dense(reference, x), x)
        results = [found[i] for found in every]
        for name in ("y", "x"):
            assert_close(torch.cat([results[b][name] for b in blocks]), expected[name])
        for name, _ in reference.experts.named_parameters():
            for found in results:
                assert_close(found["experts." + name], expected["experts." + name])
        for name in ("router.weight", "router.gate_bias"):
            assert_close(torch.stack([results[b][name] for b in blocks]).sum(0), expected[name])


def test_a_gate_multiplies_what_the_shared_experts_give() -> None:
    layer = _fill(MoE(4, 8, 4, 2, num_shared_experts=1, gated_shared_experts=True, dtype=WIDE))
    x, shared = _x(5), layer.shared_experts
    hidden = _act("swiglu", x @ shared.gate_up_proj.t()) @ shared.down_proj.t()
    assert_close(shared(x), torch.sigmoid(x @ shared.gate.t()) * hidden)
    with pytest.raises(ExpertConfigError, match="without shared experts"):
        MoE(4, 8, 4, 2, gated_shared_experts=True)


def test_forced_balance_gives_every_expert_as_many_tokens() -> None:
    router = TopKRouter(4, 8, 2, force_balance=True, dtype=WIDE)
    weights, ids = router(_x(12))
    assert torch.bincount(ids.flatten(), minlength=8).tolist() == [3] * 8
    scores = (_x(12) @ router.weight.t()).softmax(-1).gather(1, ids)
    assert_close(weights, scores / scores.sum(-1, keepdim=True))


def test_a_group_is_as_good_as_the_share_of_experts_that_a_token_takes_of_it() -> None:
    torch.manual_seed(0)
    routers = [
        TopKRouter(4, 16, 6, n_group=4, topk_group=2, group_score_experts=each, dtype=WIDE)
        for each in ("share", 3, 2)
    ]
    for router in routers[1:]:
        router.load_state_dict(routers[0].state_dict())
    share, three, two = (router(_x(64))[1].sort(1).values for router in routers)
    assert torch.equal(share, three)
    assert not torch.equal(share, two)


def test_any_function_of_gate_and_up_may_be_the_activation() -> None:
    mine = GroupedExperts(4, 8, 2, activation=lambda gate, up: F.gelu(gate) * up, dtype=WIDE)
    named = GroupedExperts(4, 8, 2, activation="geglu", dtype=WIDE)
    named.load_state_dict(mine.state_dict())
    counts = torch.tensor([2, 3])
    assert torch.equal(mine(_x(5), counts), named(_x(5), counts))


def test_a_layer_can_be_pickled() -> None:
    layer = _layer(bias=True, **CLAMPED)
    copy = pickle.loads(pickle.dumps(layer))
    assert torch.equal(copy(_x(5)), layer(_x(5)))


def test_shared_experts_have_the_activation_of_the_experts() -> None:
    clamped: dict[str, Any] = dict(activation="clamped_swiglu", swiglu_alpha=1.5, swiglu_limit=0.6)
    experts = GroupedExperts(4, 8, 4, dtype=WIDE, **clamped)
    layer = _fill(MoE(4, 8, 4, 2, experts=experts, num_shared_experts=2, dtype=WIDE))
    shared, x = layer.shared_experts, _x(5)
    expected = _act("clamped_swiglu", x @ shared.gate_up_proj.t()) @ shared.down_proj.t()
    assert_close(shared(x), expected)
    with pytest.raises(ExpertConfigError, match="activation='geglu' beside experts of their own"):
        MoE(4, 8, 4, 2, experts=GroupedExperts(4, 8, 4), activation="geglu")


def test_an_activation_with_parameters_is_refused() -> None:
    with pytest.raises(ExpertConfigError, match=r"activation=PReLU.* has parameters"):
        GroupedExperts(4, 8, 2, activation=torch.nn.PReLU())


def test_a_result_beside_shared_experts_has_the_dtype_of_the_input_under_autocast() -> None:
    layer = MoE(16, 16, 4, 2, num_shared_experts=1)
    x, valid = torch.randn(3, 16).half(), torch.tensor([True, False, True])
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == layer(x, valid).dtype == torch.float16


def test_experts_and_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ExpertConfigError, match=r"hidden_dim=6, num_experts=4 in a layer with"):
        MoE(4, 8, 4, 2, experts=GroupedExperts(4, 6, 4))
    with pytest.raises(ExpertConfigError, match=r"weights \(2,\) must have one number per row"):
        GroupedExperts(4, 8, 1, dtype=WIDE)(_x(3), torch.tensor([3]), torch.ones(2))


def test_state_dicts_with_three_weights_are_loaded_as_two() -> None:
    layer = _fill(MoE(4, 8, 4, 2, num_shared_experts=1, dtype=WIDE))
    state = layer.state_dict()
    old: dict[str, Tensor] = {}
    for name, value in state.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            gate, up = value.unbind(1) if "shared" not in name else value.chunk(2)
            old |= {f"{prefix}.w1": gate, f"{prefix}.w3": up}
        else:
            old[f"{prefix}.w2" if last == "down_proj" else name] = value
    fresh = MoE(4, 8, 4, 2, num_shared_experts=1, dtype=WIDE)
    fresh.load_state_dict(old)
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, state[name])


def test_state_dicts_with_gate_and_up_along_one_axis_are_loaded_as_views() -> None:
    layer = _fill(GroupedExperts(4, 8, 3, bias=True, dtype=WIDE))
    state = layer.state_dict()
    old = {k: v.flatten(1, 2) if k.startswith("gate_up") else v for k, v in state.items()}
    assert [old[k].shape for k in ("gate_up_proj", "gate_up_proj_bias")] == [(3, 16, 4), (3, 16)]
    fresh = GroupedExperts(4, 8, 3, bias=True, device="meta", dtype=WIDE)
    fresh.load_state_dict(old, assign=True)
    for name, value in fresh.state_dict().items():
        assert value.shape == state[name].shape
        assert torch.equal(value, state[name])
        assert value.data_ptr() == old[name].data_ptr()
    for wrong in (old["gate_up_proj"][:, 1:], old["gate_up_proj"][:, 2:]):
        with pytest.raises(RuntimeError, match="size mismatch for gate_up_proj"):
            fresh.load_state_dict(old | {"gate_up_proj": wrong})


def _quantised(x: Tensor) -> Tensor:
    """Return ``x`` rounded to float8 with a scale for each row, in float64."""
    scales = x.abs().amax(-1, keepdim=True).to(torch.float32) / 448
    scales = torch.where(scales == 0, 1.0, scales)
    return (x.to(torch.float32) / scales).to(torch.float8_e4m3fn).to(WIDE) * scales.to(WIDE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row_multiple", [1, 16])
def test_float8_products_are_those_of_rounded_numbers(
    dtype: torch.dtype, row_multiple: int
) -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(32, 16, 3, float8=True, row_multiple=row_multiple, dtype=dtype)
    counts = [5, 0, 4]
    rows = torch.randn(9, 32, dtype=dtype).requires_grad_()
    y = experts(rows, torch.tensor(counts))
    y.backward(torch.ones_like(y))
    owner = torch.arange(3).repeat_interleave(torch.tensor(counts))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("ri,roi->ro", _quantised(x), _quantised(weight)[owner])

    both = experts.gate_up_proj.detach().flatten(1, 2)
    gate_up = product(rows.detach(), both).to(dtype)
    hidden = _act("swiglu", gate_up)
    assert_close(y.to(WIDE), product(hidden, experts.down_proj.detach()), tolerance)
    # Gradients of rows are products of rounded numbers too, those of weights are not.
    back = product(torch.ones_like(y), experts.down_proj.detach().transpose(1, 2)).to(dtype)
    leaf = gate_up.detach().requires_grad_()
    (grad,) = torch.autograd.grad(_act("swiglu", leaf), leaf, back)
    expected = product(grad, both.transpose(1, 2))
    assert_close(grads([rows])[0].to(WIDE), expected, 4 * tolerance)
    for e, (g, h) in enumerate(zip(grad.split(counts), rows.detach().split(counts), strict=True)):
        assert_close(
            grads([experts.gate_up_proj])[0][e].flatten(0, 1).to(WIDE),
            g.to(WIDE).t() @ h.to(WIDE),
            tolerance,
        )
