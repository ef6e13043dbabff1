"""One row per token and node over the slow links, then one per token and rank inside the node."""

from typing import Final

import torch
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives

from .._errors import ExpertConfigError
from ._faults import REPORT_SIZE
from ._hops import HopsCombine, HopsDispatch, HopsState, go_back
from ._host import start_reading
from ._protocol import DispatchState, OverlappingDispatcher, consume
from ._slots import slots_of
from ._stage import Stage, find_wanted
from ._terms import check_terms
from ._verdict import needs_grad, raise_faults


class Hierarchical(OverlappingDispatcher):
    """A `TokenDispatcher` over nodes of ranks: a token crosses to each node once.

    ``node_mesh`` has two axes, nodes and the ranks inside one. A token goes to the rank of its own
    position in every node that has one of its experts, from there to each rank that has, and back
    the same way, summed at both stops (two hops as in DeepSeek-V3, arXiv 2412.19437, section
    3.2.2). Rank ``(n, i)`` holds block ``n * ranks per node + i`` of ``num_experts``. Forward makes
    four all-to-alls over each axis and one device-to-host synchronisation, backward three over
    each. Tokens overlap between nodes, there and back; inside the node they are waited for.
    ``validate``, ``payload`` and the errors are those of `AllToAll`.
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
        names, size = f"{nodes.name} x {inside.name}", nodes.size * inside.size
        self._terms = check_terms(num_experts, names, size, collectives, validate, payload)
        self._between = Stage(nodes, num_experts, self._terms.collectives)
        self._inside = Stage(inside, num_experts // nodes.size, self._terms.collectives)
        rows: list[list[int]] = node_mesh.mesh.tolist()
        self.num_experts: Final = num_experts
        self.ranks: Final = tuple(rank for row in rows for rank in row)
        # Reports come by rank inside the node, each with those of its position in all nodes.
        self._reporters = [row[i] for i in range(inside.size) for row in rows]

    def begin_dispatch(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> HopsDispatch:
        """Return while tokens go between nodes; see `OverlappingDispatcher.begin_dispatch`."""
        ready = self._terms.prepare(x, weights, expert_ids)
        slots = slots_of(ready.expert_ids, ready.weights, self.num_experts)
        between, inside = self._between, self._inside
        tokens, (nodes, size) = ready.x.shape[0], (between.axis.size, inside.axis.size)
        wanted = find_wanted(slots, tokens, nodes)
        each = find_wanted(slots, tokens, nodes * size).rows.view(nodes, size)
        sent = between.table(wanted.rows, slots.counts, each, ready.report)
        (came,) = between.tell(sent).wait()
        # What came for this node is what its ranks will get from here: both hops are told of
        # before the host looks at either.
        lengths = [1, between.experts_here, size, REPORT_SIZE]
        _, counts, rows, reports = came.split(lengths, 1)
        passed = inside.table(rows.sum(0), counts.sum(0), reports.reshape(-1))
        told, tables = start_reading(inside.tell(passed), sent, came, passed).wait()
        first = 1 + inside.experts_here
        every = [
            row[start : start + REPORT_SIZE]
            for row in tables[3]
            for start in range(first, len(row), REPORT_SIZE)
        ]
        raise_faults(every, self._reporters)
        grads = needs_grad(every)
        outer = between.sizes(tables[0], tables[1], came, grads)
        inner = inside.sizes(tables[2], tables[3], told, grads)
        hop = between.depart(self._terms.narrow(x), wanted, outer)
        route = (between, outer), (inside, inner)
        return HopsDispatch(owner=self, hop=hop, route=route, dtype=x.dtype)

    def begin_combine(self, rows: Tensor, state: DispatchState) -> HopsCombine:
        """Return while sums go between nodes; see `OverlappingDispatcher.begin_combine`.

        Waits for those inside the node.
        """
        return go_back(rows, consume(state, self, HopsState, rows), self._terms)
