"""`CollectivesWrapper`: base class of wrappers that observe each call of a `Collectives`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ._c10d import bytes_of, checked_collectives
from ._interface import Axis, Collectives, Parts, ReduceOp, Work, as_tensors


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """The arguments of one call of a method of `Collectives`.

    Attributes:
        axis: Ranks that take part.
        collective: Name of the method, such as ``"all_gather"``.
        inputs: Input tensors. Empty for ``send_recv``.
        outputs: Tensors that the caller passed for the results, or None if there are none.
        op: Reduction of a ``reduce_scatter`` or ``all_reduce``; None for the other methods.
        source: Coordinate of the sender of a ``broadcast``; 0 for the other methods.
        send_splits: Number of rows that an ``all_to_all`` sends to each rank. It is None for equal
            blocks and for the other methods.
        receive_splits: Number of rows that an ``all_to_all`` receives from each rank. It is None
            for equal blocks and for the other methods.
        sends: Argument ``sends`` of a ``send_recv``; empty for the other methods.
        receives: Argument ``receives`` of a ``send_recv``; empty for the other methods.
    """

    axis: Axis
    collective: str
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] | None = None
    op: ReduceOp | None = None
    source: int = 0
    send_splits: Sequence[int] | None = None
    receive_splits: Sequence[int] | None = None
    sends: Mapping[int, Parts] = field(default_factory=dict)
    receives: Mapping[int, Parts] = field(default_factory=dict)

    @property
    def operation(self) -> str:
        """Name of the method, with its reduction or source if it has one.

        Examples are ``"all_reduce sum"``, ``"broadcast from 0"`` and ``"all_gather"``.
        """
        if self.collective == "broadcast":
            return f"broadcast from {self.source}"
        return self.collective if self.op is None else f"{self.collective} {self.op}"

    def received_bytes(self) -> int:
        """Return the bytes of tensor data that this rank receives from other ranks in this call.

        An all-reduce of ``b`` bytes on ``n`` ranks counts as ``2 * b * (n - 1) // n`` bytes.
        """
        axis, collective = self.axis, self.collective
        sent = sum(map(bytes_of, self.inputs))
        if collective == "all_gather":
            return (axis.size - 1) * sent
        if collective == "all_reduce":  # This is the amount of the bandwidth-optimal algorithm.
            return 2 * sent * (axis.size - 1) // axis.size
        if collective == "broadcast":
            return 0 if axis.index == self.source else sent
        if collective == "send_recv":
            others = (parts for peer, parts in self.receives.items() if peer != axis.index)
            return sum(bytes_of(x) for parts in others for x in as_tensors(parts))
        if self.receive_splits is not None:
            (rows,) = self.inputs
            from_others = sum(self.receive_splits) - self.receive_splits[axis.index]
            return from_others * math.prod(rows.shape[1:]) * rows.element_size()
        return sent * (axis.size - 1) // axis.size  # reduce_scatter, or all_to_all of equal blocks


class CollectivesWrapper:
    """Base class of `Collectives` that observe each call before ``inner`` runs it.

    Subclasses implement the method `_before`, which is called first with each call.

    Args:
        inner: `Collectives` that run the calls. Defaults to `TorchCollectives`.
    """

    def __init__(self, inner: Collectives | None = None) -> None:
        self._inner = checked_collectives(inner)

    @property
    def inner(self) -> Collectives:
        """`Collectives` that run the calls."""
        return self._inner

    def _before(self, call: CollectiveCall) -> None:
        """Observe a call before it is passed on to ``inner``.

        If this method raises, the call is not passed on.
        """
        raise NotImplementedError

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Observe the call, then run it; see `Collectives.all_gather`."""
        self._before(CollectiveCall(axis, "all_gather", inputs, outputs))
        return self._inner.all_gather(axis, inputs, outputs)

    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: ReduceOp = "sum",
    ) -> Work:
        """Observe the call, then run it; see `Collectives.reduce_scatter`."""
        self._before(CollectiveCall(axis, "reduce_scatter", inputs, outputs, op))
        return self._inner.reduce_scatter(axis, inputs, outputs, op)

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Work:
        """Observe the call, then run it; see `Collectives.all_reduce`."""
        self._before(CollectiveCall(axis, "all_reduce", tensors, op=op))
        return self._inner.all_reduce(axis, tensors, op)

    def all_to_all(
        self,
        axis: Axis,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Work:
        """Observe the call, then run it; see `Collectives.all_to_all`."""
        outputs = None if output is None else [output]
        call = CollectiveCall(
            axis,
            "all_to_all",
            [input],
            outputs,
            send_splits=send_splits,
            receive_splits=receive_splits,
        )
        self._before(call)
        return self._inner.all_to_all(axis, input, send_splits, receive_splits, output)

    def send_recv(
        self, axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]
    ) -> Work:
        """Observe the call, then run it; see `Collectives.send_recv`."""
        self._before(CollectiveCall(axis, "send_recv", sends=sends, receives=receives))
        return self._inner.send_recv(axis, sends, receives)

    def broadcast(self, axis: Axis, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Observe the call, then run it; see `Collectives.broadcast`."""
        self._before(CollectiveCall(axis, "broadcast", tensors, source=source))
        return self._inner.broadcast(axis, tensors, source)
