"""Count what goes over each axis, whatever carries it."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ._c10d import TorchCollectives, bytes_of
from ._interface import Axis, Collectives, Parts, ReduceOp, Work, as_tensors


class CommunicationStats(NamedTuple):
    """Calls, and bytes of payload that this rank received from others."""

    calls: int = 0
    bytes: int = 0


class RecordingCollectives:
    """`Collectives` that count calls and received bytes per axis, and run the calls unchanged.

    Bytes are payload that this rank receives from other ranks. With ``n`` ranks, an all-reduce
    counts what the bandwidth-optimal algorithm receives: ``2 * (n - 1) / n`` times the bytes of the
    tensor, rounded down (Patarasuk and Yuan 2009, section 3). A reduce-scatter counts ``n - 1``
    times the bytes of its output. Calls on an axis of one rank are not counted.

    Args:
        inner: `Collectives` that communicate. Defaults to `TorchCollectives`.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        >>> x = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
        >>> counted = RecordingCollectives()
        >>> _ = redistribute(x, collectives=counted)
        >>> counted.by_axis["tp"]
        CommunicationStats(calls=1, bytes=24)
    """

    def __init__(self, inner: Collectives | None = None) -> None:
        self._inner: Collectives = TorchCollectives() if inner is None else inner
        self._calls: dict[tuple[str, str], CommunicationStats] = {}

    @property
    def inner(self) -> Collectives:
        """`Collectives` that communicate after a call is counted."""
        return self._inner

    @property
    def by_axis(self) -> dict[str, CommunicationStats]:
        """Dict from axis name to this rank's calls and received bytes since the last `reset`."""
        totals: dict[str, CommunicationStats] = {}
        for (axis, _), stats in self._calls.items():
            totals[axis] = _sum(totals.get(axis), stats)
        return totals

    @property
    def by_call(self) -> dict[tuple[str, str], CommunicationStats]:
        """Calls and received bytes since the last `reset`, for each axis and collective.

        A dict with keys such as ``("tp", "all_gather")``: the name of the axis and of the method.
        """
        return dict(self._calls)

    def reset(self) -> None:
        """Set the counted calls and bytes to zero."""
        self._calls.clear()

    def _count(self, axis: Axis, collective: str, received: int) -> None:
        if axis.size > 1:
            key = (axis.name, collective)
            self._calls[key] = _sum(self._calls.get(key), CommunicationStats(1, received))

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Count the call, then run it; see `Collectives.all_gather`."""
        self._count(axis, "all_gather", (axis.size - 1) * sum(map(bytes_of, inputs)))
        return self._inner.all_gather(axis, inputs, outputs)

    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: ReduceOp = "sum",
    ) -> Work:
        """Count the call, then run it; see `Collectives.reduce_scatter`."""
        received = sum(bytes_of(x) for x in inputs) * (axis.size - 1) // axis.size
        self._count(axis, "reduce_scatter", received)
        return self._inner.reduce_scatter(axis, inputs, outputs, op)

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Work:
        """Count the call, then run it; see `Collectives.all_reduce`."""
        received = 2 * sum(bytes_of(x) for x in tensors) * (axis.size - 1) // axis.size
        self._count(axis, "all_reduce", received)
        return self._inner.all_reduce(axis, tensors, op)

    def all_to_all(
        self,
        axis: Axis,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Work:
        """Count the call, then run it; see `Collectives.all_to_all`."""
        if receive_splits is None:
            received = bytes_of(input) * (axis.size - 1) // axis.size
        else:
            others = sum(receive_splits) - receive_splits[axis.index]
            received = others * math.prod(input.shape[1:]) * input.element_size()
        self._count(axis, "all_to_all", received)
        return self._inner.all_to_all(axis, input, send_splits, receive_splits, output)

    def send_recv(
        self, axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]
    ) -> Work:
        """Count the call, then run it; see `Collectives.send_recv`."""
        others = (parts for peer, parts in receives.items() if peer != axis.index)
        received = sum(bytes_of(x) for parts in others for x in as_tensors(parts))
        self._count(axis, "send_recv", received)
        return self._inner.send_recv(axis, sends, receives)

    def broadcast(self, axis: Axis, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Count the call, then run it; see `Collectives.broadcast`."""
        received = 0 if axis.index == source else sum(map(bytes_of, tensors))
        self._count(axis, "broadcast", received)
        return self._inner.broadcast(axis, tensors, source)


def _sum(one: CommunicationStats | None, other: CommunicationStats) -> CommunicationStats:
    return other if one is None else CommunicationStats(one[0] + other[0], one[1] + other[1])
