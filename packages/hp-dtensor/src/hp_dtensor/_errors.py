"""Errors about layouts, meshes and plans. Planning raises them before any data is sent."""

from functools import partial


class LayoutError(ValueError):
    """Raised if a layout is invalid, is impossible for a tensor, or cannot be changed as requested.

    This is the base class of `MeshError`, `UnsupportedError` and `NoPlanError`.
    """


class MeshError(LayoutError, RuntimeError):
    """Raised if a mesh is invalid, lacks a process group, or does not contain a given rank."""


class UnsupportedError(LayoutError, NotImplementedError):
    """Raised if a call needs a feature that does not exist. The message names an alternative."""


class NoPlanError(LayoutError):
    """Raised if every plan needs more memory than ``max_bytes``.

    Attributes:
        max_bytes: The limit that the caller gave, in bytes per rank.
        best_peak: Peak memory of the plan that needs the least memory, in bytes per rank. Pass at
            least this number as ``max_bytes``.
    """

    def __init__(self, message: str, *, max_bytes: int, best_peak: int) -> None:
        super().__init__(message)
        self.max_bytes = max_bytes
        self.best_peak = best_peak

    def __reduce__(self) -> tuple[object, ...]:
        numbers = {"max_bytes": self.max_bytes, "best_peak": self.best_peak}
        return partial(NoPlanError, str(self), **numbers), ()
