"""The layer in ``torch.compile``, in every dtype that eager takes: one graph on one rank."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hp_ep import GroupedExperts, MoE, TopKRouter

from .reference import assert_close, grads

# Dynamo and inductor use parts of torch that torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def _layer(dtype: torch.dtype, **options: Any) -> MoE:
    torch.manual_seed(0)
    router = TopKRouter(
        16, 4, 2, load_balance_loss=0.1, z_loss=0.01, sequence_loss=0.1, bias_rate=0.1, dtype=dtype
    )
    return MoE(16, 8, 4, 2, router=router, dtype=dtype, num_shared_experts=1, **options)


def _step(layer: MoE, call: Any, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 16, generator=generator).to(dtype).requires_grad_()
    layer.zero_grad()
    layer.router.load.zero_()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), *grads([x, *layer.parameters()]), layer.router.load.clone()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_layer_on_one_rank_is_one_graph_with_the_values_of_eager(
    dtype: torch.dtype, backend: str
) -> None:
    layer = _layer(dtype)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for mine, eager in zip(_step(layer, compiled, dtype), _step(layer, layer, dtype), strict=True):
        assert mine.dtype == eager.dtype
        assert_close(mine.double(), eager.double(), TOLERANCES[dtype])


def test_lengths_that_no_grouped_product_takes_compile_too() -> None:
    torch.manual_seed(0)
    layer = MoE(5, 3, 4, 2, num_chunks=2)
    x = torch.randn(7, 5)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x), layer(x), 1e-5)


def test_experts_with_every_option_are_one_graph() -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(
        16, 8, 3, bias=True, activation="clamped_swiglu", row_multiple=8, dtype=torch.float64
    )
    counts, weights = torch.tensor([3, 0, 2]), torch.rand(5, dtype=torch.float64)

    def step(call: Any) -> list[Tensor]:
        experts.zero_grad()
        rows = torch.linspace(-1, 1, 80, dtype=torch.float64).view(5, 16).requires_grad_()
        w = weights.clone().requires_grad_()
        y = call(rows, counts, w)
        y.square().sum().backward()
        return [y.detach(), *grads([rows, w, *experts.parameters()])]

    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    for mine, eager in zip(step(compiled), step(experts), strict=True):
        assert_close(mine, eager)
