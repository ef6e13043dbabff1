"""Names of torch that are not public, each wrapped once in a typed function.

Tried with torch 2.13.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import is_
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup, fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
)
from torch.distributed.tensor import DTensor, Placement

# A shard of a dimension that later axes of the mesh shard already. No public name; without it the
# order of shards cannot be said in placements.
from torch.distributed.tensor.placement_types import _StridedShard
from torch.profiler import record_function
from torch.utils import _pytree

from ._errors import UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own registry of parameters.

    ``setattr`` is the public way to register one; its checks cost several times the host time, for
    every parameter at every gather and reshard.
    """
    return module._parameters


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of a shard that later axes have split in ``split_factor`` before."""
    return _StridedShard(dim, split_factor=split_factor)


def wrapper_like(parameter: DTensor) -> Callable[[Tensor], DTensor]:
    """Return what makes DTensors with the parameter's mesh, placements and global shape.

    Same as the public ``DTensor.from_local`` with shape and stride, which takes several times the
    host time because it works the layout out again; this runs once per parameter and step.
    """
    # __new__ alone: __init__ adds nothing but a wrapper that costs more than all the rest.
    return partial(DTensor.__new__, DTensor, spec=parameter._spec, requires_grad=False)


def set_local(parameter: DTensor, local: Tensor) -> None:
    """Make ``local`` the storage of a DTensor in place, so that optimizers keep their key to it.

    ``Parameter.data = ...`` is the public way for plain tensors; it does not reach a DTensor's
    local tensor.
    """
    parameter._local_tensor = local


def are_parts(parts: Sequence[Tensor], tensors: Sequence[DTensor]) -> bool:
    """Return whether ``parts`` are the local tensors of ``tensors``, the very same ones."""
    return all(map(is_, parts, [tensor._local_tensor for tensor in tensors]))


def local_of(tensor: DTensor) -> Tensor:
    """Return the local tensor itself; ``to_local`` returns a new view, with autograd history."""
    return tensor._local_tensor


def tensor_references(tensors: Sequence[Tensor]) -> list[int]:
    """Return how many holders each tensor has, autograd's graphs among them; no public counter."""
    return [tensor._use_count() for tensor in tensors]  # type: ignore[attr-defined]


