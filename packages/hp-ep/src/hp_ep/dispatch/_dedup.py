"""One row per token and rank, however many of the token's experts the rank has."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives, TorchCollectives

from .._bags import Bags, bags_of, collect, spread
from ._exchange import check_divides, expert_axis
from ._faults import raise_faults
from ._payload import check_payload, narrow
from ._prepare import prepare
from ._protocol import DispatchState, consume
from ._slots import Slots, slots_of
from ._stage import Hop, Stage, StagePlan, arrived
from ._trip import Trip, arrive


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _DedupState(DispatchState):
    plan: StagePlan
    slots: Slots
    bags: Bags
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Dispatching:
    owner: object
    plan: StagePlan
    hop: Hop
    dtype: torch.dtype

    def finish(self) -> tuple[Tensor, Tensor, DispatchState]:
        """Return the rows for this rank's experts, once the tokens are here."""
        x, slots = arrived(self.hop, self.dtype), self.hop.slots
        bags = bags_of(slots.tokens, x.shape[0])
        state = _DedupState(
            owner=self.owner,
            num_rows=slots.tokens.shape[0],
            dim=x.shape[1],
            plan=self.plan,
            slots=slots,
            bags=bags,
            dtype=self.dtype,
        )
        return spread(x, bags), slots.counts, state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Combining:
    trip: Trip
    state: _DedupState

    def finish(self) -> Tensor:
        """Return each token's sum, once the ranks' parts are here."""
        return Stage.take_back(arrive(self.trip).to(self.state.dtype), self.state.plan)


class Dedup:
    """A `TokenDispatcher` over one mesh axis: a token goes once to each rank with an expert of it.

    There it is copied to its experts, and the rank sends back their weighted sum (the idea of the
    node-limited dispatch of DeepSeek-V3, arXiv 2412.19437, section 3.2.2, with ranks for nodes).
    Rank ``i`` of the axis holds the ``i``-th equal block of ``num_experts``. The mesh is 1-D, or
    its axis ``ep`` is taken, or an `Axis` will do. Forward makes four
    all-to-alls (counts, tokens, slots, results) and one device-to-host synchronisation; backward
    makes three. A slot, that is a token's choice, is sent as 8 bytes (12 where weights are
    float64).

    ``validate``, ``payload`` and the errors are those of `AllToAll`; sums made at the expert's rank
    are rounded to ``payload`` once per rank.
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
        check_divides(axis, num_experts)
        self.num_experts: Final = num_experts
        self.ranks: Final = axis.ranks
        door = TorchCollectives() if collectives is None else collectives
        self._stage = Stage(axis, num_experts, door)
        self._validate = validate
        self._payload = check_payload(payload)

    def dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor
    ) -> tuple[Tensor, Tensor, DispatchState]:
        """Return the rows for this rank's experts; see `TokenDispatcher.dispatch`."""
        return self.begin_dispatch(x, weights, expert_ids).finish()

    def combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        """Return each token's weighted sum; see `TokenDispatcher.combine`."""
        return self.begin_combine(rows, state).finish()

    def begin_dispatch(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> _Dispatching:
        """Return while the tokens travel; see `OverlappingDispatcher.begin_dispatch`."""
        ready = prepare(x, weights, expert_ids, self.num_experts, self._validate)
        slots = slots_of(ready.expert_ids, ready.weights, self.num_experts)
        plan = self._stage.plan(self._stage.announce(ready.x.shape[0], slots, ready.report))
        raise_faults(plan.said, self._stage.axis.ranks)
        hop = self._stage.depart(narrow(x, self._payload), plan)
        return _Dispatching(owner=self, plan=plan, hop=hop, dtype=x.dtype)

    def begin_combine(self, rows: Tensor, state: DispatchState) -> _Combining:
        """Return while the results travel; see `OverlappingDispatcher.begin_combine`."""
        own = consume(state, self, _DedupState, rows)
        parts = collect(rows, own.bags, own.slots.weights)
        trip = self._stage.send_back(narrow(parts, self._payload), own.plan)
        return _Combining(trip=trip, state=own)
