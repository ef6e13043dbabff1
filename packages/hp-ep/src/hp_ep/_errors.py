"""The errors of this package; each is a ``ValueError``."""

from collections.abc import Sequence


class ExpertConfigError(ValueError):
    """Raised before communication if sizes, shapes, axes or options are invalid or conflict."""


class RoutingError(ValueError):
    """Raised on all ranks of a group if a rank passes invalid tokens, expert ids or counts."""

    reports: Sequence[Sequence[int]] = ()
    """Faults that the ranks of the group have reported to each other, one entry per rank."""
    ranks: Sequence[int] | None = None
    """Global ranks of the group, in the order of ``reports``."""


class DispatchStateError(ValueError):
    """Raised if a dispatch state was combined before or belongs to another dispatcher."""


class UnsupportedError(ValueError, NotImplementedError):
    """Raised for an unsupported torch feature, such as a second derivative."""
