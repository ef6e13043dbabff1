"""Routers whose losses and biases follow the whole batch, where experts are cut inside too."""

from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_ep import (
    BaseExpertParallel,
    ExpertTensorParallel,
    MoE,
    TensorParallel,
    TopKRouter,
    update_router_bias,
)

from .reference import assert_close, grads


def _build() -> MoE:
    router = TopKRouter(
        4,
        4,
        2,
        score="sigmoid",
        load_balance_loss=0.4,
        sequence_loss=0.2,
        z_loss=0.3,
        bias_rate=0.125,
        dtype=torch.float64,
    )
    layer = MoE(4, 8, 4, 2, router=router, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return layer


def _step(layer: MoE, x: Tensor) -> dict[str, Tensor]:
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    (y**2).sum().backward()
    gx, router = grads([leaf, layer.router.weight])
    (load,) = update_router_bias(layer).values()
    assert layer.router.bias is not None
    assert layer.router.load.count_nonzero() == 0
    return dict(y=y.detach(), x=gx, router=router, load=load, bias=layer.router.bias.clone())


def _batch() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 5, 4, generator=generator, dtype=torch.float64)


def _mesh(grid: tuple[int, int]) -> DeviceMesh:
    return cached(grid, lambda: init_device_mesh("cpu", grid, mesh_dim_names=("ep", "etp")))


def _cut(rank: int, grid: tuple[int, int]) -> dict[str, Tensor]:
    mesh, layer = _mesh(grid), _build()
    style: BaseExpertParallel = ExpertTensorParallel(token_axes=mesh["ep"])
    over = mesh
    if grid[0] == 1:
        style, over = TensorParallel(token_axes=()), mesh["etp"]
    style.apply(layer, over)
    return _step(layer, _batch().chunk(grid[0])[mesh.get_local_rank("ep")])


@pytest.mark.parametrize("grid", [(2, 2), (1, 4), (1, 2), (2, 1)], ids=str)
def test_all_losses_and_the_bias_are_those_of_one_process(
    ranks: Any, grid: tuple[int, int]
) -> None:
    expected = _step(_build(), _batch())
    results = ranks(grid[0] * grid[1]).run(_cut, grid)
    for i, result in enumerate(results):
        first = results[i // grid[1] * grid[1]]
        for name, value in result.items():
            assert torch.equal(value, first[name])  # alike on all that cut an expert
        assert torch.equal(result["load"], expected["load"])
        assert torch.equal(result["bias"], expected["bias"])
    parts = results[:: grid[1]]
    for name in ("x", "y"):
        assert_close(torch.cat([r[name] for r in parts]), expected[name])
    assert_close(torch.stack([r["router"] for r in parts]).sum(0), expected["router"])
