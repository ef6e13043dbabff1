"""Plans carried out by all ranks of a simulated world give slices of the global tensor."""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hp_dtensor import (
    AlphaBeta,
    Axis,
    Collectives,
    Layout,
    Partial,
    RecordingCollectives,
    Replicate,
    Shard,
    plan_transfer,
)
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import Case, cases, free_cases, free_layouts

_package = plan_transfer.__module__.rpartition("._")[0]
_execute = import_module(f"{_package}._execute")
_groups = import_module(f"{_package}._groups")
_plan = import_module(f"{_package}._planner")

R, S0, S1 = Replicate(), Shard(0), Shard(1)
WORLD = 10  # ranks of which meshes take some


def reduced(parts: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(parts)
    if op in ("max", "min"):
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    if op == "prod":
        return stacked.prod(0)
    return stacked.sum(0) / (len(parts) if op == "avg" else 1)


def global_values(layout: Layout, shape: tuple[int, ...]) -> Tensor:
    """Return one whole-number global tensor for each coordinate of the partial axes."""
    degrees = [
        n if isinstance(p, Partial) else 1
        for n, p in zip(layout.mesh_shape, layout.placements, strict=True)
    ]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-4, 5, (*degrees, *shape), generator=generator).double()


def part(values: Tensor, layout: Layout, shape: tuple[int, ...], rank: int) -> Tensor:
    """Return the local tensor of ``rank``: the box in the values of its partial coordinate."""
    coordinate = layout.coordinate(rank)
    index = [i if values.shape[axis] > 1 else 0 for axis, i in enumerate(coordinate)]
    box = layout.box_at(shape, coordinate)
    cells: list[int | slice] = [*index, *(slice(lo, hi) for lo, hi in box)]
    return values[tuple(cells)].clone()


def expected(values: Tensor, case: Case, rank: int) -> Tensor:
    for axis, (old, new) in enumerate(
        zip(case.source.placements, case.target.placements, strict=True)
    ):
        if isinstance(old, Partial) and old != new:
            values = reduced(list(values.split(1, dim=axis)), old.op)
    return part(values, case.target, case.shape, rank)


def group_finder(plan: Any, collectives: SimulatedCollectives) -> Callable[[Any], Any]:
    """Return a function that returns the group of a step: its axes, or all ranks."""

    def find(step: Any) -> Any:
        layout, axes = step.source, step.axes
        ranks = list(range(WORLD))
        if step.kind != "transfer":
            mine = layout.coordinate(plan.rank)
            ranks = [
                rank
                for rank in layout.ranks or range(layout.size)
                if all(
                    a == b or axis in axes
                    for axis, (a, b) in enumerate(zip(layout.coordinate(rank), mine, strict=True))
                )
            ]
        axis: Axis = collectives.axis(str(axes), ranks)
        return _groups.AxisGroup(lambda: axis, tuple(range(len(ranks))), len(ranks))

    return find


def carried_out(
    plan: Any, local: Tensor, find: Callable[[Any], Any], collectives: Collectives
) -> Tensor:
    groups = {
        step: find(step)
        for step in plan.steps
        if step.kind != "slice" and (step.source.holds(plan.rank) or step.target.holds(plan.rank))
    }
    result: Tensor = _execute.start(_execute.bind(plan, groups), local, collectives)()
    return result


def run(
    case: Case,
    dtype: torch.dtype = torch.double,
    spanned: frozenset[tuple[int, ...]] | None = None,
    cost: AlphaBeta | None = None,
) -> list[tuple[Tensor, Any, int]]:
    """Carry out a case on all ranks: results, plans, and received bytes as counted."""
    values = global_values(case.source, case.shape).to(dtype)

    def member(rank: int, simulated: SimulatedCollectives) -> tuple[Tensor, Any, int]:
        plan: Any = _plan.make_plan(*case, rank, dtype.itemsize, cost, spanned)
        collectives = RecordingCollectives(simulated)
        local = part(values, case.source, case.shape, rank)
        result = carried_out(plan, local, group_finder(plan, simulated), collectives)
        return result, plan, sum(traffic.bytes for traffic in collectives.by_axis.values())

    return SimulatedWorld(case.source.size, timeout=200.0).run(member)


