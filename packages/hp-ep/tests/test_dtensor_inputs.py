"""Tokens that come as DTensors: sharded, replicated, prepared by a style of torch."""

from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

from hp_ep import (
    ExpertConfigError,
    ExpertParallel,
    TensorParallel,
)

from .reference import assert_close, build_moe, dense_moe


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _dtensor_input(rank: int) -> list[Any]:
    layer = build_moe(9)
    mesh = _mesh((2,), ("tp",))
    ExpertParallel().apply(layer, mesh)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    split = x.tensor_split([3], dim=1)[rank].contiguous()
    sharded = DTensor.from_local(
        split, mesh, [Shard(1)], run_check=False, shape=x.shape, stride=x.stride()
    )
    y = layer(sharded)
    texts = []
    for placement in (Replicate(), Shard(2)):
        refused = DTensor.from_local(x[..., :2], mesh, [placement], run_check=False)
        with pytest.raises(ExpertConfigError) as error:
            layer(refused)
        texts.append(str(error.value))
    return [y.placements, y.shape, y.to_local().detach(), texts]


def test_a_sharded_dtensor_is_taken_and_a_replicated_one_is_refused(ranks: Any) -> None:
    results = ranks(2).run(_dtensor_input)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    expected = dense_moe(build_moe(9), x.view(10, 4)).view(x.shape)
    assert_close(torch.cat([r[2] for r in results], 1), expected)
    for placements, shape, _, texts in results:
        assert placements == (Shard(1),)
        assert shape == x.shape
        assert all("shard it over tokens" in text for text in texts)


def _prepared_input(rank: int) -> dict[str, Any]:
    layer, mesh = build_moe(9), _mesh((2,), ("tp",))
    ExpertParallel().apply(layer, mesh)
    shard = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1))
    parallelize_module(layer, mesh, shard)
    calls: list[str] = []
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_forward_hook(lambda *_: calls.append("after"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 4, generator=generator, dtype=torch.float64).transpose(0, 1)
    y = layer(x.chunk(2, 1)[rank])
    local = y.to_local().detach()
    return dict(calls=calls, y=local, stride=y.stride(), local_stride=local.stride())


def test_prepared_transposed_input_runs_hooks_once_and_gives_a_contiguous_result(
    ranks: Any,
) -> None:
    results = ranks(2).run(_prepared_input)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 4, generator=generator, dtype=torch.float64).transpose(0, 1)
    expected = dense_moe(build_moe(9), x.reshape(12, 4)).view(x.shape)
    assert_close(torch.cat([r["y"] for r in results], 1), expected)
    for result in results:
        assert result["calls"] == ["before", "after"]
        assert (result["stride"], result["local_stride"]) == ((24, 4, 1), (12, 4, 1))


def _plain_tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 4, generator=generator, dtype=torch.float64)


def _replicated_input(rank: int) -> list[Any]:
    mesh = _mesh((2,), ("tp",))
    layer = build_moe(9, hidden=8)
    TensorParallel().apply(layer, mesh)
    x = _plain_tokens()
    leaf = DTensor.from_local(x, mesh, [Replicate()], run_check=False).requires_grad_()
    y = layer(leaf)
    (y.to_local() ** 2).sum().backward()
    with pytest.raises(ExpertConfigError) as error:
        layer(DTensor.from_local(x, mesh, [Shard(0)], run_check=False))
    grad = leaf.grad
    assert isinstance(grad, DTensor)
    return [y.placements, y.to_local().detach(), grad.full_tensor(), str(error.value)]


def test_tokens_of_cut_experts_are_taken_replicated_and_refused_sharded(ranks: Any) -> None:
    layer, x = build_moe(9, hidden=8), _plain_tokens().clone().requires_grad_()
    y = dense_moe(layer, x)
    (y**2).sum().backward()
    for placements, got, grad, text in ranks(2).run(_replicated_input):
        assert placements == (Replicate(),)
        assert_close(got, y)
        assert_close(grad, x.grad)
        assert "replicate it over the ranks [0, 1]" in text
