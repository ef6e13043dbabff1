"""Shapes of published models, and every wrong number of a shape, a cluster or a run."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from hp_mesh import ParallelDims, ParallelDimsError, planner
from hp_mesh.planner import ACCELERATORS, MODELS, Accelerator, Cluster, ModelShape, TrainSpec

from .plan_strategies import shapes


# In billions, from the models' own papers and pages; those of tokens in use with embeddings.
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama3-8b", 8.03, 8.03),
        ("llama3-70b", 70.6, 70.6),
        ("llama3-405b", 405, 405),
        ("gpt-22b", 22, 22),
        ("gpt-175b", 175, 175),
        ("gpt-530b", 530, 530),
        ("gpt-1t", 1008, 1008),
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141, 39),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("llama4-scout", 109, 17),
        ("llama4-maverick", 400, 17),
        ("deepseek-v3", 671, 37.5),
    ],
)
def test_a_published_shape_has_its_published_number_of_parameters(
    name: str, total: float, active: float
) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(total, rel=0.02)
    assert MODELS[name].active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_latent_attention_is_counted_within_what_its_note_says() -> None:
    model = MODELS["deepseek-v3"]
    assert model.parameters / 1e9 == pytest.approx(671, rel=0.01)
    assert 1.0 <= model.active_parameters / 37e9 <= 1.12


@settings(deadline=None, max_examples=50)
@given(model=shapes())
def test_parameters_are_dense_ones_and_experts_and_a_token_uses_no_more(model: ModelShape) -> None:
    assert model.parameters == model.dense_parameters + model.expert_parameters
    assert model.active_parameters <= model.parameters
    assert (model.expert_parameters > 0) == (model.experts > 0)
    assert not ParallelDims(world_size=1).check(model.to_config(), 64, 8).errors
    assert not ParallelDims(world_size=1).check(model.to_config(), 64, 8).skipped


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"layers": 0, "hidden": 1.5, "heads": True}, ["layers", "hidden", "heads"]),
        ({"hidden": 100, "heads": 3}, ["head_dim"]),
        ({"kv_heads": 5}, ["kv_heads"]),
        ({"experts": 4, "top_k": 5}, ["top_k"]),
        ({"experts": 4, "top_k": 1, "dense_layers": 2}, ["dense_layers"]),
        ({"top_k": 2, "shared_ffn": 8}, ["top_k", "shared_ffn"]),
        ({"glu": "x", "tied": 2}, ["glu", "tied"]),
        ({"layers": 2**32 + 1, "hidden": 10**5000}, ["layers", "hidden"]),
        ({"layers": 100_001}, ["layers"]),
    ],
)
def test_all_wrong_numbers_of_a_shape_are_named(change: dict[str, Any], names: list[str]) -> None:
    fields = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 64} | change
    with pytest.raises(ParallelDimsError) as caught:
        ModelShape(**fields)
    assert [name for v in caught.value.violations for name in v.values] == names


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (
            {"world_size": 0, "accelerator": "TPU", "intra_gbs": -1, "inter_us": float("nan")},
            ["world_size", "inter_us", "intra_gbs", "accelerator"],
        ),
        (
            {
                "world_size": 8,
                "accelerator": Accelerator(name="X", memory_gib=1, tflops=1, hbm_gbs=1),
            },
            ["intra_gbs", "inter_gbs"],
        ),
    ],
)
def test_all_wrong_numbers_of_a_cluster_are_named(fields: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ParallelDimsError) as caught:
        Cluster(**fields)
    assert [name for v in caught.value.violations for name in v.values] == names


def test_the_usual_bandwidths_are_those_of_the_present_accelerator() -> None:
    first = Cluster(world_size=8, accelerator="H100", inter_gbs=30)
    second = replace(first, accelerator="A100")
    assert second == Cluster(world_size=8, accelerator="A100", inter_gbs=30)
    assert [each.fast.bandwidth / 1e9 for each in (first, second)] == [450, 300]
    assert second.slow.bandwidth / 1e9 == 30


def test_all_wrong_numbers_of_a_run_are_named() -> None:
    wrong: dict[str, Any] = {
        "seq_len": 0,
        "global_batch": "8",
        "micro_batch": -1,
        "fused": "no",
        "float8": "no",
        "recompute": "some",
        "schedule": "gpipe",
        "memory_fraction": 1.5,
    }
    with pytest.raises(ParallelDimsError) as caught:
        TrainSpec(**wrong)
    assert {name for v in caught.value.violations for name in v.values} == {*wrong}
    with pytest.raises(ParallelDimsError, match="virtual_stages=2 given; use 1, or schedule"):
        TrainSpec(seq_len=8, global_batch=8, virtual_stages=2)
    with pytest.raises(
        ParallelDimsError, match="recompute_layers=4 given; use None, or another recompute"
    ):
        TrainSpec(seq_len=8, global_batch=8, recompute="none", recompute_layers=4)


@pytest.mark.parametrize(
    "fields",
    [
        {"nope_dim": 8, "rope_dim": 8},
        {"query_latent": 8},
        {"latent": 8, "query_latent": 8},
        {"latent": 8, "rope_dim": 8},
    ],
)
def test_sizes_of_latent_attention_without_those_that_they_belong_to_are_refused(
    fields: dict[str, Any],
) -> None:
    whole: dict[str, Any] = {"latent": 8, "nope_dim": 8, "rope_dim": 8, "query_latent": 8}
    sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 64, "vocab": 8}
    assert ModelShape(**sizes, **whole).latent == 8
    missing = "nope_dim" if "latent" in fields else "latent"
    with pytest.raises(ParallelDimsError, match=rf"=8 given; use 0, or give {missing}"):
        ModelShape(**sizes, **fields)


def test_all_wrong_numbers_of_an_accelerator_are_named() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        Accelerator(name="X", memory_gib=0, tflops=float("inf"), tflops_fp8=-1, hbm_gbs=1)
    names = [name for v in caught.value.violations for name in v.values]
    assert names == ["memory_gib", "tflops", "tflops_fp8"]
    with pytest.raises(ParallelDimsError, match=r"hbm_gbs=.* given; use at most 4294967296"):
        Accelerator(name="X", memory_gib=1, tflops=1, hbm_gbs=10**400)


@pytest.mark.parametrize("name", [["x"], {"a": 1}, 5, "", None])
def test_an_accelerator_has_a_name(name: Any) -> None:
    with pytest.raises(ParallelDimsError, match=r"name=.* given; use a word"):
        Accelerator(name=name, memory_gib=1, tflops=1, hbm_gbs=1)


def test_an_accelerator_may_be_given_by_name() -> None:
    for name in ("H100", "h100"):
        assert Cluster(world_size=1, accelerator=name).accelerator == ACCELERATORS["H100"]


def test_a_rule_that_reads_a_field_which_shapes_lack_is_an_error_at_import() -> None:
    root = planner.__name__.rpartition(".")[0]
    code = f"""if True:
        import {root}._rules as rules
        from dataclasses import replace
        rules.RULES += (replace(rules.RULES[0], fields=("kernels",)),)
        try:
            import {root}.planner
        except TypeError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == "rules read kernels, which ModelShape lacks"


def test_sizes_of_axes_are_those_of_the_layout() -> None:
    from hp_mesh.planner._configuration import degrees_of

    dims = ParallelDims(
        pp=2, dp_replicate=3, dp_shard=4, cp=6, tp=2, ep=4, etp=2, ulysses_degree=3, world_size=288
    )
    layout, degrees = dims.layout(), degrees_of(dims)
    for name, axis in {"dp": "dp", "fsdp": "fsdp", "efsdp": "efsdp", "ring": "cp_outer"}.items():
        assert getattr(degrees, name) == layout.size(axis)
    assert degrees.world == layout.world_size


def test_nodes_that_the_devices_do_not_fill_are_refused() -> None:
    message = "^ranks_per_node=7 does not divide world_size=64; use 1, 2, 4, 8, 16, 32 or 64$"
    with pytest.raises(ParallelDimsError, match=message):
        Cluster(world_size=64, accelerator="h100", ranks_per_node=7)
    for world, node in (64, 4), (4, 16), (8, 8):
        Cluster(world_size=world, accelerator="h100", ranks_per_node=node)
    Cluster(world_size=60, accelerator="h100")  # the last node has four devices
