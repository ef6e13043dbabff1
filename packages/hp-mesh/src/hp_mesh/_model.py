"""The numbers that rules need, read from whatever describes a model."""

import operator
from collections.abc import Iterator
from typing import Any

from ._config import read_field
from ._errors import Violation

# Spellings in use, most common first: Hugging Face configurations, then research code bases.
SPELLINGS = {
    "heads": ("num_attention_heads", "n_heads", "num_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "ffn": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "ffn"),
    "vocab": ("vocab_size", "vocab"),
    "layers": ("num_hidden_layers", "n_layers", "num_layers", "n_layer"),
    "tied": ("tie_word_embeddings", "weight_tying", "tie_embeddings"),
}
KINDS = {"tied": "True or False"}
# A model may have a submodule or a list of words under these: there only numbers and text count.
AMBIGUOUS = ("ffn", "vocab")


def read_numbers(
    model: object, seq_len: object, global_batch: object
) -> tuple[dict[str, tuple[str, int]], dict[str, Violation]]:
    """Return ``{field: (its spelling, its value)}``, and what is wrong with the other fields given.

    ``model`` is a mapping, a configuration object, or anything that has one as ``config``; language
    models nested as ``text_config`` are found. None is absent.
    """
    given = {"seq_len": ("seq_len", seq_len), "global_batch": ("global_batch", global_batch)}
    numbers: dict[str, tuple[str, int]] = {}
    wrong: dict[str, Violation] = {}
    for field, (name, value) in {**_model_fields(model), **given}.items():
        if value is None:
            continue
        number = _flag(value) if field == "tied" else _positive(value)
        if field == "experts" and value is not False and value == 0:
            number = 0  # dense members of a family with experts say that they have none
        if number is None:
            wrong[field] = Violation(
                rule="number",
                values={name: value},
                reason=f"{name}={value!r} is not {KINDS.get(field, 'a positive integer')}",
            )
        else:
            numbers[field] = name, number
    return numbers, wrong


def _model_fields(model: object) -> dict[str, tuple[str, Any]]:
    fields: dict[str, tuple[str, Any]] = {}
    for source in _sources(model):
        for field, spellings in SPELLINGS.items():
            for spelling in spellings:
                value = read_field(source, spelling)
                other = spelling in AMBIGUOUS and not isinstance(value, int | float | str)
                if field not in fields and value is not None and not other:
                    fields[field] = spelling, value
    return fields


def _flag(value: Any) -> int | None:
    return value if isinstance(value, bool) else None


def _positive(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if number > 0 else None


def _sources(model: object) -> Iterator[object]:
    for source in (model, read_field(model, "config")):
        if source is not None:
            yield source
            nested = read_field(source, "text_config")
            if nested is not None:
                yield nested
