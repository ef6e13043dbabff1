"""Table of the torch operators that ragged tensors support, and checks of their arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tag, Tensor

from .._torch import argument_place, operator_name, written_arguments

_INFIX = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
# Names of the methods for Python's binary operators, such as ``__add__``, ``__radd__`` and
# ``__iadd__``.
BINARY_METHODS = tuple(
    name
    for name in (
        *(f"__{prefix}{stem}__" for stem in _INFIX for prefix in ("", "r", "i")),
        *(f"__{stem}__" for stem in _COMPARISONS),
    )
    if hasattr(Tensor, name)
)
# Elementwise operators that do not have the tag ``torch.Tag.pointwise``.
_ELEMENTWISE = frozenset(
    {
        # Copies and fills.
        *("alias", "detach", "_to_copy", "copy_", "_foreach_copy_", "_foreach_clone"),
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("zero_", "fill_", "masked_fill", "masked_fill_", "_foreach_zero_"),
        # Optimizer steps.
        *("_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_fused_sgd_"),
        # Activations, and the operators of their backward.
        *("leaky_relu_backward", "elu_backward", "softplus_backward", "mish_backward"),
        *("hardtanh_backward", "hardsigmoid_backward", "hardshrink_backward"),
        *("softshrink_backward", "hardswish", "hardswish_", "hardswish_backward"),
        *("log_sigmoid_forward", "log_sigmoid_backward"),
        # These operators have the tag in later versions of torch, but not in 2.11.
        *("leaky_relu", "leaky_relu_", "elu_", "selu_", "celu_", "hardtanh_", "hardsigmoid_"),
    }
)
# Losses. They are elementwise only if ``reduction="none"``.
_LOSSES = frozenset(
    name + suffix
    for name in ("mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy")
    for suffix in ("", "_backward")
) | {"binary_cross_entropy_with_logits"}
# Operators with a backward that returns a plain tensor of zeros, instead of a ragged tensor, as the
# gradient of one argument. Values: the position of this argument, and an equivalent call without
# this problem.
_PLAIN_GRADIENTS = {
    "sgn": (0, "torch.sign(x)"),
    "sgn_": (0, "x.sign_()"),
    "copysign": (1, "torch.copysign(x, y.detach())"),
    "copysign_": (1, "x.copysign_(y.detach())"),
}
# Operators with an implementation in ``_reductions.py``.
_RANDOM_FILLS = frozenset(
    {"normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
)
REDUCTIONS = frozenset({"sum", "mean", "linalg_vector_norm", "any", "all"})
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # of ``torch.amp.GradScaler``
_SPECIAL = _RANDOM_FILLS | REDUCTIONS | {UNSCALE}
# Pointwise operators with one of these tags may give other results on local tensors than on the
# whole tensor.
_UNSUITABLE_TAGS = {Tag.data_dependent_output, Tag.nondeterministic_seeded}
_NEW_EMPTY = {torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default}
_MASKED_FILLS = {
    torch.ops.aten.index_put.default: torch.ops.aten.masked_fill.Tensor,
    torch.ops.aten.index_put_.default: torch.ops.aten.masked_fill_.Tensor,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTraits:
    """Properties of a torch operator that ragged tensors support.

    Attributes:
        writes: Arguments that the operator modifies in place, as positions, or as names if they are
            keyword-only. An operator with such arguments returns these arguments or None.
        on_lists: Whether the operator takes lists of tensors, such as ``torch._foreach_add``.
        special: Name of the operator if it is a random fill, a reduction, or the operator of
            ``torch.amp.GradScaler``. Empty if the operator is elementwise.
        reduction: Position of the argument ``reduction`` of a loss. None for other operators.
        plain_gradient: Set if torch's backward has a fault: the gradient of one argument is a plain
            tensor instead of a ragged tensor. The value is a pair of the position of this argument
            and an equivalent call without the fault, such as ``(0, "torch.sign(x)")``. None for
            other operators.
    """

    writes: tuple[int | str, ...]
    on_lists: bool
    special: str = ""
    reduction: int | None = None
    plain_gradient: tuple[int, str] | None = None


def elementwise_form(op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Replace a call of an operator by an equivalent call of an elementwise operator, if possible.

    Two calls are replaced:

    - ``new_empty`` with the shape of the input: ``empty_like``.
    - ``index_put`` with a mask that has the shape of the input: ``masked_fill``.

    Args:
        op: Operator of torch.
        args: Positional arguments of the operator.

    Returns:
        The new operator and its positional arguments. If nothing is replaced, ``op`` and ``args``.
    """
    if op in _NEW_EMPTY and tuple(args[1]) == tuple(args[0].shape):
        # Autograd calls ``new_empty`` before it copies a gradient. Asynchronous checkpoints call it
        # too.
        return torch.ops.aten.empty_like.default, args[:1]
    if op in _MASKED_FILLS and len(args) == 3:
        # ``x[mask] = value`` calls ``index_put_``.
        x, (mask, *more), value = args
        if not more and mask is not None and mask.dtype is torch.bool and mask.shape == x.shape:
            return _MASKED_FILLS[op], (x, mask, value)
    return op, args


