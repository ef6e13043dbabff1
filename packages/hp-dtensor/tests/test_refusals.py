"""Invalid calls raise on every rank before communication."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
from rank_pool import RankPool, cached
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import (
    AlphaBeta,
    LayoutError,
    RecordingCollectives,
    Replicate,
    Shard,
    redistribute,
)

Pools = Callable[[int], RankPool]
R, S0 = Replicate(), Shard(0)


def mesh_of() -> DeviceMesh:
    return cached("refusals", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))


def partial(op: str, dtype: torch.dtype) -> DTensor:
    placements = [theirs.Partial(op), theirs.Replicate()]
    return DTensor.from_local(torch.ones(4, 2).to(dtype), mesh_of(), placements)


REDUCTIONS = [
    ("avg", torch.int64),
    ("avg", torch.bool),
    ("max", torch.complex64),
    ("min", torch.complex128),
    ("product", torch.complex64),
]


def wrong_arguments(rank: int) -> list[tuple[str, str]]:
    x: Any = DTensor.from_local(torch.zeros(2, 4), mesh_of(), [theirs.Shard(0), theirs.Shard(0)])
    wrong: list[dict[str, Any]] = [
        {"cost": 3.0},
        {"cost": [AlphaBeta()]},
        {"cost": AlphaBeta(alpha=(1.0,))},
        {"collectives": 3},
        {"placements": (S0, S0), "shard_order": 5},
        {"placements": (S0, S0), "shard_order": {0: ([1], [0])}},
        {"placements": ([S0], R)},
    ]
    texts = []
    for arguments in wrong:
        with pytest.raises(LayoutError) as info:
            redistribute(x, **arguments)
        texts.append((info.type.__name__, str(info.value)))
    listed: Any = [(0, [1, 0])]
    moved = redistribute(x, (S0, S0), shard_order=listed)
    assert moved.placements == redistribute(x, (S0, S0), shard_order={0: (1, 0)}).placements
    return texts


def test_arguments_of_other_kinds_are_refused_by_name(ranks: Pools) -> None:
    first, *others = ranks(4).run(wrong_arguments)
    assert others == [first] * 3
    kinds = [LayoutError] * 7
    assert [name for name, _ in first] == [kind.__name__ for kind in kinds]
    assert "alpha=(1.0,) prices 1 mesh axes of 2; give 2 values" in first[2][1]
    assert "collectives=3 does not have the methods of Collectives" in first[3][1]
    assert "no layout for [Shard(dim=0)] on mesh axis 0; use Replicate()" in first[6][1]


def unreducible(rank: int) -> list[tuple[str, int]]:
    texts = []
    for op, dtype in REDUCTIONS:
        for target in ((R, R), (S0, R), (R, S0)):
            collectives = RecordingCollectives()
            with pytest.raises(LayoutError) as info:
                redistribute(partial(op, dtype), target, collectives=collectives)
            texts.append((str(info.value), sum(t.calls for t in collectives.by_axis.values())))
    return texts


def test_reductions_that_a_dtype_has_not_are_refused(ranks: Pools) -> None:
    first, *others = ranks(4).run(unreducible)
    assert others == [first] * 3
    assert all(calls == 0 for _, calls in first)
    assert "P(avg) on mesh axis 0 of a tensor of torch.int64" in first[0][0]
    assert "use Partial('sum') or Partial('avg')" in first[-1][0]


def kept(rank: int) -> list[bool]:
    """Partial values that stay need no reduction."""
    results = []
    for op, dtype in REDUCTIONS:
        x = partial(op, dtype)
        results.append(torch.equal(redistribute(x, (x.placements[0], S0)).to_local(), part(x)))
    return results


def part(x: DTensor) -> torch.Tensor:
    inner = mesh_of().get_local_rank("b")
    return x.to_local()[2 * inner : 2 * inner + 2]


def test_partial_values_that_stay_may_have_any_dtype(ranks: Pools) -> None:
    for results in ranks(4).run(kept):
        assert all(results)
