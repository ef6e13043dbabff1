"""Builds that fail half way, builds beside another thread's groups, and how long groups live."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch.distributed.device_mesh import DeviceMesh

from hp_mesh import MeshError, ParallelDims, _groups

from .fakes import fake_world

Pool = Callable[[int], RankPool]
DIMS = ParallelDims(dp_shard=2, cp=2, tp=2, ep=2)


class Broken(RuntimeError):
    """What a backend raises that cannot make a group."""


@contextmanager
def creation(before: Callable[[int], None] = lambda count: None) -> Iterator[list[Any]]:
    """Give the groups that torch makes; ``before`` each is called with how many there are."""
    made: list[Any] = []
    new_group = dist.new_group

    def record(ranks: list[int], **settings: Any) -> Any:
        before(len(made))
        made.append(new_group(ranks, **settings))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", record)
        yield made


def exists(group: Any) -> bool:
    """Return whether torch still knows a group of this rank."""
    return dist.get_rank(group) >= 0 if group in known() else False


def known() -> set[Any]:
    """Return all groups that torch knows."""
    return {*dist.distributed_c10d._world.pg_map}


def fail_from(first: int) -> Callable[[int], None]:
    """Let the creation of group number ``first`` fail, and all later ones."""

    def before(count: int) -> None:
        if count >= first:
            raise Broken(f"no group number {first}")

    return before


@pytest.mark.parametrize(
    ("way", "made_before"),
    # Rank 5 alone, then with others; where all ranks make all groups, the sixth is rank 5's first.
    [("local", n) for n in (1, 2, 4)] + [("joint", n) for n in (6, 7, 11, 13)],
)
def test_a_build_that_fails_half_way_destroys_the_groups_that_it_made(
    monkeypatch: pytest.MonkeyPatch, way: Any, made_before: int
) -> None:
    monkeypatch.setattr(_groups, "_choose_creation", lambda *_: way)
    with fake_world(8, 5):
        other = ParallelDims(tp=2).build_mesh()
        before = known()
        with creation(fail_from(made_before)) as made, pytest.raises(Broken, match="no group"):
            DIMS.build_mesh()
        assert len(made) == made_before
        assert known() == before
        assert exists(other.group("tp"))
        assert DIMS.build_mesh()["tp"].size() == 2


def test_a_build_that_fails_after_its_last_group_destroys_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise MemoryError

    with fake_world(8, 5):
        before = known()
        monkeypatch.setattr(DeviceMesh, "from_group", refuse)
        with creation() as made, pytest.raises(MemoryError):
            DIMS.build_mesh()
        assert len(made) > 1
        assert known() == before


def test_a_group_that_cannot_be_made_is_named_in_the_error() -> None:
    with fake_world(8, 5), creation(fail_from(2)), pytest.raises(Broken) as caught:
        DIMS.build_mesh()
    assert caught.value.__notes__ == [
        "while creating the process group of tp, ep over ranks [4, 5]",
    ]


def build_where_one_rank_fails(
    rank: int, moment: str, together: bool, failing: int
) -> tuple[str, bool, list[int]]:
    """Let one rank alone fail; return its error, whether groups are left, and two sums after it."""

    def refuse(*args: object, **settings: object) -> None:
        raise Broken("no mesh")

    dims, error, before = ParallelDims(dp_shard=2, tp=2), "built", known()
    with pytest.MonkeyPatch.context() as patch:
        if together:
            patch.setattr(_groups, "_choose_creation", lambda *_: "joint")
        if rank == failing and moment == "views":
            patch.setattr(DeviceMesh, "from_group", refuse)
        fails = rank == failing and moment == "groups"
        with creation(fail_from(2) if fails else lambda count: None):
            try:
                dims.build_mesh(timeout=timedelta(seconds=3))
            except (MeshError, RuntimeError) as caught:
                notes = getattr(caught, "__notes__", [])
                error = "\n".join([f"{type(caught).__name__}: {caught}", *notes])
    left = known() != before
    # Groups that torch names by their number, and those of another build, meet again.
    sums = []
    mesh, world = dims.build_mesh(timeout=timedelta(seconds=20)), [0, 1, 2, 3]
    for group in (mesh.group("tp"), dist.new_group(world, timeout=timedelta(seconds=20))):
        seen = torch.tensor(2**rank)
        dist.all_reduce(seen, group=group)
        sums.append(int(seen))
    dist.destroy_process_group(group)
    mesh.close()
    return error, left, sums


@pytest.mark.parametrize(
    ("moment", "together", "failing", "told"),
    # Who waits for a rank that makes no more groups, or for one that waited for it, fails itself.
    [
        ("groups", False, 0, [2, 3]),
        ("groups", True, 3, []),
        ("views", False, 0, [1, 2, 3]),
        ("views", True, 0, [1, 2, 3]),
    ],
)
def test_where_one_rank_fails_every_rank_raises_and_keeps_no_group(
    ranks: Pool, moment: str, together: bool, failing: int, told: list[int]
) -> None:
    results = ranks(4).run(build_where_one_rank_fails, moment, together, failing)
    errors = [error for error, _, _ in results]
    assert errors[failing].startswith("Broken: no ")
    assert "failed before" not in errors[failing]
    for rank in {*range(4)} - {failing, *told}:
        assert errors[rank].endswith(
            f"rank {failing} failed before this one; see its own error first"
        )
    assert "built" not in errors
    for rank in told:
        assert errors[rank] == (
            "MeshError: rank 0 could not build its part of this mesh; its own error says why, and "
            "no rank keeps a group of it"
        )
    assert not any(left for _, left, _ in results)
    assert [sums for _, _, sums in results] == [[3, 15], [3, 15], [12, 15], [12, 15]]


def build_beside_a_thread(rank: int) -> list[int]:
    """Make one more group in a thread that starts on rank 0 inside the build, on rank 1 after."""
    sums: list[int] = []
    new_group, names = dist.new_group, dist.distributed_c10d.get_pg_count

    def meet() -> None:
        group = new_group([0, 1], timeout=timedelta(seconds=10))
        seen = torch.tensor(2**rank)
        dist.all_reduce(seen, group=group)
        dist.destroy_process_group(group)
        sums.append(int(seen))

    def make_and_start(*args: Any, **settings: Any) -> Any:
        group, before = new_group(*args, **settings), names()
        thread.start()
        while names() == before:  # until it has taken its store, and a name after that
            time.sleep(0.01)
        return group

    thread = Thread(target=meet)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(dist, "new_group", make_and_start)
        mesh = ParallelDims().build_mesh(timeout=timedelta(seconds=20))
    if rank == 1:
        thread.start()
    thread.join()
    mesh.close()
    return sums


def test_a_group_that_another_thread_makes_meanwhile_meets_in_the_stores_own_place(
    ranks: Pool,
) -> None:
    assert ranks(2).run(build_beside_a_thread) == [[3], [3]]


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_a_mesh_destroys_the_groups_that_it_made_and_no_others(fails: bool) -> None:
    with fake_world(8, 5):
        other = DIMS.build_mesh()
        before = known()
        with pytest.raises(Broken) if fails else creation() as _, DIMS.build_mesh() as mesh:
            assert isinstance(mesh["dp_replicate", "fsdp"], DeviceMesh)
            assert known() > before
            if fails:
                raise Broken
        assert known() == before
        assert exists(other.group("tp"))
        with pytest.raises(MeshError, match="closed"):
            mesh["tp"]
        with pytest.raises(MeshError, match="closed"), mesh:
            pass


def test_of_nested_blocks_of_one_mesh_the_inner_one_closes_it() -> None:
    with fake_world(8, 5):
        before = known()
        with DIMS.build_mesh() as mesh:
            with mesh as same:
                assert same is mesh
            assert known() == before
            with pytest.raises(MeshError, match="closed"):
                mesh["tp"]
