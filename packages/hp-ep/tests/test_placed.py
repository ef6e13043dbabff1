"""Tokens find their experts wherever a placement puts them, in any of its replicas."""

import torch
from hypothesis import given, settings

from hp_dtensor import SimulatedCollectives, SimulatedWorld
from hp_ep import AllToAll, Dedup, Placed, Placement, plan_placement

from .dispatching import Result, check, error_of, rank_result
from .strategies import Routing, routings


@settings(deadline=None, max_examples=40)
@given(routings())
def test_replicas_change_nothing_but_the_load(routing: Routing) -> None:
    size, experts = routing.num_ranks, routing.num_experts
    load = [float((torch.cat(routing.expert_ids) == e).sum()) for e in range(experts)]
    placement = plan_placement(load, size, num_replicas=(size - 1) * size * (experts // size > 0))

    def rank(me: int, door: SimulatedCollectives) -> Result:
        inner = Dedup(door.mesh((size,), ("ep",)), len(placement.experts), door)
        held = placement.on_rank(me)
        return rank_result(me, Placed(inner, placement, me), routing, held)

    results = SimulatedWorld(size).run(rank)
    slots = torch.tensor(placement.experts)
    for name in ("w1", "w2", "w3", "counts"):  # what an expert's replicas got belongs together
        every = torch.cat([r[name] for r in results])
        whole = every.new_zeros(experts, *every.shape[1:]).index_add_(0, slots, every)
        for me, r in enumerate(results):
            r[name] = whole.chunk(size)[me]
    check(routing, results)


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
