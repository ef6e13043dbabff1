"""States of the parameters and gradients of a unit, and the table of legal transitions.

The parameters of a group change from SHARDED to GATHERING, to UNSHARDED and back to SHARDED:

- SHARDED: the sharded parameters are registered with the modules.
- GATHERING: an all-gather is in flight.
- UNSHARDED: the unsharded parameters are registered with the modules.
- POST_FORWARD: the parameters are sharded over fewer ranks. This state is between UNSHARDED and the
  all-gather for backward, if ``reshard_after_forward`` is an integer.

The gradients of a unit change from EMPTY to EXPECTED, to WRITING and back to EMPTY:

- EMPTY: no backward is expected. The gradients of the last backward were passed to a reduction, or
  are accumulated. A reduction in flight is a separate object.
- EXPECTED: a forward ran with gradients enabled.
- WRITING: backward of the unit has started.
"""

from enum import Enum, auto
from typing import Any

from ._errors import StateError


class ParameterState(Enum):
    """State of the parameters of a group; see the module's docstring."""

    __hash__ = object.__hash__  # `Enum.__hash__` is slow: it runs in Python

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()
    POST_FORWARD = auto()


class GradientState(Enum):
    """State of the gradients of a unit: backward not expected, expected, or started."""

    __hash__ = object.__hash__

    EMPTY = auto()
    EXPECTED = auto()
    WRITING = auto()


class Event(Enum):
    """Event that changes a state; see `TRANSITIONS`."""

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
    """Maps each state to the next state after one event.

    Raises `StateError` for states in which the event is not legal.
    """

    def __init__(self, event: Event) -> None:
        super().__init__({s: after for (s, e), after in TRANSITIONS.items() if e is event})
        self._event = event

    def __missing__(self, state: Enum) -> Any:
        legal = sorted(e.name for s, e in TRANSITIONS if s is state)
        raise StateError(
            f"{self._event.name} is not allowed in state {state.name}; allowed: {legal} "
            "(reset() is allowed in any state)"
        )


# `AFTER[event][state]` is the next state. These are dicts because function calls take longer.
AFTER = {event: _Following(event) for event in Event}
