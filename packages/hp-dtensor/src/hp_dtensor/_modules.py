"""Distribute tensors and modules with torch's own functions, closing their gaps."""

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
from ._redistribute import redistribute
from .collectives._c10d import TorchCollectives
from .collectives._interface import Collectives
from .ragged._tensor import RaggedTensor, find_spec

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
    """Return a leaf of which each rank holds its part of the values of ``tensor``.

    One scatter or broadcast for each axis; a broadcast overwrites ``tensor`` on the other ranks,
    and the result may share its memory, as torch's does.

    Args:
        tensor: The whole tensor, of global shape; one that is distributed so already is returned.
        mesh: Where it goes.
        placements: One for each axis, ours or torch's; replicated on all if None. With a
            `RaggedShard` the result is a `RaggedTensor`.
        src_data_rank: The coordinate on each axis whose values count, whatever other ranks hold.
            With None each rank takes its part of what it holds itself, and nothing is communicated.

    Returns:
        A DTensor or a `RaggedTensor`.

    Raises:
        LayoutError: No tensor, one that operations made, or that is distributed otherwise;
            placements that do not fit; partial values next to strided shards. All errors are
            raised before any communication.
        MeshError: No mesh, or a ``src_data_rank`` that some axis does not have.

    Example:
        >>> distribute_tensor(torch.randn(8, 8), mesh, [Shard(0), Replicate()])
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
        held = to_layout(tensor.placements, tuple(tensor.device_mesh.shape), tensor.ndim)
        if tensor.device_mesh == mesh and held == layout:
            return tensor
        raise LayoutError(
            f"the tensor is distributed as {held} on {tensor.device_mesh} already and cannot be "
            f"distributed as {layout} on {mesh}; use redistribute"
        )
    if not tensor.is_leaf:
        raise LayoutError(
            "a tensor that operations made has a history that would be lost; detach() it first, "
            "or use DTensor.from_local inside a computation"
        )
    if src_data_rank is not None and src_data_rank not in range(min(mesh.shape)):
        raise MeshError(
            f"src_data_rank={src_data_rank} is a coordinate on each axis of a mesh of shape "
            f"{tuple(mesh.shape)}; use 0 to {min(mesh.shape) - 1}, or None for each rank's own data"
        )
    if src_data_rank is not None and (axes := _axes_of(mesh)) is not None:
        # torch scatters and broadcasts in the order of a group, which is not that of the mesh.
        tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for group in axes:
            carrier, source = TorchCollectives(), list(group.members)[src_data_rank]
            carrier.broadcast(group.find(), [tensor.detach()], source).wait()
        src_data_rank = None
    if layout.ragged is not None:
        find_spec(mesh, given, tensor.shape)
    else:
        spelled = to_torch(layout)
        if all(_torch.split_factor(placement) is None for placement in spelled):
            return theirs.distribute_tensor(tensor, mesh, spelled, src_data_rank=src_data_rank)
        if layout.has_partial:
            raise LayoutError(
                f"strided shards and partial values, {layout}, cannot be made in one go; leave "
                "Partial out"
            )
    # torch's own way fails for strided shards of few rows, on some ranks only, and has no ragged.
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
    """Return ``module`` with all its parameters and buffers distributed over ``mesh``, in place.

    What ``partition_fn`` leaves is broadcast from coordinate 0 of each axis. A parameter that
    several modules share stays one parameter.

    Args:
        module: What is distributed.
        mesh: Where it goes.
        partition_fn: Called as ``partition_fn(name, submodule, mesh)`` for each submodule; replaces
            what it wants otherwise than replicated with DTensor or `RaggedTensor` parameters.
        input_fn: Runs before the module's forward, as torch's.
        output_fn: Runs after the module's forward, as torch's.

    Raises:
        LayoutError: No module, before any communication; or, once the module is distributed, a
            shared parameter to which ``partition_fn`` gave different layouts.
        MeshError: No mesh.

    Example:
        >>> distribute_module(nn.Linear(8, 8), mesh)
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
        # torch would replicate a parameter that is no DTensor; one that is None it leaves.
        for key, parameter in list(submodule.named_parameters(recurse=False)):
            if isinstance(parameter, RaggedTensor):
                ragged.append((submodule, key, parameter))
                submodule.register_parameter(key, None)

    try:
        theirs.distribute_module(module, mesh, partition, input_fn, output_fn)
    finally:
        for submodule, key, parameter in ragged:
            submodule.register_parameter(key, parameter)
    for places in shared:
        _share(places)
    return module


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh whose axes are those of all ``meshes``, in order; makes no process group.

    Args:
        meshes: Different axes, with names, of one mesh.

    Raises:
        MeshError: No meshes, axes without names, or axes of different meshes.

    Example:
        >>> concatenate_meshes([mesh["dp"], mesh["tp"]])
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
    """Return ``x`` with its partial values reduced, replicated on the axes that held them.

    Other axes stay as they are. The same tensor where nothing is partial. Communicates what
    `redistribute` does, and raises what it raises.

    Args:
        x: A DTensor; anything else raises `LayoutError`.
        collectives: What carries the reductions out; `TorchCollectives` if None.

    Example:
        >>> reduce_partial(loss).to_local()
    """
    if not isinstance(x, DTensor):
        raise LayoutError(f"reduce_partial takes a DTensor, got a {type(x).__name__}")
    spec = _torch.spec_of(x)
    placements = [theirs.Replicate() if p.is_partial() else p for p in spec.placements]
    return redistribute(x, placements, collectives=collectives)


def _axes_of(mesh: DeviceMesh) -> list[AxisGroup] | None:
    """Return the groups of the mesh's axes where its ranks do not ascend on one, else None.

    All ranks answer alike, also those whose own groups have the order of the mesh.
    """
    ascends = [bool((mesh.mesh.diff(dim=axis) > 0).all()) for axis in range(mesh.ndim)]
    if all(ascends) or mesh.get_coordinate() is None:
        return None
    found = [find_group(mesh, (axis,)) for axis in range(mesh.ndim)]
    groups = [group for group in found if group is not None]
    return groups if len(groups) == mesh.ndim else None  # torch says what is wrong with the others


def _check_mesh(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"a mesh is a DeviceMesh, got {mesh!r}; make one with init_device_mesh")


_Place: TypeAlias = tuple[str, nn.Module, str]


def _shared_parameters(module: nn.Module) -> list[list[_Place]]:
    """Return the places of each parameter that several modules hold."""
    places: dict[nn.Parameter, list[_Place]] = {}
    for name, submodule in module.named_modules():
        for key, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((name, submodule, key))
    return [each for each in places.values() if len(each) > 1]


def _share(places: list[_Place]) -> None:
    """Put the first place's parameter in all of them; raise unless they are laid out alike."""
    (first_name, first, first_key), *others = places
    parameter = first.get_parameter(first_key)
    for name, submodule, key in others:
        other = submodule.get_parameter(key)
        if _layout_of(other) != _layout_of(parameter):
            raise LayoutError(
                f"{first_name}.{first_key} and {name}.{key} are one parameter, which partition_fn "
                f"placed as {_layout_of(parameter)} and as {_layout_of(other)}; place it alike"
            )
        submodule.register_parameter(key, parameter)


def _layout_of(parameter: nn.Parameter) -> tuple[object, ...]:
    if isinstance(parameter, DTensor | RaggedTensor):
        return parameter.device_mesh, parameter.placements
    return ()
