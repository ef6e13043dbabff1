"""Read the arguments of `ParallelDims` from configurations of several frameworks and from files.

`DIALECTS` lists the names of degrees in the configuration of each framework, such as
``tensor_parallel_degree`` in torchtitan. `arguments_from_config` reads the values of these names.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, is_dataclass, replace
from numbers import Number
from os import PathLike, fspath
from os.path import splitext
from typing import Any, BinaryIO

from ._degrees import BASE_AXES, as_order, infer_degrees
from ._errors import (
    INFERRED,
    ParallelDimsError,
    Violation,
    as_degree,
    as_flag,
    broken,
    join_words,
    refusal,
    show,
)

# Command-line help for each field of `ParallelDims` except `world_size`.
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
FIELDS = (*OPTIONS, "world_size")
# Intermediate fields: a name in `DIALECTS` can set one of these instead of a field of
# `ParallelDims`. `arguments_from_config` then computes fields of `ParallelDims` from its value.
DATA = "data"  # number of data-parallel ranks, for dp_replicate and dp_shard
SEQUENCE = "sequence"  # number of ranks with Ulysses attention, for cp and ulysses_degree
MAPPING = "use_tp_pp_dp_mapping"  # Megatron-LM's flag that places pp inside dp: sets order
# An error message lists at most this many names of a configuration, and shortens long names.
MOST_NAMES = 6
MOST_NAME_LETTERS = 30
MAX_LEVELS = 64  # a file with more levels of nested values is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Names of degrees in the configuration of one framework.

    Attributes:
        framework: Name of the framework. Empty for hp-mesh.
        names: A key is a name in the configuration, and the value is the field of `ParallelDims`
            that the name sets. The value can also be `DATA`, `SEQUENCE` or `MAPPING`, from which
            several fields are computed after all names are read. The key ``"a.b"`` is the entry
            ``b`` of the mapping ``a``.
        etp_follows_tp: If True, the framework's default of ``etp`` is the value of ``tp``. If
            False, it is 1.
        off: Values with which the framework disables a degree. A name with such a value is ignored.
        unread: A key is a name in the configuration that hp-mesh cannot convert to fields of
            `ParallelDims`. The value is the advice in the error message. ``{0}`` in the advice is
            replaced by the degree.
    """

    framework: str
    names: Mapping[str, str]
    etp_follows_tp: bool = False
    off: tuple[int, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)


_ACCELERATE = {
    "dp_replicate_size": "dp_replicate",
    "dp_shard_size": "dp_shard",
    "cp_size": "cp",
    "sp_size": SEQUENCE,
    "tp_size": "tp",
}
_ENCODER = "one ParallelDims for each of encoder and decoder"
_GROUPS = "dp_shard={0} with dp_replicate for shards in groups of {0} ranks, or leave it out"
OWN = Dialect(
    framework="",
    names={**{name: name for name in OPTIONS}, "dp": "dp_shard"},
    etp_follows_tp=True,
)
# Sources of the names:
# - pytorch/torchtitan: torchtitan/config/parallelism.py; job_config.py of older versions.
# - NVIDIA/Megatron-LM: megatron/core/model_parallel_config.py, megatron/core/parallel_state.py
#   (order), megatron/training/arguments.py (data_parallel_size, instances, mapping).
# - huggingface/accelerate: src/accelerate/parallelism_config.py. Its files add a prefix.
# - deepspeedai/DeepSpeed: deepspeed/runtime/config.py, runtime/tensor_parallel/config.py,
#   runtime/zero/config.py, and deepspeed/moe/layer.py (argument ep_size).
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
            "num_distributed_optimizer_instances": "dp_replicate",
            "context_parallel_size": "cp",
            "tensor_model_parallel_size": "tp",
            "pipeline_model_parallel_size": "pp",
            "expert_model_parallel_size": "ep",
            "expert_tensor_parallel_size": "etp",
            MAPPING: MAPPING,
        },
        etp_follows_tp=True,
        unread={
            "hierarchical_context_parallel_sizes": "cp with ulysses_degree for the inner ranks",
            "encoder_tensor_model_parallel_size": _ENCODER,
            "encoder_pipeline_model_parallel_size": _ENCODER,
        },
    ),
    Dialect(
        framework="accelerate",
        names={
            **_ACCELERATE,
            **{f"parallelism_config_{name}": field for name, field in _ACCELERATE.items()},
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
        unread={
            "pipeline.stages": "pp",
            "zero_optimization.zero_hpz_partition_size": _GROUPS,
            "zero_optimization.mics_shard_size": _GROUPS,
        },
    ),
)
# Key: name of a degree in other frameworks that hp-mesh does not read. Value: the field to use
# instead. A degree above 1 raises an error. If it were ignored, a run would use wrong degrees.
OTHER_NAMES = {
    **{f"{axis}_degree": axis for axis in ("tp", "pp", "cp", "ep", "etp")},
    **{f"{axis}_size": axis for axis in ("pp", "etp")},
    "dp_degree": "dp_replicate or dp_shard",
    "dp_size": "dp_replicate or dp_shard",
    "fsdp_size": "dp_shard",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "expert_parallel_size": "ep",
    "model_parallel_size": "tp or pp",
    "ulysses_sequence_parallel_size": "cp and ulysses_degree",
}
NAMES = {name: field for dialect in DIALECTS for name, field in dialect.names.items()}
UNREAD = {n: advice for d in DIALECTS for n, advice in d.unread.items()} | OTHER_NAMES
_ABSENT = object()


