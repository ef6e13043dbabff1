"""What is refused, and the class that is mixed in."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from hp_fsdp import (
    FSDPModule,
    MeshError,
    ModuleError,
    ParameterError,
    ShardingError,
    fully_shard,
)

from .models import Net, make, mesh_of, shard

Ranks = Callable[[int], RankPool]


def scalar() -> nn.Module:
    linear = nn.Linear(2, 2)
    linear.scalar = nn.Parameter(torch.tensor(1.0))
    return linear


def transposed() -> nn.Module:
    linear = nn.Linear(2, 3)
    linear.weight = nn.Parameter(torch.randn(2, 3).t())
    return linear


def tied_across() -> nn.Module:
    pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pair[1].weight = pair[0].weight
    fully_shard(pair[0], mesh_of((1, 2), ("a", "b"))["b"])
    return pair


def twice() -> nn.Module:
    linear = nn.Linear(2, 2)
    fully_shard(linear, mesh_of((1, 2), ("a", "b"))["b"])
    return linear


def overlapping() -> nn.Module:
    linear = nn.Linear(4, 4)
    whole = linear.bias.data
    mesh = mesh_of((1, 2), ("a", "b"))["b"]
    linear.bias = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    return linear


def doubled() -> list[nn.Module]:
    linear = nn.Linear(2, 2)
    return [linear, linear]


CASES: dict[str, tuple[Callable[[], nn.Module | list[nn.Module]], type[ShardingError], str]] = {
    "scalar": (scalar, ParameterError, "scalar is a scalar"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), ParameterError, "weight is on the meta"),
    "transposed": (transposed, ParameterError, "only contiguous parameters"),
    "tied": (tied_across, ParameterError, "1.weight is the same parameter as weight"),
    "list": (lambda: nn.ModuleList([nn.Linear(2, 2)]), ModuleError, "ModuleList has no forward"),
    "overlap": (overlapping, MeshError, "bias is a DTensor on a mesh with axes ['b']"),
    "duplicate": (doubled, ModuleError, "twice in the list"),
    "twice": (twice, ModuleError, "sharded already"),
}


def facts(module: nn.Module | list[nn.Module]) -> list[tuple[str, int]]:
    """Return what must not change when sharding is refused: classes and parameter objects."""
    modules = module if isinstance(module, list) else [module]
    inner = [each for root in modules for each in root.modules()]
    classes = [(type(each).__name__, id(each)) for each in inner]
    return classes + [(name, id(p)) for each in inner for name, p in each.named_parameters()]


def refused(rank: int, case: str) -> tuple[str, str, bool]:
    module: Any = CASES[case][0]()
    before = facts(module)
    try:
        fully_shard(module, mesh_of((1, 2), ("a", "b"))["b"])
    except ShardingError as error:
        return type(error).__name__, str(error), facts(module) == before
    return "", "", False


@pytest.mark.parametrize("case", list(CASES))
def test_bad_input_is_refused_alike_on_every_rank(ranks: Ranks, case: str) -> None:
    _, kind, message = CASES[case]
    results = ranks(2).run(refused, case)
    assert results[0] == results[1]
    assert results[0][0] == kind.__name__
    assert message in results[0][1]
    assert results[0][2]


def class_facts(rank: int) -> dict[str, bool]:
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    twin = shard(make(Net), mesh_of((2,), ("fsdp",)))
    pair = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), mesh_of((2,), ("fsdp",)))
    assert isinstance(pair, nn.Sequential)
    try:
        copy.deepcopy(model)
        copies = True
    except ModuleError:
        copies = False
    three = mesh_of((2, 1, 1), ("a", "b", "c"))
    try:
        fully_shard(nn.Linear(2, 2), three)
        axes = True
    except ShardingError:
        axes = False
    default = fully_shard(nn.Linear(4, 4))
    return {
        "name": type(model).__name__ == "FSDPNet",
        "one class": type(model) is type(twin),
        "slice": not isinstance(pair[:1], FSDPModule) and type(pair[:1]) is nn.Sequential,
        "no copy": not copies,
        "no third axis": not axes,
        "world by default": default.plan_report().groups[0].axes == {"fsdp": 2},
        "report": "blocks" not in str(model.blocks[0].plan_report()),
    }


def test_the_sharded_class(ranks: Ranks) -> None:
    for found in ranks(2).run(class_facts):
        assert all(found.values()), found
