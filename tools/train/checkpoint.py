"""Save and load a run with torch's distributed checkpoint."""

import contextlib
import json
import os
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.futures import Future as TorchFuture

from hp_dtensor.checkpoint import ChecksumError, ChecksumReader

from .loop import Trainer
from .peers import from_all_ranks, from_rank_0, is_rank_0
from .run_folder import (
    CHECKSUMS_FILE,
    PREVIOUS,
    RUN_FILE,
    checksum_fault,
    other_checkpoint,
    other_checkpoints,
    same_path,
    step_of,
)

POLL_SECONDS = 0.02
METADATA_FILE = ".metadata"  # of torch's checkpoints

# One entry per tensor, since ranks of a pipeline have different tensors.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class WriteError(OSError):
    """A checkpoint, or the log, was not written."""


class Checkpoints:
    """Writes the checkpoints of a run in the background and keeps the latest ones.

    A checkpoint gets its name when all its files are complete. If a write fails, the earlier
    checkpoint remains. Every rank makes the same calls, from the constructor on: it creates a
    process group, since a checkpoint communicates at the same time as a step.

    Args:
        folder: Path of the latest checkpoint. Earlier ones get ``-<step>`` after its name.
        run_fields: Content of `RUN_FILE`, to which step and samples are added.
        keep: Number of checkpoints to keep.
    """

    def __init__(self, folder: Path, run_fields: Mapping[str, Any], keep: int = 1) -> None:
        self._folder = folder
        self._partial = folder.with_name(folder.name + ".partial")
        self._previous = folder.with_name(PREVIOUS)
        self._run_fields = run_fields
        self._keep = keep
        self._fields: dict[str, Any] = {}
        self._writing: Future[Any] | None = None
        self._failure: str | None = None  # known to rank 0 only until `finish`
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def start(self, trainer: Trainer) -> None:
        """Copy parameters, optimizer state, step and samples, and start to write them.

        Waits for the previous write. A single process writes before it returns.

        Raises:
            WriteError: This checkpoint or the previous one was not written.
        """
        self.finish()
        self._fields = {**self._run_fields, "step": trainer.step, "samples": trainer.samples}
        self._on_rank_0(self._make_partial)
        self._raise_failure()
        state = _state(trainer)
        if self._group is None:
            with _without_warning(), self._as_one_message():
                dcp_save(state, checkpoint_id=self._partial, no_dist=True)
            self._writing = Future()
            self._writing.set_result(None)
        else:
            group, folder = self._group, self._partial
            found = async_save(state, checkpoint_id=folder, process_group=group)
            self._writing = cast("Future[Any]", found)

    def poll(self) -> bool:
        """Name the checkpoint if its write has ended.

        Returns:
            Whether the write failed on this rank. If so, all ranks must call `finish` after the
            same step; it raises.
        """
        if self._writing is not None and self._writing.done():
            if self._writing.exception() is not None:
                return True
            self._writing = None
            self._on_rank_0(self._take_name)
        return self._failure is not None

    def finish(self) -> None:
        """Wait until all ranks have written the checkpoint, and name it.

        Raises:
            WriteError: It was not written.
        """
        self._wait_for_all()
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._as_one_message():
                writing.result()  # on rank 0, when all ranks have written
            self._on_rank_0(self._take_name)
        self._raise_failure()

    def _wait_for_all(self) -> None:
        """Wait until all ranks have written, however long that takes.

        The ranks exchange their states all the time, so a stopped rank is noticed within the
        timeout of the world's group. The group of the write has a longer timeout.
        """
        done = self._group is None
        while not done:
            own = torch.tensor(self._writing is None or self._writing.done(), dtype=torch.int32)
            dist.all_reduce(own, dist.ReduceOp.MIN)
            done = bool(own)
            time.sleep(0 if done else POLL_SECONDS)

    def fail(self, message: str) -> None:
        """On rank 0: let the next `finish` raise `WriteError` on all ranks."""
        self._failure = self._failure or message

    def _on_rank_0(self, function: Callable[[], None]) -> None:
        """Call a function on rank 0 and keep its error for `_raise_failure`."""
        if is_rank_0():
            try:
                with self._as_one_message():
                    function()
            except WriteError as error:
                self._failure = str(error)

    def _raise_failure(self) -> None:
        """Raise the error of rank 0 on all ranks."""
        found, self._failure = from_rank_0(self._failure), None
        if found is not None:
            raise WriteError(found)

    def _make_partial(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir()  # an error if the folder of the run has been removed

    def _take_name(self) -> None:
        _write(self._partial / RUN_FILE, json.dumps(self._fields, indent=1))
        paths = [self._partial / name for name in (RUN_FILE, METADATA_FILE)]
        checksums = {path.name: zlib.crc32(path.read_bytes()) for path in paths}
        _write(self._partial / CHECKSUMS_FILE, json.dumps(checksums))
        if (damage := _damage(self._partial)) is not None:
            rank = re.search(r"__(\d+)_\d+\.distcp ", damage)
            raise OSError((f"rank {rank[1]}: " if rank else "") + damage)
        _sync_folder(self._partial)
        if step_of(self._folder) is None:  # missing or damaged: the previous one may be intact
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            shutil.rmtree(self._previous, ignore_errors=True)
            os.replace(self._folder, self._previous)
        os.replace(self._partial, self._folder)
        _sync_folder(self._folder.parent)  # before the previous one is removed
        self._retire()

    def tidy(self, latest: Path | None) -> None:
        """Finish what a killed run has left undone, if ``latest`` is the folder of checkpoints."""
        if is_rank_0() and latest is not None and same_path(latest, self._folder):
            shutil.rmtree(self._partial, ignore_errors=True)
            self._on_rank_0(self._retire)

    @contextlib.contextmanager
    def _as_one_message(self) -> Iterator[None]:
        """Raise torch's errors, a traceback of each rank, as one line. Remove the partial files."""
        try:
            yield
        except (CheckpointException, OSError) as error:
            on_all = isinstance(error, CheckpointException)
            failures = error.failures.items() if isinstance(error, CheckpointException) else ()
            reasons = "; ".join(f"rank {rank}: {each[0]}" for rank, each in failures) or str(error)
            free = free_mebibytes(self._folder)  # a full disk: before the partial files go
            of_step = f" of step {self._fields['step']}" if self._fields else ""
            message = (
                f"the checkpoint{of_step} was not written to {self._partial} "
                f"({' '.join(reasons.split())}), where {free:,} MiB are free; "
                + (f"{self._folder} is the previous one" if self._folder.exists() else "")
                + ("" if self._folder.exists() else "there is no previous one")
            )
            message = from_rank_0(message) if on_all else message
            if is_rank_0():
                shutil.rmtree(self._partial, ignore_errors=True)
            raise WriteError(message) from None

    def _retire(self) -> None:
        """Name the previous checkpoint after its step, and remove the oldest if too many."""
        step = step_of(self._previous)
        if self._keep > 1 and step is not None:
            kept = self._folder.with_name(f"{self._folder.name}-{step}")
            if (kept / METADATA_FILE).exists():  # it may be damaged
                shutil.rmtree(kept, ignore_errors=True)
            if not kept.exists():  # else it is a folder of the user
                os.replace(self._previous, kept)
        shutil.rmtree(self._previous, ignore_errors=True)
        if self._keep > 1:
            names = self._folder.parent.glob(f"{self._folder.name}-*")
            found = [(path.name.rpartition("-")[2], path) for path in names]
            # Folders of the user with such names are not removed.
            steps = {int(text): path for text, path in found if text == str(step_of(path))}
            for older in sorted(steps, reverse=True)[self._keep - 1 :]:
                shutil.rmtree(steps[older], ignore_errors=True)


class CheckpointError(ValueError):
    """A checkpoint cannot be read."""


def load(trainer: Trainer, folder: Path) -> None:
    """Load a checkpoint into ``trainer``, in place. It may have been written with other degrees.

    Raises:
        CheckpointError: A file is damaged. The message, equal on all ranks, has its name and the
            intact checkpoints in the same folder.
    """
    _raise_damage(folder, from_all_ranks(_damage(folder)))
    state = _state(trainer)
    settings = [{**group, "params": ()} for group in trainer.optimizer.param_groups]
    try:
        with _without_warning():
            dcp_load(state, storage_reader=_Reader(folder), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        causes = [each[0] for each in error.failures.values()]
        known = [str(each) for each in causes if isinstance(each, CheckpointError)]
        _raise_damage(folder, known or [_unreadable(folder, each) for each in causes])
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_BY_NAME,
    )
    for group, own in zip(trainer.optimizer.param_groups, settings, strict=True):
        group.update({**own, "params": group["params"]})  # learning rate etc. of this run
    fields = json.loads((folder / RUN_FILE).read_text())
    trainer.step, trainer.samples = int(fields["step"]), int(fields["samples"])


class _Reader(ChecksumReader):
    """Reads one file after another, so that an error can name the file."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except ChecksumError as error:
                raise CheckpointError(str(error).rpartition(";")[0]) from None
            except Exception as error:  # noqa: BLE001 - torch's reader may raise anything for damaged bytes
                raise CheckpointError(_unreadable(Path(self.path) / name, error)) from None
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done


def _damage(folder: Path) -> str | None:
    """Return which file is missing, shorter than it was, or damaged, None if all are intact.

    Reads the small files only. `ChecksumReader` checks the tensors when they are read.
    """
    path = folder / CHECKSUMS_FILE
    try:
        json.loads(path.read_text())
        for path in (folder / RUN_FILE, folder / METADATA_FILE):
            if (fault := checksum_fault(path)) is not None:
                return fault
        needed: dict[str, int] = {}
        for stored in FileSystemReader(folder).read_metadata().storage_data.values():
            end = stored.offset + stored.length
            needed[stored.relative_path] = max(end, needed.get(stored.relative_path, 0))
        for name, size in needed.items():
            path = folder / name
            if (found := path.stat().st_size) < size:
                return f"{path} is damaged: it has {found:,} bytes of {size:,}"
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        return _unreadable(path, error)
    return None


def _unreadable(path: Path, error: BaseException) -> str:
    missing = isinstance(error, FileNotFoundError)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(": ")
    return f"{path} is " + ("missing" if missing else f"damaged and cannot be read ({reason})")


def _raise_damage(folder: Path, found: Iterable[str | None]) -> None:
    """Raise if a damage was found, with the intact checkpoints in the same folder."""
    reasons = list(dict.fromkeys(reason for reason in found if reason is not None))
    if not reasons:
        return
    intact = [path for path in other_checkpoints(folder) if _damage(path) is None]
    raise CheckpointError(f"{'; '.join(reasons)}; {other_checkpoint(intact)}")


def free_mebibytes(path: Path) -> int:
    """Return the free space at a path, of which the last folders need not exist."""
    found = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(found).free // 2**20


def _write(path: Path, text: str) -> None:
    """Write a file and sync it to the disk, as torch does with the tensors."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk, so that they survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _state(trainer: Trainer) -> dict[str, Any]:
    """Return the tensors of model and optimizer by name, zeros if the optimizer has none yet."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer, options=_BY_NAME)
    return {"model": model, "optimizer": optimizer}


@contextlib.contextmanager
def _without_warning() -> Iterator[None]:
    """Hide torch's warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
