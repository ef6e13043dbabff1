"""`fully_shard`: check the arguments, shard the parameters, and add `FSDPModule` to the classes.

Communicates nothing. Creates process groups if mesh axes are flattened, or if there is no default
process group.
"""

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, cast, get_args, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.nn.parallel import DistributedDataParallel

from hp_dtensor import Collectives, TorchCollectives
from hp_dtensor.torch_compat import backend_of

from ._errors import (
    ArgumentTypeError,
    MeshError,
    MeshTypeError,
    ModuleError,
    ModuleStateError,
    ModuleTypeError,
    ShardingError,
    UnsupportedError,
    shown,
)
from ._group import ParameterGroup, watch_optimizers
from ._hooks import end_in_hook
from ._mesh import DataAxisNames, MeshInfo, WholeMeshInfo
from ._module import FSDPModule, attach_torch_state, hidden_names, sharded_class
from ._options import GradientMode, GradientReduction, GroupConfig, Options, check_reshard
from ._param import ShardedParameter, named_modules, note_managed
from ._select import (
    Granularity,
    ParameterSelection,
    ShardPlacement,
    select_parameters,
)
from ._torch import composed_by, has_forward_hooks, managed_by_torch, note_composed, noted_state
from ._unit import UNIT_ATTRIBUTE, Unit, unit_of
from .layout import LayoutName, direct_bytes_of


def modules_of(module: object) -> list[nn.Module]:
    """Return the argument ``module`` of `fully_shard` as a list of modules.

    Raises `ModuleError` if it is neither a module nor a list of modules.
    """
    allowed = "allowed: an nn.Module and a list of nn.Modules"
    if isinstance(module, nn.Module):
        return [module]
    if isinstance(module, str | torch.Tensor) or not isinstance(module, Iterable):
        raise ModuleTypeError(f"module is {shown(module)}; {allowed}")
    modules = list(module)
    for position, each in enumerate(modules):
        if not isinstance(each, nn.Module):
            raise ModuleTypeError(f"module[{position}] is {shown(each)}; {allowed}")
    return modules


def mesh_info_of(mesh: object, dims: DataAxisNames | None) -> MeshInfo:
    """Check ``mesh`` and ``dp_mesh_dims`` of `fully_shard`, and return the data-parallel mesh.

    Raises `MeshError` in these cases:

    - ``mesh`` is not a `DeviceMesh`, or this rank is not in ``mesh``;
    - ``dims`` is None, and ``mesh`` does not have one or two axes;
    - ``dims`` has a name that is unknown or repeated.
    """
    if not isinstance(mesh, DeviceMesh):
        raise MeshTypeError(
            f"mesh is {shown(mesh)}; allowed: a DeviceMesh of one or two axes, and None for one "
            "axis over the world"
        )
    if dims is not None and not isinstance(dims, DataAxisNames):
        raise ArgumentTypeError(
            f"dp_mesh_dims is {shown(dims)}; allowed: DataParallelMeshDims(shard=..., "
            "replicate=...) and None"
        )
    if dims is not None:
        return WholeMeshInfo.within(mesh, dims)
    if not 1 <= mesh.ndim <= 2:
        raise MeshError(
            f"a mesh of {mesh.ndim} axes; give one axis to shard over, or two, the first of which "
            "replicates, or name the axes of data with dp_mesh_dims"
        )
    return MeshInfo.on(mesh)


def config_of(
    precision: MixedPrecisionPolicy,
    offload: object,
    device: torch.device,
    direct_bytes: float | None,
    backend: str,
) -> GroupConfig:
    """Return the fixed settings of a unit's parameter groups.

    ``backend`` is the backend of the all-gathers, such as ``"nccl"``. It determines the default of
    ``direct_bytes``. Raises `ShardingError` if ``offload`` is not a policy, or if ``direct_bytes``
    is not a size.
    """
    if not isinstance(offload, OffloadPolicy):
        raise ArgumentTypeError(
            f"offload_policy is {shown(offload)}; allowed: OffloadPolicy() and CPUOffloadPolicy()"
        )
    size: object = direct_bytes
    if isinstance(size, bool) or not isinstance(size, int | float | None):
        raise ArgumentTypeError(f"direct_bytes is {shown(size)}; allowed: numbers from 0 on")
    if direct_bytes is not None and not direct_bytes >= 0:
        raise ShardingError(f"direct_bytes is {shown(direct_bytes)}; allowed: numbers from 0 on")
    to_cpu = isinstance(offload, CPUOffloadPolicy)
    # Pinned memory speeds up copies to an accelerator. torch raises if there is no accelerator.
    pinned = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and device.type != "cpu"
    return GroupConfig(
        precision=precision,
        device=device,
        shard_device=torch.device("cpu") if to_cpu else device,
        pinned=pinned,
        direct_bytes=direct_bytes_of(backend) if direct_bytes is None else direct_bytes,
    )


