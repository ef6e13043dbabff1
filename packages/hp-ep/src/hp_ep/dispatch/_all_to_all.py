"""One row per token assignment, straight to the rank of its expert."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives

from .._permutation import TokenGroups, gather_tokens, scatter_tokens
from .._torch import run_function
from ._checks import REPORT_SIZE, check_config, expert_axis, or_torch, raise_faults
from ._exchange import AsyncAllToAll, HostTables
from ._interface import AsyncDispatcher, Dispatched, DispatchState, Pending, Step, consume
from ._local import sort_assignments


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """Who gets how many rows in one call, and in which blocks they come."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    """Rows from each rank for each of the experts here, in the order in which they come."""
    counts: Tensor
    """Rows per local expert ``[local experts]``."""
    needs_grad: tuple[bool, bool]
    """Whether any rank's rows, and any rank's weights, need a gradient."""

    @property
    def num_rows(self) -> int:
        """Return how many rows this rank's experts get."""
        return sum(self.receive)


class RowExchange:
    """Moves rows that lie by global expert to the ranks of those experts; holds no call's state.

    Rank ``i`` of the axis holds experts ``i * e .. (i + 1) * e - 1`` of ``num_experts``, which the
    axis's size must divide.
    """

    def __init__(
        self, axis: Axis, num_experts: int, collectives: Collectives | None = None
    ) -> None:
        self.axis = axis
        self.num_experts = num_experts
        self.experts_per_rank = num_experts // axis.size
        self._collectives = or_torch(collectives)

    def start_counts(self, counts: Tensor, report: Tensor) -> HostTables:
        """Start telling every rank how many rows it gets; one all-to-all over the axis.

        ``counts [num_experts]`` are this rank's rows per global expert; ``report [3]`` goes to all.
        """
        blocks = counts.long().view(self.axis.size, self.experts_per_rank)
        sent = torch.cat([blocks, report.expand(self.axis.size, REPORT_SIZE)], 1)
        return HostTables(self._collectives.all_to_all(self.axis, sent), sent)

    def plan(self, tables: HostTables) -> RowPlan:
        """Return the plan once all counts are here; the call's one device-to-host synchronisation.

        Raises a `RoutingError` on every rank if any of them reported a fault or other rows.
        """
        received, (sent, got) = tables.wait()
        local = self.experts_per_rank
        needs_grad = raise_faults([row[local:] for row in got], self.axis.ranks)
        return RowPlan(
            send=tuple(sum(row[:local]) for row in sent),
            receive=tuple(sum(row[:local]) for row in got),
            blocks=tuple(tuple(row[:local]) for row in got),
            counts=received[:, :local].sum(0),
            needs_grad=needs_grad,
        )

    def load(self, rows: Tensor, tables: HostTables | None = None) -> AsyncAllToAll:
        """Return rows to be sent, from the stream that reads the ``tables`` if any does."""
        side = None if tables is None else tables.side
        return AsyncAllToAll(rows, self.axis, self._collectives, side=side)

    def start(self, rows: AsyncAllToAll, plan: RowPlan, *, weights: bool = False) -> AsyncAllToAll:
        """Send rows, or their weights, to their experts; one all-to-all, and one in backward."""
        return rows.start(plan.send, plan.receive, needs_grad=plan.needs_grad[weights])

    def wait(self, rows: AsyncAllToAll, plan: RowPlan) -> Tensor:
        """Return the rows for the local experts, by expert, once they are here."""
        return _transposed(rows.wait(), plan.blocks)

    def start_back(self, rows: Tensor, plan: RowPlan) -> AsyncAllToAll:
        """Start returning the rows to where they came from."""
        return self.load(_transposed(rows, _turned(plan.blocks))).start(plan.receive, plan.send)


def _transposed(rows: Tensor, blocks: Sequence[Sequence[int]]) -> Tensor:
    """Return the blocks of ``rows``, ``blocks[i][j]`` of each, with ``j`` as the outer order."""
    if len(blocks) == 1 or len(blocks[0]) == 1:
        return rows
    return run_function(_Transposed, rows, blocks)


