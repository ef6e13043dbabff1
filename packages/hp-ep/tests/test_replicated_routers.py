"""Routers and shared experts that were DTensors before a style cut the experts inside."""

from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from hp_ep import ExpertConfigError, ExpertTensorParallel, MoE, TensorParallel

from .reference import assert_close, build_moe, dense_balance_loss, dense_moe


def _mesh(grid: tuple[int, int]) -> DeviceMesh:
    return cached(grid, lambda: init_device_mesh("cpu", grid, mesh_dim_names=("ep", "etp")))


def _layer() -> MoE:
    return build_moe(3, hidden=8, shared=1, balance=0.3)


def _beside(layer: MoE) -> list[nn.Module]:
    assert layer.shared_experts is not None
    return [layer.router, layer.shared_experts]


def _replicate(layer: MoE, mesh: DeviceMesh) -> None:
    for module in _beside(layer):
        for name, p in list(module.named_parameters()):
            value = DTensor.from_local(p.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
            module.register_parameter(name, nn.Parameter(value))


def _batch() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


def _gradients(layer: MoE) -> dict[str, Tensor]:
    found = {}
    for module in _beside(layer):
        for name, p in module.named_parameters():
            grad = p.grad
            assert grad is not None
            found[f"{type(module).__name__}.{name}"] = (
                grad.full_tensor() if isinstance(grad, DTensor) else grad
            )
    return found


def _step(rank: int, grid: tuple[int, int], whole_mesh: bool) -> dict[str, Tensor]:
    mesh, layer = _mesh(grid), _layer()
    _replicate(layer, mesh if whole_mesh else mesh["etp"])
    if grid[0] == 1:
        TensorParallel(token_axes=()).apply(layer, mesh["etp"])
    else:
        ExpertTensorParallel(token_axes=mesh["ep"]).apply(layer, mesh)
    (layer(_batch().chunk(grid[0])[mesh.get_local_rank("ep")]) ** 2).sum().backward()
    return _gradients(layer)


@pytest.mark.parametrize(
    ("grid", "whole_mesh"), [((1, 2), False), ((1, 2), True), ((2, 2), True)], ids=str
)
def test_gradients_of_replicated_routers_are_those_of_one_process(
    ranks: Any, grid: tuple[int, int], whole_mesh: bool
) -> None:
    layer, x = _layer(), _batch()
    ((dense_moe(layer, x) ** 2).sum() + dense_balance_loss(layer, x)).backward()
    expected = _gradients(layer)
    for result in ranks(grid[0] * grid[1]).run(_step, grid, whole_mesh):
        assert result.keys() == expected.keys()
        for name, value in result.items():
            assert_close(value, expected[name])


def _over_all(rank: int) -> str:
    flat = cached("flat", lambda: init_device_mesh("cpu", (4,), mesh_dim_names=("all",)))
    layer = _layer()
    _replicate(layer, flat)
    with pytest.raises(ExpertConfigError) as error:
        ExpertTensorParallel(token_axes=_mesh((2, 2))["ep"]).apply(layer, _mesh((2, 2)))
    assert not isinstance(layer.experts.gate_up_proj, DTensor)
    return str(error.value)


def test_a_router_over_an_axis_of_equal_and_other_tokens_is_refused(ranks: Any) -> None:
    for text in ranks(4).run(_over_all):
        assert text.startswith("weight is a DTensor over ranks [0, 1, 2, 3], of which [")
