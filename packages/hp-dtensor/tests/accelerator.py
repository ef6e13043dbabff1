"""Tensors that report an accelerator as their device and record calls of process groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class OnAccelerator(Tensor):
    """A tensor on ``cuda:0`` whose elements are in the CPU tensor ``memory``.

    Operators run on ``memory``, and so do the collectives that gloo supports for CUDA tensors.
    ``reached`` has the name of each c10d operator that got such a tensor.
    """

    memory: Tensor
    reached: ClassVar[list[str]] = []
    UNSUPPORTED: ClassVar = ("send", "recv_", "allreduce_coalesced_", "allgather_coalesced_")

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnAccelerator":
        """Create the outer tensor, which has no memory."""
        make: Any = Tensor._make_wrapper_subclass
        how = {"dtype": inner.dtype, "strides": inner.stride(), "device": "cuda:0"}
        made: OnAccelerator = make(cls, inner.shape, **how)
        return made

    def __init__(self, inner: Tensor) -> None:
        self.memory = inner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function unchanged, except ``copy_``, which needs the driver of the device."""
        copy = vars(torch)["ops"].aten.copy_.default
        with torch._C.DisableTorchFunctionSubclass():
            return (copy if func is Tensor.copy_ else func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the CPU tensors. New tensors are on the accelerator."""
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            cls.reached.append(name)
            if name in cls.UNSUPPORTED:
                raise RuntimeError(f"gloo got an accelerator's memory in {name}")
        asked = kwargs.get("device")
        on_cpu: Any = tree_map_only(cls, lambda x: x.memory, (args, kwargs))
        given = on_cpu[1] if asked is None else {**on_cpu[1], "device": torch.device("cpu")}
        out = func(*on_cpu[0], **given)
        if "out" in kwargs:
            return None if out is None else kwargs["out"]
        if name in ("copy_", "div_"):
            return args[0]
        is_moved = asked is not None and torch.device(asked).type == "cpu"
        return out if is_moved or namespace == "c10d" else tree_map_only(Tensor, cls, out)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Record the c10d operators that get an accelerator's tensors."""
    OnAccelerator.reached.clear()
    yield OnAccelerator.reached
