"""Arguments that raise, and the class that is mixed in."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hp_fsdp import (
    FSDPModule,
    MeshError,
    ModuleError,
    ParameterError,
    ShardingError,
    fully_shard,
)
from hp_fsdp._unit import unit_of

from .models import Net, full, make, mesh_of, shard

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


def tied_sibling() -> nn.Module:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    fully_shard(first, mesh_of((1, 2), ("a", "b"))["b"])
    vars(second)["sibling"] = first  # alive, and not below the other
    return second


def sibling_gone() -> nn.Module:
    second = tied_sibling()
    del vars(second)["sibling"]
    return second


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


def below() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model, mesh_of((1, 2), ("a", "b"))["b"])
    return model[0]


def below_gathered() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model, mesh_of((1, 2), ("a", "b"))["b"]).unshard()
    return model[0]


ABOVE = "weight of Linear is sharded already, by a call on another module that contains it"
CASES: dict[str, tuple[Callable[[], nn.Module | list[nn.Module]], type[ShardingError], str]] = {
    "scalar": (scalar, ParameterError, "scalar is a scalar"),
    "transposed": (transposed, ParameterError, "only contiguous parameters"),
    "tied": (tied_across, ParameterError, "1.weight is the same parameter as weight"),
    "tied sibling": (tied_sibling, ParameterError, "weight is the same parameter as weight"),
    "list": (lambda: nn.ModuleList([nn.Linear(2, 2)]), ModuleError, "ModuleList has no forward"),
    "overlap": (overlapping, MeshError, "bias is a DTensor on a mesh with axes ['b']"),
    "duplicate": (doubled, ModuleError, "twice in the list"),
    "twice": (twice, ModuleError, "sharded already"),
    "below": (below, ParameterError, ABOVE),
    "below, gathered": (below_gathered, ParameterError, ABOVE),
}


def facts(module: nn.Module | list[nn.Module]) -> list[tuple[str, int]]:
    """Return the classes and parameter objects, which must not change if sharding raises."""
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


def shard_what_is_left(rank: int) -> bool:
    module = sibling_gone()
    gc.collect()
    fully_shard(module, mesh_of((1, 2), ("a", "b"))["b"])
    return isinstance(module.weight, DTensor)


def test_a_parameter_is_free_again_once_the_unit_that_took_it_is_gone(ranks: Ranks) -> None:
    assert ranks(2).run(shard_what_is_left) == [True, True]


@pytest.mark.parametrize("case", list(CASES))
def test_bad_input_raises_on_every_rank(ranks: Ranks, case: str) -> None:
    _, kind, message = CASES[case]
    results = ranks(2).run(refused, case)
    assert results[0] == results[1]
    assert results[0][0] == kind.__name__
    assert message in results[0][1]
    assert results[0][2]


CHOICES = "allowed: True, False and None"
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[ShardingError], str]] = {
    "mesh": ((nn.Linear(2, 2), "fsdp"), {}, MeshError, "mesh is 'fsdp'; allowed: a DeviceMesh"),
    "module": (("a",), {}, ModuleError, "module is 'a'; allowed: an nn.Module and a list"),
    "tensor": ((torch.ones(2),), {}, ModuleError, "module is of type Tensor; allowed:"),
    "item": (([nn.Linear(2, 2), 3],), {}, ModuleError, "module[1] is 3; allowed: an nn.Module"),
    "policy": (
        (nn.Linear(2, 2),),
        {"mp_policy": torch.bfloat16},
        ShardingError,
        "mp_policy is of type dtype; allowed: a MixedPrecisionPolicy",
    ),
    "dtype": (
        (nn.Linear(2, 2),),
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.int32)},
        ShardingError,
        "reduce_dtype is torch.int32; allowed: floating-point dtypes and None",
    ),
    "ignored": (
        (nn.Linear(2, 2),),
        {"ignored_params": {"weight"}},
        ParameterError,
        "an element of ignored_params is 'weight'; allowed: nn.Parameters",
    ),
    **{
        f"reshard={choice!r}": (
            (nn.Linear(2, 2),),
            {"reshard_after_forward": choice},
            ShardingError,
            f"reshard_after_forward is {choice!r}; allowed: True, False, None (the default) and a "
            "divisor of the 2 ranks that are sharded over: one of [1, 2]",
        )
        for choice in (0, 3, -2, 1.0, "yes")
    },
}


def refused_arguments(rank: int, case: str) -> tuple[str, str, bool]:
    given, options, _, _ = ARGUMENTS[case]
    call: Any = fully_shard
    mesh = mesh_of((1, 2), ("a", "b"))["b"]
    try:
        call(*(given if len(given) > 1 else (*given, mesh)), **options)
    except ShardingError as error:
        untouched = not any(isinstance(each, FSDPModule) for each in given)
        return type(error).__name__, str(error), untouched
    return "", "", False


@pytest.mark.parametrize("case", list(ARGUMENTS))
def test_arguments_of_wrong_types_raise_with_the_legal_values(ranks: Ranks, case: str) -> None:
    _, _, kind, message = ARGUMENTS[case]
    results = ranks(2).run(refused_arguments, case)
    assert results[0] == results[1]
    assert results[0][0] == kind.__name__
    assert message in results[0][1]
    assert results[0][2]


def set_wrongly(rank: int, choice: Any) -> tuple[str, list[bool | int | None]]:
    model = shard(make(Net), mesh_of((2,), ("fsdp",)), reshard_after_forward=True)
    message = ""
    try:
        model.set_reshard_after_forward(choice)
    except ShardingError as error:
        message = str(error)
    units = [unit_of(module) for module in (model, *model.blocks)]
    return message, [unit.options.reshard_after_forward for unit in units if unit is not None]


@pytest.mark.parametrize("choice", [1, "no"])
def test_the_setter_refuses_too_and_changes_nothing(ranks: Ranks, choice: object) -> None:
    for message, kept in ranks(2).run(set_wrongly, choice):
        assert f"reshard_after_forward is {choice!r}; {CHOICES}" in message
        assert kept == [True] * 4


def shard_copy(rank: int) -> tuple[bool, bool]:
    mesh = mesh_of((2,), ("fsdp",))
    model = make(lambda: nn.Sequential(nn.Linear(4, 4)))
    weight = model[0].weight.detach().clone()
    fully_shard(model, mesh).unshard()
    twin = copy.deepcopy(model[0])
    fully_shard(twin, mesh)
    return isinstance(twin, FSDPModule), torch.equal(full(twin.weight), weight)


def test_a_copy_of_a_gathered_part_can_be_sharded(ranks: Ranks) -> None:
    assert ranks(2).run(shard_copy) == [(True, True)] * 2


def root_over_replaced(rank: int) -> list[str]:
    mesh = mesh_of((2,), ("fsdp",))
    pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(pair[0], mesh)
    pair[0].weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    root = fully_shard(pair, mesh).plan_report().groups[0]
    return [parameter.name for parameter in root.parameters]


def test_a_replaced_parameter_of_a_block_belongs_to_the_block(ranks: Ranks) -> None:
    for names in ranks(2).run(root_over_replaced):
        assert names == ["1.weight", "1.bias"]


def reported(rank: int) -> tuple[list[str], list[str], str]:
    mesh = mesh_of((2,), ("fsdp",))
    model = make(Net)
    fully_shard([model.blocks[0], model.blocks[2]], mesh)
    model.blocks[1].one.data = model.blocks[1].one.data.float()
    fully_shard(model.blocks[1], mesh)
    plan = fully_shard(model, mesh).plan_report()
    headers = [line for line in str(plan).splitlines() if not line.startswith(" ")]
    return [g.unit for g in plan.groups], headers, str(model.blocks[1].plan_report())


def test_the_report_names_the_unit_of_each_group(ranks: Ranks) -> None:
    for units, headers, inner in ranks(2).run(reported):
        assert units == ["(root)", "blocks.0, blocks.2", "blocks.1", "blocks.1"]
        dtypes = ["float64", "float64", "float64", "float32"]
        for unit, dtype, header in zip(units, dtypes, headers, strict=True):
            assert header.startswith(f"{unit}: {dtype} over fsdp=2: ")
        assert inner.startswith("(root): float64 over fsdp=2: ")


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
        "world by default": default.plan_report().groups[0].axes == {"dim0": 2},
        "report": "blocks" not in str(model.blocks[0].plan_report()),
    }


def test_the_sharded_class(ranks: Ranks) -> None:
    for found in ranks(2).run(class_facts):
        assert all(found.values()), found
