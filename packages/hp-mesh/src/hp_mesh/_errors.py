"""Broken rules (`Violation`), error classes, and functions that check single values.

A rule is a condition that degrees must meet. `Violation` describes a broken rule.
"""

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

LARGEST = 2**32  # the number of ranks and a model's sizes are at most this number
MOST_CHOICES = 24  # an error message lists at most this many legal values of a name
MOST_LETTERS = 80  # longer values are shortened in error messages
MOST_DIGITS = 4000  # digits of an integer in a string that are read; Python reads at most 4300
INFERRED = -1  # a degree that is computed from the world size and the other degrees


def join_words(words: Iterable[object], last: str = "or") -> str:
    """Join words to an English list, such as ``"a"``, ``"a or b"`` or ``"a, b or c"``."""
    texts = [str(word) for word in words]
    return f" {last} ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)


def plural(count: int, noun: str) -> str:
    """Return a number and a noun as text, such as ``"1 rank"`` or ``"2 ranks"``."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"


def show(value: object) -> str:
    """Return ``repr(value)``, shortened in the middle if it has more than 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of several thousand digits
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
    """One broken rule, with the values that the rule compared and the values to use instead.

    ``str(violation)`` is one line: ``reason``, then the values to use. It lists at most 24 values
    for each name, and the number of further values.

    Args:
        rule: Code of the rule, such as ``"heads-tp"``. Codes do not change between versions.
        reason: Description of the problem, such as ``"tp=4 does not divide heads=6"``.
        values: The values that the rule compared. A key is the name of a degree or field.
        legal: A key is the name of a degree or field, and the value has all legal values of this
            name. Each entry assumes that nothing else changes. A key such as ``"cp*tp"`` is a
            product of degrees: its factors have to change together.
        level: ``"error"`` if the degrees cannot be used. ``"advice"`` if the degrees work, but cost
            time or memory.

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
        # If the reason begins with the only name in `legal`, the name is not repeated: "tp=4 does
        # not divide heads=6; use 1, 2, 3 or 6".
        first = next(iter(choices))
        alone = len(self.legal) == 1 and self.reason.startswith(
            f"{first}={self.values.get(first)} "
        )
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
    """Evaluation of one rule. `ParallelDims.explain` returns one for each rule.

    Args:
        rule: Code of the rule, such as ``"heads-tp"``.
        sentence: The rule as an English sentence.
        values: The values that the rule compares. A key is the name of a degree or field.
        verdict: One of five strings.

            - ``"holds"``: the rule is not broken.
            - ``"error"``: the degrees cannot be used, or a value of the model is invalid.
            - ``"advice"``: the rule is broken, but the degrees work. They cost time or memory.
            - ``"skipped"``: the rule needs a value that neither the model nor the arguments of
              `ParallelDims.explain` have.
            - ``"idle"``: the rule does not apply to the degrees, for example because ``tp`` is 1.
        text: The violation if the rule is broken. Otherwise the values and, if the verdict is
            ``"skipped"``, the name of the missing value.

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
    """Result of `ParallelDims.check`: a sequence of `Violation` objects.

    Args:
        violations: Broken rules, of level ``"error"`` or ``"advice"``.
        skipped: Names of the values that a rule needs, but that neither the model nor the arguments
            of `ParallelDims.check` have, such as ``"kv_heads"`` or ``"seq_len"``. A rule that needs
            such a value was not tested.

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
        """The violations of level ``"error"``. If there are any, the degrees cannot be used."""
        return tuple(v for v in self._violations if v.level == "error")


class ParallelDimsError(ValueError):
    """Raised for invalid degrees or other invalid arguments.

    The attribute ``violations`` is a list of `Violation` objects. The message has one line for each
    violation.
    """

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
    """Create a `Violation`. The arguments are its fields."""
    return Violation(rule=rule, reason=reason, values=values, legal=legal or {}, level=level)


def refusal(
    rule: str,
    reason: str,
    values: Mapping[str, object],
    legal: Mapping[str, tuple[int, ...]] | None = None,
) -> ParallelDimsError:
    """Create a `ParallelDimsError` with one violation. The arguments are fields of `Violation`."""
    return ParallelDimsError([broken(rule, reason, values, legal)])


class LayoutError(ValueError):
    """Raised for a mesh dimension, rank or coordinate that does not exist."""


class MeshError(ValueError):
    """Raised if meshes cannot be built or used, for example without a process group."""


def raise_errors(violations: Iterable[Violation]) -> None:
    """Raise one `ParallelDimsError` with all violations of level ``"error"``.

    If there are only violations of level ``"advice"``, or none, the function returns normally.
    """
    errors = [violation for violation in violations if violation.level == "error"]
    if errors:
        raise ParallelDimsError(errors)


def read_integer(value: Any) -> int | None:
    """Convert an integer, such as a numpy integer, to int.

    Returns None if ``value`` is a bool or not an integer.
    """
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    return None


def as_integer(value: Any) -> Any:
    """Convert an integer, such as a numpy integer, to int. Return any other value unchanged."""
    number = read_integer(value)
    return value if number is None else number


def integer_of(text: str) -> int | None:
    """Parse an integer such as ``"8"`` or ``"-1"``.

    Returns None if ``text`` is not a sequence of ASCII digits, with or without a minus sign. Only
    the first `MOST_DIGITS` characters are converted: the result is wrong, but still too large.
    """
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        return None
    return int(text[:MOST_DIGITS])  # Python refuses to parse several thousand digits


def take_integers(values: object, names: Iterable[str]) -> None:
    """Convert integers in an instance of a frozen dataclass, such as numpy integers, to int.

    A field with a value of another type is not changed.

    Args:
        values: Instance of the dataclass. It is changed in place.
        names: Names of the fields to convert.
    """
    for name in names:
        object.__setattr__(values, name, as_integer(getattr(values, name)))


@overload
def as_degree(name: str, value: Degree, *, inferable: bool = ...) -> int: ...
@overload
def as_degree(name: str, value: Degree, *, inferable: bool = ..., optional: bool) -> int | None: ...
def as_degree(
    name: str, value: Degree, *, inferable: bool = False, optional: bool = False
) -> int | None:
    """Convert the value of a degree to int and check that it is positive.

    Args:
        name: Name of the field, for error messages.
        value: An integer of any type except bool, or a string such as ``"8"``.
        inferable: If True, -1 is allowed too. It means that the degree is to be inferred.
        optional: If True, None is allowed too.

    Returns:
        An integer from 1 to 2**32, or -1 if ``inferable`` is True, or None if ``optional`` is True.

    Raises:
        ParallelDimsError: ``value`` is another integer, or of another type.
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
    """Convert True, False, ``"true"`` or ``"false"`` to bool.

    Args:
        name: Name of the option, for the error message.
        value: A bool, or a string in upper or lower case.

    Raises:
        ParallelDimsError: ``value`` has another type, or is another string.
    """
    flag = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if isinstance(flag, bool):
        return flag
    raise refusal("value", f"{name}={show(value)} is neither true nor false", {name: value})


