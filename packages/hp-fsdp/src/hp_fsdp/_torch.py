"""Typed wrappers of the private functions and attributes of torch that this package uses.

Tested with torch 2.13, and briefly with 2.11.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
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

# Consumes an iterator for its side effects, without a Python call for each item.
run: Callable[[Iterable[None]], object] = partial(deque, maxlen=0)
F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict in which ``module`` registers its own parameters, without submodules.

    Each unshard and reshard registers all parameters of a unit. Writing to this dict takes a
    fraction of the host time of ``setattr``, which runs checks.
    """
    return module._parameters


def materialize(model: nn.Module, device: torch.device) -> None:
    """Replace parameters and buffers on the meta device by uninitialised ones on ``device``.

    Unlike ``Module.to_empty``, this function does not change tensors on other devices, and tied
    parameters and buffers stay tied.
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
    """Return the dict in which ``module`` registers its own buffers, without submodules."""
    return module._buffers


# ``DTensor(...)`` would also call ``__init__``, which takes longer than ``__new__``.
_new_dtensor = partial(DTensor.__new__, DTensor, requires_grad=False)
_spec_of = attrgetter("_spec")


def wrapper_like(parameters: Sequence[DTensor]) -> Callable[[Sequence[Tensor]], list[DTensor]]:
    """Return a function that wraps one local tensor per parameter in a DTensor of the same layout.

    The function runs in every step. ``DTensor.from_local`` takes several times the host time,
    because it computes the layout again.
    """
    specs = list(map(_spec_of, parameters))
    return lambda locals_: list(map(_new_dtensor, locals_, specs))


def set_local(parameter: DTensor, local: Tensor) -> None:
    """Replace the local tensor of a DTensor in place, so that optimizers keep the DTensor's state.

    The public ``parameter.data = ...`` does not replace the local tensor of a DTensor.
    """
    parameter._local_tensor = local


# Returns the local tensor itself. ``to_local`` returns a new view, with autograd history.
local_of: Callable[[DTensor], Tensor] = attrgetter("_local_tensor")
_storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_pointer_of = attrgetter("_cdata")


def storage_references(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """Return the number of references to each storage. There is no public function for this."""
    return list(map(_storage_use_count, map(_pointer_of, storages)))


# Copies gradients to the input of a reduce-scatter over ``num_chunks`` ranks: splits each gradient
# into zero-padded blocks of rows, and writes the blocks of rank r to ``out[r]``. The public ``pad``
# and ``cat`` would need one more copy if the rows of a gradient do not divide evenly.
pack_rank_major: Callable[..., Tensor] = torch._chunk_cat


# Returns consecutive views of a 1-D tensor, with the shapes of the tensors of the second argument.
# Takes a third of the host time of ``narrow`` and ``view`` for each of them.
split_like: Callable[[Tensor, Any], list[Tensor]] = torch._C._nn.unflatten_dense_tensors


# Returns the sequence number that autograd gives to the next operation of this thread. There is no
# public function for this.
next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def runs_after_new_ones(tensor: Tensor) -> bool:
    """Return whether backward runs the node of ``tensor`` after the nodes of all later operations.

    Returns False if ``tensor`` has no ``grad_fn``. Among the nodes that are ready, autograd runs
    AccumulateGrad nodes first, then the node with the highest sequence number. There is no public
    function for this number.
    """
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() < next_number()


def base_since(tensor: Tensor, number: int) -> Tensor | None:
    """Return the base of a view if the base was computed since `next_number` returned ``number``.

    Returns None if ``tensor`` is not a view, or if its base has no ``grad_fn`` or an older one.

    Callers hook the base in addition to the view. An in-place operation on a view replaces the
    view's node, and the new node lacks the hooks. The base's node stays in the graph.
    """
    base = tensor._base if tensor._is_view() else None
    node = None if base is None else base.grad_fn
    return base if node is not None and node._sequence_nr() >= number else None


def call_after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the current backward. There is no public hook for this."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(function)


def uncompiled(function: F) -> F:
    """Return a version of ``function`` that is never compiled.

    Functions that ``function`` calls are not compiled either. ``torch.compiler.disable`` adds ten
    Python calls to each call, so it is used only if a compiler is active. No public function
    returns whether a compiler is active.
    """
    disabled = torch.compiler.disable(function)

    @uncompiled_itself
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if compiler() is None else disabled)(*args, **kwargs)

    return cast(F, call)


def uncompiled_itself(function: F) -> F:
    """Return a version of ``function`` that is never compiled. Functions that it calls may be.

    ``torch.compiler.disable(recursive=False)`` would add two Python calls to each call.
    """
    return cast(F, skip(function))


# Returns the id of the backward that runs on this thread, or -1. There is no public function for
# this.
graph_task: Callable[[], int] = torch._C._current_graph_task_id


# Returns whether a transform of ``torch.func`` is active. There is no public function for this.
inside_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active


def inside_forward_ad() -> bool:
    """Return whether forward-mode differentiation is active. There is no public function."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def without_tangents() -> AbstractContextManager[None]:
    """Return a context that disables forward-mode differentiation. It has no public name."""
    return cast("AbstractContextManager[None]", forward_ad._set_fwd_grad_enabled(False))


