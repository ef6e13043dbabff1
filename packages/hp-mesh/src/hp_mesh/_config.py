"""Constructor arguments from mappings, configuration objects, files and command lines."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from numbers import Number
from os import PathLike, fspath
from os.path import splitext
from typing import TYPE_CHECKING, Any, BinaryIO

from ._degrees import BASE_AXES, INFERRED, as_degree, as_flag
from ._errors import ParallelDimsError, Violation, join_words, refusal, show
from ._names import (
    DATA,
    DIALECTS,
    MAPPING,
    NAMES,
    SEQUENCE,
    SETTINGS,
    has_field,
    none_read,
    read_field,
    table_of_degrees,
    unread_degrees,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

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
    "free_etp": "true: etp may be any degree whose product with ep divides dp_shard*cp*tp",
}
FIELDS = (*SETTINGS, "world_size")
MOST_LEVELS = 64  # of a file whose values may be shown


def check_named(name: str, source: object) -> None:
    """Raise `ParallelDimsError` for what has no named fields: None, text, numbers and lists."""
    record = hasattr(source, "_fields")  # a tuple whose items have names
    if source is None or (isinstance(source, str | bytes | Number | Sequence | Set) and not record):
        raise _nameless(name, source, "a mapping or an object with attributes")


def _nameless(name: str, source: object, legal: str) -> ParallelDimsError:
    reason = f"{name}={show(source)} has no named fields; use {legal}"
    return refusal("fields", reason, {name: source})


def arguments_from_config(
    config: object, world_size: object
) -> tuple[dict[str, Any], list[Violation], bool]:
    """Return the constructor arguments that a configuration gives, and what is wrong among them.

    Names are those of `DIALECTS`, also of several at once; an absent name and None mean default.
    Names of one field may not differ. Other names are ignored, but not one that says a degree
    other than 1, nor a configuration with none of the names. A ``world_size`` must be the one
    given beside the configuration, if one is.

    Returns:
        The arguments, the violations, and whether an absent ``etp`` is ``tp``.

    Raises:
        ParallelDimsError: The configuration can have no fields, or a value is no degree.
    """
    check_named("config", config)
    present = [name for name in NAMES if has_field(config, name)]
    empty = isinstance(config, Mapping) and not config
    if not present and not empty:
        return {}, [none_read(config)], False
    values = {name: value for name in present if (value := _value(config, name)) is not None}
    configured = read_field(config, "world_size")
    found = [*_other_world(configured, world_size), *unread_degrees(config), *_take_order(values)]
    arguments, differing = _merged(values)
    arguments["world_size"] = configured if world_size is None else world_size
    follows = all(d.etp_follows_tp or not values.keys() & d.names.keys() for d in DIALECTS)
    return arguments, found + differing, follows and "etp" not in arguments


def _take_order(values: dict[str, Any]) -> Iterator[Violation]:
    """Replace Megatron-LM's orders, innermost first; yield where there are two that differ."""
    order = values.get("order")
    if isinstance(order, str) and "-" in order:
        values["order"] = order = _outermost_first(order)
    name = next((name for name in values if NAMES[name] == MAPPING), None)
    if name is None or not as_flag(name, values.pop(name)):
        return
    values["order"] = _outermost_first("tp-cp-ep-pp-dp")
    if order not in (None, values["order"]):
        reason = f"{name} is order={show(values['order'])}, which is not order={show(order)}; "
        reason += "give one of them"
        yield Violation(rule="names", values={name: True, "order": order}, reason=reason)


def _outermost_first(order: str) -> tuple[str, ...]:
    data = {"dp": ("dp_replicate", "dp_shard")}
    names = [name.strip() for name in reversed(order.split("-"))]
    return tuple(axis for name in names for axis in data.get(name, (name,)))


def _value(config: object, name: str) -> Any:
    value = read_field(config, name)
    off = next(dialect.off for dialect in DIALECTS if name in dialect.names)
    return None if isinstance(value, int) and value in off else value


def _merged(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Violation]]:
    """Return the fields that names give, and a violation for each that is given differently."""
    degrees: dict[str, int | None] = {}
    wrong: list[Violation] = []
    fields = [NAMES[name] for name in values]
    for name, value in values.items():
        # What has its own name alone is judged with all other fields, and need be no degree.
        if name != NAMES[name] or fields.count(name) > 1:
            try:
                degrees[name] = as_degree(name, value, inferable=True, optional=False)
            except ParallelDimsError as error:
                wrong += error.violations
    if wrong:
        raise ParallelDimsError(wrong)
    arguments: dict[str, Any] = {}
    differing: list[Violation] = []
    for field in dict.fromkeys(fields):
        names = [name for name in values if NAMES[name] == field]
        own = [name for name in names if name == field]
        arguments[field] = values[(own or names)[0]]
        if len({degrees.get(name) for name in names}) > 1:
            differing.append(_differing(field, sorted(names), degrees, values))
    differing += _take_data(arguments)
    return _with_sequence(arguments), differing


