"""The command line: what was asked for, checked before torch is loaded or a process starts."""

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hp_mesh import ParallelDims, ParallelDimsError

from .config import (
    SEEDS,
    TP_WORDS,
    AnyModelConfig,
    ModelConfig,
    TrainConfig,
    TransformersConfig,
    held_out_samples,
    read_model,
)
from .text import BYTES, TOKEN_DTYPES, Corpus, Source, read_corpus

DEFAULT_PROCESSES = 4
DEFAULT_STEPS = 60
COMPARED_STEPS = 60  # of the comparison with one process, where its number is not given
DEFAULT_DEGREES = {"dp_shard": 2, "cp": 2, "ep": 4}
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
SCHEDULES = {"1f1b": 1, "interleaved": 2}  # of pipelines, and how many stages a rank has at least
COMM_TIMEOUT, LONGEST_TIMEOUT = 300.0, 1e6  # seconds
DTYPES = ("float64", "float32", "bfloat16")
EQUAL_SHARES = ("sequence", "sequence-balance", "heads-ulysses", "kv-heads-ulysses")
DEMONSTRATED = {"out", "seed", "steps"}  # what may be given in the demonstration
# What a run that goes on takes from its checkpoint unless it is given anew; some of it may differ.
INHERITED = (
    *("device", "model", "vocab_size", "data", "tokenizer", "token_dtype", "seq_len"),
    *("batch_size", "accumulate", "lr", "warmup_steps", "decay_steps", "weight_decay"),
    *("eval_every", "checkpoint_every", "keep", "checkpoint_activations", "compile"),
    *("pp_schedule", "stages_per_rank", "comm_timeout"),
)
UPDATE_WORDS = ("batch_size", "accumulate", "lr", "warmup_steps", "decay_steps", "weight_decay")
NO_COMPILER = "none"  # in the place of a compiler's name
PADDED_VOCABULARY = 64  # a tokenizer's number of tokens is rounded up to a multiple, to be cut
RUN_FILE, LOG_FILE, CHECKPOINT = "run.json", "log.jsonl", "checkpoint"
SUMMARY_FILE = "summary.json"
CHECKSUMS_FILE = "checksums.json"  # in a checkpoint: CRC-32 of the files that have none inside
PREVIOUS = CHECKPOINT + ".previous"  # while a newer one takes the name
AUTO = Path("auto")  # in the place of a folder to go on from: the run's own, if it has been saved


class OptionsError(ValueError):
    """Options that do not fit together, or a checkpoint that does not fit the options."""


class FinishedError(OptionsError):
    """A run that goes on by itself has made its last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run, whole: every default filled in and every degree known."""

    steps: int
    world_size: int
    dims: ParallelDims
    device: str
    dtype: str
    out: Path
    out_given: bool
    resume: Path | None
    done: int  # steps of the run that it goes on from
    reference: bool
    compare: int  # how many steps one process makes too, from the first
    checkpoint_activations: bool
    compile: str | None  # the compiler of the model's blocks
    schedule: str  # of a pipeline
    stages_per_rank: int
    comm_timeout: float  # seconds
    eval_every: int  # steps, 0 for none
    checkpoint_every: int  # steps, 0 for at the end alone
    keep: int  # checkpoints
    profile: range  # of steps
    source: Source
    unit: str  # what a token is called
    digest: str  # of all tokens
    model: AnyModelConfig
    train: TrainConfig
    inherited: Mapping[str, Any]

    @property
    def identity(self) -> dict[str, Any]:
        """Return what a run and the checkpoint that it goes on from must agree on."""
        return {
            "world_size": self.world_size,
            "dims": self.dims.to_dict(),
            "seed": self.train.seed,
            "dtype": self.dtype,
            "text": self.digest,
            "model": _digest_of(self.model),
            "model_fields": _fields_of(self.model),
            "seq_len": self.train.seq_len,
            "held_out": self.eval_every > 0,
            "options": dict(self.inherited),
        }

    @property
    def common(self) -> dict[str, Any]:
        """Return what all ranks must agree on, which read it each for itself."""
        apart = ("options", "model_fields")  # of which there is a digest
        own = {name: value for name, value in self.identity.items() if name not in apart}
        names = (
            *("steps", "done", "device", "reference", "checkpoint_activations", "compile"),
            *("schedule", "stages_per_rank", "eval_every", "checkpoint_every", "profile"),
        )
        return {**own, **asdict(self.train), **{name: getattr(self, name) for name in names}}

    @property
    def goes_on_in_place(self) -> bool:
        """Return whether the run goes on in the folder that it was saved in."""
        here = (self.out / CHECKPOINT, self.out / PREVIOUS)
        return self.resume is not None and any(_same_path(self.resume, path) for path in here)