def check_named(name: str, source: object) -> None:
    """Raise `ParallelDimsError` if ``source`` has no named fields, for example a number or a list.

    Args:
        name: Name of the argument, for the error message.
        source: The argument. A mapping, a named tuple and other objects with attributes are
            allowed.
    """
    is_named_tuple = hasattr(source, "_fields")
    plain = source is None or isinstance(source, str | bytes | Number | Sequence | Set)
    if plain and not is_named_tuple:
        raise _nameless(name, source, "a mapping or an object with attributes")


def _nameless(name: str, source: object, legal: str) -> ParallelDimsError:
    reason = f"{name}={show(source)} has no named fields; use {legal}"
    return refusal("fields", reason, {name: source})


def read_field(source: object, name: str, absent: object = None) -> Any:
    """Return the value of an entry of a mapping, or of an attribute of an object.

    Args:
        source: The mapping or object.
        name: Key of the entry, or name of the attribute. ``"a.b"`` reads ``a`` from ``source``, and
            then ``b`` from the value.
        absent: Value to return if ``source`` has no such entry or attribute.
    """
    for part in name.split("."):
        if isinstance(source, Mapping):
            source = source.get(part, absent)
        else:
            source = getattr(source, part, absent)
    return source


def has_field(source: object, name: str) -> bool:
    """Return whether a mapping has the key ``name``, or an object has the attribute ``name``.

    The result is True even if the value is None.
    """
    return read_field(source, name, _ABSENT) is not _ABSENT


def is_of_framework(table: Mapping[str, Any]) -> bool:
    """Return whether a table has at least one name that `ParallelDims.from_config` must convert.

    Such names are ``dp`` and the names of other frameworks, such as ``cp_size``. The fields of
    `ParallelDims`, such as ``cp``, need no conversion.
    """
    return any(has_field(table, name) for name in NAMES if name not in OPTIONS)


def table_of_degrees(config: object) -> str | None:
    """Return the name of the nested table that has the degrees, for error messages.

    Args:
        config: A mapping or an object with attributes.

    Returns:
        The name of an entry or attribute of ``config``. Its value is a mapping or a dataclass with
        at least one name in `NAMES`. The first such entry is used. None if there is none.
    """
    fields = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    for name, value in fields.items():
        is_table = isinstance(value, Mapping) or is_dataclass(value)
        if is_table and any(has_field(value, known) for known in NAMES):
            return str(name)
    return None


def arguments_from_config(
    config: object, world_size: object
) -> tuple[dict[str, Any], list[Violation], bool]:
    """Read the arguments of `ParallelDims` from a configuration.

    Args:
        config: Mapping or object with names of degrees. Names of several frameworks can be mixed.
        world_size: Number of ranks. If None, the field ``world_size`` of ``config`` is used.

    Returns:
        A tuple of three elements:

        - Arguments of `ParallelDims`: a dict from names to values. Only names with a value in
          ``config``, and ``world_size``, have an entry.
        - Violations to report, for example for two names of one degree with different values.
        - True if ``etp`` has no value in ``config`` and must be set to the value of ``tp``.

    Raises:
        ParallelDimsError: ``config`` is neither a mapping nor an object with attributes, or a value
            is not a degree.
    """
    check_named("config", config)
    found = [*unread_degrees(config)]
    is_empty = isinstance(config, Mapping) and not config
    if not is_empty and not any(has_field(config, name) for name in NAMES):
        return {}, [no_name_violation(config), *found], False
    values: dict[str, Any] = {}
    for dialect in DIALECTS:
        for name in dialect.names:
            value = read_field(config, name)
            is_off = isinstance(value, int) and value in dialect.off
            if value is not None and not is_off:
                values[name] = value
    configured = read_field(config, "world_size")
    found += [*_world_violations(configured, world_size), *_convert_order(values)]
    arguments = _one_value_each(values, found)
    found += _convert_data(arguments)
    found += _convert_sequence(arguments, values)
    arguments["world_size"] = configured if world_size is None else world_size
    follows = all(d.etp_follows_tp or not values.keys() & d.names.keys() for d in DIALECTS)
    return arguments, found, follows and "etp" not in arguments


