"""`RecordingCollectives`: counts the calls and the received bytes of each mesh axis."""

from typing import NamedTuple

from ._interface import Collectives
from ._wrapper import CollectiveCall, CollectivesWrapper


class CommunicationStats(NamedTuple):
    """Number of collective calls, and bytes of tensor data received from other ranks."""

    calls: int = 0
    bytes: int = 0

    def plus(self, other: "CommunicationStats") -> "CommunicationStats":
        """Return the sums of the calls and of the bytes of both objects."""
        return CommunicationStats(self.calls + other.calls, self.bytes + other.bytes)


class RecordingCollectives(CollectivesWrapper):
    """`Collectives` that count calls and received bytes per axis, and run the calls unchanged.

    The received bytes are computed from the shapes of the tensors, not measured. On an axis of
    ``n`` ranks:

    - An all-reduce of ``b`` bytes adds ``2 * b * (n - 1) // n`` bytes, as in the bandwidth-optimal
      algorithm (Patarasuk and Yuan 2009, section 3).
    - A reduce-scatter adds ``n - 1`` times the bytes of its output.
    - Every other call adds the bytes that this rank receives from other ranks.
    - If ``n`` is 1, the call is not counted.

    A call is counted before it is passed to ``inner``. So a call that ``inner`` refuses is also
    counted. See the note of `CheckedCollectives` on how to nest several wrappers.

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
        """Calls and received bytes of this rank since the last `reset`, for each axis.

        A dict from the name of the axis to `CommunicationStats`.
        """
        totals: dict[str, CommunicationStats] = {}
        for (axis, _), stats in self._calls.items():
            totals[axis] = totals.get(axis, CommunicationStats()).plus(stats)
        return totals

    @property
    def by_call(self) -> dict[tuple[str, str], CommunicationStats]:
        """Calls and received bytes of this rank since the last `reset`, for each axis and method.

        A dict from pairs ``(axis name, method name)``, such as ``("tp", "all_gather")``, to
        `CommunicationStats`.
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
