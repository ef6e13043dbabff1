"""One hop of tokens: each goes once to every rank of an axis that has one of its experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, Work

from .._bags import Bags, collect, spread
from .._permutation import invert, permute_indices, reorder
from ._slots import Slots, send_slots
from ._trip import Trip, arrive, depart


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Announced:
    """An exchange of counts under way, and what it is about."""

    slots: Slots
    places: Tensor
    """Each slot's row among those for its rank ``[slots]``."""
    hit: Tensor
    """Which tokens each rank gets ``[ranks, tokens]``."""
    positions: Tensor
    """Where each of them is among all rows that are sent, as long as ``hit``."""
    sent: Tensor
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePlan:
    """Who gets how many rows and slots in one hop."""

    bags: Bags
    """Which of the sent rows belong to which token."""
    places: Tensor
    slots: Slots
    send: tuple[int, ...]
    receive: tuple[int, ...]
    send_slots: tuple[int, ...]
    receive_slots: tuple[int, ...]
    counts: Tensor
    """Slots that come ``[ranks, experts here]``, by rank of origin."""
    first_rows: Tensor
    """Where the rows from each rank begin ``[ranks]``."""
    reports: Tensor
    """What each rank reported ``[ranks, numbers]``; ``said`` is the same on the host."""
    said: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hop:
    """Tokens under way; their slots are here already."""

    trip: Trip
    slots: Slots


class Stage:
    """Moves tokens over one axis and back; holds no call's state.

    Rank ``i`` of the axis is responsible for experts ``i * e .. (i + 1) * e - 1`` of
    ``num_experts``, which the axis's size must divide.
    """

    def __init__(self, axis: Axis, num_experts: int, collectives: Collectives) -> None:
        self.axis = axis
        self.experts_here = num_experts // axis.size
        self._door = collectives

    def announce(self, num_tokens: int, slots: Slots, report: Tensor) -> Announced:
        """Start telling every rank how many rows and slots it gets; one small all-to-all.

        Each rank receives from each ``8 * (1 + experts here)`` bytes and its ``report``.
        """
        size, device = self.axis.size, slots.tokens.device
        per_rank = slots.counts.view(size, self.experts_here)
        ranks = torch.arange(size, device=device).repeat_interleave(
            per_rank.sum(1), output_size=slots.tokens.shape[0]
        )
        hit = torch.zeros(size * num_tokens, dtype=torch.bool, device=device)
        wanted = ranks * num_tokens + slots.tokens
        hit.index_fill_(0, wanted, True)
        positions = hit.cumsum(0) - 1
        rows = hit.view(size, num_tokens).sum(1)
        places = positions[wanted] - (rows.cumsum(0) - rows)[ranks]
        sent = torch.cat([rows[:, None], per_rank, report.expand(size, -1)], 1)
        return Announced(
            slots=slots,
            places=places,
            hit=hit.view(size, num_tokens),
            positions=positions,
            sent=sent,
            work=self._door.all_to_all(self.axis, sent),
        )

    def plan(self, announced: Announced) -> StagePlan:
        """Return the plan once all counts are here; the hop's one device-to-host synchronisation.

        Does not judge the reports.
        """
        (received,) = announced.work.wait()
        end = 1 + self.experts_here
        sent, got = torch.stack([announced.sent, received]).tolist()
        send, receive = (tuple(row[0] for row in side) for side in (sent, got))
        return StagePlan(
            bags=_bags(announced.hit, announced.positions, sum(send)),
            places=announced.places,
            slots=announced.slots,
            send=send,
            receive=receive,
            send_slots=tuple(sum(row[1:end]) for row in sent),
            receive_slots=tuple(sum(row[1:end]) for row in got),
            counts=received[:, 1:end],
            first_rows=received[:, 0].cumsum(0) - received[:, 0],
            reports=received[:, end:],
            said=tuple(tuple(row[end:]) for row in got),
        )

    def depart(self, x: Tensor, plan: StagePlan) -> Hop:
        """Start the tokens ``x [tokens, dim]`` and bring their slots.

        Two all-to-alls, and two in backward.
        """
        rows = spread(x, plan.bags)
        trip = depart(rows, self.axis, plan.send, plan.receive, self._door)
        sends = plan.send_slots, plan.receive_slots
        places, weights = send_slots(plan.places, plan.slots.weights, self.axis, *sends, self._door)
        number = sum(plan.receive_slots)
        firsts = plan.first_rows.repeat_interleave(plan.counts.sum(1), output_size=number)
        order, counts = permute_indices(
            plan.counts.reshape(-1), self.experts_here, self.axis.size, num_rows=number
        )
        slots = Slots(
            tokens=(places + firsts).index_select(0, order),
            weights=reorder(weights, order, invert(order)),
            counts=counts,
        )
        return Hop(trip=trip, slots=slots)

    def send_back(self, results: Tensor, plan: StagePlan) -> Trip:
        """Start returning one result for each token that came; one all-to-all, one in backward."""
        return depart(results, self.axis, plan.receive, plan.send, self._door)

    @staticmethod
    def take_back(back: Tensor, plan: StagePlan) -> Tensor:
        """Return the sum of what came back for each token ``[tokens, dim]``."""
        return collect(back, plan.bags)


def arrived(hop: Hop, dtype: torch.dtype) -> Tensor:
    """Return the tokens of a hop, once they are here."""
    return arrive(hop.trip).to(dtype)


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