def parse(argv: Sequence[str], world_size: int | None = None) -> Options:
    """Return the options of ``argv``; ``world_size`` is that of a cluster this process is in.

    Reads the text. Raises `OptionsError` (`FinishedError` where nothing is left to do), hp-mesh's
    `ParallelDimsError`, `ModelError` or `TextError`, each of which says what is legal; exits with
    status 2 where a word is no option or no number.
    """
    given = _parser().parse_args(argv)
    _check_empty(argv)
    saved = _asked_run(given)
    processes = _world_size(given, world_size, saved)
    if saved is not None and processes != saved.fields["world_size"]:
        # Degrees need not fit another number of processes: compare them as they were given.
        asked = {name: word for name, word in vars(given).items() if word is not None}
        kept = {name: word for name, word in asked.items() if name not in INHERITED}
        _check_same({"world_size": processes, **kept}, saved)
    compare = _compared(given, saved)
    _check_pipeline_words(given)
    for name in ("compile", "checkpoint_activations") if given.reference else ():
        if getattr(given, name) not in (None, False, NO_COMPILER):
            word = name.replace("_", "-")
            raise OptionsError(f"{word} with --reference, which trains plainly; leave one out")
    if saved is not None:
        _check_comparable(given, saved, compare)
        for name, word in saved.fields["options"].items():
            if name in INHERITED and getattr(given, name) is None:
                setattr(given, name, word)
    _check_numbers(given)
    dims = _dims(given, processes, saved)
    train = _train_config(given, saved, dims.pp)
    source = Source(
        paths=tuple(map(Path, given.data or ())),
        tokenizer=given.tokenizer,
        token_dtype=given.token_dtype,
    )
    corpus = read_corpus(source)
    _check_samples(corpus, train, bool(given.eval_every))
    model = _with_vocabulary(read_model(given.model), corpus, given.vocab_size, dims.tp)
    _check_degrees(dims, model, train)
    _check_dropout(dims, model, compare)
    schedule, stages = _stages(given, dims, model, train.accumulate)
    done = 0 if saved is None else int(saved.fields["step"])
    if given.resume == AUTO and given.steps is None:  # started again, it ends at the same step
        given.steps = DEFAULT_STEPS
    if given.resume == AUTO and 0 < given.steps == done:
        if _is_summed_up(given.out, done):
            raise FinishedError(f"the run in {given.out} has made its {counted(done, 'step')}")
        steps = done  # it was killed before it had a summary and curves
    else:
        steps = _steps(given.steps, done)
    options = Options(
        steps=steps,
        world_size=processes,
        dims=dims,
        device=given.device or "cpu",
        dtype=_either(given.dtype, saved, "dtype", DTYPES[given.device == "cuda"]),
        out=given.out or default_out(int(time.time())),
        out_given=given.out is not None,
        resume=None if saved is None else saved.folder,
        done=done,
        reference=given.reference,
        compare=compare,
        checkpoint_activations=bool(given.checkpoint_activations),
        compile=None if given.compile in (None, NO_COMPILER) else given.compile,
        schedule=schedule,
        stages_per_rank=stages,
        comm_timeout=given.comm_timeout or COMM_TIMEOUT,
        eval_every=given.eval_every or 0,
        checkpoint_every=given.checkpoint_every or 0,
        keep=given.keep or 1,
        profile=_profiled(given.profile, done, steps, again=given.resume == AUTO),
        source=source,
        unit=corpus.unit,
        digest=corpus.digest,
        model=model,
        train=train,
        # The vocabulary of this run: its size may follow from the degrees.
        inherited={**_inherited(given), "vocab_size": model.vocab_size},
    )
    if saved is not None:
        _check_same(options.identity, saved)
    if saved is not None and options.goes_on_in_place:
        _check_none_is_later(saved)
    elif options.out_given and given.resume != AUTO:
        _check_holds_no_run(options.out, options.resume)
    return options


def how_to_go_on(options: Options) -> str:
    """Return what a run that was interrupted has saved in its folder, and how to go on from it."""
    found = (_step_of(options.out / name / RUN_FILE) for name in (CHECKPOINT, PREVIOUS))
    step = next((step for step in found if step is not None), None)
    if step is None:
        before = f"; the run went on from step {options.done} of {options.resume}"
        return f"no checkpoint was saved in {options.out}{before if options.resume else ''}"
    if step == options.steps:
        return f"all {counted(step, 'step')} are made and saved in {options.out}"
    words = ["--resume", str(AUTO), "--out", str(options.out), "--steps", str(options.steps)]
    words += ["--compare", str(options.compare)] if options.compare else []
    words += ["--reference"] if options.reference else []
    start = "torchrun ..." if "TORCHELASTIC_RUN_ID" in os.environ else "python"
    return f"step {step} is saved; go on with\n{start} {shlex.join([sys.argv[0], *words])}"


