"""Plans that the planner chooses by memory and cost, and their explanations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hp_dtensor import (
    AlphaBeta,
    Layout,
    LayoutError,
    NoPlanError,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    explain,
    plan_transfer,
)

from .strategies import Case, cases, free_cases

_package = plan_transfer.__module__.rpartition("._")[0]
_plan: Any = import_module(f"{_package}._planner")

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def plans(case: Case, limit: int) -> list[Any] | NoPlanError:
    """Return each rank's plan within a limit, or the refusal."""
    try:
        return [
            explain(case.source, case.target, shape=case.shape, rank=rank, max_bytes=limit)
            for rank in case.ranks
        ]
    except NoPlanError as error:
        return error


def check_within(made: list[Any] | NoPlanError, limit: int) -> None:
    assert isinstance(made, list)
    assert max(plan.peak_bytes for plan in made) <= limit
    assert len({plan.steps for plan in made}) == 1


@settings(deadline=None, max_examples=120)
@given(cases(partial=True), st.integers(0, 4000))
def test_a_plan_is_within_the_limit_or_the_error_names_the_minimum(case: Case, limit: int) -> None:
    made = plans(case, limit)
    if isinstance(made, NoPlanError):
        assert made.max_bytes == limit < made.best_peak
        check_within(plans(case, made.best_peak), made.best_peak)
        assert isinstance(plans(case, made.best_peak - 1), NoPlanError)
    else:
        check_within(made, limit)


@settings(deadline=None, max_examples=120)
@given(free_cases(), st.integers(0, 4000))
def test_the_limit_holds_for_any_layouts_on_any_two_meshes(case: Case, limit: int) -> None:
    made = plans(case, limit)
    if isinstance(made, NoPlanError):
        assert made.best_peak > limit
        check_within(plans(case, made.best_peak), made.best_peak)
    else:
        check_within(made, limit)


def test_the_limit_holds_where_the_first_rank_does_not_hold_the_most() -> None:
    """Halves of 7 rows are 4 and 3; of their 3 blocks some rank of the smaller half holds 3."""
    source = Layout((2, 2), (S0, StridedShard(0, 3)))
    assert [source.local_shape((7,), rank) for rank in range(4)] == [(2,), (2,), (3,), (0,)]
    case = Case(source, Layout((2, 2), (R, S0)), (7,))
    for limit in range(0, 160, 4):
        made = plans(case, limit)
        if not isinstance(made, NoPlanError):
            check_within(made, limit)


def test_less_memory_takes_another_way() -> None:
    pair = Layout((8, 2), (S0, P)), Layout((8, 2), (R, R))
    cost = AlphaBeta(alpha=0.0, beta=1e-9)
    free = explain(*pair, shape=(64, 64), cost=cost)
    tight = explain(*pair, shape=(64, 64), cost=cost, max_bytes=free.peak_bytes - 1)
    assert tight.peak_bytes < free.peak_bytes
    assert tight.time >= free.time
    assert tight.steps != free.steps
    assert "5 more hold over" in str(tight)


def test_a_slow_axis_is_gathered_while_there_is_little_to_gather() -> None:
    pair = Layout((2, 4), (S0, S0)), Layout((2, 4), (R, R))
    alike = explain(*pair, shape=(1024, 1024))
    slow = explain(*pair, shape=(1024, 1024), cost=AlphaBeta(beta=(1e-9, 1e-11)))
    assert [step.axes for step in alike.steps] == [(0, 1)]
    assert [step.axes for step in slow.steps] == [(0,), (1,)]
    assert slow.steps[0].target == Layout((2, 4), (R, StridedShard(0, 2)), {0: (1,)})
    assert slow.steps[0].received((1024, 1024), 3, 4) == 1024 * 1024 * 4 // 8
    assert slow.bytes_received == alike.bytes_received


def test_several_partial_axes_are_reduced_at_once_where_one_group_has_just_them() -> None:
    pair = Layout((2, 4), (P, P)), Layout((2, 4), (R, R))
    together = explain(*pair, shape=(1024, 1024))
    apart = _plan.make_plan(*pair, (1024, 1024), 0, 4, None, frozenset())
    assert [(step.kind, step.axes) for step in together.steps] == [("all_reduce", (0, 1))]
    assert all(len(step.axes) <= 1 for step in apart.steps if step.kind != "direct")
    assert apart.time > together.time


def test_replicas_on_another_mesh_share_received_data() -> None:
    pair = Layout((1,), (R,)), Layout((8,), (R,), ranks=range(1, 9))
    plan = explain(*pair, shape=(4096, 4096), rank=3)
    assert [step.kind for step in plan.steps] == ["transfer", "all_gather"]
    assert plan.bytes_received == 4096 * 4096 * 4
    small = explain(*pair, shape=(2, 2), rank=3)
    assert [step.kind for step in small.steps] == ["transfer"]


def test_partial_values_are_reduced_before_they_leave_their_mesh() -> None:
    pair = Layout((4,), (P,)), Layout((4,), (S0,), ranks=range(4, 8))
    plan = explain(*pair, shape=(4096, 4096), rank=0)
    assert [step.kind for step in plan.steps] == ["reduce_scatter", "transfer"]
    assert "transfer from mesh [4] to [4]" in str(plan)


