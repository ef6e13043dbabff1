"""Tokens that go to their experts in hops, and are summed at every stop on their way back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._bags import Bags, bags_of, collect, spread
from ._protocol import DispatchState
from ._slots import Slots
from ._stage import Hop, Sizes, Stage, arrive_here, find_wanted
from ._terms import Terms
from ._trip import Trip, arrive


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Leg:
    """One hop that was made, as the way back needs it."""

    stage: Stage
    sizes: Sizes
    bags: Bags


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HopsState(DispatchState):
    """The legs that were made, and where they ended."""

    legs: tuple[_Leg, ...]
    slots: Slots
    bags: Bags
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HopsDispatch:
    """Tokens on the first of their hops."""

    owner: object
    hop: Hop
    route: tuple[tuple[Stage, Sizes], ...]
    dtype: torch.dtype

    def finish(self) -> tuple[Tensor, Tensor, DispatchState]:
        """Return the rows for this rank's experts: the other hops, once the first one is here."""
        hop, made = self.hop, [self.hop]
        x, slots = arrive_here(hop)
        for stage, sizes in self.route[1:]:
            hop = stage.depart(x, find_wanted(slots, x.shape[0], stage.axis.size), sizes)
            made.append(hop)
            x, slots = arrive_here(hop)
        x, bags = x.to(self.dtype), bags_of(slots.tokens, x.shape[0])
        state = HopsState(
            owner=self.owner,
            num_rows=slots.tokens.shape[0],
            dim=x.shape[1],
            legs=tuple(
                _Leg(stage=stage, sizes=sizes, bags=hop.bags)
                for (stage, sizes), hop in zip(self.route, made, strict=True)
            ),
            slots=slots,
            bags=bags,
            dtype=self.dtype,
        )
        return spread(x, bags), slots.counts, state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HopsCombine:
    """Sums on the last hop of their way back."""

    trip: Trip
    bags: Bags
    dtype: torch.dtype

    def finish(self) -> Tensor:
        """Return each token's sum, once the parts are here."""
        return collect(arrive(self.trip).to(self.dtype), self.bags)


def go_back(rows: Tensor, state: HopsState, terms: Terms) -> HopsCombine:
    """Return while the sums are on the last hop home, once the hops before have been made."""
    parts = collect(rows.to(state.dtype), state.bags, state.slots.weights)
    for leg in reversed(state.legs[1:]):
        parts = _send_back(parts, leg, state, terms).finish()
    return _send_back(parts, state.legs[0], state, terms)


def _send_back(parts: Tensor, leg: _Leg, state: HopsState, terms: Terms) -> HopsCombine:
    trip = leg.stage.send_back(terms.narrow(parts), leg.sizes)
    return HopsCombine(trip=trip, bags=leg.bags, dtype=state.dtype)
