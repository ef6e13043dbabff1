"""Sigmoid scores, groups, biases, noise and the z loss: each against its formula."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import ExpertConfigError, MoE, TopKRouter, collect_loads, update_router_bias

from .reference import assert_close, grads


def _router(experts: int = 8, top_k: int = 2, **options: Any) -> TopKRouter:
    router = TopKRouter(4, experts, top_k, dtype=torch.float64, **options)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(experts)
        router.weight.copy_(torch.randn(experts, 4, generator=generator, dtype=torch.float64))
    return router


def _x(tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 4, generator=generator, dtype=torch.float64)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
    st.sampled_from([1.0, 2.5]),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 3), (8, 4), (2, 2)]),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_weights_are_scores_of_the_best_experts_of_the_best_groups(
    score: Any,
    normalise: bool,
    scale: float,
    groups: tuple[int, int],
    top_k: int,
    biased: bool,
    seed: int,
) -> None:
    n_group, topk_group = groups
    router = _router(
        8,
        top_k,
        score=score,
        norm_topk_prob=normalise,
        routed_scaling_factor=scale,
        n_group=n_group,
        topk_group=topk_group,
        bias_rate=0.1 if biased else 0.0,
    )
    bias = torch.zeros(8)
    if router.bias is not None:
        bias = torch.rand(8, generator=torch.Generator().manual_seed(seed))
        router.bias.copy_(bias)
    x = _x(5, seed)
    weights, ids = router(x)
    logits = x @ router.weight.t()
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    size = 8 // n_group
    best = min(2, size)
    for t in range(5):
        ranked = (scores[t] + bias).tolist()
        worth = [sum(sorted(ranked[g * size : (g + 1) * size])[-best:]) for g in range(n_group)]
        kept = sorted(range(n_group), key=lambda g: -worth[g])[:topk_group]
        legal = [e for e in range(8) if e // size in kept]
        chosen = sorted(legal, key=lambda e: -ranked[e])[:top_k]
        assert ids[t].tolist() == chosen
        expected = scores[t, chosen]
        if normalise:
            expected = expected / expected.sum()
        assert_close(weights[t], scale * expected)


def _z_loss(router: TopKRouter, x: Tensor) -> Tensor:
    logits = x @ router.weight.t()
    return router.z_loss * (logits.exp().sum(1).log() ** 2).mean()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=2), st.integers(0, 2**31))
def test_the_z_loss_over_split_tokens_is_that_of_the_whole_batch(
    tokens: list[int], seed: int
) -> None:
    x = _x(sum(tokens), seed)

    def rank(me: int, door: SimulatedCollectives) -> list[Tensor]:
        router = _router(z_loss=0.3)
        router.split_tokens_over(door.mesh((2,), ("dp",)), door)
        mine = x.split(tokens)[me].clone().requires_grad_()
        (router(mine)[0].sum() * 0).backward()
        return grads([mine, router.weight])

    results = SimulatedWorld(2).run(rank)
    reference, whole = _router(z_loss=0.3), x.clone().requires_grad_()
    if sum(tokens):
        _z_loss(reference, whole).backward()
        gx, gw = grads([whole, reference.weight])
        assert_close(torch.cat([r[0] for r in results]), gx)
        assert_close(torch.stack([r[1] for r in results]).sum(0), gw)


def test_uniform_sigmoid_scores_have_a_balance_loss_of_one() -> None:
    router = _router(4, 2, score="sigmoid", load_balance_loss=1.0)
    logits = torch.zeros(8, 4, dtype=torch.float64)
    counts = torch.full((4,), 4)
    assert router._loss(logits, logits.sigmoid(), counts).item() == 1.0


def test_noise_is_for_training_and_recomputation_repeats_it() -> None:
    router, x = _router(noise=2.0), _x(20)
    quiet = _router()
    assert torch.equal(router.eval()(x)[1], quiet(x)[1])
    router.train()
    assert not torch.equal(router(x)[1], quiet(x)[1])
    seen: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        weights, ids = router(x)
        seen.append(ids)
        return torch.square(weights)

    leaf = x.clone().requires_grad_()
    checkpoint(run, leaf, use_reentrant=False).sum().backward()
    assert torch.equal(seen[0], seen[1])


def test_a_bias_is_saved_and_a_router_without_has_none() -> None:
    assert list(_router(bias_rate=0.1).state_dict()) == ["weight", "bias"]
    assert _router().bias is None


class _Model(nn.Module):
    def __init__(self, *rates: float) -> None:
        super().__init__()
        self.routers = nn.ModuleList(_router(4, 1, bias_rate=rate) for rate in rates)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([router(x)[0].sum() for router in self.routers]).sum()


def test_each_bias_moves_by_its_rate_towards_the_mean_of_all_ranks() -> None:
    def rank(me: int, door: SimulatedCollectives) -> Any:
        model, record = _Model(0.5, 0.25), RecordingCollectives(door)
        loads = [[9, 1, 3, 3], [0, 8, 4, 4]]
        for router, load in zip(model.routers, loads, strict=True):
            assert isinstance(router, TopKRouter)
            router.load.copy_(torch.tensor(load) * me)
        update_router_bias(model, door.mesh((2,), ("dp",)), record)
        routers = [r for r in model.routers if isinstance(r, TopKRouter)]
        assert all(r.load.sum() == 0 for r in routers)
        calls = record.by_call[("dp", "all_reduce")].calls
        return calls, [r.bias.tolist() for r in routers if r.bias is not None]

    first = [-0.5, 0.5, 0.5, 0.5]
    second = [0.25, -0.25, 0.0, 0.0]
    assert SimulatedWorld(2).run(rank) == [(1, [first, second])] * 2


def test_loads_of_a_step_are_collected_once() -> None:
    def rank(me: int, door: SimulatedCollectives) -> list[dict[str, list[int]]]:
        model = _Model(0.1, 0.1)
        for router in model.routers:
            assert isinstance(router, TopKRouter)
            router.split_tokens_over(door.mesh((2,), ("dp",)), door)
        model(_x(3 + me, me)).backward()
        found = [collect_loads(model) for _ in range(2)]
        return [{k: v.tolist() for k, v in loads.items()} for loads in found]

    first, second = SimulatedWorld(2).run(rank)
    assert first == second
    assert list(first[0]) == ["routers.0", "routers.1"]
    assert [sum(load) for load in first[0].values()] == [7, 7]
    assert [sum(load) for load in first[1].values()] == [0, 0]


def test_biases_even_a_skewed_load() -> None:
    model, x = _Model(0.01), _x(512) + 1
    router = model.routers[0]
    assert isinstance(router, TopKRouter)

    def imbalance() -> float:
        load = torch.bincount(router(x)[1].view(-1), minlength=4)
        return float(load.max() / load.double().mean())

    before = imbalance()
    for _ in range(120):
        model(x).backward()
        update_router_bias(model)
    assert before > 1.5 > 1.15 > imbalance()


def test_rates_in_some_layers_only_and_models_without_routers_are_refused() -> None:
    with pytest.raises(ExpertConfigError, match=r"routers \['routers.1'\] have bias_rate=0"):
        update_router_bias(_Model(0.1, 0.0))
    with pytest.raises(ExpertConfigError, match="Linear has no TopKRouter"):
        collect_loads(nn.Linear(1, 1))

    def rank(me: int, door: SimulatedCollectives) -> str:
        model = _Model(0.1, 0.1)
        router = model.routers[0]
        assert isinstance(router, TopKRouter)
        router.split_tokens_over(door.mesh((2,), ("dp",)), door)
        with pytest.raises(ExpertConfigError) as error:
            update_router_bias(model)
        return str(error.value)

    texts = SimulatedWorld(2).run(rank)
    assert "routers count tokens over different axes" in texts[0]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(n_group=3), r"n_group=3 does not divide num_experts=8; use one of \[1, 2, 4"),
        (dict(n_group=0), "n_group=0 does not divide"),
        (dict(n_group=2.0), "n_group=2.0 does not divide"),
        (dict(n_group=2.0, topk_group=1), "n_group=2.0 does not divide"),
        (dict(n_group=4, topk_group=5), "topk_group=5 of n_group=4 .* from 1 to 4"),
        (dict(n_group=8, topk_group=1), "must hold top_k=2 .* from 2 to 8"),
        (dict(z_loss=-1), "z_loss=-1 must be a finite number of at least 0"),
        (dict(bias_rate="a"), "bias_rate='a' must be a finite number of at least 0"),
        (dict(noise=float("nan")), "noise=nan must be"),
    ],
)
def test_options_that_cannot_be_are_refused(options: Any, text: str) -> None:
    with pytest.raises(ExpertConfigError, match=text):
        _router(**options)


def test_a_layer_takes_a_router_of_its_own_if_it_fits() -> None:
    router = _router(4, 2, score="sigmoid")
    layer = MoE(4, 6, 4, 2, router=router, dtype=torch.float64)
    assert layer.router is router
    assert layer(_x(3)).shape == (3, 4)
    with pytest.raises(ExpertConfigError, match=r"top_k=2 in a layer with .*top_k=1; they must"):
        MoE(4, 6, 4, 1, router=router)
    with pytest.raises(ExpertConfigError, match="give it to the router"):
        MoE(4, 6, 4, 2, router=router, load_balance_loss=0.1)


def test_printing_shows_the_options_that_are_set() -> None:
    shown = repr(_router(score="sigmoid", n_group=4, topk_group=2, bias_rate=0.1))
    assert shown.endswith(
        "load_balance_loss=0.0, score='sigmoid', n_group=4, topk_group=2, bias_rate=0.1)"
    )


def _garbage(router: TopKRouter) -> TopKRouter:
    """Return ``router`` with memory that nobody has written."""
    return router.to_empty(device="cpu")


@pytest.mark.parametrize("assign", [False, True])
def test_loads_start_at_zero_after_initialisation_on_the_meta_device(
    nan_in_new_memory: None, assign: bool
) -> None:
    saved = _router(bias_rate=0.5)
    router = TopKRouter(4, 8, 2, bias_rate=0.5, device="meta", dtype=torch.float64)
    if not assign:
        router = _garbage(router)
        assert router.weight.isnan().all()  # the fixture does what the test needs
    router.load_state_dict(copy.deepcopy(saved.state_dict()), assign=assign)
    for each in (saved, router):
        each(_x(5))[0].sum().backward()
    assert torch.equal(update_router_bias(router)[""], update_router_bias(saved)[""])
    assert router.bias is not None
    assert saved.bias is not None
    assert torch.equal(router.bias, saved.bias)
    assert saved.bias.abs().max() == 0.5


def test_loads_are_zero_before_the_first_step(nan_in_new_memory: None) -> None:
    router = _garbage(TopKRouter(4, 8, 2, device="meta"))
    assert collect_loads(router)[""].tolist() == [0] * 8


def test_resetting_parameters_resets_load_and_bias(nan_in_new_memory: None) -> None:
    router = _garbage(_router(bias_rate=0.5))
    router.reset_parameters()
    assert router.bias is not None
    assert router.load.tolist() == router.bias.tolist() == [0] * 8


def test_a_bias_without_a_rate_is_saved_loaded_and_used_and_does_not_move() -> None:
    trained, frozen = _router(bias_rate=0.5), _router(bias=True)
    assert trained.bias is not None
    trained.bias.copy_(torch.arange(8.0))
    frozen.load_state_dict(trained.state_dict())
    assert list(frozen.state_dict()) == ["weight", "bias"]
    x = _x(6)
    assert torch.equal(frozen(x)[1], trained(x)[1])
    assert not torch.equal(frozen(x)[1], _router()(x)[1])
    frozen(x)[0].sum().backward()
    with pytest.raises(ExpertConfigError, match="have bias_rate=0"):
        update_router_bias(frozen)
    assert frozen.bias is not None
    assert frozen.bias.tolist() == list(range(8))
    assert _router().bias is None
    assert "bias=True" in repr(frozen)
    with pytest.raises(ExpertConfigError, match=r"bias=False .* bias_rate=0.5"):
        _router(bias=False, bias_rate=0.5)
