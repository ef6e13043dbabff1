"""What can be wrong with a layout, a mesh or a plan; all are found before any communication."""

from functools import partial


class LayoutError(ValueError):
    """Raised for an impossible layout or pair of layouts, or for a tensor that does not fit."""


class MeshError(LayoutError, RuntimeError):
    """Raised if a mesh, a rank or a process group is missing or does not belong to the call."""


class NoPlanError(LayoutError):
    """Raised if every plan needs more memory than allowed.

    Attributes:
        max_bytes: The given limit, in bytes.
        best_peak: Peak memory of the plan that needs least, in bytes.
    """

    def __init__(self, message: str, *, max_bytes: int, best_peak: int) -> None:
        super().__init__(message)
        self.max_bytes = max_bytes
        self.best_peak = best_peak

    def __reduce__(self) -> tuple[object, ...]:
        numbers = {"max_bytes": self.max_bytes, "best_peak": self.best_peak}
        return partial(NoPlanError, str(self), **numbers), ()
