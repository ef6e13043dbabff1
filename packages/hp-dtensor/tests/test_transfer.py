"""Transfers: the plans of all ranks match, and each rank receives only missing elements."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from hp_dtensor import (
    Layout,
    LayoutError,
    MeshError,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    plan_transfer,
)

from .strategies import Case, cases, free_cases

Box = tuple[tuple[int, int], ...]

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def volume(box: Box) -> int:
    return int(np.prod([hi - lo for lo, hi in box], dtype=int))


def planned(case: Case) -> dict[int, Any]:
    return {rank: plan_transfer(*case, rank) for rank in case.ranks}


def check_sends_match(plans: dict[int, Any]) -> None:
    sent = [(r, peer, box) for r, plan in plans.items() for peer, box in plan.sends]
    expected = [(peer, r, box) for r, plan in plans.items() for peer, box in plan.recvs]
    assert sorted(sent) == sorted(expected)
    assert all(sender != receiver for sender, receiver, _ in sent)


def check_moves(case: Case, plans: dict[int, Any]) -> None:
    """Simulate the plans. Every rank has its slice and received only missing elements."""
    source, target, shape = case
    full = np.arange(1, 1 + int(np.prod(shape, dtype=int))).reshape(shape)
    for rank, plan in plans.items():
        result, held, wanted = (np.zeros_like(full) for _ in range(3))
        for peer, box in [*plan.recvs, *((rank, box) for box in plan.local)]:
            theirs = np.zeros_like(full)
            for mine in source.boxes(shape, peer):
                theirs[cells(mine)] = full[cells(mine)]
            assert (result[cells(box)] == 0).all()
            result[cells(box)] = theirs[cells(box)]
        for layout, array in ((source, held), (target, wanted)):
            for box in layout.boxes(shape, rank) if layout.holds(rank) else ():
                array[cells(box)] = full[cells(box)]
        np.testing.assert_array_equal(result, wanted)
        received = sum(volume(box) for _, box in plan.recvs)
        assert received == ((wanted > 0) & (held == 0)).sum()
        assert sum(volume(box) for box in plan.local) == ((wanted > 0) & (held > 0)).sum()


def cells(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)


@settings(deadline=None, max_examples=300)
@given(cases())
def test_sent_boxes_equal_the_expected_ones(case: Case) -> None:
    check_sends_match(planned(case))


@settings(deadline=None, max_examples=300)
@given(cases())
def test_moving_the_boxes_is_slicing_and_receives_the_lower_bound(case: Case) -> None:
    check_moves(case, planned(case))


@settings(deadline=None, max_examples=800)
@given(free_cases())
def test_any_layouts_on_any_two_meshes_fit_together(case: Case) -> None:
    """Strided, ragged, other shapes, overlapping, disjoint and permuted ranks."""
    plans = planned(case)
    check_sends_match(plans)
    check_moves(case, plans)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 4), (4, 2), (2, 2, 2)])
def test_sends_are_balanced_over_replicas_where_dims_divide(mesh: tuple[int, ...]) -> None:
    kinds: list[Replicate | Shard | Partial] = [R, S0, S1]
    pairs, uneven = 0, 0
    for source in product(kinds, repeat=len(mesh)):
        for target in product(kinds, repeat=len(mesh)):
            case = Case(Layout(mesh, source), Layout(mesh, target), (16, 16))
            plans = planned(case)
            sent = max(sum(volume(box) for _, box in plan.sends) for plan in plans.values())
            received = max(sum(volume(box) for _, box in plan.recvs) for plan in plans.values())
            assert sent <= 2 * received, case
            pairs += 1
            uneven += sent > received
    assert uneven <= pairs / 100


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Layout((2, 4), (R, S0)), Layout((8,), (S1,))),
        (Layout((2, 4), (R, S0)), Layout((8,), (R,))),
        (Layout((4, 2), (S0, R)), Layout((2, 4), (S0, S1), ranks=range(8, 16))),
        (Layout((4,), (R,)), Layout((4,), (S0,), ranks=range(2, 6))),
        (Layout((2, 2, 2), (R, R, S0)), Layout((2, 4), (S1, R), ranks=range(4, 12))),
    ],
)
def test_between_meshes_replicas_share_the_sending(source: Layout, target: Layout) -> None:
    plans = planned(Case(source, target, (16, 16)))
    sent = [sum(volume(box) for _, box in plan.sends) for plan in plans.values()]
    received = [sum(volume(box) for _, box in plan.recvs) for plan in plans.values()]
    assert max(sent) <= max(received)


def test_between_meshes_each_node_is_served_by_its_own_replicas() -> None:
    source, target = Layout((4, 2), (R, S0)), Layout((8,), (R,))
    plans = planned(Case(source, target, (8, 8)))
    across = [(r, p) for r, plan in plans.items() for p, _ in plan.recvs if r // 2 != p // 2]
    assert across == []


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


BIG = range(131072)


@pytest.mark.parametrize(
    ("source", "target", "peers"),
    [
        (Layout((512, 16, 16), (R, S0, S1)), Layout((512, 16, 16), (R, S1, S0)), 1),
        (Layout((8192, 16), (S0, S1)), Layout((8192, 16), (S0, R)), 15),
        (Layout((512, 16, 16), (S0, R, S1)), Layout((512, 16, 16), (R, S0, S1)), 32),
        (Layout((8192, 16), (S0, S1)), Layout((16384, 8), (S0, S1), ranks=BIG[::-1]), 4),
        (Layout((8192, 16), (R, S0)), Layout((131072,), (S0,)), 2),
        (Layout((8192, 16), (S0, S1)), Layout((4096, 16), (S0, S1), ranks=range(65536)), 3),
        (Layout((131072,), (StridedShard(0, 4),)), Layout((131072,), (S0,)), 4),
    ],
)
def test_a_rank_of_131072_talks_to_its_few_peers_only(
    source: Layout, target: Layout, peers: int
) -> None:
    plan = plan_transfer(source, target, (131072 * 4, 131072), 43691)
    assert 0 < len(plan.recvs) <= peers
    assert len(plan.sends) <= peers


def test_errors_name_the_axis_and_the_remedy() -> None:
    with pytest.raises(LayoutError, match=r"axis 0 .* reduce it first"):
        plan_transfer(Layout((2,), (P,)), Layout((2,), (R,)), (4,), 0)
    with pytest.raises(LayoutError, match=r"axis 0 goes from R to P\(sum\)"):
        plan_transfer(Layout((2,), (R,)), Layout((2,), (P,)), (4,), 0)
    with pytest.raises(LayoutError, match=r"from P\(sum\) to P\(max\)"):
        plan_transfer(Layout((2,), (P,)), Layout((2,), (Partial("max"),)), (4,), 0)
    with pytest.raises(LayoutError, match=r"from P\(sum\) to another mesh; reduce it first"):
        plan_transfer(Layout((2, 2), (P, S0)), Layout((4,), (S0,)), (4,), 0)
    with pytest.raises(LayoutError, match=r"from another mesh to P\(sum\)"):
        plan_transfer(Layout((2,), (P,)), Layout((2,), (P,), ranks=(2, 3)), (4,), 0)
    with pytest.raises(MeshError, match=r"rank 4 is neither .* shape \(2,\) nor"):
        plan_transfer(Layout((2,), (S0,)), Layout((2,), (S0,), ranks=(2, 3)), (4,), 4)
    with pytest.raises(LayoutError, match="dims that can be sharded: none"):
        plan_transfer(Layout((2,), (R,)), Layout((2,), (S0,)), (), 0)
    with pytest.raises(LayoutError, match=r"source must be a Layout, got \(Replicate"):
        plan_transfer((R,), Layout((2,), (S0,)), (4,), 0)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="target must be a Layout, got None"):
        plan_transfer(Layout((2,), (S0,)), None, (4,), 0)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"shape=\(4, -2\) has negative sizes"):
        plan_transfer(Layout((2,), (R,)), Layout((2,), (S0,)), (4, -2), 0)
