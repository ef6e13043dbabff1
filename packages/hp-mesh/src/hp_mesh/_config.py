"""Degrees from mappings, configuration objects and command lines, as constructor arguments."""

import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence, Set
from numbers import Number
from os import PathLike, fspath
from typing import Any

from ._degrees import BASE_AXES, as_degree
from ._errors import ParallelDimsError, Violation, join_words, show

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
READ = (*SETTINGS, "dp")  # of a configuration, whose world is given beside it
MOST_NAMES = 6  # of a configuration's own that a sentence lists
MOST_LETTERS = 30  # of each


def read_field(source: object, name: str) -> Any:
    """Return an entry of a mapping or an attribute of an object, None where it is absent."""
    if isinstance(source, Mapping):
        return source.get(name)
    return getattr(source, name, None)


def check_named(name: str, source: object) -> None:
    """Raise `ParallelDimsError` for what has no named fields: None, text, numbers and lists."""
    record = hasattr(source, "_fields")  # a tuple whose items have names
    if source is None or (isinstance(source, str | bytes | Number | Sequence | Set) and not record):
        raise _nameless(name, source, "a mapping or an object with attributes")


def _nameless(name: str, source: object, legal: str) -> ParallelDimsError:
    reason = f"{name}={show(source)} has no named fields; use {legal}"
    return ParallelDimsError([Violation(rule="fields", values={name: source}, reason=reason)])


def arguments_from_config(
    config: object, world_size: object
) -> tuple[dict[str, Any], list[Violation]]:
    """Return the constructor arguments that a configuration gives, and what is wrong among them.

    Absent and None mean default. A ``world_size`` must be the one given beside the configuration;
    ``dp`` is an older name of ``dp_shard``; both may not differ. A
    configuration that has fields, but none of these, is wrong: it may have degrees by other names.
    """
    check_named("config", config)
    empty = isinstance(config, Mapping) and not config
    if not empty and not any(_has_field(config, name) for name in READ):
        return {}, [_unread(config)]
    given = {name: read_field(config, name) for name in SETTINGS}
    arguments = {name: value for name, value in given.items() if value is not None}
    found = _other_world(read_field(config, "world_size"), world_size)
    dp = read_field(config, "dp")
    if dp is None:
        return arguments, found
    values = {"dp": dp, "dp_shard": arguments.setdefault("dp_shard", dp)}
    one, other = (as_degree(n, v, inferable=True, optional=False) for n, v in values.items())
    if one == other:
        return arguments, found
    reason = f"dp={one} and dp_shard={other} differ, but dp is an older name of dp_shard; give one "
    return arguments, [*found, Violation(rule="dp", values=values, reason=f"{reason}of them")]


def _other_world(configured: Any, given: Any) -> list[Violation]:
    if configured is None or given is None:
        return []
    worlds = (configured, given)
    its, world = (as_degree("world_size", w, inferable=False, optional=False) for w in worlds)
    if its == world:
        return []
    reason = f"world_size={world} is not the world_size={its} that the configuration is for; "
    reason += "give both the same, or leave it out of the configuration"
    values = {"world_size": world, "configured": its}
    return [Violation(rule="world", values=values, reason=reason)]


def _has_field(source: object, name: str) -> bool:
    return name in source if isinstance(source, Mapping) else hasattr(source, name)


def _unread(config: object) -> Violation:
    # Not the value itself: what an object shows of itself may differ between ranks.
    names = [*map(str, config)] if isinstance(config, Mapping) else _public_names(config)
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    has = join_words([*(name[:MOST_LETTERS] for name in names[:MOST_NAMES]), *more], "and")
    return Violation(
        rule="fields",
        values={"config": type(config).__name__},
        reason=f"config of type {type(config).__name__} has none of the names {join_words(READ)}; "
        f"it has {has or 'no fields'}",
    )


def _public_names(source: object) -> list[str]:
    return [name for name in dir(source) if not name.startswith("_")]


def arguments_from_dict(mapping: object) -> tuple[dict[str, Any], list[Violation]]:
    """Return a mapping's fields as constructor arguments, and a violation for each other key."""
    if not isinstance(mapping, Mapping):
        raise _nameless("mapping", mapping, "a mapping such as to_dict returns")
    unknown = [
        Violation(
            rule="field",
            values={key: mapping[key]},
            reason=f"{show(key)} is not a field; use {join_words(FIELDS)}",
        )
        for key in mapping
        if key not in FIELDS
    ]
    return {key: value for key, value in mapping.items() if key in FIELDS}, unknown


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
