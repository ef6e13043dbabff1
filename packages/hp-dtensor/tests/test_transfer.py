"""Transfers: what all ranks plan alone fits together and moves no element too many."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from hp_dtensor import (
    Box,
    CrossMeshError,
    Layout,
    LayoutError,
    Partial,
    PartialSourceError,
    PartialTargetError,
    PlacementTypeError,
    Replicate,
    Shard,
    ShardDimError,
    Transfer,
    plan_transfer,
)

from .strategies import Case, cases

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def volume(box: Box) -> int:
    return int(np.prod([hi - lo for lo, hi in box], dtype=int))


def planned(case: Case) -> list[Transfer]:
    return [plan_transfer(*case, rank) for rank in case.ranks]


def cells(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)


@settings(deadline=None, max_examples=200)
@given(cases())
def test_what_one_rank_sends_another_expects(case: Case) -> None:
    plans = planned(case)
    sent = [(r, peer, box) for r, plan in enumerate(plans) for peer, box in plan.sends]
    expected = [(peer, r, box) for r, plan in enumerate(plans) for peer, box in plan.recvs]
    assert sorted(sent) == sorted(expected)
    assert all(sender != receiver for sender, receiver, _ in sent)


@settings(deadline=None, max_examples=200)
@given(cases())
def test_moving_the_boxes_is_slicing_the_global_array(case: Case) -> None:
    source, target, shape = case
    full = np.arange(1, 1 + int(np.prod(shape, dtype=int))).reshape(shape)
    held: list[npt.NDArray[np.int_]] = []
    for rank in case.ranks:
        mine = np.zeros_like(full)
        for box in source.boxes(shape, rank):
            mine[cells(box)] = full[cells(box)]
        held.append(mine)
    for rank, plan in enumerate(planned(case)):
        result = np.zeros_like(full)
        for peer, box in [*plan.recvs, *((rank, box) for box in plan.local)]:
            assert (result[cells(box)] == 0).all()
            result[cells(box)] = held[peer][cells(box)]
        wanted = np.zeros_like(full)
        for box in target.boxes(shape, rank):
            wanted[cells(box)] = full[cells(box)]
        np.testing.assert_array_equal(result, wanted)


@settings(deadline=None, max_examples=300)
@given(cases())
def test_ranks_receive_exactly_what_they_need_and_do_not_hold(case: Case) -> None:
    source, target, shape = case
    for rank, plan in enumerate(planned(case)):
        needed, held = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        for box in target.boxes(shape, rank):
            needed[cells(box)] = True
        for box in source.boxes(shape, rank):
            held[cells(box)] = True
        assert sum(volume(box) for _, box in plan.recvs) == (needed & ~held).sum()
        assert sum(volume(box) for box in plan.local) == (needed & held).sum()


@pytest.mark.parametrize("mesh", [(2, 2), (2, 4), (4, 2), (2, 2, 2)])
def test_sends_are_balanced_over_replicas_where_dims_divide(mesh: tuple[int, ...]) -> None:
    kinds: list[Replicate | Shard | Partial] = [R, S0, S1]
    pairs, uneven = 0, 0
    for source in product(kinds, repeat=len(mesh)):
        for target in product(kinds, repeat=len(mesh)):
            case = Case(Layout(mesh, source), Layout(mesh, target), (16, 16))
            plans = planned(case)
            sent = max(sum(volume(box) for _, box in plan.sends) for plan in plans)
            received = max(sum(volume(box) for _, box in plan.recvs) for plan in plans)
            assert sent <= 2 * received, case
            pairs += 1
            uneven += sent > received
    assert uneven <= pairs / 100


def test_replicas_serve_their_own_neighbours() -> None:
    hsdp, target = Layout((2, 4), (R, S0)), Layout((2, 4), (R, S1))
    across = [
        (rank, peer)
        for rank in range(8)
        for peer, _ in plan_transfer(hsdp, target, (8, 8), rank).recvs
        if rank // 4 != peer // 4
    ]
    assert across == []


def test_partial_axes_that_stay_move_each_their_own_values() -> None:
    source, target = Layout((2, 2), (P, S0)), Layout((2, 2), (P, S1))
    assert plan_transfer(source, target, (4, 4), 3).recvs == ((2, ((0, 2), (2, 4))),)


@pytest.mark.parametrize(
    ("mesh", "source", "target", "peers"),
    [
        ((512, 16, 16), (R, S0, S1), (R, S1, S0), 1),
        ((8192, 16), (S0, S1), (S0, R), 15),
        ((512, 16, 16), (S0, R, S1), (R, S0, S1), 32),
    ],
)
def test_a_rank_of_131072_talks_to_its_few_peers_only(
    mesh: tuple[int, ...],
    source: Sequence[Replicate | Shard],
    target: Sequence[Replicate | Shard],
    peers: int,
) -> None:
    pair = Layout(mesh, tuple(source)), Layout(mesh, tuple(target))
    plan = plan_transfer(*pair, (131072, 131072), 43690)
    assert len(plan.recvs) <= peers
    assert len(plan.sends) <= peers


def test_errors_name_the_axis_and_the_remedy() -> None:
    with pytest.raises(PartialSourceError, match=r"axis 0 .* reduce it first"):
        plan_transfer(Layout((2,), (P,)), Layout((2,), (R,)), (4,), 0)
    with pytest.raises(PartialTargetError, match=r"axis 0 goes from R to P\(sum\)"):
        plan_transfer(Layout((2,), (R,)), Layout((2,), (P,)), (4,), 0)
    with pytest.raises(PartialTargetError, match=r"from P\(sum\) to P\(max\)"):
        plan_transfer(Layout((2,), (P,)), Layout((2,), (Partial("max"),)), (4,), 0)
    with pytest.raises(CrossMeshError, match=r"\(2, 2\) and shape \(4,\)"):
        plan_transfer(Layout((2, 2), (R, S0)), Layout((4,), (S0,)), (4,), 0)
    with pytest.raises(CrossMeshError, match="different ranks"):
        plan_transfer(Layout((2,), (S0,)), Layout((2,), (S0,), ranks=(2, 3)), (4,), 0)
    with pytest.raises(ShardDimError, match="dims that can be sharded: none"):
        plan_transfer(Layout((2,), (R,)), Layout((2,), (S0,)), (), 0)
    with pytest.raises(PlacementTypeError, match=r"source must be a Layout, got \(Replicate"):
        plan_transfer((R,), Layout((2,), (S0,)), (4,), 0)  # type: ignore[arg-type]
    with pytest.raises(PlacementTypeError, match="target must be a Layout, got None"):
        plan_transfer(Layout((2,), (S0,)), None, (4,), 0)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"shape=\(4, -2\) has negative sizes"):
        plan_transfer(Layout((2,), (R,)), Layout((2,), (S0,)), (4, -2), 0)
