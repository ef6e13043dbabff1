"""Degrees from mappings, configuration objects and command lines, as constructor arguments."""

import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

from ._degrees import BASE_AXES
from ._errors import ParallelDimsError, Violation, join_words

HELP = {
    "dp_replicate": "data-parallel replicas of the sharded model",
    "dp_shard": "ranks that shard parameters; -1 takes what the other degrees leave",
    "cp": "context-parallel ranks: parts of one sequence",
    "tp": "tensor-parallel ranks: parts of one layer",
    "pp": "pipeline stages",
    "ep": "expert-parallel ranks",
    "etp": "tensor-parallel ranks inside one expert: 1 or tp",
    "ulysses_degree": "ranks of cp that exchange heads instead of sequence",
}
OTHERS = {
    "ep_mode": "folded: experts on ranks of dp_shard, cp and tp; peer: on an axis of their own",
    "order": f"axes, outermost first, e.g. {','.join(BASE_AXES)}",
    "fsdp_folds_cp": "true: parameters are sharded over dp_shard and cp; false: over dp_shard",
}
SETTINGS = (*HELP, *OTHERS)
FIELDS = (*SETTINGS, "world_size")


def read_field(source: object, name: str) -> Any:
    """Return an entry of a mapping or an attribute of an object, None where it is absent."""
    if isinstance(source, Mapping):
        return source.get(name)
    return getattr(source, name, None)


def arguments_from_config(config: object) -> dict[str, Any]:
    """Return the constructor arguments that a configuration gives; absent and None mean default.

    ``dp`` is an older name of ``dp_shard``. Raises `ParallelDimsError` where both differ.
    """
    given = {name: read_field(config, name) for name in SETTINGS}
    arguments = {name: value for name, value in given.items() if value is not None}
    dp = read_field(config, "dp")
    if dp is not None and arguments.setdefault("dp_shard", dp) != dp:
        shard = arguments["dp_shard"]
        raise ParallelDimsError(
            [
                Violation(
                    rule="dp",
                    values={"dp": dp, "dp_shard": shard},
                    reason=f"dp={dp} and dp_shard={shard} differ, but dp is an older name of "
                    "dp_shard; give one of them",
                )
            ]
        )
    return arguments


def arguments_from_dict(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping as constructor arguments; a key that is none raises `ParallelDimsError`."""
    unknown = [key for key in mapping if key not in FIELDS]
    if unknown:
        raise ParallelDimsError(
            [
                Violation(
                    rule="field",
                    values={key: mapping[key]},
                    reason=f"{key!r} is not a field; use {join_words(FIELDS)}",
                )
                for key in unknown
            ]
        )
    return dict(mapping)


def add_arguments(parser: ArgumentParser) -> None:
    """Add ``--dp-replicate``, ``--dp-shard``, ... ``--ep-mode`` and ``--order``, all optional.

    Values stay text here, so that a wrong one gets the error that every other way in gives.
    """
    group = parser.add_argument_group("parallel degrees")
    for name, text in HELP.items():
        group.add_argument(f"--{name.replace('_', '-')}", metavar="N", help=text)
    for name, text in OTHERS.items():
        metavar = name.upper().replace("_", "-")
        group.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text)


def arguments_from_args(args: Namespace) -> dict[str, Any]:
    """Return the constructor arguments that were given on the command line."""
    given = {name: read_field(args, name) for name in SETTINGS}
    return {name: value for name, value in given.items() if value is not None}


def read_toml(path: str | PathLike[str], table: str | None) -> Mapping[str, Any]:
    """Return a TOML file's content, or the table under a name such as ``"run.mesh"``."""
    with open(path, "rb") as file:
        return _table(fspath(path), tomllib.load(file), table)


def read_yaml(path: str | PathLike[str], table: str | None) -> Mapping[str, Any]:
    """Return a YAML file's content, or the mapping under a name such as ``"run.mesh"``."""
    try:
        import yaml
    except ImportError as error:
        raise ImportError("reading YAML needs PyYAML: pip install pyyaml") from error
    with open(path, "rb") as file:
        return _table(fspath(path), yaml.safe_load(file), table)


def _table(path: str, content: Any, table: str | None) -> Mapping[str, Any]:
    here = path
    for name in table.split(".") if table else ():
        names = [*content] if isinstance(content, Mapping) else []
        if name not in names:
            raise _no_table(here, f"has no {name!r}; use {join_words(names) or 'no table'}")
        content, here = content[name], f"{here}:{name}"
    if content is None:  # an empty YAML document
        return {}
    if not isinstance(content, Mapping):
        raise _no_table(here, f"holds {type(content).__name__} and not named fields")
    return content


def _no_table(where: str, reason: str) -> ParallelDimsError:
    violation = Violation(rule="table", values={"file": where}, reason=f"{where} {reason}")
    return ParallelDimsError([violation])
