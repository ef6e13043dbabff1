"""Names of torch that differ between versions or are not public, resolved once.

Those that carry collectives are in ``collectives/_c10d``. ``DTensorSpec``, ``TensorMeta`` and
``_StridedShard`` describe a DTensor from inside; what they are used for, and the public way, stands
at each function. ``AsyncCollectiveTensor`` is what torch's functional collectives return before
they are waited for.
"""

from collections.abc import Callable, Sequence
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
from torch.utils._python_dispatch import _disable_current_modes

from ._errors import LayoutError
from .collectives._c10d import timeout_of

Spec: TypeAlias = DTensorSpec
T = TypeVar("T", bound=Tensor)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Join submeshes of one root into one mesh; ``DeviceMesh._concatenate`` has no public name."""
    return DeviceMesh._concatenate(meshes)


def local_part(x: DTensor) -> Tensor:
    """Return a DTensor's local tensor, complete, without autograd.

    ``DTensor.to_local`` is the public way; it goes through autograd at 4 times the host time.
    """
    local = x._local_tensor
    if type(local) is not Tensor and isinstance(local, AsyncCollectiveTensor):
        return local.wait()
    return local


def writes_into(*tensors: Tensor | None) -> int:
    """Return how often tensors were written into in place, all in all.

    Of a distributed tensor that is the tensor and its part: torch counts in the one it was told of.
    Inference tensors have no count.
    """
    return sum(x._version for x in tensors if x is not None and not x.is_inference())


def spec_of(x: object) -> Spec:
    """Return the ``DTensorSpec`` of a DTensor. Raises `LayoutError` if ``x`` has none."""
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
    """Return ``DTensorSpec.shard_order`` (2.11 to 2.13), None without one; no public name."""
    return getattr(spec, "shard_order", None)


def order_of(order: Any) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """Return what `shard_order_of` gives in plain numbers, None where the placements say it all.

    Placements spell it with `strided_shard`.
    """
    if order is None or all(list(axes) == sorted(axes) for _, axes in order):
        return None
    return tuple((dim, tuple(axes)) for dim, axes in order)


def spec_for(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> Spec:
    """Return the spec of a contiguous tensor of a global shape."""
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
    """Return ``_StridedShard``, torch's spelling of a dim that later axes split first."""
    return _StridedShard(dim, split_factor=split_factor)


def split_factor(placement: Placement) -> int | None:
    """Return the split factor of a ``_StridedShard``, None for any other placement."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def flattened_meshes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """Return the meshes that were flattened from axes of ``mesh``'s root.

    ``DeviceMesh._flatten_mapping`` (2.11 to 2.13); there is no public list of them.
    """
    return list(mesh._get_root_mesh()._flatten_mapping.values())


def alias_groups(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of groups over several axes that the root of ``mesh`` was told of.

    ``_alias_groups`` of a root mesh, ``{alias: name of a process group}``, is no attribute of
    torch's: hp-mesh sets it on its meshes, and so may whoever builds a mesh with groups for
    `resolve_group`. Torch's own DTensor does not see them.
    """
    told: dict[str, str] = vars(mesh._get_root_mesh()).get("_alias_groups", {})
    return tuple(told.values())


def group_count(mesh: DeviceMesh) -> int:
    """Return the number of groups of `flattened_meshes` and `alias_groups`."""
    return len(flattened_meshes(mesh)) + len(alias_groups(mesh))


