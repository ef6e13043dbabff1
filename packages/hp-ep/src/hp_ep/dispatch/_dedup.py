"""One row per token and rank, or node and then rank, however many of the token's experts it has."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives, Work

from .._errors import ExpertConfigError
from .._permutation import (
    TokenGroups,
    gather_tokens,
    invert,
    reorder,
    scatter_tokens,
    take_rows,
)
from ._checks import (
    REPORT_SIZE,
    Checked,
    DispatchConfig,
    check_config,
    expert_axis,
    raise_faults,
)
from ._exchange import AsyncAllToAll, HostTables
from ._interface import AsyncDispatcher, Dispatched, DispatchState, Pending, Step, consume
from ._local import count_ids, sorting


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Outgoing:
    """Token assignments by the rank of their expert, then by token, and who gets which token."""

    tokens: Tensor
    """The token of each ``[assignments]``."""
    expert_ids: Tensor
    weights: Tensor
    first: Tensor
    """Which assignments are the first of their token and rank: with them a row begins."""
    hit: Tensor
    """Which tokens each rank gets ``[ranks, tokens]``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sizes:
    """Who gets how many rows and assignments in one exchange."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    send_assignments: tuple[int, ...]
    receive_assignments: tuple[int, ...]
    needs_grad: tuple[bool, bool]
    """Whether rows, and whether weights, need a gradient on any rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Incoming:
    """Rows that came over one exchange, and their assignments, row by row."""

    rows: Tensor
    expert_ids: Tensor
    """As the exchange's own numbers ``[assignments]``."""
    weights: Tensor
    first: Tensor
    """1 where the assignments of the next row begin, else 0 ``[assignments]``."""

    @property
    def row_of_each(self) -> Tensor:
        """Return the row of each assignment."""
        return self.first.cumsum(0) - 1


class _TokenExchange:
    """Moves tokens over one axis, once to each rank with one of their experts, and back.

    Rank ``i`` of the axis is responsible for experts ``i * e .. (i + 1) * e - 1`` of
    ``num_experts``, which the axis's size must divide. Holds no call's state.
    """

    def __init__(self, axis: Axis, num_experts: int, collectives: Collectives) -> None:
        self.axis = axis
        self.num_experts = num_experts
        self.experts_here = num_experts // axis.size
        self._collectives = collectives

    def outgoing(
        self, expert_ids: Tensor, weights: Tensor, tokens: Tensor | int, num_tokens: int
    ) -> _Outgoing:
        """Return assignments ``[n]`` by rank; ``tokens`` of each, or how many each token has."""
        ranks = expert_ids.div(self.experts_here, rounding_mode="floor")
        ordered, order = sorting(ranks, self.axis.size)
        ours = order // tokens if isinstance(tokens, int) else tokens.index_select(0, order)
        keys = torch.add(ours, ordered, alpha=num_tokens)
        pairs = F.pad(keys, (1, 0), value=-1)
        return _Outgoing(
            tokens=ours,
            expert_ids=expert_ids.index_select(0, order),
            weights=take_rows(weights, order),
            first=pairs[1:] != pairs[:-1],
            hit=_hits(keys, self.axis.size, num_tokens),
        )

    def table(self, rows: Tensor, counts: Tensor, *more: Tensor) -> Tensor:
        """Return what each rank gets to know: its ``rows``, its experts' ``counts``, and ``more``.

        ``rows [ranks]``, ``counts [experts]``, and vectors for all or matrices ``[ranks, n]``.
        """
        size = self.axis.size
        wide = [part.expand(size, -1) if part.dim() == 1 else part for part in more]
        return torch.cat([rows[:, None], counts.view(size, self.experts_here), *wide], 1)

    def start_table(self, table: Tensor) -> Work:
        """Start sending each rank its row of ``table``; one small all-to-all."""
        return self._collectives.all_to_all(self.axis, table)

    def sizes(
        self,
        sent: Sequence[Sequence[int]],
        got: Sequence[Sequence[int]],
        needs_grad: tuple[bool, bool],
    ) -> _Sizes:
        """Return what the tables say that were ``sent`` and ``got``."""
        end = 1 + self.experts_here
        return _Sizes(
            send=tuple(row[0] for row in sent),
            receive=tuple(row[0] for row in got),
            send_assignments=tuple(sum(row[1:end]) for row in sent),
            receive_assignments=tuple(sum(row[1:end]) for row in got),
            needs_grad=needs_grad,
        )

    def start(
        self, x: Tensor, out: _Outgoing, sizes: _Sizes, dtype: torch.dtype, sums: torch.dtype
    ) -> "_TokensUnderWay":
        """Start bringing tokens ``x [tokens, dim]`` and their assignments to the ranks.

        Tokens travel in ``dtype``, and their gradients are summed in ``sums``. Two all-to-alls, and
        two in backward. An assignment is 4 bytes, its expert and whether a row begins with it, and
        its weight.
        """
        wide = out.weights.to(torch.promote_types(out.weights.dtype, torch.float32))
        labels = torch.add(out.first, out.expert_ids, alpha=2)
        tokens = out.hit.nonzero_static(size=sum(sizes.send))[:, 1]
        groups = _groups(tokens, x.shape[0])
        more = self.axis, self._collectives
        # Assignments first: collectives keep their order, so waiting for them is not for the rows.
        assignments = AsyncAllToAll(wide, *more, labels=labels)
        assignments.start(
            sizes.send_assignments, sizes.receive_assignments, needs_grad=sizes.needs_grad[1]
        )
        rows = AsyncAllToAll(gather_tokens(x, groups, dtype, sums=sums), *more)
        rows.start(sizes.send, sizes.receive, needs_grad=sizes.needs_grad[0])
        return _TokensUnderWay(
            exchange=self, sizes=sizes, groups=groups, rows=rows, assignments=assignments
        )

    def start_back(self, results: Tensor, sizes: _Sizes) -> AsyncAllToAll:
        """Start returning one result for each row that came; one all-to-all, one in backward."""
        back = AsyncAllToAll(results, self.axis, self._collectives)
        return back.start(sizes.receive, sizes.send)


