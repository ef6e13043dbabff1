"""Swap half of each rank's rows with the rank at the other end, so that causal work is equal."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._mesh import Peers


def swap_halves(x: Tensor, peers: Peers, *, back: bool = False) -> Tensor:
    """Return ``[batch, heads, rows, size]`` with the second half of the rows of rank ``n - 1 - r``.

    Rows stay in global order: on later ranks what comes lies before what stays. ``back`` undoes it.
    One exchange of half the rows, and one in the backward; the middle rank of an odd number keeps
    both halves.
    """
    out: Tensor = _Swap.apply(x, peers, back)  # type: ignore[no-untyped-call]
    return out


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, back: bool) -> Tensor:
        ctx.peers, ctx.back = peers, back
        return _exchange_halves(x, peers, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchange_halves(grad, ctx.peers, not ctx.back), None, None


def _exchange_halves(x: Tensor, peers: Peers, back: bool) -> Tensor:
    partner = peers.size - 1 - peers.index
    if partner == peers.index:
        peers.exchange({}, {}).wait()  # every rank of an axis makes the same calls
        return x.clone()
    comes_first = partner < peers.index
    halves = x.chunk(2, 2)
    stays, goes = halves[::-1] if comes_first and back else halves
    comes = torch.empty_like(goes, memory_format=torch.contiguous_format)
    peers.exchange({partner: goes.contiguous()}, {partner: comes}).wait()
    return torch.cat([comes, stays] if comes_first and not back else [stays, comes], 2)
