"""One row per token and expert, straight to the rank of the expert."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives

from .._permutation import sum_slots, take_slots
from ._exchange import Announcement, RowExchange, RowPlan, expert_axis
from ._protocol import DispatchState, OverlappingDispatcher, consume
from ._sorting import SortedSlots, sort_slots
from ._terms import check_terms
from ._trip import Trip, arrive


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _AllToAllState(DispatchState):
    slots: SortedSlots
    weights: Tensor
    plan: RowPlan
    dtype: torch.dtype


@dataclass(slots=True, kw_only=True, eq=False)
class _Dispatching:
    exchange: RowExchange
    announcement: Announcement
    trip: Trip
    slots: SortedSlots
    weights: Tensor
    dtype: torch.dtype
    owner: "AllToAll"
    dim: int
    plan: RowPlan | None = None

    def start(self) -> RowPlan:
        """Send the rows, once the host knows the counts."""
        if self.plan is None:
            self.plan = self.exchange.plan(self.announcement)
            self.trip = self.exchange.start(self.trip, self.plan)
        return self.plan

    def finish(self) -> tuple[Tensor, Tensor, DispatchState]:
        """Return the rows for this rank's experts, once they are here."""
        plan = self.start()
        state = _AllToAllState(
            owner=self.owner,
            num_rows=plan.num_rows,
            dim=self.dim,
            slots=self.slots,
            weights=self.weights,
            plan=plan,
            dtype=self.dtype,
        )
        return self.exchange.arrive(self.trip, plan).to(self.dtype), plan.counts, state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Combining:
    trip: Trip
    state: _AllToAllState

    def finish(self) -> Tensor:
        """Return each token's weighted sum, once its results are here."""
        slots = self.state.slots
        back = arrive(self.trip).to(self.state.dtype)
        return sum_slots(back, slots.order, slots.places, self.state.weights)


class AllToAll(OverlappingDispatcher):
    """A `TokenDispatcher` over one mesh axis: every slot travels as one row, there and back.

    Rank ``i`` of the axis holds the ``i``-th equal block of ``num_experts``. The mesh is 1-D, or
    its axis ``ep`` is taken; an `Axis` will do. Forward makes three all-to-alls (counts, rows,
    results) and one device-to-host synchronisation; backward makes two all-to-alls. Each rank
    receives from every other ``8 * (experts per rank + 3)`` bytes of counts.

    ``validate`` says whether to check the values of expert ids: by default on the CPU only; shapes
    and dtypes are always checked. A rank that finds a fault tells all others in the exchange of
    counts, and all raise the same `RoutingError`. ``payload`` is a narrower floating dtype for the
    rows, results and gradients while they travel; sums are made in the dtype of ``x``.
    Values beyond its range, 65504 in float16, become infinite unseen.
    `ExpertConfigError` where the axis does not divide ``num_experts``.
    """

    def __init__(
        self,
        ep_mesh: AxisMesh | Axis,
        num_experts: int,
        collectives: Collectives | None = None,
        *,
        validate: bool | None = None,
        payload: torch.dtype | None = None,
    ) -> None:
        axis = expert_axis(ep_mesh)
        self._terms = check_terms(num_experts, axis.name, axis.size, collectives, validate, payload)
        self._exchange = RowExchange(axis, num_experts, self._terms.collectives)
        self.num_experts: Final = num_experts
        self.ranks: Final = axis.ranks

    def begin_dispatch(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> _Dispatching:
        """Return while the rows travel, or on CUDA while the counts are copied to the host.

        See `OverlappingDispatcher.begin_dispatch`.
        """
        ready = self._terms.prepare(x, weights, expert_ids)
        slots = sort_slots(ready.expert_ids, self.num_experts)
        announcement = self._exchange.announce(slots.counts, ready.report)
        # While the counts travel:
        sorted_rows = take_slots(self._terms.narrow(ready.x), slots.order, slots.places)
        pending = _Dispatching(
            exchange=self._exchange,
            announcement=announcement,
            trip=self._exchange.embark(sorted_rows, announcement),
            slots=slots,
            weights=weights,
            dtype=x.dtype,
            owner=self,
            dim=x.shape[-1] if x.dim() else 0,
        )
        if announcement.reading.side is None:  # the host computes too: rows leave first
            pending.start()
        return pending

    def begin_combine(self, rows: Tensor, state: DispatchState) -> _Combining:
        """Return while the results travel; see `OverlappingDispatcher.begin_combine`."""
        own = consume(state, self, _AllToAllState, rows)
        trip = self._exchange.send_back(self._terms.narrow(rows), own.plan)
        return _Combining(trip=trip, state=own)
