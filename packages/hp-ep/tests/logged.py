"""When collectives start, and when they are awaited."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hp_dtensor import Axis, Collectives, Work

Label = Callable[[Axis, Tensor], str | None]


def logged(inner: Collectives, log: list[str], label: Label) -> Collectives:
    """Return ``inner``, noting in ``log`` the calls that have a ``label``."""
    return _Logged(inner, log, label)


class _Logged:
    """`Collectives` that note what starts and what is awaited, by its label."""

    def __init__(self, inner: Collectives, log: list[str], label: Label) -> None:
        self._inner, self._log, self._label = inner, log, label

    def _start(self, axis: Axis, tensor: Tensor, work: Work) -> Work:
        label = self._label(axis, tensor)
        if label is None:
            return work
        self._log.append(f"start {label}")
        return _LoggedWork(work, self._log, f"wait {label}")

    def all_to_all(
        self,
        axis: Axis,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Work:
        work = self._inner.all_to_all(axis, input, send_splits, receive_splits, output)
        return self._start(axis, input, work)

    def all_reduce(self, axis: Axis, tensors: Any, op: Any = "sum") -> Work:
        return self._start(axis, tensors[0], self._inner.all_reduce(axis, tensors, op))

    def all_gather(self, axis: Axis, inputs: Any, outputs: Any = None) -> Work:
        raise AssertionError

    def reduce_scatter(self, axis: Axis, inputs: Any, outputs: Any = None, op: Any = "sum") -> Work:
        raise AssertionError

    def send_recv(self, axis: Axis, sends: Mapping[int, Any], receives: Mapping[int, Any]) -> Work:
        raise AssertionError

    def broadcast(self, axis: Axis, tensors: Any, source: int = 0) -> Work:
        raise AssertionError


class _LoggedWork:
    def __init__(self, work: Work, log: list[str], entry: str) -> None:
        self._work, self._log, self._entry = work, log, entry

    def wait(self) -> list[Tensor]:
        self._log.append(self._entry)
        return self._work.wait()
