"""Distribute tensors and modules: torch's functions, extended to all placements of this package."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast, overload

import torch.distributed.tensor as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _torch
from ._convert import AnyPlacement, DensePlacement, to_layout, to_torch
from ._errors import LayoutError, MeshError
from ._groups import AxisGroup, find_group
from ._placements import in_tuple
from ._prepare import tensor_spec
from ._redistribute import redistribute
from .collectives._c10d import TorchCollectives
from .collectives._interface import Collectives
from .ragged._spec import find_spec
from .ragged._tensor import RaggedTensor, mesh_and_placements

Partition: TypeAlias = Callable[[str, nn.Module, DeviceMesh], None]
Hook: TypeAlias = Callable[[nn.Module, Any, DeviceMesh], Any]


@overload
def distribute_tensor(
    tensor: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[DensePlacement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor: ...


@overload
def distribute_tensor(
    tensor: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[AnyPlacement],
    *,
    src_data_rank: int | None = 0,
) -> DTensor | RaggedTensor: ...


def distribute_tensor(
    tensor: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[AnyPlacement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor | RaggedTensor:
    """Shard or replicate a whole tensor over a mesh.

    Communicates one scatter or broadcast for each mesh axis. As in torch's `distribute_tensor`, a
    broadcast overwrites ``tensor`` on the receiving ranks, and the result can share memory with
    ``tensor``.

    Args:
        tensor: Leaf tensor with the global shape. A tensor that already has this mesh and these
            placements is returned unchanged.
        mesh: Device mesh of the result.
        placements: One placement for each mesh axis, of this package or of torch. Defaults to
            `Replicate` on all axes. With a `RaggedShard` the result is a `RaggedTensor`.
        src_data_rank: Coordinate, on each axis, of the rank that provides the values. If None, each
            rank uses its own ``tensor`` and keeps its shard, without communication.

    Returns:
        A leaf `DTensor` or `RaggedTensor`.

    Raises:
        LayoutError: ``tensor`` is not a leaf tensor, or it is already distributed in another
            layout. Or the placements are invalid for the mesh or the shape. Or ``placements`` has
            both `Partial` and `StridedShard`. Raised before communication.
        MeshError: ``mesh`` is not a device mesh, or an axis has no coordinate ``src_data_rank``.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (4,))
        >>> x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        >>> x.to_local().shape
        torch.Size([2])
    """
    _check_mesh(mesh)
    if not isinstance(tensor, Tensor):
        raise LayoutError(
            f"only a torch.Tensor can be distributed, got an object of type {type(tensor).__name__}"
        )
    given = in_tuple(placements, mesh.ndim)
    layout = to_layout(given, tuple(mesh.shape), tensor.ndim)
    layout.check_shape(tensor.shape)
    if isinstance(tensor, DTensor | RaggedTensor):
        held = tensor_spec(tensor).layout
        if tensor.device_mesh == mesh and held == layout:
            return tensor
        raise LayoutError(
            f"the tensor is distributed as {held} on {tensor.device_mesh} already and cannot be "
            f"distributed as {layout} on {mesh}; use redistribute"
        )
    if not tensor.is_leaf:
        raise LayoutError(
            "a tensor with autograd history would lose it; detach() it first, or use "
            "DTensor.from_local inside a computation"
        )
    if src_data_rank is not None and src_data_rank not in range(min(mesh.shape)):
        raise MeshError(
            f"src_data_rank={src_data_rank} is a coordinate on each axis of a mesh of shape "
            f"{tuple(mesh.shape)}; use 0 to {min(mesh.shape) - 1}, or None for each rank's own data"
        )
    if src_data_rank is not None and (groups := _groups_out_of_order(mesh)):
        # torch scatters in group order, which differs from mesh order here. So broadcast, and let
        # each rank keep its own shard.
        tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for group in groups:
            axis = group.find()
            source = group.members[src_data_rank]
            TorchCollectives().broadcast(axis, [tensor.detach()], source).wait()
        src_data_rank = None
    if layout.ragged is not None:
        find_spec(mesh, given, tensor.shape)
    else:
        dense = to_torch(layout)
        if all(_torch.split_factor(placement) is None for placement in dense):
            return theirs.distribute_tensor(tensor, mesh, dense, src_data_rank=src_data_rank)
        if layout.has_partial:
            raise LayoutError(
                f"a tensor cannot be distributed with both Partial and StridedShard, {layout}; use "
                "Replicate instead of Partial"
            )
    # torch has no ragged shards, and fails on some ranks for strided shards of few rows. So
    # replicate the tensor, and let each rank keep its own shard.
    everywhere = (theirs.Replicate(),) * mesh.ndim
    whole = theirs.distribute_tensor(tensor.detach(), mesh, everywhere, src_data_rank=src_data_rank)
    part = cast(DTensor | RaggedTensor, redistribute(whole, given))
    leaf = part.detach().requires_grad_(tensor.requires_grad)
    return cast(DTensor | RaggedTensor, leaf)


def distribute_module(
    module: nn.Module,
    mesh: DeviceMesh,
    partition_fn: Partition | None = None,
    input_fn: Hook | None = None,
    output_fn: Hook | None = None,
) -> nn.Module:
    """Distribute all parameters and buffers of a module over a mesh, in place.

    Parameters that ``partition_fn`` does not replace are broadcast from coordinate 0 of each axis.
    A parameter that several modules share stays one parameter.

    Args:
        module: Module to distribute.
        mesh: Device mesh.
        partition_fn: Called as ``partition_fn(name, submodule, mesh)`` for each submodule. It
            replaces parameters by `DTensor` or `RaggedTensor` parameters.
        input_fn: Called as ``input_fn(module, inputs, mesh)`` before the forward of ``module``. A
            result other than None replaces the inputs.
        output_fn: Called as ``output_fn(module, outputs, mesh)`` after the forward of ``module``. A
            result other than None replaces the outputs.

    Returns:
        ``module``.

    Raises:
        LayoutError: ``module`` is not a module; raised before communication. Or ``partition_fn``
            gave different layouts to a parameter that modules share; raised after communication.
        MeshError: ``mesh`` is not a device mesh.

    Examples:
        On 4 ranks:

        >>> layer = distribute_module(nn.Linear(8, 8), init_device_mesh("cpu", (4,)))
        >>> layer.weight.placements
        (Replicate(),)
    """
    _check_mesh(mesh)
    if not isinstance(module, nn.Module):
        raise LayoutError(
            f"distribute_module takes an nn.Module, got an object of type {type(module).__name__}; "
            "use distribute_tensor for a tensor"
        )
    shared = _shared_parameters(module)
    ragged: list[tuple[nn.Module, str, nn.Parameter]] = []

    def partition(name: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        # torch would replicate a RaggedTensor, because it is not a DTensor. torch ignores None.
        for key, parameter in list(submodule.named_parameters(recurse=False)):
            if isinstance(parameter, RaggedTensor):
                ragged.append((submodule, key, parameter))
                submodule.register_parameter(key, None)

    try:
        theirs.distribute_module(module, mesh, partition, input_fn, output_fn)
    finally:
        for submodule, key, parameter in ragged:
            submodule.register_parameter(key, parameter)
    for owners in shared:
        _share_first(owners)
    return module


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Join submeshes of one mesh into a mesh with all their axes. Creates no process groups.

    Args:
        meshes: Submeshes of one mesh, such as ``mesh["dp"]`` and ``mesh["tp"]``. Their axes must
            have names. Two submeshes must not have an axis in common.

    Returns:
        A mesh with the axes of all ``meshes``, in the given order.

    Raises:
        MeshError: ``meshes`` is empty, an axis has no name, two submeshes have an axis in common,
            or they belong to different meshes.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
        >>> concatenate_meshes([mesh["dp"], mesh["tp"]]).mesh_dim_names
        ('dp', 'tp')
    """
    for mesh in meshes:
        _check_mesh(mesh)
    described = ", ".join(str(mesh) for mesh in meshes) or "none"
    if not meshes or any(mesh.mesh_dim_names is None for mesh in meshes):
        raise MeshError(f"meshes with names for their axes can be joined, got {described}")
    try:
        return _torch.concatenate_meshes(list(meshes))
    except RuntimeError as error:
        raise MeshError(
            f"cannot join {described}: {error}; use different axes of one mesh, such as mesh['dp'] "
            "and mesh['tp']"
        ) from error


