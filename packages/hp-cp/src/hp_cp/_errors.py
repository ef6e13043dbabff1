"""What can be wrong with a call; before any communication unless a docstring says so."""


class ContextParallelError(ValueError):
    """A configuration, input or backend that context parallelism cannot serve."""


class DegreeError(ContextParallelError):
    """A Ulysses degree or a mesh that the ranks or the heads do not allow."""


class LayoutError(ContextParallelError):
    """A layout, mask or schedule that makes no plan."""


class InputError(ContextParallelError):
    """Tensors or arguments of a call that do not fit together or do not fit the plan."""


class BackendError(ContextParallelError):
    """A backend that does not exist or cannot compute what is asked."""


def described(value: object) -> str:
    """Return what was given in a few words: plain values as they are, others by their type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"
