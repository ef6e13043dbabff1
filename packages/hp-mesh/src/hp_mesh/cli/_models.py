"""Models by their name in the catalogue or by their configuration file."""

from collections.abc import Mapping
from os.path import exists
from pathlib import Path
from typing import Any

from .._errors import join_words
from ..planner import MODELS, ModelShape
from ._files import read_mapping
from ._problems import refusal


def read_fields(name: str) -> Mapping[str, Any]:
    """Return the fields of a model that rules look at; an unknown one raises."""
    return MODELS[name].to_config() if name in MODELS else _read_config(name)


def read_shape(name: str) -> ModelShape:
    """Return the shape of a model; an unknown one, or one that lacks a field, raises."""
    return MODELS[name] if name in MODELS else ModelShape.from_config(_read_config(name))


def _read_config(name: str) -> Mapping[str, Any]:
    path = Path(name)
    if not path.suffix and not exists(path):
        raise refusal(
            "model",
            f"no model {name!r}; use {join_words(MODELS)}, or the path of a config.json",
            {"model": name},
        )
    return read_mapping(path)