def _step_of(path: Path) -> int | None:
    try:
        return int(_read_fields(path)["step"])
    except OptionsError:
        return None


def default_out(started: int) -> Path:
    """Return the folder of a run that started that many seconds after the epoch, in UTC."""
    return Path("runs") / time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))


def name_degrees(dims: Mapping[str, Any]) -> str:
    """Return the degrees of `ParallelDims.to_dict` that are not 1, in words."""
    names = (*DEGREES, "ulysses_degree")
    return " ".join(f"{n}={dims[n]}" for n in names if dims[n] not in (None, 1)) or "all degrees 1"


def checkpoints_beside(folder: Path) -> list[Path]:
    """Return the other checkpoints in a checkpoint's folder, the latest first, whole or not."""
    run = Path(os.path.abspath(folder)).parent
    names = [name.rpartition("-") for name in (os.listdir(run) if os.path.isdir(run) else ())]
    steps = [int(step) for stem, _, step in names if stem == CHECKPOINT and step.isdecimal()]
    all_names = [CHECKPOINT, PREVIOUS, *(f"{CHECKPOINT}-{n}" for n in sorted(steps, reverse=True))]
    found = [folder.parent / name for name in all_names]
    return [each for each in found if os.path.isdir(each) and not _same_path(each, folder)]


def checksum_fault(path: Path) -> str | None:
    """Return how a file of a checkpoint differs from its checksum, None if it does not.

    Raises:
        OSError, ValueError, KeyError: The file or its checksum cannot be read.
    """
    expected = json.loads((path.parent / CHECKSUMS_FILE).read_text())[path.name]
    found = zlib.crc32(path.read_bytes())
    if found == expected:
        return None
    return f"{path} is damaged: its CRC-32 is {found}, {CHECKSUMS_FILE} has {expected}"


def other_checkpoint(whole: Sequence[Path]) -> str:
    """Return what to do if a checkpoint is damaged and the checkpoints beside it are ``whole``."""
    if not whole:
        return "no other beside it is whole"
    return f"go on from another in a new folder, --resume {_either_path(whole)} --out NEW"


def _either_path(paths: Sequence[Path]) -> str:
    return " or ".join(map(str, paths))


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, in the plural where it is not one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


@dataclass(frozen=True, slots=True)
class _SavedRun:
    folder: Path
    fields: Mapping[str, Any]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train",
        usage="%(prog)s [--OPTION VALUE ...]; --help lists the options",
        allow_abbrev=False,
        description="Train a language model over any mix of parallel axes. Without options: a "
        "small mixture of experts on the source text of the Python standard library, 4 local "
        "processes on the CPU, dp_shard=2 cp=2 ep=4, compared with one process.",
    )
    run = parser.add_argument_group("run").add_argument
    run(
        "--steps",
        type=int,
        help=f"train up to this step (default {DEFAULT_STEPS}; with --resume DIR so many more)",
    )
    run("--seed", type=int, help="seed of the initial values and of the data's order (default 0)")
    run("--procs", type=int, help=f"local processes (default {DEFAULT_PROCESSES})")
    run("--device", choices=("cpu", "cuda"), help="default cpu")
    run("--out", type=Path, metavar="DIR", help="new folder for the results (default runs/<time>)")
    run(
        "--resume",
        type=Path,
        metavar="DIR",
        help="go on from a run's folder or checkpoint; auto: from that in --out, if there is one",
    )
    run("--checkpoint-every", type=int, metavar="N", help="save every N steps, beside training")
    run(
        "--keep",
        type=int,
        metavar="N",
        help="how many checkpoints stay: the latest (default 1), and those before it",
    )
    run(
        "--comm-timeout",
        type=float,
        metavar="SECONDS",
        help="how long a rank waits for another after the first step (default "
        f"{COMM_TIMEOUT:g}; at least {COMM_TIMEOUT:g} up to then)",
    )
    run("--profile", metavar="A:B", help="write a trace of the steps from A to B, of each rank")
    run("--reference", action="store_true", help="train on one process, without the packages")
    run(
        "--compare",
        type=int,
        nargs="?",
        const=COMPARED_STEPS,
        metavar="STEPS",
        help="then make the first steps again on one process and compare the losses; "
        f"{COMPARED_STEPS} steps without a number, as in the run without options; 0 makes none",
    )
    run(
        "--eval-every",
        type=int,
        metavar="N",
        help="every N steps, and at the end, the loss of held-out text",
    )
    data = parser.add_argument_group("data").add_argument
    data(
        "--data",
        nargs="+",
        metavar="PATH",
        help="text, JSON lines (.jsonl, field 'text') or token arrays (.npy, .bin), or folders of "
        "them (default: the Python standard library's source)",
    )
    data(
        "--tokenizer",
        metavar="NAME",
        help=f"{BYTES} (default), or a tokenizer.json, a folder or a name that transformers finds "
        "on this machine",
    )
    data("--token-dtype", choices=TOKEN_DTYPES, help=f"of .bin files (default {TOKEN_DTYPES[0]})")
    data("--seq-len", type=int, metavar="N", help="tokens of a sample (default 256)")
    data("--batch-size", type=int, metavar="N", help="samples of a step (default 8)")
    model = parser.add_argument_group("model and update").add_argument
    model(
        "--model",
        metavar="NAME",
        help="a configuration of transformers: a JSON file or a name of this trainer's catalogue "
        "(default: the built-in mixture of experts)",
    )
    model("--vocab-size", type=int, metavar="N", help="default: the tokenizer's, rounded up")
    model(
        "--dtype",
        choices=DTYPES,
        help="default float64 on the CPU, where top-k routing and AdamW would turn float32 "
        "rounding into other losses; float32 on CUDA; bfloat16 computes in it and keeps weights, "
        "sums of gradients and the optimizer in float32",
    )
    model("--lr", type=float, help="highest learning rate (default 3e-3)")
    model("--warmup-steps", type=int, metavar="N", help="of rising learning rate (default 10)")
    model(
        "--decay-steps",
        type=int,
        metavar="N",
        help="let the learning rate fall like a cosine to a tenth at step N (default: it stays)",
    )
    model("--weight-decay", type=float, help="of matrices (default 0.1); norms and biases have 0")
    model("--accumulate", type=int, metavar="N", help="take a batch in N parts (default 1, or pp)")
    model("--pp-schedule", choices=SCHEDULES, help="of a pipeline (default 1f1b)")
    model(
        "--stages-per-rank",
        type=int,
        metavar="N",
        help="stages of a pipeline on each rank (default 1; 2 or more if interleaved)",
    )
    model(
        "--checkpoint-activations",
        action=argparse.BooleanOptionalAction,
        help="recompute blocks in backward",
    )
    model(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="compile each block with torch.compile (inductor without a name, "
        f"{NO_COMPILER} for not)",
    )
    ParallelDims.add_arguments(parser)
    return parser


