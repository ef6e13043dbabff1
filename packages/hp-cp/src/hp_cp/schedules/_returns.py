"""Bring the gradients of keys and values home to their owners."""

from typing import Protocol

import torch
from torch import Tensor

from hp_dtensor import Work

from .._merge import accumulator
from ..plans._routes import Ring
from ._calls import Calls
from ._run import Run, room_for, whole

Pair = tuple[Tensor, Tensor]


class Returns(Protocol):
    """What takes a rank's shares of the others' gradients; calls come in the schedule's order."""

    def add(self, source: int, share: Pair | None) -> None:
        """Take the gradients of the rows of ``source`` that were fetched; None where nothing was
        computed with them.
        """
        ...

    def finish(self, own: Pair) -> None:
        """Add what the others computed to this rank's own share, always in the same order."""
        ...


def returns_of(run: Run, like: Tensor, calls: Calls) -> Returns:
    """Return the way home that fits the schedule."""
    if run.ring is not None and run.peers.size > 1:
        return _Around(run, run.ring, like, calls)
    return _Straight(run, like, calls)


class _Straight:
    """To the owner at once, in the dtype of the keys; added there in rank order."""

    def __init__(self, run: Run, like: Tensor, calls: Calls) -> None:
        self._run = run
        self._calls = calls
        self._like = like
        self._coming: dict[int, tuple[Tensor, Work]] = {}

    def add(self, source: int, share: Pair | None) -> None:
        run, n = self._run, self._run.peers.size
        peer = (2 * run.rank - source) % n  # as far after this rank as the source is before
        sends, receives = {}, {}
        if share is not None:
            sends[source] = torch.stack(share).to(self._like.dtype)
        elif run.wanted[source]:  # gathered, but not seen by any row here
            sends[source] = room_for(run.wanted[source], self._like).zero_()
        part = room_for(run.given[peer], self._like)
        if run.given[peer]:
            receives[peer] = part
        self._coming[peer] = part, self._calls.exchange(sends, receives)

    def finish(self, own: Pair) -> None:
        for peer in sorted(self._coming):
            part, work = self._coming.pop(peer)
            work.wait()
            start = 0
            for rows in self._run.given[peer]:
                stop = start + len(rows)
                for total, share in zip(own, part, strict=True):
                    total[:, :, rows.start : rows.stop] += share[:, :, start:stop]
                start = stop


class _Around:
    """Around the ring behind the keys: each rank adds to a sum, which the last one sends home."""

    def __init__(self, run: Run, ring: Ring, like: Tensor, calls: Calls) -> None:
        self._run = run
        self._calls = calls
        self._ring = ring
        self._like = like
        self._wide = accumulator(like.dtype)
        self._step = 0
        self._coming: tuple[Tensor, Work] | None = None

    def add(self, source: int, share: Pair | None) -> None:
        run, ring = self._run, self._ring
        self._step += 1
        total = self._arrived()
        if total is None:
            total = room_for(whole(run.lengths[source]), self._like, self._wide).zero_()
        if share is not None:
            total[0] += share[0]
            total[1] += share[1]
        home = self._step + 1 == ring.n
        next_source = run.rank if home else ring.source(run.rank, self._step + 1)
        part = room_for(whole(run.lengths[next_source]), self._like, self._wide)
        sends = {ring.next_gradient(run.rank, self._step): total} if total.shape[3] else {}
        origin = ring.next_gradient(run.rank, self._step, -1)
        self._coming = part, self._calls.exchange(sends, {origin: part} if part.shape[3] else {})

    def finish(self, own: Pair) -> None:
        total = self._arrived()
        if total is not None:
            own[0].add_(total[0])
            own[1].add_(total[1])

    def _arrived(self) -> Tensor | None:
        if self._coming is None:
            return None
        part, work = self._coming
        self._coming = None
        work.wait()
        return part
