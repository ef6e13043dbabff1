"""Dtypes of a parameter group, and casts of the tensors in a module's inputs and outputs."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils.rnn import PackedSequence

from hp_dtensor.torch_compat import pytree_node

from ._errors import ArgumentTypeError

_PLAIN = (dict, list, tuple)  # handled here, because pytree takes longer for them
_NO_CONTAINERS = (Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return ``value`` with every tensor replaced by ``function(tensor)``, in a fixed order.

    Traverses lists, tuples, named tuples, mappings, dataclasses, and types that are registered with
    torch's pytree. Other objects are returned unchanged. A container is copied only if one of its
    tensors changes. Raises `ShardingError` if a mapping that changes cannot be copied.
    """
    if isinstance(value, Tensor):
        return function(value)
    if type(value) not in _PLAIN and (node := pytree_node(value)) is not None:
        old, rebuild = node
        new = [map_tensors(function, item) for item in old]
        return value if all(map(is_, new, old)) else rebuild(new)
    if isinstance(value, (dict, Mapping)):  # a check for `Mapping` takes longer
        return _map_items(function, value)
    if isinstance(value, (list, tuple)):
        # torch requires the batch sizes of a packed sequence to stay on the CPU.
        kept = value.batch_sizes if isinstance(value, PackedSequence) else None
        parts: list[Any] = [item if item is kept else map_tensors(function, item) for item in value]
        if all(map(is_, parts, value)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_fields(function, value)
    return value


def _map_items(function: Callable[[Tensor], Tensor], value: Mapping[Any, Any]) -> Any:
    old = dict(value.items())
    new = {key: map_tensors(function, item) for key, item in old.items()}
    if all(map(is_, new.values(), old.values())):
        return value
    if type(value) is dict:
        return new
    if not isinstance(value, MutableMapping):
        made = type(value)(new)  # type: ignore[call-arg]
        if not _holds(made, new):
            raise ArgumentTypeError(_no_copy(value, "its class makes another mapping of a dict"))
        return made
    changed = _copy_of(value)
    for key, item in new.items():
        old = value[key]
        changed[key] = item  # some mappings have no update(), or attributes that mirror items
        if item is not old and value[key] is item:
            value[key] = old
            raise ArgumentTypeError(_no_copy(value, "a copy.copy of it shares its items"))
    return changed


def _holds(made: Mapping[Any, Any], new: dict[Any, Any]) -> bool:
    return made.keys() == new.keys() and all(
        made[key] is item for key, item in new.items() if isinstance(item, Tensor)
    )


def _copy_of(value: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Return a shallow copy of a mapping.

    If an attribute of the mapping object is a mapping, the attribute is copied, too.
    """
    changed = copy.copy(value)
    held = getattr(value, "__dict__", {})
    for name, inner in held.items():
        if isinstance(inner, MutableMapping) and vars(changed).get(name) is inner:
            vars(changed)[name] = copy.copy(inner)
    return changed


def _no_copy(value: object, reason: str) -> str:
    return (
        f"a unit replaces tensors in a {type(value).__name__}, of which no copy can be made: "
        f"{reason}; give a dict"
    )


def _map_fields(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    new = {name: map_tensors(function, item) for name, item in old.items()}
    if all(new[name] is old[name] for name in old):
        return value
    changed = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(changed, name, item)  # works for frozen dataclasses, too
    return changed


def tensors_with_gradient(value: Any) -> list[Tensor]:
    """Return the tensors in ``value`` that require grad, in the order of `map_tensors`."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, in the order of `map_tensors`."""
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(look, value)
    return found


def can_look_into(value: Any) -> bool:
    """Return whether `map_tensors` finds all tensors in ``value``.

    Returns False if ``value`` contains an object of unknown type, which may contain tensors.
    """
    if value is None or isinstance(value, _NO_CONTAINERS):
        return True
    if type(value) not in _PLAIN and (node := pytree_node(value)) is not None:
        return all(map(can_look_into, node[0]))
    if isinstance(value, Mapping):
        return all(map(can_look_into, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(can_look_into, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(can_look_into(getattr(value, f.name)) for f in dataclasses.fields(value))
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """Dtypes of one parameter group.

    Attributes:
        compute: Dtype of the all-gather and of the unsharded parameters.
        reduce: Dtype of the gradient reduction.
    """

    compute: torch.dtype
    reduce: torch.dtype


def choose_dtypes(policy: MixedPrecisionPolicy, stored: torch.dtype) -> Dtypes:
    """Return the dtypes of a parameter group with shards of dtype ``stored``.

    The policy does not apply to integer and complex dtypes. If the policy has no ``reduce_dtype``,
    gradients are reduced in the compute dtype.
    """
    if not stored.is_floating_point:
        return Dtypes(compute=stored, reduce=stored)
    compute = policy.param_dtype or stored
    return Dtypes(compute=compute, reduce=policy.reduce_dtype or compute)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with every floating-point tensor in it cast to ``dtype``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, value)


def move_tensors(value: Any, device: torch.device) -> Any:
    """Return ``value`` with every tensor in it moved to ``device``."""
    return map_tensors(lambda tensor: tensor.to(device), value)
