"""Operators of ragged tensors: on each element alone, reductions of all elements, random fills."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tag, Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from .._groups import axes_over
from .._placements import Replicate
from .._torch import argument_place, operator_name, written_arguments
from ..collectives._autograd import AutogradCollectives
from ..collectives._c10d import TorchCollectives
from ..collectives._interface import Axis

if TYPE_CHECKING:
    from ._tensor import RaggedSpec, RaggedTensor

_INFIX = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
# What Python calls for operators between two values, with those that take the operands in turn.
BINARY = tuple(
    name
    for name in (
        *(f"__{prefix}{stem}__" for stem in _INFIX for prefix in ("", "r", "i")),
        *(f"__{stem}__" for stem in _COMPARISONS),
    )
    if hasattr(Tensor, name)
)
# Elementwise, or filled with one value, but without the tag that would say so.
_UNTAGGED = frozenset(
    {
        *("alias", "detach", "_to_copy", "copy_", "_foreach_copy_", "_foreach_clone"),
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("zero_", "fill_", "masked_fill", "masked_fill_", "_foreach_zero_"),
        *("_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_fused_sgd_"),
    }
)
# Elementwise, but tagged neither as such nor for what autograd calls.
_ACTIVATIONS = frozenset(
    {
        *("leaky_relu_backward", "elu_backward", "softplus_backward", "mish_backward"),
        *("hardtanh_backward", "hardsigmoid_backward", "hardshrink_backward"),
        *("softshrink_backward", "hardswish", "hardswish_", "hardswish_backward"),
        *("log_sigmoid_forward", "log_sigmoid_backward"),
        # Without the tag in torch 2.11.
        *("leaky_relu", "leaky_relu_", "elu_", "selu_", "celu_", "hardtanh_", "hardsigmoid_"),
    }
)
# Elementwise with reduction="none", which autograd and operators call 0.
_LOSSES = frozenset(
    name + suffix
    for name in ("mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy")
    for suffix in ("", "_backward")
) | {"binary_cross_entropy_with_logits"}
# Whose gradient autograd makes of plain zeros: argument, and what is the same with a ragged one.
_PLAIN_ZEROS = {
    "sgn": (0, "torch.sign(x)"),
    "sgn_": (0, "x.sign_()"),
    "copysign": (1, "torch.copysign(x, y.detach())"),
    "copysign_": (1, "x.copysign_(y.detach())"),
}
# Filled with values that a rank draws for its part.
RANDOM = frozenset(
    {"normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
)
_BY_TENSOR = {torch.ops.aten.bernoulli_.Tensor}
# Reduced to a number that all ranks have.
REDUCTIONS = frozenset({"sum", "mean", "linalg_vector_norm", "any", "all"})
# What a gradient scaler calls: elementwise, but for a number that says whether any is infinite.
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
# Tagged as pointwise, yet a rank's part of the result says nothing, or differs between replicas.
_UNSUITABLE = {Tag.data_dependent_output, Tag.nondeterministic_seeded}
_ROOM = {torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default}
_PUT = {
    torch.ops.aten.index_put.default: torch.ops.aten.masked_fill.Tensor,
    torch.ops.aten.index_put_.default: torch.ops.aten.masked_fill_.Tensor,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """What there is to know about an elementwise operator.

    ``writes`` are the arguments that it writes to, by place or by name; those are what it returns,
    if anything. ``on_lists`` says that it works on the first tensors of some lists, then on the
    second ones, and so on. ``other`` names one that is not elementwise, but known. ``reduction`` is
    the place of a loss's reduction, which must be none.
    """

    writes: tuple[int | str, ...]
    on_lists: bool
    other: str = ""
    reduction: int | None = None


def elementwise_form(op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return an elementwise operator that does the same, and its arguments; else those given."""
    if op in _ROOM and tuple(args[1]) == tuple(args[0].shape):
        # How autograd makes room for a gradient where it may not keep the one that it got, and an
        # asynchronous checkpoint for its copy.
        return torch.ops.aten.empty_like.default, args[:1]
    if op in _PUT and len(args) == 3:
        # What x[mask] = value calls.
        x, (mask, *more), value = args
        if not more and mask is not None and mask.dtype is torch.bool and mask.shape == x.shape:
            return _PUT[op], (x, mask, value)
    return op, args


