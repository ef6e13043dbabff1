"""A fixed number of rows per rank and expert: nothing for the host to wait for."""

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives

from .._errors import ExpertConfigError
from .._permutation import row_products
from .._sizes import check_sizes
from .._torch import first_order, run_function
from ._exchange import expert_axis
from ._faults import REPORT_SIZE, check_overflow, check_routing, checks_data
from ._host import read_tables
from ._protocol import DispatchState, OverlappingDispatcher, consume
from ._sorting import SortedSlots, sort_slots
from ._terms import Prepared, check_terms
from ._trip import Trip, arrive, connect, depart
from ._verdict import needs_grad, raise_faults, raise_unequal

_OVERFLOWS = ("drop", "error")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Buffer:
    """Which rows of a buffer of fixed size are used, and by whom."""

    tokens: Tensor
    """Each row's token ``[rows]``; the number of tokens for a row that nobody uses."""
    slots: Tensor
    """Each row's slot ``[rows]``, that is token times k plus choice; anything where unused."""
    places: Tensor
    """Each choice's row ``[tokens, k]``; that of another choice of the token where dropped."""
    kept: Tensor
    """Which choices have a row ``[tokens, k]``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PaddedState(DispatchState):
    buffer: _Buffer
    weights: Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Dispatching:
    trip: Trip
    state: _PaddedState
    blocks: tuple[int, int, int]

    def finish(self) -> tuple[Tensor, Tensor, DispatchState]:
        """Return the rows for this rank's experts, once they are here."""
        ranks, experts, capacity = self.blocks
        came = arrive(self.trip).to(self.state.dtype).unflatten(0, (ranks, experts, capacity))
        rows = came.transpose(0, 1).flatten(0, 2)
        counts = torch.full((experts,), ranks * capacity, dtype=torch.int64, device=rows.device)
        return rows, counts, self.state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Combining:
    trip: Trip
    state: _PaddedState

    def finish(self) -> Tensor:
        """Return each token's weighted sum, once its results are here."""
        back = arrive(self.trip).to(self.state.dtype)
        buffer = self.state.buffer
        parts = buffer.tokens, buffer.slots, buffer.places, buffer.kept
        return run_function(_SumChoices, back, self.state.weights, *parts)


