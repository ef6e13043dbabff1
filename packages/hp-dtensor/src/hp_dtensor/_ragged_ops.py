"""Which operators act on every element alone, so that ranks may run them on their own parts."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tag, Tensor


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
        *("zero_", "fill_", "masked_fill_", "_foreach_zero_"),
        *("_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_fused_sgd_"),
    }
)
# Tagged as pointwise, yet a rank's part of the result says nothing, or differs between replicas.
_UNSUITABLE = {Tag.data_dependent_output, Tag.nondeterministic_seeded}


def check_elementwise(op: Any) -> None:
    """Raise `RaggedOpError` unless ``op`` computes every element of its results alone."""
    if not _is_elementwise(op):
        raise RaggedOpError(
            f"{op} is not defined on ragged tensors, which have operators that act on each element "
            "alone; redistribute the tensor to Replicate() or Shard(dim) first, or work on "
            "to_local()"
        )


@lru_cache(maxsize=1024)
def _is_elementwise(op: Any) -> bool:
    namespace, _, name = op.overloadpacket._qualified_op_name.partition("::")
    if namespace != "aten":
        return False
    if name in _UNTAGGED:
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
