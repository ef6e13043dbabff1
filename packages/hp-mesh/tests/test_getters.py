"""Getters: which ranks each gives, from world meshes, from parallel meshes and from torch's."""

from math import prod
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from hp_mesh import LayoutError, ParallelDims
from hp_mesh._torch import registered_groups
from hp_mesh.world import (
    HybridShard,
    MeshAxisName,
    build_world_mesh,
    flatten_mesh,
    get_cp_mesh,
    get_device_mesh_info,
    get_dp_mesh,
    get_dp_model_mesh,
    get_dp_process_group,
    get_dp_replicate_mesh,
    get_dp_shard_mesh,
    get_ep_mesh,
    get_pp_mesh,
    get_pp_stage_mesh,
    get_tp_mesh,
)

from .worlds import no_new_groups, one_world, peers, plain, shapes

GETTERS = (
    get_dp_model_mesh,
    get_dp_mesh,
    get_dp_shard_mesh,
    get_dp_replicate_mesh,
    get_ep_mesh,
    get_tp_mesh,
    get_cp_mesh,
    get_pp_mesh,
    get_pp_stage_mesh,
)


@given(shapes())
@settings(deadline=None, max_examples=40)
def test_with_hsdp_every_getter_gives_its_ranks(drawn: tuple[dict[str, int], int]) -> None:
    shape, rank = drawn
    data = HybridShard(replicas=shape["dp_replicate"], shard_degree=shape["dp_shard"])
    with one_world(prod(shape.values()), rank):
        world = build_world_mesh(dp=data, tp=shape["tp"], cp=shape["cp"], pp=shape["pp"])
        for mesh, along in {
            get_dp_model_mesh(world): ("dp_replicate", "dp_shard", "cp"),
            get_dp_mesh(world): ("dp_replicate", "dp_shard"),
            get_dp_shard_mesh(world): ("dp_shard", "cp"),
            get_dp_replicate_mesh(world): ("dp_replicate",),
            get_cp_mesh(world): ("cp",),
            get_tp_mesh(world): ("tp",),
            get_pp_mesh(world): ("pp",),
            get_pp_stage_mesh(world): ("dp_replicate", "dp_shard", "cp", "tp"),
            world.device_mesh: tuple(shape),
        }.items():
            assert mesh.mesh.flatten().tolist() == peers(shape, rank, along)
        model = get_dp_model_mesh(world)
        assert model.shape == (shape["dp_replicate"], shape["dp_shard"] * shape["cp"])
        assert model.mesh_dim_names == ("dp_replicate", "fsdp")
        for axis, mesh in enumerate((get_dp_replicate_mesh(world), get_dp_shard_mesh(world))):
            assert model.get_group(axis) == mesh.get_group()
        assert world.device_mesh.shape == tuple(shape.values())
        assert get_pp_stage_mesh(world).shape == tuple(shape.values())[1:]


@given(shapes(), st.booleans())
@settings(deadline=None, max_examples=40)
def test_with_flat_data_parallelism_every_getter_gives_its_ranks(
    drawn: tuple[dict[str, int], int], inferred: bool
) -> None:
    shape = {"dp" if name == "dp_shard" else name: size for name, size in drawn[0].items()}
    shape["dp"] *= shape.pop("dp_replicate")
    rank = drawn[1]
    with one_world(prod(shape.values()), rank):
        degree = -1 if inferred else shape["dp"]
        world = build_world_mesh(dp=degree, tp=shape["tp"], cp=shape["cp"], pp=shape["pp"])
        for mesh, along in {
            get_dp_model_mesh(world): ("dp", "cp"),
            get_dp_mesh(world): ("dp",),
            get_cp_mesh(world): ("cp",),
            get_tp_mesh(world): ("tp",),
            get_pp_mesh(world): ("pp",),
            get_pp_stage_mesh(world): ("dp", "cp", "tp"),
        }.items():
            assert mesh.mesh.flatten().tolist() == peers(shape, rank, along)
        assert get_dp_model_mesh(world).shape == (shape["dp"] * shape["cp"],)
        for getter in (get_dp_shard_mesh, get_dp_replicate_mesh):
            with pytest.raises(ValueError, match=f"^{getter.__name__} needs .* has pp, dp, cp and"):
                getter(world)


