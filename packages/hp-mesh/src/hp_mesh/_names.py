"""Names of degrees: those that are read, by framework, and those that look like a degree's."""

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from types import SimpleNamespace
from typing import Any

from ._degrees import as_degree
from ._errors import ParallelDimsError, Violation, join_words, show

SETTINGS = (
    *("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "ulysses_degree"),
    *("ep_mode", "order", "fsdp_folds_cp", "free_etp"),
)
CHOICES = {"ep_mode": "folded", "fsdp_folds_cp": "True", "free_etp": "False"}  # and their defaults
SEQUENCE = "sequence"  # sequence parallel ranks that exchange heads: cp and ulysses_degree at once
DATA = "data"  # data-parallel ranks: dp_replicate times dp_shard
MAPPING = "mapping"  # whether Megatron-LM places pp inside dp
MOST_NAMES = 6  # of a configuration's own that a sentence lists
MOST_LETTERS = 30  # of each
MOST_NESTED = 4  # levels of a configuration that are searched for degrees
# Ratios of `difflib`: from the first on a name may be meant, from the others on it is refused.
# Short names resemble more names that mean something else.
SIMILAR, ALIKE, NEARLY_SAME = 0.8, 0.85, 0.91
LONG, SHORTEST = 10, 6  # letters of a name that is refused from ALIKE, and from NEARLY_SAME on


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The names that degrees have in one framework's configuration.

    Attributes:
        framework: Its name.
        names: The field of `ParallelDims` that each name gives; a dot leads into a nested mapping.
        etp_follows_tp: An absent ``etp`` is ``tp`` there; otherwise it is 1.
        off: Values that mean that the name says nothing, besides None.
        unserved: Names that say what no degree here does, with what to give instead.
    """

    framework: str
    names: Mapping[str, str]
    etp_follows_tp: bool = False
    off: tuple[int, ...] = ()
    unserved: Mapping[str, str] = field(default_factory=dict)


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
    names={**{name: name for name in SETTINGS}, "dp": "dp_shard"},
    etp_follows_tp=True,
)
# Where the names are defined: torchtitan/config/parallelism.py (job_config.py before, with the
# expert tensor degree) of pytorch/torchtitan; of NVIDIA/Megatron-LM
# megatron/core/model_parallel_config.py, data_parallel_size, instances and mapping of
# megatron/training/arguments.py and the order of megatron/core/parallel_state.py;
# src/accelerate/parallelism_config.py of huggingface/accelerate, with the prefix of its files; of
# deepspeedai/DeepSpeed deepspeed/runtime/tensor_parallel/config.py, deepspeed/runtime/config.py,
# deepspeed/runtime/zero/config.py and, for the argument ep_size of its layer,
# deepspeed/moe/layer.py.
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
            "use_tp_pp_dp_mapping": MAPPING,
        },
        etp_follows_tp=True,
        unserved={
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
        unserved={"zero_hpz_partition_size": _GROUPS, "mics_shard_size": _GROUPS},
    ),
)
NAMES = {name: field for dialect in DIALECTS for name, field in dialect.names.items()}
_UNSERVED = {n: (d.framework, advice) for d in DIALECTS for n, advice in d.unserved.items()}

# The words of an axis. An abbreviation says it alone; a word says it with one of `_PARALLEL`.
_ABBREVIATIONS = {
    "dp": ("dp_shard", "dp_replicate"),
    "ddp": ("dp_replicate",),
    "fsdp": ("dp_shard",),
    "hsdp": ("dp_shard", "dp_replicate"),
    "cp": ("cp",),
    "sp": ("cp", "ulysses_degree"),
    "ulysses": ("ulysses_degree",),
    "tp": ("tp",),
    "pp": ("pp",),
    "ep": ("ep",),
    "etp": ("etp",),
}
_WORDS = {
    "expert": ("ep",),
    "experts": ("ep",),
    "moe": ("ep",),
    "tensor": ("tp",),
    "pipeline": ("pp",),
    "pipe": ("pp",),
    "context": ("cp",),
    "sequence": ("cp", "ulysses_degree"),
    "seq": ("cp", "ulysses_degree"),
    "replicate": ("dp_replicate",),
    "replica": ("dp_replicate",),
    "shard": ("dp_shard",),
    "data": ("dp_shard", "dp_replicate"),
    "model": ("tp", "pp"),
}
_PARALLEL = {"parallel", "parallelism", "degree", "degrees", "stages", "shards"}
_FILLERS = {"size", "sizes", "num", "number", "of", "n", "world", "ranks", "way", "group"}


def looks_like(name: str) -> tuple[str, ...]:
    """Return the fields that a name may mean by its words; none where it says something else.

    A degree's name has words of axes, of parallelism and of sizes, and no others: not
    ``pipeline_parallel_layers_per_stage``.
    """
    words = [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    if {*words} - {*_ABBREVIATIONS, *_WORDS, *_PARALLEL, *_FILLERS}:
        return ()
    short = [_ABBREVIATIONS[w] for w in words if w in _ABBREVIATIONS]
    if {"expert", "moe"} & {*words} and "tensor" in words and _PARALLEL & {*words}:
        return ("etp",)
    if short:
        return short[-1]
    said = [fields for word, fields in _WORDS.items() if word in words]
    return said[0] if said and _PARALLEL & {*words} else ()


def read_field(source: object, name: str) -> Any:
    """Return an entry of a mapping or an attribute of an object, None where it is absent.

    A dot in the name leads into a nested mapping or object.
    """
    outer, _, inner = name.partition(".")
    value = source.get(outer) if isinstance(source, Mapping) else getattr(source, outer, None)
    return value if not inner or value is None else read_field(value, inner)


def has_field(source: object, name: str) -> bool:
    """Whether a name that `read_field` takes is there, also with None as its value."""
    outer, _, inner = name.partition(".")
    if inner:
        nested = read_field(source, outer)
        return isinstance(nested, Mapping) and has_field(nested, inner)
    return name in source if isinstance(source, Mapping) else hasattr(source, name)


def is_of_framework(table: Mapping[str, Any]) -> bool:
    """Whether a table has a degree's name that is no field of `ParallelDims`."""
    return any(has_field(table, name) for name in NAMES if name not in SETTINGS)


def table_of_degrees(config: object) -> str | None:
    """Return the path to the first nested table that has names of degrees."""
    paths = (path.rpartition(".")[0] for path, leaf, _ in _paths(config) if path != leaf in NAMES)
    return next(paths, None)


def unread_degrees(config: object) -> Iterator[Violation]:
    """Yield a violation for each name, at any level, that says a degree and is not read."""
    known = [name for name in NAMES if len(name) >= SHORTEST]
    for path, leaf, source in _paths(config):
        if path in NAMES:
            continue
        if leaf in _UNSERVED:
            value = _entry(source, leaf)
            if _says_something(value):
                yield _no_degree(path, leaf, value)
            continue
        meant = looks_like(leaf) or looks_like(path)
        near = None if path != leaf else _misspelled(leaf, known)
        if near is not None and meant and NAMES[near] not in meant:
            near = None
        if (near is None and not meant) or _is_computed(source, leaf):
            continue
        value = _entry(source, leaf)
        given = f"{path}={show(value) if not isinstance(value, str) else value}"
        if near is not None and (_is_degree(value) or _is_choice(NAMES[near], value)):
            reason = f"{given} is read by no name; did you mean {near}?"
            yield Violation(rule="fields", values={path: value}, reason=reason)
        elif meant and _is_degree(value):
            names = [
                n for d in DIALECTS for n in _listed(d) if d.names[n] in meant and "." not in n
            ]
            reason = f"{given} is read by no name, and looks like {join_words(meant)}; "
            reason += f"use {join_words(names)}"
            yield Violation(rule="fields", values={path: value}, reason=reason)


def _paths(source: object) -> Iterator[tuple[str, str, object]]:
    """Yield each name with the path to it and what has it, outer levels first."""
    level: list[tuple[str, object]] = [("", source)]
    for _ in range(MOST_NESTED):
        nested: list[tuple[str, object]] = []
        for prefix, outer in level:
            for name in own_names(outer):
                yield prefix + name, name, outer
                value = None if "." in name else _nested(outer, name)
                nested += [] if value is None else [(f"{prefix}{name}.", value)]
        level = nested


def _entry(source: object, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _is_computed(source: object, name: str) -> bool:
    """Whether an object makes the value of its other fields, which are read themselves."""
    return isinstance(getattr(type(source), name, None), property)


def _nested(source: object, name: str) -> object:
    """Return what has named fields in a field that is data: a property is not computed for it."""
    fields = source if isinstance(source, Mapping) else getattr(source, "__dict__", {})
    value = fields.get(name)
    record = isinstance(value, Mapping | Namespace | SimpleNamespace) or is_dataclass(value)
    return value if record and not isinstance(value, type) else None


def _misspelled(name: str, known: Sequence[str]) -> str | None:
    if len(name) < SHORTEST:
        return None
    own = len(name) >= LONG and not any(each in name for each in known)
    return _near(name, known, ALIKE if own else NEARLY_SAME)


def _near(name: str, known: Iterable[str], ratio: float) -> str | None:
    from difflib import get_close_matches  # takes a while to load, and is seldom needed

    return next(iter(get_close_matches(name, [*known], n=1, cutoff=ratio)), None)


def _is_degree(value: Any) -> bool:
    try:
        return as_degree("", value, inferable=True, optional=False) != 1
    except ParallelDimsError:
        return False


def _is_choice(field: str, value: Any) -> bool:
    return field in CHOICES and isinstance(value, bool | str) and str(value) != CHOICES[field]


def _says_something(value: Any) -> bool:
    off = isinstance(value, int | str) and not _is_degree(value)
    return bool(value) and not off and value != -1


def _no_degree(path: str, leaf: str, value: Any) -> Violation:
    framework, advice = _UNSERVED[leaf]
    reason = f"{path}={show(value)} of {framework} has no degree here; "
    reason += f"give {advice.format(value)}"
    return Violation(rule="fields", values={path: value}, reason=reason)


def none_read(config: object) -> Violation:
    """Return the violation of a configuration that has none of the names."""
    # Not the value itself: what an object shows of itself may differ between ranks.
    names = own_names(config)
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    has = join_words([*(name[:MOST_LETTERS] for name in names[:MOST_NAMES]), *more], "and")
    others = join_words(f"{d.framework} ({', '.join(_listed(d))})" for d in DIALECTS if d != OWN)
    near = ((name, _near(name, NAMES, SIMILAR)) for name in names)
    meant = join_words((f"{name[:MOST_LETTERS]} for {m}" for name, m in near if m), "and")
    inner = table_of_degrees(config)
    return Violation(
        rule="fields",
        values={"config": type(config).__name__},
        reason=f"config of type {type(config).__name__} has none of the names "
        f"{join_words(OWN.names)}; nor those of {others}; it has {has or 'no fields'}"
        + (f"; is {meant} misspelled?" if meant else "")
        + (f"; its {inner} has such names; give that" if inner else ""),
    )


def _listed(dialect: Dialect) -> list[str]:
    return [name for name in dialect.names if "parallelism_config_" not in name]


def own_names(source: object) -> list[str]:
    """Return the keys of a mapping or the public attributes of an object."""
    if isinstance(source, Mapping):
        return [*map(str, source)]
    return [name for name in dir(source) if not name.startswith("_")]
