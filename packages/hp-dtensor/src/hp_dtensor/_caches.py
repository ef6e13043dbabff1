"""What is worked out once and kept: bounded, dropped on request, without meshes and groups."""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

_kept: list[Any] = []


def remembered(maxsize: int) -> "Callable[[Callable[P, T]], _lru_cache_wrapper[T]]":
    """Return ``lru_cache`` with a bound, whose entries `clear_caches` drops."""

    def decorate(function: Callable[P, T]) -> "_lru_cache_wrapper[T]":
        cache = lru_cache(maxsize=maxsize)(function)
        _kept.append(cache)
        return cache

    return decorate


class BoundedDict(dict[K, V]):
    """A dict with a bound, whose entries `clear_caches` drops; the oldest go first."""

    def __init__(self, maxsize: int) -> None:
        self._maxsize = maxsize
        _kept.append(self)

    def keep(self, key: K, value: V) -> None:
        """Set an entry."""
        for old in list(self)[: max(0, len(self) - self._maxsize + 1)]:  # another thread may too
            self.pop(old, None)
        self[key] = value

    def cache_clear(self) -> None:
        """Drop all entries."""
        self.clear()


def clear_caches() -> None:
    """Drop the plans and layouts that were worked out for earlier calls.

    Later calls work them out again. The caches are bounded and hold no tensor, mesh or process
    group, so that only memory for plans is freed. Communicates nothing.

    Example:
        >>> clear_caches()
    """
    for cache in _kept:
        cache.cache_clear()
