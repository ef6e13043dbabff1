"""The command line: one table of options, and their checks before torch is loaded."""

import argparse
import hashlib
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from hp_mesh import ParallelDims, ParallelDimsError

from .config import (
    SEEDS,
    TP_STYLES,
    AnyModelConfig,
    ModelConfig,
    TrainConfig,
    TransformersConfig,
    held_out_samples,
    read_model,
)
from .run_folder import (
    AUTO,
    CHECKPOINT,
    PREVIOUS,
    OptionsError,
    SavedRun,
    check_no_later_checkpoint,
    check_no_run,
    find_run,
    find_run_in,
    has_summary,
    has_weights,
    same_path,
    step_of,
)
from .text import BYTES, TOKEN_DTYPES, Corpus, Source, read_corpus

DEFAULT_PROCESSES = 4
DEFAULT_STEPS = 60
DEFAULT_DEGREES = {"dp_shard": 2, "cp": 2, "ep": 4}
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
SCHEDULES = {"1f1b": 1, "interleaved": 2}  # of pipelines: the fewest stages of a rank
COMM_TIMEOUT = 300  # seconds
DTYPES = ("float64", "float32", "bfloat16")
NO_COMPILER = "none"
_METAVARS: Mapping[Any, str] = {int: "N", float: "X", str: "NAME", Path: "DIR"}
PADDED_VOCABULARY = 64  # a tokenizer's size is rounded up to a multiple, so that tp can divide it


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the command line, and everything the trainer needs to know about it.

    Attributes:
        name: Name in Python. The flag has ``-`` instead of ``_``. A field of `Options` with this
            name gets the value.
        help: Help text. The default is appended if it does not depend on other options.
        type: Converts the value; `bool` makes a flag without a value.
        metavar: Placeholder of the value in the help text, if not that of its type.
        choices: Legal values, if they can be listed.
        least: Smallest legal number.
        most: Largest legal number. Infinity itself is illegal.
        positive: All numbers above 0 are legal; ``least`` is ignored.
        nargs: As in argparse.
        const: Value if the option is given without one.
        default: Value if the option is not given. None if it depends on other options.
        on_resume: ``"inherit"``: unless it is given, a resumed run takes the value from the
            checkpoint. ``"same"``: so it does, and another value is an error. ``"new"``: the
            checkpoint does not store it.
        keeps_comparison: The run without options is compared with one process, also if this
            option is given.
        per_rank: Ranks may have different values, as they may have different paths.
    """

    name: str
    help: str
    type: Callable[[str], Any] = int
    metavar: str | None = None
    choices: Collection[str] | None = None
    least: int = 1
    most: float = math.inf
    positive: bool = False
    nargs: str | None = None
    const: Any = None
    default: Any = None
    on_resume: Literal["inherit", "same", "new"] = "inherit"
    keeps_comparison: bool = False
    per_rank: bool = False

    @property
    def flag(self) -> str:
        """Return the name on the command line, without leading dashes."""
        return self.name.replace("_", "-")

    def add_to(self, group: "argparse._ArgumentGroup") -> None:
        """Add this option to a group of a parser, which stores None if it is not given."""
        flag, text = f"--{self.flag}", self.help
        if self.default is not None and self.type is not bool:
            text += f" (default {self.default})"
        if self.type is bool:
            inherited = self.on_resume == "inherit"  # then it needs a flag to turn it off
            action = argparse.BooleanOptionalAction if inherited else "store_true"
            group.add_argument(flag, action=action, default=None, help=text)
        else:
            group.add_argument(
                flag,
                type=self.type,
                metavar=None if self.choices else self.metavar or _METAVARS[self.type],
                choices=self.choices,
                nargs=self.nargs,
                const=self.const,
                help=text,
            )

    def check(self, value: Any) -> None:
        """Raise `OptionsError` for a number out of range."""
        if self.type not in (int, float) or value is None:
            return
        enough = value > 0 if self.positive else value >= self.least
        if enough and value <= self.most and value != math.inf:
            return
        if self.most < math.inf:
            legal = f"{self.least} to {self.most}"
        elif self.type is int:
            legal = f"{self.least} or more"
        else:
            legal = f"a finite number {'above 0' if self.positive else f'of at least {self.least}'}"
        raise OptionsError(f"{self.flag}={value} is out of range; use {legal}")


_TRAIN = TrainConfig()
_RUN = (
    Option(
        "steps",
        f"last step (default {DEFAULT_STEPS}; with --resume DIR, {DEFAULT_STEPS} more steps)",
        on_resume="new",
        keeps_comparison=True,
    ),
    Option(
        "seed",
        "seed of initial weights, data order and dropout",
        least=SEEDS[0],
        most=SEEDS[-1],
        default=0,
        on_resume="same",
        keeps_comparison=True,
    ),
    Option("procs", f"number of local processes (default {DEFAULT_PROCESSES})", on_resume="new"),
    Option("device", "device type of all ranks", str, choices=("cpu", "cuda"), default="cpu"),
    Option(
        "out",
        "folder for the results (default runs/<time>)",
        Path,
        on_resume="new",
        keeps_comparison=True,
    ),
    Option(
        "resume",
        "resume from the last checkpoint of the run in DIR, or from the checkpoint DIR, and write "
        f"to a new folder; {AUTO}: continue in --out if it has a checkpoint, else start there",
        Path,
        on_resume="new",
    ),
    Option(
        "init_from",
        "load the initial weights from a folder, as save_pretrained of transformers or --export "
        "write it; its config.json is the model",
        Path,
        on_resume="new",
    ),
    Option(
        "export",
        "at the end, write the weights to a new folder, for from_pretrained of transformers or "
        "--init-from; with --resume and without --steps, export the checkpoint and end",
        Path,
        on_resume="new",
    ),
    Option("checkpoint_every", "save a checkpoint every N steps in the background, and at the end"),
    Option("keep", "number of latest checkpoints to keep", default=1, per_rank=True),
    Option(
        "comm_timeout",
        "how long a rank waits for another one before the run ends; at least "
        f"{COMM_TIMEOUT} until the end of the first step",
        float,
        "SECONDS",
        most=1_000_000,
        default=COMM_TIMEOUT,
        per_rank=True,
    ),
    Option("profile", "write torch.profiler traces of steps A to B", str, "A:B", on_resume="new"),
    Option("reference", "train on one process, without parallelism", bool, on_resume="new"),
    Option(
        "compare",
        f"then repeat the first N steps (without N: {DEFAULT_STEPS}) on one process and compare "
        f"the losses (default 0, or {DEFAULT_STEPS} if only --steps, --seed or --out is given)",
        least=0,
        nargs="?",
        const=DEFAULT_STEPS,
        on_resume="new",
        per_rank=True,
    ),
    Option("eval_every", "compute the loss of held-out text every N steps (default: never)"),
)
_DATA = (
    Option(
        "data",
        "text, JSON lines (.jsonl, field 'text') or token arrays (.npy, .bin), or folders of "
        "them (default: source code of the Python standard library)",
        str,
        "PATH",
        nargs="+",
    ),
    Option(
        "tokenizer",
        f"{BYTES} (default), or a tokenizer.json, a folder or a name that transformers finds on "
        "this machine",
        str,
    ),
    Option(
        "token_dtype", f"dtype of .bin files (default {TOKEN_DTYPES[0]})", str, choices=TOKEN_DTYPES
    ),
    Option("seq_len", "tokens per sample", least=2, default=_TRAIN.seq_len),
)
_MODEL = (
    Option(
        "model",
        "configuration of a transformers model: a JSON file or a name in tools/train/catalogue "
        "(default: the built-in mixture of experts)",
        str,
    ),
    Option("vocab_size", "vocabulary size (default: the tokenizer's, rounded up)", least=2),
    Option(
        "dtype",
        "dtype of weights and computation (default float64 on the CPU, float32 on CUDA); with "
        "bfloat16, weights, gradient sums and optimizer states are float32",
        str,
        choices=DTYPES,
        on_resume="same",
    ),
    Option("checkpoint_activations", "save memory: recompute each block in backward", bool),
    Option(
        "compile",
        "compile each block with torch.compile; without BACKEND: inductor",
        str,
        "BACKEND",
        nargs="?",
        const="inductor",
        default=NO_COMPILER,
    ),
    Option("pp_schedule", "pipeline schedule", str, choices=SCHEDULES, default="1f1b"),
    Option("stages_per_rank", "pipeline stages on each rank (default 1, or 2 if interleaved)"),
)
_UPDATE = (  # earlier steps cannot be compared with one process if one of these has changed
    Option("batch_size", "samples per step, over all ranks", default=_TRAIN.batch_size),
    Option("accumulate", "gradient accumulation: microbatches per batch (default: pp)"),
    Option("lr", "peak learning rate", float, positive=True, default=_TRAIN.learning_rate),
    Option("warmup_steps", "linear learning rate warm-up", least=0, default=_TRAIN.warmup_steps),
    Option("decay_steps", "cosine decay of the learning rate to a tenth at step N (default: none)"),
    Option("weight_decay", "weight decay of matrices", float, least=0, default=_TRAIN.weight_decay),
)
OPTIONS = {"run": _RUN, "data": _DATA, "model": _MODEL, "batch and optimizer": _UPDATE}
TABLE = {option.name: option for option in chain(*OPTIONS.values())}


class FinishedError(OptionsError):
    """A run that was started again has made its last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A run: every default filled in and every degree known. See `OPTIONS` for most fields."""

    steps: int
    world_size: int
    dims: ParallelDims
    device: str
    dtype: str
    out: Path
    out_given: bool
    resume: Path | None  # checkpoint folder
    init_from: Path | None
    export: Path | None
    done: int  # steps of the checkpoint
    reference: bool
    compare: int  # number of first steps that one process repeats
    checkpoint_activations: bool
    compile: str  # backend, or NO_COMPILER
    pp_schedule: str
    stages_per_rank: int
    comm_timeout: float  # seconds
    eval_every: int | None
    checkpoint_every: int | None
    keep: int
    profile: range  # steps
    source: Source
    unit: str  # name of a token: "byte" or "token"
    digest: str  # of all tokens
    model: AnyModelConfig
    train: TrainConfig
    inherited: Mapping[str, Any]  # values that a resumed run takes from a checkpoint of this run

    @property
    def run_fields(self) -> dict[str, Any]:
        """Return the fields that a checkpoint stores about its run.

        A resumed run must have the same values, except ``options``, the number of ranks and
        their degrees.
        """
        return {
            "world_size": self.world_size,
            "dims": self.dims.to_dict(),
            "seed": self.train.seed,
            "dtype": self.dtype,
            "text": self.digest,
            "model": _digest_of(self.model),
            "model_fields": _fields_of(self.model),
            "seq_len": self.train.seq_len,
            "held_out": self.eval_every is not None,
            "options": dict(self.inherited),
        }

    @property
    def shared_values(self) -> dict[str, Any]:
        """Return the values that must be equal on all ranks; each rank has parsed its own."""
        options = (TABLE[field.name] for field in fields(self) if field.name in TABLE)
        shared = [each.name for each in options if not (each.per_rank or each.type is Path)]
        found = {**self.run_fields, **asdict(self.train), "done": self.done}
        del found["options"], found["model_fields"]  # they have paths; "model" is a digest
        found |= {name: getattr(self, name) for name in shared if name not in found}
        # The paths may differ between nodes.
        given = {name: getattr(self, name) is not None for name in ("init_from", "export")}
        return found | given

    @property
    def only_exports(self) -> bool:
        """Return whether the run trains nothing, and exports a checkpoint."""
        return self.export is not None and self.steps == self.done and not self.resumes_in_place

    @property
    def resumes_in_place(self) -> bool:
        """Return whether the run continues in the folder of its checkpoint."""
        own = (self.out / CHECKPOINT, self.out / PREVIOUS)
        return self.resume is not None and any(same_path(self.resume, path) for path in own)


def parse(argv: Sequence[str], world_size: int | None = None) -> Options:
    """Return the options of a command line. Reads the text and, to resume, the checkpoint.

    Args:
        argv: The command line without the program's name.
        world_size: Number of ranks of the cluster that this process is in, if any.

    Raises:
        OptionsError: Options contradict each other or the checkpoint. `FinishedError` if no step
            is left.
        ParallelDimsError: The degrees break a rule of hp-mesh.
        ModelError: The model's configuration cannot be used.
        TextError: The text or the tokenizer cannot be used.
        SystemExit: An option is unknown or its value is not a number; the status is 2.
    """
    given = _parser().parse_args(argv)
    _check_no_empty_value(argv)
    asked = {name: value for name, value in vars(given).items() if value is not None}
    for name, option in TABLE.items():
        option.check(getattr(given, name))
    auto = given.resume == AUTO
    if auto and given.out is None:
        raise OptionsError(f"resume={AUTO} continues the run in --out; give that folder")
    saved: SavedRun | None = None
    if given.resume is not None:
        every = given.checkpoint_every or 0
        saved = find_run_in(given.out, every) if auto else find_run(given.resume)
    done = 0 if saved is None else saved.step
    processes = _world_size(given, world_size, saved)
    given.compare = _compared(given, asked, done)
    _check_used(given, asked)
    _check_weights(given, saved)
    if saved is not None:
        _check_comparable(given, asked, saved)
        _take_from_checkpoint(given, saved)
    inherited = _inherited(given)
    for option in TABLE.values():
        if getattr(given, option.name) is None:
            setattr(given, option.name, False if option.type is bool else option.default)
    dims = _dims(given, processes, saved)
    train = _train_config(given, dims.pp)
    source = Source(
        paths=tuple(map(Path, given.data or ())),
        tokenizer=given.tokenizer,
        token_dtype=given.token_dtype,
    )
    corpus = read_corpus(source)
    _check_samples(corpus, train, given.eval_every is not None)
    model = read_model(given.model)
    size = given.vocab_size
    if size is None and given.init_from is not None:  # the weights have this size
        size = model.vocab_size
    model = _with_vocabulary(model, corpus, size, dims.tp)
    _check_degrees(dims, model, train)
    _check_dropout(dims, model, given.compare)
    given.model = model
    given.stages_per_rank = _stages_per_rank(given, dims, model, train.accumulate)
    given.steps = _steps(given, done)
    given.profile = _profiled(given, done)
    given.dtype = given.dtype or DTYPES[given.device == "cuda"]
    given.resume = None if saved is None else saved.folder
    out_given = given.out is not None
    given.out = given.out or default_out(int(time.time()))
    options = Options(
        **{f.name: getattr(given, f.name) for f in fields(Options) if f.name in TABLE},
        world_size=processes,
        dims=dims,
        out_given=out_given,
        done=done,
        source=source,
        unit=corpus.unit,
        digest=corpus.digest,
        train=train,
        # Their defaults depend on the degrees, and a resumed run may have other degrees.
        inherited={
            **inherited,
            "vocab_size": model.vocab_size,
            "accumulate": train.accumulate,
        },
    )
    if saved is not None:
        _check_same(options.run_fields, saved)
    if saved is not None and options.resumes_in_place:
        check_no_later_checkpoint(saved)
    elif out_given and not auto:
        check_no_run(options.out, options.resume)
    return options


def how_to_resume(options: Options) -> str:
    """Return what an interrupted run has saved, and the command that resumes it."""
    found = (step_of(options.out / name) for name in (CHECKPOINT, PREVIOUS))
    step = next((step for step in found if step is not None), None)
    if step is None:
        before = f"; the run began at step {options.done} of {options.resume}"
        return f"no checkpoint was saved in {options.out}{before if options.resume else ''}"
    if step == options.steps:
        done = f"all {counted(step, 'step')} are made and saved in {options.out}"
        if options.export is None or has_weights(options.export):
            return done
        return f"{done}; export with --resume {options.out} --export {options.export}"
    argv = ["--resume", str(AUTO), "--out", str(options.out), "--steps", str(options.steps)]
    argv += ["--compare", str(options.compare)] if options.compare else []
    argv += ["--reference"] if options.reference else []
    argv += ["--export", str(options.export)] if options.export else []
    start = "torchrun ..." if "TORCHELASTIC_RUN_ID" in os.environ else "python"
    return f"step {step} is saved; continue with\n{start} {shlex.join([sys.argv[0], *argv])}"


def default_out(started: int) -> Path:
    """Return the folder of a run that started this many seconds after the epoch, in UTC."""
    return Path("runs") / time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))


def name_degrees(dims: Mapping[str, Any]) -> str:
    """Return the degrees of `ParallelDims.to_dict` that are not 1, as text."""
    names = (*DEGREES, "ulysses_degree")
    return " ".join(f"{n}={dims[n]}" for n in names if dims[n] not in (None, 1)) or "all degrees 1"


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, which is in the plural unless the number is 1."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train",
        usage="%(prog)s [--OPTION VALUE ...]; --help lists the options",
        allow_abbrev=False,
        description="Train a language model with any combination of parallel degrees. Without "
        "options: a small mixture of experts on the source code of the Python standard library, "
        "4 local processes on the CPU, dp_shard=2 cp=2 ep=4, compared with one process. A resumed "
        "run has the options of its checkpoint unless you give others.",
    )
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for option in options:
            option.add_to(group)
    ParallelDims.add_arguments(parser)
    return parser


def _check_no_empty_value(argv: Sequence[str]) -> None:
    """Raise for an empty value, for example of an unset shell variable.

    An empty path would be the current folder.
    """
    for before, text in zip(["the first argument", *argv], argv, strict=False):
        name, has_value, value = text.partition("=")
        if not text or (name.startswith("--") and has_value and not value):
            raise OptionsError(f"{name or before}= is empty; give a value, or leave it out")


def _check_used(given: argparse.Namespace, asked: Mapping[str, Any]) -> None:
    """Raise for options that would have no effect."""
    for name in ("pp_schedule", "stages_per_rank"):
        if name in asked and given.pp in (None, "1") and given.resume is None:
            raise OptionsError(
                f"{TABLE[name].flag}={asked[name]} without a pipeline (pp=1); give --pp, or leave "
                "it out"
            )
    for name in ("compile", "checkpoint_activations") if given.reference else ():
        if asked.get(name, False) not in (False, NO_COMPILER):
            raise OptionsError(f"{TABLE[name].flag} with --reference has no effect; leave one out")


def _check_weights(given: argparse.Namespace, saved: SavedRun | None) -> None:
    """Take model and tokenizer from the folder of ``--init-from``; check that of ``--export``."""
    restarted = saved is not None and given.resume == AUTO
    if given.export is not None and not restarted:
        if os.path.exists(given.export) and not os.path.isdir(given.export):
            raise OptionsError(f"export={given.export} is not a folder; give a new one")
        if has_weights(given.export):
            raise OptionsError(f"export={given.export} has weights already; give a new folder")
    folder = given.init_from
    if folder is None or restarted:
        return  # a run that is started again has its weights in the checkpoint
    for name in ("resume", "model"):
        value = getattr(given, name)
        if value is not None and value != AUTO:
            raise OptionsError(
                f"init-from={folder} and {name}={value} both give the "
                f"{'weights' if name == 'resume' else 'model'}; leave one out"
            )
    if not os.path.isfile(folder / "config.json"):
        raise OptionsError(
            f"init-from={folder} has no config.json; give a folder of save_pretrained or --export"
        )
    given.model = str(folder)
    if given.tokenizer is None and os.path.isfile(folder / "tokenizer.json"):
        given.tokenizer = str(folder)


def _take_from_checkpoint(given: argparse.Namespace, saved: SavedRun) -> None:
    """Set options that were not given to their values in the checkpoint."""
    for name, option in TABLE.items():
        if option.on_resume != "new" and getattr(given, name) is None:
            inherits = option.on_resume == "inherit"
            stored = saved.fields["options"] if inherits else saved.fields
            setattr(given, name, stored.get(name))
            option.check(getattr(given, name))
    if given.accumulate is None:  # saved by an older version, whose default was its pp
        given.accumulate = saved.fields["dims"]["pp"]


def _inherited(given: argparse.Namespace) -> dict[str, Any]:
    """Return the values that a resumed run takes from a checkpoint of this run, absolute paths."""
    found = {n: getattr(given, n) for n, each in TABLE.items() if each.on_resume == "inherit"}
    if found["data"]:
        found["data"] = [os.path.abspath(path) for path in found["data"]]
    for name in ("model", "tokenizer"):
        if found[name] and os.path.exists(found[name]):
            found[name] = os.path.abspath(found[name])
    return found


def _fields_of(model: AnyModelConfig) -> dict[str, Any]:
    return dict(model.fields) if isinstance(model, TransformersConfig) else asdict(model)


def _digest_of(model: AnyModelConfig) -> str:
    """Return a short name for a model's configuration."""
    found = _fields_of(model)
    kind = found.get("model_type", "built-in")
    return f"{kind}-{hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:8]}"


