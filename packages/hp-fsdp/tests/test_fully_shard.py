"""What is refused, and the class that is mixed in."""

import copy
from collections.abc import Callable

import pytest
import torch
from rank_pool import RankPool
from torch import nn

from hp_fsdp import FSDPModule, ModuleError, ParameterError, ShardingError, fully_shard

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


CASES: dict[str, tuple[Callable[[], nn.Module], type[ShardingError], str]] = {
    "scalar": (scalar, ParameterError, "scalar is a scalar"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), ParameterError, "weight is on the meta"),
    "transposed": (transposed, ParameterError, "only contiguous parameters"),
    "tied": (tied_across, ParameterError, "1.weight is the same parameter as weight"),
    "list": (lambda: nn.ModuleList([nn.Linear(2, 2)]), ModuleError, "ModuleList has no forward"),
    "twice": (twice, ModuleError, "sharded already"),
}


def refused(rank: int, case: str) -> tuple[str, str]:
    module = CASES[case][0]()
    try:
        fully_shard(module, mesh_of((1, 2), ("a", "b"))["b"])
    except ShardingError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("case", list(CASES))
def test_bad_input_is_refused_alike_on_every_rank(ranks: Ranks, case: str) -> None:
    _, kind, message = CASES[case]
    results = ranks(2).run(refused, case)
    assert results[0] == results[1]
    assert results[0][0] == kind.__name__
    assert message in results[0][1]


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
