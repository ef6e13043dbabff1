"""Start one process per rank on this machine; end all of them if one fails or on a signal."""

import contextlib
import faulthandler
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

RENDEZVOUS = "TRAIN_RENDEZVOUS"  # the folder that the ranks of one local run share
USAGE_STATUS = 2  # of a run that was refused, by this process or by all ranks
POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0  # how long the other ranks may take to end after the first failure
SAVE_SECONDS = 120.0  # how long the ranks may take to save and end after SIGTERM
SHOW_CURSOR = "\x1b[?25h"
STOPPED_STATUS = 128 + signal.SIGTERM  # of a rank that has saved and ended
_NO_FAILURE = (None, 0, STOPPED_STATUS)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended: its exit status, what it wrote to standard error, and when it failed.

    ``time`` is 0 if the rank could not report it with `note_failure`.
    """

    rank: int
    status: int
    errors: str
    time: float

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


def launch(program: Program, world_size: int) -> int:
    """Run ``program`` once per rank and return the exit status of the run.

    The ranks find each other through a file store and get ``RANK``, ``LOCAL_RANK`` and
    ``WORLD_SIZE``. They also end if this process ends (`watch_parent`).

    - Standard error of the ranks is shown if one fails, in the order of their failures.
      Equal messages, and the message of ranks that all refuse to run, are shown once.
    - SIGTERM to this process or to a rank lets all ranks save and end. The status is then that of
      the signal. SIGTERM again changes nothing.
    - SIGINT and SIGHUP end all ranks immediately.

    Args:
        program: A command, or a function that is called in a fork of this process. A fork need not
            import again what this process has imported; the process must have no thread and no GPU.
        world_size: Number of ranks.
    """
    with tempfile.TemporaryDirectory(prefix="train-") as name, _signals_raise():
        folder = Path(name)
        processes: list[BaseProcess] = []
        pipe = os.pipe()
        try:
            with _signals_blocked() as mask:  # a new fork still has the handlers of this process
                for rank in range(world_size):
                    arguments = (program, _environment(rank, world_size, folder), pipe, mask)
                    context = multiprocessing.get_context("fork")
                    processes.append(context.Process(target=_run, args=arguments))
                    processes[-1].start()
            while None in _statuses(processes) and {*_statuses(processes)} <= {*_NO_FAILURE}:
                time.sleep(POLL_SECONDS)
            _wait(processes, SETTLE_SECONDS)
            failures = _failures(processes, folder)
        except Interrupted as interruption:
            print(f"{interruption}: ending {world_size} ranks", file=sys.stderr, flush=True)
            status = 128 + interruption.number
            if interruption.number == signal.SIGTERM:
                failures, late = _terminate(processes, folder)
                _explain(failures)
                if late:
                    ranks = ", ".join(map(str, late))
                    print(f"killed before they had saved: ranks {ranks}", file=sys.stderr)
                    status = 1
            return status
        finally:
            _end(processes)
            if sys.stdout.isatty():
                print(SHOW_CURSOR, end="", flush=True)  # rich hides it while a live line is shown
            for end in pipe:
                os.close(end)
        if failures and all(failure.status == USAGE_STATUS for failure in failures):
            sys.stderr.write(failures[0].errors)
            return USAGE_STATUS
        if failures:
            _explain(failures)
            return 1
        sys.stderr.write(_errors_of(folder, 0).read_text(errors="replace"))
        return STOPPED_STATUS if STOPPED_STATUS in _statuses(processes) else 0


def watch_parent() -> None:
    """End this rank at once when the process that launched it is gone.

    The launcher holds the other end of the ranks' standard input and never writes to it. If it was
    killed, it could not remove the folder that the ranks share.
    """

    def wait_for_end() -> None:
        while os.read(0, 1):
            pass
        shutil.rmtree(os.environ[RENDEZVOUS], ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait_for_end, name="watch-parent", daemon=True).start()


def note_failure(rank: int) -> None:
    """Report to the launcher that this rank has failed, before the other ranks notice its end."""
    _failure_time(Path(os.environ[RENDEZVOUS]), rank).write_text(repr(time.monotonic()))


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


def _run(
    program: Program,
    environment: dict[str, str],
    pipe: tuple[int, int],
    mask: set[signal.Signals],
) -> None:
    """Run the program of a rank in its own session, so that Ctrl-C reaches the launcher only."""
    os.setsid()
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    reading, writing = pipe
    os.dup2(reading, 0)
    os.close(writing)
    errors = _errors_of(Path(environment[RENDEZVOUS]), int(environment["RANK"]))
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    os.environ.update(environment)
    if not callable(program):
        os.execvp(program[0], list(program))
    faulthandler.enable()
    status = program()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


def _statuses(processes: list[BaseProcess]) -> list[int | None]:
    """Return the exit statuses: minus the signal for a killed rank, None while it runs."""
    return [process.exitcode for process in processes]


def _wait(processes: list[BaseProcess], seconds: float) -> None:
    """Wait until all ranks have ended, at most for some seconds."""
    deadline = time.monotonic() + seconds
    while None in _statuses(processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _terminate(processes: list[BaseProcess], folder: Path) -> tuple[list[Failure], list[int]]:
    """Let the ranks save and end, unless SIGINT or SIGHUP interrupts this.

    Returns:
        The failures, and the ranks that have not ended in time.
    """
    with contextlib.suppress(Interrupted):
        for process in processes:
            process.terminate()
        _wait(processes, SAVE_SECONDS)
    failures = [each for each in _failures(processes, folder) if each.status != -signal.SIGTERM]
    return failures, [rank for rank, status in enumerate(_statuses(processes)) if status is None]


def _failures(processes: list[BaseProcess], folder: Path) -> list[Failure]:
    """Return the failed ranks, the cause first.

    A killed rank reports no time: the failures of other ranks are consequences. Of the ranks that
    have lost another one, only the first prints a message.
    """
    found = []
    for rank, status in enumerate(_statuses(processes)):
        if status is not None and status not in _NO_FAILURE:
            noted, errors = _failure_time(folder, rank), _errors_of(folder, rank)
            at = float(noted.read_text()) if noted.exists() else 0.0
            found.append(Failure(rank, status, errors.read_text(errors="replace"), at))
    return sorted(found, key=lambda each: (each.status == 1 and not each.errors, each.time))


def _explain(failures: list[Failure]) -> None:
    if len(failures) > 1 and failures[0].errors:
        first = failures[0]
        if {(each.status, each.errors) for each in failures} == {(first.status, first.errors)}:
            ranks = f"{len(failures)} ranks failed with the same message"
            sys.stderr.write(f"{ranks} and exit status {first.status}\n{first.errors}")
            sys.stderr.flush()
            return
    for failure in failures[:1]:
        sys.stderr.write(f"{failure}\n{failure.errors}")
    for failure in failures[1:]:
        lines = failure.errors.strip().splitlines()
        if lines or failure.status != 1:  # else it lost another rank, as the first message explains
            sys.stderr.write(f"then {failure}" + (f": {lines[-1]}\n" if lines else "\n"))
    sys.stderr.flush()


def _end(processes: list[BaseProcess]) -> None:
    """Kill the ranks that still run. Signals are ignored meanwhile."""
    previous = [signal.signal(number, signal.SIG_IGN) for number in _SIGNALS]
    for process in processes:
        process.kill()
    _wait(processes, math.inf)
    for number, handler in zip(_SIGNALS, previous, strict=True):
        signal.signal(number, handler)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:  # a second one must not interrupt the write of a checkpoint
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Interrupted(number)

    # Signals that the caller ignores stay ignored: nohup ignores SIGHUP.
    heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = [signal.signal(number, handle) for number in heard]
    try:
        yield
    finally:
        for number, handler in zip(heard, previous, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[set[signal.Signals]]:
    """Block signals; yield the mask from before."""
    before = {signal.Signals(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)}
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _failure_time(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}"


def _errors_of(folder: Path, rank: int) -> Path:
    return folder / f"stderr-{rank}"
