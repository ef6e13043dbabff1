"""What travels between ranks: counts to the host, and rows by asynchronous all-to-alls.

This is the one place where the host waits for numbers of the device, and that picks streams for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, Work

from .._permutation import block_indices
from .._torch import first_order, run_function

Tables = list[list[list[int]]]

_MANY = 32  # blocks of rows; with 16, slices take the host less time than an index


class SideStream(Protocol):
    """A stream beside the one that computes: what is put there waits for nothing computed since."""

    def fetch(self, work: Work, others: Sequence[Tensor]) -> tuple[Tensor, Callable[[], list[int]]]:
        """Start copying ``others`` and the result of ``work`` to the host once that is done.

        Returns the result, and what waits for the copy alone and gives its numbers; only after
        that may the stream that computes use the result.
        """
        ...

    def mark(self) -> object:
        """Return a mark of what has been put to compute so far."""
        ...

    def run(self, mark: object, call: Callable[[], Work]) -> Work:
        """Return the communication that ``call`` starts behind ``mark``, not what came later."""
        ...

    def adopt(self, tensor: Tensor) -> None:
        """Keep memory that `run` made as long as the stream that computes uses ``tensor``."""
        ...


def side_of(device: torch.device) -> SideStream | None:
    """Return the side stream of ``device``; None where the host computes, or has no streams."""
    return _cuda_side(device.index) if device.type == "cuda" else None


class HostTables:
    """Matrices of int64 on their way to the host: ``others`` and the result of ``work``."""

    def __init__(self, work: Work, *others: Tensor) -> None:
        self._work = work
        self._others = others
        self.side = side_of(others[0].device)
        self._copied = None if self.side is None else self.side.fetch(work, others)

    def wait(self) -> tuple[Tensor, Tables]:
        """Return the result of the communication, and all tables on the host, that one last."""
        if self._copied is None:
            (received,) = self._work.wait()
            return received, read_tables(*self._others, received)
        received, wait = self._copied
        return received, _split(wait(), (*self._others, received))


def read_tables(*tables: Tensor) -> Tables:
    """Return matrices of int64 as lists: together one device-to-host synchronisation."""
    return _split(torch.cat([table.reshape(-1) for table in tables]).tolist(), tables)


def _split(numbers: list[int], tables: Sequence[Tensor]) -> Tables:
    found, start = [], 0
    for table in tables:
        rows, columns = table.shape
        ends = range(start + columns, start + rows * columns + 1, columns)
        found.append([numbers[end - columns : end] for end in ends])
        start += rows * columns
    return found


# Positions, in expert order, of the rows that are sent and of this rank's rows that are not.
Places = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlocks:
    """Blocks of rows that travel by rank and are computed by expert.

    Fewer than `_MANY` blocks are reordered by slices and a concatenation. More are reordered by an
    index, whose host time does not grow with the number of blocks.
    """

    sizes: tuple[tuple[int, ...], ...]
    """Rows from each rank for each of the experts here."""
    own: int | None = None
    """The rank whose rows do not travel, being here: they lie behind those that do."""

    @property
    def staying(self) -> int:
        """Return how many rows do not travel."""
        return 0 if self.own is None else sum(self.sizes[self.own])

    def find_places(self, counts: Tensor) -> Places | None:
        """Return the positions of rows in expert order; None for fewer than `_MANY` blocks.

        ``counts [ranks, experts]`` holds the values of ``sizes``, on the device of the rows.
        """
        ranks, experts = counts.shape
        if ranks * experts < _MANY:
            return None
        rows = [*map(sum, self.sizes)]
        places, _ = block_indices(counts.t().reshape(-1), ranks, experts, sum(rows))
        if self.own is not None:
            before = sum(rows[: self.own])
            lengths = [before, self.staying, sum(rows) - before - self.staying]
            first, stay, last = places.split(lengths)
            places = torch.cat([first, last, stay])
        away, stay = places.split([sum(rows) - self.staying, self.staying])
        return away, stay

    def by_expert(self, came: Tensor, stayed: Tensor, places: Places | None) -> Tensor:
        """Return by expert the rows that ``came``, by rank, and those that ``stayed``."""
        if places is not None:
            out = came.new_empty(came.shape[0] + stayed.shape[0], *came.shape[1:])
            out.index_copy_(0, places[0], came)
            return out if self.own is None else out.index_copy_(0, places[1], stayed)
        away = [n for rank, sizes in enumerate(self.sizes) if rank != self.own for n in sizes]
        parts, experts = list(came.split(away)), len(self.sizes[0])
        if self.own is not None:
            first = self.own * experts
            parts[first:first] = stayed.split(self.sizes[self.own])
        return torch.cat([part for j in range(experts) for part in parts[j::experts]])

    def by_rank(
        self, rows: Tensor, coming: int, places: Places | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return by rank those of ``rows``, by expert, that travel, and memory for what comes back.

        The first ``coming`` rows of that are to come, the others are those that stay; None if all
        travel.
        """
        ranks = len(self.sizes)
        parts: tuple[Tensor, ...] = ()
        if places is not None:
            away = rows.index_select(0, places[0])
        else:
            parts = rows.split([n for sizes in zip(*self.sizes, strict=True) for n in sizes])
            others = [part for i in range(ranks) if i != self.own for part in parts[i::ranks]]
            away = torch.cat(others)
        if self.own is None:
            return away, None
        memory = rows.new_empty(coming + self.staying, *rows.shape[1:])
        room = memory.narrow(0, coming, self.staying)
        if places is not None:
            torch.index_select(rows, 0, places[1], out=room)
        else:
            torch.cat(parts[self.own :: ranks], out=room)
        return away, memory


