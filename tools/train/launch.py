"""Start one process per rank on this machine, and end them all when one fails or on a signal."""

import contextlib
import faulthandler
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

RENDEZVOUS = "TRAIN_RENDEZVOUS"  # the folder that the ranks of one local run share
USAGE_STATUS = 2  # of a run that was refused, by this process or by all ranks alike
POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0  # what the other ranks get to end after the first that failed
SAVE_SECONDS = 120.0  # what the ranks get to save and end after SIGTERM
SHOW_CURSOR = "\x1b[?25h"
STOPPED_STATUS = 128 + signal.SIGTERM  # of a rank that has saved and ended
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended: its exit status, and when it noted its exception (0 if it did not)."""

    rank: int
    status: int
    noted_at: float

    def __str__(self) -> str:
        if self.status < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.status).name}"
        return f"rank {self.rank} failed with exit status {self.status}"


class Interrupted(Exception):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


Program = Sequence[str] | Callable[[], int]
Pipe = tuple[int, int]  # the end that is read and the end that is written


def launch(program: Program, world_size: int) -> int:
    """Run ``program`` once per rank and return the exit status of the whole.

    A command is executed anew. A function is called in a fork of this process, which saves the
    ranks all that this process has imported; it must hold no thread and no GPU by then.
    The ranks find each other through a file store and get ``RANK``, ``LOCAL_RANK`` and
    ``WORLD_SIZE``. What they write to standard error is kept and shown when one fails, that of the
    rank that failed first before the others', once where they say the same, and alone where the
    ranks refuse to run, which they do together. SIGTERM is sent on and they get time to save and
    end, also if it comes again; SIGINT and SIGHUP end all of them at once. SIGTERM to one rank lets
    all of them save and end too; the status is then that of the signal. The ranks also end by
    themselves when this process is gone (`watch_parent`).
    """
    with tempfile.TemporaryDirectory(prefix="train-") as name, _signals_raise():
        folder = Path(name)
        processes: list[_Process] = []
        watched = os.pipe()
        try:
            with _signals_wait() as mask:  # no signal may find a fork with this process's handlers
                for rank in range(world_size):
                    start = _Start(
                        program=program,
                        environment=_environment(rank, world_size, folder),
                        errors=_stderr_path(folder, rank),
                        watched=watched,
                        mask=mask,
                    )
                    processes.append(_Process(start))
            failures = _wait(processes, folder)
        except Interrupted as interruption:
            print(f"{interruption}: ending {world_size} ranks", file=sys.stderr, flush=True)
            status = 128 + interruption.number
            if interruption.number == signal.SIGTERM:
                failures, late = _terminate(processes, folder)
                _explain(failures, folder)
                if late:
                    ranks = ", ".join(map(str, late))
                    print(f"killed before they had saved: ranks {ranks}", file=sys.stderr)
                    status = 1
            return status
        finally:
            _end(processes)
            if sys.stdout.isatty():
                print(SHOW_CURSOR, end="", flush=True)  # a live line that was cut off has hidden it
            for end in watched:
                os.close(end)
        if failures and all(failure.status == USAGE_STATUS for failure in failures):
            sys.stderr.write(_standard_error(folder, failures[0].rank))
            return USAGE_STATUS
        if failures:
            _explain(failures, folder)
            return 1
        sys.stderr.write(_standard_error(folder, 0))
        stopped = STOPPED_STATUS in [process.returncode for process in processes]
        return STOPPED_STATUS if stopped else 0


def watch_parent() -> None:
    """End this rank at once when the process that launched it is gone.

    The launcher holds the other end of the ranks' standard input and never writes to it. If it was
    killed it could not remove the folder that they share.
    """

    def wait_for_end() -> None:
        while os.read(0, 1):
            pass
        shutil.rmtree(os.environ[RENDEZVOUS], ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait_for_end, name="watch-parent", daemon=True).start()


def note_failure(rank: int) -> None:
    """Tell the launcher when this rank's own exception was raised; before its peers see it end."""
    _note(Path(os.environ[RENDEZVOUS]), rank).write_text(repr(time.monotonic()))


