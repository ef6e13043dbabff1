"""Options that make the best plan of a run faster."""

from dataclasses import replace
from typing import Any, cast

import pytest

from hp_mesh import ParallelDimsError
from hp_mesh.planner import MODELS, Calibration, Cluster, Hint, TrainSpec, hints, plan

LARGE = TrainSpec(seq_len=8192, global_batch=512)


def test_hints_name_options_that_make_the_best_plan_faster_as_planning_with_them_says() -> None:
    model, cluster = MODELS["llama3-70b"], Cluster(world_size=16, accelerator="H100")
    found = plan(model, cluster, LARGE)
    assert found.best is not None
    given = hints(found)
    assert [hint.field for hint in given] == ["zero", "fused_loss"]
    assert list(given) == sorted(given, key=lambda hint: hint.step_seconds)
    for hint in given:
        train = replace(LARGE, **{hint.field: hint.value})  # type: ignore[arg-type]
        again = plan(model, cluster, train).best
        assert again is not None
        assert again.time.total == hint.step_seconds
        assert hint.step_seconds <= 0.99 * found.best.time.total
        assert str(hint) == f"{hint.field}={hint.value!r}: {hint.step_seconds:.3f} s per step"


def test_options_that_the_run_sets_are_no_hints() -> None:
    model, cluster = MODELS["llama3-70b"], Cluster(world_size=16, accelerator="H100")
    train = replace(LARGE, zero=3, fused_loss=True)
    assert not {hint.field for hint in hints(plan(model, cluster, train))} & {"zero", "fused_loss"}


def test_an_option_with_which_a_run_fits_is_a_hint_though_nothing_fits_without_it() -> None:
    model, cluster = MODELS["llama3-8b"], Cluster(world_size=8, accelerator="H100")
    train = TrainSpec(seq_len=16384, global_batch=8, recompute="full")
    needs = plan(model, cluster, train, fix={"dp_shard": 8}).candidates[0].memory
    share = (needs.total - needs.logits / 2) / 79.6 / 2**30
    tight = plan(model, replace(cluster, memory_fraction=share), train, fix={"dp_shard": 8})
    assert not tight.fits
    assert [(hint.field, hint.value) for hint in hints(tight)] == [("fused_loss", True)]


def test_hints_keep_the_degrees_and_constants_of_the_plan() -> None:
    model, cluster = MODELS["llama3-405b"], Cluster(world_size=512, accelerator="H100")
    slow = Calibration(link_efficiency=0.5)
    found = plan(model, cluster, LARGE, fix={"pp": 8, "tp": 8}, calibration=slow)
    (first, *_) = hints(found)
    train = replace(LARGE, **{first.field: first.value})  # type: ignore[arg-type]
    again = plan(model, cluster, train, fix={"pp": 8, "tp": 8}, calibration=slow).best
    assert again is not None
    assert first.step_seconds == again.time.total
    assert not {h.field for h in hints(plan(model, cluster, LARGE, fix={"pp": 1}))} & {"schedule"}


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_a_plan_has_at_most_three_hints(model: str) -> None:
    cluster = Cluster(world_size=64, accelerator="H100")
    given = hints(plan(MODELS[model], cluster, replace(LARGE, seq_len=32768)))
    assert len(given) <= 3
    assert all(isinstance(hint, Hint) for hint in given)


def test_hints_of_anything_but_a_plan_are_refused() -> None:
    with pytest.raises(ParallelDimsError, match="plan=None given; use a Plan"):
        hints(cast(Any, None))


def test_one_hint_takes_one_search_and_tells_its_progress() -> None:
    model, cluster = MODELS["llama3-70b"], Cluster(world_size=16, accelerator="H100")
    found = plan(model, cluster, LARGE)
    seen: list[tuple[int, int]] = []
    assert hints(found, most=1, progress=lambda done, total: seen.append((done, total)))
    assert sum(done == total for done, total in seen) == 1
    with pytest.raises(ParallelDimsError, match="most=0 given"):
        hints(found, most=0)
