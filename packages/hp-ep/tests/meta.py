"""The meta device: it holds no values, and whoever reads one is found out."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from rank_pool.fake_cuda import ShapeCollectives
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_dtensor import Collectives

META = torch.device("meta")


class Waits(TorchDispatchMode):
    """Counts copies from the host, and ``tolist``, which it answers with zeros."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0
        self._patches = ExitStack()

    def __enter__(self) -> "Waits":
        # What makes tensors of host data does so below any mode.
        for name in ("tensor", "as_tensor", "asarray", "from_numpy"):
            counted = self._counted(getattr(torch, name))
            self._patches.enter_context(patch.object(torch, name, counted))
        self._patches.enter_context(patch.object(Tensor, "tolist", self._zeros(Tensor.tolist)))
        for name in ("__getitem__", "__setitem__"):
            listed = self._listed(getattr(Tensor, name))
            self._patches.enter_context(patch.object(Tensor, name, listed))
        self._patches.enter_context(torch.autograd.set_multithreading_enabled(False))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def _counted(self, make: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = make(*args, **kwargs)
            self.number += result.is_meta
            return result

        return call

    def _listed(self, access: Any) -> Any:
        def call(x: Tensor, index: Any, *value: Any) -> Any:
            parts = index if isinstance(index, tuple) else (index,)
            self.number += x.is_meta and any(isinstance(part, list) for part in parts)
            return access(x, index, *value)

        return call

    def _zeros(self, read: Any) -> Any:
        def call(x: Tensor) -> Any:
            self.number += x.is_meta
            return read(torch.zeros(x.shape, dtype=torch.int64) if x.is_meta else x)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (_tensors(part) for part in ((args, kwargs), result))
        on_host = any(t.is_cpu and t.dim() for t in given)  # a number goes with the kernel
        self.number += on_host and any(t.is_meta for t in made)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Shapes(ShapeCollectives):
    """The collectives of dispatchers, and no others."""

    def all_gather(self, axis: Any, inputs: Any, outputs: Any = None) -> Any:
        raise AssertionError

    def reduce_scatter(self, axis: Any, inputs: Any, outputs: Any = None, op: str = "sum") -> Any:
        raise AssertionError

    def send_recv(self, axis: Any, sends: Any, receives: Any) -> Any:
        raise AssertionError

    def broadcast(self, axis: Any, tensors: Any, source: int = 0) -> Any:
        raise AssertionError


SHAPES: Collectives = _Shapes()
