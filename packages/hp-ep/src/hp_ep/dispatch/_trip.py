"""Rows on their way: an all-to-all that is begun and ended apart, forward and backward."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_dtensor import Axis, Collectives, Work

from .._torch import run_function


@dataclass(slots=True, eq=False, kw_only=True)
class Way:
    """The route of one trip, and what is on it at the moment."""

    axis: Axis
    send: tuple[int, ...] | None
    receive: tuple[int, ...] | None
    collectives: Collectives
    work: Work | None = None
    held: Tensor | None = field(default=None, repr=False)
    """What is being sent: it must stay as it is until it has arrived."""

    def begin(self, x: Tensor, *, back: bool) -> None:
        """Start sending ``x``, or in backward what comes ``back``."""
        send, receive = (self.receive, self.send) if back else (self.send, self.receive)
        self.held = x.contiguous()
        self.work = self.collectives.all_to_all(self.axis, self.held, send, receive)

    def end(self) -> Tensor:
        """Return what has arrived, once it is here."""
        if self.work is None:
            raise RuntimeError("nothing is under way")
        (arrived,) = self.work.wait()
        self.work = self.held = None
        return arrived


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trip:
    """Rows under way; `arrive` gives them."""

    rows: Tensor = field(repr=False)
    way: Way | None


def depart(
    x: Tensor,
    axis: Axis,
    send: Sequence[int] | None,
    receive: Sequence[int] | None,
    collectives: Collectives,
) -> Trip:
    """Start one all-to-all of row blocks over ``axis`` and return at once.

    Blocks are ``send`` rows to and ``receive`` rows from each rank, or equal. In backward the way
    back starts where `arrive` was called, and this is where it is waited for: what was computed in
    between overlaps with both. An axis of one rank communicates nothing.
    """
    if axis.size == 1:
        return Trip(rows=x, way=None)
    splits = (None if s is None else tuple(s) for s in (send, receive))
    way = Way(axis=axis, send=next(splits), receive=next(splits), collectives=collectives)
    return Trip(rows=run_function(_Depart, x, way), way=way)


def arrive(trip: Trip) -> Tensor:
    """Return the rows that came, once they are here."""
    return trip.rows if trip.way is None else run_function(_Arrive, trip.rows, trip.way)


def connect(x: Tensor, needs_grad: bool) -> Tensor:
    """Return ``x``, as an input of this rank's backward where some rank ``needs_grad``.

    A rank whose own ``x`` needs no gradient, for want of tokens, say, then takes part in the
    communication of its peers' backward.
    """
    if not needs_grad or x.requires_grad or not torch.is_grad_enabled():
        return x
    return x.detach().requires_grad_()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Way) -> Tensor:
        ctx.way = way
        way.begin(x.detach(), back=False)
        length = x.shape[0] if way.receive is None else sum(way.receive)
        # Stands for the rows that will come: it has their shape and takes no memory.
        return x.new_zeros(()).expand(length, *x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.way.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return way.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        way: Way = ctx.way
        way.begin(grads[0], back=True)
        return grads[0], None  # the other side of the trip takes what arrives instead
