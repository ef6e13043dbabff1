"""A fixed number of rows per rank and expert: nothing for the host to wait for."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives

from .._errors import ExpertConfigError
from .._permutation import invert, row_products
from .._sizes import check_sizes
from .._torch import first_order, run_function
from ._checks import (
    REPORT_SIZE,
    Checked,
    check_config,
    check_overflow,
    check_routing,
    checks_data,
    expert_axis,
    raise_faults,
    raise_unequal,
)
from ._exchange import AsyncAllToAll, read_tables
from ._interface import AsyncDispatcher, Dispatched, DispatchState, Pending, Step, consume
from ._local import SortedAssignments, sort_assignments

_OVERFLOWS = ("drop", "error")
_POLICIES = ("position", "probability")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Buffer:
    """Which rows of a buffer of fixed size are used, and by whom."""

    tokens: Tensor
    """Each row's token ``[rows]``; the number of tokens for a row that nobody uses."""
    assignments: Tensor
    """Each row's token times k plus choice ``[rows]``; the number of all for an unused row."""
    places: Tensor
    """Each choice's row ``[tokens, k]``; that of another choice of the token where dropped."""
    kept: Tensor
    """Which choices have a row ``[tokens, k]``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PaddedState(DispatchState):
    buffer: _Buffer
    weights: Tensor | None
    dtype: torch.dtype


class Padded(AsyncDispatcher):
    """Dispatcher with a fixed capacity: each rank sends ``capacity`` rows to each expert.

    If a rank has fewer tokens for an expert, it pads with rows of zeros. The host therefore knows
    all sizes without a device-to-host synchronization (GShard, arXiv 2006.16668, section 3.2).
    Forward and backward have two all-to-alls each, and one more each if the experts multiply rows
    by their routing weights (in a `MoE` they do).

    If a rank has more than ``capacity`` tokens for an expert, some of them are not sent to this
    expert, and their result is the sum over their other experts. With ``overflow="error"``, all
    ranks raise a `RoutingError` instead, which costs one device-to-host synchronization.

    On the CPU, with ``validate=True`` and with ``overflow="error"``, ranks report invalid inputs to
    each other by one more small all-to-all. In all other cases:

    - A rank with invalid inputs raises alone, and the others wait.
    - A rank takes part in the backward for tokens of other ranks only if its own tokens or weights
      need a gradient.
    - Different values of ``capacity`` on ranks are not detected.

    Args:
        ep_mesh: Mesh of the ranks that split the experts: 1-D, or with an axis ``ep``; or an `Axis`
            of hp-dtensor. Rank ``i`` holds the ``i``-th equal block of experts.
        num_experts: Number of experts of all ranks.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.
        capacity: Number of rows that each rank sends to each expert, the same on all ranks. See
            `choose_capacity`.
        overflow: What happens to tokens beyond the capacity, the same on all ranks: ``"drop"`` or
            ``"error"``. Defaults to ``"drop"``.
        drop_policy: Which tokens beyond the capacity are not sent to the expert: the last ones
            (``"position"``), or the ones with the smallest routing weights (``"probability"``).
            Defaults to ``"position"``.
        validate: Whether to check the values of expert ids, as for `AllToAll`. The same on all
            ranks. Defaults to None.
        payload: Dtype in which rows, results and gradients are sent, as for `AllToAll`. Defaults to
            None.

    Raises:
        ExpertConfigError: ``num_experts`` is not divisible by the number of ranks, or another
            argument is invalid. All ranks raise together before communication.

    Examples:
        On 4 ranks:

        >>> mesh, x = init_device_mesh("cpu", (4,)), torch.randn(16, 64)
        >>> weights, expert_ids = TopKRouter(64, num_experts=8, top_k=2)(x)
        >>> experts = GroupedExperts(64, hidden_dim=128, num_experts=2)  # 8 experts / 4 ranks
        >>> capacity = choose_capacity(1.25, num_tokens=16, top_k=2, num_experts=8)
        >>> dispatcher = Padded(mesh, num_experts=8, capacity=capacity)
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
        capacity: int,
        overflow: Literal["drop", "error"] = "drop",
        drop_policy: Literal["position", "probability"] = "position",
        validate: bool | None = None,
        payload: torch.dtype | None = None,
    ) -> None:
        self._axis = axis = expert_axis(ep_mesh)
        self._config = check_config(
            "Padded", num_experts, axis.name, axis.size, collectives, validate, payload
        )
        check_sizes({"capacity": capacity})
        if overflow not in _OVERFLOWS:
            raise ExpertConfigError(f"overflow={overflow!r} is not 'drop' or 'error'")
        if drop_policy not in _POLICIES:
            raise ExpertConfigError(
                f"drop_policy={drop_policy!r} is not 'position' or 'probability'"
            )
        self.num_experts: Final = num_experts
        self.ranks: Final = axis.ranks
        self.capacity = capacity
        self._by_weight = drop_policy == "probability"
        self._refuses = overflow == "error"

    def start_dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, *, weigh_rows: bool = False
    ) -> Pending[Dispatched]:
        """Start the dispatch and return a handle before its communication finishes.

        See `AsyncDispatcher.start_dispatch`.
        """
        return Pending(self._dispatch(x, weights, expert_ids, weigh_rows))

    def start_combine(self, rows: Tensor, state: DispatchState) -> Pending[Tensor]:
        """Start the combine and return a handle before its communication finishes.

        See `AsyncDispatcher.start_combine`.
        """
        return Pending(self._combine(rows, consume(state, self, _PaddedState, rows)))

    def _dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, weigh_rows: bool
    ) -> Generator[Step, None, Dispatched]:
        reads = self._refuses or checks_data(weights, self._config.validate)
        if not reads:  # a peer would never hear of it
            raise_faults([check_routing(x, weights, expert_ids, self.num_experts)], None)
        given = self._config.check(x, weights, expert_ids)
        by_expert = self._sorted(given)
        # Unheard of each other, ranks whose weights need a gradient take part in that of tokens.
        alone = weights.requires_grad, weights.requires_grad
        needs_grad = self._compare(given, by_expert) if reads else alone
        buffer = self._layout(given, by_expert)
        travelling = []
        if weigh_rows:
            each = given.weights.reshape(-1, 1)
            parts = buffer.assignments, buffer.places.view(-1, 1), buffer.kept.view(-1, 1)
            filled = run_function(_FillRows, each, each.dtype, *parts)
            travelling.append(self._start(filled, needs_grad[1]))
        parts = buffer.tokens, buffer.places, buffer.kept
        rows = run_function(_FillRows, given.x, self._config.travelling(given.x), *parts)
        travelling.append(self._start(rows, needs_grad[0]))
        yield "rows"
        ranks, experts = self._axis.size, self.num_experts // self._axis.size
        *row_weights, came = (
            each.wait().unflatten(0, (ranks, experts, -1)).transpose(0, 1).flatten(0, 2)
            for each in travelling
        )
        counts = torch.full(
            (experts,), ranks * self.capacity, dtype=torch.int64, device=came.device
        )
        state = _PaddedState(
            owner=self,
            num_rows=came.shape[0],
            dim=x.shape[1],
            row_weights=row_weights[0][:, 0] if weigh_rows else None,
            buffer=buffer,
            weights=None if weigh_rows else given.weights,
            dtype=x.dtype,
        )
        return came.to(x.dtype), counts, state

    def _combine(self, rows: Tensor, state: _PaddedState) -> Generator[Step, None, Tensor]:
        ranks, experts = self._axis.size, self.num_experts // self._axis.size
        by_rank = rows.unflatten(0, (experts, ranks, -1)).transpose(0, 1).flatten(0, 2)
        back = self._start(self._config.narrow(by_rank), False)
        yield "rows"
        buffer = state.buffer
        parts = buffer.tokens, buffer.assignments, buffer.places, buffer.kept
        return run_function(_SumChoices, back.wait().to(state.dtype), state.weights, *parts)

    def _start(self, rows: Tensor, needs_grad: bool) -> AsyncAllToAll:
        moving = AsyncAllToAll(rows, self._axis, self._config.collectives)
        return moving.start(None, None, needs_grad=needs_grad)

    def _compare(self, given: Checked, by_expert: SortedAssignments) -> tuple[bool, bool]:
        """Return whether any rank's tokens, and any rank's weights, need a gradient.

        Raises on all ranks what one of them found.
        """
        report = given.report
        if self._refuses:
            report = check_overflow(by_expert.counts, self.capacity, report)
        experts = self.num_experts // self._axis.size
        options = ((1, self.capacity), (experts, int(self._refuses)))
        # As wide as the tables of other dispatchers, so that ranks with one of those hear of it.
        row = torch.cat([*(report.new_full((n,), option) for n, option in options), report])
        received = row.expand(self._axis.size, -1).contiguous()
        if self._axis.size > 1:
            (received,) = self._config.collectives.all_to_all(self._axis, received).wait()
        (every,) = read_tables(received)
        needs_grad = raise_faults([row[-REPORT_SIZE:] for row in every], self.ranks)
        rooms = [f"{row[0]}, {_OVERFLOWS[row[1]]!r}" for row in every]
        raise_unequal("one capacity and overflow", rooms, self.ranks)
        return needs_grad

    def _sorted(self, given: Checked) -> SortedAssignments:
        """Return the assignments by expert, those of an expert in the order in which they stay."""
        ids = given.expert_ids
        if not self._by_weight:
            return sort_assignments(ids, self.num_experts)
        best = given.weights.detach().reshape(-1).argsort(descending=True, stable=True)
        found = sort_assignments(ids.reshape(-1, 1).index_select(0, best), self.num_experts)
        order = best.index_select(0, found.order)
        places = invert(order).view(ids.shape)
        return SortedAssignments(order=order, places=places, counts=found.counts)

    def _layout(self, given: Checked, by_expert: SortedAssignments) -> _Buffer:
        """Return which token and choice each row of the buffer is of."""
        tokens, choices = given.expert_ids.shape
        size = self.num_experts * self.capacity
        starts = by_expert.counts.cumsum(0) - by_expert.counts
        nth = by_expert.places - starts[given.expert_ids]
        kept = nth < self.capacity
        place = given.expert_ids * self.capacity + nth
        none = tokens * choices
        assignments = torch.full((size + 1,), none, device=place.device)
        target = torch.where(kept, place, size).reshape(-1)
        steps = torch.arange(none, device=place.device)
        assignments = assignments.scatter_(0, target, steps)[:size]
        # A dropped choice takes a row of its own token, so that no other row can reach its sum.
        first = kept.to(torch.uint8).argmax(1, keepdim=True) if none else kept.long()
        own = place.clamp(max=size - 1).gather(1, first)
        return _Buffer(
            tokens=assignments // max(1, choices),
            assignments=assignments,
            places=torch.where(kept, place, own),
            kept=kept,
        )