def _check_empty(argv: Sequence[str]) -> None:
    """Raise for an empty value, for example of an unset shell variable.

    An empty path would be the current folder.
    """
    for before, word in zip(["the first word", *argv], argv, strict=False):
        name, has_value, value = word.partition("=")
        if not word or (name.startswith("--") and has_value and not value):
            raise OptionsError(f"{name or before}= is empty; give a value, or leave it out")


def _check_numbers(given: argparse.Namespace) -> None:
    """Raise for numbers that can be nobody's."""
    for name, least in _LEAST.items():
        value = getattr(given, name)
        if value is not None and not value >= least:
            raise OptionsError(f"{name.replace('_', '-')}={value} cannot be; use {least} or more")
    if given.weight_decay == math.inf:
        raise OptionsError("weight-decay=inf cannot be; use a finite number")
    if given.lr is not None and not 0 < given.lr < math.inf:
        raise OptionsError(f"lr={given.lr} is no learning rate; use a number above 0")
    if given.comm_timeout is not None and given.comm_timeout > LONGEST_TIMEOUT:
        raise OptionsError(
            f"comm-timeout={given.comm_timeout} is too long; use {LONGEST_TIMEOUT:.0f} or less"
        )


_LEAST = {
    "batch_size": 1,
    "seq_len": 2,
    "accumulate": 1,
    "warmup_steps": 0,
    "decay_steps": 1,
    "weight_decay": 0,
    "eval_every": 1,
    "checkpoint_every": 1,
    "keep": 1,
    "vocab_size": 2,
    "stages_per_rank": 1,
    "comm_timeout": 1,
}


def _check_pipeline_words(given: argparse.Namespace) -> None:
    """Raise for words of a pipeline where this command line has none."""
    for name in ("pp_schedule", "stages_per_rank"):
        if getattr(given, name) is not None and given.pp in (None, "1") and given.resume is None:
            word = f"{name.replace('_', '-')}={getattr(given, name)}"
            raise OptionsError(
                f"{word} with pp=1, which is no pipeline; give --pp, or leave it out"
            )


