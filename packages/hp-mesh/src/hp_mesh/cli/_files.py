"""Degrees and model configurations read from files."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from os.path import exists
from pathlib import Path
from typing import Any

from .._errors import join_words
from ._problems import refusal

SUFFIXES = (".toml", ".yaml", ".yml", ".json")
MOST_LEVELS = 64
TOO_DEEP = f"its values are nested in more than {MOST_LEVELS} levels"


def read_table(place: str) -> Mapping[str, Any]:
    """Return the table that ``FILE`` or ``FILE:TABLE`` names; ``a.b`` is table b of table a.

    Raises `ParallelDimsError` where the file cannot be read or has no such table.
    """
    path, _, table = (place, "", "") if exists(place) else place.rpartition(":")
    if not path:
        path, table = place, ""
    found = read_mapping(Path(path))
    for name in table.split(".") if table else ():
        inner = found.get(name)
        if not isinstance(inner, Mapping):
            tables = [key for key, value in found.items() if isinstance(value, Mapping)]
            has = f"its tables are {join_words(tables, 'and')}" if tables else "it has no table"
            raise refusal("config", f"{path} has no table {table!r}; {has}", {"table": table})
        found = inner
    return found


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Return what a TOML, YAML or JSON file holds, which must be a mapping."""
    if path.suffix.lower() not in SUFFIXES:
        raise _refused(path, f"its name must end in {join_words(SUFFIXES)}")
    try:
        text = path.read_text(encoding="utf-8")
        content = _parse(text, path.suffix.lower())
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from None
    except ImportError:
        raise _refused(path, "YAML needs the package pyyaml; use TOML or JSON") from None
    except RecursionError:
        raise _refused(path, TOO_DEEP) from None
    except ValueError as error:  # bytes that are no text, text that is no TOML, YAML or JSON
        raise _refused(path, " ".join(str(error).split())) from None
    if _is_deep(content):
        raise _refused(path, TOO_DEEP)
    if not isinstance(content, Mapping):
        raise _refused(path, "it does not hold a mapping of names to values")
    return content


def _is_deep(content: object) -> bool:
    """Return whether values lie so deep that printing them again could exhaust the stack."""
    level = [content]
    for _ in range(MOST_LEVELS):
        # YAML may name one value in several places, and even inside itself.
        inner = {id(value): value for outer in level for value in _values(outer)}
        level = [*inner.values()]
    return bool(level)


def _values(content: object) -> Iterable[object]:
    if isinstance(content, Mapping):
        return content.values()
    return content if isinstance(content, list) else ()


def _parse(text: str, suffix: str) -> object:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _refused(path: Path, reason: str) -> Exception:
    return refusal("file", f"cannot read {path}: {reason}", {"path": str(path)})
