"""Typed functions that wrap private names of torch.

The private names exist in torch 2.11 to 2.13, unless a docstring says otherwise. `torch_compat`
exports some of these functions to other packages. The private names for collectives are not here,
but in ``collectives/_c10d.py``.
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
"""Suffix of the state dict key for the result of ``nn.Module.get_extra_state``."""

# Names of the methods that torch.distributed.checkpoint calls on distributed tensors, such as
# DTensor. They return the items to write, the chunks to read, and the data of one chunk.
CHECKPOINT_HOOKS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the dims of all given meshes. Creates no process groups.

    Args:
        meshes: Submeshes of one root mesh, without a common dim.

    Returns:
        A mesh with the dims of all ``meshes``, in the given order.

    Raises:
        RuntimeError: The meshes have different root meshes or a common dim.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> concatenate_meshes([mesh["tp"], mesh["dp"]]).mesh_dim_names
        ('tp', 'dp')
    """
    return DeviceMesh._concatenate(meshes)


def local_part(x: DTensor) -> Tensor:
    """Return the local tensor of a DTensor, without autograd history.

    Waits if the local tensor is the result of a collective in flight. The public
    ``DTensor.to_local`` goes through autograd, which takes 4 times the host time.
    """
    local = x._local_tensor
    if type(local) is not Tensor and isinstance(local, AsyncCollectiveTensor):
        return local.wait()
    return local


def writes_into(*tensors: Tensor | None) -> int:
    """Return the sum of the autograd version counters of tensors.

    torch increments the version counter of a tensor at each in-place write. Pass a DTensor together
    with its local tensor: a write to the DTensor increments only the counter of the DTensor, and a
    write to the local tensor only the counter of the local tensor.

    Args:
        tensors: Tensors of any type. None and inference tensors add 0 to the sum. Inference tensors
            have no version counter.

    Returns:
        The sum. If it differs from an earlier sum of the same tensors, one of them was written to.

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
    """Return torch's ``DTensorSpec`` of a DTensor.

    The spec has the mesh, the placements, the global shape, the strides and the dtype. Raises
    `LayoutError` if ``x`` is not a DTensor.
    """
    try:  # Unlike isinstance, this takes no time if x is a DTensor.
        return cast(DTensor, x)._spec
    except AttributeError:
        raise LayoutError(
            f"a redistribution starts from a DTensor, got an object of type {type(x).__name__}; "
            "make one with torch.distributed.tensor.distribute_tensor, or plan between layouts "
            "with explain(Layout(...), ..., shape=...)"
        ) from None


def spec_parts(x: object) -> tuple[Spec, DeviceMesh, Any, int]:
    """Return ``(spec, mesh, shard_order, count)`` of a DTensor.

    ``spec`` is torch's ``DTensorSpec``. ``shard_order`` is the result of `shard_order_of`, and
    ``count`` the result of `group_count`. Raises `LayoutError` if ``x`` is not a DTensor.
    """
    spec = spec_of(x)
    mesh = spec.mesh
    # The count is computed here, because the calls in `group_count` take longer.
    # ``DeviceMesh._root_mesh`` (2.11 to 2.13) is None for a root mesh.
    root = (mesh._root_mesh or mesh).__dict__
    count = len(root["_flatten_mapping"]) + len(root.get("_alias_groups", ()))
    return spec, mesh, getattr(spec, "shard_order", None), count


def shard_order_of(spec: Spec) -> Any:
    """Return ``DTensorSpec.shard_order``, or None if the spec does not have this attribute.

    The shard order has one entry ``(tensor_dim, mesh_dims)`` for each sharded tensor dim. The dim
    is split over ``mesh_dims`` in this order.
    """
    return getattr(spec, "shard_order", None)


def order_of(order: Any) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """Convert torch's shard order to tuples, or to None if it is the default order.

    In the default order, every tensor dim is split over its mesh dims in ascending order.

    Args:
        order: ``DTensorSpec.shard_order``, or None for the default order. See `shard_order_of`.

    Returns:
        A tuple of ``(tensor_dim, mesh_dims)`` tuples, one for each sharded tensor dim. None if
        ``order`` is None or is the default order.
    """
    if order is None or all(list(axes) == sorted(axes) for _, axes in order):
        return None
    return tuple((dim, tuple(axes)) for dim, axes in order)


def spec_for(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> Spec:
    """Return torch's ``DTensorSpec`` for a DTensor with these properties.

    ``shape`` is the global shape. The strides are contiguous.
    """
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def dtensor_maker(spec: Spec) -> Callable[[Tensor, Any, DeviceMesh | None], DTensor]:
    """Return a function ``make(local, x, mesh)`` that returns ``local`` wrapped as a DTensor.

    The DTensor has the placements, shape, strides and dtype of ``spec``. Its mesh is ``mesh``, or
    ``x.device_mesh`` if ``mesh`` is None. This mesh has to be equal to ``spec.mesh``. The function
    keeps no reference to ``spec.mesh``, so the mesh can be garbage-collected. Autograd does not
    record the call. The public ``DTensor.from_local`` goes through autograd, which takes 5 times
    the host time.
    """
    # The constructor of DTensorSpec computes a shard order and a hash (2.11 to 2.13). Copying the
    # fields of a finished spec takes a fiftieth of the constructor's time.
    hash(spec)
    fields = {name: value for name, value in vars(spec).items() if name != "mesh"}

    def make(local: Tensor, x: Any, mesh: DeviceMesh | None) -> DTensor:
        made = object.__new__(DTensorSpec)
        vars(made).update(fields, mesh=x._spec.mesh if mesh is None else mesh)
        # ``DTensor.__init__`` is not called. It only disables the compiler, which takes longer than
        # the rest of this function.
        return DTensor.__new__(DTensor, local, made, requires_grad=False)

    return make


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return torch's ``_StridedShard`` placement, which has no public name.

    DTensor uses this placement on a mesh dim if later mesh dims split the same tensor dim first.
    For example, tensor parallelism on the second mesh dim, with 2 ranks, first splits tensor dim 0.
    FSDP on the first mesh dim then splits the same dim. The placements are
    ``[_StridedShard(0, split_factor=2), Shard(0)]``.

    Args:
        dim: Tensor dim that is split.
        split_factor: Number of parts into which the later mesh dims split ``dim`` first.

    Returns:
        The placement.

    Examples:
        >>> strided_shard(0, split_factor=2).dim
        0
    """
    return _StridedShard(dim, split_factor=split_factor)