def storage_references(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and other holders a storage has; there is no public counter."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def pack_rank_major(gradients: Sequence[Tensor], degree: int, out: Tensor) -> None:
    """Split each gradient in ``degree`` row blocks, zero-padded, and write block r to ``out[r]``.

    ``torch._chunk_cat``; public would be ``pad``, ``view`` and ``cat``, with one more copy for
    gradients whose rows do not divide.
    """
    torch._chunk_cat(list(gradients), dim=0, num_chunks=degree, out=out)


def call_after_backward(function: Callable[[], None]) -> None:
    """Run ``function`` when the backward under way has ended; there is no public hook for that."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(function)


def uncompiled(function: F) -> F:
    """Return ``function``, never compiled, nor anything that it calls."""
    return cast(F, torch.compiler.disable(function))


def uncompiled_itself(function: F) -> F:
    """Return ``function``, never compiled itself, unlike what it calls."""
    return cast(F, torch.compiler.disable(function, recursive=False))


def inside_backward() -> bool:
    """Return whether an autograd backward runs on this thread; there is no public question."""
    return bool(torch._C._current_graph_task_id() != -1)


def inside_transform() -> bool:
    """Return whether a transform of ``torch.func`` runs; there is no public question."""
    return bool(torch._C._are_functorch_transforms_active())


def outside_transforms() -> AbstractContextManager[object]:
    """Run operators as they are while transforms of ``torch.func`` run, which see none of them.

    What communicates writes to memory of its own, which a transform refuses. There is no public
    way; ``autograd.Function`` with ``setup_context`` has none for what returns nothing.
    """
    return torch._C._DisableFuncTorch() if inside_transform() else nullcontext()


def named_range(what: str, path: str, axis: str = "") -> AbstractContextManager[object]:
    """Name what runs inside in a profile: what it does, of which module, over which axis.

    ``torch.profiler.record_function`` takes 7 us where nobody profiles; whether somebody does has
    no public question.
    """
    autograd: Any = torch.autograd
    if not autograd._profiler_enabled():
        return nullcontext()
    over = f" over {axis}" if axis else ""
    return record_function(f"hp_fsdp.{what} {path or '(root)'}{over}")


def accumulates(ctx: Any, position: int) -> bool:
    """Return whether the backward under way adds to the ``grad`` of an input, which is a leaf.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` may leave it out; ``needs_input_grad`` does
    not tell. ``torch._C._will_engine_execute_node`` does, and has no public name; it raises for a
    leaf whose gradient is to be returned.
    """
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[position][0]))
    except RuntimeError:
        return False


def hooks_after_gradient(parameter: nn.Parameter) -> dict[int, Callable[[Tensor], object]] | None:
    """Return what ``Tensor.register_post_accumulate_grad_hook`` registered; it has no getter."""
    return parameter._post_accumulate_grad_hooks


def writes_to(tensor: Tensor) -> int:
    """Return how often a tensor or a view of it was written to; there is no public counter."""
    return tensor._version


def composed_by(module: nn.Module) -> set[str]:
    """Return which of torch's ``replicate`` and ``fully_shard`` have the module's parameters.

    Composable functions note it in a registry that has no public name; others, as ``checkpoint``,
    take no parameters.
    """
    return {"replicate", "fully_shard"}.intersection(module.__dict__.get(REGISTRY_KEY, ()))


def note_composed(module: nn.Module) -> None:
    """Let torch's composable functions know that a ``fully_shard`` has the module's parameters.

    ``replicate`` on a module around it then leaves them alone, and torch's own ``fully_shard``
    refuses it.
    """
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


class TorchState:
    """What torch's own callers read of a module that they take for one of its ``fully_shard``.

    Pipeline stages set the module's options around each backward, and after the last one call
    ``post_backward`` of every group of parameters and then the end of backward; by
    ``all_states[i]._fsdp_param_group`` up to torch 2.12, by a list of groups since. Here the end
    does it all. Torch's ``register_fsdp_forward_method`` wraps a method in two of its hooks. Any
    other name is refused, so that nothing of torch's does a part of its work unseen.

    Args:
        finish: Reduces what backwards left.
        before: What runs before a forward; of the module, its arguments and named arguments.
        after: What runs after it; of the module, its arguments and its output.
    """

    def __init__(
        self,
        finish: Callable[[], None],
        before: Callable[[Any, Any, Any], tuple[Any, Any]],
        after: Callable[[Any, Any, Any], Any],
    ) -> None:
        self._root_post_backward_final_callback = finish
        self._pre_forward = before
        self._post_forward = after
        self._fsdp_param_group = None
        self._fsdp_param_groups: tuple[object, ...] = ()
        self.all_states = [self]

    @property
    def _state_ctx(self) -> "TorchState":
        return self

    def __getattr__(self, name: str) -> NoReturn:
        raise _ForeignState(
            f"a module sharded by this package has no {name} of torch's FSDPState; call the "
            "module's own methods, and this package's functions in place of torch's"
        )


# Torch's own, also where a program has put this package's in its place.
_fully_shard: Any = fsdp.fully_shard


class _ForeignState(UnsupportedError, AttributeError):
    """An UnsupportedError; an AttributeError too, so that ``hasattr`` answers False."""


def note_state(module: nn.Module, state: TorchState) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state(module)`` return ``state``."""
    module.__dict__.setdefault(STATE_KEY, {})[_fully_shard.__wrapped__] = state


def noted_state(module: nn.Module) -> Any:
    """Return what torch's ``fully_shard.state`` returns."""
    return _fully_shard.state(module)


def flatten_axes(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the 1-D mesh over several axes, ``DeviceMesh._flatten``, which has no public name."""
    return mesh[names]._flatten("_".join(names))


def backend_of(group: object, device: torch.device) -> str:
    """Return the name of the backend that serves a device in a process group; "" without one.

    It may have been made by another name; ``_get_backend`` has no public one.
    """
    if not isinstance(group, ProcessGroup):
        return ""  # this rank alone, or simulated
    try:
        found: Any = cast(Any, group)._get_backend(device)
    except RuntimeError:
        return ""
    return str(found.name())


# Torch's own objects to communicate by in memory of the process group.
GROUP_MEMORY: Any = (ProcessGroupAllocAllGather, ProcessGroupAllocReduceScatter)


def registers_memory(group: object, device: torch.device) -> bool:
    """Return whether the backend that serves a device allocates memory to communicate in."""
    if not isinstance(group, ProcessGroup):
        return False
    return bool(cast(Any, group)._get_backend(device).supports_tensor_alloc(device))


def is_extended(tensor: Tensor) -> bool:
    """Return whether a tensor gathers itself: torch's `fully_shard` looks for these names on it."""
    return hasattr(tensor, "fsdp_pre_all_gather") or hasattr(tensor, "fsdp_post_all_gather")


def pytree_node(
    value: object,
) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return what a value of a registered type holds, and what makes another of it; else None.

    ``torch.utils._pytree``, with which libraries register the types of their outputs; it has no
    public name.
    """
    node = _pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), lambda new: node.unflatten_fn(new, context)


def preserved_versions(tensor: Tensor) -> AbstractContextManager[None]:
    """Write the same values into a tensor again without autograd taking it for a change.

    ``torch.autograd._unsafe_preserve_version_counter``, which has no public name; an alias of its
    own (``.data``) is the way for plain tensors, and not all tensor classes can make one.
    """
    autograd: Any = torch.autograd
    guard: AbstractContextManager[None] = autograd._unsafe_preserve_version_counter(tensor)
    return guard
