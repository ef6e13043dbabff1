"""The transition table."""

import pytest

from hp_fsdp import StateError
from hp_fsdp._states import AFTER, Event, GradientState, ParameterState

P, G = ParameterState, GradientState
LEGAL = {
    (P.SHARDED, Event.GATHER): P.GATHERING,
    (P.GATHERING, Event.ARRIVE): P.UNSHARDED,
    (P.UNSHARDED, Event.RESHARD): P.SHARDED,
    (P.UNSHARDED, Event.RESHARD_TO_FEWER): P.POST_FORWARD,
    (P.POST_FORWARD, Event.GATHER): P.GATHERING,
    (P.POST_FORWARD, Event.RESHARD): P.SHARDED,
    (P.POST_FORWARD, Event.RESET): P.SHARDED,
    (P.SHARDED, Event.RESET): P.SHARDED,
    (P.GATHERING, Event.RESET): P.SHARDED,
    (P.UNSHARDED, Event.RESET): P.SHARDED,
    (G.EMPTY, Event.FORWARD): G.EXPECTED,
    (G.EMPTY, Event.BACKWARD): G.WRITING,
    (G.EXPECTED, Event.FORWARD): G.EXPECTED,
    (G.EXPECTED, Event.BACKWARD): G.WRITING,
    (G.EXPECTED, Event.REDUCE): G.EMPTY,
    (G.WRITING, Event.BACKWARD): G.WRITING,
    (G.WRITING, Event.REDUCE): G.EMPTY,
    (G.EMPTY, Event.RESET): G.EMPTY,
    (G.EXPECTED, Event.RESET): G.EMPTY,
    (G.WRITING, Event.RESET): G.EMPTY,
}


def test_parameters_go_round() -> None:
    state = P.SHARDED
    for event in (Event.GATHER, Event.ARRIVE, Event.RESHARD):
        state = AFTER[event][state]
    assert state is P.SHARDED


@pytest.mark.parametrize("event", list(Event))
@pytest.mark.parametrize("state", [*P, *G])
def test_each_event_leads_where_it_should_or_raises(
    state: ParameterState | GradientState, event: Event
) -> None:
    if (state, event) in LEGAL:
        assert AFTER[event][state] is LEGAL[state, event]
    else:
        with pytest.raises(StateError, match=f"{event.name} is not allowed in state {state.name}"):
            AFTER[event][state]


def test_ending_an_unshard_that_was_not_started_raises() -> None:
    with pytest.raises(StateError):
        AFTER[Event.ARRIVE][P.SHARDED]
