"""Slots in any number per token: which expert wants which token, with which weight."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives

from .._permutation import reorder
from .._torch import first_order, run_function, run_pair
from ._sorting import sort_slots
from ._trip import Way


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slots:
    """Slots by expert: their tokens ``[slots]``, weights ``[slots]``, slots per expert."""

    tokens: Tensor
    weights: Tensor
    counts: Tensor


def slots_of(expert_ids: Tensor, weights: Tensor, num_experts: int) -> Slots:
    """Return the slots of ``[tokens, k]`` ids and weights."""
    found = sort_slots(expert_ids, num_experts)
    return Slots(
        tokens=found.order // max(1, expert_ids.shape[1]),
        weights=reorder(weights.reshape(-1), found.order, found.places.view(-1)),
        counts=found.counts,
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SlotTrip:
    """Slots under way; `arrive_slots` gives them."""

    weights: Tensor
    places: Tensor
    way: Way | None


def depart_slots(
    places: Tensor,
    weights: Tensor,
    axis: Axis,
    send: tuple[int, ...],
    receive: tuple[int, ...],
    collectives: Collectives,
) -> SlotTrip:
    """Start sending places ``[slots]`` and weights ``[slots]`` to the ranks of ``axis``.

    One all-to-all of four bytes per place and four (float64: eight) per weight; in backward one of
    the weights' gradient, begun and ended where the other two sides of a `Trip` are.
    """
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    if axis.size == 1:
        return SlotTrip(weights=wide, places=places, way=None)
    way = Way(axis=axis, collectives=collectives, send=send, receive=receive)
    return SlotTrip(weights=run_function(_DepartSlots, wide, places, way), places=places, way=way)


def arrive_slots(trip: SlotTrip) -> tuple[Tensor, Tensor]:
    """Return the places and weights that came, once they are here."""
    if trip.way is None:
        return trip.places, trip.weights
    weights, places = run_pair(_ArriveSlots, trip.weights, trip.way)
    return places, weights


class _DepartSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, places: Tensor, way: Way) -> Tensor:
        ctx.way = way
        bits = weights.detach().contiguous()[:, None].view(torch.int32)
        way.begin(torch.cat([places.to(torch.int32)[:, None], bits], 1), back=False)
        return weights.new_zeros(()).expand(sum(way.receive or ()))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.way.end(), None, None


class _ArriveSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, way: Way) -> tuple[Tensor, Tensor]:
        ctx.way = way
        got = way.end()
        places = got[:, 0].long()
        ctx.mark_non_differentiable(places)
        # A copy even where there is nothing to copy: the bits must begin where a weight may.
        bits = got[:, 1:].clone(memory_format=torch.contiguous_format)
        return bits.view(stand_in.dtype)[:, 0], places

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        way: Way = ctx.way
        way.begin(grads[0], back=True)
        return grads[0], None  # what arrives at the other side is taken instead