class _FillRows(torch.autograd.Function):
    """Copies tokens to the rows of a buffer, zeros where unused."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, tokens: Tensor, places: Tensor, kept: Tensor
    ) -> Tensor:
        ctx.save_for_backward(places, kept)
        ctx.dtype = x.dtype
        return F.pad(x.to(dtype), (0, 0, 0, 1)).index_select(0, tokens)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        places, kept = ctx.saved_tensors
        grad = grads[0].to(ctx.dtype)  # summed as the tokens are, not as they travel
        return _sum_kept(grad, places, kept, kept.to(grad.dtype)), None, None, None, None


class _SumChoices(torch.autograd.Function):
    """Sums the rows of each token's choices, weighted; a dropped choice adds nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor | None,
        tokens: Tensor,
        assignments: Tensor,
        places: Tensor,
        kept: Tensor,
    ) -> Tensor:
        # Without a gradient of the weights the rows need not be kept.
        keep = rows if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(keep, weights, tokens, assignments, places, kept)
        scale = kept.to(rows.dtype) if weights is None else weights.to(rows.dtype) * kept
        return _sum_kept(rows, places, kept, scale)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, tokens, assignments, places, kept = ctx.saved_tensors
        grad = F.pad(grads[0], (0, 0, 0, 1)).index_select(0, tokens)
        grad_weights = None
        if rows is not None and weights is not None:
            products = row_products(rows, grad).to(weights.dtype)
            chosen = products.index_select(0, places.view(-1)).view(places.shape)
            grad_weights = torch.where(kept, chosen, 0)
        if weights is not None:
            scale = F.pad(weights.reshape(-1), (0, 1)).index_select(0, assignments)
            grad *= scale.to(grad.dtype)[:, None]
        return grad, grad_weights, None, None, None, None


def _sum_kept(rows: Tensor, places: Tensor, kept: Tensor, weights: Tensor) -> Tensor:
    """Return each token's weighted sum ``[tokens, dim]`` of the rows at ``places [tokens, k]``.

    ``weights`` are 0 where a choice was not ``kept``; a token without any has the sum 0.
    """
    if not places.numel():  # torch's sums refuse to choose from nothing
        return rows.new_zeros(places.shape[0], rows.shape[1])
    total: Tensor = F.embedding_bag(
        places, rows.contiguous(), mode="sum", per_sample_weights=weights
    )
    return torch.where(kept.any(1, keepdim=True), total, 0)