# Returns the callback of the active compiler, or None.
compiler: Callable[[], object] = get_eval_frame_callback


def outside_transforms(function: Callable[..., R], *args: Any) -> R:
    """Call ``function`` while transforms of ``torch.func`` are disabled.

    Communication writes to buffers, and a transform raises for such writes. The public alternative,
    ``autograd.Function`` with ``setup_context``, is only for functions with outputs.
    """
    if not inside_transform():
        return function(*args)
    with torch._C._DisableFuncTorch():
        return function(*args)


_tensor_alive: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


def apply_untransformed(
    function: type[torch.autograd.Function], context: object, *tensors: Tensor
) -> Any:
    """Call ``function.apply``. The caller has checked that no ``torch.func`` transform is active.

    This is faster than ``function.apply``, which makes seven Python calls to check for transforms.
    """
    own: Any = super(torch.autograd.Function, function)
    return own.apply(context, *map(_tensor_alive, tensors))


# Returns whether a profiler is active. There is no public function for this. Code that runs often
# calls this function first, because a context takes four Python calls.
profiled: Callable[[], bool] = cast(Any, torch.autograd)._profiler_enabled


def named_range(what: str, path: str, axis: str = "") -> AbstractContextManager[object]:
    """Return a context that profiles show as a range, for example for one all-gather of a module.

    Without a profiler it does nothing, because ``torch.profiler.record_function`` takes 7 us.
    """
    if not profiled():
        return nullcontext()
    over = f" over {axis}" if axis else ""
    return record_function(f"hp_fsdp.{what} {path or '(root)'}{over}")


def hooks_after_gradient(parameter: nn.Parameter) -> dict[int, Callable[[Tensor], object]] | None:
    """Return the post-accumulate-grad hooks of a parameter by id, or None. torch has no getter."""
    return parameter._post_accumulate_grad_hooks


# ``map`` calls these for all parameters in every step. An attrgetter needs no Python call.
trains: Callable[[Tensor], bool] = attrgetter("requires_grad")
gradient_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")
# In this context, reading and writing attributes of tensors takes half the time, because torch does
# not look for ``__torch_function__``. DTensors do not use ``__torch_function__``.
plain_attributes: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


