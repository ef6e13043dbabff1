"""More ranks than experts: hp_fsdp cuts experts along another dimension than their number."""

from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hp_ep import ExpertParallel, MoE
from hp_fsdp import fully_shard

EXPERTS = 2


def _mesh(shape: tuple[int, int]) -> DeviceMesh:
    return cached(shape, lambda: init_device_mesh("cpu", shape, mesh_dim_names=("efsdp", "ep")))


def _layer() -> MoE:
    layer = MoE(4, 8, EXPERTS, 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return layer


def _tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 4, generator=generator, dtype=torch.float64)


def _step(rank: int, shape: tuple[int, int]) -> tuple[list[int], list[Tensor]]:
    mesh, layer = _mesh(shape), _layer()
    ExpertParallel().apply(layer, mesh["ep"])
    unit = fully_shard(layer.experts, mesh["efsdp"], shard_placement_fn=lambda p: Shard(p.ndim - 1))
    unit.set_gradient_divide_factor(1.0)
    (layer(_tokens().chunk(4)[rank]) ** 2).sum().backward()
    sizes, grads = [], []
    for p in layer.experts.parameters():
        assert isinstance(p, DTensor)
        assert isinstance(p.grad, DTensor)
        sizes.append(p.to_local().numel())
        grads.append(p.grad.full_tensor())
    return sizes, grads


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
def test_no_rank_is_left_without_a_part_and_gradients_are_those_of_one_process(
    ranks: Any, shape: tuple[int, int]
) -> None:
    layer = _layer()
    (layer(_tokens()) ** 2).sum().backward()
    for sizes, grads in ranks(4).run(_step, shape):
        assert sizes == [p.numel() // 4 for p in layer.experts.parameters()]
        for grad, p in zip(grads, layer.experts.parameters(), strict=True):
            assert p.grad is not None
            assert (grad - p.grad).abs().max() <= 1e-12 * p.grad.abs().max()
