"""Counts and times the collectives of each unit, and names them in profiles."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, get_args

import torch

from hp_dtensor import Axis

from ._streams import Waitable
from ._torch import named_range, profiled

W = TypeVar("W", bound="Waitable | None")
CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveStats:
    """Counts of one kind of collective of one unit on this rank; one row of a `CommStats`.

    Args:
        unit: Path of the sharded module, as in `GroupReport`.
        collective: ``"all_gather"`` (of forward and backward), ``"reduce_scatter"`` or
            ``"all_reduce"``.
        count: Number of collectives started.
        bytes: Total bytes that this rank receives from other ranks in these collectives, computed
            from the sizes of the tensors.
        seconds: Sum of the durations of the timed collectives; see `FSDPModule.set_comm_timing`.
            None if no collective was timed.

    Examples:
        On 4 ranks:

        >>> model = fully_shard(nn.Linear(8, 8, bias=False))
        >>> _ = model(torch.ones(2, 8))
        >>> row = model.comm_stats().rows[0]
        >>> row.unit, row.collective, row.count
        ('(root)', 'all_gather', 1)
    """

    unit: str
    collective: CollectiveName
    count: int
    bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommStats:
    """Counts of the collectives of a sharded module on this rank. ``str(stats)`` is a table.

    Args:
        rows: One row for each unit and kind of collective of which at least one was started.

    Examples:
        On 4 ranks:

        >>> model = fully_shard(nn.Linear(8, 8))
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> [row.collective for row in model.comm_stats().rows]
        ['all_gather', 'reduce_scatter']
    """

    rows: tuple[CollectiveStats, ...]

    def __str__(self) -> str:
        head = ("unit", "collective", "count", "bytes", "seconds")
        table = [head] + [
            (
                row.unit,
                row.collective,
                str(row.count),
                str(row.bytes),
                "-" if row.seconds is None else f"{row.seconds:.6f}",
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        )


class _Counter:
    """Count, bytes and seconds of one kind of collective, such as all-gathers."""

    def __init__(self) -> None:
        self.count = self.bytes = 0
        self.seconds: float | None = None
        # Events before and after each collective on an accelerator, until `_read_first` reads them.
        self._events: deque[tuple[torch.Event, torch.Event]] = deque()

    def add_seconds(self, seconds: float) -> None:
        self.seconds = (self.seconds or 0.0) + seconds

    def add_events(self, before: torch.Event, after: torch.Event) -> None:
        self._events.append((before, after))
        # The queue stays short, because events that have finished are read and removed here.
        # `query` does not make the host wait.
        while self._events and self._events[0][1].query():
            self._read_first()

    def read_events(self) -> None:
        """Add the durations of all collectives to ``seconds``. The host waits for them."""
        while self._events:
            self._events[0][1].synchronize()
            self._read_first()

    def _read_first(self) -> None:
        before, after = self._events.popleft()
        self.add_seconds(before.elapsed_time(after) / 1000)


class _ObservedWork:
    """A collective in flight that is timed or shown in a profile.

    Its duration ends when `wait` has returned once.
    """

    def __init__(
        self, work: Waitable, name: str, comm: "UnitComm", before: "float | torch.Event | None"
    ) -> None:
        self._work = work
        self._name = name
        self._path = comm.path
        self._counter = comm.counters[name]
        self._before = before

    def wait(self) -> None:
        """Wait for the collective, and add its duration to the counter."""
        with named_range(f"wait_{self._name}", self._path):
            self._work.wait()
        before, self._before = self._before, None
        if isinstance(before, float):
            self._counter.add_seconds(time.perf_counter() - before)
        elif before is not None:
            after = torch.Event(before.device, enable_timing=True)
            after.record()
            self._counter.add_events(before, after)


class _HasBytes(Protocol):
    @property
    def nbytes(self) -> int: ...


class UnitComm:
    """Starts the collectives of one unit: counts them, times them, and names them in profiles.

    Attributes:
        path: Path of the unit from the root unit; "" for the root.
        timing: Whether to time collectives that are started from now on.
        counters: Totals since the last `reset`, by the name of the collective.
    """

    def __init__(self, device: torch.device) -> None:
        self.path = ""
        self.timing = False
        self._device = device
        self.reset()

    def start(
        self,
        name: CollectiveName,
        axis: Axis,
        output: _HasBytes,
        function: Callable[[], W],
    ) -> W | Waitable:
        """Start a collective with ``function``, and count it.

        Args:
            name: Kind of the collective.
            axis: Mesh axis of the collective.
            output: Output of the collective. Its number of bytes is read after ``function`` has
                returned, because all-gather extensions choose it in the first all-gather.
            function: Function that starts the collective. It returns None if nothing is
                communicated.

        Returns:
            The collective in flight, or None if ``function`` returned None.
        """
        before = self._now() if self.timing else None
        observed = before is not None or profiled()
        if observed:
            with named_range(name, self.path, axis.name):
                work = function()
        else:
            work = function()
        others = axis.size - 1
        if others and (size := output.nbytes):
            counter = self.counters[name]
            counter.count += 1
            if name == "reduce_scatter":
                counter.bytes += size * others
            elif name == "all_gather":
                counter.bytes += size * others // axis.size
            else:  # the best all-reduce is a reduce-scatter and an all-gather
                counter.bytes += 2 * size * others // axis.size
            if observed and work is not None:
                return _ObservedWork(work, name, self, before)
        return work

    def stats(self, unit: str) -> list[CollectiveStats]:
        """Return the totals since the last `reset`, one for each kind of collective that ran.

        ``unit`` is the path of the unit in the result.
        """
        for counter in self.counters.values():
            counter.read_events()
        return [
            CollectiveStats(
                unit=unit, collective=name, count=each.count, bytes=each.bytes, seconds=each.seconds
            )
            for name, each in self.counters.items()
            if each.count
        ]

    def reset(self) -> None:
        """Set all totals to zero. Durations of collectives in flight are discarded."""
        self.counters = {name: _Counter() for name in get_args(CollectiveName)}

    def _now(self) -> "float | torch.Event":
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event
