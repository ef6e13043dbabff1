"""Routing and balance loss as the models in transformers compute them."""

import copy
import weakref
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_dtensor import Axis, RecordingCollectives
from hp_ep import (
    BalanceLoss,
    ExpertConfigError,
    ExpertParallel,
    MoE,
    TopKRouter,
    collect_loads,
)

from .reference import assert_close, grads

GROUPS = [(4, 2, 2), (4, 2, 4), (4, 1, 2), (8, 4, 8), (2, 1, 6), (4, 3, 3), (1, 1, 4)]
"""n_group, topk_group and num_experts_per_tok."""


def _pair(groups: tuple[int, int, int], norm: bool, **options: Any) -> tuple[Any, TopKRouter]:
    """Return the router of transformers and ours, with the same weights and biases."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    n_group, topk_group, top_k = groups
    make: Any = DeepseekV3Config
    config = make(
        hidden_size=16,
        n_routed_experts=32,
        num_experts_per_tok=top_k,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm,
        routed_scaling_factor=2.5,
    )
    theirs: Any = DeepseekV3TopkRouter(config)
    generator = torch.Generator().manual_seed(n_group * 100 + topk_group * 10 + top_k)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(32, 16, generator=generator))
        theirs.e_score_correction_bias.copy_(torch.randn(32, generator=generator) * 0.1)
    ours = TopKRouter(
        16,
        32,
        top_k,
        score="sigmoid",
        norm_topk_prob=norm,
        routed_scaling_factor=2.5,
        n_group=n_group,
        topk_group=topk_group,
        bias_rate=1e-3,
        **options,
    )
    ours.load_state_dict({"weight": theirs.weight, "bias": theirs.e_score_correction_bias})
    return theirs, ours


def _sorted(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(1)
    return weights.gather(1, order), ids.gather(1, order)


def test_group_limited_routing_is_that_of_the_published_models() -> None:
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    for groups in GROUPS:
        for norm in (True, False):
            theirs, ours = _pair(groups, norm)
            with torch.no_grad():
                _, their_weights, their_ids = theirs(x)
                their_weights, their_ids = _sorted(their_weights, their_ids)
                weights, ids = _sorted(*ours(x))
            assert torch.equal(ids, their_ids)
            assert_close(weights, their_weights, 1e-6)


def test_the_number_of_experts_that_score_a_group_can_be_chosen() -> None:
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for number in (1, 2, 3):
        theirs, ours = _pair((4, 2, 2), True, group_score_experts=number)
        with torch.no_grad():
            ids = ours(x)[1].sort(1).values
        ranked = (x @ theirs.weight.t()).sigmoid() + theirs.e_score_correction_bias
        groups = ranked.unflatten(1, (4, 8))
        kept = groups.topk(number).values.sum(-1).topk(2).indices
        legal = torch.zeros(512, 4).scatter_(1, kept, 1.0).bool()[:, :, None].expand(-1, -1, 8)
        best = ranked.masked_fill(~legal.flatten(1), -torch.inf).topk(2).indices.sort(1).values
        assert torch.equal(ids, best)
        found.append(ids)
    assert not torch.equal(found[0], found[1])
    wrong: list[Any] = [0, 1.5, True]
    for each in wrong:
        with pytest.raises(ExpertConfigError, match=f"group_score_experts={each}"):
            TopKRouter(4, 8, 2, n_group=2, topk_group=1, group_score_experts=each)


LAYERS, TOKENS, EXPERTS, TOP_K = 3, 24, 6, 2


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MoE(4, 6, EXPERTS, TOP_K, dtype=torch.float64) for _ in range(LAYERS)
        )
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _tokens() -> Tensor:
    return torch.randn(TOKENS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _logits(model: _Model, x: Tensor) -> tuple[Tensor, ...]:
    found = []
    for layer in model.layers:
        assert isinstance(layer, MoE)
        found.append(x @ layer.router.weight.t())
        x = x + layer(x)
    return tuple(found)


def _exact(logits: tuple[Tensor, ...]) -> Tensor:
    """Write the loss out: over all layers' tokens together."""
    probabilities = torch.cat(logits).softmax(-1)
    ids = probabilities.topk(TOP_K).indices
    counts = torch.stack([(ids == e).sum() for e in range(EXPERTS)]).double()
    rows = probabilities.shape[0]
    return EXPERTS * (counts / rows * probabilities.sum(0) / rows).sum()


def _single(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one process, and its gradients with that of a main loss."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = _Model()
    logits = _logits(model, _tokens())
    library: Any = load_balancing_loss_func
    theirs = library(logits, EXPERTS, TOP_K)
    loss: Tensor = theirs if kind == "transformers" else _exact(logits)
    ((model(_tokens()) ** 2).sum() + 0.3 * loss).backward()
    return loss.detach(), {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


def _spread(rank: int, size: int, recomputed: bool) -> tuple[Tensor, dict[str, Tensor], int]:
    mesh = cached(("dp", size), lambda: init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)))
    model, record = _Model(), RecordingCollectives()
    for layer in model.layers:
        assert isinstance(layer, MoE)
        layer.router.split_tokens_over(mesh, record)
    sizes = [TOKENS - 3 * (size - 1), *[3] * (size - 1)]  # uneven
    x = _tokens().split(sizes)[rank]
    with BalanceLoss(model) as balance:
        y = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
    loss = balance.loss()
    ((y**2).sum() + 0.3 * loss).backward()
    named = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    for grad in named.values():
        torch.distributed.all_reduce(grad)  # what data parallelism would do
    calls = sum(traffic.calls for traffic in record.by_call.values())
    return loss.detach(), {k: grad.clone() for k, grad in named.items()}, calls


