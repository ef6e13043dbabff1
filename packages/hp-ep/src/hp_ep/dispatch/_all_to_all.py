"""One row per token assignment, straight to the rank of its expert."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives

from .._permutation import TokenGroups, gather_tokens, scatter_tokens
from ._checks import REPORT_SIZE, check_config, expert_axis, or_torch, raise_faults
from ._exchange import AsyncAllToAll, HostTables, Places, RowBlocks
from ._interface import AsyncDispatcher, Dispatched, DispatchState, Pending, Step, consume
from ._local import SortedAssignments, sort_assignments


@dataclass(slots=True, kw_only=True, eq=False)
class RowPlan:
    """Who gets how many rows in one call, and in which blocks they come."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    blocks: RowBlocks | None
    """None where the order in which rows come is that of the experts."""
    num_rows: int
    """How many rows this rank's experts get."""
    received: Tensor
    """Rows from each rank for each local expert ``[ranks, local experts]``."""
    counts: Tensor
    """Rows per local expert ``[local experts]``."""
    needs_grad: tuple[bool, bool]
    """Whether any rank's rows, and any rank's weights, need a gradient."""
    _places: Places | None = None

    def find_places(self) -> Places | None:
        """Return the result of `RowBlocks.find_places`, computed once for all exchanges of a call.

        None if rows need no index.
        """
        if self._places is None and self.blocks is not None:
            self._places = self.blocks.find_places(self.received)
        return self._places


