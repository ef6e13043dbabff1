"""One row per token and expert, straight to the rank of the expert."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hp_dtensor import AxisMesh, Collectives

from .._permutation import bag_sum, gather_rows
from ._exchange import RowExchange, RowPlan
from ._faults import Fault, as_numbers, check_ids, check_routing, checks_data
from ._protocol import DispatchState, consume
from ._sorting import SortedSlots, sort_slots


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _AllToAllState(DispatchState):
    slots: SortedSlots
    weights: Tensor
    plan: RowPlan


class AllToAll:
    """A `TokenDispatcher` over one mesh axis: every slot travels as one row, there and back.

    Rank ``i`` of the axis holds the ``i``-th equal block of ``num_experts``. The mesh is 1-D, or
    its axis ``ep`` is taken. Forward makes three all-to-alls (counts, rows, results) and one
    device-to-host synchronisation; backward makes two all-to-alls. Each rank receives from every
    other ``8 * (experts per rank + 3)`` bytes of counts.

    ``validate`` says whether to check the values of expert ids: by default on the CPU only; shapes
    and dtypes are always checked. A rank that finds a fault tells all others in the exchange of
    counts, and all raise the same `RoutingError`.
    `ExpertConfigError` where the axis does not divide ``num_experts``.
    """

    def __init__(
        self,
        ep_mesh: AxisMesh,
        num_experts: int,
        collectives: Collectives | None = None,
        *,
        validate: bool | None = None,
    ) -> None:
        self.num_experts = num_experts
        self._exchange = RowExchange(ep_mesh, num_experts, collectives)
        self._validate = validate

    def dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor
    ) -> tuple[Tensor, Tensor, DispatchState]:
        """Return the rows for this rank's experts; see `TokenDispatcher.dispatch`."""
        found = check_routing(x, weights, expert_ids, self.num_experts)
        if found[0] != Fault.NONE:  # take part without tokens, so that all ranks raise
            x, expert_ids = x.new_empty(0, 1), x.new_empty((0, 1), dtype=torch.int64)
        report = as_numbers(found, expert_ids.device)
        if checks_data(expert_ids, self._validate):
            expert_ids, report = check_ids(expert_ids, self.num_experts, report)
        slots = sort_slots(expert_ids, self.num_experts)
        announcement = self._exchange.announce(slots.counts, report)
        sorted_rows = gather_rows(x, slots.order, slots.places)  # while the counts travel
        plan = self._exchange.plan(announcement)
        rows = self._exchange.dispatch(sorted_rows, plan)
        state = _AllToAllState(
            owner=self, num_rows=plan.num_rows, slots=slots, weights=weights, plan=plan
        )
        return rows, plan.counts, state

    def combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        """Return each token's weighted sum; see `TokenDispatcher.combine`."""
        own = consume(state, self, _AllToAllState, rows)
        back = self._exchange.combine(rows, own.plan)
        return bag_sum(back, own.slots.order, own.slots.places, own.weights)
