"""Plan and install: nothing here communicates."""

from collections.abc import Iterable, Sequence
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import Axis, Collectives, TorchCollectives

from ._errors import MeshError, ModuleError, ParameterError, shown
from ._gradients import DataAxes
from ._group import ParameterGroup
from ._parameters import Owner, ShardedParameter, sharded_from
from ._schedule import Schedule
from ._surface import FSDPModule, sharded_class
from ._taken import is_taken, note_taken
from ._torch import parameters_of
from ._unit import UNIT_ATTRIBUTE, Options, Unit, unit_of


@overload
def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = ...,
    *,
    reshard_after_forward: bool | None = ...,
    collectives: Collectives | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    mesh: DeviceMesh | None = ...,
    *,
    reshard_after_forward: bool | None = ...,
    collectives: Collectives | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | None = None,
    collectives: Collectives | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Shard a module's parameters over data-parallel ranks, in place, and return the module.

    The parameters of ``module`` that no earlier call took become DTensors, Shard(0) over the last
    axis of ``mesh`` and, if it has two, replicated over the first. A parameter that already is a
    DTensor of tensor or expert parallelism keeps its placements: its new mesh is ``mesh`` followed
    by its own. Call it on blocks first, on the root last. A list is one unit.

    Forward gathers a unit's parameters with one all-gather per dtype over the shard axis; backward
    gathers them again and reduces the gradients of all parameters, zeros for those that took no
    part, with one reduce-scatter, then one all-reduce over the first of two axes. After backward
    ``parameter.grad`` is laid out like the parameter and is the mean over all ranks of ``mesh``,
    or what `FSDPModule.set_gradient_divide_factor` says. This function communicates nothing.

    Args:
        module: a module with a ``forward``, or a list of such modules.
        mesh: 1-D, or 2-D ``(replicate, shard)``; by default 1-D over the world.
        reshard_after_forward: whether the parameters are given up between forward and backward; by
            default (None) the root and the last unit before its end keep them, the others do not. A
            forward that no backward can follow always ends with all of them given up, so that the
            next one sees what an optimizer did in between.
        collectives: what carries the communication; by default ``torch.distributed``.

    Raises:
        MeshError: not a DeviceMesh, a mesh of more than two axes, without the names that a DTensor
            parameter needs, or overlapping the parameter's own mesh.
        ModuleError: not a module, one without forward, sharded before, or twice in the list.
        ParameterError: a scalar, meta, non-contiguous or elsewhere sharded parameter.
        ShardingError: reshard_after_forward is neither True, False nor None.

    A call that raises leaves the modules as they were.
    """
    options = Options(reshard_after_forward=reshard_after_forward)
    modules = _modules_of(module)
    _check_modules(modules)
    if mesh is None:
        mesh = _world_mesh(modules)
    _check_mesh(mesh)
    if collectives is None:
        collectives = TorchCollectives()
    device = _device(mesh)
    axes = DataAxes(Axis.of(mesh, mesh.ndim - 1), Axis.of(mesh, 0) if mesh.ndim == 2 else None)
    classes = [sharded_class(cast(Any, type(each))) for each in modules]  # mypy: unhashable
    by_dtype: dict[torch.dtype, list[ShardedParameter]] = {}
    for parameter in _free_parameters(modules, mesh):
        original = parameter.original()
        if original is not None:
            by_dtype.setdefault(original.dtype, []).append(parameter)
    groups = [
        ParameterGroup(parameters, axes, collectives, device) for parameters in by_dtype.values()
    ]
    # Nothing is refused from here on: until here the modules are as they came.
    for group in groups:
        for parameter in group.parameters:
            parameter.note_original()
        group.install_sharded()
    note_taken(modules)
    _move_buffers(modules, device)
    unit = Unit(modules, groups, options, Schedule)
    sharded: list[FSDPModule] = []
    for each, own in zip(modules, classes, strict=True):
        each.__dict__[UNIT_ATTRIBUTE] = unit
        each.__class__ = own
        if isinstance(each, FSDPModule):
            sharded.append(each)
    return sharded[0] if isinstance(module, nn.Module) else sharded


def _modules_of(module: object) -> list[nn.Module]:
    legal = "legal are an nn.Module and a list of nn.Modules"
    if isinstance(module, nn.Module):
        return [module]
    if isinstance(module, str | torch.Tensor) or not isinstance(module, Iterable):
        raise ModuleError(f"module is {shown(module)}; {legal}")
    modules = list(module)
    for position, each in enumerate(modules):
        if not isinstance(each, nn.Module):
            raise ModuleError(f"module[{position}] is {shown(each)}; {legal}")
    return modules


def _check_mesh(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"mesh is {shown(mesh)}; legal are a DeviceMesh of one or two axes, and None for one "
            "axis over the world"
        )
    if not 1 <= mesh.ndim <= 2:
        raise MeshError(
            f"a mesh of {mesh.ndim} axes; give one axis to shard over, or two, the first of which "
            "replicates"
        )


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ModuleError("an empty list of modules; give at least one")
    if len(set(modules)) < len(modules):
        names = [type(module).__name__ for module in modules]
        raise ModuleError(f"a module is twice in the list {names}; give each once")
    for module in modules:
        name = type(module).__name__
        if unit_of(module) is not None:
            raise ModuleError(f"{name} is sharded already; a module can be sharded once")
        if type(module).forward is nn.Module.forward:
            raise ModuleError(
                f"{name} has no forward, so it cannot gather its parameters; shard the modules in "
                "it one by one"
            )


def _check_parameter(original: nn.Parameter, name: str, mesh: DeviceMesh) -> None:
    if original.ndim == 0:
        raise ParameterError(f"{name} is a scalar; make it a tensor of one element to shard it")
    if original.is_meta:
        raise ParameterError(f"{name} is on the meta device; give it memory before sharding")
    if not original.is_contiguous():
        raise ParameterError(
            f"{name} of shape {tuple(original.shape)} has strides {original.stride()}; only "
            "contiguous parameters can be sharded, so call .contiguous() first"
        )
    if isinstance(original, DTensor) and original.device_mesh.device_type != mesh.device_type:
        raise MeshError(
            f"{name} is a DTensor on a {original.device_mesh.device_type} mesh, to be sharded over "
            f"a {mesh.device_type} mesh; both must have one device type"
        )


def _free_parameters(modules: Sequence[nn.Module], mesh: DeviceMesh) -> list[ShardedParameter]:
    """Return the parameters of ``modules`` that no unit has yet, each once with all its places."""
    taken: set[int] = set()
    places: set[tuple[int, str]] = set()  # what is registered there may have been replaced
    for root in modules:
        for inner in root.modules():
            unit = unit_of(inner)
            for group in unit.groups if unit is not None else ():
                for parameter in group.parameters:
                    taken |= {id(parameter.sharded), id(parameter.unsharded)}
                    places.update((id(owner.registry), owner.name) for owner in parameter.owners)
    owners: dict[int, list[Owner]] = {}
    found: dict[int, tuple[nn.Parameter, str]] = {}
    visited: set[nn.Module] = set()
    for root in modules:
        for path, inner in root.named_modules():
            if inner in visited:
                continue
            visited.add(inner)
            for name, candidate in parameters_of(inner).items():
                place = (id(parameters_of(inner)), name)
                if candidate is None or id(candidate) in taken or place in places:
                    continue
                full_name = f"{path}.{name}" if path else name
                if is_taken(inner, name):
                    raise ParameterError(
                        f"{full_name} of {type(root).__name__} is sharded already, by a call on a "
                        "module above it; shard blocks first, the root last"
                    )
                if (sharded := sharded_from(candidate)) is not None:
                    raise ParameterError(
                        f"{full_name} is the same parameter as {sharded.name} of a "
                        "unit sharded before; give both modules to fully_shard as one list"
                    )
                owners.setdefault(id(candidate), []).append(Owner(parameters_of(inner), name))
                found.setdefault(id(candidate), (candidate, full_name))
    for original, name in found.values():
        _check_parameter(original, name, mesh)
    return [ShardedParameter(p, owners[key], name, mesh) for key, (p, name) in found.items()]


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for root in modules:
        for inner in root.modules():
            for name, buffer in inner.named_buffers(recurse=False, remove_duplicate=False):
                if buffer.device != device and not buffer.is_meta:
                    setattr(inner, name, buffer.to(device))


def _world_mesh(modules: Sequence[nn.Module]) -> DeviceMesh:
    types = {p.device.type for module in modules for p in module.parameters()} or {"cpu"}
    if len(types) > 1 or "meta" in types:
        raise MeshError(f"parameters on devices {sorted(types)}; give the mesh to shard over")
    return init_device_mesh(types.pop(), (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
