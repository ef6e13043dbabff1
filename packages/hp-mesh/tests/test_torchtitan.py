"""What torchtitan's own tests of its ``ParallelDims`` ask, asked of this one.

After tests/unit_tests/test_parallel_dims.py of pytorch/torchtitan. If the answer differs, the page
"coming from other libraries" of the documentation lists the difference. Its tests of placements and
of FSDP on one GPU are not about degrees and meshes.
"""

from typing import Any

import pytest

from hp_mesh import LayoutError, ParallelDims, ParallelDimsError

from .fakes import fake_world

ONES = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
EIGHT = {**ONES, "dp_replicate": 2, "dp_shard": 2, "tp": 2, "world_size": 8}


def make(**degrees: Any) -> ParallelDims:
    return ParallelDims(**degrees)


@pytest.mark.parametrize("name", EIGHT)
def test_degrees_are_kept_as_given(name: str) -> None:
    assert getattr(make(**EIGHT), name) == EIGHT[name]


def test_a_configuration_with_torchtitan_s_names_is_read() -> None:
    config = {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": -1,
        "context_parallel_degree": 1,
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 1,
        "expert_parallel_degree": 1,
    }
    assert ParallelDims.from_config(config, world_size=8) == make(**EIGHT)


def test_dp_shard_of_minus_one_takes_what_is_left() -> None:
    assert make(**{**EIGHT, "dp_shard": -1}).dp_shard == 2


@pytest.mark.parametrize(
    "change",
    [{"world_size": 10}, {"dp_replicate": 0}, {"dp_shard": 0}, {"tp": 0}, {"dp_shard": -2}],
)
def test_degrees_that_make_no_world_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ParallelDimsError):
        make(**{**EIGHT, **change})


@pytest.mark.parametrize(
    ("degrees", "enabled"),
    [
        (
            {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
            {"dp", "dp_replicate", "dp_shard", "tp", "fsdp"},
        ),
        ({"cp": 2}, {"cp", "fsdp"}),
        ({"dp_shard": 2, "ep": 2}, {"dp", "dp_shard", "ep", "fsdp"}),
        ({"pp": 2}, {"pp"}),
        ({}, set()),
    ],
)
def test_what_is_enabled(degrees: dict[str, int], enabled: set[str]) -> None:
    dims = make(**{**ONES, **degrees})
    names = ("dp", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "fsdp")
    assert {name for name in names if getattr(dims, f"{name}_enabled")} == enabled
    # Its dp_cp_enabled is whether the loss is summed over several ranks.
    assert (dims.layout().size("loss") > 1) == bool(enabled & {"dp", "cp"})


def test_ranks_that_see_the_same_samples() -> None:
    assert make(dp_replicate=2, dp_shard=2, cp=2, tp=3, pp=2, world_size=48).non_dp_size == 12


def test_what_a_sequence_must_be_a_multiple_of() -> None:
    assert make(dp_replicate=2, dp_shard=1, cp=2, tp=4, world_size=16).seq_len_divisor == 16
    # Without cp no sequence is cut for causal balance: torchtitan says 4.
    assert make(**EIGHT).seq_len_divisor == 2


def test_an_unknown_name_of_a_mesh_is_a_value_error() -> None:
    unknown = pytest.raises(ValueError, match="no axis 'invalid_mesh'")
    with fake_world(1), make(**ONES).build_mesh("cpu") as mesh, unknown:
        mesh["invalid_mesh"]


NAMES = ("pp", "batch", "loss", "dp_replicate", "fsdp", "cp", "tp", "ep", "efsdp")


@pytest.mark.parametrize("key", [*NAMES, ["dp_replicate", "fsdp"], ["dp_replicate", "efsdp"]])
def test_meshes_of_a_single_rank(key: Any) -> None:
    with fake_world(1), make(**ONES).build_mesh("cpu") as mesh:
        assert mesh[key].size() == 1
        assert mesh.get_optional_mesh(key) is None


def test_no_mesh_of_a_single_rank_has_several() -> None:
    with fake_world(1), make(**ONES).build_mesh("cpu") as mesh:
        assert [name for name in mesh.names if mesh[name].size() > 1] == []
        assert mesh.view("base").size() == 1


def test_experts_take_ranks_of_data_parallelism() -> None:
    assert make(**{**ONES, "dp_shard": 2, "ep": 2, "world_size": 2}).ep_enabled
    # torchtitan takes this at construction.
    with pytest.raises(ParallelDimsError, match="ep=3 does not divide"):
        make(**{**ONES, "dp_replicate": 2, "dp_shard": 2, "ep": 3, "world_size": 4})


def test_meshes_of_eight_ranks() -> None:
    with fake_world(8), make(**EIGHT).build_mesh("cpu") as mesh:
        sizes = {"pp": 1, "batch": 4, "loss": 4, "dp_replicate": 2, "fsdp": 2, "cp": 1, "tp": 2}
        sizes |= {"ep": 1, "efsdp": 4}
        assert {name: mesh[name].size() for name in sizes} == sizes
        assert mesh.view("base").size() == 8
        assert mesh[["dp_replicate", "fsdp"]].shape == (2, 2)
        assert mesh[["dp_replicate", "fsdp"]].ndim == 2
        for name in ("tp", "dp_replicate", "fsdp", "batch", "loss"):
            assert mesh.get_optional_mesh(name) is not None
        for name in ("pp", "cp", "ep"):
            assert mesh.get_optional_mesh(name) is None
        # torchtitan has efsdp only where ep is above 1.
        efsdp = mesh.get_optional_mesh(["dp_replicate", "efsdp"])
        assert efsdp is not None
        assert efsdp.shape == (2, 4)
        several = {name for name in mesh.names if mesh[name].size() > 1}
        assert {"dp_replicate", "fsdp", "tp", "batch", "loss", "efsdp"} <= several
        assert not several & {"pp", "cp", "ep"}
        dims = mesh.dims
        assert (dims.non_dp_size, dims.fsdp_enabled, dims.ep_enabled) == (2, True, False)


def test_dense_views_with_and_without_the_fold_of_fsdp() -> None:
    with fake_world(8), make(**EIGHT).build_mesh("cpu") as mesh:
        folded = mesh["dp_replicate", "fsdp", "tp"]
        assert (folded.mesh_dim_names, folded.shape) == (("dp_replicate", "fsdp", "tp"), (2, 2, 2))
        apart = mesh["dp_replicate", "dp_shard", "tp"]
        assert apart.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
        # Layouts may not mix axes of the dense and the sparse view.
        with pytest.raises(LayoutError, match="no view has all of"):
            mesh["dp", "ep"]
