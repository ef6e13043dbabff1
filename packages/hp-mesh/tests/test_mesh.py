"""Torch meshes on fake groups: what each name resolves to, and what is refused."""

import copy
import tracemalloc
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import profile
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_mesh import LayoutError, MeshError, ParallelDims, ParallelDimsError, ParallelMesh

from .fakes import fake_world
from .strategies import dims


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
    calls: list[str] = []
    with fake_world(64):
        mesh = ParallelDims(tp=4, ep=8).build_mesh()
        for names in ("tp", "batch", ("dp_replicate", "fsdp")):
            assert mesh[names] is mesh[names]
            calls.clear()
            profile(
                partial(mesh.__getitem__, names), lambda frame, event, function: calls.append(event)
            )
            assert 1 <= sum(event.endswith("call") for event in calls) <= 12


def test_a_view_knows_its_folds_after_a_lookup_that_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(group: dist.ProcessGroup) -> list[int]:
        raise KeyboardInterrupt

    with fake_world(16):
        mesh = ParallelDims(dp_replicate=2, cp=2, tp=2, ep=4).build_mesh()
        with monkeypatch.context() as patch:
            patch.setattr(dist, "get_process_group_ranks", interrupted)
            with pytest.raises(KeyboardInterrupt):
                mesh.view("dense")
        assert "_alias_groups" not in vars(mesh._view("dense"))
        assert vars(mesh.view("dense"))["_alias_groups"]  # what hp-dtensor reads


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


def test_several_axes_may_come_in_a_list() -> None:
    with fake_world(16):
        mesh = ParallelDims(dp_replicate=2, tp=2).build_mesh()
        assert mesh[["dp_replicate", "fsdp"]] is mesh["dp_replicate", "fsdp"]
        assert mesh[["tp"]] == mesh["tp"]
        with pytest.raises(LayoutError, match=r"no axis given"):
            mesh[[]]


@pytest.mark.parametrize("names", [None, 0, ("tp", 0), ["tp", None], {"tp"}, ("tp", []), b"tp"])
def test_what_is_no_name_is_refused(names: Any) -> None:
    with fake_world(4):
        mesh = ParallelDims(tp=2).build_mesh()
        with pytest.raises(LayoutError, match=r"^mesh\[.*\] given; use the name of an axis"):
            mesh[names]


@pytest.mark.parametrize("names", [("pp", "tp"), ("tp",), ["tp"], None, 0])
def test_a_group_is_that_of_one_name(names: Any) -> None:
    with fake_world(4):
        mesh = ParallelDims(tp=2).build_mesh()
        with pytest.raises(LayoutError, match=r"is not of one axis; give one name, .* pp, "):
            mesh.group(names)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"topology": 4}, r"^topology=4 is not a Topology; use Topology\(ranks_per_node=\.\.\.\)"),
        ({"timeout": 5}, r"^timeout=5 is not a timedelta; use timedelta\(seconds=\.\.\.\)"),
        ({"timeout": timedelta(0)}, r"^timeout=0:00:00 is not positive"),
    ],
)
def test_settings_of_another_kind_are_refused(settings: dict[str, Any], message: str) -> None:
    with fake_world(4), pytest.raises(MeshError, match=message):
        ParallelDims(tp=2).build_mesh(**settings)


def test_views_of_a_large_world_and_their_slices_share_their_ranks() -> None:
    world = 16384
    with fake_world(world):
        dims = ParallelDims(dp_replicate=2, cp=4, tp=8, pp=4, ep=16, world_size=world)
        tracemalloc.start()
        try:
            mesh = dims.build_mesh()
            slices = [mesh[name] for name in mesh.names]
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # Each view and each slice comes with a tuple of all ranks. One of them is 36 bytes a rank,
        # and 20 MB at 131072 ranks are 152.
        assert len(slices) > 15
        assert held < 152 * world


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


@pytest.mark.parametrize("again", [False, True])
def test_closing_after_the_default_group_was_destroyed_leaves_what_is_gone(again: bool) -> None:
    with fake_world(4):
        mesh = ParallelDims(tp=2).build_mesh()
        other = ParallelDims(tp=2).build_mesh()
        dist.destroy_process_group(other.group("tp"))
        other.close()
    with fake_world(4) if again else nullcontext():
        mesh.close()
        assert dist.is_initialized() == again
        with pytest.raises(MeshError, match="closed"):
            mesh["tp"]


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


