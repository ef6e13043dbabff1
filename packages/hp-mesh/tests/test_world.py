"""The world mesh: how it is stored, and how its degrees are given."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_mesh import MeshError, ParallelDimsError
from hp_mesh.world import (
    HybridShard,
    build_expert_parallel_mesh,
    build_world_mesh,
    get_dp_mesh,
    get_dp_model_mesh,
    get_dp_shard_mesh,
    get_ep_mesh,
    get_tp_mesh,
    get_world_mesh,
    reset_world_mesh,
)

from .fakes import fake_world
from .worlds import one_world, peers


def test_ep_minus_one_takes_the_ranks_that_shard() -> None:
    with one_world(16, 5):
        world = build_world_mesh(dp=HybridShard(replicas=2), tp=2, ep=-1)
        assert get_ep_mesh(world).mesh.tolist() == [1, 3, 5, 7]
        assert get_ep_mesh(world).mesh.tolist() == get_dp_shard_mesh(world).mesh.tolist()


@given(st.integers(1, 12), st.integers(1, 12), st.data())
@settings(deadline=None, max_examples=30)
def test_an_expert_mesh_is_replicas_of_shards_and_all_data_parallel(
    replicas: int, degree: int, data: st.DataObject
) -> None:
    size = replicas * degree
    rank = data.draw(st.integers(0, size - 1))
    shape = {"ep_replicate": replicas, "ep_shard": degree}
    with one_world(size, rank):
        experts = build_expert_parallel_mesh(degree)
        assert experts.axes == ("ep_replicate", "ep_shard")
        assert experts.device_mesh.shape == (replicas, degree)
        assert get_ep_mesh(experts).mesh.tolist() == peers(shape, rank, ("ep_shard",))
        assert get_dp_model_mesh(experts).mesh.tolist() == [*range(size)]
        assert get_dp_model_mesh(experts).mesh_dim_names == ("dp",)
        assert get_dp_mesh(experts).mesh.tolist() == [*range(size)]
        assert get_world_mesh() is None


def test_an_expert_mesh_of_negative_degree_is_the_world() -> None:
    with one_world(6):
        assert build_expert_parallel_mesh(-1).device_mesh.shape == (1, 6)
        assert build_expert_parallel_mesh(Settings(-3)).device_mesh.shape == (1, 6)
        with pytest.raises(ParallelDimsError, match=r"ep=4 .*6"):
            build_expert_parallel_mesh(4)
        with pytest.raises(ParallelDimsError, match=r"^ep=0 is not a degree"):
            build_expert_parallel_mesh(0)


@pytest.mark.parametrize("value", ["x", None, 2.0, True, 0])
@pytest.mark.parametrize("name", ["dp", "tp", "cp", "pp", "ep"])
def test_a_value_that_is_no_degree_is_refused_under_the_name_that_it_was_given_for(
    name: str, value: Any
) -> None:
    degrees: dict[str, Any] = {"dp": 2, name: Settings(value)}
    with one_world(4):
        with pytest.raises(ParallelDimsError, match=f"^{name}={value!r} is not a degree"):
            build_world_mesh(**degrees)
        if value is not None:
            with pytest.raises(ParallelDimsError, match=f"^{name}={value!r} is not a degree"):
                build_world_mesh(**{**degrees, name: value})
        if name == "ep":
            for given in (value, Settings(value)):
                with pytest.raises(ParallelDimsError, match=f"^ep={value!r} is not a degree"):
                    build_expert_parallel_mesh(given)
        assert get_world_mesh() is None


def test_without_any_degree_all_ranks_are_data_parallel() -> None:
    with one_world(6, 4):
        world = build_world_mesh()
        assert world.axes == ("dp",)
        assert world.device_mesh.mesh_dim_names == ("dp",)
        for mesh in (get_dp_mesh(world), get_dp_model_mesh(world), world.device_mesh):
            assert mesh.mesh.tolist() == [*range(6)]


@pytest.mark.parametrize("name", ["tp", "cp", "pp", "ep"])
def test_any_degree_needs_that_of_dp(name: str) -> None:
    degrees = {name: 2}
    with one_world(4):
        with pytest.raises(ParallelDimsError, match=f"^{name}=2 given without dp; give dp too"):
            build_world_mesh(**degrees)  # type: ignore[arg-type]
        assert get_world_mesh() is None


@dataclass
class Settings:
    """What a training configuration says of one kind of parallelism."""

    degree: int


def test_a_degree_may_be_that_of_an_object() -> None:
    with one_world(16):
        world = build_world_mesh(dp=Settings(4), tp=Settings(2), pp=Settings(2), ep=Settings(2))
        assert world.axes == ("pp", "dp", "ep", "tp")
        assert world.device_mesh.shape == (2, 4, 2)
        assert get_ep_mesh(world).size() == 2


def test_one_node_with_hsdp_has_one_replica_and_both_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with one_world(4):
        assert get_dp_model_mesh(build_world_mesh(dp=HybridShard())).shape == (1, 4)
    with one_world(8, 5):
        world = build_world_mesh(dp=HybridShard(), cp=2)
        assert get_dp_model_mesh(world).shape == (2, 4)
        assert get_dp_shard_mesh(world).mesh.tolist() == [4, 5, 6, 7]


def test_degrees_that_do_not_make_the_world_are_errors_with_numbers() -> None:
    with one_world(8):
        with pytest.raises(ParallelDimsError, match=r"dp_shard\*tp=3\*2=6 is not world_size=8"):
            build_world_mesh(dp=3, tp=2)
        with pytest.raises(ParallelDimsError, match=r"tp=3 does not divide world_size=8"):
            build_world_mesh(dp=HybridShard(replicas=2), tp=3)
        with pytest.raises(
            ParallelDimsError, match=r"replicas=2 \* shard_degree=1 = 2 is not dp_s"
        ):
            build_world_mesh(dp=HybridShard(replicas=2, shard_degree=1), tp=2)
        with pytest.raises(ParallelDimsError, match=r"^replicas=4 \(one per node.* dp_size=2"):
            build_world_mesh(dp=HybridShard(ranks_per_node=2), tp=4)
        with pytest.raises(ParallelDimsError, match=r"ep=3"):
            build_world_mesh(dp=HybridShard(replicas=2), ep=3)
        assert get_world_mesh() is None


def test_there_is_one_world_mesh_until_it_is_reset() -> None:
    reset_world_mesh()
    with one_world(8):
        assert get_world_mesh() is None
        world = build_world_mesh(dp=4, tp=2)
        assert get_world_mesh() is world
        with pytest.raises(
            MeshError, match=r"already \(mesh of 8 ranks on cpu: dp=4, tp=2\); call"
        ):
            build_world_mesh(dp=8)
        assert get_world_mesh() is world
        group = get_tp_mesh(world).get_group()
        reset_world_mesh()
        assert get_world_mesh() is None
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.destroy_process_group(group)
        with pytest.raises(MeshError, match="closed"):
            get_dp_mesh(world)
        assert get_dp_mesh(build_world_mesh(dp=8)).size() == 8


def test_a_reset_after_the_default_group_is_gone_only_forgets() -> None:
    with fake_world(4):
        build_world_mesh(dp=2, tp=2)
    reset_world_mesh()
    assert get_world_mesh() is None


def test_a_reset_after_the_default_group_was_made_anew_only_forgets() -> None:
    with fake_world(4):
        build_world_mesh(dp=2, tp=2)
    with fake_world(4):
        reset_world_mesh()
        assert get_world_mesh() is None
        assert build_world_mesh(dp=2, tp=2).mesh["tp"].size() == 2
        reset_world_mesh()


def test_building_needs_a_default_process_group() -> None:
    with pytest.raises(MeshError, match="init_process_group"):
        build_world_mesh()
    with pytest.raises(MeshError, match="init_process_group"):
        build_expert_parallel_mesh(-1)


def test_a_world_mesh_that_was_closed_can_be_built_again() -> None:
    with one_world(8):
        build_world_mesh(dp=4, tp=2).mesh.close()
        assert get_tp_mesh(build_world_mesh(dp=2, tp=4)).size() == 4


def test_another_degree_than_dp_can_be_inferred() -> None:
    with one_world(8):
        assert get_tp_mesh(build_world_mesh(dp=2, tp=-1)).size() == 4


def test_a_world_mesh_of_an_older_default_group_is_refused_until_the_reset() -> None:
    with fake_world(4):
        build_world_mesh(dp=2, tp=2)
    with fake_world(4):
        with pytest.raises(MeshError, match=r"already \(.*dp=2, tp=2\); call reset_world_mesh"):
            build_world_mesh(dp=2, tp=2)
        reset_world_mesh()
        assert build_world_mesh(dp=4).axes == ("dp",)
        reset_world_mesh()


def test_any_negative_integer_means_all_ranks_for_experts() -> None:
    with fake_world(4):
        experts = build_expert_parallel_mesh(np.int64(-5))  # type: ignore[arg-type]
        assert get_ep_mesh(experts).size() == 4


def test_each_of_two_numbers_of_a_hybrid_shard_gets_its_own_advice() -> None:
    with pytest.raises(ParallelDimsError, match=r"; use replicas=4$"):
        HybridShard(replicas=3, shard_degree=2).split(8, 8)
