"""The folder of a run: the names of its files, and what an earlier run left in it. Needs no torch.

A folder has ``checkpoint/`` (the latest one), ``checkpoint-<step>/`` (earlier ones), ``log.jsonl``
and, when the run has ended, ``summary.json``.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hp_mesh import ParallelDims

RUN_FILE, LOG_FILE, CHECKPOINT = "run.json", "log.jsonl", "checkpoint"
SUMMARY_FILE = "summary.json"
CHECKSUMS_FILE = "checksums.json"  # in a checkpoint: CRC-32 of the files that have none inside
PREVIOUS = CHECKPOINT + ".previous"  # while a newer checkpoint takes the name
AUTO = Path("auto")  # --resume auto: resume from the checkpoint in --out if there is one
_TYPES = {  # of the fields of RUN_FILE
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


class OptionsError(ValueError):
    """The options contradict each other or the checkpoint."""


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A checkpoint folder and the content of its `RUN_FILE`."""

    folder: Path
    fields: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Return the number of steps of the run up to this checkpoint."""
        return int(self.fields["step"])


def find_run(folder: Path) -> SavedRun:
    """Return the latest valid checkpoint of a run's folder, or the one that ``folder`` is.

    Raises:
        OptionsError: There is none. The message names intact checkpoints in the same folder.
    """
    damaged: OptionsError | None = None
    for candidate in (folder / CHECKPOINT, folder / PREVIOUS, folder):
        if os.path.isfile(candidate / RUN_FILE):
            try:
                return SavedRun(candidate, _read_run_file(candidate / RUN_FILE))
            except OptionsError as error:
                damaged = damaged or error
    if damaged is not None:
        raise damaged
    is_checkpoint = re.fullmatch(rf"{CHECKPOINT}(-\d+)?|{re.escape(PREVIOUS)}", folder.name)
    asked = folder if is_checkpoint else folder / CHECKPOINT
    others = _resumable(asked)
    if others or os.path.isdir(asked):
        raise OptionsError(f"{asked / RUN_FILE} is missing; {other_checkpoint(others)}")
    raise OptionsError(f"no checkpoint in {folder}; give a run's folder or its checkpoint folder")


def find_run_in(out: Path, checkpoint_every: int) -> SavedRun | None:
    """Return the checkpoint from which ``--resume auto`` resumes, None if the run starts at step 1.

    Raises:
        OptionsError: The checkpoint is damaged, or log or summary show that one has been lost.
    """
    found = any(os.path.isdir(out / name) for name in (CHECKPOINT, PREVIOUS))
    if found or _resumable(out / CHECKPOINT):
        return find_run(out)
    log, summary = out / LOG_FILE, out / SUMMARY_FILE
    last = last_step(log)
    # A checkpoint is complete when the write of the next one begins, and before the summary. If
    # torchrun restarts the ranks after a failure, the first start found the folder free.
    had_one = 0 < 2 * checkpoint_every < last or os.path.exists(summary)
    if had_one and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        reason = f"{log} has {last} steps" if last else f"{summary} exists"
        raise OptionsError(
            f"resume={AUTO} finds no checkpoint in {out}, but {reason}, so one was saved; put it "
            "back, or give another folder"
        )
    return None


def _read_run_file(path: Path) -> Mapping[str, Any]:
    """Return the fields of a checkpoint's `RUN_FILE` after checking its checksum and their types.

    A checkpoint without checksums is refused later, when it is loaded.
    """
    remedy = f"the checkpoint is damaged; {other_checkpoint(_resumable(path.parent))}"
    reading = path
    try:
        found = json.loads(path.read_text())
        reading = path.parent / CHECKSUMS_FILE
        fault = checksum_fault(path) if os.path.isfile(reading) else None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise OptionsError(f"{reading} cannot be read: {error}; {remedy}") from error
    if fault is not None:
        raise OptionsError(f"{fault}; {remedy}")
    run = found if isinstance(found, dict) else {}
    dims = run["dims"] if isinstance(run.get("dims"), dict) else {}
    wrong = [name for name, kind in _TYPES.items() if not isinstance(run.get(name), kind)]
    wrong += [f"dims.{field.name}" for field in fields(ParallelDims) if field.name not in dims]
    if wrong:
        raise OptionsError(f"{path} lacks a valid {', '.join(wrong)}; {remedy}")
    return run


def step_of(folder: Path) -> int | None:
    """Return the step of a checkpoint, None if it does not exist or is damaged."""
    try:
        return int(json.loads((folder / RUN_FILE).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def other_checkpoints(folder: Path) -> list[Path]:
    """Return the other checkpoints in the run's folder of a checkpoint, the latest first."""
    run = Path(os.path.abspath(folder)).parent
    names = [name.rpartition("-") for name in (os.listdir(run) if os.path.isdir(run) else ())]
    steps = [int(step) for stem, _, step in names if stem == CHECKPOINT and step.isdecimal()]
    all_names = [CHECKPOINT, PREVIOUS, *(f"{CHECKPOINT}-{n}" for n in sorted(steps, reverse=True))]
    found = [folder.parent / name for name in all_names]
    return [each for each in found if os.path.isdir(each) and not same_path(each, folder)]


