"""Carry out a plan on one rank's part of a tensor; decides nothing."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ._exchange import exchange_stage
from ._plan import Plan
from ._stages import (
    Finish,
    Fold,
    Stage,
    all_gather_stage,
    all_reduce_stage,
    all_to_all_stage,
    empty_stage,
    reduce_scatter_stage,
    slice_stage,
)
from ._steps import Step
from .collectives._interface import Collectives

_STAGES = {
    "all_gather": all_gather_stage,
    "all_reduce": all_reduce_stage,
    "all_to_all": all_to_all_stage,
    "direct": exchange_stage,
    "reduce_scatter": reduce_scatter_stage,
}


def prepare(plan: Plan, fold: Callable[[tuple[int, ...]], Fold]) -> tuple[Stage, ...]:
    """Return the plan's steps ready to run, with all that follows from shapes worked out.

    ``fold`` says how to find the group of a step's axes. Stages keep no tensor and no group.
    """
    return tuple(_stage(step, plan, fold) for step in plan.steps)


def start(stages: Sequence[Stage], local: Tensor, collectives: Collectives) -> Finish:
    """Start the first collective and return what finishes the stages and gives the result.

    The result shares memory with ``local`` only if there are no stages. Until the end ``local``
    must stay untouched.
    """
    result = local.detach()
    for number, stage in enumerate(stages, 1):
        started = stage(result, collectives)
        if isinstance(started, Tensor):
            result = started
        elif number == len(stages):
            return started
        else:
            return _Rest(stages[number:], started, collectives)
    return lambda: result


class _Rest:
    """The stages after the one under way."""

    def __init__(self, stages: Sequence[Stage], pending: Finish, collectives: Collectives) -> None:
        self._stages, self._pending, self._collectives = stages, pending, collectives

    def __call__(self) -> Tensor:
        return start(self._stages, self._pending(), self._collectives)()


def _stage(step: Step, plan: Plan, fold: Callable[[tuple[int, ...]], Fold]) -> Stage:
    if 0 in plan.shape:
        return empty_stage(step, plan.shape, plan.rank)
    if step.kind == "slice":
        return slice_stage(step, plan.shape, plan.rank)
    found = fold(step.axes)
    # Native collectives lay parts in group order; where that is not the mesh's, pieces are placed
    # one by one. All ranks of the group see the same order.
    moves = step.kind in ("all_gather", "all_to_all") and not found.in_mesh_order
    return _STAGES["direct" if moves else step.kind](step, plan.shape, plan.rank, found)