def test_a_mesh_is_typed_for_its_users() -> None:
    with fake_world(2):
        mesh: ParallelMesh = ParallelDims(tp=2).build_mesh()
        assert isinstance(mesh, ParallelMesh)
        assert mesh.dims == ParallelDims(tp=2, world_size=2)


def test_the_mesh_of_the_name_batch_has_that_name() -> None:
    with fake_world(16, 5):
        mesh = ParallelDims(dp_replicate=2, cp=2, tp=2, ep=4).build_mesh()
        batch = mesh["batch"]
        assert batch.mesh_dim_names == ("batch",)
        assert batch.get_group("batch") is mesh.group("batch") is mesh.group("dp")
        assert batch.mesh.tolist() == mesh["dp"].mesh.tolist() == [1, 5, 9, 13]
        assert batch.get_local_rank("batch") == mesh["dp"].get_local_rank()
        assert batch.device_type == mesh.device_type
        assert mesh["batch"] is batch


def test_an_axis_of_one_rank_has_no_optional_mesh() -> None:
    with fake_world(16, 5):
        mesh = ParallelDims(cp=2, tp=2).build_mesh()
        for name in mesh.names:
            found = mesh.get_optional_mesh(name)
            assert found is (mesh[name] if mesh.layout.size(name) > 1 else None)
        assert mesh.get_optional_mesh("pp") is None
        assert mesh.get_optional_mesh("tp") is mesh["tp"]
        assert mesh.get_optional_mesh(("fsdp", "tp")) is mesh["fsdp", "tp"]
        assert mesh.get_optional_mesh(["dp_replicate", "fsdp"]) is None
        with pytest.raises(LayoutError, match=r"no axis 'dq'; use pp, "):
            mesh.get_optional_mesh("dq")
        with pytest.raises(LayoutError, match=r"fsdp is in dense, cp is in base"):
            mesh.get_optional_mesh(("fsdp", "cp"))
        mesh.close()
        for name in ("pp", "tp"):
            with pytest.raises(MeshError, match="closed"):
                mesh.get_optional_mesh(name)


def test_a_mesh_shows_its_axes_and_their_sizes() -> None:
    with fake_world(8):
        mesh = ParallelDims(dp_shard=2, cp=2, tp=2).build_mesh()
        axes = "pp=1, dp_replicate=1, dp_shard=2, cp=2, tp=2"
        assert repr(mesh) == f"ParallelMesh({axes}; 8 ranks, on cpu)"
        mesh.close()
        assert repr(mesh) == f"ParallelMesh({axes}; 8 ranks, closed)"


def test_a_module_with_a_mesh_is_copied_and_its_mesh_shares_the_groups() -> None:
    with fake_world(8, 3):
        mesh = ParallelDims(tp=2, world_size=8).build_mesh()
        module = nn.Linear(2, 2)
        module.mesh = mesh  # type: ignore[assignment]
        copied: list[Any] = copy.deepcopy([module, mesh])
        assert isinstance(copied[0].mesh, ParallelMesh)
        assert copied[0].mesh is copied[1]
        assert copied[1].group("tp") is mesh.group("tp")
        copied[1].close()
        assert dist.get_process_group_ranks(mesh.group("tp")) == [2, 3]
        mesh.close()
        assert copy.deepcopy(mesh)._closed


def test_names_of_a_mesh_can_be_tested_for() -> None:
    with fake_world(8):
        mesh = ParallelDims(tp=2).build_mesh()
        assert "tp" in mesh
        assert "batch" in mesh
        assert "ulysses" not in mesh
        assert 0 not in mesh
        with pytest.raises(LayoutError, match=r"given, one of them twice; use each"):
            mesh["tp", "tp"]


def test_a_view_of_any_other_type_is_refused() -> None:
    with fake_world(4), ParallelDims(tp=2).build_mesh() as mesh:
        for name in (["base"], None, {"base"}):
            with pytest.raises(LayoutError, match="no view"):
                mesh.view(name)  # type: ignore[arg-type]
