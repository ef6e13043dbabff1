"""Settings of a candidate: Python for this package, TOML for torchtitan, flags for Megatron-LM."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

from .._config import DIALECTS
from ..planner import Candidate, TrainSpec
from ._plans import arguments, changed_fields, constructor_line

PACKAGE = __name__.partition(".cli")[0]
# Fields of `TrainSpec` that are never listed as not translated. The settings of every framework
# contain the first three fields. Only the planner needs ``memory_fraction``.
NEVER_LISTED = frozenset({"seq_len", "global_batch", "micro_batch", "memory_fraction"})
# Dictionaries from the value of a `TrainSpec` field to the setting of torchtitan or Megatron-LM. If
# a value is not a key, the framework has no such setting, and a comment lists the field.
TITAN_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
TITAN_RECOMPUTE: Mapping[str, Mapping[str, object]] = {
    "none": {"mode": "none"},
    "selective-op": {"mode": "selective", "selective_ac_option": "op"},
    "full": {"mode": "full"},
}
TITAN_ZERO = {None: "default", 3: "always"}
MEGATRON_RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full",
}
MEGATRON_FSDP = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy {} --use-distributed-optimizer "
    "--no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor"
)
MEGATRON_ZERO = {
    None: MEGATRON_FSDP.format("optim_grads_params"),
    0: "",
    1: "--use-distributed-optimizer",
    2: MEGATRON_FSDP.format("optim_grads"),
    3: MEGATRON_FSDP.format("optim_grads_params"),
}
MEGATRON_CONTEXT = {"ring": "p2p", "all-gather": "allgather"}


def as_code(best: Candidate, train: TrainSpec, layers: int) -> str:
    """Return the text that ``--as-code`` prints: a configuration as settings of three frameworks.

    The frameworks are hp-mesh, torchtitan and Megatron-LM. After the settings of torchtitan and
    Megatron-LM, comments list the fields of ``train`` that have no setting there. Other comments
    explain limits of the framework.

    Args:
        best: Configuration to translate into settings.
        train: Training run that was planned.
        layers: Number of layers of the model.
    """
    # Fields that the planner could choose get the values of ``best``.
    train = replace(
        train,
        micro_batch=best.micro_batch,
        recompute=best.recompute,
        recompute_layers=None if best.recompute == "none" else train.recompute_layers,
        schedule=best.schedule,
        virtual_stages=best.virtual_stages,
        zero=best.zero,
    )
    parts = (_python(best, train), _torchtitan(best, train), _megatron(best, train, layers))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _untranslated(train: TrainSpec, done: Set[str]) -> Iterator[str]:
    """Yield a comment line with the fields of ``train`` that a framework's settings do not contain.

    ``done`` has the names of the fields that the settings contain. Fields with their default value
    are not listed. If no field is left to list, nothing is yielded.
    """
    others = {name: value for name, value in changed_fields(train).items() if name not in done}
    if others:
        yield f"# not translated: {arguments(others)}"


def _degrees(best: Candidate, framework: str) -> dict[str, int]:
    """Return the degrees of a candidate by the names of a framework.

    For example, the key for ``tp`` is ``tensor_parallel_degree`` in torchtitan. If a framework has
    several names for one degree, the key is the first one in `DIALECTS`, which recent versions use.
    Degrees that the framework does not have are left out.
    """
    (names,) = (dialect.names for dialect in DIALECTS if dialect.framework == framework)
    current = {field: name for name, field in reversed([*names.items()])}
    degrees = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
    return {current[each]: getattr(best.dims, each) for each in degrees if each in current}


def _python(best: Candidate, train: TrainSpec) -> Iterator[str]:
    yield f"# {PACKAGE}"
    yield f"from {PACKAGE} import ParallelDims, TrainSpec"
    yield ""
    yield f"dims = {constructor_line(best.dims)}"
    yield f"train = TrainSpec({arguments(changed_fields(train))})"


def _torchtitan(best: Candidate, train: TrainSpec) -> Iterator[str]:
    parallelism: dict[str, object] = {**_degrees(best, "torchtitan")}
    if best.dims.etp == 1:  # recent versions do not have this degree
        del parallelism["expert_tensor_parallel_degree"]
    done, sequences = {*NEVER_LISTED, "receive_buffers"}, best.micro_batch
    if best.dims.pp > 1:
        sequences *= best.microbatches
        parallelism["pipeline_parallel_microbatch_size"] = best.micro_batch
        # torchtitan's interleaved schedule has two stages per rank by default. Another number needs
        # a list of the layers of each stage.
        if best.schedule in TITAN_SCHEDULES and best.virtual_stages <= 2:
            parallelism["pipeline_parallel_schedule"] = TITAN_SCHEDULES[best.schedule]
            done |= {"schedule", "virtual_stages"}
    if best.zero in TITAN_ZERO:
        parallelism["fsdp_reshard_after_forward"] = TITAN_ZERO[best.zero]
        done.add("zero")
    sizes = {"seq_len": train.seq_len, "local_batch_size": sequences}
    tables: dict[str, Mapping[str, object]] = {"parallelism": parallelism}
    tables["training"] = {**sizes, "global_batch_size": train.global_batch}
    if best.recompute in TITAN_RECOMPUTE:
        tables["activation_checkpoint"] = TITAN_RECOMPUTE[best.recompute]
        done.add("recompute")
    yield "# torchtitan: a TOML file; as flags, --parallelism.tensor_parallel_degree=..."
    for table, values in tables.items():
        yield f"[{table}]"
        for name, value in values.items():
            yield f"{name} = {value}" if isinstance(value, int) else f'{name} = "{value}"'
    yield from _untranslated(train, done)
    if best.dims.pp > 1 and train.receive_buffers != "all":
        yield "# torchtitan's pipelines keep a receive buffer for each microbatch: check the memory"
        yield "# with hp-mesh estimate --receive-buffers all"


def _megatron(best: Candidate, train: TrainSpec, layers: int) -> Iterator[str]:
    degrees = _degrees(best, "Megatron-LM")
    flags = [f"--{name.replace('_', '-')} {degree}" for name, degree in degrees.items()]
    flags += [f"--micro-batch-size {best.micro_batch}", f"--global-batch-size {train.global_batch}"]
    flags += [f"--seq-length {train.seq_len}", "--bf16"]
    done = {*NEVER_LISTED, "context", "gradient_dtype", "float8"}
    if best.dims.tp > 1:
        flags.append("--sequence-parallel")
    if best.dims.cp > 1:
        flags.append(f"--cp-comm-type {MEGATRON_CONTEXT[train.context]}")
    if best.schedule == "interleaved":
        flags.append(f"--num-virtual-stages-per-pipeline-rank {best.virtual_stages}")
        done |= {"schedule", "virtual_stages"}
    if best.recompute in MEGATRON_RECOMPUTE:
        flags.append(MEGATRON_RECOMPUTE[best.recompute])
        done.add("recompute")
    if best.recompute == "full":
        done.add("recompute_layers")
        recomputed = train.recompute_layers
        method = "uniform" if recomputed is None else "block"
        flags.append(f"--recompute-method {method} --recompute-num-layers {recomputed or 1}")
    flags.append(MEGATRON_ZERO[best.zero])
    done.add("zero")
    flags.append("--grad-reduce-in-bf16" if train.gradient_dtype == "bfloat16" else "")
    flags.append("--fp8-format hybrid" if train.float8 else "")
    yield "# Megatron-LM: flags of pretrain_gpt.py"
    yield " ".join(filter(None, flags)).replace(" --", " \\\n--")
    yield from _untranslated(train, done)
    stages = best.dims.pp * best.virtual_stages
    if layers % stages:
        yield f"# Megatron-LM needs a multiple of {stages} layers, and the model has {layers}: add"
        yield "# --account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split"
