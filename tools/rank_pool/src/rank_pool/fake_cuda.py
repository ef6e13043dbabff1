"""CUDA tensors without a GPU or numbers: shapes, dtypes and devices, and whoever waits for values.

A build of torch without CUDA is enough as long as nothing requires gradients: autograd asks for
the streams of an accelerator, and raises or ends the process without one. So tests call backward
functions directly.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
_CUDA, _META = 1, 14  # c10::DeviceType


class HostWaitError(AssertionError):
    """The host read what a CUDA device holds, or waited for a copy to or from it."""


@contextmanager
def fake_cuda() -> Iterator[torch.device]:
    """Yield ``cuda:0``, on which tensors that are made inside have no values.

    Raises `HostWaitError` for a copy between host and device that blocks. ``item``, ``tolist``,
    ``bool``, and operators whose output sizes depend on values raise torch's own errors,
    ``DataDependentOutputException`` and ``DynamicOutputShapeException``.
    """
    _add_device_guard()
    blocking: Any = _Blocking
    with FakeTensorMode(), torch.no_grad(), blocking():
        yield CUDA


@cache
def _add_device_guard() -> None:
    """Give a build without CUDA the device guard of meta tensors, which does nothing.

    Indexing, ``copy_`` and others ask for one before any mode learns of the call. In builds for
    CUDA, `FakeTensorMode` does the same (``torch._C._ensureCUDADeviceGuardSet``).
    """
    if torch.backends.cuda.is_built():
        return
    library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libc10.*"))))
    name = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, name)
    guards[_CUDA] = guards[_META]


class _Blocking(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::copy_", "aten::_to_copy"):
            source = args[1] if name == "aten::copy_" else args[0]
            devices = {source.device.type, out.device.type}
            position = 2 if name == "aten::copy_" else len(args)
            waits = not (kwargs or {}).get("non_blocking", any(args[position:]))
            if len(devices) == 2 and "cpu" in devices and waits:
                raise HostWaitError(f"{name} from {source.device} to {out.device} blocks the host")
        elif "cuda" in _types(tree_leaves((args, kwargs))) and "cpu" in _types(tree_leaves(out)):
            raise HostWaitError(f"{name} gives what is on the device to the host")
        return out


def _types(values: list[Any]) -> set[str]:
    return {x.device.type for x in values if isinstance(x, Tensor)}


class Node:
    """One call of a ``torch.autograd.Function``, in place of the context that autograd makes."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def __init__(self, function: type[torch.autograd.Function], args: Sequence[Any]) -> None:
        self.function, self.args = function, args
        self.needs_input_grad = tuple(_is_floating(x) for x in args)
        self.outputs: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep what backward reads."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Ignore which outputs have no gradient."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Ignore which inputs were changed."""

    def set_materialize_grads(self, value: bool) -> None:
        """Ignore whether backward wants zeros."""

    def backward(self) -> list[Tensor | None]:
        """Call the backward function with a gradient for each output; return its results."""
        function: Any = self.function
        found = function.backward(self, *(torch.empty_like(x) for x in self.outputs))
        return list(found) if isinstance(found, tuple) else [found]


@contextmanager
def recorded_functions() -> Iterator[list[Node]]:
    """Yield the list of calls of autograd functions, whose backward can then be called."""
    nodes: list[Node] = []

    def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
        node, forward = Node(function, args), vars(function)["forward"].__func__
        out = forward(node, *args)
        node.outputs = out if isinstance(out, tuple) else (out,)
        nodes.append(node)
        return out

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield nodes


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class ShapeCollectives:
    """Collectives of hp-dtensor whose outputs have a shape and no numbers; there are no peers."""

    def all_gather(self, axis: Any, inputs: Sequence[Tensor], outputs: Any = None) -> "Arrived":
        """Return the outputs that are given, or new ones."""
        made = [x.new_empty((axis.size * x.shape[0], *x.shape[1:])) for x in inputs]
        return Arrived(outputs or made)

    def reduce_scatter(
        self, axis: Any, inputs: Sequence[Tensor], outputs: Any = None, op: str = "sum"
    ) -> "Arrived":
        """Return the outputs that are given, or new ones."""
        made = [x.new_empty((x.shape[0] // axis.size, *x.shape[1:])) for x in inputs]
        return Arrived(outputs or made)

    def all_reduce(self, axis: Any, tensors: Sequence[Tensor], op: str = "sum") -> "Arrived":
        """Return the tensors."""
        return Arrived(tensors)

    def all_to_all(
        self,
        axis: Any,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> "Arrived":
        """Return the output that is given, or a new one."""
        rows = input.shape[0] if receive_splits is None else sum(receive_splits)
        made = input.new_empty((rows, *input.shape[1:])) if output is None else output
        return Arrived([made])

    def send_recv(
        self, axis: Any, sends: Mapping[int, Any], receives: Mapping[int, Any]
    ) -> "Arrived":
        """Return what is received."""
        parts = receives.values()
        return Arrived([x for p in parts for x in ([p] if isinstance(p, Tensor) else p)])

    def broadcast(self, axis: Any, tensors: Sequence[Tensor], source: int = 0) -> "Arrived":
        """Return the tensors."""
        return Arrived(tensors)


class Arrived:
    """Communication that is complete."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._outputs = list(outputs)

    def wait(self) -> list[Tensor]:
        """Return the outputs."""
        return self._outputs
