"""Plans: every rank chooses the same cheapest steps."""

import pickle
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from hp_dtensor import (
    AlphaBeta,
    Layout,
    LayoutError,
    MeshError,
    NoPlanError,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    explain,
    plan_transfer,
)

from .strategies import Case, cases

_package = plan_transfer.__module__.rpartition("._")[0]
make_plan = import_module(f"{_package}._planner").make_plan

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Placements = tuple[Replicate | Shard | Partial, ...]


def plan(source: Placements, target: Placements, shape: tuple[int, ...] = (8, 8)) -> Any:
    mesh = (2,) * len(source)
    return explain(Layout(mesh, source), Layout(mesh, target), shape=shape)


def kinds(made: Any) -> list[str]:
    return [step.kind for step in made.steps]


@settings(deadline=None, max_examples=200)
@given(cases(partial=True))
def test_every_rank_chooses_the_same_steps(case: Case) -> None:
    plans = [explain(case.source, case.target, shape=case.shape, rank=r) for r in case.ranks]
    assert len({made.steps for made in plans}) == 1
    assert len({made.time for made in plans}) == 1


@settings(deadline=None, max_examples=200)
@given(cases())
def test_a_plan_that_reduces_nothing_receives_the_lower_bound(case: Case) -> None:
    for rank in case.ranks:
        made = explain(case.source, case.target, shape=case.shape, rank=rank, itemsize=1)
        least = 0
        for _, box in plan_transfer(*case, rank).recvs:
            elements = 1
            for lo, hi in box:
                elements *= hi - lo
            least += elements
        assert made.bytes_received == least


@settings(deadline=None, max_examples=200)
@given(cases(partial=True))
def test_steps_lead_from_source_to_target(case: Case) -> None:
    made = explain(case.source, case.target, shape=case.shape)
    for step, following in zip(made.steps, made.steps[1:], strict=False):
        assert step.target == following.source
    if made.steps and 1 not in case.source.mesh_shape:
        assert made.steps[0].source == case.source
        assert made.steps[-1].target == case.target


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ((S0,), (S0,), []),
        ((R,), (S0,), ["slice"]),
        ((R, R), (S0, S1), ["slice"]),
        ((S0,), (R,), ["all_gather"]),
        ((S0,), (S1,), ["all_to_all"]),
        ((S0, R), (R, S1), ["slice", "all_gather"]),
        ((S0, S1), (S1, S0), ["direct"]),
        ((S0, S0), (R, R), ["all_gather"]),
        ((P,), (R,), ["all_reduce"]),
        ((P,), (S1,), ["reduce_scatter"]),
        ((P, R), (R, S0), ["slice", "all_reduce"]),
        ((P, P), (S0, S1), ["reduce_scatter", "reduce_scatter"]),
        ((P, S0), (P, S0), []),
        ((P, S0), (P, R), ["all_gather"]),
    ],
)
def test_a_native_collective_is_used_where_it_moves_no_more(
    source: Placements, target: Placements, steps: list[str]
) -> None:
    assert kinds(plan(source, target, (4096, 4096))) == steps


def test_unequal_parts_go_direct() -> None:
    assert kinds(plan((S0,), (R,), (7, 8))) == ["direct"]
    assert kinds(plan((S0,), (S1,), (8, 7))) == ["direct"]


def test_an_axis_of_degree_one_needs_no_step() -> None:
    for source, target in (((S0,), (R,)), ((P,), (S0,)), ((R,), (P,))):
        made = explain(Layout((1,), source), Layout((1,), target), shape=(4, 4))
        assert made.steps == ()


def test_slicing_before_the_reduction_halves_what_it_receives() -> None:
    whole, sliced = plan((P, R), (R, R)), plan((P, R), (R, S0))
    assert sliced.bytes_received * 2 == whole.bytes_received == 256


def test_latency_and_bandwidth_decide() -> None:
    """One axis means one small group. Both axes mean that only missing elements are sent."""
    pair = Layout((2, 2), (S0, R)), Layout((2, 2), (S1, S0))
    latency = explain(*pair, shape=(64, 64), cost=AlphaBeta(alpha=1.0, beta=0.0))
    bandwidth = explain(*pair, shape=(64, 64), cost=AlphaBeta(alpha=0.0, beta=1.0))
    assert [step.kind for step in latency.steps] == ["all_to_all", "slice"]
    assert [step.kind for step in bandwidth.steps] == ["direct"]
    received = [
        sum(
            explain(*pair, shape=(64, 64), rank=rank, cost=cost).bytes_received for rank in range(4)
        )
        for cost in (AlphaBeta(alpha=1.0, beta=0.0), AlphaBeta(alpha=0.0, beta=1.0))
    ]
    assert received[1] < received[0]


def test_a_step_is_as_slow_as_its_slowest_axis() -> None:
    per_axis = AlphaBeta(alpha=(0.0, 0.0), beta=(1.0, 10.0))
    assert per_axis.seconds((0, 1), 4, 2.0) == 20.0
    assert per_axis.seconds((0,), 2, 2.0) == 2.0


def test_the_text_lists_the_steps() -> None:
    text = str(plan((P, R), (R, S0)))
    assert "(P(sum), R) -> (R, S(0)) for [8, 8] on mesh [2, 2]" in text
    assert "receives 128 bytes" in text
    assert "1. slice" in text
    assert "2. all_reduce over axes (0,)" in text
    assert "(R, S(0)), 128 bytes" in text
    assert "nothing to do" in str(plan((R,), (R,)))


