"""Clip gradients by their norm where parameters live on different meshes."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from ._errors import PartialSourceError
from ._groups import find_fold, ranks_along
from ._ragged import RaggedTensor
from ._torch import foreach_norms, foreach_scale, local_part
from .collectives._interface import Axis, AxisMesh, Collectives
from .collectives._torch import TorchCollectives


class NormOrderError(ValueError):
    """A norm of an order that clipping does not know."""


class MaxNormError(ValueError):
    """A largest norm that is no number of 0 or more."""


class NonFiniteNormError(ValueError, RuntimeError):
    """The gradients' norm is infinite or not a number; a RuntimeError too, as torch raises."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    pp: AxisMesh | Axis | None = None,
    error_if_nonfinite: bool = False,
    collectives: Collectives | None = None,
) -> Tensor:
    """Scale gradients in place so that their common norm is at most ``max_norm``; return the norm.

    The norm is that of all gradients as one vector, as in ``torch.nn.utils.clip_grad_norm_``, for
    any mix of plain tensors, DTensors and `RaggedTensor` on any meshes: each gradient's local part
    counts, summed (largest for ``inf``) over the ranks that shard it, once among ranks that
    replicate it. The result is a plain scalar on every rank, at least float32, before clipping. A
    parameter given twice counts once.

    Communicates one all-reduce of a scalar for each set of ranks that share some gradient (over the
    axes one after another where no group spans the set), then one over ``pp``, whose stages hold
    different parameters. A parameter without gradient takes part with zero, so that ranks agree.

    Raises `MaxNormError`, `NormOrderError`, `PartialSourceError` for a gradient that is not reduced
    yet, and, with ``error_if_nonfinite``, `NonFiniteNormError` on all ranks alike before anything
    is scaled.
    """
    limit: object = max_norm
    if not (isinstance(limit, int | float) and limit >= 0):
        raise MaxNormError(
            f"max_norm={limit!r} bounds no norm; give a number of 0 or more, inf to clip nothing"
        )
    order = float(norm_type)
    if not order > 0:
        raise NormOrderError(f"norm_type={norm_type} is no norm; use a positive number or inf")
    door = TorchCollectives() if collectives is None else collectives
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    unique = list({id(parameter): parameter for parameter in given}.values())
    sets: dict[frozenset[int], _RankSet] = {}
    for parameter in unique:
        grad = parameter.grad
        whole = parameter if grad is None else grad
        ranks, axes = _sharded_over(whole)
        shared = sets.setdefault(ranks, _RankSet(axes, []))
        if grad is not None:
            shared.gradients.append(_part(grad))
    gradients = [grad for shared in sets.values() for grad in shared.gradients]
    dtype = _dtype([*unique, *gradients])
    # Ranks may hold gradients of different dtypes, or none: what they exchange has one dtype.
    total = torch.zeros((), dtype=torch.float64, device=_device(unique, gradients))
    # One order of the sets for all ranks: two that share two sets must not wait crosswise.
    for ranks in sorted(sets, key=sorted):
        part = _power_sum(sets[ranks].gradients, order, dtype, total)
        for axis in sets[ranks].axes:
            part = _over(axis, part, order, door)
        total = torch.maximum(total, part) if order == math.inf else total + part
    if pp is not None:
        total = _over(pp if isinstance(pp, Axis) else Axis.of(pp), total, order, door)
    norm = (total if order == math.inf else total.pow(1.0 / order)).to(dtype)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise NonFiniteNormError(
            f"the gradients' norm of order {order} is {norm.item()}; pass "
            "error_if_nonfinite=False to scale by it all the same"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for device in {grad.device for grad in gradients}:
        foreach_scale([grad for grad in gradients if grad.device == device], factor.to(device))
    return norm


class _RankSet(NamedTuple):
    """Gradients that the same ranks shard, and the axes whose all-reduces cover these ranks."""

    axes: tuple[Axis, ...]
    gradients: list[Tensor]


def _sharded_over(x: Tensor) -> tuple[frozenset[int], tuple[Axis, ...]]:
    """Return the ranks that hold different parts of ``x``, and axes that together span them."""
    if not isinstance(x, DTensor | RaggedTensor):
        return frozenset(), ()
    mesh = x.device_mesh
    sharding = []
    for axis, placement in enumerate(x.placements):
        if mesh.size(axis) == 1 or isinstance(placement, Replicate):
            continue
        if isinstance(placement, Partial):
            raise PartialSourceError(
                f"a gradient with placements {x.placements} is not reduced yet; redistribute it to "
                "Replicate() or Shard(dim) before clipping"
            )
        sharding.append(axis)
    if not sharding or mesh.get_coordinate() is None:
        return frozenset(), ()
    found = find_fold(mesh, tuple(sharding))
    ranks = frozenset(ranks_along(mesh, tuple(sharding)))
    if found is not None and len(found.members) == found.size:
        return ranks, (found.find(),)
    singles = [find_fold(mesh, (axis,)) for axis in sharding]
    return ranks, tuple(single.find() for single in singles if single)


def _part(grad: Tensor) -> Tensor:
    if isinstance(grad, DTensor):
        return local_part(grad)
    return grad.to_local() if isinstance(grad, RaggedTensor) else grad


def _power_sum(gradients: list[Tensor], order: float, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return the sum of ``|x| ** order`` over all elements (the largest ``|x|`` for inf).

    Each gradient's norm is taken in ``dtype``; the result has the dtype and device of ``like``.
    """
    filled = [grad for grad in gradients if grad.numel()]
    if not filled:
        return torch.zeros_like(like)
    norms = torch.stack([n.to(like) for n in foreach_norms(filled, order, dtype)])
    return norms.amax() if order == math.inf else norms.pow(order).sum()


def _over(axis: Axis, part: Tensor, order: float, door: Collectives) -> Tensor:
    (result,) = door.all_reduce(axis, [part], op="max" if order == math.inf else "sum").wait()
    return result


def _dtype(tensors: list[Tensor]) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _device(parameters: list[Tensor], gradients: list[Tensor]) -> torch.device:
    for tensor in (*gradients, *parameters):
        return tensor.device
    return torch.device("cpu")