def _take_data(arguments: dict[str, Any]) -> Iterator[Violation]:
    """Replace data-parallel ranks by those that shard; yield where the two degrees make others."""
    ranks = arguments.pop(DATA, None)
    if ranks is None:
        return
    given = {name: arguments.get(name) for name in ("dp_replicate", "dp_shard")}
    data = as_degree("data_parallel_size", ranks, inferable=True, optional=False) or 1
    replicate, shard = (
        as_degree(name, value, inferable=True, optional=True) for name, value in given.items()
    )
    if data == INFERRED:
        if shard is None and replicate != INFERRED:
            arguments["dp_shard"] = INFERRED
        return
    # Of -1 and one that is not given the other is what remains.
    if replicate == INFERRED and shard != INFERRED and data % (shard or 1) == 0:
        arguments |= {"dp_replicate": data // (shard or 1), "dp_shard": shard or 1}
    elif shard in (None, INFERRED) and replicate != INFERRED and data % (replicate or 1) == 0:
        arguments["dp_shard"] = data // (replicate or 1)
    elif replicate != INFERRED != shard and (replicate or 1) * (shard or 1) != data:
        names = {name: value for name, value in given.items() if value is not None}
        texts = "*".join(names) + "=" + "*".join(str(value) for value in names.values())
        reason = f"data_parallel_size={data} is not {texts}; leave it out, or give what it is"
        yield Violation(rule="names", values={"data_parallel_size": data, **names}, reason=reason)


def name_data(error: ParallelDimsError, config: object) -> ParallelDimsError:
    """Return the error with the name in ``config`` from which ``dp_shard`` was read."""
    fields = (DATA, "dp_shard")
    names = [n for n in NAMES if n != "dp_shard" and NAMES[n] in fields and has_field(config, n)]
    if not names or any(name in str(error) for name in names):
        return error
    given = (f"{name}={show(read_field(config, name))}" for name in names)
    source = f" (dp_shard is read from {join_words(given, 'and')})"
    return ParallelDimsError(
        replace(each, reason=each.reason + source) if "dp_shard" in each.values else each
        for each in error.violations
    )


def _with_sequence(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace sequence parallel ranks that exchange heads by Ulysses ranks among those of cp."""
    ranks = arguments.pop(SEQUENCE, None)
    if ranks is None:
        return arguments
    ulysses = as_degree(SEQUENCE, ranks, inferable=False, optional=False) or 1
    cp = as_degree("cp", arguments.get("cp"), inferable=False, optional=True) or 1
    if ulysses == 1:
        return arguments
    return {**arguments, "cp": cp * ulysses, "ulysses_degree": ulysses}


def _differing(
    field: str, names: list[str], degrees: Mapping[str, Any], values: Mapping[str, Any]
) -> Violation:
    given = {name: values[name] for name in names}
    texts = join_words((f"{name}={degrees[name]}" for name in names), "and")
    if names == ["dp", "dp_shard"]:
        reason = f"{texts} differ, but dp is an older name of dp_shard; give one of them"
        return Violation(rule="dp", values=given, reason=reason)
    reason = f"{texts} differ, but all of them are {field}; give one of them"
    return Violation(rule="names", values=given, reason=reason)


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
    inner = table_of_degrees(mapping)
    if inner is not None and len(unknown) == len(mapping):
        reason = f"{inner} has names of degrees, and its surroundings none; give table={inner!r}"
        unknown.append(Violation(rule="field", values={"table": inner}, reason=reason))
    return {key: value for key, value in mapping.items() if key in FIELDS}, unknown


def add_arguments(parser: "ArgumentParser") -> None:
    """Add ``--dp-replicate``, ``--dp-shard``, ... ``--ep-mode`` and ``--order``, all optional.

    Values stay text here, so that a wrong one gets the error that every other way in gives.
    """
    group = parser.add_argument_group("parallel degrees")
    for name, text in HELP.items():
        group.add_argument(f"--{name.replace('_', '-')}", metavar="N", help=text)
    for name, text in OTHERS.items():
        metavar = name.upper().replace("_", "-")
        group.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text)


def arguments_from_args(args: "Namespace") -> dict[str, Any]:
    """Return the constructor arguments that were given on the command line."""
    given = {name: read_field(args, name) for name in SETTINGS}
    return {name: value for name, value in given.items() if value is not None}


def read_toml(path: str | PathLike[str], table: str | None) -> Mapping[str, Any]:
    """Return a TOML file's content, or the table under a name such as ``"run.mesh"``."""
    import tomllib

    return _read(path, table, tomllib.load)


def read_yaml(path: str | PathLike[str], table: str | None) -> Mapping[str, Any]:
    """Return a YAML file's content, or the mapping under a name such as ``"run.mesh"``."""
    try:
        import yaml
    except ImportError as error:
        raise ImportError("reading YAML needs PyYAML: pip install pyyaml") from error
    try:
        return _read(path, table, yaml.safe_load)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _read_json(path: str | PathLike[str], table: str | None) -> Mapping[str, Any]:
    import json

    return _read(path, table, json.load)


READERS = {".toml": read_toml, ".yaml": read_yaml, ".yml": read_yaml, ".json": _read_json}


def read_file(path: str, table: str | None = None) -> Mapping[str, Any]:
    """Return the content of a TOML, YAML or JSON file, which its suffix tells apart, or a table.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has another suffix, holds no text of its format, or is nested too deeply to
            be shown again; as `ParallelDimsError` where it holds no such table.
    """
    reader = READERS.get(splitext(path)[1].lower())
    if reader is None:
        raise ValueError(f"its name must end in {join_words(READERS)}")
    try:
        found = reader(path, table)
    except RecursionError:
        deep = True
    else:
        deep = _is_deep(found)
    if deep:
        raise ValueError(f"its values are nested in more than {MOST_LEVELS} levels")
    return found


def _is_deep(content: object) -> bool:
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


def _read(
    path: str | PathLike[str], table: str | None, parse: Callable[[BinaryIO], Any]
) -> Mapping[str, Any]:
    with open(path, "rb") as file:
        content = parse(file)
    here = fspath(path)
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
    return refusal("table", f"{where} {reason}", {"file": where})
