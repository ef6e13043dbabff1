"""Degrees from the words of a command line and from files."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from .._config import FIELDS
from .._degrees import INFERRED, world_axes
from .._dims import ParallelDims
from .._errors import join_words
from ._files import read_table
from ._numbers import MOST_RANKS, read_count, whole_number
from ._problems import Problems, refusal


def read_dims(words: Iterable[str], config: str | None, world: str | None) -> ParallelDims:
    """Return the resolved degrees; see `read_values` and `make_dims`."""
    return make_dims(*read_values(words, config, world))


def read_values(
    words: Iterable[str], config: str | None, world: str | None
) -> tuple[Mapping[str, Any], int | None]:
    """Return the fields as given, and the world; a word replaces the file's value of its name.

    Raises one `ParallelDimsError` with all words and numbers that cannot be read.
    """
    problems = Problems()
    fields: dict[str, Any] = {}
    ranks = None
    with problems.noted():
        fields |= read_table(config) if config is not None else {}
    with problems.noted():
        fields |= read_words(words)
    with problems.noted():
        ranks = read_count("--world", world, MOST_RANKS)
    with problems.noted():
        _check_sizes(fields)
    problems.raise_all()
    return fields, ranks


def make_dims(fields: Mapping[str, Any], ranks: int | None) -> ParallelDims:
    """Return the resolved degrees; without a world it is the product of the degrees given.

    Raises one `ParallelDimsError` with all rules that the fields break.
    """
    dims = ParallelDims.from_dict(fields)
    if ranks is None and dims.world_size is None:
        ranks = _product(dims)
        _check_sizes({"world_size": ranks})
    return dims if ranks is None else dims.resolve(ranks)


def _check_sizes(fields: Mapping[str, object]) -> None:
    """Raise for numbers of ranks that nothing here could list in any time."""
    for name, value in fields.items():
        number = whole_number(value) if isinstance(value, str) else value
        if isinstance(number, int) and number > MOST_RANKS:
            raise refusal(
                "size",
                f"{name}={value} is more than the {MOST_RANKS} ranks that can be laid out here",
                {name: number},
            )


def read_words(words: Iterable[str]) -> Mapping[str, object]:
    """Return words like ``tp=8`` as fields; what is no integer stays text, to be judged later."""
    fields: dict[str, object] = {}
    problems = Problems()
    for word in words:
        with problems.noted():
            name, equals, text = word.partition("=")
            if not (name and equals and text):
                raise refusal("word", f"{word!r} is not NAME=VALUE; write e.g. tp=8", {})
            if name not in FIELDS:
                raise refusal(
                    "field", f"{name!r} is not a field; use {join_words(FIELDS)}", {name: text}
                )
            if name in fields:
                raise refusal("word", f"{name} is given twice; give it once", {name: text})
            number = whole_number(text)
            fields[name] = text if number is None else number
    problems.raise_all()
    return fields


def word_line(dims: ParallelDims) -> str:
    """Return the words that `read_words` takes for these degrees; the world is not among them."""
    words = [
        f"{name}={','.join(value) if name == 'order' else value}"
        for name, value in _choices(dims).items()
    ]
    return " ".join(words) or "dp_shard=1"


def constructor_line(dims: ParallelDims) -> str:
    """Return the Python expression for these degrees, with the world."""
    arguments = {**_choices(dims), "world_size": dims.layout().world_size}
    return f"ParallelDims({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _choices(dims: ParallelDims) -> dict[str, Any]:
    """Return the fields that differ from their defaults; ``dp_shard=1`` goes without saying."""
    values = {field.name: (field.default, getattr(dims, field.name)) for field in fields(dims)}
    del values["world_size"]
    return {
        name: value
        for name, (default, value) in values.items()
        if value != default and (name, value) != ("dp_shard", 1)
    }


def _product(dims: ParallelDims) -> int:
    open_axes = [name for name in world_axes(dims.ep_mode) if getattr(dims, name) == INFERRED]
    if open_axes:
        raise refusal(
            "resolved",
            f"{open_axes[0]}=-1 follows from the world; give --world N",
            dict.fromkeys(open_axes, INFERRED),
        )
    return replace(dims, dp_shard=dims.dp_shard or 1).layout().world_size