def _world_violations(configured: Any, given: Any) -> Iterator[Violation]:
    if configured is None or given is None:
        return
    its, world = as_degree("world_size", configured), as_degree("world_size", given)
    if its != world:
        reason = f"world_size={world} is not the world_size={its} of the configuration; pass the "
        reason += "same number, or remove it from the configuration"
        yield broken("world", reason, {"world_size": world, "configured": its})


def _convert_order(values: dict[str, Any]) -> Iterator[Violation]:
    """Convert Megatron-LM's rank order to the field ``order`` of `ParallelDims`.

    Megatron-LM has two ways to set the rank order:

    - A string with dashes, such as ``"tp-cp-ep-dp-pp"``, lists the dimensions, innermost first.
    - The flag ``use_tp_pp_dp_mapping`` means the order ``"tp-cp-ep-pp-dp"``.

    Args:
        values: A key is a name in the configuration. The entry ``"order"`` is set to a tuple,
            outermost first, and the entry of the flag is removed.

    Yields:
        A violation if the flag and the string mean different orders.
    """
    order = values.get("order")
    if isinstance(order, str) and "-" in order:
        values["order"] = order = _outermost_first(order)
    flag = values.pop(MAPPING, None)
    if flag is None or not as_flag(MAPPING, flag):
        return
    values["order"] = _outermost_first("tp-cp-ep-pp-dp")
    if order is not None and as_order(order) != values["order"]:
        reason = f"{MAPPING} means order={show(values['order'])}, but order={show(order)} is "
        reason += "given; give one of them"
        yield broken("names", reason, {MAPPING: True, "order": order})


def _outermost_first(order: str) -> tuple[str, ...]:
    data = {"dp": ("dp_replicate", "dp_shard")}
    names = [name.strip() for name in reversed(order.split("-"))]
    return tuple(axis for name in names for axis in data.get(name, (name,)))


def _one_value_each(values: Mapping[str, Any], found: list[Violation]) -> dict[str, Any]:
    """Convert names of a configuration to fields of `ParallelDims`.

    Several names can set the same field. For example, ``tp`` and ``tp_size`` set ``tp``.

    Args:
        values: A key is a name in the configuration.
        found: List of violations. If two names of one field have different values, a violation is
            appended.

    Returns:
        A dict. A key is a field of `ParallelDims`, or one of the intermediate fields `DATA` and
        `SEQUENCE`. Fields without a value in ``values`` have no entry.

    Raises:
        ParallelDimsError: A value is not a degree.
    """
    by_field: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_field.setdefault(NAMES[name], {})[name] = value
    arguments: dict[str, Any] = {}
    wrong: list[Violation] = []
    for target, given in by_field.items():
        arguments[target] = given.get(target, next(iter(given.values())))
        if [*given] == [target]:  # `resolve_fields` checks it, together with the other fields
            continue
        degrees: dict[str, int] = {}
        for name, value in given.items():
            try:
                degrees[name] = as_degree(name, value, inferable=True)
            except ParallelDimsError as error:
                wrong += error.violations
        if len({*degrees.values()}) > 1:
            found.append(_differing(target, degrees))
    if wrong:
        raise ParallelDimsError(wrong)
    return arguments


def _differing(field: str, degrees: Mapping[str, int]) -> Violation:
    names = sorted(degrees)
    texts = join_words((f"{name}={degrees[name]}" for name in names), "and")
    reason = f"{texts} differ, but all of them set {field}; give one of them"
    rule = "dp" if names == ["dp", "dp_shard"] else "names"
    return broken(rule, reason, {name: degrees[name] for name in names})


