"""Private names of torch, each wrapped once in a typed function.

The names exist in torch 2.11 to 2.13, unless a docstring says otherwise. The names for collectives
are in ``collectives/_c10d.py``. `torch_compat` exports some of these functions to other packages.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import wraps
from itertools import count
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from ._errors import LayoutError

Spec: TypeAlias = DTensorSpec
T = TypeVar("T", bound=Tensor)
F = TypeVar("F", bound=Callable[..., Any])

EXTRA_STATE_KEY: str = _EXTRA_STATE_KEY_SUFFIX
"""Last part of the state dict key under which ``nn.Module.get_extra_state`` is saved."""

# Hooks that torch.distributed.checkpoint calls on tensors that it saves and loads in pieces. They
# return the items to write, the chunks to read, and the data of one chunk. DTensor has them too.
CHECKPOINT_HOOKS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Join submeshes of one root mesh into one mesh, with ``DeviceMesh._concatenate``."""
    return DeviceMesh._concatenate(meshes)


def local_part(x: DTensor) -> Tensor:
    """Return the local tensor of a DTensor, without autograd. Waits for a pending collective.

    The public ``DTensor.to_local`` goes through autograd, which takes 4 times the host time.
    """
    local = x._local_tensor
    if type(local) is not Tensor and isinstance(local, AsyncCollectiveTensor):
        return local.wait()
    return local


def writes_into(*tensors: Tensor | None) -> int:
    """Return how often tensors were modified in place, as a sum over the tensors.

    Pass a DTensor together with its local tensor: torch counts a write through the DTensor only in
    the DTensor, and a write to the local tensor only there.

    Args:
        tensors: Tensors of any type. None counts as 0. Inference tensors count as 0, because torch
            does not count writes into them.

    Returns:
        The sum of the version counters. Compare it with an earlier sum of the same tensors.

    Examples:
        >>> x = torch.zeros(2)
        >>> before = writes_into(x)
        >>> writes_into(x.zero_()) - before
        1
    """
    total = 0
    for x in tensors:
        if x is not None and not x.is_inference():
            total += x._version
    return total


def spec_of(x: object) -> Spec:
    """Return the spec of a DTensor: mesh, placements, global shape, strides and dtype.

    Raises `LayoutError` if ``x`` is not a DTensor. Catching the error costs nothing for a DTensor.
    """
    try:
        return cast(DTensor, x)._spec
    except AttributeError:
        raise LayoutError(
            f"a redistribution starts from a DTensor, got an object of type {type(x).__name__}; "
            "make one with torch.distributed.tensor.distribute_tensor, or plan between layouts "
            "with explain(Layout(...), ..., shape=...)"
        ) from None


def spec_parts(x: object) -> tuple[Spec, DeviceMesh, Any, int]:
    """Return a DTensor's spec, its mesh, its shard order, and `group_count` of the mesh."""
    spec = spec_of(x)
    mesh = spec.mesh
    # ``DeviceMesh._root_mesh`` (2.11 to 2.13) is None for a root mesh.
    root = (mesh._root_mesh or mesh).__dict__
    count = len(root["_flatten_mapping"]) + len(root.get("_alias_groups", ()))
    return spec, mesh, getattr(spec, "shard_order", None), count


def shard_order_of(spec: Spec) -> Any:
    """Return ``DTensorSpec.shard_order``, or None if the spec has none."""
    return getattr(spec, "shard_order", None)


def order_of(order: Any) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """Convert a shard order of torch to tuples ``(tensor dim, mesh dims)``.

    Returns None if every tensor dim is split over its mesh dims from the outermost to the innermost
    one. Placements alone describe this order. Placements with `strided_shard` describe the others.
    """
    if order is None or all(list(axes) == sorted(axes) for _, axes in order):
        return None
    return tuple((dim, tuple(axes)) for dim, axes in order)


