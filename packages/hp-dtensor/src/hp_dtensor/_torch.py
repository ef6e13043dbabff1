"""Names of torch that differ between versions or are not public, resolved once.

``all_gather_single`` and ``reduce_scatter_single`` (2.13, public) were called
``all_gather_into_tensor`` and ``reduce_scatter_tensor`` before, which 2.13 deprecates. The
coalesced methods of ``ProcessGroup`` have no public function; the public alternative is the
context manager ``torch.distributed._coalescing_manager``, itself private, which stops running
collectives after an exception inside it.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import (  # the option structs of the coalesced methods
    AllgatherOptions,
    AllreduceCoalescedOptions,
    ReduceScatterOptions,
)
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


def _first(owner: Any, *names: str) -> Any:
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise ImportError(f"torch {owner} has none of {names}; hp-dtensor supports torch >= 2.11")


all_gather_single: Callable[..., Any] = _first(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single: Callable[..., Any] = _first(
    dist, "reduce_scatter_single", "reduce_scatter_tensor"
)
_gather_coalesced = _first(
    ProcessGroup, "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
)
_scatter_coalesced = _first(
    ProcessGroup, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
)


def all_gather_coalesced(group: ProcessGroup, outputs: list[Any], inputs: list[Any]) -> Any:
    """Start one all-gather of several tensors and return c10d's work."""
    options = AllgatherOptions()
    options.asyncOp = True
    return _gather_coalesced(group, outputs, inputs, options)


def reduce_scatter_coalesced(
    group: ProcessGroup, outputs: list[Any], inputs: list[Any], op: dist.ReduceOp
) -> Any:
    """Start one reduce-scatter of several tensors and return c10d's work."""
    options = ReduceScatterOptions()
    options.asyncOp = True
    options.reduceOp = op
    return _scatter_coalesced(group, outputs, inputs, options)


def all_reduce_coalesced(group: ProcessGroup, tensors: list[Any], op: dist.ReduceOp) -> Any:
    """Start one all-reduce of several tensors and return c10d's work."""
    options = AllreduceCoalescedOptions()
    options.asyncOp = True
    options.reduceOp = op
    return group.allreduce_coalesced(tensors, options)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Join submeshes of one root into one mesh; ``DeviceMesh._concatenate`` has no public name."""
    return DeviceMesh._concatenate(meshes)
