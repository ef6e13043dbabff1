"""Side streams: copies and reductions that overlap with the computation on the current stream.

A side stream starts each use after all work that is enqueued on the current stream. The current
stream waits for a result before it is read. The allocator has one pool of memory per stream. Three
rules ensure that no stream writes to memory that another stream still uses:

- Memory of the current stream that a side stream uses is kept until the current stream has waited
  for this use.
- Memory of a side stream may be freed on the current stream at any time after its last use. The
  pool gives it only to later work of the side stream, which starts after the current stream.
- A tensor that is passed from one side stream to another is kept until the current stream has
  waited for the second one, or the use is recorded with `SideStream.uses`.

Forward, backward and optimizer have to run on one stream, or on streams that the caller orders.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ._torch import named_range


class Waitable(Protocol):
    """A collective in flight, such as a ``Work`` of c10d."""

    def wait(self) -> object:
        """Let the current stream wait for the collective. On a CPU the host waits."""
        ...


class SideStream:
    """A stream for work that overlaps with the current stream.

    Args:
        stream: The stream.
        current: Returns the current stream of the same device.
        path: Path of the module, for profiles.
    """

    def __init__(
        self, stream: torch.Stream, current: Callable[[], torch.Stream], path: str = ""
    ) -> None:
        self._stream = stream
        self._current = current
        self._path = path

    def named(self, path: str) -> "SideStream":
        """Return the same stream for another module."""
        return SideStream(self._stream, self._current, path)

    @contextmanager
    def after_current(self, what: str = "") -> Iterator[None]:
        """Run a ``with`` block on this stream, after all work enqueued on the current stream.

        Args:
            what: Name of the block in profiles.

        If the block raises, the current stream waits for this one, so that memory of the block can
        be freed.
        """
        before = self._current()
        self._stream.wait_stream(before)
        try:
            with named_range(what, self._path) if what else nullcontext(), self._stream:
                yield
        except BaseException:
            before.wait_stream(self._stream)
            raise

    def begun(self, work: Waitable | None = None) -> "Begun":
        """Return a handle that waits for all work enqueued until now, and for ``work``."""
        return Begun(self._stream.record_event(), self._current, work)

    def join(self) -> None:
        """Let the current stream wait for all work enqueued on this one."""
        self._current().wait_stream(self._stream)

    def uses(self, tensor: Tensor) -> None:
        """Record that this stream uses a tensor that may be freed before the use is waited for."""
        tensor.record_stream(self._stream)

    def synchronize(self) -> None:
        """Wait on the host for all work enqueued on this stream."""
        self._stream.record_event().synchronize()


class Begun:
    """Handle of work on a side stream."""

    def __init__(
        self, event: torch.Event, current: Callable[[], torch.Stream], work: Waitable | None
    ) -> None:
        self._event = event
        self._current = current
        self._work = work

    def wait(self) -> None:
        """Let the current stream wait for the work, and for its collective if there is one."""
        self._current().wait_event(self._event)
        if self._work is not None:
            self._work.wait()

    @property
    def done(self) -> bool:
        """Return whether the device has finished this work."""
        return self._event.query()

    def synchronize(self) -> None:
        """Wait on the host."""
        self._event.synchronize()


@dataclass(frozen=True, slots=True)
class Streams:
    """The side streams of all units under one root.

    Attributes:
        gather: Casts shards and copies them from the CPU, then starts the all-gather.
        reduce: Reduce-scatters, and the steps after them.
        all_reduce: All-reduces over replicas, which then do not delay the next reduce-scatter.
        offload: Copies of gradients to the CPU.
    """

    gather: SideStream
    reduce: SideStream
    all_reduce: SideStream
    offload: SideStream

    @staticmethod
    def on(device: torch.device) -> "Streams | None":
        """Return new streams of an accelerator, or None for a CPU, which has no streams."""
        if device.type == "cpu":
            return None
        current = partial(torch.accelerator.current_stream, device)
        # Small kernels before and after communication have priority, so that it starts earlier.
        soon, later = -1, 0
        return Streams(
            *(
                SideStream(torch.Stream(device, priority=priority), current)
                for priority in (soon, soon, later, later)
            )
        )

    def named(self, path: str) -> "Streams":
        """Return the same streams for the module at ``path``."""
        sides = (self.gather, self.reduce, self.all_reduce, self.offload)
        return Streams(*(side.named(path) for side in sides))