def split_factor(placement: Placement) -> int | None:
    """Return the split factor of a ``_StridedShard``, or None for any other placement.

    The split factor is the number of parts into which later mesh dims split the tensor dim first.
    """
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def flattened_meshes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """Return all meshes that ``DeviceMesh._flatten`` created from dims of the root of ``mesh``."""
    return list(mesh._get_root_mesh()._flatten_mapping.values())


def alias_groups(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of process groups that other packages registered with the root of ``mesh``.

    Each group spans several dims of the root mesh. The names come from the attribute
    ``_alias_groups`` of the root mesh: a dict from the name of a flattened dim to the name of its
    process group. hp-mesh sets this attribute; torch does not have it. If the attribute does not
    exist, the result is empty.
    """
    names: dict[str, str] = vars(mesh._get_root_mesh()).get("_alias_groups", {})
    return tuple(names.values())


def group_count(mesh: DeviceMesh) -> int:
    """Return the number of `flattened_meshes` plus the number of `alias_groups` of a mesh.

    The number is a part of cache keys of plans. If it has changed, the mesh has a new process
    group, and a plan that uses this group may be cheaper.
    """
    return len(flattened_meshes(mesh)) + len(alias_groups(mesh))


def foreach_norms(tensors: list[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """Return the norm of each tensor, as a list of scalar tensors of dtype ``dtype``.

    ``order`` is the order of the norm, such as 2. On CUDA, one kernel handles many tensors.
    """
    return list(torch._foreach_norm(tensors, order, dtype))


def foreach_scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by the scalar tensor ``factor`` in place.

    On CUDA, one kernel handles many tensors.
    """
    torch._foreach_mul_(tensors, factor)


def disabled_torch_function() -> Any:
    """Return a value for the class attribute ``__torch_function__`` of a tensor subclass.

    The value disables ``__torch_function__``, so that only ``__torch_dispatch__`` handles
    operators. ``DTensor`` uses the same value.
    """
    return torch._C._disabled_torch_function_impl


# Arguments: class, shape, dtype, device, layout. `wrapper_tensor` takes one more call.
make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass


def wrapper_tensor(cls: type[T], shape: Sequence[int], like: Tensor) -> T:
    """Return a tensor of class ``cls`` without memory, with the global shape ``shape``.

    It has the dtype, device and ``torch.layout`` of ``like``.
    """
    made: T = make_wrapper(
        cls, tuple(shape), dtype=like.dtype, device=like.device, layout=like.layout
    )
    return made


def operator_name(op: Any) -> tuple[str, str]:
    """Return the namespace and the name of an operator, such as ``("aten", "add_")``.

    The name of the overload, such as ``Tensor``, is left out.
    """
    namespace, _, name = op.overloadpacket._qualified_op_name.partition("::")
    return namespace, name


def written_arguments(op: Any) -> tuple[int | str, ...]:
    """Return the arguments that an operator modifies in place.

    An argument is returned as its position, or as its name if it is keyword-only.
    """
    return tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def argument_place(op: Any, name: str) -> int:
    """Return the position of the argument ``name`` in the schema of an operator.

    Raises ValueError if the operator has no such argument.
    """
    return [argument.name for argument in op._schema.arguments].index(name)


Wrap: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def wrap_full_states(gather: Wrap, scatter: Wrap) -> None:
    """Replace the functions with which torch gathers and shards the tensors of a full state dict.

    ``torch.distributed.checkpoint.state_dict`` calls these functions for
    ``StateDictOptions(full_state_dict=True)``. The functions handle only ``DTensor`` and
    ``ShardedTensor``, and there is no public hook for other tensor classes.

    Args:
        gather: Called with torch's ``_gather_state_dict``. Returns the replacement.
        scatter: Called with torch's ``_distribute_state_dict`` and then with its
            ``_broadcast_state_dict``. Returns the replacement.
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
    """Return the name of a process group. `resolve_group` returns the group for this name."""
    return str(group.group_name)


# Returns the process group with a given name. torch's functional collectives look up their groups
# with this function, which has no public name.
resolve_group: Callable[[str], ProcessGroup] = vars(distributed_c10d)["_resolve_process_group"]


def registered_group(name: str) -> ProcessGroup | None:
    """Return the process group with the given name, or None if this process has no such group."""
    known = distributed_c10d._world.pg_names.values()
    return resolve_group(name) if name in known else None


def group_identity(group: object) -> str:
    """Return a text that identifies a process group and is equal on all of its ranks.

    The text is the name of the group. For a group from ``split_group``, it is the description of
    the group instead, because the name is a hash that can differ between ranks. The description
    contains a counter of the splits of the parent group.

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
    """Return the backend object of a process group for a device, such as a ``ProcessGroupNCCL``.

    Returns None if the group has no backend for the device. Simulated groups and process groups
    written in Python have no backend.
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
    ``"cpu:gloo,cuda:nccl"``. This function returns the name of the single backend.

    Args:
        group: Process group, or any other object.
        device: Device of the tensors that are communicated.

    Returns:
        A name such as ``"nccl"``. It is empty if the group has no backend for the device. Process
        groups written in Python and simulated groups have no backends.

    Examples:
        On 2 ranks:

        >>> backend_of(torch.distributed.group.WORLD, torch.device("cpu"))
        'gloo'
    """
    backend = backend_object(group, device)
    return "" if backend is None else str(backend.name())


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout of a process group.

    A group can have several backends. This is the timeout of the first backend that has a timeout.
    If there is none, it is torch's default timeout. ``ProcessGroup`` has a public ``set_timeout``,
    but no public getter.
    """
    c10d: Any = distributed_c10d
    for device in cast(Any, group)._device_types:
        options = cast(Any, group)._get_backend(device).options
        if (timeout := getattr(options, "_timeout", None)) is not None:
            return cast(timedelta, timeout)
    return cast(timedelta, c10d._get_default_timeout(c10d.Backend(dist.get_backend(group))))


def counts_messages(group: object, device: torch.device) -> bool:
    """Return whether all ranks of a group have to send and receive the same number of messages.

    This is True for gloo groups that were created with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``. If the
    ranks of such a group have made different numbers of point to point calls, the next collective
    raises an error. The result is the same on all ranks.
    """
    # With DETAIL, torch wraps the backend in _ProcessGroupWrapper on all ranks.
    wrapper = getattr(distributed_c10d, "_ProcessGroupWrapper", None)
    return wrapper is not None and isinstance(backend_object(group, device), wrapper)


def is_plain_gloo(group: object, device: torch.device) -> bool:
    """Return whether collectives on a device go to gloo directly.

    The result is False for classes that derive from ``ProcessGroup``, because they may override
    collectives. It is also False with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, because torch then
    compares each call between the ranks. The result is the same on all ranks.
    """
    if type(group) is not ProcessGroup or backend_of(group, device) != "gloo":
        return False
    return not counts_messages(group, device)


def makes_groups_alone() -> bool:
    """Return whether the ranks of a new process group can create it without the other ranks.

    The result is False in these cases:

    - There is no default group.
    - ``init_process_group`` was called with ``device_id``. New groups are then split from the
      communicator of the default group, which requires all ranks.
    - ``torch.distributed.config.use_torchcomms`` (torch 2.13) is True, for the same reason.
    """
    world = dist.group.WORLD
    config = getattr(dist, "config", None)
    splits = world is None or world.bound_device_id is not None
    return not splits and not getattr(config, "use_torchcomms", False)


def make_group(ranks: tuple[int, ...], name: str) -> ProcessGroup:
    """Create a process group with a given name. Only the ranks of the group call this function.

    The group has the timeout of the default group. Its ranks wait for each other for at most this
    time. After an error, the ranks can call the function again with the same name.

    Args:
        ranks: Global ranks of the group, in ascending order.
        name: Name of the group, equal on all of its ranks.

    Raises:
        RuntimeError: The group could not be created, for example because another rank of the group
            did not call this function before the timeout.
    """
    # The public ``new_group(use_local_synchronization=True)`` computes the name of the group from
    # the number of groups that the rank has created before. Ranks with different numbers of groups
    # would wait for each other forever.
    c10d: Any = distributed_c10d
    backend, store = c10d._world.pg_map[dist.group.WORLD]
    # A failed attempt leaves the addresses of the ranks in the store, so the next attempt uses
    # another key prefix.
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
    """Return the number of attempts to create the group ``name`` that have failed.

    The store has one key for each failed attempt.
    """
    try:
        return next(n for n in count() if not store.check([f"{name}/failed/{n}"]))
    except RuntimeError:  # torch's fake store does not implement `check`
        return 0


def inside_backward() -> bool:
    """Return whether the calling code runs inside a backward pass of autograd.

    Returns:
        True in autograd functions and hooks while a backward pass calls them; otherwise False.

    Examples:
        >>> inside_backward()
        False
    """
    return torch._C._current_graph_task_id() != -1


def backward_keeps_graph() -> bool:
    """Return whether the running backward pass retains the graph and its saved tensors.

    If the result is False, the backward of an autograd function may overwrite its saved tensors.
    Call this function only if `inside_backward` returns True.

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

    Use this function if the backward does not support second derivatives. torch's
    ``once_differentiable`` is not enough: in some cases it raises no error, and the second
    derivatives lack terms. One case is an incoming gradient that does not require grad. Another one
    is a second backward with respect to some of the inputs only.

    Args:
        backward: The static method ``backward`` of a ``torch.autograd.Function``.
        error: Class of the error.
        message: Message of the error.

    Returns:
        The wrapped function. It has the same arguments as ``backward``.

    Examples:
        >>> def backward(ctx, grad):
        ...     return grad
        >>> first_order(backward, RuntimeError, "no second derivatives")(None, torch.ones(1))
        Traceback (most recent call last):
        RuntimeError: no second derivatives
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():  # True in backward only for create_graph=True
            raise error(message)
        return backward(ctx, *grads)

    return cast(F, checked)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast converts operands on a device.

    Args:
        device: Device of the operands. Only the type of the device matters.

    Returns:
        The dtype, or None if autocast is disabled or is not supported for the type of device.

    Examples:
        >>> with torch.autocast("cpu"):
        ...     autocast_dtype(torch.device("cpu"))
        torch.bfloat16
    """
    kind = device.type
    # Dynamo cannot trace is_autocast_available in torch 2.11. Only the type "meta" has no autocast.
    compiling = torch.compiler.is_compiling()
    exists = kind != "meta" if compiling else torch.amp.is_autocast_available(kind)
    if not exists or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that disables autocast for the type of a device.

    Args:
        device: Device of the tensors in the ``with`` block. Only the type of the device matters.

    Returns:
        A context manager. It is a no-op if autocast is disabled already.

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

    The public ``torch.compiler.disable`` imports the compiler immediately, which takes long. With
    this function, the compiler is imported when the result is first called.

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
    """Return the children of a container, if its class is registered with ``torch.utils._pytree``.

    Lists, tuples and dicts are registered. Libraries register the classes of their outputs.

    Args:
        value: Any object.

    Returns:
        A pair: the list of children, and a function that builds a container of the same class from
        a list of new children. Returns None if the class of ``value`` is not registered.

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
    """Return a context manager that disables all ``TorchDispatchMode`` objects.

    While ``torch.compile`` traces a function, a mode makes all new tensors fake. Tensors that are
    created in the ``with`` block are real.
    """
    return _disable_current_modes()


def opaque_op(
    name: str, run: Callable[[Tensor, str], Tensor], fake: Callable[[Tensor, str], Tensor]
) -> Callable[[Tensor, str], Tensor]:
    """Register ``run`` as a custom operator, which compiled graphs neither trace nor reorder.

    These operators keep their order in a graph, because all ranks have to communicate in the same
    order.

    Args:
        name: Name of the operator with its namespace, such as ``"hp_dtensor::execute_plan"``.
        run: Implementation. Called with a tensor and a text; returns a new tensor.
        fake: Called with the same arguments while a graph is traced. Returns an empty tensor with
            the shape, dtype and device of the result.

    Returns:
        The operator, which is called like ``run``.
    """
    from torch._library.effects import EffectType  # Imported here: only compiled code needs it.

    op = torch.library.custom_op(name, run, mutates_args=())
    op.register_fake(fake)
    op.register_effect(EffectType.ORDERED)
    return cast(Callable[[Tensor, str], Tensor], op)
