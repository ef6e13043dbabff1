"""Run an elementwise operator on the parts that this rank holds of ragged tensors."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ._ragged_ops import BINARY, RaggedOpError, check_elementwise
from ._ragged_spec import RaggedSpec

if TYPE_CHECKING:
    from ._ragged import RaggedTensor

C = TypeVar("C", bound="type[RaggedTensor]")


def run(kind: "type[RaggedTensor]", op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what ``op`` makes of the parts, as ragged tensors that lie as its operands do.

    Raises `RaggedOpError` for an operator that is not elementwise, and for operands that lie
    differently; numbers and 0-dim tensors go with all.
    """
    if op is torch.ops.aten.new_empty_strided.default and tuple(args[1]) == tuple(args[0].shape):
        # How autograd makes room for a gradient where it may not keep the one that it got.
        op, args = torch.ops.aten.empty_like.default, args[:1]
    check_elementwise(op)
    values = (*args, *kwargs.values())
    lists = [value for value in values if _is_tensor_list(value)]
    common = [value for value in values if isinstance(value, Tensor)]
    # Operators on lists work on the first tensor of each, then on the second ones, and so on.
    rows = [[*common, *row] for row in zip_longest(*lists)] if lists else [common]
    specs = [common_spec(kind, str(op), row) for row in rows]
    owners = {id(x._local): x for row in rows for x in row if isinstance(x, kind)}

    def part(value: Any) -> Any:
        if isinstance(value, kind):
            return value._local
        return [part(x) for x in value] if _is_tensor_list(value) else value

    def whole(result: Any, spec: RaggedSpec | None) -> Any:
        if spec is None:
            return result
        # An operand's own part is the result of an operator in place.
        owner = owners.get(id(result))
        return kind(result, spec) if owner is None else owner

    result = op(*map(part, args), **{name: part(value) for name, value in kwargs.items()})
    if result is None or isinstance(result, Tensor):
        return result if result is None else whole(result, specs[0])
    each = specs if lists else specs * len(result)
    return type(result)(whole(x, spec) for x, spec in zip(result, each, strict=True))


def common_spec(
    kind: "type[RaggedTensor]", use: str, operands: Sequence[object]
) -> RaggedSpec | None:
    """Return where the operands lie, None if none is ragged; raise unless they lie alike."""
    first = next((x for x in operands if isinstance(x, kind)), None)
    if first is None:
        return None
    for x in operands:
        if isinstance(x, kind):
            alike = x._spec is first._spec or x._spec == first._spec
        else:
            alike = not isinstance(x, Tensor) or (x.ndim == 0 and not isinstance(x, DTensor))
        if not alike:
            raise RaggedOpError(
                f"{use} of {_described(first, kind)} and {_described(x, kind)}, which "
                "lie differently; use operands that lie alike, numbers or 0-dim tensors, or "
                "redistribute one first"
            )
    return first._spec


def speak_up(cls: C) -> C:
    """Let the infix operators of a tensor class tell what is wrong; return the class.

    torch takes a TypeError in them for an operand that is not its own, and Python then says no more
    than that there is no such operator.
    """
    for name in BINARY:
        setattr(cls, name, _speaking(cls, name, getattr(Tensor, name)))
    return cls


def _speaking(
    kind: "type[RaggedTensor]", name: str, method: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    def operate(self: Any, other: Any) -> Any:
        result = method(self, other)
        if result is NotImplemented and isinstance(other, Tensor | int | float | complex):
            raise RaggedOpError(
                f"{name} of {_described(self, kind)} and {_described(other, kind)}: ragged "
                "tensors have operators that act on each element alone, on operands that lie "
                "alike, numbers and 0-dim tensors; redistribute to Replicate() or Shard(dim) "
                "first, or work on to_local()"
            )
        return result

    operate.__name__ = name
    return operate


def _described(x: Any, kind: "type[RaggedTensor]") -> str:
    if isinstance(x, kind):
        mesh = tuple(x.device_mesh.shape)
        return f"a {list(x.shape)} tensor as {x._spec.layout} on a mesh of shape {mesh}"
    return f"a {list(x.shape)} {type(x).__name__}" if isinstance(x, Tensor) else repr(x)


def _is_tensor_list(value: object) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(x, Tensor) for x in value)
