"""One message if a rank does not answer: its number, and where the others waited."""

import re
import traceback
from datetime import timedelta
from threading import Thread
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from hp_mesh import ParallelMesh

from .loop import Trainer
from .pipeline import Pipeline

T = TypeVar("T")
# hp_fsdp first asks the ranks for up to 10 s what they did.
REPORT_SECONDS = 12.0
_TIMED_OUT = re.compile(r"tim(ed|e) ?out", re.IGNORECASE)
_CLOSED = re.compile(r"(closed|reset) by peer|broken pipe|pair closure", re.IGNORECASE)
_PHASES = {"update": "in the update", "evaluate": "in the evaluation"}


class Peers:
    """The ranks of a run, and the store over which they report that one is lost."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._rank, self._size = 0, 1

    def join(self, store: Store, rank: int, size: int) -> None:
        """Use ``store`` for reports: it must be empty and shared by the ranks of this attempt."""
        self._store, self._rank, self._size = store, rank, size

    def explain(self, error: BaseException) -> str | None:
        """Return the message of a run that has lost a rank.

        The first rank that reports returns it; it waits for the reports of other ranks, so that it
        can name the ranks that do not report.

        Returns:
            None if ``error`` is not about a lost rank; an empty string if another rank reports it.
        """
        timed_out = _TIMED_OUT.search(str(error)) is not None
        if not isinstance(error, RuntimeError) or not (timed_out or _CLOSED.search(str(error))):
            return None
        own = f"rank {self._rank} waited {_where(error)}: {_reason(error)}"
        if (store := self._store) is None:
            return own
        # If the process of the store is stopped, requests wait without a timeout.
        answers: list[str] = []
        asking = Thread(
            target=lambda: answers.append(self._ask(store, own, timed_out)), daemon=True
        )
        asking.start()
        asking.join(2 * REPORT_SECONDS)
        return answers[0] if answers else own

    def _ask(self, store: Store, own: str, timed_out: bool) -> str:
        """Exchange reports through the store; return this rank's message, empty if it has none."""
        keys = {rank: f"lost/rank/{rank}" for rank in range(self._size)}
        longest = timedelta(seconds=REPORT_SECONDS)
        try:
            store.set(keys[self._rank], own)
            first = store.add("lost/count", 1) == 1
            _wait(store, [*keys.values()] if first else ["lost/reported"], longest * timed_out)
            absent = [rank for rank, key in keys.items() if not store.check([key])]
            reports = [store.get(key).decode() for r, key in keys.items() if r not in absent]
            store.set("lost/reported", "")
        except RuntimeError:  # the store is gone, with the rank or the agent that held it
            return own
        if not first:
            return ""
        if not timed_out:
            return own
        if not absent:
            return f"{'; '.join(reports)}; all ranks waited: a link is down or the order differs"
        ranks = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
        return f"{ranks} did not answer, stopped or cut off; {own}"


def is_rank_0() -> bool:
    """Return whether this is rank 0 or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_rank_0(value: T) -> T:
    """Return the value of rank 0 on all ranks."""
    found = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def from_all_ranks(value: T) -> list[T]:
    """Return the values of all ranks."""
    found = [value]
    if dist.is_initialized():
        found *= dist.get_world_size()
        dist.all_gather_object(found, value)
    return found


def set_timeout(mesh: ParallelMesh, seconds: float) -> None:
    """Set the timeout of the world's group and of the groups of a mesh from now on.

    ``_set_pg_timeout`` (torch 2.11 to 2.13) has no public name.
    """
    groups = {dist.group.WORLD}
    for name in mesh.names:
        if (found := mesh.get_optional_mesh(name)) is not None:
            groups.add(found.get_group())
    for group in groups:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def _wait(store: Store, keys: list[str], longest: timedelta) -> None:
    """Wait for keys, at most for some time."""
    if not longest:
        return
    try:
        store.wait(keys, longest)
    except RuntimeError as error:
        if _TIMED_OUT.search(str(error)) is None:
            raise


def _where(error: BaseException) -> str:
    """Return the collective, the step and the module in which an error was raised.

    They are taken from the frames of the traceback, since naming modules while they run would take
    time in each step. Backward has no frames of modules.
    """
    place = "before the first step"
    modules: list[nn.Module] = []
    stages = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner, trainer = frame.f_locals.get("self"), frame.f_locals.get("trainer")
        if isinstance(owner, Trainer):
            phase = _PHASES.get(frame.f_code.co_name)
            place = f"{place}, {phase}" if phase else f"in step {owner.step + 1}"
        elif isinstance(owner, Pipeline):
            ranks = ", ".join(map(str, owner.axis.ranks))
            stages = f"in send or receive over axis {owner.axis.name!r} (ranks {ranks})"
        elif isinstance(trainer, Trainer):
            place = f"after step {trainer.step}"
        elif isinstance(owner, nn.Module):
            modules.append(owner)
    if modules:
        names = (name for name, each in modules[0].named_modules() if each is modules[-1])
        place += f", in {next(names, '') or 'the model'}"
    calls = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
    return ", ".join([*(dict.fromkeys(calls) or [stages] * bool(stages)), place])


def _reason(error: BaseException) -> str:
    """Return the first sentence of gloo's message, without its source file."""
    text = re.sub(r"^\[[^]]*\]\s*", "", " ".join(str(error).split()))
    return text.partition(" This is typically")[0][:200].rstrip(".")
