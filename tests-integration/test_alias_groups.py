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


for _name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv", "broadcast"):
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


def _uneven(rank: int, compiled: bool) -> tuple[bool, bool]:
    """Whether uneven rows are gathered right, here and by torch, and whether torch sees folds."""
    mesh = _mesh()
    pair = mesh["dp_shard", "cp"]

    def gathered(x: theirs.DTensor) -> theirs.DTensor:
        result: theirs.DTensor = redistribute(x, (R, R))
        return result

    if compiled:
        gathered = torch.compile(gathered, backend="aot_eager", fullgraph=True)
    right = []
    for rows in (6,) if compiled else (1, 5, 6, 8):
        full = torch.arange(3.0 * rows).view(rows, 3)
        x = theirs.distribute_tensor(full, pair, [theirs.Shard(0)] * 2, src_data_rank=None)
        right.append(torch.equal(gathered(x).to_local(), full))
        right.append(torch.equal(x.full_tensor(), full))
    return all(right), bool(mesh.view("base")._flatten_mapping)


@pytest.mark.parametrize("compiled", [False, True])
def test_uneven_rows_are_gathered_right_here_and_by_torch(ranks: Pools, compiled: bool) -> None:
    assert ranks(8).run(_uneven, compiled) == [(True, False)] * 8


def _closed(rank: int) -> tuple[list[bool], list[bool]]:
    """Which groups carry a change on a mesh, and on an equal one after the first was closed."""
    with ParallelDims(dp_shard=2, cp=2, tp=2).build_mesh(device_type="cpu") as mesh:
        before = _by_alias(mesh)
    return before, _by_alias(_mesh())


def _by_alias(mesh: ParallelMesh) -> list[bool]:
    """Return whether each collective of a change over two axes uses the mesh's own fsdp group."""
    pair, fold = mesh["dp_shard", "cp"], mesh.group("fsdp")
    full = torch.arange(96.0).view(12, 8)
    shards = [theirs.Shard(0), theirs.Shard(1)]
    x = theirs.distribute_tensor(full, pair, shards, src_data_rank=None)
    door = Seen()
    redistribute(x, (S1, S0), collectives=door)
    return [axis.group is fold for axis in door.axes]


def test_each_of_two_equal_meshes_moves_over_its_own_alias(ranks: Pools) -> None:
    assert ranks(8).run(_closed) == [([True], [True])] * 8


def _torchs(rank: int, compiled: bool) -> tuple[bool, int]:
    """What torch's own redistribution gives, and how many collectives it takes."""
    mesh = _mesh()
    pair = mesh["dp_shard", "cp"]
    values = torch.ones(4, 4)
    x = theirs.DTensor.from_local(values, pair, [theirs.Partial(), theirs.Partial()])

    def reduced(x: theirs.DTensor) -> theirs.DTensor:
        return x.redistribute(placements=[theirs.Replicate(), theirs.Replicate()])

    if compiled:
        reduced = torch.compile(reduced, backend="aot_eager", fullgraph=True)
        # What is compiled cannot be counted.
        return torch.equal(reduced(x).to_local(), 4 * values), 2
    with CommDebugMode() as counted:
        whole = reduced(x)
    return torch.equal(whole.to_local(), 4 * values), counted.get_total_counts()


@pytest.mark.parametrize("compiled", [False, True])
def test_torchs_own_redistribution_goes_axis_by_axis(ranks: Pools, compiled: bool) -> None:
    assert ranks(8).run(_torchs, compiled) == [(True, 2)] * 8
