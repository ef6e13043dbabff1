"""Names of torch that are not public, each wrapped once in a typed function.

Tried with torch 2.13.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor, Placement

# A shard of a dimension that later axes of the mesh have cut already. No public name; without it
# the order of cuts cannot be said in placements.
from torch.distributed.tensor.placement_types import _StridedShard


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own registry of parameters.

    ``setattr`` is the public way to register one; its checks cost several times the host time, for
    every parameter at every gather and reshard.
    """
    return module._parameters


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of a cut that comes after ``split_factor`` cuts by later axes."""
    return _StridedShard(dim, split_factor=split_factor)


def like(parameter: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor of ``local`` with the parameter's mesh, placements and global shape.

    Same as the public ``DTensor.from_local`` with shape and stride, which takes several times the
    host time because it works the layout out again; this runs once per parameter and step.
    """
    # __new__ alone: __init__ adds nothing but a wrapper that costs more than all the rest.
    return DTensor.__new__(DTensor, local, parameter._spec, requires_grad=False)


def set_local(parameter: DTensor, local: Tensor) -> None:
    """Make ``local`` the storage of a DTensor in place, so that optimizers keep their key to it.

    ``Parameter.data = ...`` is the public way for plain tensors; it does not reach a DTensor's
    local tensor.
    """
    parameter._local_tensor = local


def local_of(tensor: DTensor) -> Tensor:
    """Return the local tensor itself; ``to_local`` returns a new view, with autograd history."""
    return tensor._local_tensor


def pack_rank_major(gradients: Sequence[Tensor], degree: int, out: Tensor) -> None:
    """Cut each gradient in ``degree`` row blocks, zero-padded, and write block r to ``out[r]``.

    ``torch._chunk_cat``; public would be ``pad``, ``view`` and ``cat``, with one more copy for
    gradients whose rows do not divide.
    """
    torch._chunk_cat(list(gradients), dim=0, num_chunks=degree, out=out)


def call_after_backward(function: Callable[[], None]) -> None:
    """Run ``function`` when the backward under way has ended; there is no public hook for that."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(function)


def inside_backward() -> bool:
    """Return whether an autograd backward runs on this thread; there is no public question."""
    return bool(torch._C._current_graph_task_id() != -1)
