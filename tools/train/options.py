"""The command line: what was asked for, checked before torch is loaded or a process starts."""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hp_mesh import ParallelDims, ParallelDimsError

from .config import SEEDS, ModelConfig, TrainConfig
from .text import digest, read_text

DEFAULT_PROCESSES = 4
DEFAULT_STEPS = 60
DEFAULT_DEGREES = {"dp_shard": 2, "cp": 2, "ep": 4}
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
ABSENT = {"pp": "pipeline parallelism"}
DTYPES = ("float64", "float32")
EQUAL_SHARES = ("sequence", "sequence-balance", "heads-ulysses", "kv-heads-ulysses")
RUN_FILE, LOG_FILE, CHECKPOINT = "run.json", "log.jsonl", "checkpoint"


class OptionsError(ValueError):
    """Options that do not fit together, or a checkpoint that does not fit the options."""


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
    reference: bool
    checkpoint_activations: bool
    model: ModelConfig
    train: TrainConfig

    @property
    def identity(self) -> dict[str, Any]:
        """Return what a run and the checkpoint that it goes on from must agree on."""
        return {
            "world_size": self.world_size,
            "dims": self.dims.to_dict(),
            "seed": self.train.seed,
            "dtype": self.dtype,
            "text": digest(read_text()),
        }

    @property
    def goes_on_in_place(self) -> bool:
        """Return whether the run goes on in the folder that it was saved in."""
        return self.resume is not None and _same_path(self.resume, self.out / CHECKPOINT)


def parse(argv: Sequence[str], world_size: int | None = None) -> Options:
    """Return the options of ``argv``; ``world_size`` is that of a cluster this process is in.

    Raises `OptionsError` or hp-mesh's `ParallelDimsError`, either of which says what is legal;
    exits with status 2 where a word is no option or no number.
    """
    given = _parser().parse_args(argv)
    saved = None if given.resume is None else _saved_run(given.resume)
    processes = _world_size(given, world_size, saved)
    if saved is not None and processes != saved.fields["world_size"]:
        # Degrees need not fit another number of processes: compare them as they were given.
        asked = {name: word for name, word in vars(given).items() if word is not None}
        _check_same({"world_size": processes, **asked}, saved)
    model, train = ModelConfig(), TrainConfig(seed=_seed(given.seed, saved))
    dims = _dims(given, processes, saved)
    report = dims.check(model, train.seq_len, train.batch_size, causal_balance=True)
    # Unequal shares of a sequence or of heads are advice, but this model takes equal ones alone.
    refused = [found for found in report if found.level == "error" or found.rule in EQUAL_SHARES]
    if refused:
        raise ParallelDimsError(refused)
    options = Options(
        steps=_steps(given.steps, saved),
        world_size=processes,
        dims=dims,
        device=given.device,
        dtype=_either(given.dtype, saved, "dtype", DTYPES[given.device != "cpu"]),
        out=given.out or default_out(int(time.time())),
        out_given=given.out is not None,
        resume=None if saved is None else saved.folder,
        reference=given.reference,
        checkpoint_activations=given.checkpoint_activations,
        model=model,
        train=train,
    )
    if saved is not None:
        _check_same(options.identity, saved)
    if options.out_given and not options.goes_on_in_place:
        _check_holds_no_run(options.out)
    return options


def default_out(started: int) -> Path:
    """Return the folder of a run that started that many seconds after the epoch, in UTC."""
    return Path("runs") / time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))