def _world_size(given: argparse.Namespace, cluster: int | None, saved: SavedRun | None) -> int:
    if given.reference:
        if given.procs not in (None, 1) or cluster not in (None, 1):
            raise OptionsError("--reference is one process; use --procs 1 or leave --procs out")
        return 1
    if cluster is not None:
        if given.procs not in (None, cluster):
            raise OptionsError(
                f"procs={given.procs}, but the cluster has WORLD_SIZE={cluster}; leave --procs out"
            )
        return cluster
    default = DEFAULT_PROCESSES if saved is None else saved.fields["world_size"]
    return int(given.procs or default)


def _dims(given: argparse.Namespace, processes: int, saved: SavedRun | None) -> ParallelDims:
    """Return the degrees.

    If one is given, the others are 1, and dp_shard takes the remaining ranks. If none is given, a
    resumed run has those of the checkpoint.
    """
    for name in (*DEGREES, "ulysses_degree"):
        degree = getattr(given, name)
        if given.reference and degree not in (None, "1", "-1"):
            raise OptionsError(
                f"{name}={degree} with --reference, which is one process without parallelism; use "
                f"1, leave {name} out, or leave --reference out"
            )
    defaults: Mapping[str, Any] = {}
    if all(getattr(given, name) is None for name in DEGREES):
        if saved is not None:
            defaults = saved.fields["dims"]
            if processes != saved.fields["world_size"]:  # dp_shard takes more or fewer ranks
                defaults = {**defaults, "dp_shard": -1}
        elif processes == DEFAULT_PROCESSES:
            defaults = DEFAULT_DEGREES
    asked = {name: value for name, value in vars(given).items() if value is not None}
    words = argparse.Namespace(**{**vars(given), **defaults, **asked})
    try:
        return ParallelDims.from_args(words, processes)
    except ParallelDimsError as error:
        if defaults.get("dp_shard") != -1:
            raise
        raise OptionsError(
            f"the degrees of the checkpoint do not fit procs={processes} ({error}); give degrees, "
            f"for example --dp-shard {processes}"
        ) from error


