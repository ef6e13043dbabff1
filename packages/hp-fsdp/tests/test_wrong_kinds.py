"""Arguments of another kind than asked for: named, with what is legal, and nothing changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import nn

from hp_dtensor import TorchCollectives
from hp_fsdp import Ring, ShardingError, fully_shard, sharded_optimizer

from .models import mesh_of

Ranks = Callable[[int], RankPool]
ADAMW = torch.optim.AdamW
SHARD: Any = fully_shard  # mypy knows what is wrong, and users may not
OPTIMIZER: Any = sharded_optimizer
# Of a module that is not sharded, and one that is.
CASES: dict[str, Callable[[Any, Any], object]] = {
    "buffers is 2": lambda plain, _: SHARD(plain, buffers=2),
    "buffers is Ring": lambda plain, _: SHARD(plain, buffers=Ring),
    "direct_bytes is '64k'": lambda plain, _: SHARD(plain, direct_bytes="64k"),
    "direct_bytes is True": lambda plain, _: SHARD(plain, direct_bytes=True),
    "dp_mesh_dims is 'dp'": lambda plain, _: SHARD(plain, dp_mesh_dims="dp"),
    "collectives is 3": lambda plain, _: SHARD(plain, collectives=3),
    "collectives is TorchCollectives": lambda plain, _: SHARD(plain, collectives=TorchCollectives),
    "shard_placement_fn is 'x'": lambda plain, _: SHARD(plain, shard_placement_fn="x"),
    "modules is of type FSDPLinear": lambda _, unit: unit.set_modules_to_forward_prefetch(unit),
    "factor is 'x'": lambda _, unit: unit.set_gradient_divide_factor("x"),
    "hook is 3": lambda _, unit: unit.set_all_reduce_hook(3),
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
    assert "legal" in said or "give" in said
    assert typed
