"""Operators of ragged tensors that communicate: reductions to one number, and random fills."""

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._groups import axes_over
from .._placements import Replicate
from ..collectives._autograd import AutogradCollectives
from ..collectives._c10d import TorchCollectives
from ..collectives._interface import Axis, Collectives
from ._spec import RaggedSpec


def reduce_all(
    local: Tensor,
    spec: RaggedSpec,
    name: str,
    dim: Any = None,
    keepdim: object = False,
    dtype: torch.dtype | None = None,
    order: object = None,
) -> Tensor:
    """Reduce all elements of a ragged tensor to one number.

    Communicates all-reduces of one number over the ranks that hold different parts.

    Args:
        local: Local tensor of this rank. Sums, means and norms are differentiable with respect to
            it.
        spec: Mesh, layout and global shape.
        name: ``"sum"``, ``"mean"``, ``"norm"``, ``"any"`` or ``"all"``.
        dim: Dims to reduce: None or all dims.
        keepdim: Has to be False.
        dtype: Dtype of the result. Defaults to the dtype of ``local``.
        order: Order of the norm: a number above 0, or ``inf``. Defaults to 2.

    Returns:
        A plain scalar tensor, the same on every rank.

    Raises:
        TypeError: Not all dims are reduced, ``keepdim`` is True, the order of the norm is invalid,
            or the dtype of a mean or norm is neither floating nor complex.
        IndexError: A dim does not exist.
    """
    _check_dims(spec.shape, name, dim, keepdim)
    parts = [axis for axis, p in enumerate(spec.layout.placements) if not isinstance(p, Replicate)]
    axes = axes_over(spec.mesh, tuple(parts))
    if name in ("any", "all"):
        # As numbers 0 and 1, "any" is a maximum and "all" is a minimum.
        found = (local.any() if name == "any" else local.all()).to(torch.int32)
        _all_reduce_(found, axes, "max" if name == "any" else "min")
        return found.to(torch.uint8 if local.dtype == torch.uint8 else torch.bool)
    kind = dtype or local.dtype
    # As in torch, sums of half precision are accumulated in float32.
    wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
    if name == "sum":
        # With None, torch chooses the dtype: int64 for integers.
        result = _sum_over(local.sum(dtype=dtype if wide is kind else wide), axes)
        return result if wide is kind else result.to(kind)
    if not (kind.is_floating_point or kind.is_complex):
        raise TypeError(f"the {name} of {kind} has no dtype; give a floating one, dtype=...")
    if name == "mean":
        return (_sum_over(local.sum(dtype=wide), axes) / math.prod(spec.shape)).to(kind)
    order = 2.0 if order is None else order
    if not isinstance(order, int | float) or not order > 0:
        raise TypeError(
            f"a norm of order {order!r} of all elements of a ragged tensor; use an order above 0, "
            "or inf"
        )
    sizes = local.to(wide).abs()
    result = _largest(sizes, axes) if order == math.inf else _norm(sizes, order, axes)
    return result.to(sizes.dtype if kind.is_complex else kind)


def _check_dims(shape: tuple[int, ...], name: str, dim: Any, keepdim: object) -> None:
    ndim = len(shape)
    dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if wrong := [d for d in dims or () if not -ndim <= d < ndim]:
        raise IndexError(
            f"{name} over dim {wrong[0]} of a tensor with {ndim} dims; dims are {-ndim} to "
            f"{ndim - 1}"
        )
    if (dims and sorted(d % ndim for d in dims) != list(range(ndim))) or keepdim:
        raise TypeError(
            f"{name} over dim={dim}, keepdim={keepdim} of a ragged tensor of shape {list(shape)}; "
            f"only all elements can be reduced to one number, x.{name}(); or redistribute the "
            "tensor to Replicate() or Shard(dim) first"
        )


def _norm(sizes: Tensor, order: float, axes: Sequence[Axis]) -> Tensor:
    # The derivative of a power below 1 is infinite at 0, and torch's gradient there is 0.
    nonzero = sizes != 0
    powers = torch.where(nonzero, sizes, 1) ** order
    total = _sum_over(torch.where(nonzero, powers, 0).sum(), axes)
    # The norm of zeros also has the gradient 0.
    zero = total == 0
    return torch.where(zero, total, torch.where(zero, 1.0, total) ** (1.0 / order))


