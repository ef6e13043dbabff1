"""A tensor on a mesh of hp_mesh moves over the groups of its aliases."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
from rank_pool import RankPool, cached
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from hp_dtensor import (
    Axis,
    Replicate,
    Shard,
    TorchCollectives,
    clip_grad_norm_,
    explain,
    redistribute,
)
from hp_mesh import ParallelDims, ParallelMesh

Pools = Callable[[int], RankPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Seen(TorchCollectives):
    """Collectives that keep the axes that they were called with."""

    def __init__(self) -> None:
        self.axes: list[Axis] = []


def _seen(name: str) -> Callable[..., Any]:
    def call(self: Seen, axis: Axis, *args: Any, **options: Any) -> Any:
        self.axes.append(axis)
        return getattr(super(Seen, self), name)(axis, *args, **options)

    return call


for _name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange", "broadcast"):
    setattr(Seen, _name, _seen(_name))


def _mesh() -> ParallelMesh:
    return cached(
        "aliases", lambda: ParallelDims(dp_shard=2, cp=2, tp=2).build_mesh(device_type="cpu")
    )


def _moved(rank: int) -> tuple[Tensor, list[bool], str, list[str], float, list[bool], Any]:
    """What carried a change over two axes, the plan of it, and what carried the norm."""
    mesh = _mesh()
    pair, fold = mesh["dp_shard", "cp"], mesh.group("fsdp")
    full = torch.arange(96.0).view(12, 8)
    shards = [theirs.Shard(0), theirs.Shard(1)]
    x = theirs.distribute_tensor(full, pair, shards, src_data_rank=None)
    door = Seen()
    y = redistribute(x, (S1, S0), collectives=door)
    plan = explain(x, (S1, S0))
    weight = nn.Parameter(theirs.distribute_tensor(torch.zeros(12, 8), pair, shards))
    weight.grad = x
    clipping = Seen()
    norm = clip_grad_norm_([weight], 1e9, collectives=clipping)
    return (
        y.full_tensor(),
        [axis.group is fold for axis in door.axes],
        plan.note,
        [step.kind for step in plan.steps],
        float(norm),
        [axis.group is fold for axis in clipping.axes],
        pair.mesh.flatten().tolist(),
    )


def test_a_change_over_two_axes_runs_in_the_group_of_their_alias(ranks: Pools) -> None:
    full = torch.arange(96.0).view(12, 8)
    for result, used, note, kinds, norm, clipped, _ in ranks(8).run(_moved):
        assert torch.equal(result, full)
        assert used == [True]
        assert (note, kinds) == ("", ["direct"])
        assert norm == pytest.approx(float(full.norm()))
        assert clipped == [True]


def _torchs(rank: int, compiled: bool) -> tuple[bool, bool, int]:
    """Whether torch's own redistribution sees the alias too, and what it gives."""
    mesh = _mesh()
    pair = mesh["dp_shard", "cp"]
    values = torch.ones(4, 4)
    x = theirs.DTensor.from_local(values, pair, [theirs.Partial(), theirs.Partial()])

    def reduced(x: theirs.DTensor) -> theirs.DTensor:
        return x.redistribute(placements=[theirs.Replicate(), theirs.Replicate()])

    if compiled:
        reduced = torch.compile(reduced, backend="aot_eager", fullgraph=True)
        # What is compiled cannot be counted.
        return torch.equal(reduced(x).to_local(), 4 * values), True, 1
    with CommDebugMode() as counted:
        whole = reduced(x)
    known = mesh.view("base").get_group("fsdp") is mesh.group("fsdp")
    return torch.equal(whole.to_local(), 4 * values), known, counted.get_total_counts()


@pytest.mark.parametrize("compiled", [False, True])
def test_torchs_own_redistribution_uses_the_alias_too(ranks: Pools, compiled: bool) -> None:
    assert ranks(8).run(_torchs, compiled, timeout=180) == [(True, True, 1)] * 8
