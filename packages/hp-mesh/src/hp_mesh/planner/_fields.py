"""Dataclass fields of the planner's inputs: validation, and metadata for command-line options."""

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

SHARES = ("memory_fraction",)  # names of fields whose largest value is 1


def option(
    help: str, *, unit: str = "", choices: tuple[object, ...] = (), zero: bool = False
) -> dict[str, Any]:
    """Return metadata for a dataclass field. The command line makes an option from it.

    Args:
        help: Help text of the option. The command line appends the default.
        unit: Unit of a numeric field. A field with neither unit nor choices is a flag.
        choices: Legal values. If the default is None, it is legal too.
        zero: If True, a number may be 0.
    """
    return {"help": help, "unit": unit, "choices": choices, "zero": zero}


def optional(default: object, help: str, **metadata: Any) -> Any:
    """Return a dataclass field with a default and the metadata that `option` returns."""
    return field(default=default, metadata=option(help, **metadata))


def check_fields(values: Any) -> list[Violation]:
    """Check every field of a frozen dataclass, and return the violations.

    Integers of other types, such as those of NumPy, are converted to int first. If the default of a
    field is None, the value None is legal, and the field is checked after the others. Other values
    are checked by the type of the field:

    | type | legal values |
    |---|---|
    | a field with ``choices`` | one of the choices |
    | bool | True and False |
    | int | at least 1 |
    | float | finite and above 0; fields in `SHARES`: at most 1 |
    | others | not checked here |

    0 is also legal for a number if the default is 0, or if the metadata has ``zero=True``.
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
    # Types are compared too, because True == 1: the choice True does not make 1 legal.
    typed = [(choice, type(choice) is bool) for choice in choices]
    if (value, type(value) is bool) not in typed:
        yield number_violation(name, value, join_words(map(repr, choices)))
