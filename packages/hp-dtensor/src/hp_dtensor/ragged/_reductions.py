"""Operators of ragged tensors that communicate.

- Reductions of all elements to one number.
- Random fills, such as ``normal_``.
- The operator with which ``torch.amp.GradScaler`` unscales gradients.
"""

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

    Communicates all-reduces of one number over the mesh axes that shard the tensor.

    Args:
        local: Local tensor of this rank. Sums, means and norms are differentiable with respect to
            this tensor.
        spec: Mesh, layout and global shape of the ragged tensor.
        name: ``"sum"``, ``"mean"``, ``"norm"``, ``"any"`` or ``"all"``.
        dim: Dims to reduce. It has to be None or name all dims.
        keepdim: Has to be False.
        dtype: Dtype of a sum, mean or norm. Defaults to the dtype of ``local``. For a sum of
            integers or bools, the default is int64.
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
        # With True as 1 and False as 0, "any" is a maximum and "all" is a minimum.
        found = (local.any() if name == "any" else local.all()).to(torch.int32)
        _all_reduce_(found, axes, "max" if name == "any" else "min")
        return found.to(torch.uint8 if local.dtype == torch.uint8 else torch.bool)
    kind = dtype or local.dtype
    # Sums of half precision are accumulated in float32, which is also done in torch.
    wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
    if name == "sum":
        # If dtype is None, torch chooses the dtype: int64 for integers.
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
    # For an order below 1, the derivative at 0 is infinite. torch's gradient at 0 is 0, so elements
    # equal to 0 are excluded.
    nonzero = sizes != 0
    powers = torch.where(nonzero, sizes, 1) ** order
    total = _sum_over(torch.where(nonzero, powers, 0).sum(), axes)
    # The gradient is also 0 if all elements are 0.
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
    """Return the maximum of a number over all ranks of several axes.

    If a rank has NaN, the result is NaN. Communicates one all-reduce for each axis.

    Args:
        number: Scalar tensor in float32 or float64. The value is at least 0, or NaN.
        axes: Axes of ranks.
        collectives: `Collectives` that communicate.
    """
    # gloo's maximum of floats can lose a NaN. So the bits of the floats are compared as integers.
    # Non-negative floats have the same order as their bits. The bits of infinity and NaN are the
    # largest.
    integer = torch.int64 if number.dtype is torch.float64 else torch.int32
    bits = torch.where(number.isnan(), math.nan, number).view(integer)
    for axis in axes:
        (bits,) = collectives.all_reduce(axis, [bits], op="max").wait()
    return bits.view(number.dtype)


class _Largest(torch.autograd.Function):
    """Returns the largest element.

    In backward, all elements equal to the largest one share the gradient equally, as in torch.
    """

    @staticmethod
    def forward(ctx: Any, sizes: Tensor, largest: Tensor, chosen: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(chosen, count)
        return largest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        chosen, count = ctx.saved_tensors
        # If the largest element is NaN, no element equals it, and the count is 0.
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

    Ranks that hold different elements draw different values. Ranks that hold replicas of the same
    elements draw equal values, even if the seeds of their default generators differ. Communicates
    one all-reduce of one number for each mesh axis that replicates the tensor.

    Args:
        op: Random operator of torch.
        local: Local tensor of this rank, which is overwritten.
        spec: Mesh, layout and global shape of the ragged tensor.
        args: Positional arguments of ``op`` after the tensor.
        kwargs: Keyword arguments of ``op``. The random number is drawn from ``generator``, or from
            the default CPU generator.
    """
    if local.device.type == "meta":
        op(local, *args, **kwargs)
        return
    # Each rank creates a new generator. Its seed is a hash of a random number, which is the same on
    # all replicas, and of the rank's coordinates on the axes that shard the tensor.
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
    """Multiply gradients by ``scale`` in place, and find infinite and NaN elements on all ranks.

    All-reduces ``found_inf`` over each mesh, as torch does for DTensors.

    Args:
        meshes: Meshes of the ragged tensors.
        locals_: Local tensors of the gradients.
        found_inf: Tensor of one element. Set to 1 on all ranks of the meshes if a gradient on any
            of these ranks has an infinite or NaN element.
        scale: Tensor of one element, by which the gradients are multiplied.
    """
    by_ranks = {tuple(mesh.mesh.flatten().tolist()): mesh for mesh in meshes}
    # The order of the meshes must be the same on all ranks. The process groups are looked up first,
    # because the lookup can raise an error, and no gradient has been scaled yet.
    axes = [
        axis
        for _, mesh in sorted(by_ranks.items(), key=lambda item: sorted(item[0]))
        for axis in axes_over(mesh, tuple(range(mesh.ndim)))
    ]
    torch._amp_foreach_non_finite_check_and_unscale_(locals_, found_inf, scale)
    _all_reduce_(found_inf, axes, "max")