def test_explain_needs_the_shape_of_a_layout_and_one_mesh() -> None:
    with pytest.raises(LayoutError, match="shape="):
        explain(Layout((2,), (S0,)))
    with pytest.raises(NoPlanError, match="max_bytes=1 "):
        explain(Layout((2,), (S0,)), Layout((4,), (S0,)), shape=(4,), max_bytes=1)
    with pytest.raises(LayoutError, match="axis 0"):
        explain(Layout((2,), (S0,)), (P,), shape=(4,))
    with pytest.raises(LayoutError, match=r"shape=\(-4,\) has negative sizes"):
        explain(Layout((2,), (S0,)), shape=(-4,))
    with pytest.raises(MeshError, match=r"mesh='cp' beside a Layout, .* leave mesh= out"):
        explain(Layout((2,), (S0,)), shape=(4,), mesh="cp")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"got Replicate\(\) alone"):
        explain(Layout((2,), (S0,)), R, shape=(4,))  # type: ignore[arg-type]
    assert kinds(explain(Layout((2,), (S0,)), shape=(4,))) == ["all_gather"]


def test_a_layout_leaves_no_room_for_another_order_mesh_or_groups() -> None:
    """They would be left out without a word."""
    pair: Any = Layout((2, 2), (R, R)), Layout((2, 2), (S0, S0))
    with pytest.raises(LayoutError, match=r"shard_order=.* beside the Layout \(S\(0\), S\(0\)\)"):
        explain(*pair, shape=(4,), shard_order={0: (1, 0)})
    with pytest.raises(MeshError, match=r"beside a Layout, .* shape \(2, 2\); leave mesh= out"):
        explain(torch.zeros(4), pair[1], mesh="cp")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"groups=\[\] beside a Layout"):
        explain(*pair, shape=(4,), groups=[])


@pytest.mark.parametrize("target", [None, (R,), Layout((2,), (R,))])
@pytest.mark.parametrize(("x", "said"), [(torch.zeros(4), "Tensor"), ((S0,), "tuple")])
def test_explain_starts_from_a_layout_or_a_dtensor(x: Any, said: str, target: Any) -> None:
    with pytest.raises(LayoutError, match=f"a DTensor, got an object of type {said}; make"):
        explain(x, target, shape=(4,))


def test_a_rank_of_neither_mesh_has_no_plan() -> None:
    pair = Layout((2,), (Shard(0),)), Layout((2,), (Shard(1),))
    with pytest.raises(MeshError, match=r"rank=9 is in neither .* use one of 0 to 1"):
        explain(*pair, shape=(4, 4), rank=9)
    apart = replace(pair[1], ranks=(4, 6))
    with pytest.raises(MeshError, match=r"use one of \[0, 1, 4, 6\]"):
        explain(pair[0], apart, shape=(4, 4), rank=5)
    assert explain(pair[0], apart, shape=(4, 4), rank=6).rank == 6


@pytest.mark.parametrize(("rank", "itemsize"), [(1.0, 4), ("1", 4), (0, 0), (0, -4), (0, 2.5)])
def test_ranks_and_bytes_of_an_element_are_whole_numbers(rank: Any, itemsize: Any) -> None:
    pair = Layout((2,), (S0,)), Layout((2,), (R,))
    with pytest.raises(LayoutError, match=r"rank=.* is in neither|itemsize=.* give 1 or more"):
        explain(*pair, shape=(4,), rank=rank, itemsize=itemsize)


@pytest.mark.parametrize("limit", [1.5, True, "64"])
def test_a_limit_that_is_no_number_of_bytes_is_refused_between_layouts_too(limit: Any) -> None:
    pair = Layout((2,), (Shard(0),)), Layout((2,), (Replicate(),))
    with pytest.raises(LayoutError, match=f"max_bytes={limit!r} is no number of bytes"):
        explain(*pair, shape=(4, 4), max_bytes=limit)


def test_an_error_of_the_limit_is_pickled_with_its_numbers() -> None:
    pair = Layout((2,), (Shard(0),)), Layout((2,), (Replicate(),))
    with pytest.raises(NoPlanError) as info:
        explain(*pair, shape=(4, 4), max_bytes=8)
    copied = pickle.loads(pickle.dumps(info.value))
    assert str(copied) == str(info.value)
    assert (copied.max_bytes, copied.best_peak) == (8, info.value.best_peak)


def test_steps_keep_off_the_dims_that_a_ragged_shard_flattens() -> None:
    """An axis cannot move to dim 0 while a ragged shard flattens it."""
    source = Layout((2, 2, 2), (R, RaggedShard((0,), (1, 5)), S1))
    made = make_plan(source, Layout((2, 2, 2), (R, S1, S0)), (6, 8), 0, 4, None, frozenset())
    assert made.steps[-1].target.placements == (R, S1, S0)


def test_a_ragged_transfer_costs_the_same_both_ways() -> None:
    """The ranks that send much are as busy as ranks that receive much."""
    times = []
    for sizes in ((0, 10**6), (10**6, 0)):
        source = Layout((2,), (RaggedShard((0,), sizes),), ranks=(0, 1))
        target = Layout((2,), (S0,), ranks=(2, 3))
        times.append(explain(source, target, shape=(10**6,)).time)
    assert times[0] == times[1]
