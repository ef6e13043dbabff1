"""The command line: what was asked for, checked before torch is loaded or a process starts."""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_mesh import ParallelDims

from .config import ModelConfig, TrainConfig
from .text import digest, read_text

DEFAULT_PROCESSES = 4
DEFAULT_STEPS = 60
DEFAULT_DEGREES = {"dp_shard": 2, "cp": 2, "ep": 4}
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
ABSENT = {"pp": "pipeline parallelism", "etp": "tensor parallelism inside experts"}
DTYPES = ("float64", "float32")
RUN_FILE = "run.json"


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


def parse(argv: Sequence[str], world_size: int | None = None) -> Options:
    """Return the options of ``argv``; ``world_size`` is that of a cluster this process is in.

    Raises `OptionsError` or hp-mesh's `ParallelDimsError`, either of which says what is legal;
    exits with status 2 where a word is no option or no number.
    """
    given = _parser().parse_args(argv)
    saved = None if given.resume is None else _saved_run(given.resume)
    processes = _world_size(given, world_size, saved)
    if saved is not None:
        _check_same({"world_size": processes}, saved)
    model, train = ModelConfig(), TrainConfig(seed=_either(given.seed, saved, "seed", 0))
    dims = _dims(given, processes, saved)
    dims.validate(model, train.seq_len, train.batch_size, causal_balance=True)
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
    return options


def default_out(started: int) -> Path:
    """Return the folder of a run that started that many seconds after the epoch, in UTC."""
    return Path("runs") / time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))


def name_degrees(dims: Mapping[str, Any]) -> str:
    """Return the degrees of `ParallelDims.to_dict` that are not 1, in words."""
    names = (*DEGREES, "ulysses_degree")
    return " ".join(f"{n}={dims[n]}" for n in names if dims[n] not in (None, 1)) or "all degrees 1"


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
    add("--out", type=Path, metavar="DIR", help="results go here (default runs/<time>)")
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
    defaults: Mapping[str, Any] = {}
    if all(getattr(given, name) is None for name in DEGREES):
        if saved is not None:
            defaults = saved.fields["dims"]
        elif processes == DEFAULT_PROCESSES:
            defaults = DEFAULT_DEGREES
    words = {name: word for name, word in vars(given).items() if word is not None}
    dims = ParallelDims.from_args(argparse.Namespace(**{**defaults, **words}), processes)
    if dims.ulysses_degree not in (None, 1, dims.cp):
        raise OptionsError(
            f"ulysses_degree={dims.ulysses_degree} with cp={dims.cp}: this trainer either gathers "
            f"k and v or exchanges heads over all of cp; use 1 or {dims.cp}"
        )
    return dims


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


def _saved_run(folder: Path) -> _SavedRun:
    for candidate in (folder / "checkpoint", folder):
        if (candidate / RUN_FILE).is_file():
            return _SavedRun(candidate, json.loads((candidate / RUN_FILE).read_text()))
    raise OptionsError(f"no checkpoint in {folder}; give a run's folder or its checkpoint folder")


def _check_same(identity: Mapping[str, Any], saved: _SavedRun) -> None:
    for name, value in identity.items():
        if value == saved.fields[name]:
            continue
        if name == "text":
            raise OptionsError(
                f"the checkpoint in {saved.folder} was trained on another Python's library text; "
                "go on with the Python that wrote it"
            )
        raise OptionsError(
            f"the checkpoint in {saved.folder} has {name}={_words(saved.fields[name])}, this run "
            f"{name}={_words(value)}; a run goes on with the same processes, degrees, seed and "
            "dtype: leave them out"
        )


def _words(value: object) -> str:
    return f"({name_degrees(value)})" if isinstance(value, Mapping) else str(value)


def _either(given: Any, saved: _SavedRun | None, name: str, default: Any) -> Any:
    if given is not None:
        return given
    return default if saved is None else saved.fields[name]