def _resumable(folder: Path) -> list[Path]:
    return [path for path in other_checkpoints(folder) if os.path.isfile(path / RUN_FILE)]


def other_checkpoint(intact: Sequence[Path]) -> str:
    """Return the end of a message about a damaged checkpoint: which ``intact`` ones can be used."""
    if not intact:
        return "there is no other intact checkpoint in the folder"
    return f"resume from another one in a new folder: --resume {_or(intact)} --out NEW"


def _or(paths: Sequence[Path]) -> str:
    return " or ".join(map(str, paths))


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


def check_no_run(out: Path, resume: Path | None) -> None:
    """Raise `OptionsError` if a new run would write to a folder that has one already."""
    kept, log = _resumable(out / CHECKPOINT), out / LOG_FILE
    logged = os.path.exists(log) and os.path.getsize(log) > 0
    if not (kept or logged or os.path.exists(out / CHECKPOINT)):
        return
    if resume is not None and any(same_path(resume, path) for path in kept):
        way = (
            f", or go back to this checkpoint: move the later ones away, rename {resume} to "
            f"{out / CHECKPOINT}, and give --resume {AUTO} --out {out}"
        )
    elif os.path.isfile(out / CHECKPOINT / RUN_FILE):
        way = f", or resume from its latest checkpoint: --resume {AUTO} --out {out}"
    else:
        way = f" with --resume {_or(kept)}" if kept else ""
    raise OptionsError(f"out={out} has a run already; give another folder{way}")


def check_no_later_checkpoint(saved: SavedRun) -> None:
    """Raise `OptionsError` if the folder of a resumed run has checkpoints of later steps.

    The latest steps are kept, so the new checkpoints would be removed.
    """
    names = ((path, path.name.rpartition("-")[2]) for path in other_checkpoints(saved.folder))
    later = [path for path, step in names if step.isdecimal() and int(step) > saved.step]
    if later:
        raise OptionsError(
            f"{saved.folder} is of step {saved.step}, but its folder has checkpoints of later "
            f"steps; move them away, or resume from one of them: --resume {_or(later)}"
        )


def log_records(log: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the complete lines of a log and the step records in them; nothing without a log."""
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


def last_step(log: Path) -> int:
    """Return the last step in a log, 0 if there is none."""
    return max((record["step"] for _, record in log_records(log)), default=0)


def has_summary(out: Path, steps: int) -> bool:
    """Return whether a folder has the summary of this many steps, the last file of a run."""
    try:
        return bool(json.loads((out / SUMMARY_FILE).read_text())["steps"] == steps)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def has_weights(folder: Path) -> bool:
    """Return whether a folder has files of weights, or an index of such files."""
    patterns = ("*.safetensors", "*.safetensors.index.json")
    return any(path for pattern in patterns for path in folder.glob(pattern))


def same_path(one: Path, other: Path) -> bool:
    """Return whether two paths are the same file or folder."""
    return os.path.realpath(one) == os.path.realpath(other)