class RowExchange:
    """Moves rows that lie by global expert to the ranks of those experts; holds no call's state.

    Rank ``i`` of the axis holds experts ``i * e .. (i + 1) * e - 1`` of ``num_experts``, which the
    axis's size must divide. With ``own_last`` the rows of the experts here lie behind all others,
    if there are several experts: they do not take part in the all-to-alls then, which would copy
    them, and are copied once, by expert.
    """

    def __init__(
        self,
        axis: Axis,
        num_experts: int,
        collectives: Collectives | None = None,
        *,
        own_last: bool = False,
    ) -> None:
        self.axis = axis
        self.num_experts = num_experts
        self.experts_per_rank = num_experts // axis.size
        self._reorders = axis.size > 1 and self.experts_per_rank > 1
        self._own = axis.index if own_last and self._reorders else None
        self._collectives = or_torch(collectives)

    def sort(self, expert_ids: Tensor) -> SortedAssignments:
        """Return the assignments in the order in which their rows are to lie."""
        first = self.axis.index * self.experts_per_rank
        own = None if self._own is None else slice(first, first + self.experts_per_rank)
        return sort_assignments(expert_ids, self.num_experts, last=own)

    def start_counts(self, counts: Tensor, report: Tensor) -> HostTables:
        """Start telling every rank how many rows it gets; one all-to-all over the axis.

        ``counts [num_experts]`` are this rank's rows per global expert; ``report [3]`` goes to all.
        """
        blocks = counts.long().view(self.axis.size, self.experts_per_rank)
        reports = report.expand(self.axis.size, REPORT_SIZE)
        # The first number is not read: `Dedup` has one there, and all tables are as wide, so that
        # ranks with different dispatchers hear of that.
        sent = torch.cat([reports[:, :1], blocks, reports], 1)
        return HostTables(self._collectives.all_to_all(self.axis, sent), sent)

    def plan(self, tables: HostTables) -> RowPlan:
        """Return the plan once all counts are here; the call's one device-to-host synchronisation.

        Raises a `RoutingError` on every rank if any of them reported a fault or other rows.
        """
        received, (sent, got) = tables.wait()
        here = slice(1, 1 + self.experts_per_rank)
        needs_grad = raise_faults([row[-REPORT_SIZE:] for row in got], self.axis.ranks)
        sizes = tuple(tuple(row[here]) for row in got)
        send, receive = (
            tuple(0 if rank == self._own else sum(row[here]) for rank, row in enumerate(table))
            for table in (sent, got)
        )
        counts = received[:, here]
        return RowPlan(
            send=send,
            receive=receive,
            blocks=RowBlocks(sizes=sizes, own=self._own) if self._reorders else None,
            num_rows=sum(map(sum, sizes)),
            received=counts,
            counts=counts.sum(0),
            needs_grad=needs_grad,
        )

    def load(self, rows: Tensor, tables: HostTables | None = None) -> AsyncAllToAll:
        """Return rows to be sent, from the stream that reads the ``tables`` if any does."""
        side = None if tables is None else tables.side
        return AsyncAllToAll(rows, self.axis, self._collectives, side=side)

    def start(self, rows: AsyncAllToAll, plan: RowPlan, *, weights: bool = False) -> AsyncAllToAll:
        """Send rows, or their weights, to their experts; one all-to-all, and one in backward.

        They arrive by expert.
        """
        return rows.start(
            plan.send,
            plan.receive,
            blocks=plan.blocks,
            find_places=plan.find_places,
            needs_grad=plan.needs_grad[weights],
        )

    def start_back(self, rows: Tensor, plan: RowPlan) -> AsyncAllToAll:
        """Start returning the rows, by expert, to where they came from."""
        return self.load(rows).start(
            plan.receive,
            plan.send,
            blocks=plan.blocks,
            find_places=plan.find_places,
            returns=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _AllToAllState(DispatchState):
    groups: TokenGroups
    weights: Tensor | None
    plan: RowPlan
    dtype: torch.dtype


class AllToAll(AsyncDispatcher):
    """Dispatcher that sends one row per token and expert, and its result back.

    | | all-to-alls | device-to-host synchronizations |
    |---|---|---|
    | forward | 3: counts, rows, results | 1 |
    | backward | 2 | 0 |

    Each rank receives ``8 * (experts per rank + 4)`` bytes of counts from every other rank. If the
    experts multiply rows by their routing weights (in a `MoE` they do), forward and backward
    have one more all-to-all each. If a rank has invalid inputs, it reports them in the exchange of
    counts, and all ranks raise the same `RoutingError`.

    Args:
        ep_mesh: Mesh of the ranks that split the experts: 1-D, or with an axis ``ep``; or an `Axis`
            of hp-dtensor. Rank ``i`` holds the ``i``-th equal block of experts.
        num_experts: Number of experts of all ranks.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.
        validate: Whether to check the values of expert ids. Shapes and dtypes are always checked.
            Defaults to None: True on the CPU, else False.
        payload: Dtype in which rows, results and gradients are sent: a floating dtype narrower than
            the tokens' dtype, the same on all ranks. Sums are computed in the dtype of the tokens.
            Values beyond the range of ``payload`` (65,504 for float16) become infinite without an
            error. Defaults to None: the dtype of the tokens.

    Raises:
        ExpertConfigError: ``num_experts`` is not divisible by the number of ranks, or another
            argument is invalid. All ranks raise together before communication.

    Examples:
        On 4 ranks:

        >>> mesh, x = init_device_mesh("cpu", (4,)), torch.randn(16, 64)
        >>> weights, expert_ids = TopKRouter(64, num_experts=8, top_k=2)(x)
        >>> experts = GroupedExperts(64, hidden_dim=128, num_experts=2)  # 8 experts / 4 ranks
        >>> dispatcher = AllToAll(mesh, num_experts=8)
        >>> rows, counts, state = dispatcher.dispatch(x, weights, expert_ids)
        >>> dispatcher.combine(experts(rows, counts), state).shape
        torch.Size([16, 64])
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
            "AllToAll", num_experts, axis.name, axis.size, collectives, validate, payload
        )
        self._exchange = RowExchange(axis, num_experts, self._config.collectives, own_last=True)
        self.num_experts: Final = num_experts
        self.ranks: Final = axis.ranks

    def start_dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, *, weigh_rows: bool = False
    ) -> Pending[Dispatched]:
        """Start the dispatch and return a handle before its communication finishes.

        On CUDA, this method returns while the counts are copied to the host. The rows are then sent
        in ``wait()`` of the handle. See `AsyncDispatcher.start_dispatch`.
        """
        return Pending(self._dispatch(x, weights, expert_ids, weigh_rows))

    def start_combine(self, rows: Tensor, state: DispatchState) -> Pending[Tensor]:
        """Start the combine and return a handle before its communication finishes.

        See `AsyncDispatcher.start_combine`.
        """
        return Pending(self._combine(rows, consume(state, self, _AllToAllState, rows)))

    def _dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, weigh_rows: bool
    ) -> Generator[Step, None, Dispatched]:
        given, exchange = self._config.check(x, weights, expert_ids), self._exchange
        by_expert = exchange.sort(given.expert_ids)
        tables = exchange.start_counts(by_expert.counts, given.report)
        # While the counts travel:
        groups = by_expert.groups
        sent = gather_tokens(given.x, groups, self._config.travelling(given.x))
        rows = exchange.load(sent, tables)
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
            row_weights=None if row_weights is None else row_weights.wait(),
            groups=groups,
            weights=None if weigh_rows else weights,
            plan=plan,
            dtype=x.dtype,
        )
        return rows.wait().to(x.dtype), plan.counts, state

    def _combine(self, rows: Tensor, state: _AllToAllState) -> Generator[Step, None, Tensor]:
        back = self._exchange.start_back(self._config.narrow(rows), state.plan)
        yield "rows"
        came = back.wait().to(state.dtype)
        return scatter_tokens(came, state.groups, state.weights, consume=len(self.ranks) > 1)