def _convert_data(arguments: dict[str, Any]) -> Iterator[Violation]:
    """Compute ``dp_replicate`` and ``dp_shard`` from Megatron-LM's ``data_parallel_size``.

    Args:
        arguments: Result of `_one_value_each`. The entry `DATA` is removed, and the entries
            ``"dp_replicate"`` and ``"dp_shard"`` are set.

    Yields:
        A violation if ``data_parallel_size`` contradicts ``dp_replicate`` or ``dp_shard``.

    Raises:
        ParallelDimsError: One of the three values is not a degree.
    """
    ranks = arguments.pop(DATA, None)
    if ranks is None:
        return
    data = as_degree("data_parallel_size", ranks, inferable=True)
    given: dict[str, int] = {
        name: as_degree(name, arguments[name], inferable=True)
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


def _convert_sequence(arguments: dict[str, Any], values: Mapping[str, Any]) -> Iterator[Violation]:
    """Compute ``cp`` and ``ulysses_degree`` from the Ulysses degree of another framework.

    The Ulysses degree is ``sp_size`` in accelerate and ``sequence_parallel_size`` in DeepSpeed. In
    both frameworks, ``cp`` does not include the Ulysses ranks. In `ParallelDims`, ``cp`` includes
    them. Therefore ``cp`` is multiplied by the Ulysses degree.

    Args:
        arguments: Result of `_one_value_each`. The entry `SEQUENCE` is removed. If the Ulysses
            degree is above 1, the entries ``"cp"`` and ``"ulysses_degree"`` are set.
        values: A key is a name in the configuration. Only the names are read, for messages.

    Yields:
        A violation if the Ulysses degree or ``cp`` is not a degree, or if ``arguments`` has another
        value of ``ulysses_degree``.
    """
    ranks = arguments.pop(SEQUENCE, None)
    if ranks is None:
        return
    name = next(name for name in values if NAMES[name] == SEQUENCE)
    try:
        ulysses = as_degree(name, ranks)
        # Removed from ``arguments``, so that an error about one of them is not reported twice.
        given = as_degree("ulysses_degree", arguments.pop("ulysses_degree", None), optional=True)
        cp = as_degree("cp", arguments.pop("cp", None), optional=True) or 1
    except ParallelDimsError as error:
        yield from error.violations
        return
    arguments["cp"] = cp * ulysses
    if given not in (None, ulysses):
        yield _differing("ulysses_degree", {name: ulysses, "ulysses_degree": given})
    elif ulysses > 1 or given:
        arguments["ulysses_degree"] = ulysses


def name_source_of_dp_shard(error: ParallelDimsError, config: object) -> ParallelDimsError:
    """Add the name from which ``dp_shard`` was read to the messages about ``dp_shard``.

    Without this name, a user who wrote ``data_parallel_size=3`` would read about a ``dp_shard``
    that the configuration does not have.

    Args:
        error: Error about degrees that were read from ``config``.
        config: The user's configuration.

    Returns:
        A copy of ``error``. Its violations about ``dp_shard`` end with a text such as
        ``" (dp_shard is read from data_parallel_size=3)"``. If ``config`` has no other name of
        ``dp_shard``, or ``error`` mentions the name already, the result is ``error`` itself.
    """
    fields = (DATA, "dp_shard")
    names = [n for n in NAMES if n != "dp_shard" and NAMES[n] in fields and has_field(config, n)]
    if not names or any(name in each.values for name in names for each in error.violations):
        return error
    given = (f"{name}={show(read_field(config, name))}" for name in names)
    source = f" (dp_shard is read from {join_words(given, 'and')})"
    return ParallelDimsError(
        replace(each, reason=each.reason + source) if "dp_shard" in each.values else each
        for each in error.violations
    )


def arguments_from_args(args: object) -> dict[str, Any]:
    """Read the arguments of `ParallelDims` from the result of ``parse_args``.

    Raises:
        ParallelDimsError: ``args`` has no option of `ParallelDims.add_arguments`, or a degree under
            another name.
    """
    given = {name: read_field(args, name) for name in OPTIONS if has_field(args, name)}
    others = [name for name in NAMES if name not in OPTIONS]
    found = {n: value for n in others if _is_above_one(value := read_field(args, n))}
    if found or not given:
        texts = join_words((f"{name}={show(value)}" for name, value in found.items()), "and")
        reason = f"args has {texts}, which add_arguments does not add"
        reason = reason if found else f"args={show(args)} has no option of add_arguments"
        raise refusal("fields", f"{reason}; read other configurations with from_config", found)
    return {name: value for name, value in given.items() if value is not None}


def arguments_from_dict(mapping: object) -> tuple[dict[str, Any], list[Violation]]:
    """Read the arguments of `ParallelDims` from the result of `ParallelDims.to_dict`.

    Returns:
        A pair. The first element is a dict with all entries of ``mapping`` that are fields of
        `ParallelDims`. The second element is a list with one violation for each other key. If no
        key is a field, but a nested mapping has the degrees, one more violation names this mapping.

    Raises:
        ParallelDimsError: ``mapping`` is not a mapping.
    """
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


def unread_degrees(config: object) -> Iterator[Violation]:
    """Yield a violation for each name in `UNREAD` that has a value above 1 in the configuration.

    `UNREAD` has names of degrees that hp-mesh recognizes but does not read, such as ``pp_size``. A
    property of the configuration's class is ignored, because it is computed from other attributes.
    """
    for name, advice in UNREAD.items():
        value = read_field(config, name)
        if _is_above_one(value) and not isinstance(getattr(type(config), name, None), property):
            reason = f"from_config does not read {name}={show(value)}; use {advice.format(value)}"
            yield broken("fields", reason, {name: value})


def _is_above_one(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_above_one, value))
    try:
        return int(value) > 1
    except (TypeError, ValueError, OverflowError):
        return False


