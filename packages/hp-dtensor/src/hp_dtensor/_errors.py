"""What can be wrong with a layout, a mesh or a plan; all are found before any communication."""

from functools import partial


class LayoutError(ValueError):
    """A layout, a placement, or a pair of layouts that cannot be, or a tensor that does not fit."""


class MeshError(LayoutError, RuntimeError):
    """A mesh, a rank or a process group that is not there or does not belong; as torch raises."""


class NoPlanError(LayoutError):
    """Every plan needs more memory than allowed.

    Attributes:
        max_bytes: The limit that was given.
        best_peak: The least number of bytes that some plan needs.
    """

    def __init__(self, message: str, *, max_bytes: int, best_peak: int) -> None:
        super().__init__(message)
        self.max_bytes = max_bytes
        self.best_peak = best_peak

    def __reduce__(self) -> tuple[object, ...]:
        numbers = {"max_bytes": self.max_bytes, "best_peak": self.best_peak}
        return partial(NoPlanError, str(self), **numbers), ()