@settings(deadline=None, max_examples=150)
@given(cases(), st.sampled_from([None, frozenset()]))
def test_all_ranks_get_their_slice_and_receive_the_predicted_bytes(
    case: Case, spanned: frozenset[tuple[int, ...]] | None
) -> None:
    values = global_values(case.source, case.shape)
    for rank, (result, plan, received) in enumerate(run(case, spanned=spanned)):
        assert torch.equal(result, expected(values, case, rank))
        assert result.is_contiguous()
        assert received == plan.bytes_received


COSTS = [
    None,
    AlphaBeta(alpha=1.0, beta=0.0),
    AlphaBeta(alpha=0.0, beta=1.0),
    AlphaBeta(alpha=0.0, beta=(9.0, 1.0, 3.0)),
    AlphaBeta(alpha=1.0, beta=(0.1, 5.0, 1.0)),
]


@settings(deadline=None, max_examples=250)
@given(cases(partial=True), st.sampled_from([None, frozenset()]), st.sampled_from(COSTS))
def test_partial_values_are_reduced_over_exactly_their_axes(
    case: Case, spanned: frozenset[tuple[int, ...]] | None, cost: AlphaBeta | None
) -> None:
    values = global_values(case.source, case.shape)
    for rank, (result, plan, received) in enumerate(run(case, spanned=spanned, cost=cost)):
        torch.testing.assert_close(result, expected(values, case, rank), rtol=1e-12, atol=1e-12)
        assert received == plan.bytes_received