@dataclass(slots=True, kw_only=True, eq=False)
class _TokensUnderWay:
    """One exchange of tokens that was started, and what returning results needs."""

    exchange: _TokenExchange
    sizes: _Sizes
    groups: TokenGroups
    """Which of the sent rows belong to which token."""
    rows: AsyncAllToAll | None
    assignments: AsyncAllToAll | None

    def wait(self) -> _Incoming:
        """Return the rows and their assignments, once they are here."""
        if self.rows is None or self.assignments is None:
            raise RuntimeError("these rows were taken before")
        weights, labels = self.assignments.wait(), self.assignments.labels
        if labels is None:
            raise RuntimeError("assignments without experts")
        found = _Incoming(
            rows=self.rows.wait(), expert_ids=labels >> 1, weights=weights, first=labels & 1
        )
        self.rows = self.assignments = None
        return found

    def start_back(self, parts: Tensor) -> AsyncAllToAll:
        """Start returning one result for each row; see `_TokenExchange.start_back`."""
        return self.exchange.start_back(parts, self.sizes)


def _hits(keys: Tensor, num_ranks: int, num_tokens: int) -> Tensor:
    """Return which tokens each rank gets ``[ranks, tokens]``: ``keys`` rank * tokens + token."""
    hit = torch.zeros(num_ranks * num_tokens, dtype=torch.bool, device=keys.device)
    return hit.index_fill_(0, keys, True).view(num_ranks, num_tokens)


def _groups(tokens: Tensor, num_tokens: int) -> TokenGroups:
    """Return which rows belong to which token, of rows with these ``tokens [rows]``."""
    # Sorting four bytes per key costs less than sorting eight.
    ordered, rows = tokens.to(torch.int32).sort(stable=True)
    each = torch.arange(num_tokens, dtype=torch.int32, device=tokens.device)
    return TokenGroups(tokens=tokens, rows=rows, starts=torch.searchsorted(ordered, each))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Planned:
    """What the counts have told: the tokens that leave, and the sizes of all exchanges."""

    out: _Outgoing
    route: tuple[tuple[_TokenExchange, _Sizes], ...]
    counts: Tensor
    """Assignments for each of the experts here."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _DedupState(DispatchState):
    under_way: tuple[_TokensUnderWay, ...]
    groups: TokenGroups
    """Which of the experts' rows belong to which row that came."""
    weights: Tensor | None
    dtype: torch.dtype


