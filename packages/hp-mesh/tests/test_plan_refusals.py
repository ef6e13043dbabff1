"""What the planner refuses, before it estimates anything."""

from typing import Any, cast

import numpy as np
import pytest

from hp_mesh import ParallelDims, ParallelDimsError
from hp_mesh.planner import (
    MODELS,
    Cluster,
    ModelShape,
    TrainSpec,
    compare,
    estimate,
    plan,
    smallest_world,
)

GPT2 = ModelShape(layers=12, hidden=768, heads=12, ffn=3072, vocab=50304, glu=False)


def test_degrees_that_break_rules_are_refused_with_all_of_them() -> None:
    cluster = Cluster(world_size=16, accelerator="H100")
    train = TrainSpec(seq_len=1024, global_batch=8)
    with pytest.raises(ParallelDimsError) as caught:
        estimate(GPT2, cluster, train, ParallelDims(tp=8, pp=4, world_size=32))
    rules = [violation.rule for violation in caught.value.violations]
    assert rules == ["world", "heads-tp", "kv-heads-tp"]
    apart = ParallelDims(cp=2, world_size=16, fsdp_folds_cp=False)
    with pytest.raises(ParallelDimsError, match="give fsdp_folds_cp=True or cp=1"):
        estimate(GPT2, cluster, train, apart)
    with pytest.raises(ParallelDimsError, match="micro_batch=0 given; use an integer of at least"):
        estimate(GPT2, cluster, train, ParallelDims(world_size=16), micro_batch=0)
    with pytest.raises(ParallelDimsError, match="recompute='most' given; use 'none'"):
        estimate(GPT2, cluster, train, ParallelDims(world_size=16), recompute=cast(Any, "most"))


def test_causal_balance_and_parts_of_experts_are_asked_for_too() -> None:
    model = ModelShape(
        layers=2, hidden=64, heads=4, ffn=8, vocab=8, experts=2, top_k=1, expert_ffn=3
    )
    cluster = Cluster(world_size=8, accelerator="H100")
    train = TrainSpec(seq_len=8, global_batch=8)
    with pytest.raises(ParallelDimsError, match=r"2\*cp\*tp=2\*4\*2=16 does not divide seq_len=8"):
        estimate(model, cluster, train, ParallelDims(cp=4, tp=2))
    with pytest.raises(ParallelDimsError, match="etp=2 does not divide expert_ffn=3; use 1"):
        estimate(model, cluster, train, ParallelDims(tp=2, etp=2, ep=2))
    rules = {v.rule for r in plan(model, cluster, train).rejected for v in r.violations}
    assert rules >= {"sequence-balance", "expert-ffn-etp"}


def test_a_ulysses_degree_is_refused_where_the_check_refuses_it() -> None:
    cluster = Cluster(world_size=64, accelerator="H100")
    train = TrainSpec(seq_len=8192, global_batch=8)
    dims = ParallelDims(cp=64, ulysses_degree=64, world_size=64)
    (known,) = dims.check(MODELS["llama3-8b"].to_config()).errors
    with pytest.raises(ParallelDimsError, match="ulysses_degree=64 does not") as caught:
        estimate(MODELS["llama3-8b"], cluster, train, dims)
    assert caught.value.violations == [known]


def test_arguments_of_other_types_are_refused_together() -> None:
    cluster, train = Cluster(world_size=2, accelerator="H100"), TrainSpec(seq_len=8, global_batch=2)
    wrong = cast(Any, None)
    for arguments, names in (
        ((wrong, cluster, train), ["model"]),
        ((GPT2, cluster, wrong), ["train"]),
        ((wrong, wrong, wrong), ["model", "cluster", "train"]),
    ):
        with pytest.raises(ParallelDimsError, match="=None given; use a ") as caught:
            plan(*arguments)
        assert [name for v in caught.value.violations for name in v.values] == names
    with pytest.raises(ParallelDimsError, match="dims=None given; use a ParallelDims"):
        estimate(GPT2, cluster, train, wrong)
    with pytest.raises(ParallelDimsError, match="model='gpt2' given; use a ModelShape"):
        estimate(cast(Any, "gpt2"), cluster, train, ParallelDims())


def test_a_calibration_and_a_largest_world_of_other_types_are_refused() -> None:
    cluster, train = Cluster(world_size=2, accelerator="H100"), TrainSpec(seq_len=8, global_batch=2)
    wrong = cast(Any, {})
    message = r"calibration=\{\} given; use a Calibration"
    for call in (plan, smallest_world):
        with pytest.raises(ParallelDimsError, match=message):
            call(GPT2, cluster, train, calibration=wrong)
    for compared in (estimate, compare):
        with pytest.raises(ParallelDimsError, match=message):
            compared(GPT2, cluster, train, ParallelDims(), calibration=wrong)
    for largest in ("8", 8.0, 0, True):
        with pytest.raises(ParallelDimsError, match=f"largest={largest!r} given; use an integer"):
            smallest_world(GPT2, cluster, train, largest=cast(int, largest))
    assert smallest_world(GPT2, cluster, train, largest=cast(int, np.int64(8))) == 8


def test_fp8_on_an_accelerator_without_it_is_refused() -> None:
    train = TrainSpec(seq_len=64, global_batch=8, float8=True)
    with pytest.raises(ParallelDimsError, match="accelerator A100-80 has no fp8 rate"):
        plan(GPT2, Cluster(world_size=8, accelerator="A100-80"), train)


@pytest.mark.parametrize(("name", "value"), [("fp8_dispatch", True), ("max_nodes", 2)])
def test_an_option_of_the_dispatch_to_experts_is_refused_without_experts(
    name: str, value: Any
) -> None:
    cluster = Cluster(world_size=8, accelerator="H100")
    given: dict[str, Any] = {"seq_len": 4096, "global_batch": 8, name: value}
    train = TrainSpec(**given)
    with pytest.raises(ParallelDimsError, match=f"{name}={value} given; use .* give a model with"):
        plan(GPT2, cluster, train)
    with pytest.raises(ParallelDimsError, match=f"{name}={value}"):
        estimate(GPT2, cluster, train, ParallelDims(world_size=8))
    assert plan(MODELS["mixtral-8x7b"], cluster, train).best is not None


def test_integers_of_other_types_are_taken_as_python_has_them() -> None:
    four = cast(int, np.int64(4))
    train = TrainSpec(seq_len=four, global_batch=four, micro_batch=four)
    assert train == TrainSpec(seq_len=4, global_batch=4, micro_batch=4)
    cluster = Cluster(world_size=four, accelerator="h100", ranks_per_node=four)
    assert cluster == Cluster(world_size=4, accelerator="h100", ranks_per_node=4)
    assert {type(train.seq_len), type(cluster.world_size)} == {int}
    for wrong in (np.float64(4), True, np.array([4, 4]), "4"):
        with pytest.raises(ParallelDimsError, match=r"seq_len=.* given; use an integer"):
            TrainSpec(seq_len=cast(int, wrong), global_batch=4)
