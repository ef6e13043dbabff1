"""Fields of the planner's inputs: their checks, and their descriptions for the command line."""

from collections.abc import Iterator
from dataclasses import field, fields
from typing import Any, get_args

from .._errors import (
    Violation,
    amount_violations,
    flag_violations,
    integer_violations,
    join_words,
    number_violation,
    take_integers,
)

SHARES = ("memory_fraction",)  # fields that are at most 1


def option(
    help: str, *, unit: str = "", choices: tuple[object, ...] = (), zero: bool = False
) -> dict[str, Any]:
    """Return the metadata of a field from which the command line makes an option.

    Args:
        help: Description. The command line appends the default.
        unit: Unit of a number. A field without unit and choices is a flag.
        choices: Legal values, besides a default of None.
        zero: If True, a number may be 0.
    """
    return {"help": help, "unit": unit, "choices": choices, "zero": zero}


def optional(default: object, help: str, **metadata: Any) -> Any:
    """Return a dataclass field with a default and the metadata of `option`."""
    return field(default=default, metadata=option(help, **metadata))


def check_fields(values: Any) -> list[Violation]:
    """Check every field of a frozen dataclass, after converting its integers of other types to int.

    The type of a field decides which values are legal. None is legal if it is the default. Fields
    with this default are checked after the others.

    | type | legal values |
    |---|---|
    | a field with ``choices`` | one of them |
    | bool | True and False |
    | int | at least 1; at least 0 if the default is 0 |
    | float | finite and above 0; also 0 if the default is 0 or with ``zero``; `SHARES`: at most 1 |
    | others | not checked here |
    """
    optional_last = sorted(fields(values), key=lambda each: each.default is None)
    every = {each: (each.type, *get_args(each.type)) for each in optional_last}
    take_integers(values, [each.name for each, types in every.items() if int in types])
    wrong: list[Violation] = []
    for each, types in every.items():
        name, value = each.name, getattr(values, each.name)
        zero = each.default == 0 or each.metadata.get("zero", False)
        if value is None and each.default is None:
            continue
        if choices := each.metadata.get("choices"):
            wrong += _choice_violations(name, value, choices)
        elif each.type is bool:
            wrong += flag_violations({name: value})
        elif int in types:
            wrong += integer_violations({name: value}, minimum=0 if zero else 1)
        elif float in types:
            found = list(amount_violations({name: value}, zero=zero))
            if name in SHARES and not found and value > 1:
                found = [number_violation(name, value, "1 or below")]
            wrong += found
    return wrong


def _choice_violations(
    name: str, value: object, choices: tuple[object, ...]
) -> Iterator[Violation]:
    # True == 1, but one is not legal if the other is.
    typed = [(choice, type(choice) is bool) for choice in choices]
    if (value, type(value) is bool) not in typed:
        yield number_violation(name, value, join_words(map(repr, choices)))