def reduce_partial(x: DTensor, *, collectives: Collectives | None = None) -> DTensor:
    """Reduce the partial values of a DTensor: change each `Partial` placement to `Replicate`.

    Other placements do not change. Communicates in the same way as `redistribute`.

    Args:
        x: A DTensor.
        collectives: Object that carries out the reductions. Defaults to `TorchCollectives`.

    Returns:
        A DTensor without partial values, with the shard order of ``x``. The result is ``x`` itself
        if ``x`` has no partial values and no gradient is recorded.

    Raises:
        LayoutError: ``x`` is not a DTensor, or `redistribute` cannot reduce its partial values.
        MeshError: A required process group does not exist.

    Examples:
        On 4 ranks:

        >>> from torch.distributed.tensor import DTensor, Partial
        >>> mesh = init_device_mesh("cpu", (4,))
        >>> loss = DTensor.from_local(torch.ones(()), mesh, [Partial()])
        >>> reduce_partial(loss).to_local()
        tensor(4.)
    """
    if not isinstance(x, DTensor):
        raise LayoutError(f"reduce_partial takes a DTensor, got a {type(x).__name__}")
    spec = _torch.spec_of(x)
    placements = [theirs.Replicate() if p.is_partial() else p for p in spec.placements]
    order = _torch.order_of(_torch.shard_order_of(spec))
    return redistribute(x, placements, shard_order=order, collectives=collectives)


