"""Rows on their way: an all-to-all that is begun and ended apart, forward and backward."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, Work

from .._torch import first_order, run_function
from ._host import Side


@dataclass(slots=True, eq=False, kw_only=True)
class Way:
    """The route of one trip, and what is on it at the moment."""

    axis: Axis
    collectives: Collectives
    send: tuple[int, ...] | None = None
    receive: tuple[int, ...] | None = None
    side: Side | None = None
    """Where the rows are sent from, in forward; None for where everything is computed."""
    mark: object = None
    work: Work | None = None
    held: Tensor | None = field(default=None, repr=False)
    """What is being sent: it must stay as it is until it has arrived."""

    def begin(self, x: Tensor, *, back: bool) -> None:
        """Start sending ``x``, or in backward what comes ``back``."""
        send, receive = (self.receive, self.send) if back else (self.send, self.receive)
        held = self.held = x.detach().contiguous()

        def start() -> Work:
            return self.collectives.all_to_all(self.axis, held, send, receive)

        self.work = start() if self.side is None else self.side.run(self.mark, start)

    def end(self) -> Tensor:
        """Return what has arrived, once it is here."""
        if self.work is None:
            raise RuntimeError("nothing is under way")
        (arrived,) = self.work.wait()
        if self.side is not None:
            self.side.adopt(arrived)
        self.work = self.held = self.side = self.mark = None
        return arrived


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trip:
    """Rows that will be sent, or are under way; `arrive` gives them.

    With a way, ``rows`` stand for them in the graph and have no values.
    """

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
    return start(embark(x, axis, collectives), send, receive)


def embark(x: Tensor, axis: Axis, collectives: Collectives, side: Side | None = None) -> Trip:
    """Return rows that `start` will send: backward waits for their gradient here.

    With ``side`` they are sent from there, behind what is computed up to now.
    """
    if axis.size == 1:
        return Trip(rows=x, way=None)
    held = x.detach().contiguous()  # before the mark, behind which the side sends it
    mark = None if side is None else side.mark()
    way = Way(axis=axis, collectives=collectives, side=side, mark=mark, held=held)
    return Trip(rows=run_function(_Depart, x, way), way=way)


def start(
    trip: Trip,
    send: Sequence[int] | None,
    receive: Sequence[int] | None,
    *,
    needs_grad: bool = False,
) -> Trip:
    """Send what was embarked; see `depart` and `connect`."""
    way = trip.way
    if way is None:
        return Trip(rows=connect(trip.rows, needs_grad), way=None)
    rows = way.held
    if rows is None:
        raise RuntimeError("these rows were sent before")
    if needs_grad and not trip.rows.requires_grad and torch.is_grad_enabled():
        trip = Trip(rows=run_function(_Depart, rows.requires_grad_(), way), way=way)
    way.send, way.receive = (None if s is None else tuple(s) for s in (send, receive))
    way.begin(rows, back=False)
    return trip


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
        ctx.set_materialize_grads(False)
        # Stands for the rows that will come, however many; what it gets in backward is nothing.
        return x.new_zeros(())

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.way.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return way.end()

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        way: Way = ctx.way
        way.begin(grads[0], back=True)
        return None, None  # the other side of the trip takes what arrives