def test_the_text_says_why() -> None:
    text = str(explain(Layout((2, 2), (P, R)), Layout((2, 2), (R, S0)), shape=(8, 8)))
    assert "the cheapest of" in text
    assert "and of all steps" in text


def test_slices_come_before_reductions_also_where_nothing_is_searched() -> None:
    """Blocks are beyond the search. Two ranks that reduce the whole each receive half of it."""
    pair = Layout((2, 2, 2), (P, R, R)), Layout((2, 2, 2), (R, S1, StridedShard(0, 3)))
    plan = explain(*pair, shape=(12, 8), cost=AlphaBeta(alpha=0.0, beta=1.0), itemsize=1)
    assert "all steps" not in plan.why
    assert plan.steps[0].kind == "slice"
    assert plan.bytes_received < 12 * 8 // 2


def test_ragged_runs_move_straight_to_other_runs() -> None:
    source = Layout((4,), (RaggedShard((0,), (4, 0, 3, 1)),))
    target = Layout((4,), (RaggedShard((0,), (2, 2, 2, 2)),))
    plan = explain(source, target, shape=(8, 5), rank=1)
    assert [step.kind for step in plan.steps] == ["direct"]
    assert plan.bytes_received == 2 * 5 * 4
    assert [step.kind for step in explain(target, source, shape=(8, 5)).steps] == ["direct"]


def test_plans_are_kept_in_bounded_caches() -> None:
    for cached in (_plan.make_plan, _plan._choose):
        assert cached.cache_info().maxsize is not None
    pair = Layout((4,), (S0,)), Layout((4,), (S1,))
    assert _plan.make_plan(*pair, (8, 8), 0) is _plan.make_plan(*pair, (8, 8), 0)


@pytest.mark.parametrize(("name", "value"), [("alpha", -1.0), ("beta", (1.0, -2.0)), ("beta", ())])
def test_prices_are_not_negative(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}=.* seconds of 0 or more"):
        AlphaBeta(**{name: value})


class FreeOverBoth:
    """One collective over two axes is free, one over a single axis costs a second."""

    def seconds(self, axes: Sequence[int], ranks: int, received: float) -> float:
        """Return the price."""
        return 0.0 if len(axes) > 1 else 1.0


def test_a_way_at_no_cost_is_named_in_the_note() -> None:
    pair = Layout((2, 2), (S1, StridedShard(0, 2))), Layout((2, 2), (StridedShard(0, 2), S1))
    none: frozenset[tuple[int, ...]] = frozenset()
    plan = _plan.make_plan(*pair, (8, 2), 0, cost=FreeOverBoth(), groups=none)
    assert "at no cost with one process group over the mesh axes (0, 1)" in plan.note
    cost = AlphaBeta(alpha=0.0, beta=1e-9)
    assert _plan.make_plan(*pair, (8, 2), 0, cost=cost, groups=none).time > 0


def test_a_step_of_unequal_receivers_costs_their_average() -> None:
    pair = Layout((4,), (StridedShard(0, 2),)), Layout((4,), (S0,))
    plans = [
        explain(*pair, shape=(1024, 1024), rank=rank, cost=AlphaBeta(alpha=0.0, beta=1.0))
        for rank in range(4)
    ]
    received = [plan.bytes_received for plan in plans]
    assert len(set(received)) > 1
    assert {plan.time for plan in plans} == {sum(received) / 4}


@pytest.mark.parametrize(
    "value", [math.inf, math.nan, "1", [1.0, 2.0], (1.0, math.inf), (1.0, "2")]
)
def test_prices_are_finite_numbers(value: Any) -> None:
    for name in ("alpha", "beta"):
        with pytest.raises(LayoutError, match=f"{name}=.* finite seconds of 0 or more"):
            AlphaBeta(**{name: value})


def test_a_tuple_has_a_price_for_every_axis_of_either_mesh() -> None:
    narrow, wide = Layout((4,), (S0,)), Layout((2, 2), (S0, S1))
    short = AlphaBeta(beta=(1.0,))
    for pair in ((wide, wide), (narrow, wide), (wide, narrow)):
        with pytest.raises(LayoutError, match=r"beta=\(1.0,\) prices 1 mesh axes of 2; give 2"):
            explain(*pair, shape=(8, 8), cost=short)
    plan = explain(narrow, wide, shape=(8, 8), cost=AlphaBeta(alpha=(1.0, 3.0), beta=0.0))
    assert [step.kind for step in plan.steps] == ["transfer"]
    assert plan.time == 3.0


@pytest.mark.parametrize("cost", [3.0, "cheap", AlphaBeta, [AlphaBeta()]])
def test_a_cost_is_a_model(cost: Any) -> None:
    with pytest.raises(LayoutError, match=r"cost=.* give AlphaBeta\(...\), or a hashable"):
        explain(Layout((2,), (S0,)), shape=(4,), cost=cost)


@dataclass
class Unhashable(FreeOverBoth):
    """A model that compares by value and may change."""


def test_a_cost_is_hashable() -> None:
    with pytest.raises(LayoutError, match="hashable"):
        explain(Layout((2,), (S0,)), shape=(4,), cost=Unhashable())
