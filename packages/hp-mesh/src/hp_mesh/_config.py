"""Degrees from mappings, configuration objects, files and command lines."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from numbers import Number
from os import PathLike, fspath
from os.path import splitext
from typing import TYPE_CHECKING, Any, BinaryIO

from ._degrees import BASE_AXES, as_order, infer_degrees
from ._errors import (
    INFERRED,
    ParallelDimsError,
    Violation,
    as_degree,
    as_flag,
    as_integer,
    broken,
    join_words,
    refusal,
    show,
)
from ._names import (
    DATA,
    DEGREE_FIELDS,
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

FIELDS = (*SETTINGS, "world_size")
OPTIONS = {
    "dp_replicate": "number of replicas of the sharded model",
    "dp_shard": "number of ranks that shard parameters; -1: all ranks that the other degrees leave",
    "cp": "number of ranks that share one sequence (context parallel)",
    "tp": "number of ranks that share one layer (tensor parallel)",
    "pp": "number of pipeline stages",
    "ep": "number of ranks that hold different experts",
    "etp": "number of ranks that share one expert: 1 or tp",
    "ulysses_degree": "number of ranks of cp that exchange heads instead of keys and values",
    "ep_mode": "folded: experts use the ranks of dp_shard, cp and tp; peer: an axis of their own",
    "order": f"names of the axes, outermost first, for example {','.join(BASE_AXES)}",
    "fsdp_folds_cp": "true: parameters are sharded over dp_shard and cp; false: over dp_shard",
    "free_etp": "true: etp may be any degree whose product with ep divides dp_shard*cp*tp",
}
MAX_LEVELS = 64  # of nested values in a file


def check_named(name: str, source: object) -> None:
    """Raise `ParallelDimsError` if a value cannot have named fields."""
    is_named_tuple = hasattr(source, "_fields")
    plain = source is None or isinstance(source, str | bytes | Number | Sequence | Set)
    if plain and not is_named_tuple:
        raise _nameless(name, source, "a mapping or an object with attributes")


def _nameless(name: str, source: object, legal: str) -> ParallelDimsError:
    reason = f"{name}={show(source)} has no named fields; use {legal}"
    return refusal("fields", reason, {name: source})


def arguments_from_config(
    config: object, world_size: object
) -> tuple[dict[str, Any], list[Violation], bool]:
    """Read the arguments of `ParallelDims` from a configuration.

    Args:
        config: Mapping or object with names of any `Dialect`, also of several at once.
        world_size: Number of ranks, or None.

    Returns:
        - The arguments.
        - The rules that the configuration breaks.
        - True if ``etp`` must be set to the value of ``tp``.

    Raises:
        ParallelDimsError: ``config`` is neither a mapping nor an object with attributes, or a value
            is not a degree.
    """
    check_named("config", config)
    present = [name for name in NAMES if has_field(config, name)]
    found = [*unread_degrees(config)]
    is_empty = isinstance(config, Mapping) and not config
    if not present and not is_empty:
        return {}, [none_read(config), *found], False
    values = {name: value for name in present if (value := _value(config, name)) is not None}
    configured = read_field(config, "world_size")
    found += [*_check_world(configured, world_size), *_take_order(values)]
    arguments = _merge(values, found)
    found += _take_data(arguments)
    found += _take_sequence(arguments, values)
    arguments["world_size"] = configured if world_size is None else world_size
    follows = all(d.etp_follows_tp or not values.keys() & d.names.keys() for d in DIALECTS)
    return arguments, found, follows and "etp" not in arguments


def _value(config: object, name: str) -> Any:
    value = read_field(config, name)
    off = next(dialect.off for dialect in DIALECTS if name in dialect.names)
    return None if isinstance(value, int) and value in off else value


def _check_world(configured: Any, given: Any) -> Iterator[Violation]:
    if configured is None or given is None:
        return
    worlds = (configured, given)
    its, world = (as_degree("world_size", w, inferable=False, optional=False) for w in worlds)
    if its != world:
        reason = f"world_size={world} is not the world_size={its} of the configuration; pass the "
        reason += "same number, or remove it from the configuration"
        yield broken("world", reason, {"world_size": world, "configured": its})


def _take_order(values: dict[str, Any]) -> Iterator[Violation]:
    """Convert Megatron-LM's order, which is innermost first, and its mapping flag to ``order``."""
    order = values.get("order")
    if isinstance(order, str) and "-" in order:
        values["order"] = order = _outermost_first(order)
    flag = next((name for name in values if NAMES[name] == MAPPING), None)
    if flag is None or not as_flag(flag, values.pop(flag)):
        return
    values["order"] = _outermost_first("tp-cp-ep-pp-dp")
    if order is not None and as_order(order) != values["order"]:
        reason = f"{flag} means order={show(values['order'])}, but order={show(order)} is given; "
        reason += "give one of them"
        yield broken("names", reason, {flag: True, "order": order})


