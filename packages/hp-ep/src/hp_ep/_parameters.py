"""Weights that may be DTensors: what a forward computes with, and how a style lays them out."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.nn.utils.parametrize import is_parametrized

from hp_dtensor import Axis

from ._errors import ExpertConfigError
from .placement._plan import Placement as ExpertPlacement


def local_weight(weight: Tensor, alike: Axis | None = None) -> Tensor:
    """Return what this rank computes with; of a DTensor, its local part.

    Where the DTensor is replicated over an axis, the ranks of that axis hold different tokens, so
    the gradient is Partial over it; those of ``alike`` hold the same tokens, and each has the whole
    gradient. Communicates nothing.
    """
    if not isinstance(weight, DTensor):
        return weight
    placements: list[Placement] = [
        Partial() if placement.is_replicate() and not _is_over(weight, axis, alike) else placement
        for axis, placement in enumerate(weight.placements)
    ]
    return weight.to_local(grad_placements=placements)


def _is_over(weight: DTensor, axis: int, alike: Axis | None) -> bool:
    return alike is not None and Axis.of(weight.device_mesh, axis).ranks == alike.ranks


def check_untied(model: nn.Module, layers: Mapping[str, Sequence[nn.Module]]) -> None:
    """Raise an `ExpertConfigError` if a parameter of the modules of ``layers`` is used elsewhere.

    ``layers`` are the modules of each layer in ``model`` whose parameters are to be replaced: what
    else has them, another layer among others, would keep the ones of before.
    """
    users: dict[int, list[str]] = {}
    for layer, modules in layers.items():
        for module in modules:
            users.setdefault(id(module), []).append(layer)
    for several in users.values():
        if len(several) > 1:
            raise ExpertConfigError(
                f"layers {several} share a module whose parameters are to be spread; give each "
                "its own, or use one MoE in both places"
            )
    places: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    replaced = [p for modules in layers.values() for m in modules for p in m.parameters()]
    for parameter in replaced:
        if len(places[id(parameter)]) > 1:
            raise ExpertConfigError(
                f"{places[id(parameter)]} are one parameter, which is to be spread over ranks; "
                "give each its own, or use one MoE in both places"
            )


def check_plain(module: nn.Module) -> None:
    """Raise an `ExpertConfigError` if a parameter of ``module`` is a DTensor already.

    Also where one is computed from others (``torch.nn.utils.parametrize``), which would not be cut.
    """
    if is_parametrized(module):
        names = list(module.parametrizations.keys())  # type: ignore[operator, union-attr]
        raise ExpertConfigError(
            f"{names} are parametrized; spread the experts first, or remove_parametrizations"
        )
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            raise ExpertConfigError(
                f"{name} is already a DTensor with placements {parameter.placements}; apply an "
                "expert-parallel style once, before FSDP"
            )


def check_alike(module: nn.Module, alike: Axis) -> None:
    """Raise an `ExpertConfigError` if ranks of ``alike`` share an axis of a parameter with others.

    The gradient over such an axis would be neither whole on each rank nor a sum over all.
    """
    for name, parameter in module.named_parameters(recurse=False):
        if not isinstance(parameter, DTensor):
            continue
        for axis in range(parameter.device_mesh.ndim):
            ranks = Axis.of(parameter.device_mesh, axis).ranks
            if ranks != alike.ranks and len(set(ranks) & set(alike.ranks)) > 1:
                raise ExpertConfigError(
                    f"{name} is a DTensor over ranks {list(ranks)}, of which {list(alike.ranks)} "
                    "hold the same tokens; distribute it over a mesh that has these as an axis"
                )


def split_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Callable[[str], Sequence[Placement]],
    held: ExpertPlacement | None,
) -> None:
    """Replace each parameter ``[experts, ...]`` of ``module`` by a DTensor over ``mesh``.

    ``placements`` of a name shard or replicate it; dimension 0 is cut by the first axis or not at
    all. Every rank keeps its part of the values it has: a block of the experts, or those that
    ``held`` puts there. Communicates nothing.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        local = parameter.detach()
        layout = placements(name)
        for axis, placement in enumerate(layout):
            index = mesh.get_local_rank(axis)
            if placement.is_replicate():
                continue
            dim: int = placement.dim  # type: ignore[attr-defined]
            if dim == 0 and held is not None:
                local = local[list(held.on_rank(index))]
            else:
                local = local.chunk(mesh.size(axis), dim)[index]
        # A copy of its own: a part of the whole would keep the whole alive.
        local = local.clone(memory_format=torch.contiguous_format)
        _replace(module, name, local, mesh, layout)


def replicate_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each parameter of ``module`` by a DTensor replicated over ``mesh``, as it is here."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        _replace(module, name, parameter.detach(), mesh, [Replicate()])


def _replace(
    module: nn.Module, name: str, local: Tensor, mesh: DeviceMesh, layout: Sequence[Placement]
) -> None:
    requires_grad = module.get_parameter(name).requires_grad
    shape = list(local.shape)
    for axis, placement in enumerate(layout):
        if not placement.is_replicate():
            shape[placement.dim] *= mesh.size(axis)  # type: ignore[attr-defined]
    value = DTensor.from_local(
        local,
        mesh,
        layout,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    module.register_parameter(name, nn.Parameter(value, requires_grad=requires_grad))