def _environment(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    return {
        RENDEZVOUS: str(folder),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }


class _Process:
    """One rank: a fork that runs its program in a session of its own.

    Ctrl-C so reaches the launcher only, which ends the ranks in order.
    """

    def __init__(self, start: "_Start") -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if not self._pid:
            _become(start)

    def poll(self) -> int | None:
        """Return the exit status, minus the signal for a killed rank, None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def send(self, number: signal.Signals) -> None:
        """Send a signal unless the rank has ended."""
        if self.poll() is None:
            os.kill(self._pid, number)

    def wait(self, deadline: float) -> None:
        """Wait until the rank has ended or the monotonic clock shows ``deadline``."""
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What a rank runs, its standard input and error, and the signals that it is to hear."""

    program: Program
    environment: dict[str, str]
    errors: Path
    watched: Pipe
    mask: set[signal.Signals]


def _become(start: _Start) -> NoReturn:
    """Be a rank, in the fork: whatever raises, never return into the launcher's code."""
    status = 1
    try:
        ended = _run(start)
        sys.stdout.flush()
        status = ended & 0xFF
    except BaseException:  # noqa: BLE001 - the launcher's cleanup is not the rank's
        traceback.print_exc()
    finally:
        try:
            sys.stderr.flush()
        finally:
            os._exit(status)


def _run(start: _Start) -> int:
    os.setsid()
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, start.mask)
    reading, writing = start.watched
    os.dup2(reading, 0)
    os.close(writing)
    os.dup2(os.open(start.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    os.environ.update(start.environment)
    if not callable(start.program):
        os.execvp(start.program[0], list(start.program))
    faulthandler.enable()
    try:
        return start.program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1


def _wait(processes: list[_Process], folder: Path) -> list[Failure]:
    """Return what failed, the cause first; empty when every rank ended well.

    A rank that saved and ended after SIGTERM is no failure: all ranks agreed to, and the others
    have as much time as they need.
    """
    while True:
        statuses = [process.poll() for process in processes]
        if any(status not in (None, 0, STOPPED_STATUS) for status in statuses):
            break
        if None not in statuses:
            return []
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline and None in [process.poll() for process in processes]:
        time.sleep(POLL_SECONDS)
    return _failures(processes, folder)


def _terminate(processes: list[_Process], folder: Path) -> tuple[list[Failure], list[int]]:
    """Let the ranks save and end, unless SIGINT or SIGHUP comes meanwhile.

    Returns:
        The failures, and the ranks that have not ended in time.
    """
    with contextlib.suppress(Interrupted):
        for process in processes:
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + SAVE_SECONDS
        for process in processes:
            process.wait(deadline)
    failures = [each for each in _failures(processes, folder) if each.status != -signal.SIGTERM]
    return failures, [rank for rank, process in enumerate(processes) if process.poll() is None]


def _failures(processes: list[_Process], folder: Path) -> list[Failure]:
    failures = [
        Failure(rank, process.returncode or 0, _noted_at(folder, rank))
        for rank, process in enumerate(processes)
        if process.returncode not in (None, 0, STOPPED_STATUS)
    ]
    # A rank that was killed could note nothing; what the others noted is its consequence.
    # Of ranks that lost another one, only the first says it.
    return sorted(
        failures,
        key=lambda each: (
            each.status == 1 and not _standard_error(folder, each.rank),
            each.noted_at,
        ),
    )


def _explain(failures: list[Failure], folder: Path) -> None:
    said = [(failure.status, _standard_error(folder, failure.rank)) for failure in failures]
    if len(said) > 1 and len({*said}) == 1 and said[0][1]:
        status, text = said[0]
        sys.stderr.write(f"{len(said)} ranks failed alike, with exit status {status}\n{text}")
        sys.stderr.flush()
        return
    for failure in failures[:1]:
        sys.stderr.write(f"{failure}\n{_standard_error(folder, failure.rank)}")
    for failure in failures[1:]:
        lines = _standard_error(folder, failure.rank).strip().splitlines()
        if not lines and failure.status == 1:
            continue  # this rank lost another one, about which the first message says all
        sys.stderr.write(f"then {failure}" + (f": {lines[-1]}\n" if lines else "\n"))
    sys.stderr.flush()


def _end(processes: list[_Process]) -> None:
    """Leave no process behind, whatever signals arrive meanwhile."""
    previous = [signal.signal(number, signal.SIG_IGN) for number in _SIGNALS]
    for process in processes:
        process.send(signal.SIGKILL)
    for process in processes:
        process.wait(math.inf)
    for number, handler in zip(_SIGNALS, previous, strict=True):
        signal.signal(number, handler)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:  # sent again, it must not cut off a checkpoint
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Interrupted(number)

    # What the caller ignores stays ignored: nohup ignores SIGHUP.
    heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = [signal.signal(number, handle) for number in heard]
    try:
        yield
    finally:
        for number, handler in zip(heard, previous, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_wait() -> Iterator[set[signal.Signals]]:
    """Let signals wait; give the mask that was set before."""
    before = {signal.Signals(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)}
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _noted_at(folder: Path, rank: int) -> float:
    path = _note(folder, rank)
    return float(path.read_text()) if path.exists() else 0.0


def _note(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}"


def _stderr_path(folder: Path, rank: int) -> Path:
    return folder / f"stderr-{rank}"


def _standard_error(folder: Path, rank: int) -> str:
    return _stderr_path(folder, rank).read_text(errors="replace")
