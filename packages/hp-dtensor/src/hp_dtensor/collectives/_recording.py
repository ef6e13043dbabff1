"""Count the calls and the received bytes of each axis."""

from typing import NamedTuple

from ._interface import Collectives
from ._wrapper import CollectiveCall, CollectivesWrapper


class CommunicationStats(NamedTuple):
    """Number of calls, and payload in bytes that this rank received from other ranks."""

    calls: int = 0
    bytes: int = 0

    def plus(self, other: "CommunicationStats") -> "CommunicationStats":
        """Return the sum of two counts."""
        return CommunicationStats(self.calls + other.calls, self.bytes + other.bytes)


class RecordingCollectives(CollectivesWrapper):
    """`Collectives` that count calls and received bytes per axis, and run the calls unchanged.

    Bytes are payload that this rank receives from other ranks. With ``n`` ranks, an all-reduce
    counts what the bandwidth-optimal algorithm receives: ``2 * (n - 1) / n`` times the bytes of the
    tensor, rounded down (Patarasuk and Yuan 2009, section 3). A reduce-scatter counts ``n - 1``
    times the bytes of its output. Calls on an axis of one rank are not counted.

    A call is counted before it is passed to ``inner``. A call that `CheckedCollectives` inside then
    refuse is counted too. The note of `CheckedCollectives` has the order of several wrappers.

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
        super().__init__(inner)
        self._calls: dict[tuple[str, str], CommunicationStats] = {}

    @property
    def by_axis(self) -> dict[str, CommunicationStats]:
        """Dict from axis name to this rank's calls and received bytes since the last `reset`."""
        totals: dict[str, CommunicationStats] = {}
        for (axis, _), stats in self._calls.items():
            totals[axis] = totals.get(axis, CommunicationStats()).plus(stats)
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

    def _before(self, call: CollectiveCall) -> None:
        if call.axis.size > 1:
            key = (call.axis.name, call.collective)
            one = CommunicationStats(1, call.received_bytes())
            self._calls[key] = self._calls.get(key, CommunicationStats()).plus(one)
