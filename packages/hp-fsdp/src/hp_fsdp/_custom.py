"""Adapters from torch's ``AllGather`` and ``ReduceScatter`` to `Collectives`.

Objects with these interfaces allocate the memory of their collectives. So the inputs are copied to
this memory (copy-in), and the results are copied out of it (copy-out), as in torch's `fully_shard`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hp_dtensor import Axis, Collectives, TorchCollectives, Work

from ._errors import StateError


@runtime_checkable
class Communication(Protocol):
    """Interface of torch's ``AllGather`` and ``ReduceScatter``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor in memory that no collective in flight uses."""
        ...

    def __call__(self, *args: Any, **how: Any) -> Any:
        """Start the collective.

        The keyword arguments are ``output_tensor``, ``input_tensor``, ``group``, ``async_op``, and
        for a ``ReduceScatter`` also ``op``. Returns torch's ``Work``, or None if the collective is
        finished.
        """
        ...


class CustomAllGather(TorchCollectives):
    """`Collectives` that run all-gathers through an object of the user.

    Args:
        given: An object with the interface of torch's ``AllGather``.
    """

    def __init__(self, given: Communication) -> None:
        self.given = given

    @torch.no_grad()
    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """All-gather all inputs, which have one dtype, in one call of the user's object."""
        if axis.size == 1 or not inputs:
            return super().all_gather(axis, inputs, outputs)
        outs = list(outputs or (x.new_empty((axis.size * len(x), *x.shape[1:])) for x in inputs))
        widths = [x.numel() for x in inputs]
        (whole,) = _allocated(self.given, inputs[0], axis.size * sum(widths))
        rows = whole.view(axis.size, -1)
        own = rows[axis.index]
        torch.cat([x.reshape(-1) for x in inputs], out=own)
        work = self.given(output_tensor=whole, input_tensor=own, group=axis.group, async_op=True)

        def copy_out() -> None:
            parts = [x.view(axis.size, -1) for x in outs]
            torch.split_with_sizes_copy(rows, widths, dim=1, out=parts)

        return _Staged(work, [whole], outs, copy_out)


class CustomReduceScatter(TorchCollectives):
    """`Collectives` that run reduce-scatters through an object of the user.

    Args:
        given: An object with the interface of torch's ``ReduceScatter``.
        inner: Collectives for all-reduces.
    """

    def __init__(self, given: Communication, inner: Collectives) -> None:
        self.given = given
        self._inner = inner

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: Any = "sum") -> Work:
        """All-reduce each tensor over the axis, in place."""
        return self._inner.all_reduce(axis, tensors, op)

    @torch.no_grad()
    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: Any = "sum",
    ) -> Work:
        """Reduce-scatter all inputs, which have one dtype, in one call of the user's object.

        The object always sums. If ``op`` is "avg", the results are divided afterwards.
        """
        if axis.size == 1 or not inputs:
            return super().reduce_scatter(axis, inputs, outputs, op)
        outs = list(outputs or (x.new_empty((len(x) // axis.size, *x.shape[1:])) for x in inputs))
        widths = [x.numel() // axis.size for x in inputs]
        sent, kept = _allocated(self.given, inputs[0], axis.size * sum(widths), sum(widths))
        rows = [x.reshape(axis.size, -1) for x in inputs]
        torch.cat(rows, dim=1, out=sent.view(axis.size, -1))
        how = {"group": axis.group, "op": ReduceOp.SUM, "async_op": True}
        work = self.given(output_tensor=kept, input_tensor=sent, **how)

        def copy_out() -> None:
            for out, part in zip(outs, kept.split(widths), strict=True):
                out.view(-1).copy_(part)
                if op == "avg":
                    out.div_(axis.size)

        return _Staged(work, [sent, kept], outs, copy_out)


class _Staged:
    """Handle of a collective that runs in memory allocated by the user's object.

    The first `wait` copies the result to ``outputs`` and releases the memory.
    """

    def __init__(
        self, work: Any, memory: list[Tensor], outputs: list[Tensor], copy_out: Callable[[], None]
    ) -> None:
        self.memory = memory
        self._work = work
        self._outputs = outputs
        self._copy_out: Callable[[], None] | None = copy_out
        _UNDER_WAY.add(self)

    @torch.no_grad()
    def wait(self) -> list[Tensor]:
        if self._copy_out is not None:
            if self._work is not None:
                self._work.wait()
            self._copy_out()
            self._work = self._copy_out = None
            self.memory = []
        return self._outputs


_UNDER_WAY: WeakSet[_Staged] = WeakSet()  # weak references keep no memory alive


def _allocated(given: Communication, like: Tensor, *numels: int) -> list[Tensor]:
    """Allocate one flat tensor for each number of elements in ``numels``, with ``given.allocate``.

    The tensors have the dtype and device of ``like``. Raises `StateError` if ``given.allocate``
    returns another dtype, device or size, or memory that a collective in flight uses.
    """
    found: list[Tensor] = []
    for numel in numels:
        with torch.inference_mode(False):  # `given` may reuse it outside of inference mode
            flat = given.allocate((numel,), dtype=like.dtype, device=like.device).view(-1)
        kinds = [(x.dtype, x.device) for x in (flat, like)]
        if kinds[0] != kinds[1] or flat.numel() != numel:
            raise StateError(
                f"allocate of a {type(given).__name__} returned {flat.numel()} elements of "
                f"{flat.dtype} on {flat.device}; asked for {numel} of {like.dtype} on {like.device}"
            )
        used = [*found, *(each for staged in _UNDER_WAY for each in staged.memory)]
        if any(_overlap(flat, each) for each in used):
            raise StateError(
                f"allocate of a {type(given).__name__} returned memory that a collective in flight "
                "uses; two all-gathers may be in flight at once, and a reduction needs two tensors"
            )
        found.append(flat)
    return found


def _overlap(one: Tensor, other: Tensor) -> bool:
    ends = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in (one, other)]
    return one.device == other.device and ends[0][0] < ends[1][1] and ends[1][0] < ends[0][1]
