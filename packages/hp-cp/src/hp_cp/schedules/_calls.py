"""The calls of one pass, so that a pass that fails leaves no message behind."""

from collections.abc import Mapping
from types import TracebackType

from torch import Tensor

from hp_dtensor import Work

from ._peers import Pair, Peers


class Calls:
    """Passes calls on to peers, and waits for those under way where the pass raises.

    What a peer has sent already would else be taken for the answer to a later call.
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
        if isinstance(error, Exception):  # an interrupt does not wait
            for call in list(self._under_way):
                call.wait()


class _Call:
    """A work that is under way until it is waited for, and holds no tensors afterwards."""

    def __init__(self, work: Work, under_way: "set[_Call]") -> None:
        self._work = work
        self._under_way = under_way
        under_way.add(self)

    def wait(self) -> list[Tensor]:
        self._under_way.discard(self)
        return self._work.wait()
