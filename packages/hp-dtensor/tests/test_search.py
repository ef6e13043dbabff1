"""The search for the cheapest steps: finds it, and looks at few layouts on the way."""

import itertools
import math
import random
from importlib import import_module
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hp_dtensor import AlphaBeta, Layout, NoPlanError, Partial, Replicate, Shard, plan_transfer

from .strategies import layouts

_package = plan_transfer.__module__.rpartition("._")[0]
_layout: Any = import_module(f"{_package}._layout")
_planner: Any = import_module(f"{_package}._planner")
_cost: Any = import_module(f"{_package}._cost")


class Discounted(AlphaBeta):
    """A cost model with an upper bound on the cost of a message."""

    def seconds(self, axes: Any, ranks: int, received: float) -> float:
        """Return a cost that is constant above 8 bytes."""
        return 1e-6 + 1e-6 * min(received, 8.0)


ITEMSIZE = 4
MODELS = [
    AlphaBeta(),
    AlphaBeta(alpha=0.0, beta=1.0),
    AlphaBeta(alpha=1.0, beta=0.0),
    AlphaBeta(alpha=1e-6, beta=(1e-8, 1e-9, 1e-9, 1e-10)),
    AlphaBeta(alpha=(1e-6, 1e-5, 1e-6, 1e-7), beta=(1e-9, 1e-9, 1e-7, 1e-8)),
    Discounted(alpha=1.0, beta=1.0),
]
MESHES = [(2,), (3,), (2, 2), (2, 3), (4, 2), (1, 4), (2, 2, 2), (2, 1, 3)]


def pairs_of_axes(mesh: tuple[int, ...]) -> frozenset[tuple[int, ...]]:
    return frozenset(itertools.combinations(range(len(mesh)), 2))


def relaxed(search: Any, wide: bool) -> float:
    """Return the price of the cheapest steps, by relaxing every step until nothing changes."""
    search.one_step, search.wide = False, wide
    spent, changed = {search.src: 0.0}, True
    while changed:
        changed = False
        for here in list(spent):
            for step in search.next_steps(here):
                total = spent[here] + _cost.step_seconds(
                    step, _cost.step_bytes(step, search.shape, ITEMSIZE), search.cost
                )
                allowed = len(step.axes) <= 2 and search._may_run(step)
                if allowed and total < spent.get(step.target, math.inf):
                    spent[step.target], changed = total, True
    return float(spent[search.dst])


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(MESHES[:6]), st.sampled_from(MODELS), st.data())
def test_the_search_finds_the_cheapest_of_all_steps(
    mesh: tuple[int, ...], cost: AlphaBeta, data: st.DataObject
) -> None:
    """Only single axes and pairs of axes have groups."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple))
    # Plans are searched for without axes of one rank, which mean nothing.
    src = _layout.replicated(data.draw(layouts(mesh, len(shape), ("sum",))))
    dst = _layout.replicated(data.draw(layouts(mesh, len(shape))))
    search = _planner.Search(src, dst, shape, ITEMSIZE, cost, pairs_of_axes(mesh))
    found = search.cheapest()
    assert found is not None
    assert search.ended
    least = _cost.lower_bound(dst, shape, ITEMSIZE, cost)(src)
    expected = min(relaxed(search, wide) for wide in (False, True))
    assert least <= expected * (1 + 1e-9)
    total = _cost.seconds(found, shape, ITEMSIZE, cost)
    assert total == pytest.approx(expected, rel=1e-9)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_no_layout_on_the_way_is_cheaper_than_to_go_straight(data: st.DataObject) -> None:
    """At one price for all axes; with partial values ranks of other axes may help on the way."""
    mesh = data.draw(st.sampled_from(MESHES))
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    cost = data.draw(st.sampled_from(MODELS[:3]))
    source, between, target = (data.draw(layouts(mesh, len(shape))) for _ in range(3))
    straight, first, then = (
        _planner.make_plan(*pair, shape, 0, ITEMSIZE, cost).time
        for pair in ((source, target), (source, between), (between, target))
    )
    assert straight <= (first + then) * (1 + 1e-9)


KINDS = (Replicate(), Partial(), Shard(0), Shard(1), Shard(2))


def pairs(mesh: tuple[int, ...], number: int) -> list[tuple[Layout, Layout]]:
    generator = random.Random(len(mesh))
    whole = [kind for kind in KINDS if kind != Partial()]
    return [
        (
            Layout(mesh, tuple(generator.choice(KINDS) for _ in mesh)),
            Layout(mesh, tuple(generator.choice(whole) for _ in mesh)),
        )
        for _ in range(number)
    ]


def expanded(
    pair: tuple[Layout, Layout], shape: tuple[int, ...], cost: Any, groups: Any, limit: int | None
) -> int:
    """Return how many layouts a plan looks beyond."""
    _planner._choose.cache_clear()
    _planner.make_plan.cache_clear()
    next_steps = _planner.Search.next_steps
    with mock.patch.object(
        _planner.Search, "next_steps", autospec=True, side_effect=next_steps
    ) as look:
        try:
            _planner.make_plan(*pair, shape, 0, ITEMSIZE, cost, groups, limit)
        except NoPlanError:
            assert limit == 1
    return look.call_count


def test_a_search_on_four_axes_ends_before_its_bound_on_work() -> None:
    """Includes the search for the least memory, and a search with an unknown cost model."""
    for limit in (None, 1):
        for cost in (Priced(),):
            counts = [
                expanded(pair, (64, 64, 64), cost, frozenset(), limit)
                for pair in pairs((2, 4, 2, 8), 1)
            ]
            assert max(counts) < _planner._MOST_LAYOUTS


class Priced:
    """A model of another kind."""

    def seconds(self, axes: Any, ranks: int, received: float) -> float:
        """Return a price that grows with the root of the bytes."""
        return math.sqrt(received) + ranks


def test_the_search_gives_up_at_its_bound_and_the_usual_ways_remain() -> None:
    src, dst = pairs((2, 2, 2, 2), 1)[0]
    with mock.patch.object(_planner, "_MOST_LAYOUTS", 0):
        _planner._choose.cache_clear()
        _planner.make_plan.cache_clear()
        plan = _planner.make_plan(src, dst, (64, 64, 64), 0, 4, MODELS[3], None, None)
    _planner._choose.cache_clear()
    _planner.make_plan.cache_clear()
    searched = _planner.make_plan(src, dst, (64, 64, 64), 0, 4, MODELS[3], None, None)
    assert plan.steps[-1].target == dst
    assert plan.why.endswith("; the search for others gave up")
    assert searched.why.endswith(" and of all steps")
    assert searched.time <= plan.time
