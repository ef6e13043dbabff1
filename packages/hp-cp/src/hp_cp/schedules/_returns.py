"""Bring the gradients of keys and values home to their owners."""

from typing import Protocol

from torch import Tensor

from hp_dtensor import Work

from .._merge import accumulator
from .._mesh import Pair
from .._routes import Ring
from ._calls import Calls
from ._run import Run, room_for, whole
from ._sums import KeySum


class Returns(Protocol):
    """What takes a rank's shares of the others' gradients; calls come in the schedule's order.

    What the others computed is added to this rank's own sum, always in the same order.
    """

    def add(self, source: int, share: Pair | None) -> None:
        """Take the gradients of the rows of ``source`` that were fetched; None where nothing was
        computed with them.
        """
        ...

    def finish(self) -> None:
        """Wait for what has not arrived."""
        ...


def returns_of(run: Run, own: KeySum, like: Tensor, calls: Calls) -> Returns:
    """Return the way home that fits the schedule; it adds to ``own``."""
    if run.ring is not None and run.peers.size > 1:
        return _Around(run, run.ring, own, like, calls)
    return _Straight(run, own, like, calls)


class _Straight:
    """To the owner at once, in the dtype of the keys; added there from the next rank on.

    What comes is taken one step later, so that few parts are held at a time.
    """

    def __init__(self, run: Run, own: KeySum, like: Tensor, calls: Calls) -> None:
        self._run = run
        self._own = own
        self._like = like
        self._calls = calls
        self._coming: tuple[int, Pair, Work] | None = None

    def add(self, source: int, share: Pair | None) -> None:
        run, n = self._run, self._run.peers.size
        peer = (2 * run.rank - source) % n  # as far after this rank as the source is before
        sends, receives = {}, {}
        if share is not None:
            dk, dv = share
            sends[source] = dk.to(self._like.dtype), dv.to(self._like.dtype)
        elif run.wanted[source]:  # gathered, but not seen by any row here
            sends[source] = _zeros(room_for(run.wanted[source], self._like))
        part = room_for(run.given[peer], self._like)
        if run.given[peer]:
            receives[peer] = part
        work = self._calls.exchange(sends, receives)
        self.finish()
        self._coming = peer, part, work

    def finish(self) -> None:
        if self._coming is None:
            return
        peer, (dk, dv), work = self._coming
        self._coming = None
        work.wait()
        start = 0
        for rows in self._run.given[peer]:
            stop = start + len(rows)
            self._own.add(rows, dk[:, :, start:stop], dv[:, :, start:stop])
            start = stop


class _Around:
    """Around the ring behind the keys: each rank adds to a sum, which the last one sends home."""

    def __init__(self, run: Run, ring: Ring, own: KeySum, like: Tensor, calls: Calls) -> None:
        self._run = run
        self._ring = ring
        self._own = own
        self._like = like
        self._calls = calls
        self._wide = accumulator(like.dtype)
        self._step = 0
        self._coming: tuple[Pair, Work] | None = None

    def add(self, source: int, share: Pair | None) -> None:
        run, ring = self._run, self._ring
        self._step += 1
        total = self._arrived()
        if total is None and share is not None:
            total = share
        elif total is None:
            total = _zeros(room_for(whole(run.lengths[source]), self._like, self._wide))
        elif share is not None:
            total[0].add_(share[0])
            total[1].add_(share[1])
        home = self._step + 1 == ring.n
        next_source = run.rank if home else ring.source(run.rank, self._step + 1)
        part = room_for(whole(run.lengths[next_source]), self._like, self._wide)
        sends = {ring.next_gradient(run.rank, self._step): total} if total[0].shape[2] else {}
        origin = ring.next_gradient(run.rank, self._step, -1)
        receives = {origin: part} if part[0].shape[2] else {}
        self._coming = part, self._calls.exchange(sends, receives)

    def finish(self) -> None:
        total = self._arrived()
        if total is not None and total[0].shape[2]:
            self._own.add(range(total[0].shape[2]), total[0], total[1])

    def _arrived(self) -> Pair | None:
        if self._coming is None:
            return None
        part, work = self._coming
        self._coming = None
        work.wait()
        return part


def _zeros(pair: Pair) -> Pair:
    return pair[0].zero_(), pair[1].zero_()
