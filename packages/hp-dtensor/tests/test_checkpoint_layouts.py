"""Checkpoints between torch's layouts, ragged ones and one process, bit for bit."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool, cached
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_dtensor import (
    RaggedShard,
    RaggedTensor,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    redistribute,
)

from .test_ragged import whole

Pools = Callable[[int], RankPool]
SHAPE = (8, 6)
# FSDP over tensor parallelism, which splits first; even and ragged shards.
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "fsdp over tp": ((2, 2), (StridedShard(0, 2), Shard(0))),
    "columns": ((2,), (Shard(1),)),
    "rows": ((4,), (Shard(0),)),
    "ragged": ((4,), (RaggedShard((0,), (1, 0, 5, 2)),)),
    "ragged in columns": ((2, 2), (RaggedShard((0, 1), (5, 19)), Shard(1))),
    "one process": ((1,), (Replicate(),)),
}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("a", "b")[: len(shape)]
    return cached(("layouts", shape), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


class Model(nn.Module):
    """One parameter, as given."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def placed(name: str, seed: int) -> Tensor:
    shape, placements = LAYOUTS[name]
    if name == "one process":
        return whole(SHAPE, seed)
    data, mesh = whole(SHAPE, seed), mesh_of(shape)
    result: Tensor = distribute_tensor(data, mesh, placements, src_data_rank=None)
    return result


def trained(weight: Tensor, steps: int) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model.weight.grad = model.weight.detach().clone()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saved(rank: int, path: str, name: str) -> None:
    model, optimizer = trained(placed(name, 1), 3)
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=path)


def loaded(rank: int, path: str, name: str) -> dict[str, Tensor]:
    model, optimizer = trained(placed(name, 2), 1)
    weights, state = get_state_dict(model, optimizer)
    load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    moments: dict[str, Any] = optimizer.state[model.weight]
    return {
        key: redistribute(x).to_local() if isinstance(x, DTensor | RaggedTensor) else x
        for key, x in {"value": model.weight.detach(), **moments}.items()
    }


def ranks_of(name: str) -> int:
    return math.prod(LAYOUTS[name][0])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fsdp over tp", "columns"),
        ("fsdp over tp", "ragged"),
        ("rows", "ragged in columns"),
        ("ragged", "columns"),
        ("ragged", "one process"),
        ("ragged in columns", "fsdp over tp"),
        ("one process", "ragged"),
    ],
)
def test_checkpoints_with_moments_load_in_another_layout(
    ranks: Pools, tmp_path: Path, source: str, target: str
) -> None:
    model, optimizer = trained(whole(SHAPE, 1), 3)
    ranks(ranks_of(source)).run(saved, str(tmp_path), source)
    wanted: dict[str, Any] = {"value": model.weight.detach(), **optimizer.state[model.weight]}
    for found in ranks(ranks_of(target)).run(loaded, str(tmp_path), target):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(found[key], value), key


def by_fsdp(rank: int, path: str, seed: int, restore: bool) -> tuple[Tensor, Tensor]:
    """Train, save or load a module that torch's FSDP2 shards; return its weight and a moment."""
    model = Model(whole(SHAPE, seed))
    fully_shard(model, mesh=mesh_of((4,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weight: Any = model.weight
    weight.grad = weight.detach().clone()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    both = {"model": weights, "optimizer": state}
    if restore:
        load(both, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    else:
        save(both, checkpoint_id=path)
    return weight.full_tensor().detach(), optimizer.state[weight]["exp_avg"].full_tensor()


def test_ragged_tensors_and_torchs_fsdp_load_checkpoints_of_each_other(
    ranks: Pools, tmp_path: Path
) -> None:
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    (value, moment), *_ = ranks(4).run(by_fsdp, there, 1, False)
    for found in ranks(4).run(loaded, there, "ragged"):
        assert torch.equal(found["value"], value)
        assert torch.equal(found["exp_avg"], moment)
    model, optimizer = trained(whole(SHAPE, 1), 3)
    ranks(4).run(saved, back, "ragged")
    for full, first in ranks(4).run(by_fsdp, back, 2, True):
        assert torch.equal(full, model.weight.detach())
        assert torch.equal(first, optimizer.state[model.weight]["exp_avg"])
