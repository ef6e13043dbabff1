"""Errors of this package, and helpers for error messages.

If torch's `fully_shard` raises a builtin error other than ValueError, such as TypeError, this
package raises a subclass of both a public error and the builtin error. The subclass has the name
of the public error, so callers do not need to know the subclass.
"""

from collections.abc import Callable, Iterable
from typing import TypeGuard, TypeVar

E = TypeVar("E", bound=Exception)


class ShardingError(ValueError):
    """Raised for an invalid call. Base class of the other errors of this package."""


class MeshError(ShardingError):
    """Raised if a mesh has the wrong axes or device type, or overlaps the mesh of a parameter."""


class ParameterError(ShardingError):
    """Raised if a parameter cannot be sharded."""


class ModuleError(ShardingError):
    """Raised if a module cannot be sharded, is sharded already, or is not sharded when required."""


class CheckpointError(ShardingError):
    """Raised on all ranks if weight files are damaged, incomplete or do not match the model."""


class StateError(ShardingError, RuntimeError):
    """Raised if a call is not allowed at this point of the training step."""


class DisagreementError(ShardingError, RuntimeError):
    """Raised on all ranks if ranks communicate for different units or with different settings."""


class UnsupportedError(ShardingError, NotImplementedError):
    """Raised for an unsupported call of torch's API. The message names the replacement."""


def _also(error: type[E], builtin: type[Exception]) -> type[E]:
    """Return a subclass of ``error`` and ``builtin`` with the name of ``error``.

    Unpickling returns an instance of ``error``, because the subclass cannot be imported by name.
    """
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
# Raised if a module is sharded already, or is not sharded although the call requires it.
ModuleStateError = _also(ModuleError, AssertionError)
# Raised if a setter cannot be called after another setter.
CallOrderError = _also(StateError, AssertionError)
# Raised if a valid parameter cannot be sharded, for example because it is not contiguous.
UnsupportedParameterError = _also(ParameterError, NotImplementedError)
# Raised if a parameter lacks the dimension to shard, or has an invalid all-gather extension.
InvalidParameterError = _also(ParameterError, AssertionError)


def first_error(actions: Iterable[Callable[[], None]]) -> Exception | None:
    """Call all ``actions``, even if some raise. Return the first exception, or None."""
    errors = []
    for action in actions:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the caller raises it
            errors.append(error)
    return errors[0] if errors else None


class Once:
    """Flag for a warning that is issued only once."""

    def __init__(self) -> None:
        self._was_called = False

    def first(self) -> bool:
        """Return True at the first call, then False."""
        before, self._was_called = self._was_called, True
        return not before


def shown(value: object) -> str:
    """Return a description of an invalid argument for an error message.

    The description has no memory addresses, so it is the same on all ranks.
    """
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, str | int | float | None):
        return repr(value)
    return f"of type {type(value).__name__}"


def is_int(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
