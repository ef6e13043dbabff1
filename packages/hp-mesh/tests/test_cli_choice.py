"""What plan recommends, and which candidates share a row."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims
from hp_mesh.cli import _plans
from hp_mesh.cli._plans import plan_rows, why_chosen
from hp_mesh.planner import (
    MODELS,
    Candidate,
    Cluster,
    MemorySplit,
    Plan,
    TimeSplit,
    TrainSpec,
    plan,
)
from hp_mesh.planner._result import GIB, index_of_best

from .test_cli import document, run

LIMIT = 100
ARGV = ["plan", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "8192", "--global-batch", "8"]


@cache
def real() -> Plan:
    return plan(
        MODELS["llama3-8b"],
        Cluster(world_size=8, accelerator="H100"),
        TrainSpec(seq_len=8192, global_batch=8),
    )


def candidate(seconds: float, gibibytes: float, replicate: int = 1, tp: int = 1) -> Candidate:
    """Give a candidate of 16 / tp ranks of dp, under a limit of 100 GiB."""
    shard = 16 // tp // replicate
    return replace(
        real().candidates[0],
        dims=ParallelDims(dp_replicate=replicate, dp_shard=shard, tp=tp, world_size=16),
        time=TimeSplit(compute=seconds, communication={}, bubble=0, optimizer=0),
        memory=MemorySplit(
            parameters=gibibytes * GIB,
            gradients=0,
            optimizer=0,
            activations=0,
            logits=0,
            buffers=0,
        ),
        limit=LIMIT * GIB,
        recompute="none",
    )


def planned(candidates: Sequence[Candidate]) -> Plan:
    """Give a plan of these candidates in the order in which plans have them."""

    def place(one: Candidate) -> tuple[int, float]:
        if one.fit == "does not fit":
            return 2, one.memory.total
        return ["fits", "borderline"].index(one.fit), one.time.total

    fits = [one.fit for one in candidates]
    ordered = sorted(candidates, key=place)
    best = index_of_best(ordered[: fits.count("fits")])
    return replace(
        real(),
        candidates=[ordered.pop(best), *ordered],
        fitting=fits.count("fits"),
        bordering=fits.count("borderline"),
    )


CANDIDATES = st.builds(
    candidate,
    st.integers(1000, 1030).map(float),
    st.integers(80, 125).map(float),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 4)),
)
PLANS = st.lists(CANDIDATES, min_size=1, max_size=20, unique_by=str).map(planned)


@given(PLANS)
@settings(deadline=None, max_examples=150)
def test_memory_is_bought_with_at_most_one_percent_of_time_where_it_is_short(found: Plan) -> None:
    chosen, best = found.best, found.fastest
    assert chosen is not None
    assert best is not None
    worth = [
        one
        for one in found.fits
        if one.time.total <= 1.01 * best.time.total
        and one.memory.total <= best.memory.total - 0.05 * best.limit
    ]
    if best.fit == "fits" and best.memory.total > 0.95 * best.limit and worth:
        assert chosen in worth
        assert chosen.time.total == min(one.time.total for one in worth)
    else:
        assert chosen == best


@given(PLANS, st.integers(1, 12))
@example(planned([candidate(1000, 96), candidate(1001, 80), candidate(1001, 80, 2)]), 1)
@settings(deadline=None, max_examples=150)
def test_rows_are_the_first_candidates_with_splits_of_dp_folded(found: Plan, most: int) -> None:
    rows = plan_rows(found, most)
    assert 1 <= len(rows) <= most
    assert rows[0].candidate == found.best
    assert all(found.candidates[row.place - 1] == row.candidate for row in rows)
    places = [row.place for row in rows[1:]]
    assert places == sorted({*places} - {rows[0].place})
    every = plan_rows(found, 1000)
    assert len(every) + sum(row.splits for row in every) == len(found.candidates)
    assert every[: len(rows)] == rows
    for row in every:
        one = row.candidate
        alike = [
            other
            for other in found.candidates
            if (other.dims.tp, other.fit) == (one.dims.tp, one.fit)
            and one.time.total <= other.time.total <= 1.01 * one.time.total
        ]
        assert row.splits < len(alike) or row.splits == 0
        assert row.splits == 0 or one.fit != "does not fit"


def test_the_recommendation_says_what_it_costs_and_saves() -> None:
    fastest, chosen = candidate(1000, 98), candidate(1002, 83, tp=4)
    found = planned([fastest, chosen, candidate(1001, 94), candidate(1003, 60, tp=2)])
    assert found.best == chosen
    text = "0.2% slower than the fastest, 15.0 GiB less: the fastest would leave 2.0 GiB"
    assert why_chosen(chosen, fastest) == text


@pytest.mark.parametrize(
    ("fastest", "other"),
    [
        (candidate(1000, 95), candidate(1001, 50, tp=4)),
        (candidate(1000, 98), candidate(1001, 93.1, tp=4)),
        (candidate(1000, 98), candidate(1011, 50, tp=4)),
        (candidate(1000, 101), candidate(1001, 101, tp=4)),
    ],
)
def test_the_fastest_is_kept_without_a_clear_gain(fastest: Candidate, other: Candidate) -> None:
    assert planned([fastest, other]).best == fastest


def test_one_row_stands_for_the_splits_of_dp_near_it() -> None:
    found = planned(
        [
            candidate(1000, 60),
            candidate(1001, 61, replicate=2),
            candidate(1002, 62, tp=4),
            candidate(1009, 63, replicate=4),
            candidate(1011, 64, replicate=8),
        ]
    )
    rows = plan_rows(found, 10)
    assert [(row.place, row.splits) for row in rows] == [(1, 2), (3, 0), (5, 0)]
    assert plan_rows(found, 1) == rows[:1]


def test_plan_runs_what_it_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest, split = candidate(1000, 98), candidate(1002, 83, replicate=2)
    found = planned([fastest, split, candidate(1003, 84, replicate=4)])
    monkeypatch.setattr(_plans, "plan", lambda *_, **__: found)
    _, out, _ = run(*ARGV)
    assert "ParallelDims(dp_replicate=2, dp_shard=8, world_size=16)" in out
    assert why_chosen(split, fastest) in out
    lines = out.splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith(" # ") or line[:2] == "# "]
    assert lines[start + 2].split()[:3] == ["1", "dp_replicate=2", "dp_shard=8"]
    assert lines[start + 3].split()[:2] == ["2", "dp_shard=16"]
    assert "(+1 split of dp)" in lines[start + 3]
    assert lines[start + 3].endswith("15.0 GiB more memory")
    told = document(*ARGV)
    assert ParallelDims.from_dict(told["recommended"]["dims"]) == split.dims
    dims = [ParallelDims.from_dict(entry["dims"]) for entry in told["candidates"]]
    assert dims == [one.dims for one in found.candidates]


def test_python_plan_and_estimate_name_the_same_best() -> None:
    cluster = Cluster(world_size=64, accelerator="H100")
    found = plan(MODELS["llama3-8b"], cluster, TrainSpec(seq_len=4096, global_batch=512))
    best, fastest = found.best, found.fastest
    assert best is not None
    assert fastest is not None
    assert best != fastest, "no test of a best that is not the fastest"
    assert best.memory.total <= fastest.memory.total - 0.05 * fastest.limit
    run_ = ["--model", "llama3-8b", "--gpu", "h100", "--seq-len", "4096", "--global-batch", "512"]
    told = document("plan", *run_, "--gpus", "64")
    assert told["recommended"] == told["candidates"][0]
    assert ParallelDims.from_dict(told["recommended"]["dims"]) == best.dims
    against = document("estimate", "tp=8", *run_, "--gpus", "64")["best"]
    assert ParallelDims.from_dict(against["dims"]) == best.dims
    assert found.compare(fastest).best == best


def test_settings_and_help_are_in_plain_words() -> None:
    _, out, _ = run(*ARGV)
    assert any(
        line.startswith("  ") and "microbatch" in line and "of 1 sequence," in line
        for line in out.splitlines()
    )
    assert "micro batch" not in out
    _, out, _ = run("plan", "--help")
    assert "all but attention outputs and every second matrix product" in " ".join(out.split())
    assert "buffers     memory of gathered parameters" in out
