"""Gradient accumulation on simulated streams: no races, and the result of one process."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from rank_pool import RankPool

from .models import Gradients, Net, loss_of, make, parameters, tokens, worst
from .streams import Device, descend, watched
from .test_streams import MODES, SHAPES, built

Ranks = Callable[[int], RankPool]
STEPS, RATE = 2, 0.1

SYNC, ALL_REDUCE = "set_requires_gradient_sync", "set_requires_all_reduce"
LAST, RESHARD = "set_is_last_backward", "set_reshard_after_backward"
SETTERS = (SYNC, ALL_REDUCE, LAST, RESHARD)
Off = frozenset[str]
ON: Off = frozenset()


def off(*setters: str) -> Off:
    return frozenset(setters)


# The setters that are given False before each microbatch of a step. If they still are at the last
# one, `reduce_gradients` ends the step.
WAYS: dict[str, tuple[Off, ...]] = {
    "all reduced": (ON, ON, ON),
    "no_sync": (off(SYNC), off(SYNC), ON),
    "no all-reduce": (off(ALL_REDUCE), off(ALL_REDUCE), ON),
    "not last": (off(LAST), off(LAST), ON),
    "no_sync, not last": (off(SYNC, LAST), off(SYNC, LAST), ON),
    "no all-reduce, not last": (off(ALL_REDUCE, LAST), off(ALL_REDUCE, LAST), ON),
    "no_sync, not resharded": (off(SYNC, RESHARD), off(SYNC, RESHARD), ON),
    "no_sync, then no all-reduce": (off(SYNC), off(ALL_REDUCE), ON),
    "no all-reduce, then no_sync": (off(ALL_REDUCE), off(SYNC), ON),
    "no all-reduce, then all reduced": (off(ALL_REDUCE), ON, ON),
    "not last, then no all-reduce": (off(LAST), off(ALL_REDUCE), ON),
    "reduce_gradients": (off(SYNC), off(SYNC), off(SYNC)),
    "no all-reduce, reduce_gradients": (off(ALL_REDUCE), off(ALL_REDUCE), off(ALL_REDUCE)),
    "as in a pipeline": (off(SYNC, LAST, RESHARD),) * 3,
}
Zeroed = Literal["never", "between steps", "after the first microbatch"]
# When `zero_grad` is called, and whether hooks step each parameter in backward and free its
# gradient, so that nothing is left between steps.
OPTIMIZERS: list[tuple[Zeroed, bool]] = [
    ("never", False),
    ("between steps", False),
    ("after the first microbatch", False),
    ("never", True),
    ("after the first microbatch", True),
]


class TwoBlocks(Net):
    """The net with two blocks."""

    def __init__(self) -> None:
        super().__init__(2)


def train(model: Any, rank: int, way: str, zeroed: Zeroed, in_backward: bool) -> None:
    """Take two steps of three microbatches."""

    def step(p: torch.Tensor) -> None:
        descend(p, RATE)
        p.grad = None

    sharded = list(model.parameters())
    for p in sharded if in_backward else ():
        p.register_post_accumulate_grad_hook(step)
    for number in range(STEPS):
        for part, setters in enumerate(WAYS[way]):
            for setter in SETTERS:
                getattr(model, setter)(setter not in setters)
            loss_of(model, tokens(rank, 3 * number + part)).backward()
            if zeroed == "after the first microbatch" and part == 0:
                model.zero_grad()
        if WAYS[way][-1]:
            model.reduce_gradients()
        for p in sharded:
            if p.grad is not None:
                descend(p, RATE)
        if zeroed == "between steps":
            model.zero_grad()
    for module in (*model.blocks, model):  # some ways keep the unsharded parameters
        module.reshard()


def expected(
    shape: tuple[int, ...], options: dict[str, Any], way: str, zeroed: Zeroed, in_backward: bool
) -> Gradients:
    """Return the parameters after the same steps in one process."""
    model = make(TwoBlocks)
    names = [name for name, _ in model.named_parameters()]
    size, replicas = torch.Size(shape).numel(), shape[0] if len(shape) == 2 else 1
    doubled = [2 if options.get("hook") and "blocks" in name else 1 for name in names]
    nothing = [torch.zeros_like(p) for p in model.parameters()]
    reduced, waiting, not_last = nothing, nothing, nothing

    def add(to: list[torch.Tensor], more: list[torch.Tensor]) -> list[torch.Tensor]:
        return [a + b for a, b in zip(to, more, strict=True)]

    def descend_all(gradients: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.sub_(gradient, alpha=RATE)

    for number in range(STEPS):
        for part, setters in enumerate(WAYS[way]):
            for rank in range(size):
                loss_of(model, tokens(rank, 3 * number + part)).backward()
            new = [p.grad * by / size for p, by in zip(model.parameters(), doubled, strict=True)]
            model.zero_grad()
            waiting = add(waiting, new)
            last_part = part == len(WAYS[way]) - 1
            sums = ALL_REDUCE not in setters or replicas == 1
            if last_part or (SYNC not in setters and sums):
                not_last, waiting = add(not_last, waiting), nothing
            if last_part or LAST not in setters:
                if in_backward:
                    descend_all(not_last)
                else:
                    reduced = add(reduced, not_last)
                not_last = nothing
            if zeroed == "after the first microbatch" and part == 0:
                if (
                    in_backward
                ):  # `zero_grad` first waits for the reductions, which runs their hooks
                    descend_all(not_last)
                reduced, waiting, not_last = nothing, nothing, nothing
        descend_all(reduced)
        if zeroed == "between steps":
            reduced = nothing
    return parameters(model)


def simulated(
    rank: int,
    shape: tuple[int, ...],
    options: dict[str, Any],
    way: str,
    zeroed: Zeroed,
    in_backward: bool,
) -> tuple[float, float, list[str]]:
    """Return two differences of parameters, and the races on streams.

    The first difference is between steps without streams and one process. The second difference is
    between steps with streams and steps without streams.
    """
    plain, streamed = built(shape, options, TwoBlocks), built(shape, options, TwoBlocks)
    train(plain, rank, way, zeroed, in_backward)
    device = Device()
    with watched(device, streamed, "offload" in options, "own" in options):
        train(streamed, rank, way, zeroed, in_backward)
    reference = expected(shape, options, way, zeroed, in_backward)
    found = parameters(plain)
    return worst(found, reference), worst(parameters(streamed), found), device.races


def check(
    pool: RankPool,
    shape: tuple[int, ...],
    mode: str,
    way: str,
    zeroed: Zeroed,
    in_backward: bool,
) -> None:
    options = MODES[mode]
    tolerance = 1e-3 if "mp_policy" in options else 1e-8
    for wrong, differs, races in pool.run(simulated, shape, options, way, zeroed, in_backward):
        case = f"zero_grad {zeroed}, optimizer in backward: {in_backward}"
        assert races == [], case
        assert differs == 0, case
        assert wrong < tolerance, case


@pytest.mark.parametrize(
    ("mode", "shape", "way", "zeroed", "in_backward"),
    [
        ("copy", (2, 2), "not last", "never", True),
        ("accumulate", (2, 2), "no all-reduce, not last", "between steps", False),
        ("offload", (2, 1), "not last, then no all-reduce", "never", True),
        ("ragged, offload", (2, 2), "no all-reduce", "after the first microbatch", False),
        ("two at once", (2, 2), "reduce_gradients", "between steps", False),
    ],
)
def test_accumulated_gradients_equal_one_process_without_races(
    ranks: Ranks,
    mode: str,
    shape: tuple[int, ...],
    way: str,
    zeroed: Zeroed,
    in_backward: bool,
) -> None:
    check(ranks(torch.Size(shape).numel()), shape, mode, way, zeroed, in_backward)


@pytest.mark.long
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", list(MODES))
def test_each_mode_accumulates_in_each_way_on_each_mesh_without_races(
    ranks: Ranks, mode: str, shape: tuple[int, ...], way: str
) -> None:
    for zeroed, in_backward in OPTIMIZERS:
        check(ranks(torch.Size(shape).numel()), shape, mode, way, zeroed, in_backward)
