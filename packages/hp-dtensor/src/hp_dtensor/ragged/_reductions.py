"""Random values: the same on replicas, others on every part."""

import math
import struct
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._groups import axes_over
from .._placements import Replicate
from ..collectives._autograd import AutogradCollectives
from ..collectives._interface import Axis
from ..collectives._torch import TorchCollectives
from ._spec import RaggedSpec

if TYPE_CHECKING:
    from ._tensor import RaggedTensor


def fill(
    local: torch.Tensor, spec: RaggedSpec, op: Any, args: Any, named: Mapping[str, Any]
) -> None:
    """Fill this rank's part with what a random operator draws for it.

    Every part has a generator of its own, whose seed follows from a number that the given or the
    default generator draws, and from the part's place on the axes that divide the tensor.
    Communicates that number over the axes that replicate it, so that replicas draw alike.
    """
    named = dict(named)
    if local.device.type != "meta":
        named["generator"] = _generator(spec, named.get("generator"), local.device)
    op(local, *args, **named)


def _generator(
    spec: RaggedSpec, given: torch.Generator | None, device: torch.device
) -> torch.Generator:
    where = "cpu" if given is None else given.device
    number = torch.randint(2**62, (1,), generator=given, device=where).to(device)
    place = spec.coordinate
    copies = [axis for axis, p in enumerate(spec.layout.placements) if isinstance(p, Replicate)]
    for axis in copies:
        for over in axes_over(spec.mesh, (axis,)):
            # The largest, whatever order a mesh has its ranks in.
            TorchCollectives().all_reduce(over, [number], "max").wait()
    parts = [i for axis, i in enumerate(place) if axis not in copies]
    seed = sha256(struct.pack(f"<{1 + len(parts)}q", int(number), *parts)).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(seed[:7], "little"))