@dataclass(slots=True, eq=False, kw_only=True)
class _Route:
    """The all-to-all of rows, and in backward that of their gradient; what is under way now."""

    axis: Axis
    collectives: Collectives
    send: tuple[int, ...] | None = None
    receive: tuple[int, ...] | None = None
    blocks: RowBlocks | None = None
    """How the experts' rows lie; None for as they come."""
    places: Places | None = field(default=None, repr=False)
    """Positions of the rows if there are many blocks; saved by autograd for backward."""
    returns: bool = False
    """Whether forward brings results back, and backward their gradient to the experts."""
    side: SideStream | None = None
    """Where the rows are sent from, in forward; None for where everything is computed."""
    mark: object = None
    labels: Tensor | None = None
    """Integers ``[rows]`` that travel in front of the numbers of each row, in forward."""
    work: Work | None = None
    held: Tensor | None = field(default=None, repr=False)
    """What is being sent: it must stay as it is until it has arrived."""
    stay: Tensor | None = field(default=None, repr=False)
    """On their way to the experts, the rows whose experts are here."""
    memory: Tensor | None = field(default=None, repr=False)
    """On their way back, where they come to, and some are already."""

    def start(self, x: Tensor, *, back: bool) -> None:
        """Start sending ``x``, or in backward what comes ``back``."""
        send, receive = (self.receive, self.send) if back else (self.send, self.receive)
        held = x.detach().contiguous()
        if self.labels is not None:
            bits = held[:, None].view(torch.int32)
            held = torch.cat([self.labels.to(torch.int32)[:, None], bits], 1)
            self.labels = None
        self.held, output = held, None
        if self.blocks is not None and send is not None and receive is not None:
            leaving, coming = sum(send), sum(receive)
            if back == self.returns:
                self.held = held.narrow(0, 0, leaving)
                self.stay = held.narrow(0, leaving, self.blocks.staying)
            else:
                self.held, self.memory = self.blocks.by_rank(held, coming, self.places)
                output = None if self.memory is None else self.memory.narrow(0, 0, coming)
        message = self.held

        def call() -> Work:
            return self.collectives.all_to_all(self.axis, message, send, receive, output)

        self.work = call() if self.side is None else self.side.run(self.mark, call)

    def wait(self) -> Tensor:
        """Return what has arrived, once it is here."""
        if self.work is None:
            raise RuntimeError("nothing is under way")
        (arrived,) = self.work.wait()
        if self.side is not None:
            self.side.adopt(arrived)
        if self.blocks is not None and self.stay is not None:
            arrived = self.blocks.by_expert(arrived, self.stay, self.places)
        elif self.memory is not None:
            arrived = self.memory
        self.work = self.held = self.side = self.mark = self.stay = self.memory = None
        return arrived


