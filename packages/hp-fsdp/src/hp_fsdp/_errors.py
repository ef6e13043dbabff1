"""What can be wrong with a call; each error is raised before anything is communicated.

Where torch's `fully_shard` raises another builtin error than ValueError, ours is that one too: by a
subclass of the same name, which callers need not know of.
"""

from collections.abc import Callable, Iterable
from typing import TypeGuard, TypeVar

E = TypeVar("E", bound=Exception)


class ShardingError(ValueError):
    """A call of this package cannot be carried out; base of the errors below."""


class MeshError(ShardingError):
    """The mesh has the wrong number of axes, device type, or overlaps a parameter's own mesh."""


class ParameterError(ShardingError):
    """A parameter cannot be sharded as it is."""


class ModuleError(ShardingError):
    """A module cannot be a unit of sharding."""


class StateError(ShardingError, RuntimeError):
    """A call came at a moment at which it has no meaning."""


class DisagreementError(ShardingError, RuntimeError):
    """Ranks are about to communicate for different units, or for units that are not alike."""


class UnsupportedError(ShardingError, NotImplementedError):
    """A call of torch's surface that this package answers in another way, which it names."""


def _also(error: type[E], builtin: type[Exception]) -> type[E]:
    """Return a subclass of a public error that is also another builtin one, under its name."""
    members = {
        "__doc__": error.__doc__,
        "__module__": error.__module__,
        "__reduce__": lambda self: (error, self.args),
    }
    return type(error.__name__, (error, builtin), members)


ArgumentTypeError = _also(ShardingError, TypeError)
MeshTypeError = _also(MeshError, TypeError)
ParameterTypeError = _also(ParameterError, TypeError)
ModuleTypeError = _also(ModuleError, TypeError)
# A module is sharded where it must not be, or is not where it must be.
ModuleStateError = _also(ModuleError, AssertionError)
# Two setters that exclude one another.
CallOrderError = _also(StateError, AssertionError)
# Legal in torch, but not to be sharded: strides, an uneven cut of another dimension than the first.
UnsupportedParameterError = _also(ParameterError, NotImplementedError)
# Without the dimension to shard, or with one of two hooks for gathering.
InvalidParameterError = _also(ParameterError, AssertionError)


def first_error(actions: Iterable[Callable[[], None]]) -> Exception | None:
    """Call all ``actions``, whatever each of them raises; return the first error."""
    errors = []
    for action in actions:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the caller raises it
            errors.append(error)
    return errors[0] if errors else None


class Once:
    """Lets a warning be given only once."""

    def __init__(self) -> None:
        self._was_called = False

    def first(self) -> bool:
        """Return True the first time, then False."""
        before, self._was_called = self._was_called, True
        return not before


def shown(value: object) -> str:
    """Return what a message says of a wrong argument; the same on every rank, so no addresses."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, str | int | float | None):
        return repr(value)
    return f"of type {type(value).__name__}"


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is an int, which a bool is to Python and to no user."""
    return isinstance(value, int) and not isinstance(value, bool)
