"""Let ragged tensors tell why they lack what other tensors have."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torch import Tensor

from ._operands import described
from ._ops import BINARY, RaggedOpError

if TYPE_CHECKING:
    from ._tensor import RaggedTensor

C = TypeVar("C", bound="type[RaggedTensor]")
# What works on a tensor's memory, of which a ragged tensor has none besides its part: torch would
# read and write at address 0, or name its own reasons.
_ON_MEMORY = (
    *("untyped_storage", "storage", "share_memory_", "is_shared", "apply_", "map_", "map2_"),
    *("__dlpack__", "__array__", "numpy", "tolist"),
)


def speak_up(cls: C) -> C:
    """Let a tensor class without memory of its own tell what is wrong; return the class.

    torch takes a TypeError in an infix operator for an operand that is not its own, and Python then
    says no more than that there is no such operator.
    """
    for name in BINARY:
        setattr(cls, name, _speaking(cls, name, getattr(Tensor, name)))
    for name in _ON_MEMORY:
        setattr(cls, name, _refusing(cls, name))
    return cls


def _speaking(
    kind: "type[RaggedTensor]", name: str, method: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    def operate(self: Any, other: Any) -> Any:
        result = method(self, other)
        if result is NotImplemented and isinstance(other, Tensor | int | float | complex):
            raise RaggedOpError(
                f"{name} of {described(self, kind)} and {described(other, kind)}: ragged "
                "tensors have operators that act on each element alone, on operands that lie "
                "alike, numbers and 0-dim tensors; redistribute to Replicate() or Shard(dim) "
                "first, or work on to_local()"
            )
        return result

    operate.__name__ = name
    return operate


def _refusing(kind: "type[RaggedTensor]", name: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: object, **named: object) -> NoReturn:
        raise RaggedOpError(
            f"{name} of {described(self, kind)}, which has no memory of its own; use that of "
            "to_local(), or full_tensor() for the whole tensor"
        )

    refuse.__name__ = name
    return refuse