def _turned(blocks: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    return tuple(zip(*blocks, strict=True))


class _Transposed(torch.autograd.Function):
    """Two operators however many blocks there are, and no indices: the host knows all sizes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, blocks: Sequence[Sequence[int]]) -> Tensor:
        ctx.blocks = blocks
        inner = len(blocks[0])
        parts = rows.split([size for row in blocks for size in row])
        return torch.cat([part for j in range(inner) for part in parts[j::inner]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return run_function(_Transposed, grads[0], _turned(ctx.blocks)), None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _AllToAllState(DispatchState):
    groups: TokenGroups
    weights: Tensor | None
    plan: RowPlan
    dtype: torch.dtype


class AllToAll(AsyncDispatcher):
    """A `TokenDispatcher` over one mesh axis: a row per token and expert travels, there and back.

    Rank ``i`` of the axis holds the ``i``-th equal block of ``num_experts``. The mesh is 1-D, or
    its axis ``ep`` is taken; an `Axis` will do. Forward makes three all-to-alls (counts, rows,
    results) and one device-to-host synchronisation; backward makes two all-to-alls. Each rank
    receives from every other ``8 * (experts per rank + 3)`` bytes of counts. Where the experts
    weigh their rows, the weights travel too: one more all-to-all, and one more in backward.

    ``validate`` says whether to check the values of expert ids: by default on the CPU only; shapes
    and dtypes are always checked. A rank that finds a fault reports it to all others in the
    exchange of counts, and all raise the same `RoutingError`. ``payload`` is a narrower floating
    dtype for the rows, results and gradients while they travel; sums are made in the dtype of
    ``x``. Values beyond its range, 65504 in float16, become infinite unseen.
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
        self._config = check_config(
            num_experts, axis.name, axis.size, collectives, validate, payload
        )
        self._exchange = RowExchange(axis, num_experts, self._config.collectives)
        self.num_experts: Final = num_experts
        self.ranks: Final = axis.ranks

    def start_dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, *, weigh_rows: bool = False
    ) -> Pending[Dispatched]:
        """Return while the rows travel, or on CUDA while the counts are copied to the host.

        See `AsyncDispatcher.start_dispatch`.
        """
        return Pending(self._dispatch(x, weights, expert_ids, weigh_rows))

    def start_combine(self, rows: Tensor, state: DispatchState) -> Pending[Tensor]:
        """Return while the results travel; see `AsyncDispatcher.start_combine`."""
        return Pending(self._combine(rows, consume(state, self, _AllToAllState, rows)))

    def _dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, weigh_rows: bool
    ) -> Generator[Step, None, Dispatched]:
        given, exchange = self._config.check(x, weights, expert_ids), self._exchange
        by_expert = sort_assignments(given.expert_ids, self.num_experts)
        tables = exchange.start_counts(by_expert.counts, given.report)
        # While the counts travel:
        groups = by_expert.groups
        rows = exchange.load(gather_tokens(self._config.narrow(given.x), groups), tables)
        row_weights = (
            exchange.load(by_expert.weights(given.weights), tables) if weigh_rows else None
        )
        if tables.side is not None:  # elsewhere the host computes too: rows leave first
            yield "counts"
        plan = exchange.plan(tables)
        if row_weights is not None:
            exchange.start(row_weights, plan, weights=True)
        exchange.start(rows, plan)
        yield "rows"
        state = _AllToAllState(
            owner=self,
            num_rows=plan.num_rows,
            dim=x.shape[1],
            row_weights=None if row_weights is None else exchange.wait(row_weights, plan),
            groups=groups,
            weights=None if weigh_rows else weights,
            plan=plan,
            dtype=x.dtype,
        )
        return exchange.wait(rows, plan).to(x.dtype), plan.counts, state

    def _combine(self, rows: Tensor, state: _AllToAllState) -> Generator[Step, None, Tensor]:
        back = self._exchange.start_back(self._config.narrow(rows), state.plan)
        yield "rows"
        return scatter_tokens(back.wait().to(state.dtype), state.groups, state.weights)
