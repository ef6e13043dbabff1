"""Names of parallel degrees in the configurations of several frameworks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from ._errors import Violation, broken, join_words, show

DEGREE_FIELDS = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "ulysses_degree")
SETTINGS = (*DEGREE_FIELDS, "ep_mode", "order", "fsdp_folds_cp", "free_etp")
# Names that do not set one field directly. `_config` converts each of them.
DATA = "data"  # number of data-parallel ranks: sets dp_replicate and dp_shard
SEQUENCE = "sequence"  # ranks that exchange heads: sets cp and ulysses_degree
MAPPING = "mapping"  # Megatron-LM's flag that places pp inside dp: sets order
# An error lists at most so many names of a configuration, each with at most so many letters.
MOST_NAMES = 6
MOST_NAME_LETTERS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Names of degrees in the configuration of one framework.

    Attributes:
        framework: Name of the framework. Empty for hp-mesh itself.
        names: Field of `ParallelDims` that each name sets. A dot leads into a nested mapping.
        etp_follows_tp: If True, an absent ``etp`` equals ``tp``. If False, it is 1.
        off: Values that have the same meaning as an absent name.
        unread: Names of degrees that `ParallelDims` cannot read, with the replacement. ``{0}`` is
            the value.
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
    names={**{name: name for name in SETTINGS}, "dp": "dp_shard"},
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
            "use_tp_pp_dp_mapping": MAPPING,
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
# Names of degrees in other frameworks and in short spellings. If they were ignored, a run would
# silently use other degrees than its configuration asks for.
OTHER_NAMES = {
    **{f"{axis}_degree": axis for axis in ("tp", "pp", "cp", "ep", "etp")},
    **{f"{axis}_size": axis for axis in ("pp", "etp")},
    "dp_degree": "dp_replicate or dp_shard",
    "fsdp_size": "dp_shard",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "expert_parallel_size": "ep",
    "model_parallel_size": "tp or pp",
    "ulysses_sequence_parallel_size": "cp and ulysses_degree",
}
NAMES = {name: field for dialect in DIALECTS for name, field in dialect.names.items()}
UNREAD = {n: advice for d in DIALECTS for n, advice in d.unread.items()} | OTHER_NAMES


def read_field(source: object, name: str) -> Any:
    """Return an entry of a mapping or an attribute of an object, or None if it is absent.

    A dot in the name leads into a nested mapping or object.
    """
    outer, _, inner = name.partition(".")
    value = source.get(outer) if isinstance(source, Mapping) else getattr(source, outer, None)
    return value if not inner or value is None else read_field(value, inner)


def has_field(source: object, name: str) -> bool:
    """Return whether a name is present, also if its value is None.

    A dot in the name leads into a nested mapping or object.
    """
    outer, _, inner = name.partition(".")
    if inner:
        nested = read_field(source, outer)
        return nested is not None and has_field(nested, inner)
    return name in source if isinstance(source, Mapping) else hasattr(source, name)


def is_of_framework(table: Mapping[str, Any]) -> bool:
    """Return whether a table has a name of a degree that is not a field of `ParallelDims`."""
    return any(has_field(table, name) for name in NAMES if name not in SETTINGS)


def table_of_degrees(config: object) -> str | None:
    """Return the first field that holds a table with names of degrees, or None."""
    fields = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    for name, value in fields.items():
        is_table = isinstance(value, Mapping) or is_dataclass(value)
        if is_table and any(has_field(value, known) for known in NAMES):
            return str(name)
    return None


def unread_degrees(config: object) -> Iterator[Violation]:
    """Yield a violation for each field with a degree above 1 that `from_config` does not read."""
    for name, advice in UNREAD.items():
        value = read_field(config, name)
        if _is_above_one(value):
            reason = f"from_config does not read {name}={show(value)}; use {advice.format(value)}"
            yield broken("fields", reason, {name: value})


def _is_above_one(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_above_one, value))
    try:
        return int(value) > 1
    except (TypeError, ValueError, OverflowError):
        return False


def none_read(config: object) -> Violation:
    """Return the violation for a configuration without any known name of a degree."""
    names = [*map(str, config)] if isinstance(config, Mapping) else dir(config)
    names = [name for name in names if not name.startswith("_")]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    has = join_words([*(name[:MOST_NAME_LETTERS] for name in names[:MOST_NAMES]), *more], "and")
    others = join_words(f"{d.framework} ({', '.join(_listed(d))})" for d in DIALECTS if d != OWN)
    table = table_of_degrees(config)
    # The representation of the configuration may differ between ranks, so only its type is given.
    kind = type(config).__name__
    reason = f"config of type {kind} has none of the names {join_words(OWN.names)}; nor names of "
    reason += f"{others}; it has {has or 'no fields'}"
    reason += f"; its {table} has such names; pass that" if table else ""
    return broken("fields", reason, {"config": kind})


def _listed(dialect: Dialect) -> list[str]:
    return [name for name in dialect.names if "parallelism_config_" not in name]