@lru_cache(maxsize=1024)
def operator_traits(op: Any) -> OperatorTraits:
    """Return the properties of a torch operator.

    Raises:
        TypeError: Ragged tensors do not support the operator.
    """
    namespace, name = operator_name(op)
    writes = written_arguments(op)
    if namespace == "aten" and name in REDUCTIONS and writes:
        raise TypeError(
            f"{op} of a ragged tensor does not support out=; use the result of the call without it"
        )
    # This overload of bernoulli_ takes the probabilities as a tensor, so it is not a random fill.
    special = name in _SPECIAL and op is not torch.ops.aten.bernoulli_.Tensor
    if namespace != "aten" or not (special or _is_elementwise(op, name)):
        raise TypeError(
            f"{op} is not defined on ragged tensors, which support elementwise operators, sums, "
            "means and norms of all elements, and random fills; redistribute the tensor to "
            "Replicate() or Shard(dim) first, or work on to_local()"
        )
    return OperatorTraits(
        writes=writes,
        on_lists=name.startswith(("_foreach_", "_fused_")),
        special=name if special else "",
        reduction=argument_place(op, "reduction") if name in _LOSSES else None,
        plain_gradient=_PLAIN_GRADIENTS.get(name),
    )


def _is_elementwise(op: Any, name: str) -> bool:
    if name in _ELEMENTWISE or name in _LOSSES:
        return True
    if name.startswith("_foreach_"):
        # Operators on lists do not have the tag pointwise, so the tag of the operator for a single
        # tensor is used. Operators without an in-place variant, such as norms, change shapes.
        single = getattr(torch.ops.aten, name.removeprefix("_foreach_").rstrip("_"), None)
        in_place = getattr(torch.ops.aten, name.rstrip("_") + "_", None)
        if single is None or in_place is None:
            return False
        return any(Tag.pointwise in getattr(single, form).tags for form in single.overloads())
    return Tag.pointwise in op.tags and not _UNSUITABLE_TAGS.intersection(op.tags)


def check_arguments(
    op: Any, traits: OperatorTraits, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise `TypeError` if a supported operator cannot run with the given arguments.

    There are two cases:

    - A loss with another ``reduction`` than ``"none"``.
    - An operator whose backward would return a plain tensor as the gradient of a ragged tensor; see
      `OperatorTraits.plain_gradient`.
    """
    if traits.reduction is not None:
        at = traits.reduction
        # torch encodes "none" as 0, and the default "mean" as 1.
        if (args[at] if at < len(args) else kwargs.get("reduction", 1)) != 0:
            raise TypeError(
                f"{op} of ragged tensors with a reduction; use reduction='none' and the result's "
                "mean() or sum(), or redistribute to Replicate() or Shard(dim) first"
            )
    if traits.plain_gradient is not None and torch.is_grad_enabled():
        at, instead = traits.plain_gradient
        x = args[at] if at < len(args) else None
        if isinstance(x, Tensor) and x.requires_grad and not x.is_complex():
            raise TypeError(
                f"{op} of a ragged tensor that requires a gradient: torch would use a plain tensor "
                f"of zeros as its gradient; use {instead}, or torch.no_grad()"
            )