@lru_cache(maxsize=1024)
def trait_of(op: Any) -> Trait:
    """Return what ``op`` does; raise `TypeError` unless it computes every element alone."""
    namespace, name = operator_name(op)
    known = name in REDUCTIONS or name == UNSCALE or (name in RANDOM and op not in _BY_TENSOR)
    if namespace == "aten" and name in REDUCTIONS and written_arguments(op):
        raise TypeError(
            f"{op} of a ragged tensor with out=, which is not written; use the result that it "
            "returns without"
        )
    if namespace == "aten" and known:
        return Trait(writes=written_arguments(op), on_lists=False, other=name)
    if namespace != "aten" or not _is_elementwise(op, name):
        raise TypeError(
            f"{op} is not defined on ragged tensors, which have operators that act on each element "
            "alone, sums, means and norms of all elements, and random fills; redistribute the "
            "tensor to Replicate() or Shard(dim) first, or work on to_local()"
        )
    on_lists = name.startswith(("_foreach_", "_fused_"))
    reduction = argument_place(op, "reduction") if name in _LOSSES else None
    return Trait(writes=written_arguments(op), on_lists=on_lists, reduction=reduction)


def check_loss(op: Any, place: int, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raise `TypeError` unless a loss, whose reduction stands at a place, reduces nothing."""
    given = args[place] if place < len(args) else named.get("reduction", 1)
    if given != 0:
        raise TypeError(
            f"{op} of ragged tensors with a reduction; use reduction='none' and the result's "
            "mean() or sum(), or redistribute to Replicate() or Shard(dim) first"
        )


def check_gradient(op: Any, args: tuple[Any, ...]) -> None:
    """Raise `TypeError` where autograd would give a ragged tensor plain zeros as gradient."""
    name = operator_name(op)[1]
    if name not in _PLAIN_ZEROS:
        return
    place, instead = _PLAIN_ZEROS[name]
    x = args[place] if place < len(args) else None
    if isinstance(x, Tensor) and x.requires_grad and not x.is_complex() and torch.is_grad_enabled():
        raise TypeError(
            f"{name} of a ragged tensor that requires a gradient: torch would make its gradient a "
            f"plain tensor of zeros; use {instead}, or torch.no_grad()"
        )


def _is_elementwise(op: Any, name: str) -> bool:
    if name in _UNTAGGED or name in _ACTIVATIONS or name in _LOSSES:
        return True
    if name.startswith("_foreach_"):
        # No operator on lists has the tag. Those with a form in place keep shapes (a norm, a
        # maximum or a product of matrices has none), and their form for one tensor has the tag.
        single = getattr(torch.ops.aten, name.removeprefix("_foreach_").rstrip("_"), None)
        in_place = getattr(torch.ops.aten, name.rstrip("_") + "_", None)
        return single is not None and in_place is not None and _has_pointwise(single)
    return Tag.pointwise in op.tags and not _UNSUITABLE.intersection(op.tags)


def _has_pointwise(packet: Any) -> bool:
    return any(Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())


def common_spec(
    kind: "type[RaggedTensor]",
    use: object,
    operands: Sequence[object],
    written: Sequence[object] = (),
) -> "RaggedSpec":
    """Return the layout of the operands, of which some are ragged; raise unless they have one.

    What is ``written`` to is ragged; the others may be numbers and plain 0-dim tensors.
    """
    first = next(x for x in operands if isinstance(x, kind))
    spec = first._spec
    for x in operands:
        if isinstance(x, kind):
            fits = x._spec is spec or x._spec == spec
        elif isinstance(x, Tensor):
            fits = _goes_with_all(x) and not any(x is target for target in written)
        else:
            continue
        if not fits:
            raise TypeError(
                f"{use} of {described(first, kind)} and {described(x, kind)}, whose layouts "
                "differ; use operands of one layout, numbers or 0-dim tensors that are not "
                "written to, or redistribute one first"
            )
    return spec


def specs_of_rows(
    kind: "type[RaggedTensor]", use: object, operands: Sequence[object]
) -> "Sequence[RaggedSpec | None]":
    """Return the layout of the first tensors of all lists, the second ones, and so on, or None.

    Each row, with the operands that are no lists, is a case of `common_spec`, or has no ragged
    tensor.
    """
    columns = [value for value in operands if is_tensor_list(value)]
    others = [value for value in operands if isinstance(value, Tensor)]
    found = [[x._spec if isinstance(x, kind) else None for x in column] for column in columns]
    ragged = [specs for specs in found if any(specs)]
    plain = [column for column, specs in zip(columns, found, strict=True) if not any(specs)]
    # Lists of one layout row by row are what optimizers give: one comparison for each list.
    if (
        all(specs == ragged[0] for specs in ragged)
        and all(map(all, ragged[:1]))
        and all(map(_goes_with_all, (*others, *chain(*plain))))
    ):
        return ragged[0]
    rows = [(*row, *others) for row in zip_longest(*columns)]
    return [
        common_spec(kind, use, row) if any(isinstance(x, kind) for x in row) else None
        for row in rows
    ]


def is_tensor_list(value: object) -> TypeGuard[Sequence[Tensor]]:
    """Return whether an operand is a list of tensors."""
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


def described(x: Any, kind: "type[RaggedTensor]") -> str:
    """Return what an operand is, the same on every rank."""
    if isinstance(x, kind):
        mesh = tuple(x.device_mesh.shape)
        return f"a {list(x.shape)} tensor as {x._spec.layout} on a mesh of shape {mesh}"
    return f"a {list(x.shape)} {type(x).__name__}" if isinstance(x, Tensor) else repr(x)


def _goes_with_all(x: object) -> bool:
    return not isinstance(x, Tensor) or (x.ndim == 0 and not isinstance(x, DTensor))


def run(
    kind: "type[RaggedTensor]", op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return what ``op`` makes of the parts, as ragged tensors in the layout of its operands.

    Random fills and reductions to a number are known besides. Raises `TypeError` for any other
    operator that is not elementwise, for operands of different layouts, and for a plain tensor to
    write to; numbers and plain 0-dim tensors go with all.
    """
    op, args = elementwise_form(op, args)
    trait = trait_of(op)
    if trait.other:
        return _other(kind, op, trait.other, args, kwargs)
    if trait.reduction is not None:
        check_loss(op, trait.reduction, args, kwargs)
    check_gradient(op, args)
    values = (*args, *kwargs.values()) if kwargs else args
    written = [args[at] if isinstance(at, int) else kwargs[at] for at in trait.writes]
    parts = [_part(kind, value) for value in args]
    named = {name: _part(kind, value) for name, value in kwargs.items()}
    if trait.on_lists:
        specs = specs_of_rows(kind, op, values)
        result = op(*parts, **named)
        if not written:
            pairs = zip(result, specs, strict=True)
            return [x if spec is None else kind(x, spec) for x, spec in pairs]
    else:
        spec = common_spec(kind, op, values, written)
        result = op(*parts, **named)
        if not written:
            if isinstance(result, Tensor):
                return kind(result, spec)
            return type(result)(kind(x, spec) for x in result)
    increment_version(_uncounted(kind, written))
    if result is None:
        return None
    return written[0] if isinstance(result, Tensor) else type(result)(written)


def _other(
    kind: "type[RaggedTensor]",
    op: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    if name == UNSCALE:
        grads, found_inf, scale = args
        unscale([x for x in grads if isinstance(x, kind)], _part(kind, grads), found_inf, scale)
        increment_version(_uncounted(kind, [grads]))
        return None
    x = args[0]
    if name in REDUCTIONS:
        return reduced(x, name, args[1:], kwargs)
    fill(x._local, x._spec, op, args[1:], kwargs)
    increment_version(_uncounted(kind, [x]))
    return x


def _part(kind: "type[RaggedTensor]", value: Any) -> Any:
    if isinstance(value, kind):
        return value._local
    if is_tensor_list(value):
        return [x._local if isinstance(x, kind) else x for x in value]
    return value


def _uncounted(kind: "type[RaggedTensor]", written: list[Any]) -> list[Tensor]:
    """Return the tensors whose versions torch leaves, although a graph may have saved them.

    It counts a write for the whole tensor, not for the part; for lists of tensors in neither.
    """
    found: list[Tensor] = []
    for value in written:
        if is_tensor_list(value):
            found += value
            found += [x._local for x in value if isinstance(x, kind)]
        elif isinstance(value, kind):
            found.append(value._local)
    return found


def fill(
    local: torch.Tensor, spec: "RaggedSpec", op: Any, args: Any, named: Mapping[str, Any]
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
    spec: "RaggedSpec", given: torch.Generator | None, device: torch.device
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
    whole = _summed(local.sum(dtype=_wide(dtype or x.dtype) or dtype), _dividing(x._spec))
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
    whole = _summed(torch.where(filled, powers, 0).sum(), axes)
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


def _dividing(spec: "RaggedSpec") -> tuple[Axis, ...]:
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
    return _summed((sizes * mine).sum() / count, axes)


def _summed(part: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        part = AutogradCollectives().all_reduce(part, axis)
    return part


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype that torch sums a half one in, None for any other."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
