"""Tokens find their experts wherever a placement puts them, in any of its replicas."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from rank_pool import cached
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import AxisMesh, Collectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import AllToAll, Placement, plan_placement
from hp_ep.dispatch._wrappers import Placed

from .dispatching import (
    OVER_RANKS,
    ROUTINGS,
    Meshes,
    Result,
    check,
    error_of,
    make_dispatcher,
    rank_result,
)
from .strategies import Routing, routings


def _placement(routing: Routing, num_replicas: int) -> Placement:
    experts = range(routing.num_experts)
    load = [float((torch.cat(routing.expert_ids) == e).sum()) for e in experts]
    return plan_placement(load, routing.num_ranks, num_replicas=num_replicas)


def _step(
    name: str,
    me: int,
    meshes: Meshes,
    routing: Routing,
    placement: Placement,
    door: Collectives | None,
) -> Result:
    slots = len(placement.experts)
    inner = make_dispatcher(name, meshes, routing.num_ranks, slots, door)
    return rank_result(me, Placed(inner, placement, me), routing, placement.on_rank(me))


def _check(name: str, routing: Routing, results: list[Result], placement: Placement) -> None:
    """Compare with one process; what an expert's replicas got belongs together."""
    slots = torch.tensor(placement.experts)
    for key in ("gate_up", "down", "counts"):
        every = torch.cat([r[key] for r in results])
        whole = every.new_zeros(routing.num_experts, *every.shape[1:]).index_add_(0, slots, every)
        for r, part in zip(results, whole.chunk(routing.num_ranks), strict=True):
            r[key] = part
    check(routing, results, counted=name != "Padded")


@pytest.mark.parametrize("name", OVER_RANKS)
@settings(deadline=None, max_examples=30)
@given(routings())
def test_replicas_change_nothing_but_the_load(name: str, routing: Routing) -> None:
    placement = _placement(routing, (routing.num_ranks - 1) * routing.num_ranks)

    def rank(me: int, door: SimulatedCollectives) -> Result:
        return _step(name, me, door.mesh, routing, placement, door)

    _check(name, routing, SimulatedWorld(routing.num_ranks).run(rank), placement)


@settings(deadline=None, max_examples=20)
@given(routings(max_ranks=1))
def test_experts_at_home_may_lie_in_any_order(routing: Routing) -> None:
    backwards = tuple(reversed(range(routing.num_experts)))
    placement = Placement(num_ranks=1, num_experts=routing.num_experts, experts=backwards)

    def rank(me: int, door: SimulatedCollectives) -> Result:
        return _step("Local", me, door.mesh, routing, placement, None)

    _check("Local", routing, SimulatedWorld(1).run(rank), placement)


def _meshes(shape: tuple[int, ...], names: tuple[str, ...]) -> AxisMesh:
    return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _on_gloo(me: int, size: int) -> dict[str, Result]:
    return {
        f"{name}, {title}": _step(name, me, _meshes, routing, _placement(routing, size), None)
        for title, routing in ROUTINGS.items()
        if routing.num_ranks == size
        for name in OVER_RANKS
    }


@pytest.mark.nccl
@pytest.mark.parametrize("size", [2, 4])
def test_replicas_on_real_ranks_change_nothing_but_the_load(ranks: Any, size: int) -> None:
    results = ranks(size).run(_on_gloo, size)
    for key in results[0]:
        name, _, title = key.partition(", ")
        placement = _placement(ROUTINGS[title], size)
        assert len(placement.experts) > placement.num_experts
        _check(name, ROUTINGS[title], [r[key] for r in results], placement)


def test_tokens_take_turns_at_replicas() -> None:
    placement = Placement(num_ranks=2, num_experts=3, experts=(0, 1, 0, 2))

    def rank(me: int, door: SimulatedCollectives) -> list[int]:
        inner = AllToAll(door.mesh((2,), ("ep",)), 4, door)
        dispatcher = Placed(inner, placement, me)
        ids = torch.zeros(3, 1, dtype=torch.int64)
        _, counts, _ = dispatcher.dispatch(torch.ones(3, 1), torch.ones(3, 1), ids)
        return counts.tolist()

    assert SimulatedWorld(2).run(rank) == [[3, 0], [3, 0]]  # six tokens, three for each replica


def test_a_fault_with_a_placement_is_raised_by_all() -> None:
    placement = Placement(num_ranks=2, num_experts=3, experts=(0, 1, 0, 2))

    def rank(me: int, door: SimulatedCollectives) -> list[str]:
        dispatcher = Placed(AllToAll(door.mesh((2,), ("ep",)), 4, door), placement, me)
        one = torch.ones(1, 1)
        return [
            error_of(lambda i=i: dispatcher.dispatch(one, one, torch.tensor([[i if me else 0]])))  # type: ignore[misc]
            for i in (3, -1, 2)
        ]

    expected = [
        "rank 1: expert id 3 is not one of 0 .. 2",
        "rank 1: expert id -1 is not one of 0 .. 2",
        "no error",
    ]
    assert SimulatedWorld(2).run(rank) == [expected] * 2


def test_a_repeated_expert_with_a_placement_is_named_as_it_was_given() -> None:
    placement = Placement(num_ranks=2, num_experts=3, experts=(2, 1, 0, 2))

    def rank(me: int, door: SimulatedCollectives) -> list[str]:
        dispatcher = Placed(AllToAll(door.mesh((2,), ("ep",)), 4, door), placement, me)
        ids = [[0, 0], [2, 2], [1, 1]] if me else [[0, 1]] * 3
        pair = torch.ones(1, 2)
        return [
            error_of(lambda i=i: dispatcher.dispatch(pair, pair, torch.tensor([i])))  # type: ignore[misc]
            for i in ids
        ]

    rule = "its choices must be distinct, or all but one have weight 0"
    expected = [f"rank 1: a token names expert {e} twice; {rule}" for e in (0, 2, 1)]
    assert SimulatedWorld(2).run(rank) == [expected] * 2


@pytest.mark.parametrize("name", OVER_RANKS)
def test_other_faults_with_a_placement_are_those_of_the_dispatcher(name: str) -> None:
    placement = Placement(num_ranks=2, num_experts=3, experts=(0, 1, 0, 2))

    def rank(me: int, door: SimulatedCollectives) -> list[str]:
        dispatcher = Placed(make_dispatcher(name, door.mesh, 2, 4, door), placement, me)
        one, id = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
        choices = 1 + 4 * me
        weights, ids = one.expand(1, choices), id.expand(1, choices)
        return [
            error_of(lambda: dispatcher.dispatch(one, weights, ids)),
            error_of(lambda: dispatcher.dispatch(one.expand(1, 2 + me), one, id)),
        ]

    first, second = SimulatedWorld(2).run(rank)
    assert first == second
    assert first[0] == "rank 1: each token names 5 of 3 experts; use 1 to 3"
    assert first[1].startswith("all ranks must give rows of one length and dtype")
