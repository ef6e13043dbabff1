"""Experts under FSDP: along which dimension, and what a mean over ranks makes of gradients."""

from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from hp_ep import ExpertParallel, ExpertTensorParallel

from .reference import assert_close, build_moe


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("efsdp", "ep", "etp")
    return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _tokens(parts: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(parts)
    return list(torch.randn(5 * parts, 4, generator=generator, dtype=torch.float64).split(5))


def _sharded(rank: int, shape: tuple[int, int, int], experts: int) -> dict[str, Any]:
    mesh, (efsdp, ep, _) = _mesh(shape), shape
    layer = build_moe(3, hidden=8, experts=experts)
    ExpertParallel().apply(layer, mesh["ep"])
    dim = 0 if efsdp * ep <= experts else -1
    unit = fully_shard(
        layer.experts, mesh=mesh["efsdp"], shard_placement_fn=lambda p: Shard(dim % p.ndim)
    )
    # A loss that is a mean on each rank, averaged over all ranks with tokens of their own.
    unit.set_gradient_divide_factor(float(efsdp * ep))
    unit.set_force_sum_reduction_for_comms(True)
    (layer(_tokens(efsdp * ep)[rank]) ** 2).mean().backward()
    found: dict[str, Any] = dict(dim=dim, shapes=[], grads=[])
    for p in layer.experts.parameters():
        assert isinstance(p, DTensor)
        assert isinstance(p.grad, DTensor)
        found["shapes"].append(tuple(p.to_local().shape))
        found["grads"].append(p.grad.full_tensor())
    return found


@pytest.mark.parametrize(
    ("shape", "experts", "dim"),
    [((2, 2, 1), 4, 0), ((2, 2, 1), 2, -1), ((4, 1, 1), 2, -1), ((4, 1, 1), 4, 0)],
)
def test_more_ranks_than_experts_shard_along_another_dimension(
    ranks: Any, shape: tuple[int, int, int], experts: int, dim: int
) -> None:
    layer = build_moe(3, hidden=8, experts=experts)
    (layer(torch.cat(_tokens(4))) ** 2).mean().backward()
    for found in ranks(4).run(_sharded, shape, experts):
        assert found["dim"] == dim
        elements = [torch.Size(s).numel() for s in found["shapes"]]
        assert elements == [p.numel() // 4 for p in layer.experts.parameters()]  # none is empty
        for grad, p in zip(found["grads"], layer.experts.parameters(), strict=True):
            assert_close(grad, p.grad)


def _cut(rank: int) -> list[Tensor]:
    mesh = _mesh((1, 2, 2))
    layer = build_moe(3, hidden=8)
    ExpertTensorParallel().apply(layer, mesh["ep", "etp"])
    x = _tokens(2)[mesh.get_local_rank("ep")]
    # A mean of means: the ranks that cut experts hold the same tokens and do not count.
    ((layer(x) ** 2).mean() / mesh["ep"].size()).backward()
    router = layer.router.weight.grad
    assert router is not None
    experts = [p.grad for p in layer.experts.parameters()]
    return [router, *(g.full_tensor() for g in experts if isinstance(g, DTensor))]


def test_cut_experts_have_the_gradients_of_a_mean_over_tokens(ranks: Any) -> None:
    layer = build_moe(3, hidden=8)
    (layer(torch.cat(_tokens(2))) ** 2).mean().backward()
    results = ranks(4).run(_cut)
    router = results[0][0] + results[2][0]  # one of each that hold the same tokens
    assert torch.equal(results[0][0], results[1][0])
    assert_close(router, layer.router.weight.grad)
    for result in results:
        for grad, p in zip(result[1:], layer.experts.parameters(), strict=True):
            assert_close(grad, p.grad)
