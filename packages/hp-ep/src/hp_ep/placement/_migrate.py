"""Experts move to where a new placement wants them, and their optimizer's state with them."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hp_dtensor import Axis

from .._errors import ExpertConfigError
from .._experts import GroupedExperts
from .._moe import MoE
from ..dispatch._interface import TokenDispatcher
from ..dispatch._wrappers import Placed, Summed
from ._plan import Migration, Placement, plan_migration
from ._replicas import ReplicaSum, check_same_placement, exchange_rows, rows_here


@torch.no_grad()
def migrate_experts(
    layer: MoE, placement: Placement, optimizer: Optimizer | None = None
) -> Migration:
    """Move ``layer``'s experts to ``placement`` in place and return who went where.

    Parameters, their gradients if there are any, and all of the optimizer's state that has a row
    per slot keep their identity and get the values of the slots' new experts; training goes on as
    if nothing had happened. Copies of the layer, as those of averaged weights, do not move with it:
    migrate each in the same step. Call it between steps, with the same placement on all ranks,
    which they compare first: one small all-gather over each axis of the experts' mesh. Then one
    all-to-all over the experts' axis for each of these tensors, of the slots that change rank.

    `ExpertConfigError`, before anything moves, for a layer that no style gave a placement, for a
    placement that is not the same on all ranks, for another number of slots, and for tensors that
    another axis cuts along their experts: shard those along another dimension.
    """
    if not isinstance(layer, MoE):
        raise ExpertConfigError(f"got a {type(layer).__name__}; experts move with their whole MoE")
    replicas = layer.experts.replicas
    if replicas is None:
        raise ExpertConfigError(
            "the experts have no placement; give the style one, Placement.contiguous(...) if "
            "nothing is known of the load yet"
        )
    _compare(layer.experts, placement, replicas)
    if not isinstance(placement, Placement):  # on all ranks, or they would have differed
        raise ExpertConfigError(
            f"placement={placement!r} is not a Placement; make one by plan_placement"
        )
    migration = plan_migration(replicas.placement, placement)
    dispatcher = _moved(layer.dispatcher, placement)
    tensors = _tensors(layer.experts, optimizer, replicas)
    for tensor in tensors:
        tensor.copy_(exchange_rows(tensor, migration, replicas.axis, replicas.collectives))
    layer.dispatcher = dispatcher
    layer.experts.place(replicas.moved_to(placement))
    return migration


def _compare(experts: GroupedExperts, placement: object, replicas: ReplicaSum) -> None:
    """Raise on all ranks that have a part of the experts unless all give one placement."""
    mesh = experts.gate_up_proj.device_mesh if isinstance(experts.gate_up_proj, DTensor) else None
    axes = [replicas.axis] if mesh is None else [Axis.of(mesh, i) for i in range(mesh.ndim)]
    check_same_placement(placement, axes, experts.gate_up_proj.device, replicas.collectives)


def _moved(dispatcher: TokenDispatcher, placement: Placement) -> TokenDispatcher:
    if isinstance(dispatcher, Placed):
        return dispatcher.moved_to(placement)
    if isinstance(dispatcher, Summed):
        return dispatcher.around(_moved(dispatcher.inner, placement))
    raise ExpertConfigError(
        f"the layer's dispatcher, a {type(dispatcher).__name__}, knows no placement; leave the one "
        "that the style gave"
    )


def _tensors(
    experts: GroupedExperts, optimizer: Optimizer | None, replicas: ReplicaSum
) -> list[Tensor]:
    """Return the local part of everything that has a row per slot, checked, in one order."""
    found: list[Tensor] = []
    num_slots = len(replicas.placement.experts)
    for name, parameter in experts.named_parameters(recurse=False):
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        several = {name: parameter, f"gradient of {name}": parameter.grad}
        several |= {f"{key} of {name}": value for key, value in sorted(state.items())}
        for what, tensor in several.items():
            if isinstance(tensor, Tensor) and tensor.dim():
                found.append(rows_here(what, tensor, num_slots, replicas.axis))
    return found
