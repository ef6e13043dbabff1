"""Placements are legal whatever the load, and as even as experts can be put."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_ep import (
    ExpertConfigError,
    LoadStats,
    Placement,
    plan_migration,
    plan_placement,
    smooth_load,
)

LOADS = st.floats(0, 1e6, allow_subnormal=False)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Draw arguments of `plan_placement`."""
    nodes, node_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = nodes * node_size
    experts = draw(st.integers(1, 12))
    load = draw(st.lists(LOADS, min_size=experts, max_size=experts))
    least, most = -experts % ranks, experts * (ranks - 1)
    replicas = draw(st.sampled_from(range(least, most + 1, ranks)))
    return dict(load=load, num_ranks=ranks, num_replicas=replicas, node_size=node_size)


@settings(deadline=None, max_examples=200)
@given(problems())
def test_a_plan_fills_every_slot_with_few_and_distinct_replicas(problem: dict[str, Any]) -> None:
    load, ranks = problem["load"], problem["num_ranks"]
    found = plan_placement(**problem)  # refuses itself two replicas on one rank, missing experts
    assert len(found.experts) == len(load) + problem["num_replicas"]
    loads = found.rank_load(load)
    assert len(loads) == ranks
    assert math.isclose(sum(loads), sum(load), rel_tol=1e-9, abs_tol=1e-9)
    copies = Counter(found.experts)
    # No replica is where another expert needs it more: one fewer there is at least as heavy.
    for e, n in copies.items():
        if n > 1:
            given_up = load[e] / (n - 1)
            others = [load[f] / copies[f] for f in range(len(load)) if copies[f] < ranks]
            assert given_up >= max(others, default=0.0)


def test_a_zipf_load_is_evened_by_packing_and_by_replicas() -> None:
    load = [1 / (1 + (i * 37) % 256) for i in range(256)]
    contiguous = Placement.contiguous(256, 32).imbalance(load)
    packed = plan_placement(load, 32).imbalance(load)
    replicated = plan_placement(load, 32, num_replicas=32).imbalance(load)
    assert contiguous > packed > 5 > 1.02 > replicated


@settings(deadline=None, max_examples=100)
@given(problems(), st.randoms(use_true_random=False))
def test_a_migration_brings_every_slot_its_expert(problem: dict[str, Any], random: Any) -> None:
    old = plan_placement(**problem)
    load = list(problem["load"])
    random.shuffle(load)
    for near in (None, old):
        new = plan_placement(**{**problem, "load": load}, near=near)
        moves = plan_migration(old, new)
        values = [("value", e) for e in old.experts]
        after: list[Any] = [None] * len(values)
        size, ranks = old.slots_per_rank, range(old.num_ranks)
        for rank in ranks:
            for slot, source in moves.kept(rank):
                after[rank * size + slot] = values[rank * size + source]
            for peer in ranks:
                sent, taken = moves.sent(peer)[rank], moves.received(rank)[peer]
                assert len(sent) == len(taken)
                assert not (sent and peer == rank)
                for slot, source in zip(taken, sent, strict=True):
                    after[rank * size + slot] = values[peer * size + source]
        assert after == [("value", e) for e in new.experts]
        arrivals = sum(len(set(new.on_rank(r)) - set(old.on_rank(r))) for r in ranks)
        assert moves.moved == arrivals  # nothing that is here already travels
        assert moves.bytes(10) == 10 * arrivals


@settings(deadline=None, max_examples=100)
@given(problems(), st.randoms(use_true_random=False))
def test_a_plan_near_today_s_is_about_as_even_as_a_fresh_one(
    problem: dict[str, Any], random: Any
) -> None:
    old = plan_placement(**problem)
    load = list(problem["load"])
    random.shuffle(load)
    problem = {**problem, "load": load}
    fresh, near = plan_placement(**problem), plan_placement(**problem, near=old)
    assert near.imbalance(load) <= 1.05 * fresh.imbalance(load) + 1e-9


def test_a_drift_of_a_zipf_load_moves_few_experts() -> None:
    load = [1 / (1 + (i * 37) % 256) for i in range(256)]
    old = plan_placement(load, 32, num_replicas=32, node_size=8)
    load = [x * (1 + 0.02 * (i * 53 % 21 - 10)) for i, x in enumerate(load)]  # by up to a fifth
    options: dict[str, Any] = dict(num_replicas=32, node_size=8)
    fresh = plan_placement(load, 32, **options)
    near = plan_placement(load, 32, **options, near=old)
    assert 0 < 4 * plan_migration(old, near).moved < plan_migration(old, fresh).moved
    assert near.imbalance(load) <= 1.05 * fresh.imbalance(load) < old.imbalance(load)


