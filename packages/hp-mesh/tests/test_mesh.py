"""Torch meshes: what each name resolves to, and real groups on gloo."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from timeit import repeat
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool
from torch.distributed.device_mesh import init_device_mesh

from hp_mesh import (
    DEFAULT_ORDER,
    LayoutError,
    MeshError,
    ParallelDims,
    ParallelDimsError,
    ParallelMesh,
)

from .fakes import fake_world
from .strategies import dims

Pool = Callable[[int], RankPool]
ORDER = ("pp", "dp_replicate", "dp_shard")


@given(dims(max_world=96), st.data())
@settings(deadline=None, max_examples=60)
def test_every_mesh_is_what_the_layout_says(dims: ParallelDims, data: st.DataObject) -> None:
    layout = dims.layout()
    rank = data.draw(st.integers(0, layout.world_size - 1))
    with fake_world(layout.world_size, rank):
        mesh = dims.build_mesh()
        for name in mesh.names:
            axis, group = mesh[name], list(layout.group(name, rank))
            assert axis.mesh.tolist() == group
            assert dist.get_process_group_ranks(mesh.group(name)) == group
            assert axis.get_local_rank() == layout.coordinate(name, rank)
            assert axis.get_coordinate() == (layout.coordinate(name, rank),)
        for name, view in layout.views.items():
            full = mesh.view(name)
            assert full.mesh_dim_names == view.axes
            assert full.get_coordinate() == tuple(layout.coordinates(rank, name).values())
            assert full.mesh.flatten().tolist() == [*view.ranks()]


@given(dims(max_world=96), st.data())
@settings(deadline=None, max_examples=60)
def test_layouts_equal_torchs_own_meshes_in_every_order(
    dims: ParallelDims, data: st.DataObject
) -> None:
    layout = dims.layout()
    rank = data.draw(st.integers(0, layout.world_size - 1))
    names = tuple(name for name in dims.order if name in layout.views["base"].axes)
    with fake_world(layout.world_size, rank):
        theirs = init_device_mesh(
            "cpu", tuple(layout.size(name) for name in names), mesh_dim_names=names
        )
        assert theirs.get_coordinate() == tuple(layout.coordinates(rank)[name] for name in names)
        for name in names:
            assert tuple(theirs[name].mesh.tolist()) == layout.group(name, rank)


@given(dims(max_world=96, any_order=False), st.data())
@settings(deadline=None, max_examples=40)
def test_folds_equal_those_that_torch_flattens_and_expert_axes_those_that_it_unflattens(
    dims: ParallelDims, data: st.DataObject
) -> None:
    layout = dims.layout()
    rank = data.draw(st.integers(0, layout.world_size - 1))
    base, sparse = layout.views["base"], layout.views["sparse"]
    with fake_world(layout.world_size, rank):
        theirs = init_device_mesh("cpu", base.shape, mesh_dim_names=base.axes)
        shard = ("dp_shard", "ep") if dims.ep_mode == "peer" else ("dp_shard",)
        for name, parts in {
            "fsdp": (*shard, "cp") if dims.fsdp_folds_cp else shard,
            "dp": ("dp_replicate", *shard),
            "loss": ("dp_replicate", *shard, "cp"),
        }.items():
            flat = theirs[parts]._flatten(name)
            assert tuple(flat.mesh.tolist()) == layout.group(name, rank)
        if dims.ep_mode == "folded":
            experts = init_device_mesh("cpu", sparse.shape, mesh_dim_names=sparse.axes)
            for name in ("efsdp", "ep", "etp"):
                assert tuple(experts[name].mesh.tolist()) == layout.group(name, rank)
            held = experts["dp_replicate", "efsdp"]._flatten("held")
            assert tuple(held.mesh.tolist()) == layout.group("ep_replicate", rank)


def test_lookups_are_cached_and_cheap() -> None:
    with fake_world(64):
        mesh = ParallelDims(tp=4, ep=8).build_mesh()
        for names in ("tp", "batch", ("dp_replicate", "fsdp")):
            assert mesh[names] is mesh[names]
            # The best of many: what the machine does besides must not count.
            seconds = repeat(partial(mesh.__getitem__, names), number=100, repeat=20)
            assert min(seconds) / 100 < 5e-6


def test_several_axes_come_from_one_view_in_its_order() -> None:
    with fake_world(16):
        mesh = ParallelDims(dp_replicate=2, cp=2, tp=2, ep=4).build_mesh()
        assert mesh["dp_replicate", "fsdp"].mesh_dim_names == ("dp_replicate", "fsdp")
        assert mesh["dp_replicate", "efsdp", "ep"].shape == (2, 2, 4)
        assert mesh["batch", "cp"].mesh_dim_names == ("dp", "cp")
        assert mesh["ep_replicate", "ep_shard"].shape == (4, 4)
        assert mesh["replicate", "fsdp"] == mesh["dp_replicate", "fsdp"]
        assert mesh["dp_cp"] == mesh["loss"]
        assert mesh["dp_ep"] == mesh["dp"]
        assert mesh["pp", "loss", "tp"] is mesh.view("loss")
        with pytest.raises(LayoutError, match=r"fsdp is in dense, cp is in base or data"):
            mesh["fsdp", "cp"]
        with pytest.raises(LayoutError, match=r"dense view has them as \['fsdp', 'tp'\]"):
            mesh["tp", "fsdp"]
        with pytest.raises(LayoutError, match=r"no axis given; use one or more of pp, "):
            mesh[()]
        with pytest.raises(LayoutError, match=r"which are \['dp', 'dp'\]; use each axis once"):
            mesh["dp", "batch"]
        with pytest.raises(LayoutError, match=r"no axis 'dq'; use pp, "):
            mesh["dq"]
        with pytest.raises(LayoutError, match=r"no view 'ep'; use .*'sparse'"):
            mesh.view("ep")


def test_building_needs_a_process_group_of_the_right_size() -> None:
    with pytest.raises(MeshError, match="init_process_group"):
        ParallelDims().build_mesh()
    with fake_world(4), pytest.raises(ParallelDimsError, match=r"world_size=4 .* world_size=8"):
        ParallelDims(world_size=8).build_mesh()
    with fake_world(4), pytest.raises(ParallelDimsError, match=r"tp=3 .*; use 1, 2 or 4"):
        ParallelDims(tp=3).build_mesh()


def test_a_closed_mesh_says_so_and_leaves_no_group_behind() -> None:
    with fake_world(4):
        mesh = ParallelDims(tp=2).build_mesh()
        group = mesh.group("tp")
        mesh.close()
        mesh.close()
        with pytest.raises(MeshError, match="closed"):
            mesh["tp"]
        with pytest.raises(MeshError, match="closed"):
            mesh.view("base")
        with pytest.raises(MeshError, match="closed"):
            mesh.device_type  # noqa: B018
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.destroy_process_group(group)
        assert dist.is_initialized()
        assert ParallelDims(tp=2).build_mesh()["tp"].size() == 2


def test_the_timeout_is_that_of_the_new_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = []
    new_group = dist.new_group

    def record(ranks: list[int], *, timeout: timedelta | None, **settings: Any) -> Any:
        timeouts.append(timeout)
        return new_group(ranks, timeout=timeout, **settings)

    monkeypatch.setattr(dist, "new_group", record)
    with fake_world(4):
        ParallelDims(tp=2).build_mesh(timeout=timedelta(seconds=7))
    assert timeouts
    assert set(timeouts) == {timedelta(seconds=7)}


def test_the_device_type_is_the_cpu_unless_another_is_given() -> None:
    with fake_world(2):
        mesh = ParallelDims().build_mesh()
        assert mesh.device_type == mesh["fsdp"].device_type == "cpu"
        assert ParallelDims().build_mesh("meta").device_type == "meta"


def test_sharding_that_leaves_cp_out_replicates_over_it() -> None:
    with fake_world(16):
        mesh = ParallelDims(dp_replicate=2, cp=2, tp=2, fsdp_folds_cp=False).build_mesh()
        assert mesh["replicate", "fsdp"].shape == (4, 2)
        assert mesh["pp", "replicate", "fsdp", "tp"] is mesh.view("dense")
        with pytest.raises(LayoutError, match=r"dp_replicate is in .*base.*, fsdp is in dense"):
            mesh["dp_replicate", "fsdp"]


CONFIGURATIONS = [
    ParallelDims(),
    ParallelDims(tp=2, etp=2, ep=2),
    ParallelDims(dp_shard=2, cp=2, ep=4, ulysses_degree=2),
    ParallelDims(dp_replicate=2, pp=2, dp_shard=1),
    ParallelDims(dp_shard=2, ep=2, ep_mode="peer"),
    ParallelDims(tp=2, etp=2, ep=2, ep_mode="peer", order=("tp", "ep", *ORDER[:3], "cp")),
    ParallelDims(cp=2, dp_replicate=2, ep=2, fsdp_folds_cp=False),
    ParallelDims(
        dp_replicate=2, dp_shard=2, ep=2, order=("ep", "dp_shard", "cp", *ORDER[1::-1], "tp")
    ),
    ParallelDims(dp_replicate=2, cp=2, ep=2, order=("cp", "tp", "dp_shard", "pp", "dp_replicate")),
    ParallelDims(
        dp_shard=2, tp=2, ep=2, order=("tp", "ep", "cp", "dp_shard", "pp", "dp_replicate")
    ),
]


def reduce_one_hot_ranks(rank: int, dims: ParallelDims) -> dict[str, list[int]]:
    mesh = dims.build_mesh(timeout=timedelta(seconds=60))
    members = {}
    for name in mesh.names:
        seen = torch.zeros(dist.get_world_size())
        seen[rank] = 1
        dist.all_reduce(seen, group=mesh.group(name))
        members[name] = [
            index for index, count in enumerate(seen.tolist()) for _ in range(int(count))
        ]
    mesh.close()
    return members


@pytest.mark.parametrize("dims", CONFIGURATIONS, ids=ParallelDims.summary)
def test_an_all_reduce_on_every_name_reaches_its_ranks(ranks: Pool, dims: ParallelDims) -> None:
    layout = dims.resolve(4).layout()
    for rank, members in enumerate(ranks(4).run(reduce_one_hot_ranks, dims)):
        expected = {name: [*layout.group(name, rank)] for name in layout.names}
        assert members == expected


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(dp_replicate=2, cp=2, tp=2, ep=2, ulysses_degree=2),
        ParallelDims(cp=2, ep=2, tp=2, etp=2, ep_mode="peer", order=DEFAULT_ORDER[::-1]),
    ],
    ids=ParallelDims.summary,
)
def test_an_all_reduce_on_every_name_reaches_its_ranks_among_eight(
    ranks: Pool, dims: ParallelDims
) -> None:
    layout = dims.resolve(8).layout()
    members = ranks(8).run(reduce_one_hot_ranks, dims, timeout=180)
    for rank, reached in enumerate(members):
        assert reached == {name: [*layout.group(name, rank)] for name in layout.names}


def build_after_an_uneven_group(rank: int) -> int:
    uneven = dist.new_group([0, 1])
    mesh = ParallelDims(tp=2).build_mesh(timeout=timedelta(seconds=20))
    seen = torch.tensor(2**rank)
    dist.all_reduce(seen, group=mesh.group("fsdp"))
    mesh.close()
    if rank < 2:
        dist.destroy_process_group(uneven)
    return int(seen)


def test_groups_that_only_some_ranks_are_in_do_not_make_the_build_hang(ranks: Pool) -> None:
    assert ranks(4).run(build_after_an_uneven_group) == [5, 10, 5, 10]


def rebuild_and_reduce(rank: int) -> list[int]:
    sums = []
    for tp in (2, 2, 4, 2):
        mesh = ParallelDims(tp=tp).build_mesh(timeout=timedelta(seconds=20))
        seen = torch.tensor(2**rank)
        dist.all_reduce(seen, group=mesh.group("tp"))
        sums.append(int(seen))
        mesh.close()
    return sums


def test_a_mesh_can_be_built_again_after_it_was_closed(ranks: Pool) -> None:
    low, high = [3, 3, 15, 3], [12, 12, 15, 12]
    assert ranks(4).run(rebuild_and_reduce) == [low, low, high, high]


def build_what_differs(rank: int, degrees: dict[int, int], others: int) -> str:
    """Return the error of a rank whose tp is its own, or that of all others."""
    try:
        ParallelDims(tp=degrees.get(rank, others)).build_mesh()
    except (MeshError, ParallelDimsError) as error:
        return str(error)
    return "built"


def test_ranks_with_different_degrees_all_raise_and_say_what_each_has(ranks: Pool) -> None:
    messages = ranks(4).run(build_what_differs, {0: 4}, 2)
    assert all(message.startswith("ranks build different meshes") for message in messages)
    assert ["'tp': 4" in message for message in messages] == [True, False, False, False]


def test_a_rank_whose_degrees_are_illegal_alone_keeps_no_other_waiting(ranks: Pool) -> None:
    illegal = "tp=3 does not divide world_size=4; use 1, 2 or 4"
    first, *others = ranks(4).run(build_what_differs, {0: 3}, 2, timeout=20)
    assert first == illegal
    assert all(message.startswith("ranks build different meshes") for message in others)
    assert ranks(4).run(build_what_differs, {}, 3, timeout=20) == [illegal] * 4


def test_a_mesh_is_typed_for_its_users() -> None:
    with fake_world(2):
        mesh: ParallelMesh = ParallelDims(tp=2).build_mesh()
        assert isinstance(mesh, ParallelMesh)
        assert mesh.dims == ParallelDims(tp=2, world_size=2)
