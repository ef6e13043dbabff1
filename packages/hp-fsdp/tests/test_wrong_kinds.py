"""Arguments of wrong types raise, name the legal values, and change nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import nn

from hp_dtensor import TorchCollectives
from hp_fsdp import (
    DataParallelMeshDims,
    FSDPModule,
    MeshError,
    ModuleError,
    ParameterError,
    ShardingError,
    fully_shard,
    register_fsdp_forward_method,
    sharded_optimizer,
    share_comm_ctx,
)

from .models import mesh_of

Ranks = Callable[[int], RankPool]
ADAMW = torch.optim.AdamW
SHARD: Any = fully_shard  # untyped, so that mypy accepts the wrong arguments
OPTIMIZER: Any = sharded_optimizer
DIMS: Any = DataParallelMeshDims
REGISTER: Any = register_fsdp_forward_method
SHARE: Any = share_comm_ctx
# Each case gets a module that is not sharded and a sharded module.
CASES: dict[str, Callable[[Any, Any], object]] = {
    "direct_bytes is '64k'": lambda plain, _: SHARD(plain, direct_bytes="64k"),
    "direct_bytes is True": lambda plain, _: SHARD(plain, direct_bytes=True),
    "dp_mesh_dims is 'dp'": lambda plain, _: SHARD(plain, dp_mesh_dims="dp"),
    "collectives is 3": lambda plain, _: SHARD(plain, collectives=3),
    "collectives is TorchCollectives": lambda plain, _: SHARD(plain, collectives=TorchCollectives),
    "shard_placement_fn is 'x'": lambda plain, _: SHARD(plain, shard_placement_fn="x"),
    "modules is of type FSDPLinear": lambda _, unit: unit.set_modules_to_forward_prefetch(unit),
    "factor is 'x'": lambda _, unit: unit.set_gradient_divide_factor("x"),
    "hook is 3": lambda _, unit: unit.set_all_reduce_hook(3),
    "stream is 'x'": lambda _, unit: unit.set_all_reduce_hook(print, stream="x"),
    "event is 'x'": lambda _, unit: (unit(torch.ones(1, 4)), unit.set_post_optim_event("x")),
    "enable is 'no'": lambda _, unit: unit.set_separate_reduce_scatter_group("no"),
    "enable is 'yes'": lambda _, unit: unit.set_allocate_memory_from_process_group_for_comm("yes"),
    "module is 3": lambda _, unit: REGISTER(3, "x"),
    "method_name is 3": lambda _, unit: REGISTER(unit, 3),
    "async_op is 'x'": lambda _, unit: unit.unshard("x"),
    "modules is of type FSDPLinear; allowed: a list": lambda _, unit: SHARE(unit),
    "shard is 1": lambda plain, _: DIMS(shard=1),
    "FSDPModule cannot be constructed": lambda _, unit: FSDPModule(),
    "module is of type generator": lambda _, unit: OPTIMIZER(ADAMW, unit.parameters()),
    "cls is an AdamW": lambda _, unit: OPTIMIZER(ADAMW(unit.parameters()), unit),
}


def refused(rank: int, case: str) -> tuple[str, bool]:
    plain = nn.Linear(4, 4)
    mesh_of((1,), ("fsdp",))
    unit: Any = fully_shard(nn.Linear(4, 4), mesh_of((1,), ("fsdp",)))
    with pytest.raises(ShardingError) as caught:
        CASES[case](plain, unit)
    return str(caught.value), isinstance(caught.value, TypeError) and type(plain) is nn.Linear


@pytest.mark.parametrize("case", list(CASES))
def test_an_argument_of_another_kind_is_refused_by_name(ranks: Ranks, case: str) -> None:
    ((said, typed),) = ranks(1).run(refused, case)
    assert case in said
    assert "allowed" in said or "give" in said
    assert typed


def meaningless(rank: int) -> list[str]:
    """Return the errors for values of the right type that are invalid, also on one rank."""
    mesh = mesh_of((1,), ("fsdp",))
    unit: Any = fully_shard(nn.Linear(4, 4), mesh)
    small = {"min_shard_numel": 10**6, "shard_placement_fn": lambda _: "x"}
    cases: list[tuple[type[Exception], Callable[[], object]]] = [
        (ParameterError, lambda: SHARD(nn.Linear(4, 4), mesh, layout="ragged", granularity=0)),
        (ParameterError, lambda: SHARD(nn.Linear(4, 4), mesh, **small)),
        (
            MeshError,
            lambda: SHARD(nn.Linear(4, 4), mesh, dp_mesh_dims=DIMS(shard=("fsdp", "fsdp"))),
        ),
        (ShardingError, lambda: unit.set_gradient_divide_factor(10**400)),
        (ModuleError, lambda: SHARE([3])),
    ]
    said = []
    for error, call in cases:
        with pytest.raises(error) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_a_value_without_meaning_is_refused_on_one_rank_too(ranks: Ranks) -> None:
    ((atom, small, twice, factor, shared),) = ranks(1).run(meaningless)
    assert "granularity gives 0 for weight; allowed: 1, 2, ... elements" in atom
    assert "shard_placement_fn gives 'x' for weight; allowed: Shard(dim)" in small
    assert "'fsdp' is named twice" in twice
    assert "factor=inf must be a positive finite number" in factor
    assert "3" in shared
    assert "allowed: modules that were passed to fully_shard" in shared


def streamed(rank: int) -> str:
    kept: Any = fully_shard(nn.Linear(4, 4), mesh_of((1,), ("fsdp",)), min_shard_numel=10**6)
    for stream in (torch.Stream("cpu"), torch.cpu.Stream()):
        kept.set_all_reduce_hook(print, stream=stream)  # over one rank nothing is summed
    return "taken"


def test_a_stream_for_a_hook_is_legal_where_nothing_is_summed_over_replicas(ranks: Ranks) -> None:
    assert ranks(1).run(streamed) == ["taken"]
