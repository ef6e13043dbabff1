"""hp_fsdp over experts of hp_ep, with nothing to set but that gradients are summed."""

import math
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import clip_grad_norm_
from hp_ep import ExpertParallel, MoE, Placement, parallelize_experts
from hp_fsdp import fully_shard

TOKENS = 12


def _mesh(shape: tuple[int, int]) -> DeviceMesh:
    return cached(shape, lambda: init_device_mesh("cpu", shape, mesh_dim_names=("efsdp", "ep")))


class _Model(nn.Module):
    """Dense layers around two mixtures of experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.moes = nn.ModuleList(
            MoE(4, 8, experts, 2, num_shared_experts=shared, load_balance_loss=0.1)
            for shared in (0, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for moe in self.moes:
            x = x + moe(x)
        return x


def _model(experts: int) -> _Model:
    model = _Model(experts).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, TOKENS, 4, generator=generator, dtype=torch.float64))


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return these tokens' share of the whole batch's mean."""
    share: Tensor = (model(x) - y).square().sum() / TOKENS
    return share


def _step(
    rank: int, shape: tuple[int, int], experts: int, held: Placement | None, order: float
) -> tuple[list[int], dict[str, Tensor], Tensor]:
    mesh, model = _mesh(shape), _model(experts)
    parallelize_experts(model, mesh["ep"], ExpertParallel(token_axes=mesh, placement=held))
    for moe in model.moes:
        assert isinstance(moe, MoE)
        fully_shard(moe.experts, mesh["efsdp"], gradient_reduction="sum")
    fully_shard(model, mesh, gradient_reduction="sum")
    x, y = (part.chunk(4)[rank] for part in _data())
    _loss(model, x, y).backward()
    norm = clip_grad_norm_(model.parameters(), 0.5, order)
    sizes, grads = [], {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        assert isinstance(p.grad, DTensor)
        grads[name] = p.grad.full_tensor()
        if ".experts." in name:
            sizes.append(p.to_local().numel())
    return sizes, grads, norm


def _alone(experts: int, order: float) -> tuple[nn.Module, Tensor]:
    model = _model(experts)
    for moe in model.moes:
        assert isinstance(moe, MoE)
        moe.router.split_tokens_over(())
    _loss(model, *_data()).backward()
    return model, nn.utils.clip_grad_norm_(model.parameters(), 0.5, order)


def _assert_close(actual: Tensor, expected: Tensor | None) -> None:
    assert expected is not None
    assert (actual - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize(("shape", "experts"), [((2, 2), 2), ((4, 1), 2), ((2, 2), 8), ((1, 4), 4)])
def test_no_rank_is_left_without_a_part_and_gradients_are_those_of_one_process(
    ranks: Any, shape: tuple[int, int], experts: int
) -> None:
    """Also where there are more ranks than experts, which are cut along another dimension then."""
    model, norm = _alone(experts, 2.0)
    for sizes, grads, found in ranks(4).run(_step, shape, experts, None, 2.0):
        named = dict(model.named_parameters())
        assert sizes == [p.numel() // 4 for name, p in named.items() if ".experts." in name]
        assert grads.keys() == named.keys()
        for name, grad in grads.items():
            _assert_close(grad, named[name].grad)
        _assert_close(found, norm)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_norm_counts_replicas_once_however_they_are_cut(ranks: Any, order: float) -> None:
    held = Placement(num_ranks=2, num_experts=4, experts=(3, 2, 0, 1, 0, 3))
    model, norm = _alone(4, order)
    for _, grads, found in ranks(4).run(_step, (2, 2), 4, held, order):
        _assert_close(found, norm)
        for name, p in model.named_parameters():
            grad = grads[name]
            if ".experts." in name:
                first = grad[[slots[0] for slots in held.slots_of]]
                assert torch.equal(grad, first[list(held.experts)])
                grad = first
            _assert_close(grad, p.grad)
