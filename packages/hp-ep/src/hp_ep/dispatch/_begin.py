"""Begin what any dispatcher does; one that cannot be begun has finished when this returns."""

from dataclasses import dataclass

from torch import Tensor

from ._protocol import (
    DispatchState,
    OverlappingDispatcher,
    PendingCombine,
    PendingDispatch,
    StartedDispatch,
    TokenDispatcher,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Dispatched:
    result: tuple[Tensor, Tensor, DispatchState]

    def finish(self) -> tuple[Tensor, Tensor, DispatchState]:
        """Return what was dispatched."""
        return self.result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Combined:
    result: Tensor

    def finish(self) -> Tensor:
        """Return what was combined."""
        return self.result


def begin_dispatch(
    dispatcher: TokenDispatcher, x: Tensor, weights: Tensor, expert_ids: Tensor
) -> PendingDispatch:
    """Return a dispatch that is under way where ``dispatcher`` can do that, else done."""
    if isinstance(dispatcher, OverlappingDispatcher):
        return dispatcher.begin_dispatch(x, weights, expert_ids)
    return _Dispatched(result=dispatcher.dispatch(x, weights, expert_ids))


def start_dispatch(pending: PendingDispatch) -> None:
    """Let the tokens of ``pending`` leave if they wait for that."""
    if isinstance(pending, StartedDispatch):
        pending.start()


def begin_combine(
    dispatcher: TokenDispatcher, rows: Tensor, state: DispatchState
) -> PendingCombine:
    """Return a combine that is under way where ``dispatcher`` can do that, else done."""
    if isinstance(dispatcher, OverlappingDispatcher):
        return dispatcher.begin_combine(rows, state)
    return _Combined(result=dispatcher.combine(rows, state))
