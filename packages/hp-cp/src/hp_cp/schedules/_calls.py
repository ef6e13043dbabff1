"""The calls of one pass, so that a pass that fails leaves no message behind."""

from collections.abc import Mapping
from types import TracebackType

from torch import Tensor

from hp_dtensor import Work

from .._mesh import Pair, Peers


class Calls:
    """Passes calls on to peers, and waits for those under way where the pass raises.

    What a peer has sent already would else be taken for the answer to a later call. Where waiting
    itself fails the group is broken, and the rest is not waited for: each call under way would take
    another timeout. The pass raises what it raised first, with a note of what waiting said.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._under_way: set[_Call] = set()

    def all_gather(self, x: Pair, output: Pair) -> Work:
        """Start one; see `Peers.all_gather`."""
        return _Call(self._peers.all_gather(x, output), self._under_way)

    def exchange(self, sends: Mapping[int, Pair], receives: Mapping[int, Pair]) -> Work:
        """Start one; see `Peers.exchange`."""
        return _Call(self._peers.exchange(sends, receives), self._under_way)

    def __enter__(self) -> "Calls":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception):  # an interrupt does not wait
            return
        try:
            while self._under_way:
                next(iter(self._under_way)).wait()
        except RuntimeError as other:
            error.add_note(f"while waiting for the peers' calls: {other}")


class _Call:
    """A work that is under way until it is waited for, and holds no tensors afterwards."""

    def __init__(self, work: Work, under_way: "set[_Call]") -> None:
        self._work = work
        self._under_way = under_way
        under_way.add(self)

    def wait(self) -> list[Tensor]:
        rest = self._under_way - {self}
        self._under_way.clear()  # if this fails, none is left to wait for
        outputs = self._work.wait()
        self._under_way |= rest
        return outputs
