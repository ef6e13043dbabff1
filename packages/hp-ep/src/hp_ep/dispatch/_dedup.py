"""One row per token and rank, however many of the token's experts the rank has."""

from typing import Final

import torch
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives

from ._exchange import expert_axis
from ._faults import REPORT_SIZE
from ._hops import HopsCombine, HopsDispatch, HopsState, go_back
from ._host import start_reading
from ._protocol import DispatchState, OverlappingDispatcher, consume
from ._slots import slots_of
from ._stage import Stage, find_wanted
from ._terms import check_terms
from ._verdict import needs_grad, raise_faults


class Dedup(OverlappingDispatcher):
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
        self._terms = check_terms(num_experts, axis.name, axis.size, collectives, validate, payload)
        self._stage = Stage(axis, num_experts, self._terms.collectives)
        self.num_experts: Final = num_experts
        self.ranks: Final = axis.ranks

    def begin_dispatch(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> HopsDispatch:
        """Return while the tokens travel; see `OverlappingDispatcher.begin_dispatch`."""
        ready = self._terms.prepare(x, weights, expert_ids)
        slots = slots_of(ready.expert_ids, ready.weights, self.num_experts)
        stage = self._stage
        wanted = find_wanted(slots, ready.x.shape[0], stage.axis.size)
        table = stage.table(wanted.rows, slots.counts, ready.report)
        received, (sent, got) = start_reading(stage.tell(table), table).wait()
        reports = [row[-REPORT_SIZE:] for row in got]
        raise_faults(reports, self.ranks)
        sizes = stage.sizes(sent, got, received, needs_grad(reports))
        hop = stage.depart(self._terms.narrow(x), wanted, sizes)
        return HopsDispatch(owner=self, hop=hop, route=((stage, sizes),), dtype=x.dtype)

    def begin_combine(self, rows: Tensor, state: DispatchState) -> HopsCombine:
        """Return while the results travel; see `OverlappingDispatcher.begin_combine`."""
        return go_back(rows, consume(state, self, HopsState, rows), self._terms)