def _compared(given: argparse.Namespace, asked: Mapping[str, Any], done: int) -> int:
    """Return how many of the first steps are compared with one process."""
    if given.compare is None:
        # --no-checkpoint-activations (False) changes nothing in a new run.
        others = [name for name, value in asked.items() if value is not False]
        default = all(name in TABLE and TABLE[name].keeps_comparison for name in others)
        return DEFAULT_STEPS if default else 0
    steps = int(given.compare)
    if steps and given.reference:
        raise OptionsError("--compare with --reference, which is one process; leave one out")
    # A run that continues in its folder has the losses of all its steps in the log.
    if 0 < steps <= done and given.resume != AUTO:
        raise OptionsError(
            f"compare={steps} compares no step of this run, which starts after step {done}; use "
            f"0, or {done + 1} or more"
        )
    return steps


def _check_comparable(given: argparse.Namespace, asked: Mapping[str, Any], saved: SavedRun) -> None:
    """Raise if one process would repeat the first steps with other updates."""
    changed = [
        f"{TABLE[name].flag}={value}"
        for name, value in asked.items()
        if TABLE.get(name) in _UPDATE and value != saved.fields["options"].get(name)
    ]
    if given.compare and changed:
        raise OptionsError(
            f"--compare repeats the first steps, which were made without {', '.join(changed)}; "
            "leave one of them out"
        )