def _outermost_first(order: str) -> tuple[str, ...]:
    data = {"dp": ("dp_replicate", "dp_shard")}
    names = [name.strip() for name in reversed(order.split("-"))]
    return tuple(axis for name in names for axis in data.get(name, (name,)))


def _merge(values: Mapping[str, Any], found: list[Violation]) -> dict[str, Any]:
    """Return one value for each field.

    A field can have several names. If their values differ, a violation is appended to ``found``.
    """
    by_field: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_field.setdefault(NAMES[name], {})[name] = value
    arguments: dict[str, Any] = {}
    wrong: list[Violation] = []
    for field, given in by_field.items():
        arguments[field] = given.get(field, next(iter(given.values())))
        if [*given] == [field]:  # `resolve_fields` checks it, together with the other fields
            continue
        degrees: dict[str, int | None] = {}
        for name, value in given.items():
            try:
                degrees[name] = as_degree(name, value, inferable=True, optional=False)
            except ParallelDimsError as error:
                wrong += error.violations
        if len({*degrees.values()}) > 1:
            found.append(_differing(field, degrees))
    if wrong:
        raise ParallelDimsError(wrong)
    return arguments


def _differing(field: str, degrees: Mapping[str, int | None]) -> Violation:
    names = sorted(degrees)
    texts = join_words((f"{name}={degrees[name]}" for name in names), "and")
    reason = f"{texts} differ, but all of them set {field}; give one of them"
    rule = "dp" if names == ["dp", "dp_shard"] else "names"
    return broken(rule, reason, {name: degrees[name] for name in names})


def _take_data(arguments: dict[str, Any]) -> Iterator[Violation]:
    """Replace the number of data-parallel ranks by ``dp_replicate`` and ``dp_shard``."""
    ranks = arguments.pop(DATA, None)
    if ranks is None:
        return
    data = as_degree("data_parallel_size", ranks, inferable=True, optional=False) or 1
    given: dict[str, int] = {
        name: as_degree(name, arguments[name], inferable=True, optional=False) or 1
        for name in ("dp_replicate", "dp_shard")
        if name in arguments
    }
    replicate = given.get("dp_replicate", 1)
    if data == INFERRED:
        if replicate != INFERRED:
            arguments.setdefault("dp_shard", INFERRED)
        return
    shard = given.get("dp_shard", 1 if replicate == INFERRED else INFERRED)
    degrees = {"dp_replicate": replicate, "dp_shard": shard}
    try:
        arguments |= infer_degrees(degrees, ("dp_replicate", "dp_shard"), data)
    except ParallelDimsError:
        relation = "is not" if len(given) > 1 else "is no multiple of"
        texts = "*".join(given) + "=" + "*".join(str(degree) for degree in given.values())
        reason = f"data_parallel_size={data} {relation} {texts}; leave it out or correct it"
        yield broken("names", reason, {"data_parallel_size": data, **given})