@pytest.mark.parametrize(("size", "recomputed"), [(1, False), (2, False), (2, True), (4, False)])
def test_the_balance_loss_of_all_layers_is_that_of_transformers(
    ranks: Any, size: int, recomputed: bool
) -> None:
    # The library sums in float32, whatever the logits are.
    for kind, tolerance in (("transformers", 1e-6), ("written out", 1e-12)):
        loss, expected = _single(kind)
        assert loss > TOP_K * 1.01  # not an even load
        for got, named, calls in ranks(size).run(_spread, size, recomputed):
            assert_close(got, loss.double(), tolerance)
            assert sorted(named) == sorted(expected)
            for name, grad in expected.items():
                assert_close(named[name], grad, tolerance)
            assert calls <= 1


def test_the_balance_loss_of_all_layers_leaves_masked_tokens_out() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model, x = _Model(), _tokens().view(2, 12, 4)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 5:] = False
    layer = model.layers[0]
    assert isinstance(layer, MoE)
    with torch.no_grad(), BalanceLoss(layer) as balance:
        layer.eval()(x, mask)
    logits = (x.reshape(-1, 4) @ layer.router.weight.t(),)
    library: Any = load_balancing_loss_func
    theirs = library(logits, EXPERTS, TOP_K, mask.long())
    assert_close(balance.loss(), theirs.double(), 1e-6)


def test_a_balance_loss_that_cannot_be_is_refused() -> None:
    with pytest.raises(ExpertConfigError, match="Linear has no TopKRouter"):
        BalanceLoss(nn.Linear(1, 1))
    with pytest.raises(ExpertConfigError, match=r"one number of experts and one top_k"):
        BalanceLoss(nn.ModuleList([TopKRouter(4, 4, 2), TopKRouter(4, 4, 1)]))
    balance = BalanceLoss(_Model())
    with pytest.raises(ExpertConfigError, match="no router ran"):
        balance.loss()
    with balance, pytest.raises(ExpertConfigError, match="is recorded already"), balance:
        pass


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_recorded_layers_are_recomputed_copied_and_counted_once(score: Any) -> None:
    router = TopKRouter(4, 6, 2, score=score, dtype=torch.float64)
    x = _tokens().requires_grad_()
    found = []
    for recomputed in (False, True):
        with BalanceLoss(router) as balance:
            weights, _ = checkpoint(router, x, use_reentrant=False) if recomputed else router(x)
        before = balance.loss()
        (weights.square().sum() + before).backward()
        assert torch.equal(balance.loss(), before)
        found.append((before.detach(), grads([router.weight])[0]))
        assert not copy.deepcopy(router).record.entries  # type: ignore[union-attr]
        router.zero_grad()
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_forward_that_backward_runs_again_is_not_recorded_twice() -> None:
    router = TopKRouter(4, 6, 2, dtype=torch.float64)
    x = _tokens().requires_grad_()
    found = []
    for recomputed in (False, True):
        with BalanceLoss(router) as balance:
            for scale in (1.0, 2.0):  # micro-batches, each with its backward inside
                part = x * scale
                weights, _ = (
                    checkpoint(router, part, use_reentrant=False) if recomputed else router(part)
                )
                weights.square().sum().backward()
        found.append(balance.loss().detach())
    assert torch.equal(found[0], found[1])


def test_each_balance_loss_is_of_what_ran_inside_it() -> None:
    router = TopKRouter(4, 6, 2, dtype=torch.float64)
    first, second, expected = _tokens(), _tokens() * 3, []
    for x in (first, second):
        with BalanceLoss(router) as balance:
            router(x)
        expected.append(balance.loss().detach())
    with BalanceLoss(router) as a:
        router(first)
    with BalanceLoss(router) as b:
        router(second)
    assert expected[0] != expected[1]
    assert [a.loss(), b.loss()] == expected
    assert router.record is not None
    assert not router.record.entries  # nor the graph of what is over
    with a:
        pass
    with pytest.raises(ExpertConfigError, match="no router ran"):
        a.loss()


def _untold(rank: int) -> list[str]:
    mesh = cached(("ep", 2), lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    texts = []
    for options in ({}, {"token_axes": mesh}):
        layer = MoE(4, 6, EXPERTS, TOP_K)
        ExpertParallel(**options).apply(layer, mesh)  # type: ignore[arg-type]
        for call in (lambda m: BalanceLoss(m), collect_loads):
            try:
                call(layer)
                texts.append("")
            except ExpertConfigError as error:
                texts.append(str(error))
        BalanceLoss(layer, mesh)
    return texts


def test_numbers_of_one_rank_are_refused_where_experts_are_split(ranks: Any) -> None:
    for balance, loads, *told in ranks(2).run(_untold):
        assert balance == loads
        assert "['router'] were not told which axes split their tokens" in loads
        assert told == ["", ""]


def _overlapping(rank: int) -> str:
    mesh = cached(("ep", 2), lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    axis = Axis.of(mesh, 0)
    with pytest.raises(ExpertConfigError) as error:
        TopKRouter(4, 4, 2).split_tokens_over([axis, axis])
    return str(error.value)


def test_axes_that_would_count_tokens_twice_are_refused(ranks: Any) -> None:
    for text in ranks(2).run(_overlapping):
        assert "ep=[0, 1] and ep=[0, 1] share ranks, whose tokens would count twice" in text


def test_a_router_keeps_nothing_of_what_was_recorded() -> None:
    router, x = TopKRouter(4, 6, 2, dtype=torch.float64), _tokens()
    with BalanceLoss(router) as balance:
        router(x)
    share = balance.loss()
    kept = weakref.ref(x)
    del x
    assert kept() is not None  # for the gradient of the weight
    del balance, share
    assert kept() is None
