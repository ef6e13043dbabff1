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

# One entry for each tensor: ranks of a pipeline have different ones.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class WriteError(OSError):
    """A checkpoint, or the log, was not written."""


class Checkpoints:
    """The latest checkpoint of a run, in ``folder``, written while the run goes on.

    The folder takes its name when it is complete, so that what bears the name can be read whole:
    a write that is cut off leaves the one before. The ``keep - 1`` before the latest stay, as
    ``checkpoint-<step>``. Every rank makes the same calls. Making one makes a process group, for
    what is exchanged while a step exchanges something else.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], keep: int = 1) -> None:
        self._folder = folder
        self._partial = folder.with_name(folder.name + ".partial")
        self._previous = folder.with_name(PREVIOUS)
        self._identity = identity
        self._keep = keep
        self._fields: dict[str, Any] = {}
        self._writing: Future[Any] | None = None
        self._failure: str | None = None  # known to the first rank alone until `finish`
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def start(self, trainer: Trainer) -> None:
        """Copy parameters, AdamW's state, step and samples consumed, and begin to write them.

        Waits for the write before this one. A process without others writes at once.

        Raises:
            WriteError: A checkpoint was not written, this one or the one before.
        """
        self.finish()
        self._fields = {**self._identity, "step": trainer.step, "samples": trainer.samples}
        self._on_first(self._make_partial)
        self._raise_alike()
        state = _state(trainer)
        if self._group is None:
            with _alone_in_silence(), self._said():
                dcp_save(state, checkpoint_id=self._partial, no_dist=True)
            self._writing = Future()
            self._writing.set_result(None)
        else:
            group, folder = self._group, self._partial
            found = async_save(state, checkpoint_id=folder, process_group=group)
            self._writing = cast("Future[Any]", found)

    def poll(self) -> bool:
        """Give the folder its name if what is under way has been written.

        Returns whether it could not be written, for which `finish` raises, on all ranks that call
        it: the ranks must agree on when they do.
        """
        if self._writing is not None and self._writing.done():
            if self._writing.exception() is not None:
                return True
            self._writing = None
            self._on_first(self._take_name)
        return self._failure is not None

    def finish(self) -> None:
        """Wait until what is under way has been written on all ranks, and named.

        Raises:
            WriteError: It was not written.
        """
        self._wait_for_all()
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._said():
                writing.result()  # the first rank's comes when all have written
            self._on_first(self._take_name)
        self._raise_alike()

    def _wait_for_all(self) -> None:
        """Wait until all ranks have written, however long that takes.

        The ranks exchange all the time whether they have, so that one which stops is noticed
        within the timeout of the world's group. The exchange of the write has a longer timeout.
        """
        done = self._group is None
        while not done:
            own = torch.tensor(self._writing is None or self._writing.done(), dtype=torch.int32)
            dist.all_reduce(own, dist.ReduceOp.MIN)
            done = bool(own)
            time.sleep(0 if done else POLL_SECONDS)

    def fail(self, message: str) -> None:
        """Let the next `finish` raise on all ranks what this rank, the first, has failed at."""
        self._failure = self._failure or message

    def _on_first(self, act: Callable[[], None]) -> None:
        """Do on the first rank what it does alone; keep a failure for `_raise_alike`."""
        if _first():
            try:
                with self._said():
                    act()
            except WriteError as error:
                self._failure = str(error)

    def _raise_alike(self) -> None:
        """Wait for all ranks; raise on all of them what the first one alone failed at."""
        found = [self._failure]
        if dist.is_initialized():
            dist.broadcast_object_list(found)
        self._failure = None
        if found[0] is not None:
            raise WriteError(found[0])

    def _make_partial(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir()  # in the folder of the run, which nobody may have removed

    def _take_name(self) -> None:
        _write(self._partial / RUN_FILE, json.dumps(self._fields, indent=1))
        paths = [self._partial / name for name in (RUN_FILE, METADATA_FILE)]
        checksums = {path.name: zlib.crc32(path.read_bytes()) for path in paths}
        _write(self._partial / CHECKSUMS_FILE, json.dumps(checksums))
        if (damage := _damage(self._partial)) is not None:
            raise OSError(_rank_of(damage) + damage)
        _sync_folder(self._partial)
        if step_of(self._folder) is None:  # not there, or damaged: the one before may be whole
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            shutil.rmtree(self._previous, ignore_errors=True)
            os.replace(self._folder, self._previous)
        os.replace(self._partial, self._folder)
        _sync_folder(self._folder.parent)  # before the one before is removed
        self._retire()

    def tidy(self, latest: Path | None) -> None:
        """Finish what a killed run left undone, if ``latest`` is the folder of the checkpoints."""
        if _first() and latest is not None and same_path(latest, self._folder):
            shutil.rmtree(self._partial, ignore_errors=True)
            self._on_first(self._retire)

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        """Say in one line what torch says in a traceback of each rank; leave no part behind."""
        try:
            yield
        except (CheckpointException, OSError) as error:
            of_all = isinstance(error, CheckpointException)
            failures = error.failures.items() if isinstance(error, CheckpointException) else ()
            reasons = "; ".join(f"rank {rank}: {each[0]}" for rank, each in failures) or str(error)
            # A full disk has many names; this is looked at before the first rank makes room.
            free = free_mebibytes(self._folder)
            if of_all:
                _barrier()
            if _first():
                shutil.rmtree(self._partial, ignore_errors=True)
            before = f"{self._folder}, the one before it, stays"
            of_step = f" of step {self._fields['step']}" if self._fields else ""
            raise WriteError(
                f"the checkpoint{of_step} was not written to {self._partial} "
                f"({' '.join(reasons.split())}), where {free:,} MiB are free; "
                + (before if self._folder.exists() else "there is none before it")
            ) from None

    def _retire(self) -> None:
        """Name the one before the latest after its step, and remove the oldest that is too many."""
        step = step_of(self._previous)
        if self._keep > 1 and step is not None:
            kept = self._folder.with_name(f"{self._folder.name}-{step}")
            if (kept / METADATA_FILE).exists():  # it may be damaged
                shutil.rmtree(kept, ignore_errors=True)
            if not kept.exists():  # else it is a folder of the user, which must stay
                os.replace(self._previous, kept)
        shutil.rmtree(self._previous, ignore_errors=True)
        if self._keep > 1:
            names = self._folder.parent.glob(f"{self._folder.name}-*")
            found = [(path.name.rpartition("-")[2], path) for path in names]
            # A folder of the user with such a name stays.
            steps = {int(word): path for word, path in found if word == str(step_of(path))}
            for older in sorted(steps, reverse=True)[self._keep - 1 :]:
                shutil.rmtree(steps[older], ignore_errors=True)


class CheckpointError(ValueError):
    """A checkpoint cannot be read."""


def load(trainer: Trainer, folder: Path) -> None:
    """Fill ``trainer`` in place with what `Checkpoints` wrote under the same degrees.

    Raises `CheckpointError`, on all ranks alike, which names a damaged file and the checkpoints
    beside this one that are whole.
    """
    found: list[str | None] = [_damage(folder)]
    if dist.is_initialized():
        found *= dist.get_world_size()
        dist.all_gather_object(found, found[0])
    _raise_damage(folder, found)
    state = _state(trainer)
    settings = [{**group, "params": ()} for group in trainer.optimizer.param_groups]
    try:
        with _alone_in_silence():
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
        group.update({**own, "params": group["params"]})  # this run's, not the saved one's
    fields = json.loads((folder / RUN_FILE).read_text())
    trainer.step, trainer.samples = int(fields["step"]), int(fields["samples"])


class _Reader(ChecksumReader):
    """Reads one file after another, so that what raises is known to be of that file."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except ChecksumError as error:
                raise CheckpointError(str(error).rpartition(";")[0]) from None
            except Exception as error:  # noqa: BLE001 - what torch's reader raises of any bytes
                raise CheckpointError(_unreadable(Path(self.path) / name, error)) from None
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done