def _steps(given: argparse.Namespace, done: int) -> int:
    """Return the last step of the run."""
    auto = given.resume == AUTO
    if given.export is not None and done and not auto and given.steps is None:
        return done
    steps = int(given.steps or DEFAULT_STEPS + (0 if auto else done))
    if auto and steps == done:
        if has_summary(given.out, done):
            raise FinishedError(f"the run in {given.out} has made its {counted(done, 'step')}")
        return steps  # it was killed before it had a summary and curves
    if steps <= done:
        raise OptionsError(
            f"steps={steps} is not beyond the checkpoint's step {done}; use {done + 1} or more"
        )
    return steps


def _profiled(given: argparse.Namespace, done: int) -> range:
    """Return the steps of ``A:B``, of which at least one must be a step of the run.

    With ``--resume auto`` they may be earlier steps, since the same command is started again.
    """
    text = given.profile
    if text is None:
        return range(0)
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise OptionsError(f"profile={text} is not a range of steps; use A:B, for example 10:12")
    if int(first) > given.steps or (int(last) <= done and given.resume != AUTO):
        raise OptionsError(
            f"profile={text} has no step of this run; use steps of {done + 1}:{given.steps}"
        )
    return range(int(first), int(last) + 1)


def _train_config(given: argparse.Namespace, pp: int) -> TrainConfig:
    train = TrainConfig(
        seed=given.seed,
        batch_size=given.batch_size,
        seq_len=given.seq_len,
        accumulate=given.accumulate or pp,  # the fewest that keep all pipeline stages busy
        learning_rate=given.lr,
        warmup_steps=given.warmup_steps,
        decay_steps=given.decay_steps,
        weight_decay=given.weight_decay,
    )
    size = train.batch_size
    if size % train.accumulate:
        divisors = [str(number) for number in range(1, size + 1) if size % number == 0]
        raise OptionsError(
            f"accumulate={train.accumulate} does not divide batch-size={size}; use "
            + " or ".join(divisors)
        )
    if train.decay_steps is not None and train.decay_steps <= train.warmup_steps:
        raise OptionsError(
            f"decay-steps={train.decay_steps} is within warmup-steps={train.warmup_steps}; use "
            f"{train.warmup_steps + 1} or more, or fewer warm-up steps"
        )
    return train


