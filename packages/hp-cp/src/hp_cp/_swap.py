"""Swap half of each rank's rows with the rank at the other end, so that causal work is equal."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .schedules._peers import Peers


def swap_second_half(x: Tensor, peers: Peers) -> Tensor:
    """Return ``[batch, heads, rows, size]`` with the second half of the rows from rank ``n-1-r``.

    Its own inverse. One exchange of half the rows, and one in the backward; the middle rank of an
    odd number keeps both halves.
    """
    out: Tensor = _Swap.apply(x, peers)  # type: ignore[no-untyped-call]
    return out


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return _swapped(x, peers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _swapped(grad, ctx.peers), None


def _swapped(x: Tensor, peers: Peers) -> Tensor:
    partner = peers.size - 1 - peers.index
    first, second = x.chunk(2, 2)
    if partner != peers.index:
        received = torch.empty_like(second, memory_format=torch.contiguous_format)
        peers.exchange({partner: second.contiguous()}, {partner: received}).wait()
        second = received
    return torch.cat([first, second], 2)
