"""Torch's own meshes: getters slice them, and folds are left to `flatten_mesh`."""

import re
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_mesh import LayoutError
from hp_mesh.world import (
    HybridShard,
    build_world_mesh,
    flatten_mesh,
    get_dp_mesh,
    get_dp_model_mesh,
    get_dp_replicate_mesh,
    get_dp_shard_mesh,
    get_pp_mesh,
    get_pp_stage_mesh,
    get_tp_mesh,
)

from .worlds import no_new_groups, one_world, peers, plain, shapes


@given(shapes())
@settings(deadline=None, max_examples=30)
def test_slices_of_a_torch_mesh_equal_those_of_a_world_mesh(
    drawn: tuple[dict[str, int], int],
) -> None:
    shape, rank = drawn
    del shape["cp"]
    rank %= prod(shape.values())
    with one_world(prod(shape.values()), rank):
        mesh = plain(**shape)
        hybrid = HybridShard(replicas=shape["dp_replicate"])
        world = build_world_mesh(dp=hybrid, pp=shape["pp"], tp=shape["tp"])
        for getter in (
            get_dp_model_mesh,
            get_dp_shard_mesh,
            get_dp_replicate_mesh,
            get_tp_mesh,
            get_pp_mesh,
            get_pp_stage_mesh,
        ):
            assert getter(mesh).mesh.tolist() == getter(world).mesh.tolist()
        fold = flatten_mesh(mesh["dp_replicate", "dp_shard"], "dp")
        assert fold.mesh.tolist() == get_dp_mesh(world).mesh.tolist()
        assert dist.get_process_group_ranks(fold.get_group()) == fold.mesh.tolist()


@pytest.mark.parametrize(
    ("getter", "sizes", "fold"),
    [
        (get_dp_model_mesh, {"dp": 2, "cp": 4}, ("dp", "cp")),
        (get_dp_model_mesh, {"dp_replicate": 2, "dp_shard": 2, "cp": 2}, ("dp_shard", "cp")),
        (get_dp_model_mesh, {"ep_replicate": 2, "ep_shard": 4}, ("ep_replicate", "ep_shard")),
        (get_dp_shard_mesh, {"dp_replicate": 2, "dp_shard": 2, "cp": 2}, ("dp_shard", "cp")),
        (get_dp_mesh, {"dp_replicate": 2, "dp_shard": 4}, ("dp_replicate", "dp_shard")),
        (get_dp_mesh, {"dp": 2, "ep": 4}, ("dp", "ep")),
        (get_dp_mesh, {"cp": 2, "ep": 2, "dp": 2}, ("ep", "dp")),
    ],
)
def test_a_fold_of_a_torch_mesh_is_left_to_flatten_mesh_and_the_error_says_how(
    getter: Callable[[DeviceMesh], DeviceMesh], sizes: dict[str, int], fold: tuple[str, ...]
) -> None:
    with one_world(8, 5):
        mesh = plain(**sizes)
        call = f"flatten_mesh(mesh[{fold[0]!r}, {fold[1]!r}])"
        with pytest.raises(LayoutError, match=re.escape(call)) as caught:
            getter(mesh)
        for name, size in sizes.items():
            assert f"{name}={size}" in str(caught.value)
        flat = flatten_mesh(mesh[fold])
        assert flat.mesh_dim_names == ("_".join(fold),)
        assert flat.mesh.tolist() == peers(sizes, 5, fold)


def test_flattening_again_creates_nothing_and_needs_names_that_are_free() -> None:
    with one_world(8):
        mesh = plain(dp=2, cp=2, tp=2)
        flat = flatten_mesh(mesh["dp", "cp"], "dp_cp")
        with no_new_groups():
            assert flatten_mesh(mesh["dp", "cp"], "dp_cp") is flat
        for name in ("tp", "dp_cp"):
            with pytest.raises(LayoutError, match=f"^name='{name}' is taken; use another .*'cp'"):
                flatten_mesh(mesh["cp", "tp"], name)
        with pytest.raises(LayoutError, match=r"mesh of shape \(2, 4\) has no axis names"):
            flatten_mesh(init_device_mesh("cpu", (2, 4)), "all")


@pytest.mark.parametrize("mesh", [None, "tp", 4])
def test_only_torch_meshes_are_flattened(mesh: Any) -> None:
    with one_world(8):
        expected = f"^flatten_mesh takes a torch DeviceMesh, not {mesh!r}$"
        with pytest.raises(LayoutError, match=expected):
            flatten_mesh(mesh)
        world: Any = build_world_mesh(dp=4, tp=2)
        for built, kind in ((world, "WorldMesh"), (world.mesh, "ParallelMesh")):
            with pytest.raises(LayoutError, match=f"not a {kind}, and this one has all its folds"):
                flatten_mesh(built)
        name: Any = 4
        with pytest.raises(LayoutError, match=r"^name=4 is no name; use a string or None"):
            flatten_mesh(plain(dp=4, tp=2), name)


def test_the_advice_on_a_missing_fold_is_what_to_use_in_its_place() -> None:
    with one_world(8, 5):
        mesh = plain(dp=2, cp=2, tp=2)
        with pytest.raises(
            LayoutError, match=r"; keep the result of flatten_mesh\(.* and use it instead"
        ):
            get_dp_model_mesh(mesh)
        mesh = plain(dp_replicate=2, dp_shard=2, cp=2)
        with pytest.raises(
            LayoutError, match=r"; use build_world_mesh, .* returns this axis alone"
        ):
            get_dp_model_mesh(mesh)


def test_a_stage_of_a_mesh_without_stages_is_refused_under_its_own_name() -> None:
    with one_world(8), pytest.raises(LayoutError, match=r"^get_pp_stage_mesh needs pp; this mesh"):
        get_pp_stage_mesh(plain(dp=8))