def spec_for(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> Spec:
    """Return the spec of a DTensor with contiguous strides and the given global shape."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def dtensor_maker(spec: Spec) -> Callable[[Tensor, Any, DeviceMesh | None], DTensor]:
    """Return a function ``make(local, x, mesh)`` that wraps local tensors as DTensors.

    The DTensors have ``spec``, but are on ``mesh``, or on the mesh of ``x`` if ``mesh`` is None.
    Both have to be equal to the mesh of ``spec``, to which the function keeps no reference.
    Autograd records nothing.

    ``DTensor.from_local`` is the public way; it goes through autograd at 5 times the host time.
    ``DTensorSpec`` computes a shard order and a hash (2.11 to 2.13); copying its fields takes a
    fiftieth of the time of its constructor.
    """
    hash(spec)
    fields = {name: value for name, value in vars(spec).items() if name != "mesh"}

    def make(local: Tensor, x: Any, mesh: DeviceMesh | None) -> DTensor:
        made = object.__new__(DTensorSpec)
        vars(made).update(fields, mesh=x._spec.mesh if mesh is None else mesh)
        # ``DTensor.__init__`` only excludes the compiler, which takes longer than all else here.
        return DTensor.__new__(DTensor, local, made, requires_grad=False)

    return make


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return torch's placement for a shard whose dim was split over later mesh dims before.

    DTensor uses ``_StridedShard`` if a tensor dim is split over several mesh dims, and not from the
    outermost to the innermost one. Torch has no public name for it.

    Args:
        dim: Tensor dim that is split.
        split_factor: Number of parts into which later mesh dims have split the dim before.

    Returns:
        The placement.

    Examples:
        >>> strided_shard(0, split_factor=2).dim
        0
    """
    return _StridedShard(dim, split_factor=split_factor)


def split_factor(placement: Placement) -> int | None:
    """Return the split factor of a ``_StridedShard``, or None for any other placement."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def flattened_meshes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """Return the meshes that were flattened from several dims of the root mesh of ``mesh``."""
    return list(mesh._get_root_mesh()._flatten_mapping.values())


def alias_groups(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of process groups over several dims that are registered with the root mesh.

    The root mesh stores them in the dict ``_alias_groups``, from an alias to the name of a process
    group. torch does not have this attribute. hp-mesh sets it on its meshes. Other code that
    creates such groups may set it too.
    """
    names: dict[str, str] = vars(mesh._get_root_mesh()).get("_alias_groups", {})
    return tuple(names.values())


def group_count(mesh: DeviceMesh) -> int:
    """Return the number of groups of `flattened_meshes` and `alias_groups`."""
    return len(flattened_meshes(mesh)) + len(alias_groups(mesh))


def foreach_norms(tensors: list[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """Return the norm of each tensor. CUDA computes all norms in one kernel."""
    return list(torch._foreach_norm(tensors, order, dtype))


def foreach_scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by ``factor`` in place. CUDA uses one kernel for all tensors."""
    torch._foreach_mul_(tensors, factor)


def disabled_torch_function() -> Any:
    """Return the ``__torch_function__`` for a tensor subclass that implements only operators.

    ``DTensor`` uses the same function.
    """
    return torch._C._disabled_torch_function_impl


def wrapper_tensor(cls: type[T], shape: Sequence[int], like: Tensor) -> T:
    """Return a tensor of class ``cls`` without storage, with the dtype and device of ``like``."""
    return Tensor._make_wrapper_subclass(
        cls, tuple(shape), dtype=like.dtype, device=like.device, layout=like.layout
    )


def operator_name(op: Any) -> tuple[str, str]:
    """Return the namespace and the name of an operator, without the name of the overload."""
    namespace, _, name = op.overloadpacket._qualified_op_name.partition("::")
    return namespace, name


def written_arguments(op: Any) -> tuple[int | str, ...]:
    """Return the arguments that an operator modifies: positions, or names if keyword-only."""
    return tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def argument_place(op: Any, name: str) -> int:
    """Return the position of an argument of an operator."""
    return [argument.name for argument in op._schema.arguments].index(name)


Wrap: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def wrap_full_states(gather: Wrap, scatter: Wrap) -> None:
    """Wrap the functions of torch that gather and shard the tensors of a full state dict.

    ``torch.distributed.checkpoint.state_dict`` uses them for
    ``StateDictOptions(full_state_dict=True)``. They handle only ``DTensor`` and ``ShardedTensor``,
    and there is no public hook for other tensor classes.

    Args:
        gather: Returns a replacement of the function that gathers a state dict.
        scatter: Returns a replacement of each of the two functions that shard a full state dict.
    """
    from torch.distributed.checkpoint import state_dict

    names = vars(state_dict)
    for name, wrap in (
        ("_gather_state_dict", gather),
        ("_distribute_state_dict", scatter),
        ("_broadcast_state_dict", scatter),
    ):
        names[name] = wrap(names[name])


def group_name(group: Any) -> str:
    """Return the name of a process group, for `resolve_group`."""
    return str(group.group_name)


# Returns the process group with a name. Functional collectives find their groups in this way. Seen
# in torch 2.11 to 2.13; there is no public name.
resolve_group: Callable[[str], ProcessGroup] = vars(distributed_c10d)["_resolve_process_group"]


def registered_group(name: str) -> ProcessGroup | None:
    """Return the process group with a name, or None if no such group exists."""
    known = distributed_c10d._world.pg_names.values()
    return resolve_group(name) if name in known else None


def group_identity(group: object) -> str:
    """Return a text that distinguishes a process group from others, and is equal on its ranks.

    This is the name of the group, with one exception. ``split_group`` computes the name as a hash
    that can differ between ranks. The result is then the description of the group, in which torch
    counts the splits of the parent group.

    Args:
        group: Process group, or any other object.

    Returns:
        The text. It is empty for an object that is not a ``ProcessGroup``.

    Examples:
        On 2 ranks:

        >>> group_identity(torch.distributed.group.WORLD)
        '0'
    """
    if not isinstance(group, ProcessGroup):
        return ""
    name = str(group.group_name)
    return str(group.group_desc) if re.fullmatch("[0-9a-f]{40}", name) else name


def default_store() -> Any:
    """Return the key-value store of the default process group.

    Returns:
        The store.

    Examples:
        On 2 ranks:

        >>> default_store().set("hp_dtensor/example", "1")
        >>> default_store().get("hp_dtensor/example")
        b'1'
    """
    return distributed_c10d._get_default_store()


def backend_object(group: object, device: torch.device) -> Any:
    """Return the backend of a process group for a device, or None if there is none.

    Simulated groups and process groups written in Python have no backend.
    """
    if isinstance(group, ProcessGroup):
        try:
            return group._get_backend(device)
        except RuntimeError:
            pass
    return None


def backend_of(group: object, device: torch.device) -> str:
    """Return the name of the backend that a process group uses for a device.

    ``torch.distributed.get_backend`` returns the name with which the group was created, such as
    ``"cpu:gloo,cuda:nccl"``. This function asks the backend itself.

    Args:
        group: Process group, or any other object.
        device: Device of the tensors that are communicated.

    Returns:
        A name such as ``"nccl"``. It is empty if the group has no backend for the device. Process
        groups written in Python and simulated groups have none.

    Examples:
        On 2 ranks:

        >>> backend_of(torch.distributed.group.WORLD, torch.device("cpu"))
        'gloo'
    """
    backend = backend_object(group, device)
    return "" if backend is None else str(backend.name())


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout of a process group, or torch's default if no backend has a timeout.

    ``ProcessGroup`` has a public ``set_timeout``, but no getter.
    """
    c10d: Any = distributed_c10d
    for device in cast(Any, group)._device_types:
        options = cast(Any, group)._get_backend(device).options
        if (timeout := getattr(options, "_timeout", None)) is not None:
            return cast(timedelta, timeout)
    return cast(timedelta, c10d._get_default_timeout(c10d.Backend(dist.get_backend(group))))


def counts_messages(group: object, device: torch.device) -> bool:
    """Return whether a group requires that all ranks send and receive equally many messages.

    Gloo groups created with ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` do. If the numbers differ, their
    next collective raises an error. On all ranks they are wrapped in ``_ProcessGroupWrapper``.
    """
    wrapper = getattr(distributed_c10d, "_ProcessGroupWrapper", None)
    return wrapper is not None and isinstance(backend_object(group, device), wrapper)


def makes_groups_alone() -> bool:
    """Return whether the members of a new group can create it without the other ranks.

    This is False if new groups are split from the communicator of the default group: NCCL was
    initialized eagerly, or ``torch.distributed.config.use_torchcomms`` (torch 2.13) is True. It is
    also False without a default group.
    """
    world = dist.group.WORLD
    config = getattr(dist, "config", None)
    splits = world is None or world.bound_device_id is not None
    return not splits and not getattr(config, "use_torchcomms", False)


def make_group(ranks: tuple[int, ...], name: str) -> ProcessGroup:
    """Create a process group with a given name. Only its members call this function.

    The group has the timeout of the default group. Members wait for each other for at most this
    time. A failed attempt leaves the addresses of its members in the store, so the next attempt
    uses another prefix.

    The public ``new_group(use_local_synchronization=True)`` is not used, because it computes the
    name from the number of groups of a rank. Ranks with different numbers would wait for each other
    forever.

    Args:
        ranks: Global ranks of the members, ascending.
        name: Name of the group, equal on all members.
    """
    c10d: Any = distributed_c10d
    backend, store = c10d._world.pg_map[dist.group.WORLD]
    attempt = _next_attempt(store, name)
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            c10d.Backend(backend),
            c10d.PrefixStore(f"attempt/{attempt}", store),
            group_name=name,
            timeout=timeout_of(c10d._get_default_group()),
            group_desc="hp_dtensor transfer",
        )
    except RuntimeError:
        store.set(f"{name}/failed/{attempt}", "")
        raise
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return cast(ProcessGroup, group)


def _next_attempt(store: Any, name: str) -> int:
    """Return the number of failed attempts to create a group."""
    try:
        return next(n for n in count() if not store.check([f"{name}/failed/{n}"]))
    except RuntimeError:  # the store of fake groups has no methods, and no addresses
        return 0


def inside_backward() -> bool:
    """Return whether this thread runs a backward pass of autograd.

    Returns:
        True inside autograd functions and hooks that a backward pass calls.

    Examples:
        >>> inside_backward()
        False
    """
    return torch._C._current_graph_task_id() != -1


def backward_keeps_graph() -> bool:
    """Return whether the running backward pass retains the graph and its saved tensors.

    If it does not, a backward function may overwrite the tensors that were saved for it. Call this
    function only if `inside_backward` is True.

    Returns:
        True if ``retain_graph`` or ``create_graph`` is True.

    Examples:
        >>> x = torch.ones((), requires_grad=True)
        >>> _ = x.register_hook(lambda grad: print(backward_keeps_graph()))
        >>> x.backward()
        False
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def first_order(backward: F, error: type[Exception], message: str) -> F:
    """Make the backward of an autograd function raise an error if ``create_graph`` is True.

    torch's ``once_differentiable`` instead raises the error when the gradients are differentiated.
    It raises nothing if the second backward differentiates only some of the inputs, or if the
    incoming gradient does not require grad. The second derivatives then lack terms.

    Args:
        backward: The static method ``backward`` of a ``torch.autograd.Function``.
        error: Class of the error.
        message: Message of the error.

    Returns:
        A function with the arguments of ``backward``.

    Examples:
        >>> def backward(ctx, grad):
        ...     return grad
        >>> first_order(backward, RuntimeError, "no second derivatives")(None, torch.ones(1))
        Traceback (most recent call last):
        RuntimeError: no second derivatives
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():  # autograd enables it in backward only for create_graph=True
            raise error(message)
        return backward(ctx, *grads)

    return cast(F, checked)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast converts operands on a type of device.

    Args:
        device: Device of the operands.

    Returns:
        The dtype, or None if autocast is off or does not exist for the device.

    Examples:
        >>> with torch.autocast("cpu"):
        ...     autocast_dtype(torch.device("cpu"))
        torch.bfloat16
    """
    kind = device.type
    # Dynamo cannot trace is_autocast_available in torch 2.11. Only meta has no autocast.
    compiling = torch.compiler.is_compiling()
    exists = kind != "meta" if compiling else torch.amp.is_autocast_available(kind)
    if not exists or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that disables autocast for a type of device.

    Args:
        device: Device of the tensors in the ``with`` block.

    Returns:
        A context manager. It is a no-op if autocast is off already.

    Examples:
        >>> with torch.autocast("cpu"), without_autocast(torch.device("cpu")):
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.float32
    """
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


_disable: Callable[[Any], Any] = torch._disable_dynamo  # type: ignore[attr-defined]


def keep_eager(function: F) -> F:
    """Exclude a function, and all functions that it calls, from ``torch.compile``.

    The public ``torch.compiler.disable`` imports the compiler. This function imports it only when
    the result is called, as torch's optimizers do.

    Args:
        function: Any function.

    Returns:
        A function with the same arguments and results.

    Examples:
        >>> def add_one(x):
        ...     return x + 1
        >>> keep_eager(add_one)(torch.ones(1))
        tensor([2.])
    """
    return cast(F, _disable(function))


def pytree_node(value: object) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the children of a container that is registered with pytree.

    Libraries register the classes of their outputs with ``torch.utils._pytree``.

    Args:
        value: Any object.

    Returns:
        A pair: the list of children, and a function that builds an equal container from a list of
        new children. None in place of the pair if the class of ``value`` is not registered.

    Examples:
        >>> children, rebuild = pytree_node({"a": 1, "b": 2})
        >>> rebuild([x + 1 for x in children])
        {'a': 2, 'b': 3}
    """
    node = _pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), lambda new: node.unflatten_fn(new, context)


def no_modes() -> Any:
    """Return a context manager that disables dispatch modes.

    New tensors in the ``with`` block are real, also while a graph is traced with fake tensors.
    """
    return _disable_current_modes()


def opaque_op(
    name: str, run: Callable[[Tensor, str], Tensor], fake: Callable[[Tensor, str], Tensor]
) -> Callable[[Tensor, str], Tensor]:
    """Register ``run`` as a custom operator, which compiled graphs neither trace nor reorder.

    All operators that are registered here keep their order in a graph, because ranks have to
    communicate in the same order. ``EffectType`` has no public name. It is imported here, because
    only compiled code needs it.

    Args:
        name: Name of the operator, with its namespace.
        run: Implementation.
        fake: Returns an empty tensor with the shape, dtype and device of the result.
    """
    from torch._library.effects import EffectType

    op = torch.library.custom_op(name, run, mutates_args=())
    op.register_fake(fake)
    op.register_effect(EffectType.ORDERED)
    return cast(Callable[[Tensor, str], Tensor], op)
