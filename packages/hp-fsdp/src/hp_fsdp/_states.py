"""The states of a unit's parameters and gradients, and the one table of legal transitions.

Parameters go round SHARDED -> GATHERING -> UNSHARDED -> SHARDED; between forward and backward they
may be POST_FORWARD, sharded over fewer ranks, and be gathered from there. Gradients go round
EMPTY -> EXPECTED (a forward ran with gradients enabled) -> WRITING (its backward began) -> EMPTY
(handed to a reduction, or left to accumulate). A reduction under way is an object of its own.
"""

from enum import Enum, auto
from typing import Any

from ._errors import StateError


class ParameterState(Enum):
    """Where the parameters of a group are."""

    __hash__ = object.__hash__  # Enum's own runs in Python, and states are looked up all the time

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()
    POST_FORWARD = auto()


class GradientState(Enum):
    """What a unit knows of the backward to come."""

    __hash__ = object.__hash__

    EMPTY = auto()
    EXPECTED = auto()
    WRITING = auto()


class Event(Enum):
    """What moves a state."""

    __hash__ = object.__hash__

    GATHER = auto()
    ARRIVE = auto()
    RESHARD = auto()
    RESHARD_TO_FEWER = auto()
    FORWARD = auto()
    BACKWARD = auto()
    REDUCE = auto()
    RESET = auto()


_P, _G = ParameterState, GradientState
TRANSITIONS: dict[tuple[Enum, Event], Enum] = {
    (_P.SHARDED, Event.GATHER): _P.GATHERING,
    (_P.GATHERING, Event.ARRIVE): _P.UNSHARDED,
    (_P.UNSHARDED, Event.RESHARD): _P.SHARDED,
    (_P.UNSHARDED, Event.RESHARD_TO_FEWER): _P.POST_FORWARD,
    (_P.POST_FORWARD, Event.GATHER): _P.GATHERING,
    (_P.POST_FORWARD, Event.RESHARD): _P.SHARDED,
    (_G.EMPTY, Event.FORWARD): _G.EXPECTED,
    (_G.EXPECTED, Event.FORWARD): _G.EXPECTED,
    (_G.EMPTY, Event.BACKWARD): _G.WRITING,
    (_G.EXPECTED, Event.BACKWARD): _G.WRITING,
    (_G.WRITING, Event.BACKWARD): _G.WRITING,
    (_G.EXPECTED, Event.REDUCE): _G.EMPTY,
    (_G.WRITING, Event.REDUCE): _G.EMPTY,
    **{(state, Event.RESET): _P.SHARDED for state in _P},
    **{(state, Event.RESET): _G.EMPTY for state in _G},
}


class _Following(dict[Enum, Any]):
    """The states that follow by one event, by the state before."""

    def __init__(self, event: Event) -> None:
        super().__init__({s: after for (s, e), after in TRANSITIONS.items() if e is event})
        self._event = event

    def __missing__(self, state: Enum) -> Any:
        legal = sorted(e.name for s, e in TRANSITIONS if s is state)
        raise StateError(
            f"{self._event.name} is not legal in state {state.name}; legal are {legal} "
            "(reset() leads back from any state)"
        )


# The state that follows, `AFTER[event][state]`, without a call in Python; a `StateError` where the
# table has none.
AFTER = {event: _Following(event) for event in Event}