class _Deduplicating(AsyncDispatcher):
    """Tokens go to their experts in one exchange or several, each of which sums on the way back."""

    _config: DispatchConfig

    def start_dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, *, weigh_rows: bool = False
    ) -> Pending[Dispatched]:
        """Start the dispatch and return a handle before its communication finishes.

        The exchange of counts is complete on return; the tokens are in flight. See
        `AsyncDispatcher.start_dispatch`.
        """
        return Pending(self._dispatch(x, weights, expert_ids, weigh_rows))

    def start_combine(self, rows: Tensor, state: DispatchState) -> Pending[Tensor]:
        """Start the combine and return a handle before its communication finishes.

        Each rank sends back one weighted sum per received token. See
        `AsyncDispatcher.start_combine`.
        """
        return Pending(self._combine(rows, consume(state, self, _DedupState, rows)))

    def _plan(self, given: Checked) -> _Planned:
        """Exchange counts and reports; raise on all ranks where one of them reports a fault."""
        raise NotImplementedError

    def _dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, weigh_rows: bool
    ) -> Generator[Step, None, Dispatched]:
        plan = self._plan(self._config.check(x, weights, expert_ids))
        (exchange, sizes), *others = plan.route
        dtypes = self._config.travelling(x), x.dtype
        under_way = [exchange.start(x, plan.out, sizes, *dtypes)]
        yield "rows"
        came = under_way[0].wait()
        for exchange, sizes in others:
            local = came.expert_ids.long().remainder(exchange.num_experts)
            number = came.rows.shape[0]
            out = exchange.outgoing(local, came.weights, came.row_of_each, number)
            under_way.append(exchange.start(came.rows, out, sizes, *dtypes))
            came = under_way[-1].wait()
        order = came.expert_ids.sort(stable=True).indices
        places = invert(order)
        groups = TokenGroups(
            tokens=came.row_of_each.index_select(0, order),
            rows=places,
            starts=came.first.nonzero_static(size=came.rows.shape[0])[:, 0],
        )
        state = _DedupState(
            owner=self,
            num_rows=order.shape[0],
            dim=x.shape[1],
            row_weights=(
                reorder(came.weights, order, places).to(weights.dtype) if weigh_rows else None
            ),
            under_way=tuple(under_way),
            groups=groups,
            weights=None if weigh_rows else came.weights,
            dtype=x.dtype,
        )
        return gather_tokens(came.rows.to(x.dtype), groups), plan.counts, state

    def _combine(self, rows: Tensor, state: _DedupState) -> Generator[Step, None, Tensor]:
        parts = scatter_tokens(rows.to(state.dtype), state.groups, state.weights)
        first, *others = state.under_way
        for tokens_sent in reversed(others):
            back = tokens_sent.start_back(self._config.narrow(parts))
            parts = scatter_tokens(back.wait().to(state.dtype), tokens_sent.groups)
        back = first.start_back(self._config.narrow(parts))
        yield "rows"
        return scatter_tokens(back.wait().to(state.dtype), first.groups)