class Listening:
    """Collectives that record the calls for each group of ranks."""

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner
        self.heard: dict[tuple[int, ...], list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(axis: Axis, *args: Any, **kwargs: Any) -> Any:
            self.heard.setdefault(axis.ranks, []).append(name)
            return getattr(self._inner, name)(axis, *args, **kwargs)

        return call


@settings(deadline=None, max_examples=100)
@given(cases(partial=True), st.sampled_from([None, frozenset()]), st.sampled_from(COSTS))
def test_every_rank_makes_the_same_calls_on_each_group_also_with_nothing_to_move(
    case: Case, spanned: frozenset[tuple[int, ...]] | None, cost: AlphaBeta | None
) -> None:
    values = global_values(case.source, case.shape)

    def member(rank: int, simulated: SimulatedCollectives) -> dict[tuple[int, ...], list[str]]:
        plan: Any = _plan.make_plan(*case, rank, 8, cost, spanned)
        collectives = Listening(simulated)
        local = part(values, case.source, case.shape, rank)
        carried_out(plan, local, group_finder(plan, simulated), cast(Collectives, collectives))
        return collectives.heard

    heard = SimulatedWorld(case.source.size, timeout=200.0).run(member)
    for calls in heard:
        for group, names in calls.items():
            assert all(heard[rank].get(group) == names for rank in group)


def moved(
    case: Case,
    given: dict[int, Tensor] | None = None,
    cost: AlphaBeta | None = None,
    single: bool = False,
) -> list[tuple[Tensor | None, int, int]]:
    """Execute a case without partial values. Some ranks of the world are in no mesh.

    Returns the local tensor of each rank, the received bytes and the predicted bytes. ``given`` are
    the input parts. If it is None, they are slices of a global tensor. If ``single`` is True, only
    single axes have groups.
    """
    full = torch.arange(1, 1 + math.prod(case.shape)).view(case.shape).double()
    groups: frozenset[tuple[int, ...]] | None = frozenset() if single else None

    def member(rank: int, simulated: SimulatedCollectives) -> tuple[Tensor | None, int, int]:
        plan: Any = _plan.make_plan(*case, rank, 8, cost, groups)
        collectives = RecordingCollectives(simulated)
        local = full.new_empty(0)
        if case.source.holds(rank):
            local = cut(full, case.source, rank) if given is None else given[rank]
        result = carried_out(plan, local, group_finder(plan, simulated), collectives)
        received = sum(traffic.bytes for traffic in collectives.by_axis.values())
        here = case.target.holds(rank)
        return result if here else None, received, plan.bytes_received

    return SimulatedWorld(WORLD, timeout=200.0).run(member)


def cut(full: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return the local tensor of a rank."""
    grid = layout.intervals_at(tuple(full.shape), layout.coordinate(rank))
    for dim, ranges in enumerate(grid):
        parts = [full.narrow(dim, lo, hi - lo) for lo, hi in ranges]
        full = torch.cat(parts, dim) if parts else full.narrow(dim, 0, 0)
    if layout.ragged is not None:
        start, stop = layout.run_at(layout.coordinate(rank))
        lead = len(layout.ragged[1].dims)
        rows = math.prod(full.shape[:lead])
        full = full.reshape(rows, *full.shape[lead:])[start:stop]
    return full.contiguous()


@settings(deadline=None, max_examples=250)
@given(free_cases(world=WORLD), st.sampled_from(COSTS), st.booleans())
def test_any_layouts_on_any_two_meshes_give_slices_and_receive_the_predicted_bytes(
    case: Case, cost: AlphaBeta | None, single: bool
) -> None:
    """Strided, ragged, overlapping, disjoint, permuted; with idle ranks."""
    full = torch.arange(1, 1 + math.prod(case.shape)).view(case.shape).double()
    for rank, (result, received, predicted) in enumerate(moved(case, None, cost, single)):
        assert received == predicted
        if result is not None:
            wanted = cut(full, case.target, rank)
            assert torch.equal(result, wanted)
            assert result.shape == wanted.shape


@settings(deadline=None, max_examples=100)
@given(cases(partial=True), st.sampled_from([(4,), (2, 2), (3,), (1, 4)]), st.data())
def test_partial_values_are_reduced_on_their_way_to_another_mesh(
    case: Case, mesh: tuple[int, ...], data: st.DataObject
) -> None:
    source, _, shape = case
    ranks = range(WORLD - math.prod(mesh), WORLD)
    target = data.draw(free_layouts(mesh, shape, ranks))
    values = global_values(source, shape)
    full = values
    for axis, placement in enumerate(source.placements):
        if isinstance(placement, Partial):
            full = reduced(list(full.split(1, dim=axis)), placement.op)

    def member(rank: int, simulated: SimulatedCollectives) -> tuple[Tensor, int, int]:
        plan: Any = _plan.make_plan(source, target, shape, rank, 8)
        collectives = RecordingCollectives(simulated)
        local = values.new_empty(0)
        if source.holds(rank):
            local = part(values, source, shape, rank)
        result = carried_out(plan, local, group_finder(plan, simulated), collectives)
        return result, sum(t.bytes for t in collectives.by_axis.values()), plan.bytes_received

    results = SimulatedWorld(WORLD, timeout=200.0).run(member)
    for rank, (result, received, predicted) in enumerate(results):
        assert received == predicted
        if target.holds(rank):
            wanted = cut(full.reshape(shape), target, rank)
            torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_over_a_third_layout_is_the_same_as_straight(data: st.DataObject) -> None:
    first, second, shape = data.draw(free_cases(world=WORLD))
    mesh = data.draw(st.sampled_from([(4,), (2, 2), (2, 3), (1, 4)]))
    third = data.draw(free_layouts(mesh, shape, range(WORLD - math.prod(mesh), WORLD)))
    there = {
        rank: local
        for rank, (local, _, _) in enumerate(moved(Case(first, second, shape)))
        if local is not None
    }
    over = moved(Case(second, third, shape), there)
    for (a, _, _), (b, _, _) in zip(over, moved(Case(first, third, shape)), strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)


@settings(deadline=None, max_examples=60)
@given(cases())
def test_there_and_back_is_identity(case: Case) -> None:
    values = global_values(case.source, case.shape)
    there = run(case)
    back = Case(case.target, case.source, case.shape)
    plans = [_plan.make_plan(*back, rank, 8) for rank in case.ranks]

    def member(rank: int, collectives: SimulatedCollectives) -> Tensor:
        return carried_out(
            plans[rank], there[rank][0], group_finder(plans[rank], collectives), collectives
        )

    for rank, result in enumerate(SimulatedWorld(case.source.size).run(member)):
        assert torch.equal(result, part(values, case.source, case.shape, rank))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_any_dtype_moves(dtype: torch.dtype) -> None:
    case = Case(Layout((2, 2), (S0, S1)), Layout((2, 2), (S1, S0)), (5, 7))
    values = global_values(case.source, case.shape).to(dtype)
    for rank, (result, _, _) in enumerate(run(case, dtype)):
        assert torch.equal(result, expected(values, case, rank))


def test_a_result_that_moved_shares_no_memory_with_its_input() -> None:
    layout = Layout((2,), (R,))
    plan = _plan.make_plan(layout, Layout((2,), (S0,)), (4,), 0)
    local = torch.zeros(4)

    def no_group(step: Any) -> Any:
        raise AssertionError(f"a slice needs no group, asked for one for {step}")

    collectives: Collectives = RecordingCollectives()
    result = carried_out(plan, local, no_group, collectives)
    result.fill_(1.0)
    assert math.isclose(local.sum().item(), 0.0)
