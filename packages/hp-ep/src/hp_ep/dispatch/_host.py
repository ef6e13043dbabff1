"""The one place where the host waits for numbers of the device, and that picks streams for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from hp_dtensor import Work

Tables = list[list[list[int]]]


class Side(Protocol):
    """A stream beside the one that computes: what is put there waits for nothing computed since."""

    def fetch(self, work: Work, others: Sequence[Tensor]) -> tuple[Tensor, Callable[[], list[int]]]:
        """Start copying ``others`` and the result of ``work`` to the host once that is done.

        Returns the result, and what waits for the copy alone and gives its numbers; only after
        that may the stream that computes use the result.
        """
        ...

    def mark(self) -> object:
        """Return a mark of what has been put to compute so far."""
        ...

    def run(self, mark: object, call: Callable[[], Work]) -> Work:
        """Return the communication that ``call`` starts behind ``mark``, not what came later."""
        ...

    def adopt(self, tensor: Tensor) -> None:
        """Keep memory that `run` made as long as the stream that computes uses ``tensor``."""
        ...


def side_of(device: torch.device) -> Side | None:
    """Return the side stream of ``device``; None where the host computes, or has no streams."""
    return _cuda_side(device.index) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """Tables that are on their way to the host."""

    work: Work
    others: tuple[Tensor, ...]
    side: Side | None
    copied: tuple[Tensor, Callable[[], list[int]]] | None

    def wait(self) -> tuple[Tensor, Tables]:
        """Return the result of the communication, and all tables on the host, that one last."""
        if self.copied is None:
            (received,) = self.work.wait()
            return received, read_tables(*self.others, received)
        received, wait = self.copied
        return received, _split(wait(), (*self.others, received))


def start_reading(work: Work, *others: Tensor) -> Reading:
    """Start bringing ``others`` and the result of ``work``, matrices of int64, to the host."""
    side = side_of(others[0].device)
    copied = None if side is None else side.fetch(work, others)
    return Reading(work=work, others=others, side=side, copied=copied)


def read_tables(*tables: Tensor) -> Tables:
    """Return matrices of int64 as lists: together one device-to-host synchronisation."""
    return _split(torch.cat([table.reshape(-1) for table in tables]).tolist(), tables)


def _split(numbers: list[int], tables: Sequence[Tensor]) -> Tables:
    found, start = [], 0
    for table in tables:
        rows, columns = table.shape
        ends = range(start + columns, start + rows * columns + 1, columns)
        found.append([numbers[end - columns : end] for end in ends])
        start += rows * columns
    return found


class _CudaSide:
    """`Side` of a CUDA device; its memory is told of each stream that uses it."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)

    def fetch(self, work: Work, others: Sequence[Tensor]) -> tuple[Tensor, Callable[[], list[int]]]:
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            (received,) = work.wait()
            numbers = torch.cat([table.reshape(-1) for table in (*others, received)])
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            done = self._stream.record_event()
        for table in (*others, received):
            table.record_stream(self._stream)

        def wait() -> list[int]:
            done.synchronize()
            torch.cuda.current_stream(self._device).wait_event(done)
            found: list[int] = host.tolist()
            return found

        return received, wait

    def mark(self) -> object:
        return torch.cuda.current_stream(self._device).record_event()

    def run(self, mark: object, call: Callable[[], Work]) -> Work:
        if isinstance(mark, torch.cuda.Event):
            self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            return call()

    def adopt(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


@lru_cache(maxsize=64)
def _cuda_side(index: int) -> _CudaSide:
    return _CudaSide(index)
