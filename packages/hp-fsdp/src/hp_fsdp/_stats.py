"""Counts and times the collectives of each unit, and names them in profiles."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from hp_dtensor import Axis

from ._streams import Waitable
from ._torch import in_range

W = TypeVar("W", bound="Waitable | None")
CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveStats:
    """Counts one kind of collective of one unit on this rank; part of a `CommStats`.

    Args:
        unit: Path of the sharded module, as in `GroupReport`.
        collective: ``"all_gather"`` (of forward and backward), ``"reduce_scatter"`` or
            ``"all_reduce"``.
        count: Number of collectives started.
        bytes: Bytes that this rank receives in them from other ranks, computed from the sizes of
            the tensors.
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
    """Counts the collectives of a sharded module on this rank. ``print(stats)`` prints a table.

    Args:
        rows: One row for each unit and kind of collective, if at least one was started.

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
    """Totals of one kind of collective."""

    def __init__(self) -> None:
        self.count = self.bytes = 0
        self.seconds: float | None = None
        # Events before and after collectives on an accelerator that `_read_first` has not read.
        self._events: deque[tuple[torch.Event, torch.Event]] = deque()

    def add_seconds(self, seconds: float) -> None:
        self.seconds = (self.seconds or 0.0) + seconds

    def add_events(self, before: torch.Event, after: torch.Event) -> None:
        self._events.append((before, after))
        # Reading finished events here bounds their number. The host does not wait.
        while self._events and self._events[0][1].query():
            self._read_first()

    def read_events(self) -> None:
        """Add the durations of all collectives. The host waits for them."""
        while self._events:
            self._events[0][1].synchronize()
            self._read_first()

    def _read_first(self) -> None:
        before, after = self._events.popleft()
        self.add_seconds(before.elapsed_time(after) / 1000)


class _TimedWork:
    """A collective in flight. The first `wait` that returns ends its duration."""

    def __init__(self, work: Waitable, counter: _Counter, before: "float | torch.Event") -> None:
        self._work = work
        self._counter = counter
        self._before: float | torch.Event | None = before

    def wait(self) -> None:
        """Wait as the collective does."""
        self._work.wait()
        before, self._before = self._before, None
        if isinstance(before, float):
            self._counter.add_seconds(time.perf_counter() - before)
        elif before is not None:
            after = torch.Event(before.device, enable_timing=True)
            after.record()
            self._counter.add_events(before, after)


class UnitComm:
    """Starts the collectives of one unit: counts them, times them, and names them in profiles.

    Attributes:
        path: Path of the unit from the root of the step. Empty for the root.
        timing: Whether to time the collectives that start from now on.
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
        size: int,
        function: Callable[[], W],
    ) -> W | Waitable:
        """Start a collective with ``function``, and count it.

        Args:
            name: Kind of the collective.
            axis: Axis that it runs over.
            size: Bytes of the whole tensor: the output of an all-gather, the input of a
                reduce-scatter or an all-reduce.
            function: Starts the collective. Returns None if nothing is communicated.

        Returns:
            The collective in flight.
        """
        received = _PASSES[name] * size * (axis.size - 1) // axis.size
        if received:
            counter = self._counters[name]
            counter.count += 1
            counter.bytes += received
        before = self._now() if self.timing else None
        work = in_range(name, self.path, function, axis.name)
        if before is None or work is None or not received:
            return work
        return _TimedWork(work, counter, before)

    def count(self, name: CollectiveName, axis: Axis, size: int) -> None:
        """Count a collective whose size was not known when it started. It is not timed."""
        self._counters[name].count += 1
        self._counters[name].bytes += _PASSES[name] * size * (axis.size - 1) // axis.size

    def stats(self, unit: str) -> list[CollectiveStats]:
        """Return the totals since the last `reset`, under the name ``unit``."""
        for counter in self._counters.values():
            counter.read_events()
        return [
            CollectiveStats(
                unit=unit, collective=name, count=each.count, bytes=each.bytes, seconds=each.seconds
            )
            for name, each in self._counters.items()
            if each.count
        ]

    def reset(self) -> None:
        """Set all totals to zero. Collectives in flight add their durations to no total."""
        self._counters = {name: _Counter() for name in _PASSES}

    def _now(self) -> "float | torch.Event":
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


# A bandwidth-optimal all-reduce is a reduce-scatter followed by an all-gather.
_PASSES: dict[CollectiveName, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
