"""One hop of tokens: each goes once to every rank of an axis that has one of its experts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, Work

from .._bags import Bags, spread
from .._permutation import block_indices, invert, reorder
from ._slots import Slots, SlotTrip, arrive_slots, depart_slots
from ._trip import Trip, arrive, connect, depart


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """Which rank wants which token."""

    slots: Slots
    places: Tensor
    """Each slot's row among those for its rank ``[slots]``."""
    hit: Tensor
    """Which tokens each rank gets ``[ranks, tokens]``."""
    positions: Tensor
    """Where each of them is among all rows that are sent, as long as ``hit``."""
    rows: Tensor
    """How many tokens each rank gets ``[ranks]``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sizes:
    """Who gets how many rows and slots in one hop."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    send_slots: tuple[int, ...]
    receive_slots: tuple[int, ...]
    counts: Tensor
    """Slots that come ``[ranks, experts here]``, by rank of origin."""
    first_rows: Tensor
    """Where the rows from each rank begin ``[ranks]``."""
    needs_grad: tuple[bool, bool]
    """Whether rows, and whether weights, need a gradient on any rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hop:
    """Tokens and their slots under way."""

    rows: Trip
    slots: SlotTrip
    places: Tensor
    """The first row of each slot's origin ``[slots]``."""
    order: Tensor
    """The slots that come, by expert."""
    counts: Tensor
    bags: Bags
    """Which of the sent rows belong to which token."""


class Stage:
    """Moves tokens over one axis and back; holds no call's state.

    Rank ``i`` of the axis is responsible for experts ``i * e .. (i + 1) * e - 1`` of
    ``num_experts``, which the axis's size must divide.
    """

    def __init__(self, axis: Axis, num_experts: int, collectives: Collectives) -> None:
        self.axis = axis
        self.experts_here = num_experts // axis.size
        self._collectives = collectives

    def tell(self, table: Tensor) -> Work:
        """Start sending each rank its row of ``table``; one small all-to-all."""
        return self._collectives.all_to_all(self.axis, table)

    def table(self, rows: Tensor, counts: Tensor, *more: Tensor) -> Tensor:
        """Return what to tell each rank: its ``rows``, its experts' slot ``counts``, and ``more``.

        ``rows [ranks]``, ``counts [experts]``, and vectors for all or matrices ``[ranks, n]``.
        """
        size = self.axis.size
        wide = [part.expand(size, -1) if part.dim() == 1 else part for part in more]
        return torch.cat([rows[:, None], counts.view(size, self.experts_here), *wide], 1)

    def sizes(
        self,
        sent: Sequence[Sequence[int]],
        got: Sequence[Sequence[int]],
        received: Tensor,
        needs_grad: tuple[bool, bool],
    ) -> Sizes:
        """Return what the tables say that were sent and ``received``, and ``got`` on the host."""
        end = 1 + self.experts_here
        rows = received[:, 0]
        return Sizes(
            send=tuple(row[0] for row in sent),
            receive=tuple(row[0] for row in got),
            send_slots=tuple(sum(row[1:end]) for row in sent),
            receive_slots=tuple(sum(row[1:end]) for row in got),
            counts=received[:, 1:end],
            first_rows=rows.cumsum(0) - rows,
            needs_grad=needs_grad,
        )

    def depart(self, x: Tensor, wanted: Wanted, sizes: Sizes) -> Hop:
        """Start bringing the tokens ``x [tokens, dim]`` and their slots to the ranks.

        Two all-to-alls, and two in backward.
        """
        bags = _bags(wanted.hit, wanted.positions, sum(sizes.send))
        weights = connect(wanted.slots.weights, sizes.needs_grad[1])
        rows = connect(spread(x, bags), sizes.needs_grad[0])
        lengths = sizes.send_slots, sizes.receive_slots
        # Slots first: communication keeps its order, so waiting for them is not for the tokens.
        slots = depart_slots(wanted.places, weights, self.axis, *lengths, self._collectives)
        trip = depart(rows, self.axis, sizes.send, sizes.receive, self._collectives)
        number = sum(sizes.receive_slots)
        order, counts = block_indices(
            sizes.counts.reshape(-1), self.experts_here, self.axis.size, num_rows=number
        )
        return Hop(
            rows=trip,
            slots=slots,
            places=sizes.first_rows.repeat_interleave(sizes.counts.sum(1), output_size=number),
            order=order,
            counts=counts,
            bags=bags,
        )

    def send_back(self, results: Tensor, sizes: Sizes) -> Trip:
        """Start returning one result for each token that came; one all-to-all, one in backward."""
        return depart(results, self.axis, sizes.receive, sizes.send, self._collectives)


def arrive_here(hop: Hop) -> tuple[Tensor, Slots]:
    """Return the tokens of a hop and their slots, once they are here."""
    places, weights = arrive_slots(hop.slots)
    slots = Slots(
        tokens=(places + hop.places).index_select(0, hop.order),
        weights=reorder(weights, hop.order, invert(hop.order)),
        counts=hop.counts,
    )
    return arrive(hop.rows), slots


def find_wanted(slots: Slots, num_tokens: int, size: int) -> Wanted:
    """Return which of ``size`` ranks, each with an equal block of experts, wants which token."""
    device = slots.tokens.device
    ranks = torch.arange(size, device=device).repeat_interleave(
        slots.counts.view(size, -1).sum(1), output_size=slots.tokens.shape[0]
    )
    hit = torch.zeros(size * num_tokens, dtype=torch.bool, device=device)
    wanted = ranks * num_tokens + slots.tokens
    hit.index_fill_(0, wanted, True)
    positions = hit.cumsum(0) - 1
    rows = hit.view(size, num_tokens).sum(1)
    return Wanted(
        slots=slots,
        places=positions[wanted] - (rows.cumsum(0) - rows)[ranks],
        hit=hit.view(size, num_tokens),
        positions=positions,
        rows=rows,
    )


def _bags(hit: Tensor, positions: Tensor, num_rows: int) -> Bags:
    """Return which row is which token's; what is not sent is written to a place beyond the end."""
    size, tokens = hit.shape

    def listed(mask: Tensor, where: Tensor, values: Tensor) -> Tensor:
        target = torch.where(mask.reshape(-1), where, num_rows)
        found = torch.zeros(num_rows + 1, dtype=torch.int64, device=hit.device)
        return found.scatter_(0, target, values)[:num_rows]

    by_token = hit.t().reshape(-1)
    per_token = hit.sum(0)
    return Bags(
        tokens=listed(hit, positions, torch.arange(tokens, device=hit.device).repeat(size)),
        rows=listed(by_token, by_token.cumsum(0) - 1, positions.view(size, tokens).t().reshape(-1)),
        starts=per_token.cumsum(0) - per_token,
    )
