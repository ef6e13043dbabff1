"""One row per token and node over the slow links, then one per token and rank inside the node."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives, TorchCollectives

from .._bags import Bags, bags_of, collect, spread
from .._errors import ExpertConfigError
from ._exchange import check_number_of_ranks
from ._faults import REPORT_SIZE, agree, raise_faults
from ._payload import check_payload, narrow
from ._prepare import prepare
from ._protocol import DispatchState, consume
from ._slots import Slots, slots_of
from ._stage import Hop, Stage, StagePlan, arrived
from ._trip import Trip, arrive


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _HierarchicalState(DispatchState):
    between: StagePlan
    inside: StagePlan
    slots: Slots
    bags: Bags
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Dispatching:
    owner: "Hierarchical"
    plan: StagePlan
    hop: Hop | None
    x: Tensor

    def finish(self) -> tuple[Tensor, Tensor, DispatchState]:
        """Return the rows for this rank's experts: the second hop, once the first one is here."""
        return self.owner.go_inside(self.plan, self.hop, self.x)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Combining:
    owner: "Hierarchical"
    trip: Trip
    state: _HierarchicalState

    def finish(self) -> Tensor:
        """Return each token's sum: over the node's ranks, then over the nodes."""
        return self.owner.go_home(self.trip, self.state)


class Hierarchical:
    """A `TokenDispatcher` over nodes of ranks: a token crosses to each node once.

    ``node_mesh`` has two axes, nodes and the ranks inside one. A token goes to the rank of its own
    position in every node that has one of its experts, from there to each rank that has, and back
    the same way, summed at both stops (two hops as in DeepSeek-V3, arXiv 2412.19437, section
    3.2.2). Rank ``(n, i)`` holds block ``n * ranks per node + i`` of ``num_experts``. Forward makes
    four all-to-alls over each axis and two device-to-host synchronisations, backward three over
    each. ``validate``, ``payload`` and the errors are those of `AllToAll`.
    """

    def __init__(
        self,
        node_mesh: AxisMesh,
        num_experts: int,
        collectives: Collectives | None = None,
        *,
        validate: bool | None = None,
        payload: torch.dtype | None = None,
    ) -> None:
        if node_mesh.ndim != 2:
            raise ExpertConfigError(
                f"a mesh with axes {node_mesh.mesh_dim_names} is not nodes and the ranks inside "
                "one; pass a mesh with these two axes"
            )
        nodes, inside = Axis.of(node_mesh, 0), Axis.of(node_mesh, 1)
        names = f"{nodes.name} x {inside.name}"
        check_number_of_ranks(names, nodes.size * inside.size, num_experts)
        door = TorchCollectives() if collectives is None else collectives
        rows: list[list[int]] = node_mesh.mesh.tolist()
        self.num_experts: Final = num_experts
        self.ranks: Final = tuple(rank for row in rows for rank in row)
        self._ranks = [row[i] for i in range(inside.size) for row in rows]
        self._between = Stage(nodes, num_experts, door)
        self._inside = Stage(inside, num_experts // nodes.size, door)
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
        """Return while tokens go between nodes; see `OverlappingDispatcher.begin_dispatch`.

        `RoutingError` is raised by `finish`, where all ranks of all nodes know of the fault.
        """
        ready = prepare(x, weights, expert_ids, self.num_experts, self._validate)
        slots = slots_of(ready.expert_ids, ready.weights, self.num_experts)
        plan = self._between.plan(self._between.announce(ready.x.shape[0], slots, ready.report))
        # With a fault nothing may travel, but the ranks that do not know yet wait inside the node.
        hop = None
        if agree(plan.said):
            hop = self._between.depart(narrow(x, self._payload), plan)
        return _Dispatching(owner=self, plan=plan, hop=hop, x=x)

    def begin_combine(self, rows: Tensor, state: DispatchState) -> _Combining:
        """Return while results go inside the node; see `OverlappingDispatcher.begin_combine`."""
        own = consume(state, self, _HierarchicalState, rows)
        parts = narrow(collect(rows, own.bags, own.slots.weights), self._payload)
        return _Combining(owner=self, trip=self._inside.send_back(parts, own.inside), state=own)

    def go_inside(
        self, between: StagePlan, hop: Hop | None, given: Tensor
    ) -> tuple[Tensor, Tensor, DispatchState]:
        """Return the rows for this rank's experts, from the tokens that this node got."""
        if hop is None:
            none = given.new_empty(0, dtype=torch.int64)
            slots = Slots(
                tokens=none,
                weights=given.new_empty(0, dtype=torch.float32),
                counts=none.new_zeros(self._between.experts_here),
            )
            x = given.new_empty(0, 1)
        else:
            x, slots = arrive(hop.trip), hop.slots
        report = between.reports.reshape(-1)
        inside = self._inside.plan(self._inside.announce(x.shape[0], slots, report))
        reports = [
            said[i : i + REPORT_SIZE]
            for said in inside.said
            for i in range(0, len(said), REPORT_SIZE)
        ]
        raise_faults(reports, self._ranks)
        last = self._inside.depart(x, inside)
        tokens = arrived(last, given.dtype)
        bags = bags_of(last.slots.tokens, tokens.shape[0])
        state = _HierarchicalState(
            owner=self,
            num_rows=last.slots.tokens.shape[0],
            dim=tokens.shape[1],
            between=between,
            inside=inside,
            slots=last.slots,
            bags=bags,
            dtype=given.dtype,
        )
        return spread(tokens, bags), last.slots.counts, state

    def go_home(self, trip: Trip, state: _HierarchicalState) -> Tensor:
        """Return each token's sum from the parts that this node's ranks sent."""
        parts = Stage.take_back(arrive(trip).to(state.dtype), state.inside)
        back = self._between.send_back(narrow(parts, self._payload), state.between)
        return Stage.take_back(arrive(back).to(state.dtype), state.between)