def _stages(
    given: argparse.Namespace, dims: ParallelDims, model: AnyModelConfig, parts: int
) -> tuple[str, int]:
    """Return the schedule of a pipeline of a batch's parts, and how many stages each rank has."""
    schedule: str = given.pp_schedule or next(iter(SCHEDULES))
    least = SCHEDULES[schedule]
    stages: int = least if given.stages_per_rank is None else given.stages_per_rank
    if dims.pp == 1:
        return schedule, 1
    if stages < least or (least == 1 and stages > 1):
        others = [name for name, number in SCHEDULES.items() if (number > 1) == (stages > 1)]
        raise OptionsError(
            f"stages-per-rank={stages} with pp-schedule={schedule}; use {least}"
            + (" or more" if least > 1 else "")
            + f", or pp-schedule={others[0]}"
        )
    if parts % dims.pp:
        raise OptionsError(
            f"accumulate={parts} is no multiple of pp={dims.pp}, whose stages take a batch in "
            f"rounds of {dims.pp} parts; use {parts // dims.pp * dims.pp or dims.pp} or another one"
        )
    if isinstance(model, ModelConfig) and dims.pp * stages > model.num_hidden_layers:
        raise OptionsError(
            f"pp={dims.pp} with stages-per-rank={stages} has more stages than "
            f"num_hidden_layers={model.num_hidden_layers}; use fewer"
        )
    return schedule, stages


