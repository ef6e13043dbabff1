"""The ranks that a rank works with: an axis, or some of its coordinates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hp_dtensor import Axis, Collectives, Work, all_to_all

Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients, which travel together


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Coordinates on an axis in ascending order, counted from 0 as the ranks of a schedule.

    Where they are not the whole axis, every rank of the axis makes the same calls among its own
    peers, and collectives have splits of zero for the others: no group is created.
    """

    axis: Axis
    members: tuple[int, ...]
    collectives: Collectives

    @staticmethod
    def on(axis: Axis, collectives: Collectives) -> "Peers":
        """Return all ranks of an axis."""
        return Peers(axis=axis, members=tuple(range(axis.size)), collectives=collectives)

    @property
    def size(self) -> int:
        """Return how many there are, this rank among them."""
        return len(self.members)

    @property
    def index(self) -> int:
        """Return this rank's place among them."""
        return self.members.index(self.axis.index)

    @property
    def whole(self) -> bool:
        """Return whether they are all ranks of the axis."""
        return self.size == self.axis.size

    def all_gather(self, pair: Pair, outputs: Pair) -> Work:
        """Concatenate equal pairs of the whole axis into ``outputs``."""
        return self.collectives.all_gather(self.axis, list(pair), list(outputs))

    def exchange(
        self, sends: Mapping[int, Tensor | Pair], receives: Mapping[int, Tensor | Pair]
    ) -> Work:
        """Send and receive point to point; see `Collectives.exchange`."""
        return self.collectives.exchange(self.axis, self._placed(sends), self._placed(receives))

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send row block ``i`` of ``x`` to peer ``i``; differentiable, one all-to-all each way."""
        splits = self._widened(send), self._widened(receive)
        return all_to_all(x, self.axis, *splits, collectives=self.collectives)

    def _placed(self, tensors: Mapping[int, Tensor | Pair]) -> dict[int, Tensor | Pair]:
        return {self.members[peer]: tensor for peer, tensor in tensors.items()}

    def _widened(self, splits: Sequence[int]) -> list[int]:
        wide = [0] * self.axis.size
        for member, rows in zip(self.members, splits, strict=True):
            wide[member] = rows
        return wide