def _stages_per_rank(
    given: argparse.Namespace, dims: ParallelDims, model: AnyModelConfig, microbatches: int
) -> int:
    """Return the number of pipeline stages of each rank."""
    if dims.pp == 1:
        return 1
    least = SCHEDULES[given.pp_schedule]
    stages = int(given.stages_per_rank or least)
    if stages < least or (least == 1 and stages > 1):
        other = next(name for name, number in SCHEDULES.items() if (number > 1) == (stages > 1))
        legal = f"{least} or more" if least > 1 else "1"
        raise OptionsError(
            f"stages-per-rank={stages} with pp-schedule={given.pp_schedule}; use {legal}, or "
            f"pp-schedule={other}"
        )
    if microbatches % dims.pp:
        raise OptionsError(
            f"accumulate={microbatches} is not a multiple of pp={dims.pp}: the stages run "
            f"{dims.pp} microbatches per round; use {microbatches // dims.pp * dims.pp or dims.pp} "
            "or another multiple"
        )
    if isinstance(model, ModelConfig) and dims.pp * stages > model.num_hidden_layers:
        raise OptionsError(
            f"pp={dims.pp} with stages-per-rank={stages} has more stages than "
            f"num_hidden_layers={model.num_hidden_layers}; use fewer"
        )
    return stages


