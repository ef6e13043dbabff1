"""Plans that are restricted to some degrees."""

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDimsError
from hp_mesh.planner import MODELS, Cluster, ModelShape, TrainSpec, plan

from .plan_strategies import clusters, runs, shapes
from .strategies import divisors

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
CLUSTER = Cluster(world_size=64, accelerator="H100")
TRAIN = TrainSpec(seq_len=4096, global_batch=64)


@settings(deadline=None, max_examples=40)
@given(model=shapes(), cluster=clusters(), train=runs(), data=st.data())
def test_a_restricted_plan_has_the_candidates_of_the_whole_plan_with_these_degrees(
    model: ModelShape, cluster: Cluster, train: TrainSpec, data: st.DataObject
) -> None:
    axes = data.draw(st.sets(st.sampled_from(AXES if model.experts else AXES[:5]), max_size=3))
    legal = divisors(cluster.world_size)
    fix = {axis: data.draw(st.sampled_from(legal), label=axis) for axis in sorted(axes)}
    whole = plan(model, cluster, train)
    expected = {
        str(c): c for c in whole.candidates if all(getattr(c.dims, n) == d for n, d in fix.items())
    }
    try:
        found = plan(model, cluster, train, fix=fix)
    except ParallelDimsError:
        assert not expected
        return
    assert {str(candidate) for candidate in found.candidates} == {*expected}
    assert list(found.candidates) == [expected[str(candidate)] for candidate in found.candidates]
    assert found.candidates or found.rejected
    assert dict(fix) == {name: found.fix[name] for name in fix}


def test_an_unknown_name_is_refused_with_the_names_of_all_degrees() -> None:
    with pytest.raises(ParallelDimsError, match="no degree 'dp'; use pp, dp_replicate, dp_shard,"):
        plan(MODELS["llama3-8b"], CLUSTER, TRAIN, fix={"dp": 8})
    with pytest.raises(ParallelDimsError, match=r"fix=\[\] given; use a mapping of degrees"):
        plan(MODELS["llama3-8b"], CLUSTER, TRAIN, fix=cast(Any, []))


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None])
def test_a_degree_that_is_no_positive_integer_is_refused(value: Any) -> None:
    with pytest.raises(ParallelDimsError, match=r"tp=.* is not a positive integer; use .*1, 2, 4"):
        plan(MODELS["llama3-8b"], CLUSTER, TRAIN, fix={"tp": value})


def test_degrees_that_the_world_cannot_have_are_refused_with_legal_ones() -> None:
    def refuse(match: str, model: str = "mixtral-8x7b", **fix: int) -> None:
        with pytest.raises(ParallelDimsError, match=match):
            plan(MODELS[model], CLUSTER, TRAIN, fix=fix)

    refuse("tp=3 does not divide world_size=64; use 1, 2, 4, 8, 16, 32 or 64", tp=3)
    refuse(r"pp\*tp=8\*16=128 does not divide world_size=64; use pp=1, 2 or 4", pp=8, tp=16)
    refuse("is not world_size=64", pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=4)
    refuse("etp=4 is neither 1 nor tp=2", etp=4, tp=2)
    refuse("ep=4 given; use 1, or give a model with experts", "llama3-8b", ep=4)


def test_all_wrong_degrees_are_refused_together() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        plan(MODELS["llama3-8b"], CLUSTER, TRAIN, fix={"tp": 3, "dp": 1, "pp": 0})
    assert len(caught.value.violations) == 3


def test_degrees_that_break_a_rule_give_an_empty_plan_with_the_rule() -> None:
    found = plan(MODELS["llama3-8b"], CLUSTER, TRAIN, fix={"tp": 16})
    assert found.best is None
    assert {v.rule for r in found.rejected for v in r.violations} == {"kv-heads-tp"}
    # Eight ranks of experts do not fit on the two ranks of a dense block.
    found = plan(MODELS["mixtral-8x7b"], CLUSTER, TRAIN, fix={"dp_replicate": 32, "ep": 8})
    assert found.best is None
    assert "sparse" in {v.rule for r in found.rejected for v in r.violations}


def test_integers_of_other_types_are_degrees_too() -> None:
    found = plan(MODELS["llama3-8b"], CLUSTER, TRAIN, fix={"tp": cast(int, np.int64(8))})
    assert found.fix == {"tp": 8}
    assert {candidate.dims.tp for candidate in found.candidates} == {8}
