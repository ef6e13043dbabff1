"""The numbers that rules need, read from whatever describes a model."""

from collections.abc import Iterator

from ._config import read_field

# Spellings in use, most common first: Hugging Face configurations, then research code bases.
SPELLINGS = {
    "heads": ("num_attention_heads", "n_heads", "num_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "ffn": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "ffn"),
    "vocab": ("vocab_size", "vocab"),
}


def read_model(model: object) -> dict[str, tuple[str, int]]:
    """Return ``{field: (its spelling, its value)}`` for the fields that are there.

    ``model`` is a mapping, a configuration object, or anything that has one as ``config``; language
    models nested as ``text_config`` are found.
    """
    fields: dict[str, tuple[str, int]] = {}
    for source in _sources(model):
        for field, spellings in SPELLINGS.items():
            for spelling in spellings:
                value = read_field(source, spelling)
                if field not in fields and isinstance(value, int):
                    fields[field] = spelling, value
    return fields


def _sources(model: object) -> Iterator[object]:
    for source in (model, read_field(model, "config")):
        if source is not None:
            yield source
            nested = read_field(source, "text_config")
            if nested is not None:
                yield nested
