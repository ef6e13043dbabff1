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
    """Totals of one kind of collective."""

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


class _TimedWork:
    """A timed collective in flight. Its duration ends when `wait` has returned once."""

    def __init__(self, work: Waitable, counter: _Counter, before: "float | torch.Event") -> None:
        self._work = work
        self._counter = counter
        self._before: float | torch.Event | None = before

    def wait(self) -> None:
        """Wait for the collective, and add its duration to the counter."""
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
        path: Path of the unit from the root unit; "" for the root.
        timing: Whether to time collectives that are started from now on.
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
            axis: Mesh axis of the collective.
            size: Bytes of the output of an all-gather, or of the input of a reduce-scatter or an
                all-reduce.
            function: Function that starts the collective. It returns None if nothing is
                communicated.

        Returns:
            The collective in flight, or None if ``function`` returned None.
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
        """Count a collective whose size was not known yet when `start` was called.

        Its duration is not measured. It takes the same arguments as `start`.
        """
        self._counters[name].count += 1
        self._counters[name].bytes += _PASSES[name] * size * (axis.size - 1) // axis.size

    def stats(self, unit: str) -> list[CollectiveStats]:
        """Return the totals since the last `reset`, one for each kind of collective that ran.

        ``unit`` is the path of the unit in the result.
        """
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
        """Set all totals to zero. Durations of collectives in flight are discarded."""
        self._counters = {name: _Counter() for name in _PASSES}

    def _now(self) -> "float | torch.Event":
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


# A bandwidth-optimal all-reduce is a reduce-scatter followed by an all-gather.
_PASSES: dict[CollectiveName, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
