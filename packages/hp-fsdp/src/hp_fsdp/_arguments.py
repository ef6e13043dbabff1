"""The arguments of `fully_shard`: checked, and turned into what the package works with."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ._buffers import Resize
from ._errors import (
    ArgumentTypeError,
    MeshError,
    MeshTypeError,
    ModuleError,
    ModuleStateError,
    ModuleTypeError,
    ShardingError,
    shown,
)
from ._place import DataAxisNames, Place, WholePlace
from ._storage import GradientMode, Storage
from ._torch import composed_by
from ._unit import unit_of

LayoutName = Literal["exact", "ragged"]


def modules_of(module: object) -> list[nn.Module]:
    """Return the modules of one unit; raises `ModuleError` for anything else."""
    legal = "legal are an nn.Module and a list of nn.Modules"
    if isinstance(module, nn.Module):
        return [module]
    if isinstance(module, str | torch.Tensor) or not isinstance(module, Iterable):
        raise ModuleTypeError(f"module is {shown(module)}; {legal}")
    modules = list(module)
    for position, each in enumerate(modules):
        if not isinstance(each, nn.Module):
            raise ModuleTypeError(f"module[{position}] is {shown(each)}; {legal}")
    return modules


def place_on(mesh: object, dims: DataAxisNames | None) -> Place:
    """Return where parameters are sharded; raises `MeshError` for what is no mesh for it."""
    if not isinstance(mesh, DeviceMesh):
        raise MeshTypeError(
            f"mesh is {shown(mesh)}; legal are a DeviceMesh of one or two axes, and None for one "
            "axis over the world"
        )
    if dims is not None:
        return WholePlace.within(mesh, dims)
    if not 1 <= mesh.ndim <= 2:
        raise MeshError(
            f"a mesh of {mesh.ndim} axes; give one axis to shard over, or two, the first of which "
            "replicates, or name the axes of data with dp_mesh_dims"
        )
    return Place.on(mesh)


def storage_of(
    precision: MixedPrecisionPolicy,
    offload: object,
    device: torch.device,
    direct_bytes: float | None,
) -> Storage:
    """Return where shards rest; raises `ShardingError` for what is no policy or no size."""
    if not isinstance(offload, OffloadPolicy):
        raise ArgumentTypeError(
            f"offload_policy is {shown(offload)}; legal are OffloadPolicy() and CPUOffloadPolicy()"
        )
    if direct_bytes is not None and not direct_bytes >= 0:
        raise ShardingError(f"direct_bytes is {shown(direct_bytes)}; legal are numbers from 0 on")
    to_cpu = isinstance(offload, CPUOffloadPolicy)
    # Memory is pinned for the sake of a device; without one torch refuses.
    pinned = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and device.type != "cpu"
    return Storage(
        precision=precision,
        device=device,
        rest=torch.device("cpu") if to_cpu else device,
        buffers=Resize(),
        pinned=pinned,
        direct_bytes=direct_bytes,
    )


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Raise `ModuleError` for modules that cannot be a unit."""
    if not modules:
        raise ModuleError("an empty list of modules; give at least one")
    if len(set(modules)) < len(modules):
        names = [type(module).__name__ for module in modules]
        raise ModuleError(f"a module is twice in the list {names}; give each once")
    for module in modules:
        name = type(module).__name__
        if unit_of(module) is not None:
            raise ModuleStateError(f"{name} is sharded already; a module can be sharded once")
        if composed := composed_by(module):
            raise ModuleStateError(
                f"{name} was given to torch's {' and '.join(sorted(composed))} before; parameters "
                "can be sharded or replicated once: leave that call out"
            )
        if "forward" not in vars(module) and type(module).forward is nn.Module.forward:
            raise ModuleError(
                f"{name} has no forward, so it cannot gather its parameters; shard the modules in "
                "it one by one"
            )


def replicated_below(modules: Sequence[nn.Module]) -> frozenset[int]:
    """Return the ids of the parameters that torch's ``replicate`` has; they stay with it."""
    return frozenset(
        id(parameter)
        for root in modules
        for inner in root.modules()
        if "replicate" in composed_by(inner)
        for parameter in inner.parameters()
    )


def check_gradient_mode(mode: GradientMode) -> GradientMode:
    """Return the mode; raises `ShardingError` for one that is unknown."""
    if mode not in get_args(GradientMode):
        raise ShardingError(f"grads is {shown(mode)}; legal are {list(get_args(GradientMode))}")
    return mode


def world_mesh() -> DeviceMesh:
    """Return one axis over all ranks on the accelerator, or on CPUs where there is none.

    Without a name, so that it is equal to the mesh that torch's ``fully_shard`` makes by default.
    Initialises the default process group where nobody did, as torch's does.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(kind, (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device that this rank computes on."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
