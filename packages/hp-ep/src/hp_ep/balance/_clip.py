"""Clip gradients by a norm in which replicas are one expert."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_dtensor import Axis, AxisMesh, Collectives
from hp_dtensor import clip_grad_norm_ as clip_counted

from .._experts import GroupedExperts
from ..placement._replicas import ReplicaSum, rows_here


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    pp: AxisMesh | Axis | None = None,
    error_if_nonfinite: bool = False,
    collectives: Collectives | None = None,
) -> Tensor:
    """Scale ``model``'s gradients in place to a norm of at most ``max_norm``; return the norm.

    The norm is that of one process: an expert counts once, however many slots a placement gives it.
    Otherwise this is hp-dtensor's ``clip_grad_norm_`` of all parameters, which communicates and
    raises the same. `ExpertConfigError` besides, before any communication, for gradients of
    replicas that another axis cuts along their experts.
    """
    copied = {
        id(parameter): (name, experts.replicas)
        for experts in model.modules()
        if isinstance(experts, GroupedExperts) and experts.replicas is not None
        for name, parameter in experts.named_parameters(recurse=False)
        if experts.replicas.exist
    }
    counted: list[Tensor] = []
    repeated: list[Tensor] = []
    for parameter in model.parameters():
        grad = parameter.grad
        if id(parameter) in copied and isinstance(grad, DTensor):
            name, replicas = copied[id(parameter)]
            once, again = _split(name, grad, replicas)
            counted += once
            repeated += again
        else:
            counted.append(parameter)
    norm = clip_counted(
        counted,
        max_norm,
        norm_type,
        pp=pp,
        error_if_nonfinite=error_if_nonfinite,
        collectives=collectives,
    )
    # The same factor, so that replicas stay bitwise one expert.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for rows in repeated:
        rows.mul_(factor.to(rows.device))
    return norm


def _split(name: str, grad: DTensor, replicas: ReplicaSum) -> tuple[list[Tensor], list[Tensor]]:
    """Return tensors whose gradients are the rows to count, views, and views of the other rows."""
    placement = replicas.placement
    rows = rows_here(f"gradient of {name}", grad, len(placement.experts), replicas.axis)
    start = replicas.axis.index * placement.slots_per_rank
    first = {slots[0] - start for slots in placement.slots_of}
    own = [slot for slot in range(len(rows)) if slot in first]
    views = [rows[slot : slot + 1] for slot in own] or [rows[:0]]  # with none it takes part too
    counted: list[Tensor] = []
    for view in views:
        holder, part = (
            DTensor.from_local(view, grad.device_mesh, grad.placements, run_check=False)
            for _ in range(2)
        )
        holder.grad = part
        counted.append(holder)
    return counted, [rows[slot] for slot in range(len(rows)) if slot not in first]
