"""What is not a number, a dtype or an object that would do is named before anything computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld
from hp_ep import (
    AllToAll,
    Dedup,
    ExpertConfigError,
    ExpertParallel,
    GroupedExperts,
    LoadStats,
    Local,
    MoE,
    Padded,
    Placement,
    RoutingError,
    TopKRouter,
    migrate_experts,
    plan_placement,
    smooth_load,
)

from .dispatching import error_of


@pytest.mark.parametrize("number", [0, -4, 4.0, "4", True, None])
@pytest.mark.parametrize("kind", [Local, AllToAll, Dedup, Padded])
def test_a_number_of_experts_that_is_none_is_refused(kind: Any, number: Any) -> None:
    def make(me: int, door: SimulatedCollectives) -> str:
        options = {"capacity": 2} if kind is Padded else {}
        given = () if kind is Local else (door.mesh((2,), ("ep",)),)
        with pytest.raises(ExpertConfigError) as error:
            kind(*given, number, **options)
        return str(error.value)

    assert SimulatedWorld(2).run(make) == [f"num_experts={number!r} must be a positive integer"] * 2


def _rows(x: Any) -> Callable[[], object]:
    return lambda: GroupedExperts(4, 6, 2)(x, torch.tensor([1, 1]))


def _routed(x: Any, *sequences: Any) -> Callable[[], object]:
    return lambda: TopKRouter(4, 4, 2, sequence_loss=0.1)(x, *sequences)


X = torch.zeros(2, 4)
LAYER = MoE(4, 6, 4, 2)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "rows of float64": (_rows(X.double()), "rows are torch.float64 of shape (2, 4); these experts"),
    "rows of int64": (_rows(X.long()), "rows are torch.int64 of shape (2, 4); these experts take"),
    "wide rows": (_rows(torch.zeros(2, 5)), "rows are torch.float32 of shape (2, 5); these"),
    "one row": (_rows(torch.zeros(4)), "rows are torch.float32 of shape (4,); these experts take"),
    "wide tokens": (_routed(torch.zeros(2, 5)), "the router got torch.float32 of shape (2, 5)"),
    "a batch": (_routed(torch.zeros(1, 2, 4)), "the router got torch.float32 of shape (1, 2, 4)"),
    "int tokens": (_routed(X.long()), "the router got torch.int64 of shape (2, 4); give a float"),
    "few ids": (_routed(X, torch.tensor([0]), 1), "sequence_ids are torch.int64 of shape (1,)"),
    "real ids": (_routed(X, torch.zeros(2), 1), "sequence_ids are torch.float32 of shape (2,)"),
    "large ids": (_routed(X, torch.tensor([0, 2]), 2), "sequence_ids from 0 to 2 of num_sequences"),
    "negative ids": (_routed(X, torch.tensor([-1, 0]), 2), "sequence_ids from -1 to 0 of num_seq"),
    "real number": (_routed(X, torch.tensor([0, 1]), 2.0), "num_sequences=2.0 must be an integer"),
    "a layer of float64": (lambda: LAYER(X.double()), "rows are torch.float64 of shape (4, 4)"),
    "a dispatcher": (lambda: ExpertParallel(3), "dispatcher=3 is not 'auto' or a TokenDispatcher"),  # type: ignore[arg-type]
    "a class": (lambda: ExpertParallel(Dedup), "dispatcher is the class Dedup; give an object of"),  # type: ignore[arg-type]
    "a placement": (
        lambda: ExpertParallel(placement=[0, 1]),  # type: ignore[arg-type]
        "placement=[0, 1] is not a Placement; make one by plan_placement or Placement.contiguous",
    ),
    "a router": (
        lambda: MoE(4, 6, 4, 2, router=nn.Linear(4, 4)),  # type: ignore[arg-type]
        "router is a Linear; give a TopKRouter",
    ),
    "no layer": (
        lambda: migrate_experts(LAYER.experts, Placement.contiguous(4, 1)),  # type: ignore[arg-type]
        "got a GroupedExperts; experts move with their whole MoE",
    ),
    "a list": (
        lambda: Placement(num_ranks=1, num_experts=2, experts=[0, 1]),  # type: ignore[arg-type]
        "experts=[0, 1] must be a tuple of integers",
    ),
    "rank 7": (lambda: Placement.contiguous(4, 2).on_rank(7), "rank=7 is not one of 0 .. 1"),
    "rank -1": (lambda: Placement.contiguous(4, 2).on_rank(-1), "rank=-1 is not one of 0 .. 1"),
    "real ranks": (lambda: plan_placement([1, 2], 2.0), "num_ranks=2.0 must be a positive"),  # type: ignore[arg-type]
    "real replicas": (
        lambda: plan_placement([1, 2], 2, num_replicas=2.0),  # type: ignore[arg-type]
        "num_replicas=2.0 with 2 experts",
    ),
    "real nodes": (lambda: plan_placement([1, 2], 2, node_size=1.0), "node_size=1.0 must divide"),  # type: ignore[arg-type]
    "words": (lambda: plan_placement(["a"], 1), "loads ['a'] must be finite numbers"),  # type: ignore[list-item]
    "no loads": (lambda: plan_placement(3, 1), "loads 3 must be finite numbers"),  # type: ignore[arg-type]
    "a decay": (lambda: smooth_load(None, [1], "a"), "decay='a' must be at least 0"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_named(name: str) -> None:
    call, start = REFUSED[name]
    with pytest.raises(ExpertConfigError) as error:
        call()
    assert str(error.value).startswith(start), str(error.value)


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", [Local, AllToAll, Dedup, Padded])
def test_integer_tokens_or_weights_are_refused(kind: Any, which: int, validate: bool) -> None:
    def run(me: int, door: SimulatedCollectives) -> str:
        mesh = door.mesh((1,), ("ep",))
        options: dict[str, Any] = {"capacity": 2} if kind is Padded else {}
        made: Any = Local(4) if kind is Local else kind(mesh, 4, door, validate=validate, **options)
        given = [torch.ones(2, 3), torch.ones(2, 1)]
        given[which] = given[which].long()
        return error_of(lambda: made.dispatch(*given, torch.zeros(2, 1, dtype=torch.int64)))

    (text,) = SimulatedWorld(1).run(run)
    what = ["the tokens or rows are", "weights are"][which]
    assert text.endswith(f"{what} torch.int64; they must be of a floating dtype")


def test_tensors_of_loads_are_taken_and_read_once() -> None:
    load = torch.tensor([3, 1, 2, 2])
    placement = plan_placement(load, 2)
    assert placement == plan_placement([3, 1, 2, 2], 2)
    stats = LoadStats(expert_load=load, placement=placement)  # type: ignore[arg-type]
    assert stats == LoadStats(expert_load=(3, 1, 2, 2), placement=placement)
    assert stats.rank_imbalance == 1.0
    assert smooth_load(None, load, 0.5) == (3, 1, 2, 2)


def test_a_cast_order_of_experts_is_told_apart_from_another_order() -> None:
    experts = GroupedExperts(4, 6, 4)
    state = {k: v.bfloat16() for k, v in experts.state_dict().items()}
    state["_extra_state"] = torch.arange(4).bfloat16()  # as a layer with a placement saves it
    with pytest.raises(ExpertConfigError, match=r"is torch.bfloat16; .* leave that entry as it"):
        experts.load_state_dict(state)


@pytest.mark.parametrize("differs", ["capacity", "overflow"])
def test_another_capacity_or_overflow_on_one_rank_is_told_to_all(differs: str) -> None:
    def run(me: int, door: SimulatedCollectives) -> str:
        options: dict[str, Any] = {"capacity": 3, "overflow": "drop"}
        if me:
            options[differs] = {"capacity": 4, "overflow": "error"}[differs]
        made = Padded(door.mesh((2,), ("ep",)), 4, door, **options)
        ids = torch.zeros(2, 1, dtype=torch.int64)
        with pytest.raises(RoutingError) as error:
            made.dispatch(torch.ones(2, 3), torch.ones(2, 1), ids)
        return str(error.value)

    other = {"capacity": "4, 'drop'", "overflow": "3, 'error'"}[differs]
    assert (
        SimulatedWorld(2).run(run)
        == [
            "all ranks must give one capacity and overflow, also without tokens; got "
            f"rank 0: 3, 'drop'; rank 1: {other}"
        ]
        * 2
    )
