"""What can be wrong with a call; each error is raised before anything is communicated.

Where torch's `fully_shard` raises another builtin error than ValueError, ours is that one too: by a
subclass of the same name, which callers need not know of.
"""

from collections.abc import Callable, Iterable
from typing import TypeGuard, TypeVar

E = TypeVar("E", bound=Exception)


class ShardingError(ValueError):
    """Raised for an invalid call; base class of the other errors of this package."""


class MeshError(ShardingError):
    """Raised if a mesh has the wrong axes or device type, or overlaps the mesh of a parameter."""


class ParameterError(ShardingError):
    """Raised if a parameter cannot be sharded."""


class ModuleError(ShardingError):
    """Raised if a module cannot be sharded, is sharded already, or is not sharded when required."""


class CheckpointError(ShardingError):
    """Raised on all ranks if files of weights are damaged or do not fit the model or the folder."""


class StateError(ShardingError, RuntimeError):
    """Raised if a call is not allowed at this point of the training step."""


class DisagreementError(ShardingError, RuntimeError):
    """Raised on all ranks if they gather or reduce different units, or their settings differ."""


class UnsupportedError(ShardingError, NotImplementedError):
    """Raised for an unsupported call of torch's API; the message names the replacement."""


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