def _groups_out_of_order(mesh: DeviceMesh) -> list[AxisGroup]:
    """Return one process group for each mesh axis, if the ranks of the mesh are out of order.

    The ranks are in order if the global ranks increase along every axis. In that case, the result
    is an empty list. The list is also empty if this rank is not in the mesh, or if an axis has no
    process group.
    """
    # The choice depends on the mesh, not on the rank order in the groups. So all ranks make the
    # same calls.
    ascending = all(bool((mesh.mesh.diff(dim=axis) > 0).all()) for axis in range(mesh.ndim))
    if ascending or mesh.get_coordinate() is None:
        return []
    found = [find_group(mesh, (axis,)) for axis in range(mesh.ndim)]
    groups = [group for group in found if group is not None]
    return groups if len(groups) == mesh.ndim else []


def _check_mesh(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"a mesh is a DeviceMesh, got {mesh!r}; make one with init_device_mesh")


_Owner: TypeAlias = tuple[str, nn.Module, str]  # (module name, module, parameter name)


def _shared_parameters(module: nn.Module) -> list[list[_Owner]]:
    """Return one list of owners for each parameter that is registered more than once.

    An owner is a tuple ``(module name, module, parameter name)``.
    """
    owners: dict[nn.Parameter, list[_Owner]] = {}
    for name, submodule in module.named_modules():
        for key, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((name, submodule, key))
    return [each for each in owners.values() if len(each) > 1]


def _share_first(owners: list[_Owner]) -> None:
    """Register the parameter of the first owner with all other owners.

    An owner is a tuple ``(module name, module, parameter name)``. Raises `LayoutError` if the
    parameters of the owners have different layouts.
    """
    (first_name, first, first_key), *others = owners
    parameter = first.get_parameter(first_key)
    layout = mesh_and_placements(parameter)
    for name, submodule, key in others:
        other = mesh_and_placements(submodule.get_parameter(key))
        if other != layout:
            raise LayoutError(
                f"{first_name}.{first_key} and {name}.{key} are one parameter, but partition_fn "
                f"gave it the layouts {layout} and {other}; use equal layouts"
            )
        submodule.register_parameter(key, parameter)