class Dedup(_Deduplicating):
    """Dispatcher that sends a token once to each rank that has one of its experts.

    The receiving rank copies the token for each of these experts, and sends back the weighted sum
    of their results. DeepSeek-V3 does the same with nodes instead of ranks (arXiv 2412.19437,
    section 3.2.2).

    | | all-to-alls | device-to-host synchronizations |
    |---|---|---|
    | forward | 4: counts, assignments, tokens, results | 1 |
    | backward | 3 | 0 |

    An assignment is one pair of a token and an expert that it chose. It takes 8 bytes, or 12 with
    float64 weights. If a rank has invalid inputs, all ranks raise the same `RoutingError`. With
    ``payload``, the sum of a rank is rounded once, when it is sent.

    Args:
        ep_mesh: Mesh of the ranks that split the experts: 1-D, or with an axis ``ep``; or an `Axis`
            of hp-dtensor. Rank ``i`` holds the ``i``-th equal block of experts.
        num_experts: Number of experts of all ranks.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.
        validate: Whether to check the values of expert ids. Shapes and dtypes are always checked.
            Defaults to None: True on the CPU, else False.
        payload: Dtype in which tokens, results and gradients are sent: a floating dtype narrower
            than the tokens' dtype, the same on all ranks. Sums are computed in the dtype of the
            tokens. Values beyond the range of ``payload`` (65,504 for float16) become infinite
            without an error. Defaults to None: the dtype of the tokens.

    Raises:
        ExpertConfigError: ``num_experts`` is not divisible by the number of ranks, or another
            argument is invalid. All ranks raise together before communication.

    Examples:
        On 4 ranks:

        >>> mesh, x = init_device_mesh("cpu", (4,)), torch.randn(16, 64)
        >>> weights, expert_ids = TopKRouter(64, num_experts=8, top_k=2)(x)
        >>> experts = GroupedExperts(64, hidden_dim=128, num_experts=2)  # 8 experts / 4 ranks
        >>> dispatcher = Dedup(mesh, num_experts=8)
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
            "Dedup", num_experts, axis.name, axis.size, collectives, validate, payload
        )
        self._exchange = _TokenExchange(axis, num_experts, self._config.collectives)
        self.num_experts: Final = num_experts
        self.ranks: Final = axis.ranks

    def _plan(self, given: Checked) -> _Planned:
        exchange, ids = self._exchange, given.expert_ids.reshape(-1)
        choices = given.expert_ids.shape[1]
        out = exchange.outgoing(ids, given.weights.reshape(-1), choices, given.x.shape[0])
        table = exchange.table(out.hit.sum(1), count_ids(ids, self.num_experts), given.report)
        received, (sent, got) = HostTables(exchange.start_table(table), table).wait()
        needs_grad = raise_faults([row[-REPORT_SIZE:] for row in got], self.ranks)
        return _Planned(
            out=out,
            route=((exchange, exchange.sizes(sent, got, needs_grad)),),
            counts=received[:, 1 : 1 + exchange.experts_here].sum(0),
        )


class Hierarchical(_Deduplicating):
    """Dispatcher that sends a token at most once to each node, and there at most once to each rank.

    Sending has two steps, as in DeepSeek-V3 (arXiv 2412.19437, section 3.2.2). First, the token is
    sent to every node that has one of its experts. In the node, the rank with the same index as the
    sending rank receives it. Second, this rank sends the token to every rank of its node that has
    one of the experts. Results return the same way: each rank sends back one sum per token, and
    each node sends back one sum per token.

    | | all-to-alls per axis | device-to-host synchronizations |
    |---|---|---|
    | forward | 4 | 1 |
    | backward | 3 | 0 |

    The exchange between nodes overlaps with computation; the exchange inside a node does not. If a
    rank has invalid inputs, all ranks raise the same `RoutingError`.

    Args:
        node_mesh: Mesh with the two axes ``(nodes, ranks of a node)``. The experts are split into
            one equal block per rank. Rank ``i`` of node ``n`` holds block
            ``n * (ranks per node) + i``.
        num_experts: Number of experts of all ranks.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.
        validate: Whether to check the values of expert ids. Shapes and dtypes are always checked.
            Defaults to None: True on the CPU, else False.
        payload: Dtype in which tokens, results and gradients are sent: a floating dtype narrower
            than the tokens' dtype, the same on all ranks. Sums are computed in the dtype of the
            tokens. Values beyond the range of ``payload`` (65,504 for float16) become infinite
            without an error. Defaults to None: the dtype of the tokens.

    Raises:
        ExpertConfigError: ``node_mesh`` does not have two axes, ``num_experts`` is not divisible by
            the number of ranks, or another argument is invalid. All ranks raise together before
            communication.

    Examples:
        On 4 ranks, as two nodes of two:

        >>> node_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "local"))
        >>> x = torch.randn(16, 64)
        >>> weights, expert_ids = TopKRouter(64, num_experts=8, top_k=2)(x)
        >>> experts = GroupedExperts(64, hidden_dim=128, num_experts=2)  # 8 experts / 4 ranks
        >>> dispatcher = Hierarchical(node_mesh, num_experts=8)
        >>> rows, counts, state = dispatcher.dispatch(x, weights, expert_ids)
        >>> dispatcher.combine(experts(rows, counts), state).shape
        torch.Size([16, 64])
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
        self._config = check_config(
            "Hierarchical", num_experts, names, size, collectives, validate, payload
        )
        self._between = _TokenExchange(nodes, num_experts, self._config.collectives)
        self._inside = _TokenExchange(inside, num_experts // nodes.size, self._config.collectives)
        rows: list[list[int]] = node_mesh.mesh.tolist()
        self.num_experts: Final = num_experts
        self.ranks: Final = tuple(rank for row in rows for rank in row)
        # Reports come by rank inside the node, each with those of its position in all nodes.
        self._reporters = [row[i] for i in range(inside.size) for row in rows]

    def _plan(self, given: Checked) -> _Planned:
        between, inside = self._between, self._inside
        ids, choices = given.expert_ids.reshape(-1), given.expert_ids.shape[1]
        tokens, (nodes, size) = given.x.shape[0], (between.axis.size, inside.axis.size)
        out = between.outgoing(ids, given.weights.reshape(-1), choices, tokens)
        ranks = out.expert_ids.div(inside.experts_here, rounding_mode="floor")
        hit = _hits(torch.add(out.tokens, ranks, alpha=tokens), nodes * size, tokens)
        each = hit.sum(1).view(nodes, size)
        counts = count_ids(ids, self.num_experts)
        sent = between.table(out.hit.sum(1), counts, each, given.report)
        (came,) = between.start_table(sent).wait()
        # What came for this node is what its ranks will get from here: both exchanges are known to
        # all before the host looks at either.
        lengths = [1, between.experts_here, size, REPORT_SIZE]
        _, here, rows, reports = came.split(lengths, 1)
        passed = inside.table(rows.sum(0), here.sum(0), reports.reshape(-1))
        work = inside.start_table(passed)
        told, tables = HostTables(work, sent, came, passed).wait()
        start = 1 + inside.experts_here
        every = [
            row[at : at + REPORT_SIZE]
            for row in tables[3]
            for at in range(start, len(row), REPORT_SIZE)
        ]
        needs_grad = raise_faults(every, self._reporters)
        outer = between.sizes(tables[0], tables[1], needs_grad)
        inner = inside.sizes(tables[2], tables[3], needs_grad)
        return _Planned(
            out=out,
            route=((between, outer), (inside, inner)),
            counts=told[:, 1:start].sum(0),
        )