class Padded(OverlappingDispatcher):
    """A `TokenDispatcher` with room for ``capacity`` rows from each rank for each expert.

    Every rank sends every expert as many rows, zeros where it has fewer tokens, so the host knows
    all sizes beforehand: forward makes two all-to-alls of equal parts and no device-to-host
    synchronisation, backward two. An expert gets ``capacity`` rows from each rank, used or not
    (GShard, arXiv 2006.16668, section 3.2); `choose_capacity` takes it from a factor.

    Of tokens beyond the capacity the last ones lose that expert, whose share of the result is then
    missing; with ``overflow="error"`` all ranks raise a `RoutingError` instead, which takes one
    synchronisation. Faults of one rank are told to all only where reading is free or asked for: on
    the CPU, with ``validate`` or ``overflow="error"``; one more small all-to-all then. Elsewhere a
    rank takes part in the backward of its peers' tokens only if its own tokens or weights need a
    gradient, and ``capacity`` that is not the same on all ranks is undefined; ``validate`` and
    ``overflow`` must be the same everywhere. ``payload`` and other errors are those of `AllToAll`.
    """

    def __init__(
        self,
        ep_mesh: AxisMesh | Axis,
        num_experts: int,
        collectives: Collectives | None = None,
        *,
        capacity: int,
        overflow: Literal["drop", "error"] = "drop",
        validate: bool | None = None,
        payload: torch.dtype | None = None,
    ) -> None:
        self._axis = axis = expert_axis(ep_mesh)
        self._terms = check_terms(num_experts, axis.name, axis.size, collectives, validate, payload)
        check_sizes({"capacity": capacity})
        if overflow not in _OVERFLOWS:
            raise ExpertConfigError(f"overflow={overflow!r} is not 'drop' or 'error'")
        self.num_experts: Final = num_experts
        self.ranks: Final = axis.ranks
        self.capacity = capacity
        self._refuses = overflow == "error"

    def begin_dispatch(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> _Dispatching:
        """Return while the rows travel; see `OverlappingDispatcher.begin_dispatch`."""
        reads = self._refuses or checks_data(weights, self._terms.validate)
        if not reads:  # a peer would never hear of it
            raise_faults([check_routing(x, weights, expert_ids, self.num_experts)], None)
        ready = self._terms.prepare(x, weights, expert_ids)
        slots = sort_slots(ready.expert_ids, self.num_experts)
        # Unheard of each other, ranks whose weights need a gradient take part in that of tokens.
        needed = self._compare(ready, slots) if reads else weights.requires_grad
        buffer = self._layout(ready, slots)
        parts = buffer.tokens, buffer.places, buffer.kept
        rows = run_function(_FillRows, self._terms.narrow(ready.x), *parts)
        ranks = self._axis.size
        state = _PaddedState(
            owner=self,
            num_rows=rows.shape[0],
            dim=x.shape[1],
            buffer=buffer,
            weights=ready.weights,
            dtype=x.dtype,
        )
        return _Dispatching(
            trip=self._depart(connect(rows, needed)),
            state=state,
            blocks=(ranks, self.num_experts // ranks, self.capacity),
        )

    def begin_combine(self, rows: Tensor, state: DispatchState) -> _Combining:
        """Return while the results travel; see `OverlappingDispatcher.begin_combine`."""
        own = consume(state, self, _PaddedState, rows)
        ranks = self._axis.size
        by_expert = rows.unflatten(0, (self.num_experts // ranks, ranks, self.capacity))
        results = self._terms.narrow(by_expert.transpose(0, 1).flatten(0, 2))
        return _Combining(trip=self._depart(results), state=own)

    def _depart(self, rows: Tensor) -> Trip:
        return depart(rows, self._axis, None, None, self._terms.collectives)

    def _compare(self, ready: Prepared, slots: SortedSlots) -> bool:
        """Return whether any rank's tokens need a gradient; raise on all what one of them found."""
        report = ready.report
        if self._refuses:
            report = check_overflow(slots.counts, self.capacity, report)
        options = (self.capacity, int(self._refuses))
        report = torch.cat([report, *(report.new_full((1,), option) for option in options)])
        received = report.expand(self._axis.size, -1).contiguous()
        if self._axis.size > 1:
            (received,) = self._terms.collectives.all_to_all(self._axis, received).wait()
        (told,) = read_tables(received)
        reports = [row[:REPORT_SIZE] for row in told]
        raise_faults(reports, self.ranks)
        given = [f"{row[-2]}, {_OVERFLOWS[row[-1]]!r}" for row in told]
        raise_unequal("one capacity and overflow", given, reports, self.ranks)
        return needs_grad(reports)[0]

    def _layout(self, ready: Prepared, slots: SortedSlots) -> _Buffer:
        """Return which token and choice each row of the buffer is of."""
        tokens, choices = ready.expert_ids.shape
        size = self.num_experts * self.capacity
        starts = slots.counts.cumsum(0) - slots.counts
        nth = slots.places - starts[ready.expert_ids]
        kept = nth < self.capacity
        place = ready.expert_ids * self.capacity + nth
        none = tokens * choices
        slot = torch.full((size + 1,), none, device=place.device)
        target = torch.where(kept, place, size).reshape(-1)
        slot = slot.scatter_(0, target, torch.arange(none, device=place.device))[:size]
        # A dropped choice takes a row of its own token, so that no other row can reach its sum.
        first = kept.to(torch.uint8).argmax(1, keepdim=True) if none else kept.long()
        own = place.clamp(max=size - 1).gather(1, first)
        return _Buffer(
            tokens=slot // max(1, choices),
            slots=slot.clamp(max=max(0, none - 1)),
            places=torch.where(kept, place, own),
            kept=kept,
        )


class _FillRows(torch.autograd.Function):
    """Copies tokens to the rows of a buffer, zeros where unused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(places, kept)
        return F.pad(x, (0, 0, 0, 1)).index_select(0, tokens)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        places, kept = ctx.saved_tensors
        return _sum_kept(grads[0], places, kept, kept.to(grads[0].dtype)), None, None, None


class _SumChoices(torch.autograd.Function):
    """Sums the rows of each token's choices, weighted; a dropped choice adds nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        tokens: Tensor,
        slots: Tensor,
        places: Tensor,
        kept: Tensor,
    ) -> Tensor:
        # Without a gradient of the weights the rows need not be kept.
        keep = rows if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(keep, weights, tokens, slots, places, kept)
        return _sum_kept(rows, places, kept, weights.to(rows.dtype) * kept)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, tokens, slots, places, kept = ctx.saved_tensors
        grad = F.pad(grads[0], (0, 0, 0, 1)).index_select(0, tokens)
        grad_weights = None
        if rows is not None:
            products = row_products(rows, grad).to(weights.dtype)
            chosen = products.index_select(0, places.view(-1)).view(places.shape)
            grad_weights = torch.where(kept, chosen, 0)
        if weights.numel():
            grad *= weights.reshape(-1).index_select(0, slots).to(grad.dtype)[:, None]
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
