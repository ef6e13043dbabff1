"""Private names of torch, each wrapped once in a typed function.

Tested with torch 2.13, and briefly with 2.11.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip
from torch.autograd import Variable, forward_ad
from torch.distributed import ProcessGroup, fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import _is_composable_with_fsdp
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_managed_modules
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from hp_dtensor.torch_compat import backend_of

from ._errors import ModuleStateError, UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own registry of parameters.

    ``setattr`` is the public way to register one; its checks cost several times the host time, for
    every parameter at every gather and reshard.
    """
    return module._parameters


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Replace parameters and buffers on the meta device by uninitialised ones on ``device``.

    Unlike ``Module.to_empty``, which calls ``Module._apply`` for all tensors, this keeps the other
    tensors, and keeps tied parameters and buffers tied.
    """
    made: dict[int, Any] = {}

    def empty(tensor: Any) -> Any:
        if id(tensor) not in made:
            new = torch.empty_like(tensor.data, device=device)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
                new.__class__ = type(tensor)
                vars(new).update(vars(tensor))
            made[id(tensor)] = new
        return made[id(tensor)]

    for module in model.modules():
        for registry in (parameters_of(module), buffers_of(module)):
            for name, tensor in registry.items():
                if tensor is not None and tensor.is_meta and type(tensor.data) is Tensor:
                    registry[name] = empty(tensor)
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """Return the module's own registry of buffers."""
    return module._buffers


def wrapper_like(parameter: DTensor) -> Callable[[Tensor], DTensor]:
    """Return a function that makes DTensors with the mesh, placements and shape of a parameter.

    The public ``DTensor.from_local`` with shape and stride takes several times the host time,
    because it computes the layout again. This function runs once per parameter and step.
    """
    # Without __init__, which only adds a wrapper that takes longer than __new__.
    return partial(DTensor.__new__, DTensor, spec=parameter._spec, requires_grad=False)


def set_local(parameter: DTensor, local: Tensor) -> None:
    """Replace the local tensor of a DTensor in place, so that optimizers keep their key to it.

    ``Parameter.data = ...`` is the public way for plain tensors; it does not reach a DTensor's
    local tensor.
    """
    parameter._local_tensor = local


# The local tensor itself; ``to_local`` returns a new view, with autograd history.
local_of: Callable[[DTensor], Tensor] = attrgetter("_local_tensor")
_storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_pointer_of = attrgetter("_cdata")


