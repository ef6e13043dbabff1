"""Carry out a plan on one rank's part of a tensor; decides nothing."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ..collectives._interface import Collectives
from ..layouts._links import replicated
from ..plans._plan import Plan
from ..plans._steps import Step
from ._exchange import exchange_stage, transfer_stage
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

_STAGES = {
    "all_gather": all_gather_stage,
    "all_reduce": all_reduce_stage,
    "all_to_all": all_to_all_stage,
    "direct": exchange_stage,
    "reduce_scatter": reduce_scatter_stage,
    "transfer": transfer_stage,
}


def prepare(plan: Plan, fold: Callable[[Step], Fold]) -> tuple[Stage, ...]:
    """Return the steps of a plan that its rank takes part in, ready to run.

    All that follows from shapes is worked out. ``fold`` says how to find the group of a step.
    Stages keep no tensor and no group.
    """
    rank = plan.rank
    stages = [
        _stage(step, plan, fold)
        for step in plan.steps
        if step.source.holds(rank) or step.target.holds(rank)
    ]
    # Plans take an axis of degree one as replicated, where ragged runs would flatten dims.
    source, target = replicated(plan.source), replicated(plan.target)
    if plan.source.ragged != source.ragged and source.holds(rank):
        stages.insert(0, _viewed(source.local_shape(plan.shape, rank)))
    if plan.target.ragged != target.ragged and target.holds(rank):
        stages.append(_viewed(plan.target.local_shape(plan.shape, rank)))
    return tuple(stages)


def _viewed(shape: tuple[int, ...]) -> Stage:
    return lambda x, collectives: x.reshape(shape)


def start(stages: Sequence[Stage], local: Tensor, collectives: Collectives) -> Finish:
    """Start the first collective and return what finishes the stages and gives the result.

    The result shares memory with ``local`` only if there are no stages. Until the end ``local``
    must stay untouched.
    """
    # What is sent are bytes: they must be those of the values, not of their conjugates.
    result = local.detach().resolve_conj().resolve_neg()
    del local  # what later stages start from is not kept beside what they make
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
        self._stages, self._pending, self._collectives = stages, [pending], collectives

    def __call__(self) -> Tensor:
        return start(self._stages, self._pending.pop()(), self._collectives)()


def _stage(step: Step, plan: Plan, fold: Callable[[Step], Fold]) -> Stage:
    if 0 in plan.shape:
        return empty_stage(step, plan.shape, plan.rank)
    if step.kind == "slice":
        return slice_stage(step, plan.shape, plan.rank)
    found = fold(step)
    # Native collectives lay parts in group order; where that is not the mesh's, pieces are placed
    # one by one. All ranks of the group see the same order.
    moves = step.kind in ("all_gather", "all_to_all") and not found.in_mesh_order
    return _STAGES["direct" if moves else step.kind](step, plan.shape, plan.rank, found)
