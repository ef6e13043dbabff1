"""Process groups: one for each set of ranks, and how they come into being."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings

from hp_mesh import DEFAULT_ORDER, ParallelDims, _groups

from .fakes import fake_world
from .strategies import dims


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    new_group = dist.new_group

    def record(ranks: list[int], **settings: Any) -> Any:
        made.append({"ranks": ranks, **settings})
        return new_group(ranks, **settings)

    monkeypatch.setattr(dist, "new_group", record)
    return made


@given(dims(max_world=64))
@settings(deadline=None, max_examples=80)
def test_axes_share_a_group_exactly_when_they_share_its_ranks(dims: ParallelDims) -> None:
    layout = dims.layout()
    first = dims._plan_mesh(layout.world_size, 0)[1].groups
    shared = {own.axes for own in first}
    for rank in range(layout.world_size):
        owned = dims._plan_mesh(layout.world_size, rank)[1].groups
        # Were this different on some rank, its peers would wait for it in another group.
        assert {own.axes for own in owned} == shared
        assert [own.axes for own in owned] == [own.axes for own in first]
        sets = [own.ranks or tuple(range(layout.world_size)) for own in owned]
        assert len(set(sets)) == len(sets)
        axes = {axis for own in owned for axis in own.axes}
        assert axes == {layout.find(name)[1][0] for name in layout.names}
        for own, ranks in zip(owned, sets, strict=True):
            assert {layout.group(axis, rank) for axis in own.axes} == {ranks}


@pytest.mark.parametrize(("world", "rank"), [(131072, 0), (131072, 77777), (1024, 1023)])
def test_a_large_world_takes_one_local_creation_for_each_set_of_ranks(
    world: int, rank: int, calls: list[dict[str, Any]]
) -> None:
    dims = ParallelDims(dp_replicate=2, cp=4, tp=8, pp=4, ep=16, world_size=world)
    layout = dims.layout()
    with fake_world(world, rank):
        mesh = dims.build_mesh()
        built = len(calls)
        for name in mesh.names:
            assert mesh[name].size() == layout.size(name)
        assert len(calls) == built, "looking a name up creates no group"
        expected = {layout.group(name, rank) for name in layout.names}
        assert {tuple(call["ranks"]) for call in calls} == expected
        assert len(calls) == len(expected) <= 12
        assert all(call["use_local_synchronization"] for call in calls)


def test_the_world_and_the_single_rank_are_one_group_each(calls: list[dict[str, Any]]) -> None:
    with fake_world(8):
        mesh = ParallelDims(ep=8).build_mesh()
        for name in ("fsdp", "dp_shard", "dp", "batch", "loss", "ep"):
            assert mesh.group(name) is dist.group.WORLD
        for name in ("pp", "dp_replicate", "cp", "tp", "efsdp", "etp"):
            assert mesh.group(name) is mesh.group("pp")
    assert [call["ranks"] for call in calls] == [[0]]


def test_a_world_of_one_needs_no_group(calls: list[dict[str, Any]]) -> None:
    with fake_world(1):
        mesh = ParallelDims(ulysses_degree=1).build_mesh()
        assert {mesh.group(name) for name in mesh.names} == {dist.group.WORLD}
    assert calls == []


def test_groups_are_described_by_their_axes(calls: list[dict[str, Any]]) -> None:
    with fake_world(8, 5):
        ParallelDims(tp=2, cp=2, ep=2).build_mesh()
    assert {tuple(c["ranks"]): c["group_desc"] for c in calls} == {
        (5,): "pp,dp_replicate,etp",
        (1, 3, 5, 7): "fsdp,efsdp,loss,ep_replicate",
        (4, 5): "tp,ep",
        (1, 5): "dp_shard,dp",
        (5, 7): "cp",
    }


def test_where_names_would_clash_all_ranks_create_all_groups(
    monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(_groups, "_choose_creation", lambda *_: "joint")
    dims = ParallelDims(dp_shard=2, tp=2, world_size=4)
    with fake_world(4, 3):
        mesh = dims.build_mesh(timeout=timedelta(seconds=7))
        assert [dist.get_process_group_ranks(mesh.group(n)) for n in ("tp", "fsdp", "pp")] == [
            [2, 3],
            [1, 3],
            [3],
        ]
    layout = dims.layout()
    names = ("pp", "fsdp", "tp")
    assert [call["ranks"] for call in calls] == [list(g) for n in names for g in layout.groups(n)]
    assert not any(call.get("use_local_synchronization") for call in calls)
    assert {call["timeout"] for call in calls} == {timedelta(seconds=7)}
    described = [(call["group_desc"].split(",")[0], *call["ranks"]) for call in calls]
    assert described == [(n, *g) for n in names for g in layout.groups(n)]


@pytest.mark.parametrize(
    "order", [DEFAULT_ORDER, ("tp", "cp", "ep", "dp_shard", "pp", "dp_replicate")]
)
def test_an_eager_world_is_split_once_for_each_set_of_ranks(
    monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]], order: tuple[str, ...]
) -> None:
    splits: list[list[list[int]]] = []
    settings_of: list[dict[str, Any]] = []

    def split_group(split_ranks: list[list[int]], **settings: Any) -> Any:
        splits.append(split_ranks)
        settings_of.append(settings)
        (mine,) = [ranks for ranks in split_ranks if 5 in ranks]
        return new_group(mine, use_local_synchronization=True)

    new_group = dist.new_group
    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(_groups, "splits_world", lambda world: True)
    dims = ParallelDims(tp=2, cp=2, ep=2, order=order, world_size=8)
    with fake_world(8, 5):
        mesh = dims.build_mesh(timeout=timedelta(seconds=7))
        layout = dims.layout()
        for name in mesh.names:
            ranks = tuple(dist.get_process_group_ranks(mesh.group(name)))
            assert ranks == layout.group(name, 5)
    assert len(splits) == len({layout.group(name, 5) for name in layout.names})
    for split in splits:
        assert sorted(rank for ranks in split for rank in ranks) == [*range(8)]
    for split, others in zip(splits, settings_of, strict=True):
        assert others["timeout"] == timedelta(seconds=7)
        for axis in others["group_desc"].split(","):
            assert layout.groups(axis) == [tuple(ranks) for ranks in split]
