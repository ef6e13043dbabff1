"""Plans carried out by all ranks of a simulated world give slices of the global tensor."""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hp_dtensor import (
    Axis,
    Collectives,
    Layout,
    Partial,
    Plan,
    RecordingCollectives,
    Replicate,
    Shard,
    SimulatedCollectives,
    SimulatedWorld,
    plan_transfer,
)

from .strategies import Case, cases

_package = plan_transfer.__module__.rpartition(".")[0]
_execute = import_module(f"{_package}._execute")
_stages = import_module(f"{_package}._stages")
_plan = import_module(f"{_package}._plan")

R, S0, S1 = Replicate(), Shard(0), Shard(1)


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
    """Return what ``rank`` holds: its coordinate's values where partial, then its box."""
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


def folder(plan: Plan, door: SimulatedCollectives) -> Callable[[tuple[int, ...]], Any]:
    """Return how to find the group over some axes, named by them."""
    layout = plan.source

    def fold(axes: tuple[int, ...]) -> Any:
        mine = layout.coordinate(plan.rank)
        ranks = [
            rank
            for rank in range(layout.size)
            if all(
                a == b or axis in axes
                for axis, (a, b) in enumerate(zip(layout.coordinate(rank), mine, strict=True))
            )
        ]
        axis: Axis = door.axis(str(axes), ranks)
        return _stages.Fold(lambda: axis, tuple(range(len(ranks))), len(ranks))

    return fold


def carried_out(
    plan: Plan, local: Tensor, fold: Callable[[tuple[int, ...]], Any], door: Collectives
) -> Tensor:
    result: Tensor = _execute.start(_execute.prepare(plan, fold), local, door)()
    return result


def run(
    case: Case, dtype: torch.dtype = torch.double, folded: frozenset[tuple[int, ...]] | None = None
) -> list[tuple[Tensor, Plan, int]]:
    """Carry out a case on all ranks: results, plans, and received bytes as counted."""
    values = global_values(case.source, case.shape).to(dtype)

    def member(rank: int, simulated: SimulatedCollectives) -> tuple[Tensor, Plan, int]:
        plan: Plan = _plan.make_plan(*case, rank, dtype.itemsize, None, folded)
        door = RecordingCollectives(simulated)
        local = part(values, case.source, case.shape, rank)
        result = carried_out(plan, local, folder(plan, simulated), door)
        return result, plan, sum(traffic.bytes for traffic in door.by_axis.values())

    return SimulatedWorld(case.source.size, timeout=20.0).run(member)


@settings(deadline=None, max_examples=150)
@given(cases(), st.sampled_from([None, frozenset()]))
def test_all_ranks_get_their_slice_and_receive_what_was_predicted(
    case: Case, folded: frozenset[tuple[int, ...]] | None
) -> None:
    values = global_values(case.source, case.shape)
    for rank, (result, plan, received) in enumerate(run(case, folded=folded)):
        assert torch.equal(result, expected(values, case, rank))
        assert result.is_contiguous()
        assert received == plan.bytes_received


@settings(deadline=None, max_examples=150)
@given(cases(partial=True), st.sampled_from([None, frozenset()]))
def test_partial_values_are_reduced_over_exactly_their_axes(
    case: Case, folded: frozenset[tuple[int, ...]] | None
) -> None:
    values = global_values(case.source, case.shape)
    for rank, (result, plan, received) in enumerate(run(case, folded=folded)):
        torch.testing.assert_close(result, expected(values, case, rank), rtol=1e-12, atol=1e-12)
        assert received == plan.bytes_received


@settings(deadline=None, max_examples=60)
@given(cases())
def test_there_and_back_is_identity(case: Case) -> None:
    values = global_values(case.source, case.shape)
    there = run(case)
    back = Case(case.target, case.source, case.shape)
    plans = [_plan.make_plan(*back, rank, 8) for rank in case.ranks]

    def member(rank: int, door: SimulatedCollectives) -> Tensor:
        return carried_out(plans[rank], there[rank][0], folder(plans[rank], door), door)

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

    def no_group(axes: tuple[int, ...]) -> Any:
        raise AssertionError(f"a slice needs no group, asked for {axes}")

    door: Collectives = RecordingCollectives()
    result = carried_out(plan, local, no_group, door)
    result.fill_(1.0)
    assert math.isclose(local.sum().item(), 0.0)
