"""Which operators act on every element alone, so that ranks may run them on their own parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tag, Tensor

from .._caches import remembered
from .._torch import argument_place, operator_name, written_arguments


class RaggedOpError(TypeError):
    """An operator that ragged tensors do not have, or operands of it that lie differently."""


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


@remembered(1024)
def trait_of(op: Any) -> Trait:
    """Return what ``op`` does; raise `RaggedOpError` unless it computes every element alone."""
    namespace, name = operator_name(op)
    known = name in REDUCTIONS or name == UNSCALE or (name in RANDOM and op not in _BY_TENSOR)
    if namespace == "aten" and known:
        return Trait(writes=written_arguments(op), on_lists=False, other=name)
    if namespace != "aten" or not _is_elementwise(op, name):
        raise RaggedOpError(
            f"{op} is not defined on ragged tensors, which have operators that act on each element "
            "alone, sums, means and norms of all elements, and random fills; redistribute the "
            "tensor to Replicate() or Shard(dim) first, or work on to_local()"
        )
    on_lists = name.startswith(("_foreach_", "_fused_"))
    reduction = argument_place(op, "reduction") if name in _LOSSES else None
    return Trait(writes=written_arguments(op), on_lists=on_lists, reduction=reduction)


def check_loss(op: Any, place: int, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raise `RaggedOpError` unless a loss, whose reduction stands at a place, reduces nothing."""
    given = args[place] if place < len(args) else named.get("reduction", 1)
    if given != 0:
        raise RaggedOpError(
            f"{op} of ragged tensors with a reduction; use reduction='none' and the result's "
            "mean() or sum(), or redistribute to Replicate() or Shard(dim) first"
        )


def check_gradient(op: Any, args: tuple[Any, ...]) -> None:
    """Raise `RaggedOpError` where autograd would give a ragged tensor plain zeros as gradient."""
    name = operator_name(op)[1]
    if name not in _PLAIN_ZEROS:
        return
    place, instead = _PLAIN_ZEROS[name]
    x = args[place] if place < len(args) else None
    if isinstance(x, Tensor) and x.requires_grad and not x.is_complex() and torch.is_grad_enabled():
        raise RaggedOpError(
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