def _damage(folder: Path) -> str | None:
    """Return which file is missing, shorter than it was, or damaged; read the small files only.

    `ChecksumReader` checks the tensors when they are read.
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
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise whatever it likes
        return _unreadable(path, error)
    return None


def _rank_of(damage: str) -> str:
    """Return whose file `_damage` names, as the start of a sentence."""
    found = re.search(r"__(\d+)_\d+\.distcp ", damage)
    return f"rank {found[1]}: " if found else ""


def _unreadable(path: Path, error: BaseException) -> str:
    missing = isinstance(error, FileNotFoundError)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(": ")
    return f"{path} is " + ("missing" if missing else f"damaged and cannot be read ({reason})")


def _raise_damage(folder: Path, found: Iterable[str | None]) -> None:
    """Raise unless nothing was found, with the checkpoints beside this one that are whole."""
    reasons = list(dict.fromkeys(reason for reason in found if reason is not None))
    if not reasons:
        return
    whole = [path for path in other_checkpoints(folder) if _damage(path) is None]
    raise CheckpointError(f"{'; '.join(reasons)}; {other_checkpoint(whole)}")


def free_mebibytes(path: Path) -> int:
    """Return how much is free where a path is, or would be if its folders were there."""
    found = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(found).free // 2**20


def _write(path: Path, text: str) -> None:
    """Write a file to the disk, as torch does with the tensors, before the folder is renamed."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Let the names in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _state(trainer: Trainer) -> dict[str, Any]:
    """Return the model's tensors and AdamW's, by name; zeros where it has none yet."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer, options=_BY_NAME)
    return {"model": model, "optimizer": optimizer}


@contextlib.contextmanager
def _alone_in_silence() -> Iterator[None]:
    """Drop torch's warning that there is one process: that is what the reference run is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
