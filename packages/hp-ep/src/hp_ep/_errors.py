"""The errors of this package; each is a ``ValueError``."""

from collections.abc import Sequence


class ExpertConfigError(ValueError):
    """Sizes, shapes or axes that do not fit together; raised before any communication."""


class RoutingError(ValueError):
    """Tokens, expert ids or counts that no dispatch can serve; raised on all ranks of the group."""

    reports: Sequence[Sequence[int]] = ()
    """What each rank told the others, where the error is about faults that they found."""
    ranks: Sequence[int] | None = None
    """Who they are."""


class DispatchStateError(ValueError):
    """A dispatch state that is foreign to the dispatcher, or that was combined before."""


class UnsupportedError(ValueError, NotImplementedError):
    """A call of torch's surface that this package does not answer, such as a second derivative."""