@given(shapes(), st.data())
@settings(deadline=None, max_examples=40)
def test_experts_are_no_further_axis_and_never_repeat_data(
    drawn: tuple[dict[str, int], int], data: st.DataObject
) -> None:
    shape, rank = drawn
    block = shape["dp_shard"] * shape["cp"]
    ep = data.draw(st.sampled_from([n for n in range(1, block + 1) if block % n == 0]))
    hybrid = HybridShard(replicas=shape["dp_replicate"])
    with one_world(prod(shape.values()), rank):
        world = build_world_mesh(dp=hybrid, tp=shape["tp"], cp=shape["cp"], pp=shape["pp"], ep=ep)
        experts = get_ep_mesh(world).mesh.tolist()
        assert len(experts) == ep
        assert {*experts} <= {*peers(shape, rank, ("dp_shard", "cp"))}
        samples = get_dp_mesh(world).mesh.tolist()
        assert samples == peers(shape, rank, ("dp_replicate", "dp_shard"))
        assert world.device_mesh.shape == tuple(shape.values())
        if shape["cp"] == 1 and ep == shape["dp_shard"]:
            assert experts == peers(shape, rank, ("dp_shard",))


def test_the_data_parallel_group_exists_after_the_build() -> None:
    with one_world(16, 3):
        world = build_world_mesh(dp=HybridShard(replicas=2), tp=2, pp=2)
        before = registered_groups()
        group = get_dp_process_group(world)
        assert registered_groups() == before
        assert dist.get_process_group_ranks(group) == [1, 3, 5, 7]


def test_every_axis_name_indexes_the_meshes() -> None:
    with one_world(8):
        world = build_world_mesh(dp=HybridShard(replicas=2), tp=2, ep=2)
        for name in MeshAxisName:
            assert world.mesh[name].size() == world.mesh.layout.size(str(name))
    names = "pp dp dp_replicate dp_shard dp_ep dp_cp ep ep_replicate ep_shard tp cp"
    assert " ".join(MeshAxisName) == names


def test_looking_up_creates_no_group() -> None:
    with one_world(64):
        world = build_world_mesh(dp=HybridShard(replicas=2), tp=2, cp=2, pp=2, ep=2)
        mesh = plain(pp=2, dp_replicate=2, dp_shard=4, ep=1, tp=4)
        before = registered_groups()
        with no_new_groups():
            for getter in GETTERS:
                getter(world)
                getter(world.mesh)
            get_dp_process_group(world)
            for getter in (get_dp_replicate_mesh, get_ep_mesh, get_tp_mesh, get_pp_stage_mesh):
                getter(mesh)
            for getter in (get_dp_model_mesh, get_dp_mesh, get_dp_shard_mesh):
                with pytest.raises(LayoutError, match="flatten_mesh"):
                    getter(mesh)
            with pytest.raises(AssertionError, match="a group was created"):
                flatten_mesh(mesh["dp_replicate", "dp_shard"])
        assert registered_groups() == before


def test_an_absent_axis_is_an_error_that_names_those_present() -> None:
    with one_world(8):
        for mesh in (build_world_mesh(), plain(dp=8), ParallelDims().build_mesh()):
            for getter in GETTERS[2:]:
                with pytest.raises(LayoutError, match=r"_mesh needs .*; this mesh has dp$"):
                    getter(mesh)
            assert getter is get_pp_stage_mesh
        for getter in (get_dp_model_mesh, get_dp_mesh):
            with pytest.raises(LayoutError, match=r"needs dp.* or ep_.*; this mesh has pp and tp$"):
                getter(plain(pp=2, tp=4))
        with pytest.raises(LayoutError, match="this mesh has pp alone"):
            get_pp_stage_mesh(plain(pp=8))
        with pytest.raises(LayoutError, match=r"mesh of shape \(8,\) has no axis names"):
            get_dp_mesh(init_device_mesh("cpu", (8,)))


