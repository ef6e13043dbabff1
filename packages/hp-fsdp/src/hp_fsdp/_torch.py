"""Names of torch that are not public, each wrapped once in a typed function.

Tried with torch 2.13, in short with 2.11.
"""

import sys
import weakref
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


# The local tensor itself; ``to_local`` returns a new view, with autograd history.
local_of: Callable[[DTensor], Tensor] = attrgetter("_local_tensor")
# How many holders a tensor has, autograd's graphs among them; there is no public counter.
tensor_references: Callable[[Tensor], int] = cast(Any, Tensor)._use_count
_storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_pointer_of = attrgetter("_cdata")


def storage_references(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """Return how many tensors and other holders each storage has; there is no public counter."""
    return list(map(_storage_use_count, map(_pointer_of, storages)))


def pack_rank_major(gradients: Sequence[Tensor], degree: int, out: Tensor) -> None:
    """Split each gradient in ``degree`` row blocks, zero-padded, and write block r to ``out[r]``.

    ``torch._chunk_cat``; public would be ``pad``, ``view`` and ``cat``, with one more copy for
    gradients whose rows do not divide.
    """
    torch._chunk_cat(list(gradients), dim=0, num_chunks=degree, out=out)


# The number that autograd gives to what this thread computes next; there is no public counter.
next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def runs_after_new_ones(tensor: Tensor) -> bool:
    """Return whether backward comes to a tensor after all that is computed from now on.

    Of what is ready autograd runs first what was made last, as numbers of its thread tell, which
    have no public name; and before all of that what adds to a leaf.
    """
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() < next_number()


def base_since(tensor: Tensor, number: int) -> Tensor | None:
    """Return what a tensor is a view of, if that was computed since a `next_number`.

    A change in place of a view makes its place in the graph anew, without the hooks that it had;
    that of its base stays.
    """
    base = tensor._base if tensor._is_view() else None
    node = None if base is None else base.grad_fn
    return base if node is not None and node._sequence_nr() >= number else None


def call_after_backward(function: Callable[[], None]) -> None:
    """Run ``function`` when the backward under way has ended; there is no public hook for that."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(function)


def uncompiled(function: F) -> F:
    """Return ``function``, never compiled, nor anything that it calls.

    ``torch.compiler.disable``, which takes ten calls to switch a compiler off; where none is on,
    it is left out. Whether one is has no public question.
    """
    disabled = torch.compiler.disable(function)

    @uncompiled_itself
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if compiler() is None else disabled)(*args, **kwargs)

    return cast(F, call)


def uncompiled_itself(function: F) -> F:
    """Return ``function``, never compiled itself, unlike what it calls.

    ``torch.compiler.disable(recursive=False)`` would put two calls around it.
    """
    return cast(F, skip(function))


# The number of the autograd backward that runs on this thread, or -1; there is no public question.
graph_task: Callable[[], int] = torch._C._current_graph_task_id


# Whether a transform of ``torch.func`` runs; there is no public question.
inside_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active


def inside_forward_ad() -> bool:
    """Return whether tensors have tangents of ``torch.autograd.forward_ad``; no public name."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def without_tangents() -> AbstractContextManager[None]:
    """Return a context in which forward-mode differentiation is disabled. It has no public name."""
    return cast("AbstractContextManager[None]", forward_ad._set_fwd_grad_enabled(False))


# Which compiler looks at the frames that run, None where none does.
compiler: Callable[[], object] = get_eval_frame_callback


def outside_transforms(function: Callable[..., R], *args: Any) -> R:
    """Call a function whose operators run as they are, unseen by transforms of ``torch.func``.

    What communicates writes to memory of its own, which a transform refuses. There is no public
    way; ``autograd.Function`` with ``setup_context`` has none for what returns nothing.
    """
    if not inside_transform():
        return function(*args)
    with torch._C._DisableFuncTorch():
        return function(*args)


_tensor_alive: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


def apply_untransformed(
    function: type[torch.autograd.Function], context: object, *tensors: Tensor
) -> Any:
    """Apply an autograd function where no transform of ``torch.func`` runs.

    ``function.apply`` asks for one, in seven calls.
    """
    own: Any = super(torch.autograd.Function, function)
    return own.apply(context, *map(_tensor_alive, tensors))


# Whether somebody profiles; there is no public question.
profiled: Callable[[], bool] = cast(Any, torch.autograd)._profiler_enabled


def named_range(what: str, path: str, axis: str = "") -> AbstractContextManager[object]:
    """Name what runs inside in a profile: what it does, of which module, over which axis.

    ``torch.profiler.record_function`` takes 7 us where nobody profiles.
    """
    if not profiled():
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


# Asked of all parameters in every step: `map` makes no call in Python for them.
trains: Callable[[Tensor], bool] = attrgetter("requires_grad")
gradient_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")
# Inside of it attributes of tensors are read and written twice as fast: nothing looks for a
# ``__torch_function__`` of their class, which DTensors have switched off.
plain_attributes: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


def have_no_gradients(tensors: Iterable[Tensor]) -> bool:
    """Return whether none of the tensors has a gradient."""
    with plain_attributes():
        return all(map(is_, map(gradient_of, tensors), repeat(None)))


def give_gradients(tensors: Iterable[Tensor], gradients: Iterable[Tensor]) -> list[int]:
    """Give the tensors that have none their gradient; return the positions of the others."""
    others = []
    with plain_attributes():
        for position, (tensor, gradient) in enumerate(zip(tensors, gradients, strict=True)):
            if tensor.grad is None:
                tensor.grad = gradient
            else:
                others.append(position)
    return others


def training(tensors: Iterable[Tensor]) -> list[bool]:
    """Return which of the tensors take a gradient."""
    with plain_attributes():
        return list(map(trains, tensors))


_hooks_of = attrgetter("_post_accumulate_grad_hooks")


def any_hooks_after_gradient(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether any of them has `hooks_after_gradient`."""
    with plain_attributes():
        return any(map(_hooks_of, parameters))


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether forward hooks are registered with a module; there is no public question."""
    return bool(module._forward_hooks)


def composed_by(module: nn.Module) -> set[str]:
    """Return which of torch's ``replicate`` and ``fully_shard`` have the module's parameters.

    Composable functions note it in a registry that has no public name; others, as ``checkpoint``,
    take no parameters.
    """
    return {"replicate", "fully_shard"}.intersection(module.__dict__.get(REGISTRY_KEY, ()))


def managed_by_torch(module: nn.Module) -> bool:
    """Return whether a unit of torch's ``fully_shard`` has the module's parameters."""
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
    """Let torch's composable functions know that a ``fully_shard`` has the parameters.

    ``unit`` are the modules of a unit, and ``owners`` those that register its parameters.
    ``replicate`` on a module around them leaves them alone, torch's own ``fully_shard`` raises.
    """
    for module in dict.fromkeys([*unit, *owners]):
        registry = _Registry(module.__dict__.get(REGISTRY_KEY, {}))
        registry.module = weakref.ref(module)
        module.__dict__[REGISTRY_KEY] = registry
    for module in unit:
        module.__dict__[REGISTRY_KEY]["fully_shard"] = RegistryItem()


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


# torch's own, also after a program has put this package's names in their place.
_fully_shard: Any = fsdp.fully_shard
TORCH_MODULE: type[fsdp.FSDPModule] = fsdp.FSDPModule


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


def averages(group: object, device: torch.device) -> bool:
    """Return whether a process group divides by itself what it sums on a device.

    Of others hp-dtensor's collectives divide what they sum.
    """
    return backend_of(group, device) == "nccl"


# Torch's own objects to communicate by in memory of the process group.
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
