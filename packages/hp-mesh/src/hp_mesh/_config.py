"""Constructor arguments from mappings, configuration objects, files and command lines."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Number
from os import PathLike, fspath
from os.path import splitext
from typing import TYPE_CHECKING, Any, BinaryIO

from ._degrees import BASE_AXES, INFERRED, as_degree
from ._errors import ParallelDimsError, Violation, join_words, refusal, show

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
SETTINGS = (*HELP, *OTHERS)
FIELDS = (*SETTINGS, "world_size")
MOST_NAMES = 6  # of a configuration's own that a sentence lists
MOST_LETTERS = 30  # of each
MOST_LEVELS = 64  # of a file whose values may be shown
SEQUENCE = "sequence"  # sequence parallel ranks that exchange heads: cp and ulysses_degree at once
DATA = "data"  # data-parallel ranks: dp_replicate times dp_shard
# Ratios of `difflib`: from the first on a name may be meant, from the second on it is refused.
SIMILAR, ALIKE = 0.8, 0.85
SHORTEST = 10  # letters of a misspelled name; shorter ones resemble too much


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The names that degrees have in one framework's configuration.

    Attributes:
        framework: Its name.
        names: The field of `ParallelDims` that each name gives; a dot leads into a nested mapping.
        etp_follows_tp: An absent ``etp`` is ``tp`` there; otherwise it is 1.
        off: Values that mean that the name says nothing, besides None.
    """

    framework: str
    names: Mapping[str, str]
    etp_follows_tp: bool = False
    off: tuple[int, ...] = ()


OWN = Dialect(
    framework="",
    names={**{name: name for name in SETTINGS}, "dp": "dp_shard"},
    etp_follows_tp=True,
)
# Where the names are defined: torchtitan/config/parallelism.py (job_config.py before, with the
# expert tensor degree) of pytorch/torchtitan; megatron/core/model_parallel_config.py of
# NVIDIA/Megatron-LM, and data_parallel_size of its megatron/training/arguments.py;
# src/accelerate/parallelism_config.py of huggingface/accelerate; of deepspeedai/DeepSpeed
# deepspeed/runtime/tensor_parallel/config.py, deepspeed/runtime/config.py and, for the argument
# ep_size of its layer, deepspeed/moe/layer.py.
DIALECTS = (
    OWN,
    Dialect(
        framework="torchtitan",
        names={
            "data_parallel_replicate_degree": "dp_replicate",
            "data_parallel_shard_degree": "dp_shard",
            "data_parallel_degree": "dp_shard",
            "context_parallel_degree": "cp",
            "tensor_parallel_degree": "tp",
            "pipeline_parallel_degree": "pp",
            "expert_parallel_degree": "ep",
            "expert_tensor_parallel_degree": "etp",
        },
    ),
    Dialect(
        framework="Megatron-LM",
        names={
            "data_parallel_size": DATA,
            "context_parallel_size": "cp",
            "tensor_model_parallel_size": "tp",
            "pipeline_model_parallel_size": "pp",
            "expert_model_parallel_size": "ep",
            "expert_tensor_parallel_size": "etp",
        },
        etp_follows_tp=True,
    ),
    Dialect(
        framework="accelerate",
        names={
            "dp_replicate_size": "dp_replicate",
            "dp_shard_size": "dp_shard",
            "cp_size": "cp",
            "sp_size": SEQUENCE,
            "tp_size": "tp",
        },
    ),
    Dialect(
        framework="DeepSpeed",
        names={
            "tensor_parallel.autotp_size": "tp",
            "sequence_parallel_size": SEQUENCE,
            "ep_size": "ep",
        },
        off=(0,),
    ),
)
NAMES = {name: field for dialect in DIALECTS for name, field in dialect.names.items()}


def read_field(source: object, name: str) -> Any:
    """Return an entry of a mapping or an attribute of an object, None where it is absent.

    A dot in the name leads into a nested mapping or object.
    """
    outer, _, inner = name.partition(".")
    value = source.get(outer) if isinstance(source, Mapping) else getattr(source, outer, None)
    return value if not inner or value is None else read_field(value, inner)


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
    Names of one field may not differ. Other names are ignored, but not one that looks like a
    misspelled degree and has another value than 1, nor a configuration with none of the names. A
    ``world_size`` must be the one given beside the configuration.

    Returns:
        The arguments, the violations, and whether an absent ``etp`` is ``tp``.

    Raises:
        ParallelDimsError: The configuration can have no fields, or a value is no degree.
    """
    check_named("config", config)
    present = [name for name in NAMES if _has_field(config, name)]
    misspelled = [*_misspelled(config)]
    empty = isinstance(config, Mapping) and not config
    if not present and not empty:
        return {}, [_unread(config)], False
    values = {name: value for name in present if (value := _value(config, name)) is not None}
    found = _other_world(read_field(config, "world_size"), world_size) + misspelled
    arguments, differing = _merged(values)
    follows = all(d.etp_follows_tp or not values.keys() & d.names.keys() for d in DIALECTS)
    return arguments, found + differing, follows and "etp" not in arguments


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


def _has_field(source: object, name: str) -> bool:
    outer, _, inner = name.partition(".")
    if inner:
        nested = read_field(source, outer)
        return isinstance(nested, Mapping) and _has_field(nested, inner)
    return name in source if isinstance(source, Mapping) else hasattr(source, name)


def _misspelled(config: object) -> Iterator[Violation]:
    """Yield a violation for each other name that is nearly one of `NAMES` and gives a degree."""
    known = [name for name in NAMES if len(name) >= SHORTEST]
    for name in _own_names(config):
        if len(name) < SHORTEST or name in NAMES or any(each in name for each in known):
            continue
        near = _near(name, known, ALIKE)
        value = read_field(config, name) if near else None
        if type(value) is int and value not in (0, 1):
            yield Violation(
                rule="fields",
                values={name: value},
                reason=f"{name}={value} is read by no name; did you mean {near}?",
            )


def _near(name: str, known: Iterable[str], ratio: float) -> str | None:
    from difflib import get_close_matches  # takes a while to load, and is seldom needed

    return next(iter(get_close_matches(name, [*known], n=1, cutoff=ratio)), None)


def _unread(config: object) -> Violation:
    # Not the value itself: what an object shows of itself may differ between ranks.
    names = _own_names(config)
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    has = join_words([*(name[:MOST_LETTERS] for name in names[:MOST_NAMES]), *more], "and")
    others = join_words(f"{d.framework} ({', '.join(d.names)})" for d in DIALECTS if d != OWN)
    near = ((name, _near(name, NAMES, SIMILAR)) for name in names)
    meant = join_words((f"{name[:MOST_LETTERS]} for {m}" for name, m in near if m), "and")
    return Violation(
        rule="fields",
        values={"config": type(config).__name__},
        reason=f"config of type {type(config).__name__} has none of the names "
        f"{join_words(OWN.names)}; nor those of {others}; it has {has or 'no fields'}"
        + (f"; is {meant} misspelled?" if meant else ""),
    )


def _own_names(source: object) -> list[str]:
    if isinstance(source, Mapping):
        return [*map(str, source)]
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
