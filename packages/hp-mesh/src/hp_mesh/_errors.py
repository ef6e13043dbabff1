"""Violations, the errors that list them, and checks of single values."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from math import isqrt
from typing import Any, Literal, SupportsIndex, TypeAlias, overload

Level: TypeAlias = Literal["error", "advice"]
Verdict: TypeAlias = Literal["holds", "error", "advice", "skipped", "idle"]
Degree: TypeAlias = SupportsIndex | str | None

LARGEST = 2**32  # upper bound of ranks and of a model's sizes
MOST_CHOICES = 24  # legal values in one sentence
MOST_LETTERS = 80  # of one value in a sentence
MOST_DIGITS = 20  # of an integer that is read from text; more than `LARGEST` has
INFERRED = -1  # value of a degree that follows from the others


def join_words(words: Iterable[object], last: str = "or") -> str:
    """Return ``a``, ``a or b``, ``a, b or c`` ..."""
    texts = [str(word) for word in words]
    return f" {last} ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)


def show(value: object) -> str:
    """Return the repr of a value; the start and the end of a long one."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of several thousand digits
        return f"<{type(value).__name__} of too many digits>"
    if len(text) <= MOST_LETTERS:
        return text
    return f"{text[: MOST_LETTERS // 2]}...{text[-MOST_LETTERS // 4 :]}"


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive integer in ascending order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule, with the legal values.

    ``str(violation)`` is a sentence. It lists at most 24 legal values of each name and counts the
    rest.

    Args:
        rule: Code of the rule. Codes do not change between versions.
        reason: The problem, with its numbers.
        values: Every number that the rule read.
        legal: Legal values of each name, if only that name changes. A name such as ``cp*tp`` is the
            product of several degrees that have to change together.
        level: ``"error"``, or ``"advice"`` for degrees that work at a cost.

    Examples:
        >>> broken = ParallelDims(tp=4, world_size=8).check({"num_attention_heads": 6})[0]
        >>> broken.legal["tp"]
        (1, 2, 3, 6)
    """

    rule: str
    reason: str
    values: Mapping[str, object] = field(hash=False)
    legal: Mapping[str, tuple[int, ...]] = field(hash=False, default_factory=dict)
    level: Level = "error"

    def __str__(self) -> str:
        choices = {name: numbers for name, numbers in self.legal.items() if numbers}
        if not choices:
            return self.reason
        # The subject of the sentence needs no second mention.
        first = next(iter(choices))
        alone = len(choices) == 1 and self.reason.startswith(f"{first}={self.values.get(first)} ")
        options = [
            _join_choices(numbers) if alone else f"{name}={_join_choices(numbers)}"
            for name, numbers in choices.items()
        ]
        return f"{self.reason}; use {', or '.join(options)}"


def _join_choices(numbers: tuple[int, ...]) -> str:
    shown, more = numbers[:MOST_CHOICES], len(numbers) - MOST_CHOICES
    return join_words([*shown, f"{more} more"] if more > 0 else shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One rule, the numbers that it read, and its verdict.

    Args:
        rule: Code of the rule.
        sentence: The rule as a sentence.
        values: The numbers that the rule read.
        verdict: ``"holds"``, ``"error"`` or ``"advice"``; ``"skipped"`` if a field is absent;
            ``"idle"`` if the rule does not apply to these degrees.
        text: The numbers and the verdict in one line.

    Examples:
        >>> ParallelDims(tp=2, world_size=4).explain()[0].verdict
        'holds'
    """

    rule: str
    sentence: str
    values: Mapping[str, object] = field(hash=False)
    verdict: Verdict
    text: str


class Report(Sequence[Violation]):
    """Result of a check: a sequence of violations.

    Args:
        violations: Errors and advice.
        skipped: Names of fields that rules needed and did not find.

    Examples:
        >>> report = ParallelDims(tp=4, world_size=8).check({"num_attention_heads": 8})
        >>> len(report), "seq_len" in report.skipped
        (0, True)
    """

    __slots__ = ("_violations", "skipped")

    def __init__(self, violations: Iterable[Violation], skipped: Iterable[str] = ()) -> None:
        self._violations = tuple(violations)
        self.skipped = tuple(skipped)

    @overload
    def __getitem__(self, index: int) -> Violation: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Violation]: ...
    def __getitem__(self, index: int | slice) -> Violation | Sequence[Violation]:
        return self._violations[index]

    def __len__(self) -> int:
        return len(self._violations)

    def __iter__(self) -> Iterator[Violation]:
        return iter(self._violations)

    def __repr__(self) -> str:
        return f"Report({list(self._violations)!r}, skipped={self.skipped!r})"

    @property
    def errors(self) -> tuple[Violation, ...]:
        """Violations of level ``"error"``: these degrees cannot be used."""
        return tuple(v for v in self._violations if v.level == "error")


