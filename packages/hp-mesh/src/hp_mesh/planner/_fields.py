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

SHARES = ("memory_fraction",)  # names of fields with values of at most 1


def option(
    help: str, *, unit: str = "", choices: tuple[object, ...] = (), zero: bool = False
) -> dict[str, Any]:
    """Return the metadata of a dataclass field from which the command line makes an option.

    The command line makes a flag, which takes no value, if the field has no unit and no choices.

    Args:
        help: Help text of the option. The command line appends the default.
        unit: Unit of a numeric field, such as ``"tokens"``. Empty for a field that is not numeric.
        choices: Legal values, or an empty tuple if the type determines them. None is also legal if
            it is the default.
        zero: If True, a number may be 0.

    Returns:
        A dict with the four arguments. The keys are their names.
    """
    return {"help": help, "unit": unit, "choices": choices, "zero": zero}


def optional(default: object, help: str, **metadata: Any) -> Any:
    """Return a dataclass field with a default.

    ``help`` and ``metadata`` are passed to `option`. Its result becomes the field's metadata.
    """
    return field(default=default, metadata=option(help, **metadata))


def check_fields(values: Any) -> list[Violation]:
    """Return the violations of all fields of a frozen dataclass.

    The function first replaces NumPy integers and other integer types by int, although the
    dataclass is frozen. Then it checks each field:

    | field | legal values |
    |---|---|
    | with ``choices`` in its metadata | one of the choices |
    | of type bool | True and False |
    | of type int | integers from 1 |
    | of type float | finite numbers above 0; at most 1 for the fractions in `SHARES` |
    | of another type | all values |

    - 0 is a legal number if the default is 0 or the metadata has ``zero=True``.
    - None is legal if it is the default.

    The violations of fields with the default None are at the end of the list.
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
    # Types are compared too, because True equals 1, but the choice True does not make 1 legal.
    typed = [(choice, type(choice) is bool) for choice in choices]
    if (value, type(value) is bool) not in typed:
        yield number_violation(name, value, join_words(map(repr, choices)))
