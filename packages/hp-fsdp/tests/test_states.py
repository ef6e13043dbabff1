"""The transition table."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_fsdp import StateError
from hp_fsdp._states import TRANSITIONS, Event, GradientState, ParameterState, advance

P, G = ParameterState, GradientState


def test_parameters_go_round() -> None:
    state = P.SHARDED
    for event in (Event.GATHER, Event.ARRIVE, Event.RESHARD):
        state = advance(state, event)
    assert state is P.SHARDED


@settings(deadline=None)
@given(st.sampled_from([*P, *G]), st.sampled_from(list(Event)))
def test_what_the_table_lacks_raises_and_names_the_legal_events(
    state: ParameterState | GradientState, event: Event
) -> None:
    if (state, event) in TRANSITIONS:
        assert advance(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(StateError, match=f"{event.name} is not legal in state {state.name}"):
            advance(state, event)


@pytest.mark.parametrize("state", [*P, *G])
def test_reset_is_legal_everywhere(state: ParameterState | GradientState) -> None:
    assert advance(state, Event.RESET) in (P.SHARDED, G.EMPTY)


def test_unsharding_what_was_not_gathered_is_refused() -> None:
    with pytest.raises(StateError):
        advance(P.SHARDED, Event.ARRIVE)
