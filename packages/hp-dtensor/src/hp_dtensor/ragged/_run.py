"""Run an elementwise operator on the parts that this rank holds of ragged tensors."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import increment_version

from ._operands import common_spec, is_tensor_list, specs_of_rows
from ._ops import REDUCTIONS, UNSCALE, check_gradient, check_loss, elementwise_form, trait_of
from ._random import fill
from ._reductions import reduced, unscale

if TYPE_CHECKING:
    from ._tensor import RaggedTensor


def run(
    kind: "type[RaggedTensor]", op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return what ``op`` makes of the parts, as ragged tensors that lie as its operands do.

    Random fills and reductions to a number are known besides. Raises `RaggedOpError` for any other
    operator that is not elementwise, for operands that lie
    differently, and for a plain tensor to write to; numbers and plain 0-dim tensors go with all.
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
