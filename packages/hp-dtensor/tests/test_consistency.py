"""Ranks that mean different transfers all hear of it before anything is sent."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, cached
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import (
    AlphaBeta,
    Axis,
    Layout,
    MeshError,
    NonMember,
    RankMismatchError,
    RecordingCollectives,
    Replicate,
    Shard,
    plan_transfer,
    redistribute,
)

from .test_between_meshes import cut, laid, mesh_of, spelled, whole

_package = plan_transfer.__module__.rpartition("._")[0]
_consistency: Any = import_module(f"{_package}._between_meshes")
_plan: Any = import_module(f"{_package}._planner")
_groups: Any = import_module(f"{_package}._groups")

Pools = Callable[[int], RankPool]
R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPE = (6, 4)
SOURCE, TARGET = Layout((2,), (S0,)), Layout((2,), (S1,), ranks=(2, 3))
# Worth a gather on the other mesh, unless a call costs more than all bytes.
ONE, THREE = Layout((1,), (R,)), Layout((3,), (R,), ranks=(1, 2, 3))
WORLD = 4


def absent(rank: int, **other: Any) -> Any:
    """Return the tensor or its `NonMember`. On rank 2, fields in ``other`` are replaced."""
    x = laid(whole(SHAPE), SOURCE, rank)
    return replace(x, **other) if rank == 2 else x


WRONG: dict[str, Callable[[int], Any]] = {
    "dtype": lambda rank: redistribute(
        absent(rank, dtype=torch.float32), (S1,), mesh=mesh_of(TARGET)
    ),
    "itemsize": lambda rank: redistribute(
        absent(rank, dtype=torch.int64), (S1,), mesh=mesh_of(TARGET)
    ),
    "shape": lambda rank: redistribute(absent(rank, shape=(4, 6)), (S1,), mesh=mesh_of(TARGET)),
    "source": lambda rank: redistribute(
        absent(rank, layout=replace(SOURCE, placements=(R,))), (S1,), mesh=mesh_of(TARGET)
    ),
    "order of the ranks": lambda rank: redistribute(
        absent(rank, layout=replace(SOURCE, ranks=(1, 0))), (S1,), mesh=mesh_of(TARGET)
    ),
    "target": lambda rank: redistribute(
        absent(rank), (R if rank == 2 else S1,), mesh=mesh_of(TARGET)
    ),
    "cost": lambda rank: redistribute(
        laid(whole((6, 4)), ONE, rank),
        (R,),
        mesh=mesh_of(THREE),
        cost=AlphaBeta(alpha=1.0 * (rank == 2)),
    ),
    "part": lambda rank: redistribute(misshapen(rank), (S1,), mesh=mesh_of(TARGET)),
    "non-member": lambda rank: redistribute(
        NonMember(SOURCE, SHAPE, torch.double) if rank == 1 else laid(whole(SHAPE), SOURCE, rank),
        (S1,),
        mesh=mesh_of(TARGET),
    ),
}


def misshapen(rank: int) -> Any:
    x = laid(whole(SHAPE), SOURCE, rank)
    if rank != 1:
        return x
    return DTensor.from_local(
        torch.zeros(2, 4).double(), mesh_of(SOURCE), spelled(SOURCE), shape=x.shape, stride=(4, 1)
    )


def refusal(rank: int, what: str) -> tuple[str, torch.Tensor | None]:
    """Return the error of a call, and the result of the next call without a disagreement."""
    for layout in (SOURCE, TARGET, ONE, THREE):
        mesh_of(layout)
    try:
        WRONG[what](rank)
        text = ""
    except RankMismatchError as error:
        text = str(error)
    y = redistribute(laid(whole(SHAPE), SOURCE, rank), (S1,), mesh=mesh_of(TARGET))
    return text, None if isinstance(y, NonMember) else y.to_local()


SAID = {
    "dtype": ("rank 0 plans torch.float64 of shape [6, 4] from (S(0))", "2 plans torch.float32"),
    "itemsize": ("rank 0 plans torch.float64", "rank 2 plans torch.int64"),
    "shape": ("rank 0 plans torch.float64 of shape [6, 4]", "rank 2 plans torch.float64 of shape"),
    "source": ("from (S(0)) on ranks [0, 1]", "from (R) on ranks [0, 1]"),
    "order of the ranks": ("from (S(0)) on ranks [0, 1]", "from (S(0)) on ranks [1, 0]"),
    "target": ("to (S(1)) on ranks [2, 3]", "to (R) on ranks [2, 3]"),
    "cost": ("by transfer and all_gather", "by transfer; call on all"),
    "part": ("rank 0 plans torch.float64", "rank 1 plans the local tensor has shape [2, 4] where"),
    "non-member": ("rank 0 plans torch.float64", "rank 1 plans a NonMember where (S(0)) of [6, 4]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_one_rank_that_means_something_else_is_named_on_all(ranks: Pools, what: str) -> None:
    first, *others = (text for text, _ in ranks(WORLD).run(refusal, what))
    assert others == [first] * 3
    assert first.startswith("the ranks of both meshes plan different transfers: rank 0 plans ")
    assert all(said in first for said in SAID[what]), first
    assert "NonMember that says the same of it" in first


def test_after_a_refusal_ranks_are_in_step(ranks: Pools) -> None:
    for rank, (_, local) in enumerate(ranks(WORLD).run(refusal, "dtype")):
        assert (local is None) == (rank < 2)
        if local is not None:
            assert torch.equal(local, cut(whole(SHAPE), TARGET, rank))


def not_sent(rank: int) -> int:
    collectives = RecordingCollectives()
    x = absent(rank, dtype=torch.float32)
    with pytest.raises(RankMismatchError):
        redistribute(x, (S1,), mesh=mesh_of(TARGET), collectives=collectives)
    return sum(traffic.calls for traffic in collectives.by_axis.values())


def test_nothing_of_the_tensor_is_sent_then(ranks: Pools) -> None:
    assert ranks(WORLD).run(not_sent) == [0] * WORLD


def with_other_ranks(rank: int) -> str:
    """Rank 3 means a mesh of ranks 1 and 3; the others one of 2 and 3."""
    group = cached("impatient", lambda: dist.new_group(range(WORLD), timeout=timedelta(seconds=2)))
    axis = Axis("world", group, tuple(range(WORLD)))
    target = replace(TARGET, ranks=(1, 3)) if rank == 3 else TARGET
    plan = _plan.make_plan(SOURCE, target, SHAPE, rank, 8)
    try:
        _consistency.ConsistencyCheck(plan, torch.double, lambda: axis, "cpu")("", False)
    except RankMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_mean_other_ranks_end_with_an_error_each(ranks: Pools) -> None:
    answers = ranks(WORLD).run(with_other_ranks)
    assert all(answers)
    assert any("rank 3 plans" in text and "on ranks [1, 3]" in text for text in answers), answers
    late = [text for text in answers if "did not all take part in time" in text]
    assert all("other ranks than [0, 1, " in text for text in late)


SECONDS = 3.0


def between_submeshes(rank: int) -> tuple[str, float, int, torch.Tensor | None]:
    """Each rank means its row as the source and its column as the target: other ranks each.

    Then those that rank 1 meant mean the same ones.
    """
    source, target = Layout((2,), (S0,)), Layout((2,), (S1,), ranks=(1, 3))
    there = [mesh_of(layout) for layout in (source, target)][1]
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = DTensor.from_local(whole((3, 4)), square["a"], spelled(Layout((2,), (S0,))))
    dist.barrier()
    world: Any = dist.group.WORLD
    backend = world._get_backend(torch.device("cpu"))
    patience = backend.options._timeout
    backend._set_default_timeout(timedelta(seconds=SECONDS))
    groups, start = len(_named_groups()), time.monotonic()
    try:
        redistribute(x, (S1,), mesh=square["b"])
        text = ""
    except RankMismatchError as error:
        text = str(error)
    finally:
        backend._set_default_timeout(patience)
    seconds, left = time.monotonic() - start, len(_named_groups()) - groups
    dist.barrier()
    y: Any = NonMember(target, SHAPE, torch.double)
    if rank != 2:
        y = redistribute(laid(whole(SHAPE), source, rank), (S1,), mesh=there)
    return text, seconds, left, None if isinstance(y, NonMember) else y.to_local()


def _named_groups() -> Any:
    return dist.distributed_c10d._world.pg_names


def test_ranks_that_make_groups_of_other_ranks_end_when_the_worlds_group_does() -> None:
    pool = RankPool(WORLD)  # a new pool, because groups of earlier tests have other timeouts
    try:
        answers = pool.run(between_submeshes)
    finally:
        pool.close()
    for rank, (text, seconds, left, after) in enumerate(answers):
        meant = sorted({rank, rank ^ 1, rank ^ 2})
        assert text.startswith(f"ranks {meant} did not all take part in time in"), text
        assert SECONDS * 0.9 < seconds < SECONDS + 10
        assert left == 0
        if rank in (1, 3):
            assert after is not None
            target = Layout((2,), (S1,), ranks=(1, 3))
            assert torch.equal(after, cut(whole(SHAPE), target, rank))


def where_the_world_makes_groups(rank: int) -> str:
    """Simulate eager NCCL initialisation: all ranks of the world must create groups together."""
    target = Layout((2,), (S1,), ranks=(1, 2))
    x: Any = NonMember(Layout((1,), (R,), ranks=(0,)), SHAPE, torch.double)
    there = mesh_of(target)
    own = DeviceMesh("cpu", [0])
    if rank == 0:
        x = DTensor.from_local(whole(SHAPE), own, spelled(Layout((1,), (R,))))
    elif rank == 3:
        return ""
    with mock.patch.object(_groups, "makes_groups_alone", return_value=False):
        try:
            redistribute(x, (S1,), mesh=there)
        except MeshError as error:
            return str(error)
    return "no error"


def test_a_group_that_only_the_world_can_make_is_asked_for() -> None:
    pool = RankPool(WORLD)  # a new pool, in which no earlier test has created the group
    try:
        *found, outside = pool.run(where_the_world_makes_groups)
    finally:
        pool.close()
    assert outside == ""
    assert len(set(found)) == 1
    assert "give groups=[group]" in found[0]