def _train_config(given: argparse.Namespace, saved: _SavedRun | None, pp: int) -> TrainConfig:
    words = {field.name: field.name for field in fields(TrainConfig)} | {"learning_rate": "lr"}
    asked = {name: getattr(given, word, None) for name, word in words.items() if name != "seed"}
    if asked["accumulate"] is None:
        asked["accumulate"] = pp  # the fewest parts of a batch that keep all stages busy at once
    train = TrainConfig(
        seed=_seed(given.seed, saved),
        **{name: value for name, value in asked.items() if value is not None},
    )
    if train.batch_size % train.accumulate:
        raise OptionsError(
            f"accumulate={train.accumulate} does not divide batch-size={train.batch_size}; use "
            + " or ".join(str(n) for n in _divisors(train.batch_size))
        )
    if train.decay_steps is not None and train.decay_steps <= train.warmup_steps:
        raise OptionsError(
            f"decay-steps={train.decay_steps} is within warmup-steps={train.warmup_steps}; use "
            f"{train.warmup_steps + 1} or more, or fewer steps of warm-up"
        )
    return train


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _check_samples(corpus: Corpus, train: TrainConfig, held_out: bool) -> None:
    samples = sum(len(part) // train.seq_len for part in corpus.parts)
    if samples - (held_out_samples(samples) if held_out else 0) < 1:
        tokens = sum(map(len, corpus.parts))
        raise OptionsError(
            f"data of {counted(tokens, corpus.unit)} has {counted(samples, 'sample')} of "
            f"seq-len={train.seq_len}; give more data or a smaller seq-len"
            + (", or leave eval-every out, which needs a sample of its own" if held_out else "")
        )


def _with_vocabulary(
    model: AnyModelConfig, corpus: Corpus, asked: int | None, tp: int
) -> AnyModelConfig:
    """Return the model for as many tokens as asked for, else as the tokenizer has, rounded up.

    So that ``tp`` cuts it; of token arrays the size is the model's own.
    """
    size = asked
    if size is None and corpus.vocab_size is not None:
        multiple = math.lcm(PADDED_VOCABULARY, tp)
        size = -(-corpus.vocab_size // multiple) * multiple
    if size is None:
        size = model.vocab_size
    needed = max(corpus.largest + 1, corpus.vocab_size or 0)
    if size < needed:
        raise OptionsError(
            f"vocab-size={size} is too small for tokens up to {needed - 1}; use {needed} or more, "
            "or name the tokenizer of the data"
            + (
                f", or the --token-dtype of .bin files, which are read as {corpus.bin_dtype}"
                if corpus.bin_dtype
                else ""
            )
        )
    if isinstance(model, TransformersConfig):
        return model.with_vocabulary(size)
    return replace(model, vocab_size=size)


def _check_degrees(dims: ParallelDims, model: AnyModelConfig, train: TrainConfig) -> None:
    if isinstance(model, TransformersConfig):
        for name in ("pp", "etp"):
            if (degree := getattr(dims, name)) > 1:
                raise OptionsError(
                    f"{name}={degree} with a model of transformers "
                    f"({model.fields['model_type']}); only dp_replicate, dp_shard, cp, tp and ep "
                    f"spread those: use {name}=1, or the built-in model"
                )
        unknown = sorted(set(model.tp_plan.values()) - set(TP_WORDS))
        if dims.tp > 1 and (unknown or not model.tp_plan):
            raise OptionsError(
                f"tp={dims.tp} with a model of transformers ({model.fields['model_type']}) whose "
                f"plan of tensor parallelism has {', '.join(unknown) or 'nothing'}; only "
                f"{', '.join(TP_WORDS)} are known here: use tp=1, or another model"
            )
        shape = model.shape
        if dims.ep > 1 and shape is not None and not shape.experts:
            raise OptionsError(
                f"ep={dims.ep} with a model of transformers ({model.fields['model_type']}) that "
                "has no experts; use ep=1"
            )
    if dims.etp not in (1, dims.tp):
        raise OptionsError(
            f"etp={dims.etp} with tp={dims.tp}: ranks that share an expert must hold the same "
            f"tokens here, as those of tp do; use etp=1" + (f" or {dims.tp}" if dims.tp > 1 else "")
        )
    numbers = model.numbers if isinstance(model, TransformersConfig) else model
    report = dims.check(numbers, train.seq_len, train.batch_size, causal_balance=True)
    # Unequal shares of a sequence or of heads are advice, but this trainer takes equal ones alone.
    refused = [found for found in report if found.level == "error" or found.rule in EQUAL_SHARES]
    if refused:
        raise ParallelDimsError(refused)
    model.shape  # noqa: B018 - raises for numbers that make no model
    ranks = dims.layout().size("batch")
    if train.batch_size % (ranks * train.accumulate):
        raise OptionsError(
            f"batch-size={train.batch_size} cannot be cut into accumulate={train.accumulate} parts "
            f"for {ranks} data-parallel ranks; use a multiple of {ranks * train.accumulate}"
        )


def _check_dropout(dims: ParallelDims, model: AnyModelConfig, compare: int) -> None:
    """Raise where dropout cannot be that of one process, or of a whole sequence."""
    found = model.dropouts if isinstance(model, TransformersConfig) else {}
    of_attention = {name: value for name, value in found.items() if "att" in name}
    remedy = "set it to 0 in the configuration of the model"
    if dims.cp > 1 and of_attention:
        raise OptionsError(
            f"cp={dims.cp} with {_words_of(of_attention)}: dropout of attention is not supported "
            f"where ranks hold parts of a sequence; use cp=1, or {remedy}"
        )
    if compare and found:
        raise OptionsError(
            f"--compare with {_words_of(found)}: ranks and one process drop other numbers, so that "
            f"their losses differ; leave --compare out, or {remedy}"
        )


def _words_of(numbers: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in numbers.items())


def _inherited(given: argparse.Namespace) -> dict[str, Any]:
    """Return the words that a run which goes on from this one takes; paths from the root."""
    words = {name: getattr(given, name) for name in INHERITED}
    if words["data"]:
        words["data"] = [os.path.abspath(path) for path in words["data"]]
    for name in ("model", "tokenizer"):
        if words[name] and os.path.exists(words[name]):
            words[name] = os.path.abspath(words[name])
    return words


def _fields_of(model: AnyModelConfig) -> dict[str, Any]:
    return dict(model.fields) if isinstance(model, TransformersConfig) else asdict(model)


def _digest_of(model: AnyModelConfig) -> str:
    """Return a short name for a model's configuration."""
    found = _fields_of(model)
    kind = found.get("model_type", "built-in")
    return f"{kind}-{hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:8]}"


def _world_size(given: argparse.Namespace, cluster: int | None, saved: _SavedRun | None) -> int:
    if given.procs is not None and given.procs < 1:
        raise OptionsError(f"procs={given.procs} is no number of processes; use 1 or more")
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
    processes: int = _either(given.procs, saved, "world_size", DEFAULT_PROCESSES)
    return processes


def _dims(given: argparse.Namespace, processes: int, saved: _SavedRun | None) -> ParallelDims:
    """Return the degrees; one that is given leaves 1 for the others and dp_shard what is left."""
    for name in (*DEGREES, "ulysses_degree"):
        if given.reference and getattr(given, name) not in (None, "1", "-1"):
            raise OptionsError(
                f"{name}={getattr(given, name)} with --reference, which is one process without "
                f"parallelism; use 1, leave {name} out, or leave --reference out"
            )
    defaults: Mapping[str, Any] = {}
    if all(getattr(given, name) is None for name in DEGREES):
        if saved is not None:
            defaults = saved.fields["dims"]
        elif processes == DEFAULT_PROCESSES:
            defaults = DEFAULT_DEGREES
    words = {name: word for name, word in vars(given).items() if word is not None}
    return ParallelDims.from_args(argparse.Namespace(**{**defaults, **words}), processes)


def _steps(given: int | None, done: int) -> int:
    steps = done + DEFAULT_STEPS if given is None else given
    if steps <= done:
        raise OptionsError(
            f"steps={steps} is not beyond the checkpoint's step {done}; use {done + 1} or more"
            if done
            else f"steps={steps} is no number of steps; use 1 or more"
        )
    return steps


def _compared(given: argparse.Namespace, saved: _SavedRun | None) -> int:
    """Return how many steps are compared: those of the demonstration, or as many as asked for."""
    others = [word for name, word in vars(given).items() if name not in DEMONSTRATED]
    default = COMPARED_STEPS if all(word is None or word is False for word in others) else 0
    steps: int = default if given.compare is None else given.compare
    done = 0 if saved is None else int(saved.fields["step"])
    if given.compare and given.reference:
        raise OptionsError("--compare with --reference, which is the one process; leave one out")
    # A run that goes on in its folder has the losses of all its steps in the log.
    least = 0 if given.resume == AUTO else done
    if given.compare is not None and (steps < 0 or 0 < steps <= least):
        raise OptionsError(
            f"compare={steps} steps from the first are "
            + (f"all before the checkpoint's step {done}; " if steps > 0 else "no number of them; ")
            + f"use 0, or {done + 1} or more"
        )
    return steps


def _check_comparable(given: argparse.Namespace, saved: _SavedRun, compare: int) -> None:
    """Raise where one process would make the first steps with words that are new in this run."""
    changed = [
        f"{name.replace('_', '-')}={getattr(given, name)}"
        for name in UPDATE_WORDS
        if getattr(given, name) not in (None, saved.fields["options"].get(name))
    ]
    if compare and changed:
        raise OptionsError(
            f"--compare makes the first steps again, which were made without {', '.join(changed)}; "
            "leave one of them out"
        )


def _seed(given: int | None, saved: _SavedRun | None) -> int:
    seed: int = _either(given, saved, "seed", 0)
    if seed not in SEEDS:
        raise OptionsError(f"seed={seed} is out of range; use {SEEDS[0]} to {SEEDS[-1]}")
    return seed


def _asked_run(given: argparse.Namespace) -> _SavedRun | None:
    """Return the run to go on from, None for a new one."""
    if given.resume is None:
        return None
    if given.resume != AUTO:
        return _saved_run(given.resume)
    if given.out is None:
        raise OptionsError(f"resume={AUTO} goes on in --out; give that folder")
    found = any(os.path.isdir(given.out / name) for name in (CHECKPOINT, PREVIOUS))
    if found or _named_beside(given.out / CHECKPOINT):
        return _saved_run(given.out)
    log = given.out / LOG_FILE
    every, last = given.checkpoint_every or 0, last_step_of(log)
    # A checkpoint is whole when the write of the next one begins, and before the summary. torchrun
    # starts its ranks anew if one has failed: the first start found the folder free.
    summary = given.out / SUMMARY_FILE
    had_one = 0 < 2 * every < last or os.path.exists(summary)
    if had_one and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        if last:
            there = f"{log} has {last} steps, before the last of which one was written"
        else:
            there = f"{summary} is there, which is written after the last one"
        raise OptionsError(
            f"resume={AUTO} finds no checkpoint in {given.out}, but {there}; put it back, or give "
            "another folder"
        )
    return None


def _profiled(word: str | None, done: int, steps: int, *, again: bool) -> range:
    """Return the steps from A to B of ``A:B``, both included; some are among those of the run.

    If the same command line is started ``again``, they may have been made before.
    """
    if word is None:
        return range(0)
    first, _, last = word.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise OptionsError(f"profile={word} is no range of steps; use A:B, as 10:12")
    if int(first) > steps or (int(last) <= done and not again):
        raise OptionsError(
            f"profile={word} is none of the steps of this run; use some of {done + 1}:{steps}"
        )
    return range(int(first), int(last) + 1)


def _saved_run(folder: Path) -> _SavedRun:
    damaged: OptionsError | None = None
    for candidate in (folder / CHECKPOINT, folder / PREVIOUS, folder):
        if os.path.isfile(candidate / RUN_FILE):
            try:
                return _SavedRun(candidate, _read_fields(candidate / RUN_FILE))
            except OptionsError as error:
                damaged = damaged or error
    if damaged is not None:
        raise damaged
    named = re.fullmatch(rf"{CHECKPOINT}(-\d+)?|{re.escape(PREVIOUS)}", folder.name)
    asked = folder if named else folder / CHECKPOINT
    others = _named_beside(asked)
    if others or os.path.isdir(asked):
        raise OptionsError(f"{asked / RUN_FILE} is missing; {other_checkpoint(others)}")
    raise OptionsError(f"no checkpoint in {folder}; give a run's folder or its checkpoint folder")


def _named_beside(folder: Path) -> list[Path]:
    """Return the other checkpoints in a checkpoint's folder that have their file of the run."""
    return [path for path in checkpoints_beside(folder) if os.path.isfile(path / RUN_FILE)]


def _read_fields(path: Path) -> Mapping[str, Any]:
    """Return what a checkpoint says about its run, with every field that a run goes on from."""
    remedy = f"the checkpoint is damaged; {other_checkpoint(_named_beside(path.parent))}"
    reading = path
    try:
        found = json.loads(path.read_text())
        reading = path.parent / CHECKSUMS_FILE
        # A checkpoint without checksums is refused later, when it is loaded.
        fault = checksum_fault(path) if os.path.isfile(reading) else None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise OptionsError(f"{reading} cannot be read: {error}; {remedy}") from error
    if fault is not None:
        raise OptionsError(f"{fault}; {remedy}")
    top = found if isinstance(found, dict) else {}
    dims = top["dims"] if isinstance(top.get("dims"), dict) else {}
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(top.get(name), kind)]
    wrong += [f"dims.{field.name}" for field in fields(ParallelDims) if field.name not in dims]
    if wrong:
        raise OptionsError(f"{path} lacks a valid {', '.join(wrong)}; {remedy}")
    return top


_FIELDS = {
    "world_size": int,
    "dims": dict,
    "seed": int,
    "dtype": str,
    "text": str,
    "step": int,
    "samples": int,
    "model": str,
    "seq_len": int,
    "held_out": bool,
    "options": dict,
}


def _check_holds_no_run(out: Path, resume: Path | None) -> None:
    saved = os.path.isfile(out / CHECKPOINT / RUN_FILE)
    kept = _named_beside(out / CHECKPOINT)
    if saved or kept or os.path.exists(out / CHECKPOINT) or _has_steps(out / LOG_FILE):
        if resume is not None and any(_same_path(resume, path) for path in kept):
            way = f", or go back: move its later checkpoints away, rename {resume} to " + (
                f"{out / CHECKPOINT}, and give --resume {AUTO} --out {out}"
            )
        elif saved:
            way = f", or go on from its latest checkpoint: --resume {AUTO} --out {out}"
        else:
            way = f" with --resume {_either_path(kept)}" if kept else ""
        raise OptionsError(f"out={out} holds a run already; give another folder{way}")


def _has_steps(log: Path) -> bool:
    return os.path.exists(log) and os.path.getsize(log) > 0


def records_of(log: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the whole lines of a log, if there is one, and what they say."""
    if not log.exists():
        return
    with log.open(errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:  # a write that was cut off
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield line.rstrip("\n") + "\n", record


def last_step_of(log: Path) -> int:
    """Return the last step that a log has, 0 without a step."""
    return max((record["step"] for _, record in records_of(log)), default=0)


def _is_summed_up(out: Path, done: int) -> bool:
    """Return whether a folder has the summary of so many steps, which is written last."""
    try:
        return bool(json.loads((out / SUMMARY_FILE).read_text())["steps"] == done)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _check_none_is_later(saved: _SavedRun) -> None:
    """Raise if a run would go on in a folder whose kept checkpoints are of later steps.

    The latest steps are kept: those of the run itself would be removed.
    """
    done = saved.fields["step"]
    names = ((path, path.name.rpartition("-")[2]) for path in checkpoints_beside(saved.folder))
    later = [str(path) for path, step in names if step.isdecimal() and int(step) > done]
    if later:
        raise OptionsError(
            f"{saved.folder} is of step {done}, but checkpoints of later steps are beside it; "
            f"move them away, or go on from one: --resume {' or '.join(later)}"
        )


def _same_path(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _check_same(identity: Mapping[str, Any], saved: _SavedRun) -> None:
    """Refuse to go on where ``identity`` is not the checkpoint's, and name all that differs."""
    now, then = _in_words(identity), _in_words(saved.fields)
    differing = [name for name in then if name in now and now[name] != then[name]]
    if "model" in differing and "model_fields" in saved.fields:  # older ones have the digest alone
        now |= _model_words(identity)
        then |= _model_words(saved.fields)
        named = [name for name in {**then, **now} if name.startswith("model.")]
        differing.remove("model")
        differing += [name for name in named if now.get(name) != then.get(name)]
    reasons = []
    if names := [name for name in differing if name != "text"]:
        had, has = (
            " ".join(f"{n}={words[n]}" if n in words else f"no {n}" for n in names)
            for words in (then, now)
        )
        reasons.append(
            f"the checkpoint in {saved.folder} has {had}, this run {has}; a run goes on with the "
            "same processes, degrees, order, seed and dtype, model and samples: leave them out"
        )
    if "text" in differing:
        reasons.append(
            f"the checkpoint in {saved.folder} was trained on "
            + (
                "other tokens; give the data and tokenizer that it was trained on"
                if saved.fields["options"].get("data")
                else "another Python's library text; go on with the Python that wrote it"
            )
        )
    if reasons:
        raise OptionsError("\n".join(reasons))


def _in_words(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields as a command line would give them, those of ``dims`` among them."""
    flat = {**identity, **identity.get("dims", {})}
    apart = ("dims", "options", "model_fields")
    flat = {name: value for name, value in flat.items() if name not in apart}
    return {
        name: ",".join(value) if isinstance(value, list | tuple) else str(value)
        for name, value in flat.items()
    }


def _model_words(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return the numbers of a model, under names that say that they are its own."""
    found = json.loads(json.dumps(identity["model_fields"]))
    return {f"model.{name}": str(value) for name, value in found.items()}


def _either(given: Any, saved: _SavedRun | None, name: str, default: Any) -> Any:
    if given is not None:
        return given
    return default if saved is None else saved.fields[name]