class AsyncAllToAll:
    """One all-to-all of blocks of rows over an axis: `start` sends them, `wait` returns what came.

    In backward the gradient is sent where `wait` was called, and waited for where this was made:
    what was computed in between overlaps with both. With ``side`` the rows are sent from there,
    behind what is computed up to now. ``labels [rows]``, integers below 2 ** 31, travel in front of
    ``x [rows]``, which then are floating numbers of at least 32 bits, in the same collective.
    An axis of one rank communicates nothing.
    """

    def __init__(
        self,
        x: Tensor,
        axis: Axis,
        collectives: Collectives,
        *,
        side: SideStream | None = None,
        labels: Tensor | None = None,
    ) -> None:
        self.labels = labels
        self._route: _Route | None = None
        self._rows = x  # or what stands for them in the graph, and has no values
        if axis.size > 1:
            held = x.detach().contiguous()  # before the mark, behind which the side sends it
            mark = None if side is None else side.mark()
            self._route = _Route(
                axis=axis, collectives=collectives, side=side, mark=mark, labels=labels, held=held
            )
            self._rows = run_function(_Start, x, self._route)

    def start(
        self,
        send: Sequence[int] | None,
        receive: Sequence[int] | None,
        *,
        blocks: RowBlocks | None = None,
        find_places: Callable[[], Places | None] = lambda: None,
        returns: bool = False,
        needs_grad: bool = False,
    ) -> "AsyncAllToAll":
        """Start sending ``send`` rows to each rank, for ``receive`` rows from each.

        Args:
            send: Number of rows for each rank. None: equal blocks.
            receive: Number of rows from each rank. None: equal blocks.
            blocks: Reorder the rows that arrive from rank order to expert order. With ``returns``,
                reorder the rows that leave from expert order to rank order. Backward does the
                opposite.
            find_places: Returns the result of `RowBlocks.find_places`. It is called while the rows
                travel, or before with ``returns``.
            returns: Whether the rows are results on their way back.
            needs_grad: Whether any rank's rows need a gradient. A rank whose own rows need none,
                for example without tokens, then takes part in the backward of its peers.

        Returns:
            This object.
        """
        route = self._route
        needs_grad = needs_grad and torch.is_grad_enabled() and not self._rows.requires_grad
        if route is None:
            if needs_grad:
                self._rows = self._rows.detach().requires_grad_()
            return self
        if route.held is None or route.work is not None:
            raise RuntimeError("these rows were sent before")
        if needs_grad:
            self._rows = run_function(_Start, route.held.requires_grad_(), route)
        route.send, route.receive = (None if s is None else tuple(s) for s in (send, receive))
        route.blocks, route.returns = blocks, returns
        if returns:
            route.places = find_places()
        route.start(route.held, back=False)
        if not returns:  # while the rows travel
            route.places = find_places()
        return self

    def wait(self) -> Tensor:
        """Return the rows that came, once they are here; ``labels`` are then those of them."""
        route = self._route
        if route is None:
            return self._rows
        if self.labels is None:
            return run_function(_Wait, self._rows, route, None)
        message = route.wait()
        self.labels = message[:, 0]
        return run_function(_Wait, self._rows, route, message)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        ctx.set_materialize_grads(False)
        # Stands for the rows that will come, however many; what it gets in backward is nothing.
        return x.new_empty(())

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        arrived = ctx.route.wait()
        ctx.route.places = None
        return arrived, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, route: _Route, message: Tensor | None) -> Tensor:
        ctx.route = route
        if message is None:
            arrived = route.wait()
            ctx.save_for_backward(*route.places or ())
            route.places = None
            return arrived
        # A copy even where there is nothing to copy: the bits must begin where a number may.
        bits = message[:, 1:].clone(memory_format=torch.contiguous_format)
        return bits.view(stand_in.dtype)[:, 0]

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.route.places = ctx.saved_tensors or None
        ctx.route.start(grads[0], back=True)
        return None, None, None  # the other side takes what arrives


class _CudaSide:
    """`SideStream` of a CUDA device; its memory is told of each stream that uses it."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)

    def fetch(self, work: Work, others: Sequence[Tensor]) -> tuple[Tensor, Callable[[], list[int]]]:
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            (received,) = work.wait()
            numbers = torch.cat([table.reshape(-1) for table in (*others, received)])
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            done = self._stream.record_event()
        for table in (*others, received):
            table.record_stream(self._stream)

        def wait() -> list[int]:
            done.synchronize()
            torch.cuda.current_stream(self._device).wait_event(done)
            found: list[int] = host.tolist()
            return found

        return received, wait

    def mark(self) -> object:
        return torch.cuda.current_stream(self._device).record_event()

    def run(self, mark: object, call: Callable[[], Work]) -> Work:
        if isinstance(mark, torch.cuda.Event):
            self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            return call()

    def adopt(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


@lru_cache(maxsize=64)
def _cuda_side(index: int) -> _CudaSide:
    return _CudaSide(index)
