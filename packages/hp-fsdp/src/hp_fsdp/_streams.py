"""Streams beside the computation's, for copies and reductions that it does not wait for.

Each use begins after all that the current stream was given until then, and each result is waited
for by the current stream before anyone reads it. Two rules keep memory right, whichever allocator
pool (of which stream) it came from:

- Memory of the current stream that a side stream uses is held until the current stream has waited
  for that use.
- Memory of a side stream may be given up by the current stream at any time after its last use: the
  pool lends it only to later work of that side stream, which begins after the current one.

What passes from one side stream to another is held until the current stream waited for the last of
them, or noted with `SideStream.uses`. Forward, backward and optimizer are taken to run on one
stream, or on streams that the caller orders.
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
    """A collective under way; c10d's own works are such."""

    def wait(self) -> object:
        """Let the current stream wait for it, and the host where there is none."""
        ...


class SideStream:
    """A stream beside the current one, for what is done for the module at ``path``."""

    def __init__(
        self, stream: torch.Stream, current: Callable[[], torch.Stream], path: str = ""
    ) -> None:
        """Take a stream, and what tells the current one of the same device."""
        self._stream = stream
        self._current = current
        self._path = path

    def named(self, path: str) -> "SideStream":
        """Return the same stream for another module."""
        return SideStream(self._stream, self._current, path)

    @contextmanager
    def after_current(self, what: str = "") -> Iterator[None]:
        """Run the block on this stream, after what the current one was given until now.

        It is called ``what`` in a profile. If it raises, the current stream waits for what it had
        started, whose memory is then given up.
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
        """Return what waits for all that this stream was given until now, and for ``work``."""
        return Begun(self._stream.record_event(), self._current, work)

    def join(self) -> None:
        """Let the current stream wait for all that this one was given."""
        self._current().wait_stream(self._stream)

    def uses(self, tensor: Tensor) -> None:
        """Note that this stream uses memory that will be given up before it has been waited for."""
        tensor.record_stream(self._stream)

    def synchronize(self) -> None:
        """Wait, on the host, for all that this stream was given."""
        self._stream.record_event().synchronize()


class Begun:
    """What was started on a side stream."""

    def __init__(
        self, event: torch.Event, current: Callable[[], torch.Stream], work: Waitable | None
    ) -> None:
        self._event = event
        self._current = current
        self._work = work

    def wait(self) -> None:
        """Let the current stream wait, for the collective too, if there is one."""
        self._current().wait_event(self._event)
        if self._work is not None:
            self._work.wait()

    @property
    def done(self) -> bool:
        """Return whether the device has finished this work."""
        return self._event.query()

    def synchronize(self) -> None:
        """Wait on the host, for what the host reads."""
        self._event.synchronize()


@dataclass(frozen=True, slots=True)
class Streams:
    """The side streams of all units under one root.

    ``gather``: casts and copies from the CPU of what a gather sends, and the gather's start.
    ``reduce``: reduce-scatters and what follows them. ``all_reduce``: sums over replicas, so that
    the next reduce-scatter need not wait for them. ``offload``: copies of gradients to the CPU.
    """

    gather: SideStream
    reduce: SideStream
    all_reduce: SideStream
    offload: SideStream

    @staticmethod
    def on(device: torch.device) -> "Streams | None":
        """Return new streams of an accelerator; None for a CPU, which has one order of work."""
        if device.type == "cpu":
            return None
        current = partial(torch.accelerator.current_stream, device)
        # Small kernels before and after communication go first, so that it is not held up.
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