def check_modules(modules: Sequence[nn.Module], ignored: Container[int]) -> None:
    """Raise `ModuleError` if the modules cannot be sharded as one unit.

    For example, one module contains another, is sharded already, or has no ``forward``.
    ``ignored``: ids of the parameters that are not sharded.
    """
    if not modules:
        raise ModuleError("an empty list of modules; give at least one")
    if len(set(modules)) < len(modules):
        names = [type(module).__name__ for module in modules]
        raise ModuleError(f"a module is twice in the list {names}; give each once")
    said = [f"module[{i}], a {type(module).__name__}" for i, module in enumerate(modules)]
    holders = {
        inner: place
        for place, module in enumerate(modules)
        for inner in module.modules()
        if inner is not module
    }
    for place, module in enumerate(modules):
        if module in holders:
            first = (
                f"call fully_shard on module[{place}] first, alone, and leave it out of the list"
            )
            if unit_of(module) is not None:
                first = f"module[{place}] is sharded already, so leave it out of the list"
            raise ModuleError(
                f"{said[place]}, is in {said[holders[module]]}; the modules of a list must not "
                f"contain one another: {first}"
            )
    for path, inner in named_modules(modules):
        check_unwrapped(path, inner, ignored)
    for module in modules:
        name = type(module).__name__
        if unit_of(module) is not None:
            raise ModuleStateError(f"{name} is sharded already; a module can be sharded once")
        if composed := composed_by(module):
            raise ModuleStateError(
                f"{name} was passed to torch's {' and '.join(sorted(composed))} before; parameters "
                "can be sharded or replicated once: leave that call out"
            )
        if hidden := hidden_names(module):
            raise ModuleError(
                f"{name} has {hidden} of its own, which a sharded module has too and which would "
                "be hidden; rename them"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ModuleError(f"{name} is a ScriptModule; shard it before it is scripted")
        if "forward" not in vars(module) and type(module).forward is nn.Module.forward:
            raise ModuleError(
                f"{name} has no forward, so it cannot gather its parameters; shard the modules in "
                "it one by one"
            )


def check_unwrapped(path: str, module: nn.Module, ignored: Container[int]) -> None:
    """Raise `ModuleError` if torch manages the module's parameters, unless all are ignored.

    torch manages them if the module is a ``DistributedDataParallel`` or
    ``FullyShardedDataParallel`` wrapper, or was passed to torch's ``fully_shard``. ``path`` is used
    in the message. ``ignored``: ids of parameters.
    """
    wrapper = isinstance(module, DistributedDataParallel | FullyShardedDataParallel)
    if not wrapper:
        by_torch = "fully_shard" in composed_by(module) or managed_by_torch(module)
        if not by_torch or unit_of(module) is not None:
            return
    if all(id(parameter) in ignored for parameter in module.parameters()):
        return
    kind = type(module).__name__
    if wrapper:
        raise ModuleError(
            f"{path or 'the module'} is a {kind}, which communicates for the parameters in it; "
            "call fully_shard on the module that it wraps, without the wrapper, or ignore these "
            "parameters (ignored_params)"
        )
    raise ModuleStateError(
        f"{f'{path}, a {kind},' if path else kind} was passed to torch's fully_shard before, or is "
        "in a module that was; parameters can be sharded once: use the same fully_shard for all "
        "modules of a model"
    )


def replicated_below(modules: Sequence[nn.Module]) -> frozenset[int]:
    """Return the ids of parameters managed by torch's ``replicate``; they are not sharded."""
    return frozenset(
        id(parameter)
        for root in modules
        for inner in root.modules()
        if "replicate" in composed_by(inner)
        for parameter in inner.parameters()
    )


def check_collectives(collectives: Collectives | None) -> Collectives:
    """Return ``collectives``, or by default collectives that call ``torch.distributed``.

    Raises `ShardingError` if ``collectives`` does not have the methods of `Collectives`.
    """
    given: object = TorchCollectives() if collectives is None else collectives
    if isinstance(given, type) or not isinstance(given, Collectives):
        raise ArgumentTypeError(
            f"collectives is {shown(given)}; allowed: an object with the methods of "
            "hp_dtensor.Collectives"
        )
    return given


def check_memory_options(grads: object, buffers: object) -> None:
    """Check the arguments ``grads`` and ``buffers`` of `fully_shard`.

    Raises `ShardingError` for an unknown value, and `UnsupportedError` for a removed feature.
    """
    legal = list(get_args(GradientMode))
    if grads == "fused":
        raise UnsupportedError(
            "grads='fused' was removed in 0.3.0; use grads='accumulate', which packs each gradient "
            "when it is ready"
        )
    if grads not in legal:
        raise ShardingError(f"grads is {shown(grads)}; allowed: {legal}")
    if buffers is not None:
        raise UnsupportedError(
            "buffers= was removed in 0.3.0; leave it out: each unit frees its memory after use; "
            "reshard_after_forward=True and the prefetch setters of FSDPModule bound the memory"
        )


def world_mesh() -> DeviceMesh:
    """Return a 1-D mesh of all ranks, on the accelerator if there is one, else on the CPU.

    The mesh has no axis name, so it equals the default mesh of torch's ``fully_shard``. Initialises
    the default process group if it does not exist, as torch does.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(kind, (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank computes: the CPU or its current accelerator."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


_AS_IT_IS = MixedPrecisionPolicy()
_NOWHERE = OffloadPolicy()


P = ParamSpec("P")


class _Overloaded(Protocol[P]):
    """Type of `fully_shard`: returns a module for a module, and a list for a list."""

    __name__: str

    @overload
    def __call__(self, module: nn.Module, *args: P.args, **kwargs: P.kwargs) -> FSDPModule: ...

    @overload
    def __call__(
        self, module: list[nn.Module], *args: P.args, **kwargs: P.kwargs
    ) -> list[FSDPModule]: ...


def _overloaded(function: Callable[Concatenate[Any, P], object]) -> _Overloaded[P]:
    return cast("_Overloaded[P]", function)


@_overloaded
def fully_shard(
    module: nn.Module | list[nn.Module],
    mesh: DeviceMesh | None = None,
    *,
    layout: LayoutName = "exact",
    granularity: Granularity | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacement | None = None,
    mp_policy: MixedPrecisionPolicy = _AS_IT_IS,
    offload_policy: OffloadPolicy = _NOWHERE,
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: DataAxisNames | None = None,
    min_shard_numel: int = 0,
    direct_bytes: float | None = None,
    buffers: None = None,
    grads: GradientMode = "copy",
    gradient_reduction: GradientReduction = "mean",
    collectives: Collectives | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Shard the parameters of a module over data-parallel ranks, in place.

    Call this function on the blocks of a model first and on the root last. Each call creates one
    unit: the parameters of the module, or of a list of modules, that no earlier call has sharded.
    The parameters of a unit are unsharded together, and their gradients are reduced together.

    - **Parameters** become DTensors with ``Shard(0)`` on the last axis of ``mesh``, and
      ``Replicate()`` on the first of two axes. A parameter that already is a DTensor, for example
      from tensor or expert parallelism, keeps its placements. Its new mesh has the axes of ``mesh``
      followed by the axes of its previous mesh.
    - **Forward** unshards the parameters of a unit with one all-gather per dtype.
    - **Backward** unshards the parameters again. It reduces the gradients with one reduce-scatter
      per dtype, followed by one all-reduce over replicas if ``mesh`` has two axes. Parameters that
      took no part in forward contribute zeros.
    - **Gradients**: after backward, ``parameter.grad`` has the placements of the parameter. Its
      value is the mean or the sum over all ranks of ``mesh``; see ``gradient_reduction``.

    The call itself communicates nothing. It creates process groups if axes are flattened, or if
    there is no default process group. If it raises, the modules are unchanged.

    Args:
        module: A module with a ``forward``, or a list of such modules. Parameters on the meta
            device get memory later, by ``to_empty`` or ``load_state_dict(assign=True)``.
        mesh: A mesh with one axis, or with two: ``(replicate, shard)``. Defaults to one axis over
            the world, on the accelerator if there is one. The default process group is initialised
            if it does not exist.
        layout: ``"exact"``: the same shards as torch's `fully_shard`. ``"ragged"``: the parameters
            of a unit form one flat buffer, which is split evenly over the ranks; each parameter is
            a `RaggedTensor` of hp-dtensor. With ``"ragged"`` an all-gather needs no copy. If
            ``granularity`` is 1, padding is less than 16 bytes per rank.
        granularity: Only for ``layout="ragged"``. Number of consecutive elements of a parameter
            that are never split between ranks, such as the size of a row or of a matrix; or a
            function from a parameter to this number. Defaults to 1.
        reshard_after_forward: True: free the unsharded parameters after forward. False: keep them
            for backward. None: keep them for the root and, from the second step on, for the last
            unit of forward. An integer that divides the number of shard ranks: keep the parameters
            sharded over that many neighbouring ranks. Under ``torch.no_grad``, None and an integer
            act like True.
        shard_placement_fn: Called with each parameter. Returns ``Shard(dim)``, None for the default
            dim, or torch's ``ShardPlacementResult``, in which ``mesh_info`` replaces ``mesh`` for
            this parameter. The default is dim 0. If other mesh axes shard dim 0 already and leave
            fewer rows than there are ranks, the default is the first other dim with a length that
            is divisible by the number of ranks. Other dims than 0 cost one copy in each all-gather
            and one in each reduction.
        mp_policy: Dtypes of computation, reduction and outputs. Gradients that accumulate without
            communication have the dtype of the reduction.
        offload_policy: With ``CPUOffloadPolicy``, the shards, their gradients and therefore the
            optimizer states are on the CPU. If the policy has ``pin_memory=True``, copies overlap
            with computation, and the end of backward waits for the gradients.
        ignored_params: Parameters that are neither sharded nor moved. Their gradients are not
            reduced.
        dp_mesh_dims: Names of the data-parallel axes of ``mesh``, such as `DataParallelMeshDims`.
            Use it if all parameters are DTensors on the whole ``mesh``. If several axes are named
            for sharding or for replication, they are flattened into one axis with a new process
            group.
        min_shard_numel: Parameters with fewer elements than this number are not sharded, and their
            gradients are all-reduced. For a DTensor, the number of elements of its largest local
            tensor is compared.
        direct_bytes: Size in bytes per rank from which parameters are all-gathered directly into
            their unsharded memory. Smaller parameters are packed for one all-gather and copied
            afterwards. Defaults to 64 KiB with gloo and 256 KiB with NCCL; ``math.inf`` packs all.
        buffers: Removed. Anything but None raises `UnsupportedError`.
        grads: How gradients are packed for the reduction. ``"copy"``: all gradients of a unit are
            copied at the end of its backward. ``"accumulate"``: each gradient is copied when it is
            ready; gradients of later microbatches are added in place.
        gradient_reduction: ``"mean"`` over all ranks of ``mesh``, as in torch; or ``"sum"``, for a
            loss that is already divided by a count of the whole batch, such as its tokens. Use the
            same value for all units. The first forward of the root warns if units divide gradients
            by different numbers.
        collectives: `hp_dtensor.Collectives` that communicate. Defaults to ``torch.distributed``.

    Returns:
        The same module or list. The class of each module now also inherits from `FSDPModule`.

    Raises:
        MeshError: ``mesh`` is not a mesh of one or two axes, has no axis names although a parameter
            is a DTensor, or overlaps the mesh of a parameter.
        ModuleError: ``module`` is not a module with a ``forward``, is sharded already, is twice in
            the list, or has an attribute with the name of a method of `FSDPModule`, such as
            ``reset``.
        ParameterError: A parameter is a scalar, is not contiguous, cannot be sharded along the
            requested dim, or has an unsupported placement; or ``ignored_params`` contains an object
            that is not a parameter.
        ShardingError: Another argument is invalid.
        UnsupportedError: ``grads`` is ``"fused"``, or ``buffers`` is not None.

    Examples:
        On 4 ranks:

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> for layer in model:
        ...     _ = fully_shard(layer)
        >>> _ = fully_shard(model)
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> model[0].weight.grad.to_local().shape
        torch.Size([2, 8])
    """
    check_memory_options(grads, buffers)
    selection = ParameterSelection.of(
        ignored_params, shard_placement_fn, min_shard_numel, layout, granularity
    )
    modules = modules_of(module)
    check_modules(modules, selection.ignored)
    selection = replace(selection, ignored=selection.ignored | replicated_below(modules))
    if mesh is None:
        mesh = world_mesh()
    mesh_info = mesh_info_of(mesh, dp_mesh_dims)
    options = Options(
        reshard_after_forward=check_reshard(reshard_after_forward, mesh_info.axes.shard.size),
        precision=mp_policy,
        reduction=gradient_reduction,
    )
    device = device_of(mesh)
    backend = backend_of(mesh_info.axes.shard.group, device)
    config = config_of(mp_policy, offload_policy, device, direct_bytes, backend)
    config = replace(config, grads=grads)
    classes = [sharded_class(cast(Any, type(each))) for each in modules]  # mypy: unhashable
    parameters = select_parameters(modules, mesh_info, selection)
    for parameter in parameters:  # parameters may have different meshes
        if (fewer := options.reshard_after_forward) is not None and parameter.dim is not None:
            check_reshard(fewer, parameter.axes.shard.size)
    with torch.inference_mode(False):  # inference tensors could not be updated later
        groups = _groups_of(parameters, check_collectives(collectives), config)
    # All checks are above this line, so that a call that raises leaves the modules unchanged.
    for group in groups:
        for parameter in group.parameters:
            parameter.note_original()
        group.table.register_sharded()
    note_managed(modules, selection.ignored)
    _move_buffers(modules, device)
    unit = Unit(modules, groups, options, device)
    owners = [o.module for group in groups for p in group.parameters for o in p.owners]
    note_composed(modules, owners)
    watch_optimizers()
    sharded: list[FSDPModule] = []
    for each, own in zip(modules, classes, strict=True):
        each.__dict__[UNIT_ATTRIBUTE] = unit
        if has_forward_hooks(each):
            end_in_hook(unit, each)  # runs after the hooks that exist already
        each.__class__ = own
        if isinstance(each, FSDPModule):
            attach_torch_state(each)
            sharded.append(each)
    return sharded[0] if isinstance(module, nn.Module) else sharded


# torch's ``fully_shard`` has this attribute, too. Code in torch reads a module's state with it.
cast(Any, fully_shard).state = noted_state


def _groups_of(
    parameters: Sequence[ShardedParameter], collectives: Collectives, config: GroupConfig
) -> list[ParameterGroup]:
    """Create one group for all parameters with the same dtype, layout and ranks.

    Parameters with and without all-gather extensions are in different groups.
    """
    alike: dict[object, list[ShardedParameter]] = {}
    for parameter in parameters:
        original = parameter.original()
        if original is not None:
            axes = (parameter.axes.shard, *parameter.axes.replicate)
            ranks = tuple(axis.ranks for axis in axes)
            key = (original.dtype, parameter.layout, parameter.extension is None, ranks)
            alike.setdefault(key, []).append(parameter)
    return [ParameterGroup(each, each[0].axes, collectives, config) for each in alike.values()]


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    moved: dict[torch.Tensor, torch.Tensor] = {}  # shared buffers stay shared
    for inner in (inner for root in modules for inner in root.modules()):
        for name, buffer in inner.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.device != device and not buffer.is_meta:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                setattr(inner, name, moved[buffer])