def total(x: "RaggedTensor", local: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the sum of all elements; all-reduces a number over the ranks that divide them."""
    whole = local.sum(dtype=_wide(dtype or x.dtype) or dtype)
    for axis in _dividing(x._spec):
        whole = AutogradCollectives().all_reduce(whole, axis)
    return whole.to(dtype or x.dtype) if _wide(dtype or x.dtype) else whole


def mean(x: "RaggedTensor", local: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the mean of all elements; communicates what `total` does."""
    kind = dtype or x.dtype
    if not (kind.is_floating_point or kind.is_complex):
        raise TypeError(f"the mean of {kind} has no dtype; give a floating one, dtype=...")
    return (total(x, local, _wide(kind) or kind) / x.numel()).to(kind)


def norm(x: "RaggedTensor", local: Tensor, order: object, dtype: torch.dtype | None) -> Tensor:
    """Return the norm of all elements of an order above 0; communicates a number, for inf two."""
    order = 2.0 if order is None else order
    if not isinstance(order, int | float) or not order > 0:
        raise TypeError(
            f"a norm of order {order!r} of all elements of a ragged tensor; use an order above 0, "
            "or inf"
        )
    kind = dtype or x.dtype
    if not (kind.is_floating_point or kind.is_complex):
        raise TypeError(f"the norm of {kind} has no dtype; give a floating one, dtype=...")
    sizes = local.to(_wide(kind) or kind).abs()
    axes = _dividing(x._spec)
    if order == math.inf:
        return _largest(sizes, axes).to(kind if not kind.is_complex else sizes.dtype)
    # A power below 1 has an infinite derivative at 0, where torch gives 0.
    filled = sizes != 0
    powers = torch.where(filled, sizes, 1) ** order
    whole = torch.where(filled, powers, 0).sum()
    for axis in axes:
        whole = AutogradCollectives().all_reduce(whole, axis)
    # The norm of nothing but zeros has gradient 0, as torch's.
    empty = whole == 0
    result = torch.where(empty, whole, torch.where(empty, 1.0, whole) ** (1.0 / order))
    return result.to(kind if not kind.is_complex else sizes.dtype)


def reduced(x: "RaggedTensor", name: str, args: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    """Return what an operator of torch reduces to one number; raise for any other reduction.

    It has no gradient: what torch would work out for it is not ragged.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        method = name.removeprefix("linalg_vector_")
        raise TypeError(
            f"{name} of a ragged tensor that requires a gradient has none as a function; use "
            f"x.{method}(), or torch.no_grad()"
        )
    rest = list(args)
    order = rest.pop(0) if rest and "norm" in name else named.get("ord")
    dim = rest.pop(0) if rest else named.get("dim")
    keepdim = rest.pop(0) if rest else named.get("keepdim", False)
    check_all(x, name, dim, keepdim)
    dtype = named.get("dtype")
    if name in ("any", "all"):
        # Whether any is true is the largest of 0 and 1, whether all are the smallest.
        found = (x._local.any() if name == "any" else x._local.all()).to(torch.int32)
        for axis in _dividing(x._spec):
            TorchCollectives().all_reduce(axis, [found], "max" if name == "any" else "min").wait()
        return found.to(torch.uint8 if x.dtype == torch.uint8 else torch.bool)
    if name == "sum":
        return total(x, x._local, dtype)
    return mean(x, x._local, dtype) if name == "mean" else norm(x, x._local, order, dtype)


def unscale(
    ragged: Sequence["RaggedTensor"], parts: list[Tensor], found_inf: Tensor, scale: Tensor
) -> None:
    """Multiply all parts by ``scale`` in place, and set ``found_inf`` to 1 where any is not finite.

    Of ``parts`` those of the ``ragged`` tensors count on all ranks of their meshes: one all-reduce
    of ``found_inf`` over each, as torch does for DTensors.
    """
    meshes = {tuple(x.device_mesh.mesh.flatten().tolist()): x.device_mesh for x in ragged}
    # One order of the meshes for all ranks, and groups found before anything is scaled.
    axes = [
        axis
        for _, mesh in sorted(meshes.items(), key=lambda item: sorted(item[0]))
        for axis in axes_over(mesh, tuple(range(mesh.ndim)))
    ]
    torch._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, scale)
    for axis in axes:
        TorchCollectives().all_reduce(axis, [found_inf], "max").wait()


def check_all(x: "RaggedTensor", name: str, dim: Any, keepdim: object) -> None:
    """Raise unless a reduction is one of all elements, to a number."""
    dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if beyond := [d for d in dims or () if not -x.ndim <= d < x.ndim]:
        raise IndexError(
            f"{name} over dim {beyond[0]} of a tensor with {x.ndim} dims; dims are {-x.ndim} to "
            f"{x.ndim - 1}"
        )
    if (dims and sorted(d % x.ndim for d in dims) != list(range(x.ndim))) or keepdim:
        raise TypeError(
            f"{name} over dim={dim}, keepdim={keepdim} of a ragged tensor of shape "
            f"{list(x.shape)}; it reduces all elements to one number, x.{name}(), or redistribute "
            "it to Replicate() or Shard(dim) first"
        )


def _dividing(spec: RaggedSpec) -> tuple[Axis, ...]:
    axes = [a for a, p in enumerate(spec.layout.placements) if not isinstance(p, Replicate)]
    return axes_over(spec.mesh, tuple(axes))


def _largest(sizes: Tensor, axes: Sequence[Axis]) -> Tensor:
    with torch.no_grad():
        found = sizes.amax() if sizes.numel() else sizes.new_zeros(())
        for axis in axes:
            TorchCollectives().all_reduce(axis, [found], "max").wait()
        mine = sizes == found
        count = mine.sum().to(sizes.dtype)
        for axis in axes:
            TorchCollectives().all_reduce(axis, [count]).wait()
    # All that are as large share the gradient, as in torch.
    whole = (sizes * mine).sum() / count
    for axis in axes:
        whole = AutogradCollectives().all_reduce(whole, axis)
    return whole


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype that torch sums a half one in, None for any other."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
