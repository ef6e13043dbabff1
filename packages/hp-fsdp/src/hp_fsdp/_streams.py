"""Side streams: copies and reductions that overlap with the computation on the current stream.

Work on a side stream starts after all work that was enqueued on the current stream before it. The
current stream waits for a result before it reads the result. The caching allocator has one memory
pool per stream. Three rules ensure that no stream writes to memory that another stream still uses:

- If a side stream uses a tensor of the current stream's pool, the tensor is kept alive until the
  current stream has waited for the side stream.
- If the current stream uses a tensor of a side stream's pool, the tensor may be freed when its last
  use is enqueued. The pool reuses the memory only for later work of the side stream, which starts
  after that use.
- If a tensor is passed from one side stream to another, it is kept alive until the current stream
  has waited for the second side stream, or its use is recorded with `SideStream.uses`.

Forward, backward and optimizer have to run on one stream, or on streams that the caller
synchronizes.
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
        """Make the current stream wait for the collective. On a CPU the host waits."""
        ...


class SideStream:
    """A stream for work that overlaps with the current stream.

    Args:
        stream: The stream on which the work runs.
        current: Function that returns the current stream of the same device.
        path: Path of the module, a label in profiles.
    """

    def __init__(
        self, stream: torch.Stream, current: Callable[[], torch.Stream], path: str = ""
    ) -> None:
        self._stream = stream
        self._current = current
        self._path = path

    def named(self, path: str) -> "SideStream":
        """Return a `SideStream` on the same stream, with ``path`` as module path in profiles."""
        return SideStream(self._stream, self._current, path)

    @contextmanager
    def after_current(self, what: str = "") -> Iterator[None]:
        """Run a ``with`` block on this stream, after all work enqueued on the current stream.

        If the block raises, the current stream waits for this stream, so that the tensors of the
        block can be freed.

        Args:
            what: Name of the block in profiles. If empty, the block has no entry there.
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
        """Return one handle for ``work`` and all work enqueued on this stream so far."""
        return Begun(self._stream.record_event(), self._current, work)

    def join(self) -> None:
        """Make the current stream wait for all work enqueued on this stream."""
        self._current().wait_stream(self._stream)

    def uses(self, tensor: Tensor) -> None:
        """Delay reuse of the memory of ``tensor`` until this stream's enqueued work is finished."""
        tensor.record_stream(self._stream)

    def synchronize(self) -> None:
        """Block the host until all work enqueued on this stream is finished."""
        self._stream.record_event().synchronize()


class Begun:
    """Handle for work that is enqueued on a side stream."""

    def __init__(
        self, event: torch.Event, current: Callable[[], torch.Stream], work: Waitable | None
    ) -> None:
        self._event = event
        self._current = current
        self._work = work

    def wait(self) -> None:
        """Make the current stream wait for the work, and for the collective if one was given."""
        self._current().wait_event(self._event)
        if self._work is not None:
            self._work.wait()

    @property
    def done(self) -> bool:
        """Whether the device has finished the work on the side stream."""
        return self._event.query()

    def synchronize(self) -> None:
        """Block the host until the device has finished the work on the side stream."""
        self._event.synchronize()


@dataclass(frozen=True, slots=True)
class Streams:
    """The side streams of all units under one root.

    Attributes:
        gather: Casts shards, copies shards from the CPU, and starts all-gathers.
        reduce: Runs reduce-scatters. If there are no replicas, it also divides their results.
        all_reduce: Runs all-reduces over replicas. They have a stream of their own, so that they do
            not delay the next reduce-scatter.
        offload: Copies gradients and tags to the CPU.
    """

    gather: SideStream
    reduce: SideStream
    all_reduce: SideStream
    offload: SideStream

    @staticmethod
    def on(device: torch.device) -> "Streams | None":
        """Create the streams on an accelerator. Returns None for a CPU, which has no streams."""
        if device.type == "cpu":
            return None
        current = partial(torch.accelerator.current_stream, device)
        # Small kernels before and after a collective have priority, so that the collective starts
        # earlier.
        soon, later = -1, 0
        return Streams(
            *(
                SideStream(torch.Stream(device, priority=priority), current)
                for priority in (soon, soon, later, later)
            )
        )

    def named(self, path: str) -> "Streams":
        """Return the same streams with ``path`` as module path in profiles."""
        sides = (self.gather, self.reduce, self.all_reduce, self.offload)
        return Streams(*(side.named(path) for side in sides))