def take_gradients(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return ``grad`` of each tensor, and set it to None."""
    with plain_attributes():
        found = list(map(gradient_of, tensors))
        run(map(setattr, tensors, repeat("grad"), repeat(None)))
    return found


def set_gradients(tensors: Sequence[Tensor], make: Callable[[], Iterable[Tensor]]) -> bool:
    """Set ``grad`` of each tensor to a result of ``make``, and return True.

    If a tensor already has a gradient, changes nothing and returns False.
    """
    with plain_attributes():
        if not all(map(is_, map(gradient_of, tensors), repeat(None))):
            return False
        run(map(setattr, tensors, repeat("grad"), make()))
    return True


def training(tensors: Iterable[Tensor]) -> list[bool]:
    """Return ``requires_grad`` of each tensor."""
    with plain_attributes():
        return list(map(trains, tensors))


_hooks_of = attrgetter("_post_accumulate_grad_hooks")


def any_hooks_after_gradient(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether any of the parameters has post-accumulate-grad hooks."""
    with plain_attributes():
        return any(map(_hooks_of, parameters))


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks. There is no public function for this."""
    return bool(module._forward_hooks)


def composed_by(module: nn.Module) -> set[str]:
    """Return the names of torch's composable functions that manage the module's parameters.

    The result is a subset of ``{"replicate", "fully_shard"}``. torch records composable functions
    in a registry of the module that has no public name.
    """
    return {"replicate", "fully_shard"}.intersection(module.__dict__.get(REGISTRY_KEY, ()))


def managed_by_torch(module: nn.Module) -> bool:
    """Return whether torch's ``fully_shard`` manages the parameters of a module."""
    return "_is_fsdp_managed_module" in module.__dict__


def _refuse_torchs_call(module: nn.Module, frame: FrameType | None) -> None:
    """Raise `ModuleStateError` if torch's ``fully_shard`` is called on a sharded ``module``.

    ``frame`` is the call frame that reads the registry of ``module``. This function does not raise
    if the frame is not part of torch's ``fully_shard``, or if that ``fully_shard`` call ignores all
    parameters of ``module``.
    """
    if frame is None or frame.f_code is not _is_composable_with_fsdp.__code__:
        return
    while frame is not None and frame.f_code is not _get_managed_modules.__code__:
        frame = frame.f_back
    ignored = (frame.f_locals.get("ignored_params") if frame is not None else None) or ()
    if not all(parameter in ignored for parameter in module.parameters()):
        raise ModuleStateError(
            f"{type(module).__name__} was sharded by a fully_shard that is not torch's, and "
            "then it or an outer module was passed to torch's fully_shard; parameters can be "
            "sharded once: use the same fully_shard for all modules of a model"
        )


class _Registry(dict[str, RegistryItem]):
    """A module's registry of composable functions. It raises if torch's ``fully_shard`` reads it.

    torch's ``fully_shard`` looks for ``replicate`` in the registry of each submodule. Without this
    class, torch would raise an error about meshes later. Other functions look for ``replicate``,
    too, so the registry compares the code object of its caller.
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
    """Mark modules as sharded in torch's registry of composable functions.

    torch's ``replicate`` on an outer module then ignores the parameters of these modules, and
    torch's ``fully_shard`` raises.

    Args:
        unit: The modules that were passed to one `fully_shard` call.
        owners: The modules that register the parameters of the unit.
    """
    for module in dict.fromkeys([*unit, *owners]):
        registry = _Registry(module.__dict__.get(REGISTRY_KEY, {}))
        registry.module = weakref.ref(module)
        module.__dict__[REGISTRY_KEY] = registry
    for module in unit:
        module.__dict__[REGISTRY_KEY]["fully_shard"] = RegistryItem()


class TorchState:
    """Replaces torch's ``FSDPState`` for code in torch that reads the state of a sharded module.

    - Pipeline stages call ``post_backward`` of every parameter group after the last backward, and
      then ``_root_post_backward_final_callback``. This state has no groups, and the callback
      reduces all gradients. Up to torch 2.12 the groups are ``all_states[i]._fsdp_param_group``.
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


# The original objects of torch, because a program may replace these names by this package's.
_fully_shard: Any = fsdp.fully_shard
TORCH_MODULE: type[fsdp.FSDPModule] = fsdp.FSDPModule


class _ForeignState(UnsupportedError, AttributeError):
    """Raised for attributes that `TorchState` lacks. Makes ``hasattr`` return False."""


def note_state(module: nn.Module, state: TorchState) -> None:
    """Make ``torch.distributed.fsdp.fully_shard.state(module)`` return ``state``."""
    module.__dict__.setdefault(STATE_KEY, {})[_fully_shard.__wrapped__] = state


def noted_state(module: nn.Module) -> Any:
    """Return the state of a module, as torch's ``fully_shard.state`` does."""
    return _fully_shard.state(module)


def flatten_axes(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Flatten several mesh axes into a 1-D mesh. ``DeviceMesh._flatten`` has no public name."""
    return mesh[names]._flatten("_".join(names))


def averages(group: object, device: torch.device) -> bool:
    """Return whether the backend of a process group can compute averages on a device.

    If it cannot, the collectives of hp-dtensor sum and then divide.
    """
    return backend_of(group, device) == "nccl"


# torch's classes for collectives that use memory allocated by the process group.
GROUP_MEMORY: Any = (ProcessGroupAllocAllGather, ProcessGroupAllocReduceScatter)


def registers_memory(group: object, device: torch.device) -> bool:
    """Return whether the backend of a process group can allocate memory for its collectives."""
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
    """Return whether a tensor has at least one of the two methods of an all-gather extension."""
    return hasattr(tensor, PRE_ALL_GATHER) or hasattr(tensor, POST_ALL_GATHER)


def preserved_versions(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which writes to ``tensor`` do not increment its version.

    Valid only for writing the same values again: autograd then accepts the tensors that it saved.
    ``torch.autograd._unsafe_preserve_version_counter`` has no public name. Writing to
    ``tensor.data`` is the public way, but not all tensor classes support it.
    """
    autograd: Any = torch.autograd
    guard: AbstractContextManager[None] = autograd._unsafe_preserve_version_counter(tensor)
    return guard