@settings(deadline=None, max_examples=60)
@given(problems())
def test_an_equal_load_near_today_s_placement_moves_nothing(problem: dict[str, Any]) -> None:
    old = plan_placement(**problem)
    again = plan_placement(**problem, near=old)
    assert again.experts == old.experts
    assert plan_migration(old, again).moved == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(num_replicas=1), "num_replicas=1 with 6 experts does not fill the slots of 3 ranks"),
        (dict(num_replicas=15), "use 0, 3, 6, 9 or more in such steps, at most 12"),
        (dict(num_ranks=0), "num_ranks=0 must be a positive integer"),
        (dict(load=[1.0, -1.0, 1.0]), "must be finite numbers of at least 0"),
        (dict(load=[1.0, math.nan, 1.0]), "must be finite numbers of at least 0"),
        (dict(node_size=2), "node_size=2 must divide num_ranks=3"),
        (dict(near=[0, 1, 2]), "near must be a Placement"),
        (dict(near=Placement.contiguous(9, 3)), "near has 9 experts in 9 slots on 3 ranks; .* 6"),
        (dict(near=Placement.contiguous(6, 2)), "near has 6 experts in 6 slots on 2 ranks; .* 3"),
        (
            dict(near=Placement.contiguous(6, 3), num_replicas=3),
            "near has 6 experts in 6 slots on 3 ranks; these loads .* 6 in 9 slots on 3",
        ),
    ],
)
def test_plans_that_cannot_be_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ExpertConfigError, match=text):
        plan_placement(**{**dict(load=[1.0] * 6, num_ranks=3), **change})


@pytest.mark.parametrize(
    ("ranks", "experts", "slots", "text"),
    [
        (2, 3, (0, 1, 2), "3 slots on 2 ranks"),
        (2, 3, (0, 1, 1, 0), r"experts \[2\] are missing or unknown"),
        (2, 2, (0, 0, 1, 1), r"rank 0 holds experts \[0, 0\]; replicas must be on different"),
        (0, 1, (0,), "num_ranks=0 must be a positive integer"),
        (2.0, 2, (0, 1), "num_ranks=2.0 must be a positive integer"),
        (1, True, (0,), "num_experts=True must be a positive integer"),
        (1, 2, (0.0, 1), r"experts \[0.0, 1\] must be integers from 0 to 1"),
    ],
)
def test_placements_that_are_none_are_refused(
    ranks: Any, experts: Any, slots: tuple[Any, ...], text: str
) -> None:
    with pytest.raises(ExpertConfigError, match=text):
        Placement(num_ranks=ranks, num_experts=experts, experts=slots)


def test_experts_cannot_move_between_placements_of_other_sizes() -> None:
    with pytest.raises(ExpertConfigError, match=r"'num_ranks': 2.*'num_ranks': 4"):
        plan_migration(Placement.contiguous(4, 2), Placement.contiguous(4, 4))


def test_load_statistics_of_a_load() -> None:
    stats = LoadStats(expert_load=(6, 0, 1, 1), placement=Placement.contiguous(4, 2))
    assert list(stats.rank_load) == [6, 2]
    assert (stats.rank_imbalance, stats.expert_imbalance, stats.idle_experts) == (1.5, 3.0, 1)
    even = LoadStats(expert_load=(2,) * 4, placement=Placement.contiguous(4, 2))
    assert (even.rank_imbalance, even.expert_imbalance, even.idle_experts) == (1, 1, 0)
    assert math.isclose(even.entropy, 1)
    assert LoadStats(expert_load=(5, 0), placement=Placement.contiguous(2, 1)).entropy == 0
    with pytest.raises(ExpertConfigError, match="a load of 2 numbers for num_experts=4"):
        LoadStats(expert_load=(1, 1), placement=Placement.contiguous(4, 2))


def test_smoothed_loads_forget() -> None:
    assert smooth_load(None, [4, 0], 0.5) == (4, 0)
    assert smooth_load([4, 0], [0, 4], 0.75) == (3, 1)
    with pytest.raises(ExpertConfigError, match="decay=1"):
        smooth_load(None, [1], 1)