def storage_references(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """Return the number of references to each storage. There is no public function for this."""
    return list(map(_storage_use_count, map(_pointer_of, storages)))


def pack_rank_major(gradients: Sequence[Tensor], degree: int, out: Tensor) -> None:
    """Split each gradient in ``degree`` row blocks, zero-padded, and write block r to ``out[r]``.

    This is ``torch._chunk_cat``. The public ``pad``, ``view`` and ``cat`` need one more copy if the
    rows of a gradient do not divide.
    """
    torch._chunk_cat(list(gradients), dim=0, num_chunks=degree, out=out)


# Autograd's number of the next operation of this thread. There is no public function for this.
next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def runs_after_new_ones(tensor: Tensor) -> bool:
    """Return whether backward reaches a tensor after all operations that run from now on.

    Of the nodes that are ready, autograd runs the accumulation into leaves first, then the node
    with the highest number of its thread. The number has no public name.
    """
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() < next_number()


def base_since(tensor: Tensor, number: int) -> Tensor | None:
    """Return the base of a view if it was computed since `next_number` returned ``number``.

    An in-place operation on a view gives the view a new node, without the hooks of the old one. The
    node of the base stays.
    """
    base = tensor._base if tensor._is_view() else None
    node = None if base is None else base.grad_fn
    return base if node is not None and node._sequence_nr() >= number else None


def call_after_backward(function: Callable[[], None]) -> None:
    """Run ``function`` at the end of the current backward. There is no public hook for this."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(function)


def uncompiled(function: F) -> F:
    """Return a function that is never compiled, including the functions that it calls.

    ``torch.compiler.disable`` takes ten calls to disable the compiler, so it is used only if a
    compiler is active. There is no public function to find this out.
    """
    disabled = torch.compiler.disable(function)

    @uncompiled_itself
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if compiler() is None else disabled)(*args, **kwargs)

    return cast(F, call)


def uncompiled_itself(function: F) -> F:
    """Return a function that is never compiled; the functions that it calls may be.

    ``torch.compiler.disable(recursive=False)`` would add two calls.
    """
    return cast(F, skip(function))


# Number of the backward that runs on this thread, or -1. There is no public function for this.
graph_task: Callable[[], int] = torch._C._current_graph_task_id


# Whether a transform of ``torch.func`` is active. There is no public function for this.
inside_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active


def inside_forward_ad() -> bool:
    """Return whether tensors have tangents of ``torch.autograd.forward_ad``; no public name."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def without_tangents() -> AbstractContextManager[None]:
    """Return a context in which forward-mode differentiation is disabled. It has no public name."""
    return cast("AbstractContextManager[None]", forward_ad._set_fwd_grad_enabled(False))


# The active compiler callback, or None.
compiler: Callable[[], object] = get_eval_frame_callback


def outside_transforms(function: Callable[..., R], *args: Any) -> R:
    """Call a function whose operators are not transformed by ``torch.func``.

    Communication writes to buffers, which a transform rejects. There is no public way:
    ``autograd.Function`` with ``setup_context`` requires outputs.
    """
    if not inside_transform():
        return function(*args)
    with torch._C._DisableFuncTorch():
        return function(*args)


_tensor_alive: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


def apply_untransformed(
    function: type[torch.autograd.Function], context: object, *tensors: Tensor
) -> Any:
    """Apply an autograd function if no transform of ``torch.func`` is active.

    ``function.apply`` needs seven calls to check this.
    """
    own: Any = super(torch.autograd.Function, function)
    return own.apply(context, *map(_tensor_alive, tensors))


# Whether a profiler is active; there is no public function for this.
_profiled: Callable[[], bool] = cast(Any, torch.autograd)._profiler_enabled
_NO_RANGE = nullcontext()


def named_range(what: str, path: str, axis: str = "") -> AbstractContextManager[object]:
    """Return a context that profiles show as a range, for example for one all-gather of a module.

    Without a profiler it does nothing, because ``torch.profiler.record_function`` takes 7 us.
    """
    if not _profiled():
        return _NO_RANGE
    over = f" over {axis}" if axis else ""
    return record_function(f"hp_fsdp.{what} {path or '(root)'}{over}")


def in_range(what: str, path: str, function: Callable[[], R], axis: str = "") -> R:
    """Call ``function`` in a `named_range`. Without a profiler, this takes one call in Python."""
    if not _profiled():
        return function()
    with named_range(what, path, axis):
        return function()


def hooks_after_gradient(parameter: nn.Parameter) -> dict[int, Callable[[Tensor], object]] | None:
    """Return the hooks of ``Tensor.register_post_accumulate_grad_hook``, which has no getter."""
    return parameter._post_accumulate_grad_hooks


# Called for all parameters in every step, by `map`, which makes no calls in Python.
trains: Callable[[Tensor], bool] = attrgetter("requires_grad")
gradient_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")
# In this context, attributes of tensors are read and written twice as fast, because torch does not
# look for ``__torch_function__``, which DTensors have disabled.
plain_attributes: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


def training(tensors: Iterable[Tensor]) -> list[bool]:
    """Return whether each tensor requires grad."""
    with plain_attributes():
        return list(map(trains, tensors))


_hooks_of = attrgetter("_post_accumulate_grad_hooks")


def any_hooks_after_gradient(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether any parameter has `hooks_after_gradient`."""
    with plain_attributes():
        return any(map(_hooks_of, parameters))


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks. There is no public function for this."""
    return bool(module._forward_hooks)


def composed_by(module: nn.Module) -> set[str]:
    """Return which of torch's ``replicate`` and ``fully_shard`` have the module's parameters.

    Composable functions write it to a registry without a public name. Other functions, such as
    ``checkpoint``, manage no parameters.
    """
    return {"replicate", "fully_shard"}.intersection(module.__dict__.get(REGISTRY_KEY, ()))


def managed_by_torch(module: nn.Module) -> bool:
    """Return whether torch's ``fully_shard`` manages the parameters of a module."""
    return "_is_fsdp_managed_module" in module.__dict__


def _refuse_torchs_call(module: nn.Module, frame: FrameType | None) -> None:
    """Raise `ModuleStateError` if ``frame`` runs in a call of torch's ``fully_shard``.

    Parameters that the call ignores may stay where they are.
    """
    if frame is None or frame.f_code is not _is_composable_with_fsdp.__code__:
        return
    while frame is not None and frame.f_code is not _get_managed_modules.__code__:
        frame = frame.f_back
    ignored = (frame.f_locals.get("ignored_params") if frame is not None else None) or ()
    if not all(parameter in ignored for parameter in module.parameters()):
        raise ModuleStateError(
            f"{type(module).__name__} was sharded by a fully_shard that is not torch's, and "
            "torch's fully_shard was given it or a module around it; parameters can be sharded "
            "once: use the same fully_shard for all modules of a model"
        )


class _Registry(dict[str, RegistryItem]):
    """A module's registry of composable functions. It raises if torch's ``fully_shard`` reads it.

    Torch's ``fully_shard`` looks for ``replicate`` in the registry of each submodule. There is no
    other hook in it, and it would fail later with an error about meshes. Other callers look for
    ``replicate`` too, so the code object of the caller is compared.
    """

    module: "weakref.ref[nn.Module] | None" = None

    def __contains__(self, name: object) -> bool:
        module = None if self.module is None else self.module()
        if module is not None:
            _refuse_torchs_call(module, sys._getframe(1))
        return super().__contains__(name)

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy of the module is not sharded


def note_composed(unit: Iterable[nn.Module], owners: Iterable[nn.Module]) -> None:
    """Register modules as sharded with torch's composable functions.

    torch's ``replicate`` on an outer module then ignores their parameters, and torch's
    ``fully_shard`` raises.

    Args:
        unit: The modules of a unit.
        owners: The modules that register its parameters.
    """
    for module in dict.fromkeys([*unit, *owners]):
        registry = _Registry(module.__dict__.get(REGISTRY_KEY, {}))
        registry.module = weakref.ref(module)
        module.__dict__[REGISTRY_KEY] = registry
    for module in unit:
        module.__dict__[REGISTRY_KEY]["fully_shard"] = RegistryItem()


class TorchState:
    """Stands in for torch's ``FSDPState``, for code of torch that reads the state of a module.

    - Pipeline stages call ``post_backward`` of every parameter group after the last backward, and
      then the callback for the end of backward. Here there are no groups, and the callback reduces
      all gradients. Up to torch 2.12 the groups are ``all_states[i]._fsdp_param_group``.
    - torch's ``register_fsdp_forward_method`` calls ``_pre_forward`` and ``_post_forward``.
    - Any other attribute raises `UnsupportedError`.

    Args:
        finish: Reduces the accumulated gradients.
        before: Called before a forward with the module, its positional and its keyword arguments.
        after: Called after a forward with the module, its positional arguments and its output.
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


# torch's own names, also if a program later replaces them by names of this package.
_fully_shard: Any = fsdp.fully_shard
TORCH_MODULE: type[fsdp.FSDPModule] = fsdp.FSDPModule


class _ForeignState(UnsupportedError, AttributeError):
    """An UnsupportedError; an AttributeError too, so that ``hasattr`` answers False."""


def note_state(module: nn.Module, state: TorchState) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state(module)`` return ``state``."""
    module.__dict__.setdefault(STATE_KEY, {})[_fully_shard.__wrapped__] = state


def noted_state(module: nn.Module) -> Any:
    """Return the state of a module, as torch's ``fully_shard.state`` does."""
    return _fully_shard.state(module)


def flatten_axes(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the 1-D mesh over several axes, ``DeviceMesh._flatten``, which has no public name."""
    return mesh[names]._flatten("_".join(names))


def averages(group: object, device: torch.device) -> bool:
    """Return whether a process group computes averages on a device.

    With other groups, the collectives of hp-dtensor divide the sums.
    """
    return backend_of(group, device) == "nccl"


# torch's objects for collectives in memory that the process group allocates.
GROUP_MEMORY: Any = (ProcessGroupAllocAllGather, ProcessGroupAllocReduceScatter)


def registers_memory(group: object, device: torch.device) -> bool:
    """Return whether the backend that serves a device allocates memory to communicate in."""
    if not isinstance(group, ProcessGroup):
        return False
    try:
        backend: Any = cast(Any, group)._get_backend(device)
    except RuntimeError:  # a group written in Python has no backend
        return False
    return bool(backend.supports_tensor_alloc(device))


# The methods of an all-gather extension, which torch's `fully_shard` calls too.
PRE_ALL_GATHER, POST_ALL_GATHER = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(tensor: Tensor) -> bool:
    """Return whether a tensor has an all-gather extension, or a part of one."""
    return hasattr(tensor, PRE_ALL_GATHER) or hasattr(tensor, POST_ALL_GATHER)


def preserved_versions(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which writes to a tensor do not change its version.

    For writes of the same values: autograd then does not refuse the tensors that it has saved.

    ``torch.autograd._unsafe_preserve_version_counter``, which has no public name; an alias of its
    own (``.data``) is the way for plain tensors, and not all tensor classes can make one.
    """
    autograd: Any = torch.autograd
    guard: AbstractContextManager[None] = autograd._unsafe_preserve_version_counter(tensor)
    return guard
