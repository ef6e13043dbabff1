"""Errors of this package, raised before any communication unless a docstring says otherwise."""


class ContextParallelError(ValueError):
    """Base class of all errors of this package."""


class InputError(ContextParallelError):
    """Raised if a tensor, a mask, a layout, a degree or another argument is invalid."""


class BackendError(ContextParallelError):
    """Raised if an attention backend does not exist or cannot compute the given inputs."""


def described(value: object) -> str:
    """Return what was given in a few words: plain values as they are, others by their type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"