def foreach_norms(tensors: list[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """Return each tensor's norm, in one launch where the device has a fused kernel.

    ``torch._foreach_norm``; public: ``torch.linalg.vector_norm`` of each.
    """
    return list(torch._foreach_norm(tensors, order, dtype))


def foreach_scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place; ``torch._foreach_mul_``, public: ``Tensor.mul_`` of each."""
    torch._foreach_mul_(tensors, factor)


def disabled_torch_function() -> Any:
    """Return the ``__torch_function__`` of a tensor subclass that handles operators only.

    ``torch._C._disabled_torch_function_impl`` (2.11 to 2.13), as ``DTensor`` uses; no public name.
    """
    return torch._C._disabled_torch_function_impl


def wrapper_tensor(cls: type[T], shape: Sequence[int], like: Tensor) -> T:
    """Return a tensor of ``cls`` with a global shape, the dtype and device of ``like``, no storage.

    ``torch.Tensor._make_wrapper_subclass`` (2.11 to 2.13); torch documents it, but has no public
    name for it.
    """
    return Tensor._make_wrapper_subclass(
        cls, tuple(shape), dtype=like.dtype, device=like.device, layout=like.layout
    )


def operator_name(op: Any) -> tuple[str, str]:
    """Return an operator's namespace and its name without the overload.

    ``OpOverload.overloadpacket`` and ``_qualified_op_name`` (2.11 to 2.13); the public ``name()``
    has the overload behind a dot.
    """
    namespace, _, name = op.overloadpacket._qualified_op_name.partition("::")
    return namespace, name


def written_arguments(op: Any) -> tuple[int | str, ...]:
    """Return which arguments an operator writes to, by place, or by name if they have no place.

    ``OpOverload._schema`` (2.11 to 2.13); no public name.
    """
    return tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def argument_place(op: Any, name: str) -> int:
    """Return the place of an operator's argument, as `written_arguments`."""
    return [argument.name for argument in op._schema.arguments].index(name)


# What torch.distributed.checkpoint calls on objects that it saves and loads in pieces (2.11 to
# 2.13; DTensor has them too): which items to write, which chunks to read, the data of a chunk.
# There is no public protocol for them.
CHECKPOINT_HOOKS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")


Wrap: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def wrap_full_states(gather: Wrap, scatter: Wrap) -> None:
    """Put functions around what makes the tensors of a state dict whole, and what cuts whole ones.

    ``torch.distributed.checkpoint.state_dict`` (2.11 to 2.13) does so for
    ``StateDictOptions(full_state_dict=True)``, with ``_gather_state_dict``, and to load with
    ``_distribute_state_dict`` and ``_broadcast_state_dict``. They know ``DTensor`` and
    ``ShardedTensor`` by type, leave every other tensor as it is, and ask nothing of it. There is no
    public hook.
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
    """Return the name under which torch finds a group; see `resolve_group`."""
    return str(group.group_name)


# Returns the process group with a name. Functional collectives find their groups in this way. Seen
# in torch 2.11 to 2.13; there is no public name.
resolve_group: Callable[[str], ProcessGroup] = vars(distributed_c10d)["_resolve_process_group"]


def registered_group(name: str) -> ProcessGroup | None:
    """Return the group of a name if there is one; ``_world.pg_names`` (2.11 to 2.13)."""
    known = distributed_c10d._world.pg_names.values()
    return resolve_group(name) if name in known else None


def counts_messages(group: Any, device: torch.device) -> bool:
    """Return whether a group counts messages among the calls that its ranks are to make alike.

    Groups that are made under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` do, over gloo: where ranks have
    sent and received different numbers of messages the next collective raises. They are wrapped in
    ``_ProcessGroupWrapper`` (2.11 to 2.13), on all ranks; there is no public predicate.
    """
    wrapper = getattr(distributed_c10d, "_ProcessGroupWrapper", None)
    if wrapper is None or not isinstance(group, ProcessGroup):
        return False
    try:
        return isinstance(cast(Any, group)._get_backend(device), wrapper)
    except RuntimeError:  # a group written in Python has no backend
        return False


def makes_groups_alone() -> bool:
    """Return whether the members of a group can make it without the other ranks.

    Not where new groups are split off the world's communicator: ``ProcessGroup.bound_device_id`` is
    set when NCCL was initialised eagerly; ``torch.distributed.config.use_torchcomms`` (2.13) asks
    for the same. There is no public predicate.
    """
    world = dist.group.WORLD
    config = getattr(dist, "config", None)
    split = world is None or world.bound_device_id is not None
    return not split and not getattr(config, "use_torchcomms", False)


def make_group(ranks: tuple[int, ...], name: str) -> ProcessGroup:
    """Make a process group of ascending ranks under a name; its members call, and no others.

    It has the timeout of the world's group, also for the wait for the other members. A member that
    waited in vain leaves its address in the store: the next attempt looks elsewhere.

    ``_new_process_group_helper`` (2.11 to 2.13). The public way is ``new_group`` with
    ``use_local_synchronization=True``, which names a group after how many groups a rank is in:
    ranks that differ in that would wait for each other for ever.
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
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return cast(ProcessGroup, group)


def _next_attempt(store: Any, name: str) -> int:
    """Return the number of attempts to make a group that failed on some rank."""
    try:
        return next(n for n in count() if not store.check([f"{name}/failed/{n}"]))
    except RuntimeError:  # the store of fake groups has no methods, and no addresses
        return 0


def no_modes() -> Any:
    """Return a context in which tensors are real, also while a graph is traced.

    ``torch.utils._python_dispatch._disable_current_modes`` (seen in 2.13); no public name.
    """
    return _disable_current_modes()


def opaque_op(
    name: str, run: Callable[[Tensor, str], Tensor], fake: Callable[[Tensor, str], Tensor]
) -> Callable[[Tensor, str], Tensor]:
    """Return ``run`` as an operator of a graph, of which the compiler knows what ``fake`` makes.

    Operators of one graph keep their order, as ranks must meet: ``register_effect`` is a public
    method (seen in 2.13), its argument ``torch._library.effects.EffectType`` has no public name;
    it is imported here, for the compiler's sake alone.
    """
    from torch._library.effects import EffectType

    op = torch.library.custom_op(name, run, mutates_args=())
    op.register_fake(fake)
    op.register_effect(EffectType.ORDERED)
    return cast(Callable[[Tensor, str], Tensor], op)
