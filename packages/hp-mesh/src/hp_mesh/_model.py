"""The numbers that rules need, read from whatever describes a model."""

import operator
from collections.abc import Iterator
from math import gcd
from typing import Any

from ._config import check_named, read_field
from ._errors import LARGEST, Violation, show

# Spellings in use, most common first: Hugging Face configurations, then research code bases, then
# the fields of the planner's `ModelShape`.
SPELLINGS = {
    "heads": ("num_attention_heads", "n_heads", "num_heads", "n_head", "heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_n_heads", "kv_heads"),
    "experts": (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "experts",
    ),
    "ffn": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "ffn"),
    "vocab": ("vocab_size", "vocab"),
    "layers": ("num_hidden_layers", "n_layers", "num_layers", "n_layer", "layers"),
    "expert_ffn": ("moe_intermediate_size", "expert_ffn"),
    "tied": ("tie_word_embeddings", "weight_tying", "tie_embeddings", "tied"),
}
# A model may have a submodule or a list of words under these: there only numbers and text count.
AMBIGUOUS = ("ffn", "vocab", "heads", "kv_heads", "experts", "layers", "expert_ffn", "tied")
# Where each layer may have its own, in a list.
PER_LAYER = ("intermediate_size",)
# Under these a configuration keeps that of the language model, and of the parts of a layer.
NESTED = ("text_config", "attn_config", "ffn_config")


def read_numbers(
    model: object, seq_len: object, global_batch: object
) -> tuple[dict[str, tuple[str, int]], dict[str, Violation]]:
    """Return ``{field: (its spelling, its value)}``, and what is wrong with the other fields given.

    ``model`` is a mapping, a configuration object, or anything that has one as ``config``; what is
    nested as ``text_config`` and the like is found. None is absent. A field that lists a number for
    each layer is read as their greatest common divisor, which is divided where each of them is.
    Raises `ParallelDimsError` for a model that can have no fields.
    """
    check_named("model", model)
    given = {"seq_len": ("seq_len", seq_len), "global_batch": ("global_batch", global_batch)}
    numbers: dict[str, tuple[str, int]] = {}
    wrong: dict[str, Violation] = {}
    for field, (name, value) in {**_model_fields(model), **given}.items():
        if value is None:
            continue
        if name in PER_LAYER and isinstance(value, list | tuple):
            name, number = _of_layers(name, value)
        else:
            number = _flag(value) if field == "tied" else _positive(value)
        if field == "experts" and value is not False and value == 0:
            number = 0  # dense members of a family with experts say that they have none
        if number is None:
            wrong[field] = Violation(
                rule="number",
                values={name: value},
                reason=f"{name}={show(value)} is not {_legal(field, value)}",
            )
        else:
            numbers[field] = name, number
    return numbers, wrong


def _model_fields(model: object) -> dict[str, tuple[str, Any]]:
    fields: dict[str, tuple[str, Any]] = {}
    for source in _sources(model):
        one_for_all = read_field(source, "multi_query") is True
        if one_for_all and not read_field(source, "new_decoder_architecture"):
            fields.setdefault("kv_heads", ("kv_heads", 1))  # Falcon writes another number there
        for field, spellings in SPELLINGS.items():
            for spelling in spellings:
                value = read_field(source, spelling)
                other = spelling in AMBIGUOUS and not isinstance(value, int | float | str)
                if field not in fields and value is not None and not other:
                    fields[field] = spelling, value
    return fields


def _legal(field: str, value: Any) -> str:
    if field == "tied":
        return "True or False"
    too_large = isinstance(value, int) and value > LARGEST
    return f"at most {LARGEST}" if too_large else "a positive integer"


def _flag(value: Any) -> int | None:
    return value if isinstance(value, bool) else None


def _positive(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if 0 < number <= LARGEST else None


def _of_layers(name: str, values: list[Any] | tuple[Any, ...]) -> tuple[str, int | None]:
    numbers = [number for number in map(_positive, values) if number]
    if not numbers or len(numbers) < len(values):
        return name, None
    return name if len(set(numbers)) == 1 else f"gcd({name})", gcd(*numbers)


def _sources(model: object) -> Iterator[object]:
    for source in (model, read_field(model, "config")):
        if source is not None:
            yield source
            nested = (read_field(source, name) for name in NESTED)
            yield from (part for part in nested if part is not None)