def test_without_experts_no_axis_passes_for_theirs() -> None:
    with one_world(8):
        world = build_world_mesh(dp=HybridShard(replicas=2))
        with pytest.raises(LayoutError, match=r"^get_ep_mesh needs ep or ep_shard; this mesh has "):
            get_ep_mesh(world)
        with pytest.raises(LayoutError, match=r"has dp_replicate and dp_shard$"):
            get_ep_mesh(plain(dp_replicate=2, dp_shard=4))


def test_a_parallel_mesh_has_the_axes_of_several_ranks() -> None:
    with one_world(16, 6):
        mesh = ParallelDims(dp_replicate=2, cp=2, tp=2, ep=2).build_mesh()
        assert get_dp_model_mesh(mesh) is mesh["replicate", "fsdp"]
        assert get_dp_mesh(mesh) is mesh["dp"]
        assert get_dp_shard_mesh(mesh) is mesh["fsdp"]
        assert get_tp_mesh(mesh) is mesh["tp"]
        assert get_ep_mesh(mesh) is mesh["ep"]
        with pytest.raises(LayoutError, match=r"has dp_replicate, dp_shard, ep, cp and tp$"):
            get_pp_mesh(mesh)
        flat = ParallelDims(cp=2, pp=2).build_mesh()
        assert get_dp_model_mesh(flat) is flat["fsdp"]
        assert get_pp_stage_mesh(flat) is flat["dp", "cp"]


def test_experts_that_are_an_axis_of_their_own_belong_to_a_stage() -> None:
    with one_world(16):
        mesh = ParallelDims(dp_replicate=2, pp=2, ep=2, ep_mode="peer").build_mesh()
        assert get_pp_stage_mesh(mesh).mesh.flatten().tolist() == [*range(8)]
        assert get_dp_mesh(mesh).size() == 8
        mesh = ParallelDims(pp=2, ep=2, ep_mode="peer").build_mesh()
        assert get_pp_stage_mesh(mesh).mesh.flatten().tolist() == [*range(8)]


def test_cp_that_is_not_folded_into_the_sharding_is_folded_into_the_replicas() -> None:
    with one_world(8):
        mesh = ParallelDims(cp=2, fsdp_folds_cp=False).build_mesh()
        assert get_dp_model_mesh(mesh).shape == (2, 4)
        assert get_dp_model_mesh(mesh).mesh.flatten().sort().values.tolist() == [*range(8)]


@pytest.mark.parametrize("mesh", [None, "tp", 4, object()])
@pytest.mark.parametrize("getter", [*GETTERS, get_dp_process_group, get_device_mesh_info])
def test_what_is_no_mesh_is_refused_with_the_kinds_that_are(getter: Any, mesh: object) -> None:
    kinds = "use a WorldMesh, a ParallelMesh or a torch DeviceMesh"
    with pytest.raises(LayoutError, match=f" given for a mesh; {kinds}$"):
        getter(mesh)


def test_one_line_says_axes_and_sizes_whose_product_is_the_world() -> None:
    with one_world(8):
        world = build_world_mesh(dp=HybridShard(replicas=2), tp=2, ep=2)
        line = "mesh of 8 ranks on cpu: dp_replicate=2, dp_shard=2, tp=2; ep=2 on the same ranks"
        assert get_device_mesh_info(world) == line
        assert get_device_mesh_info(world.mesh) == line
        assert get_device_mesh_info(get_tp_mesh(world)) == "mesh of 2 ranks on cpu: tp=2"
        unnamed = init_device_mesh("cpu", (2, 4))
        assert get_device_mesh_info(unnamed) == "mesh of 8 ranks on cpu: axis 0=2, axis 1=4"
        peers = ParallelDims(dp_replicate=2, ep=2, ep_mode="peer").build_mesh()
        line = "mesh of 8 ranks on cpu: dp_replicate=2, dp_shard=2, ep=2"
        assert get_device_mesh_info(peers) == line
