"""Find and replace the tensors in what a module takes and returns."""

import copy
import dataclasses
from collections.abc import Callable
from operator import is_
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return ``value`` with every tensor replaced by ``function(tensor)``, in a fixed order.

    Looks into lists, tuples (named ones too), dicts and dataclasses; anything else, and any
    container in which nothing changed, is returned as it is.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        items = {key: map_tensors(function, item) for key, item in value.items()}
        if all(map(is_, items.values(), value.values())):
            return value
        changed = copy.copy(value)
        changed.update(items)
        return changed
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(function, item) for item in value]
        if all(map(is_, parts, value)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_fields(function, value)
    return value


def _map_fields(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    new = {name: map_tensors(function, item) for name, item in old.items()}
    if all(new[name] is old[name] for name in old):
        return value
    changed = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(changed, name, item)  # frozen dataclasses too
    return changed


def tensors_with_gradient(value: Any) -> list[Tensor]:
    """Return the tensors in ``value`` that require a gradient, in the order of `map_tensors`."""
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(look, value)
    return found
