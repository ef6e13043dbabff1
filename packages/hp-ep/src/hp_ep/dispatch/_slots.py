"""Slots in any number per token: which expert wants which token, with which weight."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_dtensor import Axis, Collectives

from .._permutation import reorder
from .._torch import run_pair
from ._sorting import sort_slots


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


def send_slots(
    places: Tensor,
    weights: Tensor,
    axis: Axis,
    send: Sequence[int],
    receive: Sequence[int],
    door: Collectives,
) -> tuple[Tensor, Tensor]:
    """Return the places ``[slots]`` and weights that the ranks of ``axis`` sent here.

    One all-to-all of four bytes per place and four (float64: eight) per weight; one all-to-all of
    the weights' gradient in backward.
    """
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    got, there = run_pair(_SendSlots, wide, places, axis, send, receive, door)
    return there, got


class _SendSlots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        places: Tensor,
        axis: Axis,
        send: Sequence[int],
        receive: Sequence[int],
        door: Collectives,
    ) -> tuple[Tensor, Tensor]:
        ctx.route = axis, receive, send, door
        bits = weights.detach().contiguous()[:, None].view(torch.int32)
        got = _exchange(torch.cat([places.to(torch.int32)[:, None], bits], 1), *_swap(ctx.route))
        there = got[:, 0].long()
        ctx.mark_non_differentiable(there)
        # A copy even where there is nothing to copy: the bits must begin where a weight may.
        back = got[:, 1:].clone(memory_format=torch.contiguous_format)
        return back.view(weights.dtype)[:, 0], there

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grads[0].contiguous(), *ctx.route), None, None, None, None, None


Route = tuple[Axis, Sequence[int], Sequence[int], Collectives]


def _swap(route: Route) -> Route:
    axis, receive, send, door = route
    return axis, send, receive, door


def _exchange(
    x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int], door: Collectives
) -> Tensor:
    if axis.size == 1:
        return x
    (got,) = door.all_to_all(axis, x, send, receive).wait()
    return got
