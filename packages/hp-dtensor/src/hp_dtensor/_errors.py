"""Errors about layouts, meshes and plans. All are raised before any data is sent."""

from functools import partial


class LayoutError(ValueError):
    """Raised if a layout is invalid, cannot be changed as requested, or contradicts the tensor."""


class MeshError(LayoutError, RuntimeError):
    """Raised if a mesh is invalid, lacks a process group, or does not contain a given rank."""


class UnsupportedError(LayoutError, NotImplementedError):
    """Raised if a call needs a feature that does not exist; the message names the replacement."""


class NoPlanError(LayoutError):
    """Raised if every plan needs more memory than allowed.

    Attributes:
        max_bytes: The given limit, in bytes.
        best_peak: Lowest peak memory of all plans, in bytes.
    """

    def __init__(self, message: str, *, max_bytes: int, best_peak: int) -> None:
        super().__init__(message)
        self.max_bytes = max_bytes
        self.best_peak = best_peak

    def __reduce__(self) -> tuple[object, ...]:
        numbers = {"max_bytes": self.max_bytes, "best_peak": self.best_peak}
        return partial(NoPlanError, str(self), **numbers), ()