class ParallelDimsError(ValueError):
    """Raised for degrees that break one or more rules; ``violations`` lists all of them."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = list(violations)
        super().__init__("\n".join(str(violation) for violation in self.violations))

    def __reduce__(self) -> tuple[type["ParallelDimsError"], tuple[list[Violation]]]:
        return type(self), (self.violations,)


def broken(
    rule: str,
    reason: str,
    values: Mapping[str, object],
    legal: Mapping[str, tuple[int, ...]] | None = None,
    level: Level = "error",
) -> Violation:
    """Return the `Violation` with these fields."""
    return Violation(rule=rule, reason=reason, values=values, legal=legal or {}, level=level)


def refusal(
    rule: str,
    reason: str,
    values: Mapping[str, object],
    legal: Mapping[str, tuple[int, ...]] | None = None,
) -> ParallelDimsError:
    """Return the error of one broken rule."""
    return ParallelDimsError([broken(rule, reason, values, legal)])


class LayoutError(ValueError):
    """Raised for an axis, a rank or a coordinate that does not exist in the layout."""


class MeshError(ValueError):
    """Raised if meshes cannot be built or used, for example without a process group."""


def raise_errors(violations: Iterable[Violation]) -> None:
    """Raise one `ParallelDimsError` that lists all errors among the violations, if any."""
    errors = [violation for violation in violations if violation.level == "error"]
    if errors:
        raise ParallelDimsError(errors)


def read_integer(value: Any) -> int | None:
    """Return an integer of any type except bool as an int, or None if the value is no integer."""
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    return None


def as_integer(value: Any) -> Any:
    """Convert integers of other types, such as numpy's, to int; return other values unchanged."""
    number = read_integer(value)
    return value if number is None else number


def integer_of(text: str) -> int | None:
    """Return the integer that a text has in ASCII digits, with a minus sign if it is negative.

    The result is None if the text has anything else.
    """
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        return None
    return int(text[:MOST_DIGITS])  # Python reads no number of several thousand digits


def take_integers(values: object, names: Iterable[str]) -> None:
    """Convert integers of other types to int, in fields of a frozen dataclass."""
    for name in names:
        object.__setattr__(values, name, as_integer(getattr(values, name)))


@overload
def as_degree(name: str, value: Degree, *, inferable: bool = ...) -> int: ...
@overload
def as_degree(name: str, value: Degree, *, inferable: bool = ..., optional: bool) -> int | None: ...
def as_degree(
    name: str, value: Degree, *, inferable: bool = False, optional: bool = False
) -> int | None:
    """Return ``value`` as a positive integer.

    Args:
        name: Name of the field, for errors.
        value: An integer of any type except bool, or a string of one.
        inferable: Allow -1.
        optional: Allow None.

    Raises:
        ParallelDimsError: The value is something else, or above the largest number of ranks.
    """
    if value is None and optional:
        return None
    number = integer_of(value.strip()) if isinstance(value, str) else read_integer(value)
    if number is not None and (0 < number <= LARGEST or (number == INFERRED and inferable)):
        return number
    too_large = number is not None and number > LARGEST
    choices = [f"at most {LARGEST}" if too_large else "a positive integer"]
    choices += ["-1 (inferred)"] if inferable else []
    choices += ["None"] if optional else []
    reason = f"{name}={show(value)} is not a degree; use {join_words(choices)}"
    raise refusal("value", reason, {name: value})


def as_flag(name: str, value: object) -> bool:
    """Return a bool, or the string "true" or "false", as a bool.

    Raises:
        ParallelDimsError: The value is something else.
    """
    flag = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if isinstance(flag, bool):
        return flag
    raise refusal("value", f"{name}={show(value)} is neither true nor false", {name: value})


def integer_violations(values: Mapping[str, object], minimum: int = 1) -> Iterator[Violation]:
    """Yield a violation for every value that is not an integer from ``minimum`` to `LARGEST`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            yield number_violation(name, value, f"an integer of at least {minimum}")
        elif value > LARGEST:
            yield number_violation(name, value, f"at most {LARGEST}")


def amount_violations(values: Mapping[str, object], *, zero: bool = False) -> Iterator[Violation]:
    """Yield a violation for every value that is not finite and above 0; ``zero`` allows 0."""
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
    """Yield a violation for every value that is not a bool."""
    for name, value in values.items():
        if not isinstance(value, bool):
            yield number_violation(name, value, "True or False")


def kind_violations(name: str, value: object, kind: type) -> Iterator[Violation]:
    """Yield a violation if a value has another type."""
    if not isinstance(value, kind):
        reason = f"{name}={show(value)} given; use a {kind.__name__}"
        yield broken("type", reason, {name: value})


def number_violation(name: str, value: object, legal: str) -> Violation:
    """Return the violation of a field with a value that is not legal.

    ``legal`` describes the legal values, for example ``"a number above 0"``.
    """
    return broken("number", f"{name}={show(value)} given; use {legal}", {name: value})