def _largest(sizes: Tensor, axes: Sequence[Axis]) -> Tensor:
    with torch.no_grad():
        largest = sizes.amax() if sizes.numel() else sizes.new_zeros(())
        largest = largest_over(largest, axes, TorchCollectives())
        chosen = sizes == largest
        count = chosen.sum()
        _all_reduce_(count, axes, "sum")
    result: Tensor = _Largest.apply(sizes, largest, chosen, count)  # type: ignore[no-untyped-call]
    return result


def largest_over(number: Tensor, axes: Sequence[Axis], collectives: Collectives) -> Tensor:
    """Return the maximum of a number over axes. It is NaN if any rank has NaN.

    ``number`` is a scalar tensor of at least 0 in float32 or float64.
    """
    # A maximum of floats loses NaN over gloo. Read as integers, non-negative floats have the same
    # order, with infinity and NaN at the end.
    integer = torch.int64 if number.dtype is torch.float64 else torch.int32
    bits = torch.where(number.isnan(), math.nan, number).view(integer)
    for axis in axes:
        (bits,) = collectives.all_reduce(axis, [bits], op="max").wait()
    return bits.view(number.dtype)


class _Largest(torch.autograd.Function):
    """The largest element. As in torch, all elements with this value share its gradient."""

    @staticmethod
    def forward(ctx: Any, sizes: Tensor, largest: Tensor, chosen: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(chosen, count)
        return largest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        chosen, count = ctx.saved_tensors
        # No element equals a NaN, so that the count is 0 then.
        return torch.where(chosen, grads[0] / count, 0), None, None, None


def _sum_over(part: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        part = AutogradCollectives().all_reduce(part, axis)
    return part


def _all_reduce_(number: Tensor, axes: Sequence[Axis], op: Any) -> None:
    """All-reduce a scalar tensor in place, without autograd."""
    for axis in axes:
        TorchCollectives().all_reduce(axis, [number], op).wait()


def fill_at_random(
    op: Any, local: Tensor, spec: RaggedSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Fill this rank's local tensor with a random operator of torch, such as ``normal_``.

    Each part has its own generator. Its seed depends on a number from the given generator, or
    from the default one, and on the coordinate of the part. An all-reduce of this number over
    replicas gives equal values to replicas, also if the seeds of the ranks differ.
    """
    if local.device.type == "meta":
        op(local, *args, **kwargs)
        return
    given = kwargs.get("generator")
    where = "cpu" if given is None else given.device
    number = torch.randint(2**62, (1,), generator=given, device=where).to(local.device)
    part = []
    for axis, placement in enumerate(spec.layout.placements):
        if isinstance(placement, Replicate):
            # A maximum does not depend on the order of the ranks in the mesh.
            _all_reduce_(number, axes_over(spec.mesh, (axis,)), "max")
        else:
            part.append(spec.coordinate[axis])
    seed = sha256(struct.pack(f"<{1 + len(part)}q", int(number), *part)).digest()
    generator = torch.Generator(local.device).manual_seed(int.from_bytes(seed[:7], "little"))
    op(local, *args, **{**kwargs, "generator": generator})


def unscale(
    meshes: Collection[DeviceMesh], locals_: list[Tensor], found_inf: Tensor, scale: Tensor
) -> None:
    """Multiply gradients by ``scale`` in place, and find infinities and NaNs on all ranks.

    Args:
        meshes: Meshes of the ragged tensors. One all-reduce of ``found_inf`` runs over each, as
            torch does for DTensors.
        locals_: Local tensors of the gradients.
        found_inf: Scalar tensor that becomes 1 if any element is not finite.
        scale: Scalar tensor.
    """
    by_ranks = {tuple(mesh.mesh.flatten().tolist()): mesh for mesh in meshes}
    # All ranks need the same order of meshes. Groups are found before any gradient is scaled.
    axes = [
        axis
        for _, mesh in sorted(by_ranks.items(), key=lambda item: sorted(item[0]))
        for axis in axes_over(mesh, tuple(range(mesh.ndim)))
    ]
    torch._amp_foreach_non_finite_check_and_unscale_(locals_, found_inf, scale)
    _all_reduce_(found_inf, axes, "max")