def _take_sequence(arguments: dict[str, Any], values: Mapping[str, Any]) -> Iterator[Violation]:
    """Replace the field for the Ulysses degree by the two fields ``cp`` and ``ulysses_degree``."""
    ranks = arguments.pop(SEQUENCE, None)
    if ranks is None:
        return
    name = next(name for name in values if NAMES[name] == SEQUENCE)
    try:
        ulysses = as_degree(name, ranks, inferable=False, optional=False) or 1
        cp = as_degree("cp", arguments.get("cp"), inferable=False, optional=True) or 1
    except ParallelDimsError as error:
        yield from error.violations
        return
    given = arguments.get("ulysses_degree")
    if given is not None and as_integer(given) != ulysses:
        yield _differing("ulysses_degree", {name: ulysses, "ulysses_degree": given})
    elif ulysses > 1:
        arguments |= {"cp": cp * ulysses, "ulysses_degree": ulysses}


def name_data(error: ParallelDimsError, config: object) -> ParallelDimsError:
    """Add to an error about ``dp_shard`` the name in ``config`` from which it was read."""
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


def arguments_from_dict(mapping: object) -> tuple[dict[str, Any], list[Violation]]:
    """Return the fields of a mapping as arguments, and a violation for each unknown key."""
    if not isinstance(mapping, Mapping):
        raise _nameless("mapping", mapping, "a mapping such as to_dict returns")
    unknown = [
        broken("field", f"{show(key)} is not a field; use {join_words(FIELDS)}", {key: value})
        for key, value in mapping.items()
        if key not in FIELDS
    ]
    inner = table_of_degrees(mapping)
    if inner is not None and len(unknown) == len(mapping):
        reason = f"{inner} has names of degrees, the table around it has none; give table={inner!r}"
        unknown.append(broken("field", reason, {"table": inner}))
    return {key: value for key, value in mapping.items() if key in FIELDS}, unknown


def add_arguments(parser: "ArgumentParser") -> None:
    """Add one optional argument for each field except ``world_size``.

    Values stay strings, so that a wrong value raises the same error as everywhere else.
    """
    group = parser.add_argument_group("parallel degrees")
    for name, text in OPTIONS.items():
        option = name.replace("_", "-")
        metavar = "N" if name in DEGREE_FIELDS else option.upper()
        group.add_argument(f"--{option}", metavar=metavar, help=text)


def arguments_from_args(args: "Namespace") -> dict[str, Any]:
    """Return the arguments that were given on a command line."""
    given = {name: read_field(args, name) for name in SETTINGS}
    return {name: value for name, value in given.items() if value is not None}


def read_toml(path: str | PathLike[str], table: str | None) -> Mapping[str, Any]:
    """Return the content of a TOML file, or one table of it, such as ``"run.mesh"``."""
    import tomllib

    return _read(path, table, tomllib.load)


def read_yaml(path: str | PathLike[str], table: str | None) -> Mapping[str, Any]:
    """Return the content of a YAML file, or one mapping of it, such as ``"run.mesh"``."""
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
    """Return the content of a TOML, YAML or JSON file, or one table of it.

    Args:
        path: Path of the file. Its suffix selects the format.
        table: Name of a table, with dots between levels. None reads the top level.

    Returns:
        The fields by name.

    Raises:
        OSError: The file cannot be read.
        ValueError: The suffix is unknown, the content is not of its format, or it has more than 64
            levels. If the table does not exist, the error is a `ParallelDimsError`.
    """
    reader = READERS.get(splitext(path)[1].lower())
    if reader is None:
        raise ValueError(f"its name must end in {join_words(READERS)}")
    try:
        content = reader(path, table)
        deep = _is_deep(content)
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"its values are nested in more than {MAX_LEVELS} levels")
    return content


def _is_deep(content: object) -> bool:
    level = [content]
    for _ in range(MAX_LEVELS):
        # In YAML, a value may occur several times and even contain itself.
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
