"""The ranks that a rank works with: an axis, or some of its coordinates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from hp_dtensor import AutogradCollectives, Axis, Collectives, Work

# Groups that made their first call. A group itself does not say so; it is not kept alive here.
_CONNECTED: WeakSet[object] = WeakSet()

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

    def connect(self, device: torch.device) -> None:
        """Let all ranks of the axis join its first batch of sends, once for each group.

        NCCL makes a group's communicator in its first call, for which a batch waits until every
        rank has joined (see ``torch.distributed.batch_isend_irecv``), but a rank with nothing to
        move joins none. So each sends one element to the next. Every rank calls this where all
        do, before it calls anything else; a CPU's groups are connected when they are made.
        """
        if self.size == 1 or device.type == "cpu" or self.axis.group in _CONNECTED:
            return
        here, n = self.axis.index, self.axis.size
        sends, receives = (torch.zeros(1, device=device) for _ in range(2))
        self.collectives.send_recv(
            self.axis, {(here + 1) % n: sends}, {(here - 1) % n: receives}
        ).wait()
        _CONNECTED.add(self.axis.group)

    def all_gather(self, pair: Pair, outputs: Pair) -> Work:
        """Concatenate equal pairs of the whole axis into ``outputs``."""
        return self.collectives.all_gather(self.axis, list(pair), list(outputs))

    def exchange(
        self, sends: Mapping[int, Tensor | Pair], receives: Mapping[int, Tensor | Pair]
    ) -> Work:
        """Send and receive point to point; see `Collectives.exchange`."""
        return self.collectives.send_recv(self.axis, self._placed(sends), self._placed(receives))

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send row block ``i`` of ``x`` to peer ``i``; differentiable, one all-to-all each way."""
        splits = self._widened(send), self._widened(receive)
        return AutogradCollectives(self.collectives).all_to_all(x, self.axis, *splits)

    def _placed(self, tensors: Mapping[int, Tensor | Pair]) -> dict[int, Tensor | Pair]:
        return {self.members[peer]: tensor for peer, tensor in tensors.items()}

    def _widened(self, splits: Sequence[int]) -> list[int]:
        wide = [0] * self.axis.size
        for member, rows in zip(self.members, splits, strict=True):
            wide[member] = rows
        return wide
