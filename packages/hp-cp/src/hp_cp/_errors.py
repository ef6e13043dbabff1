"""What can be wrong with a call; before any communication unless a docstring says so."""


class ContextParallelError(ValueError):
    """A call that context parallelism cannot serve; base of the errors below."""


class InputError(ContextParallelError):
    """Tensors, a mask, a layout, a degree or other arguments that do not serve or do not fit."""


class BackendError(ContextParallelError):
    """A backend that does not exist or cannot compute what is asked."""


def described(value: object) -> str:
    """Return what was given in a few words: plain values as they are, others by their type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"