def _check_samples(corpus: Corpus, train: TrainConfig, held_out: bool) -> None:
    samples = sum(len(part) // train.seq_len for part in corpus.parts)
    if samples - (held_out_samples(samples) if held_out else 0) < 1:
        tokens = sum(map(len, corpus.parts))
        raise OptionsError(
            f"data of {counted(tokens, corpus.unit)} has {counted(samples, 'sample')} of "
            f"seq-len={train.seq_len}; give more data or a smaller seq-len"
            + (", or leave out eval-every, which needs a sample" if held_out else "")
        )


def _with_vocabulary(
    model: AnyModelConfig, corpus: Corpus, asked: int | None, tp: int
) -> AnyModelConfig:
    """Return the model with the vocabulary size that was ``asked`` for, or the default size.

    The default is the tokenizer's size, rounded up so that ``tp`` divides it. For token arrays
    without a tokenizer it is the model's own.
    """
    size = asked
    if size is None and corpus.vocab_size is not None:
        multiple = math.lcm(PADDED_VOCABULARY, tp)
        size = -(-corpus.vocab_size // multiple) * multiple
    if size is None:
        size = model.vocab_size
    needed = max(corpus.largest + 1, corpus.vocab_size or 0)
    if size < needed:
        dtype = f", or the --token-dtype of .bin files (read as {corpus.bin_dtype})"
        raise OptionsError(
            f"vocab-size={size} is too small for tokens up to {needed - 1}; use {needed} or more, "
            "or give the tokenizer of the data" + (dtype if corpus.bin_dtype else "")
        )
    if isinstance(model, TransformersConfig):
        return model.with_vocabulary(size)
    return replace(model, vocab_size=size)


def _check_degrees(dims: ParallelDims, model: AnyModelConfig, train: TrainConfig) -> None:
    if isinstance(model, TransformersConfig):
        name = f"a transformers model ({model.fields['model_type']})"
        for axis in ("pp", "etp"):
            if (degree := getattr(dims, axis)) > 1:
                raise OptionsError(
                    f"{axis}={degree} with {name}; only dp_replicate, dp_shard, cp, tp and ep are "
                    f"supported: use {axis}=1, or the built-in model"
                )
        unknown = sorted(set(model.tp_plan.values()) - set(TP_STYLES))
        if dims.tp > 1 and (unknown or not model.tp_plan):
            raise OptionsError(
                f"tp={dims.tp} with {name} whose tensor parallel plan has "
                f"{', '.join(unknown) or 'no entry'}; only {', '.join(TP_STYLES)} are supported: "
                "use tp=1, or another model"
            )
        if dims.ep > 1 and model.shape is not None and not model.shape.experts:
            raise OptionsError(f"ep={dims.ep} with {name} without experts; use ep=1")
    if dims.etp not in (1, dims.tp):
        raise OptionsError(
            f"etp={dims.etp} with tp={dims.tp}: ranks that share an expert must have the same "
            "tokens, as the ranks of tp have; use etp=1" + (f" or {dims.tp}" if dims.tp > 1 else "")
        )
    numbers = model.numbers if isinstance(model, TransformersConfig) else model
    report = dims.check(numbers, train.seq_len, train.batch_size, causal_balance=True)
    # For hp-mesh these are advice. This trainer needs equal parts of sequences and heads.
    equal = ("sequence", "sequence-balance", "heads-ulysses", "kv-heads-ulysses")
    refused = [found for found in report if found.level == "error" or found.rule in equal]
    if refused:
        raise ParallelDimsError(refused)
    model.shape  # noqa: B018 - raises for numbers that make no model
    ranks = dims.layout().size("batch")
    if train.batch_size % (ranks * train.accumulate):
        raise OptionsError(
            f"batch-size={train.batch_size} cannot be split into accumulate={train.accumulate} "
            f"microbatches for {ranks} data-parallel ranks; use a multiple of "
            f"{ranks * train.accumulate}"
        )


def _check_dropout(dims: ParallelDims, model: AnyModelConfig, compare: int) -> None:
    """Raise if dropout would differ from that of one process or of a whole sequence."""
    found = model.dropouts if isinstance(model, TransformersConfig) else {}
    of_attention = {name: value for name, value in found.items() if "att" in name}
    remedy = "set it to 0 in the configuration of the model"
    if dims.cp > 1 and of_attention:
        raise OptionsError(
            f"cp={dims.cp} with {_as_text(of_attention)}: attention dropout is not supported with "
            f"context parallelism; use cp=1, or {remedy}"
        )
    if compare and found:
        raise OptionsError(
            f"--compare with {_as_text(found)}: one process drops other values, so its losses "
            f"differ; leave --compare out, or {remedy}"
        )


def _as_text(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _check_same(run_fields: Mapping[str, Any], saved: SavedRun) -> None:
    """Raise if this run cannot resume from the checkpoint; the message has all differences."""
    now, then = _flat(run_fields), _flat(saved.fields)
    # Name the numbers of a model that differ, rather than its digest, if the checkpoint has them.
    detailed = "model_fields" in run_fields and "model_fields" in saved.fields
    differing = [
        name
        for name in {**then, **now}
        if now.get(name) != then.get(name)
        if (detailed if name.startswith("model.") else name in now and name in then)
        if not (detailed and name == "model")
    ]
    reasons = []
    if names := [name for name in differing if name != "text"]:
        had, has = (
            " ".join(f"{n}={values[n]}" if n in values else f"no {n}" for n in names)
            for values in (then, now)
        )
        reasons.append(
            f"the checkpoint in {saved.folder} has {had}, this run {has}; a resumed run has the "
            "same seed, dtype, model and samples: leave them out"
        )
    if "text" in differing:
        other = "the library text of another Python version; resume with the Python that saved it"
        if saved.fields["options"].get("data") or run_fields["options"]["data"]:
            other = "other tokens; give the data and tokenizer of the checkpoint, or leave them out"
        reasons.append(f"the checkpoint in {saved.folder} was trained on {other}")
    if reasons:
        raise OptionsError("\n".join(reasons))


def _flat(run_fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that a resumed run must have as text, with the numbers of the model."""
    model = {f"model.{name}": x for name, x in run_fields.get("model_fields", {}).items()}
    others = ("world_size", "dims", "options", "model_fields")
    found = {name: x for name, x in run_fields.items() if name not in others} | model
    return {
        name: ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for name, value in found.items()
    }
