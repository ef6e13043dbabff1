"""What a rank process makes once and keeps."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")
_CACHE: dict[Hashable, Any] = {}


def cached(key: Hashable, make: Callable[[], T]) -> T:
    """Return ``make()``, called once per rank process for each ``key`` (meshes, process groups)."""
    if key not in _CACHE:
        _CACHE[key] = make()
    value: T = _CACHE[key]
    return value