def integer_violations(values: Mapping[str, object], minimum: int = 1) -> Iterator[Violation]:
    """Yield a violation for every value that is not an integer from ``minimum`` to 2**32.

    A key of ``values`` is the name of the value in the message.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            yield number_violation(name, value, f"an integer of at least {minimum}")
        elif value > LARGEST:
            yield number_violation(name, value, f"at most {LARGEST}")


def amount_violations(values: Mapping[str, object], *, zero: bool = False) -> Iterator[Violation]:
    """Yield a violation for every value that is not a number above 0, up to 2**32.

    Args:
        values: A key is the name of the value in the message.
        zero: If True, 0 is allowed too.
    """
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
    """Yield a violation for every value that is not a bool.

    A key of ``values`` is the name of the value in the message.
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            yield number_violation(name, value, "True or False")


def kind_violations(name: str, value: object, kind: type) -> Iterator[Violation]:
    """Yield a violation if ``value`` is not an instance of ``kind``.

    ``name`` is the name of the value in the message.
    """
    if not isinstance(value, kind):
        reason = f"{name}={show(value)} given; use a {kind.__name__}"
        yield broken("type", reason, {name: value})


def number_violation(name: str, value: object, legal: str) -> Violation:
    """Create the violation for an invalid value.

    Args:
        name: Name of the value in the message.
        value: The invalid value.
        legal: Description of the legal values, such as ``"a number above 0"``.
    """
    return broken("number", f"{name}={show(value)} given; use {legal}", {name: value})
