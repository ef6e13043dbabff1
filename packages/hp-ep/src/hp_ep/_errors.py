"""The errors of this package; each is a ``ValueError``."""


class ExpertConfigError(ValueError):
    """Sizes, shapes or axes that do not fit together; raised before any communication."""


class RoutingError(ValueError):
    """Tokens, expert ids or counts that no dispatch can serve; raised on all ranks of the group."""


class DispatchStateError(ValueError):
    """A dispatch state that is foreign to the dispatcher, or that was combined before."""