def no_name_violation(config: object) -> Violation:
    """Create the violation for a configuration that has none of the names in `NAMES`."""
    names = [*map(str, config)] if isinstance(config, Mapping) else dir(config)
    names = [name for name in names if not name.startswith("_")]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    has = join_words([*(name[:MOST_NAME_LETTERS] for name in names[:MOST_NAMES]), *more], "and")
    others = []
    for dialect in DIALECTS:
        listed = [name for name in dialect.names if "parallelism_config_" not in name]
        if dialect != OWN:
            others.append(f"{dialect.framework} ({', '.join(listed)})")
    table = table_of_degrees(config)
    # The representation of the configuration may differ between ranks, so only its type is given.
    kind = type(config).__name__
    reason = f"config of type {kind} has none of the names {join_words(OWN.names)}; nor names of "
    reason += f"{join_words(others)}; it has {has or 'no fields'}"
    reason += f"; its {table} has such names; pass that" if table else ""
    return broken("fields", reason, {"config": kind})


def read_toml(path: str | PathLike[str], table: str | None) -> Mapping[str, Any]:
    """Return the entries of a TOML file by name.

    ``table`` is the name of one table of the file, such as ``"run.mesh"``. If it is None, the
    entries of the top level are returned.
    """
    import tomllib

    return _read_table(path, table, tomllib.load)


def read_yaml(path: str | PathLike[str], table: str | None) -> Mapping[str, Any]:
    """Return the entries of a YAML file by name.

    ``table`` is the name of one mapping in the file, such as ``"run.mesh"``. If it is None, the
    entries of the top level are returned.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError("reading YAML needs PyYAML: pip install pyyaml") from error

    def parse(file: BinaryIO) -> Any:
        try:
            return yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from None

    return _read_table(path, table, parse)


def _read_json(path: str | PathLike[str], table: str | None) -> Mapping[str, Any]:
    import json

    return _read_table(path, table, json.load)


READERS = {".toml": read_toml, ".yaml": read_yaml, ".yml": read_yaml, ".json": _read_json}


def read_file(path: str, table: str | None = None) -> Mapping[str, Any]:
    """Return the entries of a TOML, YAML or JSON file by name.

    Args:
        path: Path of the file. The suffix selects the format.
        table: Name of one table (nested mapping) in the file, with dots between levels, such as
            ``"run.mesh"``. Defaults to the top level.

    Returns:
        The entries of the file or of the table.

    Raises:
        ParallelDimsError: The file cannot be read, its suffix is unknown, it is not valid in its
            format, its values are nested in more than 64 levels, or the table does not exist.
        ImportError: The file is a YAML file, and PyYAML is not installed.
    """
    reader = READERS.get(splitext(path)[1].lower())
    if reader is None:
        raise _unreadable(path, f"its name must end in {join_words(READERS)}")
    return reader(path, table)


def _unreadable(path: str | PathLike[str], reason: str) -> ParallelDimsError:
    return refusal("file", f"cannot read {fspath(path)}: {reason}", {"path": fspath(path)})


def _is_deep(content: object) -> bool:
    level = [content]
    for _ in range(MAX_LEVELS):
        # Collected by identity: in YAML, a value may occur several times and even contain itself.
        inner = {id(value): value for outer in level for value in _inner_values(outer)}
        level = [*inner.values()]
    return bool(level)


def _inner_values(content: object) -> Iterable[object]:
    if isinstance(content, Mapping):
        return content.values()
    return content if isinstance(content, list) else ()


def _read_table(
    path: str | PathLike[str], table: str | None, parse: Callable[[BinaryIO], Any]
) -> Mapping[str, Any]:
    deep = f"its values are nested in more than {MAX_LEVELS} levels"
    try:
        with open(path, "rb") as file:
            content = parse(file)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except RecursionError:
        raise _unreadable(path, deep) from None
    except ValueError as error:  # the file is not text, or not in the format of its suffix
        raise _unreadable(path, " ".join(str(error).split())) from None
    if _is_deep(content):
        raise _unreadable(path, deep)
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
