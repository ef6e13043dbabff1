"""Refusing wrong values, all of them in one error."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from .._errors import LARGEST, Violation, join_words, show


def as_integer(value: Any) -> Any:
    """Return an integer of another type, such as numpy's, as Python's, and all else as it is."""
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    return value


def take_integers(values: object, names: Iterable[str]) -> None:
    """Replace integers of other types by Python's in a frozen dataclass."""
    for name in names:
        object.__setattr__(values, name, as_integer(getattr(values, name)))


def integer_violations(values: Mapping[str, object], minimum: int = 1) -> Iterator[Violation]:
    """Yield a violation for every value that is no integer from ``minimum`` to the largest."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            yield number_violation(name, value, f"an integer of at least {minimum}")
        elif value > LARGEST:
            yield number_violation(name, value, f"at most {LARGEST}")


def amount_violations(values: Mapping[str, object], *, zero: bool = False) -> Iterator[Violation]:
    """Yield a violation for every value that is not a finite number above 0, or 0 with ``zero``."""
    for name, value in values.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < float("inf")
            or (value == 0 and not zero)
        ):
            yield number_violation(name, value, "0 or above" if zero else "a number above 0")
        elif value > LARGEST:
            yield number_violation(name, value, f"at most {LARGEST}")


def flag_violations(values: Mapping[str, object]) -> Iterator[Violation]:
    """Yield a violation for every value that is neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            yield number_violation(name, value, "True or False")


def kind_violations(name: str, value: object, kind: type) -> Iterator[Violation]:
    """Yield a violation where a value is of another type."""
    if not isinstance(value, kind):
        reason = f"{name}={show(value)} given; use a {kind.__name__}"
        yield Violation(rule="type", values={name: value}, reason=reason)


def choice_violations(name: str, value: object, choices: Iterable[str]) -> Iterator[Violation]:
    """Yield a violation where a value is none of the words it may be."""
    choices = tuple(choices)
    if value not in choices:
        yield number_violation(name, value, join_words(map(repr, choices)))


def number_violation(name: str, value: object, legal: str) -> Violation:
    """Return the violation of a field that is not what it must be."""
    return Violation(
        rule="number", values={name: value}, reason=f"{name}={show(value)} given; use {legal}"
    )