def name_degrees(dims: Mapping[str, Any]) -> str:
    """Return the degrees of `ParallelDims.to_dict` that are not 1, in words."""
    names = (*DEGREES, "ulysses_degree")
    return " ".join(f"{n}={dims[n]}" for n in names if dims[n] not in (None, 1)) or "all degrees 1"


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
        allow_abbrev=False,
        description="Train a small mixture-of-experts language model on the source text of the "
        "Python standard library, over any mix of parallel axes. Without options: 4 local "
        "processes on the CPU, dp_shard=2 cp=2 ep=4.",
    )
    add = parser.add_argument
    add("--steps", type=int, help=f"train up to this step (default {DEFAULT_STEPS})")
    add("--seed", type=int, help="seed of the initial values and of the data's order (default 0)")
    add("--procs", type=int, help=f"local processes (default {DEFAULT_PROCESSES})")
    ParallelDims.add_arguments(parser)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add(
        "--dtype",
        choices=DTYPES,
        help="default float64 on the CPU, where top-k routing and AdamW would turn float32 "
        "rounding into other losses; float32 on CUDA",
    )
    add("--checkpoint-activations", action="store_true", help="recompute blocks in backward")
    add("--resume", type=Path, metavar="DIR", help="go on from a run's folder or checkpoint")
    add("--reference", action="store_true", help="train on one process, without the packages")
    add("--out", type=Path, metavar="DIR", help="new folder for the results (default runs/<time>)")
    return parser


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
    for name, what in ABSENT.items():
        if getattr(given, name) not in (None, "1"):
            raise OptionsError(f"{name}={getattr(given, name)}: this trainer has no {what}; use 1")
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


def _steps(given: int | None, saved: _SavedRun | None) -> int:
    done = 0 if saved is None else int(saved.fields["step"])
    steps = done + DEFAULT_STEPS if given is None else given
    if steps <= done:
        raise OptionsError(
            f"steps={steps} is not beyond the checkpoint's step {done}; use {done + 1} or more"
            if saved
            else f"steps={steps} is no number of steps; use 1 or more"
        )
    return steps


def _seed(given: int | None, saved: _SavedRun | None) -> int:
    seed: int = _either(given, saved, "seed", 0)
    if seed not in SEEDS:
        raise OptionsError(f"seed={seed} is out of range; use {SEEDS[0]} to {SEEDS[-1]}")
    return seed


def _saved_run(folder: Path) -> _SavedRun:
    for candidate in (folder / CHECKPOINT, folder):
        if os.path.isfile(candidate / RUN_FILE):
            return _SavedRun(candidate, _read_fields(candidate / RUN_FILE))
    raise OptionsError(f"no checkpoint in {folder}; give a run's folder or its checkpoint folder")


def _read_fields(path: Path) -> Mapping[str, Any]:
    """Return what a checkpoint says about its run, with every field that a run goes on from."""
    remedy = "the checkpoint is damaged, go on from another"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise OptionsError(f"{path} cannot be read: {error}; {remedy}") from error
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
}


def _check_holds_no_run(out: Path) -> None:
    saved = os.path.exists(out / CHECKPOINT)
    if saved or os.path.exists(out / LOG_FILE):
        raise OptionsError(
            f"out={out} holds a run already; give another folder"
            + (f", or go on with --resume {out}" if saved else "")
        )


def _same_path(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _check_same(identity: Mapping[str, Any], saved: _SavedRun) -> None:
    """Refuse to go on where ``identity`` is not the checkpoint's, and name all that differs."""
    now, then = _in_words(identity), _in_words(saved.fields)
    differing = [name for name in then if name in now and now[name] != then[name]]
    reasons = []
    if names := [name for name in differing if name != "text"]:
        had, has = (" ".join(f"{n}={words[n]}" for n in names) for words in (then, now))
        reasons.append(
            f"the checkpoint in {saved.folder} has {had}, this run {has}; a run goes on with the "
            "same processes, degrees, order, seed and dtype: leave them out"
        )
    if "text" in differing:
        reasons.append(
            f"the checkpoint in {saved.folder} was trained on another Python's library text; "
            "go on with the Python that wrote it"
        )
    if reasons:
        raise OptionsError("\n".join(reasons))


def _in_words(identity: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields as a command line would give them, those of ``dims`` among them."""
    flat = {**identity, **identity.get("dims", {})}
    flat.pop("dims", None)
    return {
        name: ",".join(value) if isinstance(value, list | tuple) else str(value)
        for name, value in flat.items()
    }


def _either(given: Any, saved: _SavedRun | None, name: str, default: Any) -> Any:
    if given is not None:
        return given
    return default if saved is None else saved.fields[name]
