"""All that is wrong with a command line, gathered into one error."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .._errors import LayoutError, ParallelDimsError, Violation, raise_errors


class Problems:
    """Violations met so far, so that one run of a command names all of them."""

    def __init__(self) -> None:
        self._violations: list[Violation] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keep what the block raises about its input and go on after it."""
        try:
            yield
        except ParallelDimsError as error:
            self._violations += error.violations
        except LayoutError as error:
            self._violations.append(Violation(rule="layout", reason=str(error), values={}))

    def __bool__(self) -> bool:
        return bool(self._violations)

    def raise_all(self) -> None:
        """Raise one `ParallelDimsError` with all that was noted; do nothing without any."""
        raise_errors(self._violations)


def refusal(rule: str, reason: str, values: Mapping[str, object]) -> ParallelDimsError:
    """Return the error for one thing that is wrong with the command line."""
    return ParallelDimsError([Violation(rule=rule, reason=reason, values=values)])
