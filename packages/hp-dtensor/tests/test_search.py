"""The search for the cheapest walk: finds it, and looks at few layouts on the way."""

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
_links: Any = import_module(f"{_package}._shard_order")
_least: Any = import_module(f"{_package}._planner")
_plan: Any = import_module(f"{_package}._planner")
_pricing: Any = import_module(f"{_package}._cost")
_search: Any = import_module(f"{_package}._planner")

ITEMSIZE = 4
MODELS = [
    AlphaBeta(),
    AlphaBeta(alpha=0.0, beta=1.0),
    AlphaBeta(alpha=1.0, beta=0.0),
    AlphaBeta(alpha=1e-6, beta=(1e-8, 1e-9, 1e-9, 1e-10)),
    AlphaBeta(alpha=(1e-6, 1e-5, 1e-6, 1e-7), beta=(1e-9, 1e-9, 1e-7, 1e-8)),
]
MESHES = [(2,), (3,), (2, 2), (2, 3), (4, 2), (1, 4), (2, 2, 2), (2, 1, 3)]


def walk(src: Layout, dst: Layout, shape: tuple[int, ...], cost: AlphaBeta, least: Any) -> float:
    """Return the price of the cheapest walk where only single axes and pairs have groups."""
    found = _search.cheapest_walk(
        src,
        dst,
        shape,
        lambda step: _pricing.step_seconds(step, shape, ITEMSIZE, cost),
        lambda step: len(step.axes) <= 2,
        least,
    )
    assert found is not None
    return float(_pricing.seconds(found, shape, ITEMSIZE, cost))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(MESHES), st.sampled_from(MODELS), st.data())
def test_what_a_walk_costs_at_least_is_no_more_than_the_cheapest_costs(
    mesh: tuple[int, ...], cost: AlphaBeta, data: st.DataObject
) -> None:
    """And looking where it is least first finds the cheapest."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple))
    # Plans are searched for without axes of one rank, which mean nothing.
    src = _links.replicated(data.draw(layouts(mesh, len(shape), ("sum",))))
    dst = _links.replicated(data.draw(layouts(mesh, len(shape))))
    least = _least.least_seconds(dst, shape, ITEMSIZE, cost, 2)
    cheapest = walk(src, dst, shape, cost, lambda here: 0.0)
    assert least(src) <= cheapest * (1 + 1e-9)
    assert walk(src, dst, shape, cost, least) == pytest.approx(cheapest, rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(MESHES), st.sampled_from(MODELS), st.data())
def test_a_step_costs_at_least_by_how_much_it_brings_the_end_nearer(
    mesh: tuple[int, ...], cost: AlphaBeta, data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple))
    # Plans are searched for without axes of one rank, which mean nothing.
    src = _links.replicated(data.draw(layouts(mesh, len(shape), ("sum",))))
    dst = _links.replicated(data.draw(layouts(mesh, len(shape))))
    least = _least.least_seconds(dst, shape, ITEMSIZE, cost, 2)
    price = _largest_byte(cost)
    for step in _search._next_steps(src, dst, shape):
        if len(step.axes) > 2:
            continue
        spent = _pricing.step_seconds(step, shape, ITEMSIZE, cost)
        # An all-reduce counts whole bytes, rounded down.
        assert least(src) <= (spent + least(step.target)) * (1 + 1e-9) + price, step
    assert least(dst) == 0.0


def _largest_byte(cost: AlphaBeta) -> float:
    return max(cost.beta) if isinstance(cost.beta, tuple) else cost.beta


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
    _plan._choose.cache_clear()
    _plan.make_plan.cache_clear()
    with mock.patch.object(_search, "_next_steps", wraps=_search._next_steps) as look:
        try:
            _plan.make_plan(*pair, shape, 0, ITEMSIZE, cost, groups, limit)
        except NoPlanError:
            assert limit == 1
    return look.call_count


@pytest.mark.parametrize(
    ("cost", "groups", "most"),
    [
        (MODELS[0], None, 50),
        (MODELS[0], frozenset(), 50),
        (MODELS[1], None, 80),
        (MODELS[3], None, 150),
        (MODELS[3], frozenset(), 350),
    ],
)
def test_plans_on_four_axes_look_beyond_few_layouts(
    cost: AlphaBeta, groups: Any, most: int
) -> None:
    """And beyond less than a quarter of those that are looked at where nothing is known."""
    shape = (63, 62, 61)
    some = [pair for pair in pairs((2, 2, 2, 2), 8) if pair[0].has_partial][:2]
    counts = [expanded(pair, shape, cost, groups, None) for pair in some]
    with mock.patch.object(_plan, "least_seconds", return_value=lambda here: 0.0):
        blind = [expanded(pair, shape, cost, groups, None) for pair in some]
    assert max(counts) <= most
    assert 4 * sum(counts) < sum(blind)


def test_a_search_on_four_axes_ends_before_its_bound_on_work() -> None:
    """Also that for the least memory, and one at prices of which nothing is known."""
    for limit in (None, 1):
        for cost in (Priced(),):
            counts = [
                expanded(pair, (64, 64, 64), cost, frozenset(), limit)
                for pair in pairs((2, 4, 2, 8), 1)
            ]
            assert max(counts) < _search._MOST_LAYOUTS


class Priced:
    """A model of another kind."""

    def seconds(self, axes: Any, ranks: int, received: float) -> float:
        """Return a price that grows with the root of the bytes."""
        return math.sqrt(received) + ranks


def test_the_search_gives_up_at_its_bound_and_the_usual_ways_remain() -> None:
    src, dst = pairs((2, 2, 2, 2), 1)[0]
    with mock.patch.object(_search, "_MOST_LAYOUTS", 0):
        _plan._choose.cache_clear()
        _plan.make_plan.cache_clear()
        plan = _plan.make_plan(src, dst, (64, 64, 64), 0, 4, MODELS[3], None, None)
    _plan._choose.cache_clear()
    _plan.make_plan.cache_clear()
    searched = _plan.make_plan(src, dst, (64, 64, 64), 0, 4, MODELS[3], None, None)
    assert plan.steps[-1].target == dst
    assert searched.time <= plan.time
