"""Trials of the trainer under faults. Prints one table and fails if anything but a message is bad.

``python tools/faults.py [--scale 0.1] [--only kill flip] [--jobs 2]``. A trial disturbs a small run
by the events of `fault_events`, or damages a copy of its checkpoint, lets the run go on, and
compares the losses of all steps with an undisturbed run bit for bit. Columns of the table:

- hangs: a run did not end in time;
- left: processes were left behind;
- wrong: losses differ from the undisturbed run without a message;
- lost: a run cannot go on, or goes on from an older checkpoint than the last complete one;
- broken: the trial failed itself, the trainer crashed, or its exit status is wrong;
- unclear: a message does not name the cause.
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import fault_events
import torch.distributed.run
from fault_events import MARKS, Event
from rank_pool import run_program
from train.config import ModelError
from train.options import parse
from train.run_folder import OptionsError
from train.text import TextError

from hp_mesh import ParallelDimsError

COLUMNS = ("hangs", "left", "wrong", "lost", "broken", "unclear")
PROGRAM, TORCHRUN = fault_events.__file__, torch.distributed.run.__file__
SECONDS = 240  # after which a run hangs; the timeouts of trials are some seconds
STEPS, EVERY = 6, 2
MODEL = {
    "model_type": "built-in",
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "intermediate_size": 16, "moe_intermediate_size": 8},
}
DEGREES = {
    "cp": ("--procs", "2", "--cp", "2"),
    "dp": ("--procs", "2", "--dp-shard", "2"),
    "pp": ("--procs", "2", "--pp", "2"),
}
SMALL = ("--batch-size", "4", "--seq-len", "16", "--checkpoint-every", str(EVERY), "--keep", "2")
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@dataclass
class Trial:
    """One trial: its folder, its random numbers, and what was bad in it."""

    shared: Path
    folder: Path
    rng: random.Random
    bad: dict[str, str] = field(default_factory=dict)
    not_run: str = ""

    @property
    def degrees(self) -> list[str]:
        """Return the names of degrees of which there is an undisturbed run."""
        return [name for name in DEGREES if (self.shared / name).exists()]

    def judge(self, column: str, is_bad: bool, detail: str) -> None:
        """Note in a column that something was bad."""
        if is_bad:
            self.bad.setdefault(column, detail)

    def run(self, words: Sequence[str], events: Sequence[Event] = (), path: str = "") -> "Run":
        """Run the trainer, or the program ``path``, and note if it hangs or leaves processes."""
        known = _descendants()
        (self.folder / "marks").mkdir(exist_ok=True)
        marks = {MARKS: str(self.folder / "marks")}
        inner = [*map(str, events), "--", *words]
        try:
            done = run_program(path or PROGRAM, words if path else inner, marks, SECONDS)
            found = Run(done.status, done.stdout, done.stderr)
        except TimeoutError as error:
            self.judge("hangs", True, f"{' '.join(inner)}: {str(error)[-500:]}")
            found = Run(None, "", "")
        deadline = time.monotonic() + 10
        while (left := _descendants() - known) and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.05)
        if events and found.status is not None:
            happened = any((self.folder / "marks").iterdir())
            self.judge("broken", not happened, f"no event happened: {inner}")
        self.judge("left", bool(left) and found.status is not None, f"{left} after {inner}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def words(self, name: str, *more: str, joins: bool = False) -> list[str]:
        """Return the words of a run that goes on in this trial's folder."""
        degrees: tuple[str, ...] = ("--reference",) if name == "one" else DEGREES[name]
        if joins:
            degrees = degrees[2:]  # the number of processes is the cluster's
        model, out = str(self.shared / "model.json"), str(self.folder / "out")
        steps = ("--steps", str(STEPS))
        return ["--model", model, "--out", out, "--resume", "auto", *steps, *SMALL, *degrees, *more]

    def goes_on(self, name: str, *more: str) -> None:
        """Let a run go on to its end and compare its losses with the undisturbed run's."""
        logged, saved = len(losses(self.folder / "out")), _saved(self.folder / "out")
        # A checkpoint is sure to be complete when the next one has begun.
        least = (logged - 1) // EVERY * EVERY - EVERY
        self.judge("lost", saved < least, f"step {saved} is saved of {logged}")
        done = self.run(self.words(name, *more))
        self.judge("lost", done.status not in (0, None), f"cannot go on: {done.stderr}")
        if done.status == 0:
            self.compare(name)

    def compare(self, name: str) -> None:
        """Compare all losses with the undisturbed run's."""
        found, expected = losses(self.folder / "out"), losses(self.shared / name)
        self.judge("wrong", found != expected, f"{found} instead of {expected}")


@dataclass(frozen=True)
class Run:
    """How a run ended: its exit status, None if it hung, and what it printed."""

    status: int | None
    stdout: str
    stderr: str


def losses(out: Path) -> dict[int, float]:
    """Return the loss of each step in a run's log."""
    log = out / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record["loss"] for record in records}


def _saved(out: Path) -> int:
    """Return the step of a run's latest checkpoint, 0 without one."""
    for name in ("checkpoint", "checkpoint.previous"):
        if (path := out / name / "run.json").exists():
            return int(json.loads(path.read_text())["step"])
    return 0


def _descendants() -> set[int]:
    """Return the processes below this one; orphans come to it, as it is their subreaper."""
    found, to_visit = set[int](), [os.getpid()]
    while to_visit:
        for path in Path(f"/proc/{to_visit.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children = [int(word) for word in path.read_text().split()]
                found.update(children)
                to_visit += children
    return {pid for pid in found if _runs(pid)}


@lru_cache(maxsize=1)
def become_subreaper(shared: Path) -> None:
    """Take in the orphans of trials, and start the server of `run_program`, which stays."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    (shared / "empty.py").touch()
    run_program(str(shared / "empty.py"))


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _event(trial: Trial, kind: str, first: int = 1, ranks: int = 2) -> Event:
    rng, phases = trial.rng, [*fault_events.PHASES]
    phase = rng.choice(phases if kind == "kill" else ["gradients", "update", "save"])
    step = rng.randint(first, STEPS)
    if phase in ("save", "name"):
        step += step % EVERY  # steps after which a checkpoint is saved
    rank = 0 if phase == "name" else rng.randrange(ranks)
    return Event(kind, rank, step, phase, rng.choice([0.0, rng.uniform(0.0, 0.05)]))


def kill(trial: Trial) -> None:
    """Kill a rank anywhere in a run."""
    event, name = _event(trial, "kill"), trial.rng.choice(trial.degrees)
    done = trial.run(trial.words(name), [event])
    clear = f"rank {event.rank} was killed by SIGKILL" in done.stderr
    trial.judge("unclear", done.status != 0 and not clear, done.stderr)
    trial.goes_on(name)


def stop(trial: Trial) -> None:
    """Stop a rank after the first step: the others end in time and name it."""
    event, name = _event(trial, "stop", first=2), trial.rng.choice(trial.degrees)
    done = trial.run(trial.words(name, "--comm-timeout", "3"), [event])
    clear = f"rank {event.rank} did not answer" in done.stderr and "step" in done.stderr
    trial.judge("unclear", done.status != 0 and not clear, done.stderr)
    trial.goes_on(name)


def stopped_by_signal(trial: Trial) -> None:
    """Send the launcher a signal: SIGTERM saves, SIGINT ends the run at once."""
    kind, name = trial.rng.choice(["SIGTERM", "SIGINT"]), trial.rng.choice(trial.degrees)
    done = trial.run(trial.words(name), [_event(trial, kind)])
    status = 128 + signal.Signals[kind]
    trial.judge("broken", done.status not in (0, status, None), f"{done.status}: {done.stderr}")
    trial.goes_on(name)


def fill(trial: Trial) -> None:
    """Let no file of one rank grow any more."""
    name = trial.rng.choice(trial.degrees)
    done = trial.run(trial.words(name), [_event(trial, "fill")])
    trial.judge("unclear", done.status not in (0, 1), f"{done.status}: {done.stderr}")
    clear = "was not written" in done.stderr
    trial.judge("unclear", done.status == 1 and not clear, done.stderr)
    trial.goes_on(name)


def _damaged(trial: Trial, harm: Callable[[bytes], bytes]) -> None:
    name = trial.rng.choice(["one", "one", "one", *trial.degrees])
    out = trial.folder / "out"
    shutil.copytree(trial.shared / f"{name}-saved", out)
    path = trial.rng.choice(sorted((out / "checkpoint").iterdir()))
    path.write_bytes(harm(path.read_bytes()))
    done = trial.run(trial.words(name))
    if done.status == 0:
        trial.compare(name)
        return
    trial.judge("unclear", done.status != 2 or len(done.stderr.splitlines()) > 1, done.stderr)
    named = str(out / "checkpoint") in done.stderr and str(out / "checkpoint-2") in done.stderr
    trial.judge("unclear", done.status is not None and not named, f"{path.name}: {done.stderr}")
    shutil.rmtree(out / "checkpoint")
    (out / "checkpoint-2").rename(out / "checkpoint")
    trial.goes_on(name)


def cut(trial: Trial) -> None:
    """Cut off a file of a checkpoint."""
    _damaged(trial, lambda content: content[: trial.rng.randrange(max(1, len(content)))])


def flip(trial: Trial) -> None:
    """Flip one bit of a file of a checkpoint."""

    def harm(content: bytes) -> bytes:
        found, bit = bytearray(content), trial.rng.randrange(8 * len(content))
        found[bit // 8] ^= 1 << bit % 8
        return bytes(found)

    _damaged(trial, harm)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def restart(rendezvous: str, trial: Trial) -> None:
    """Kill a rank of a run that torchrun restarts."""
    port, name = _free_port(), "cp"
    words = {
        "static": ["--master-addr", "127.0.0.1", "--master-port", str(port)],
        "standalone": ["--standalone"],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"],
    }[rendezvous]
    event = str(_event(trial, "kill"))
    command = [*words, "--max-restarts", "3", "--nproc-per-node", "2", PROGRAM, event, "--"]
    done = trial.run([*command, *trial.words(name, joins=True)], path=TORCHRUN)
    trial.judge("lost", done.status not in (0, None), f"{words}: {done.stderr[:2000]}")
    if done.status == 0:
        trial.compare(name)


def link(trial: Trial) -> None:
    """Take down the link between two nodes, each in a network namespace, and up again."""
    names = [f"faults-{os.getpid()}-{side}" for side in "ab"]
    with contextlib.ExitStack() as stack:
        try:
            devices = stack.enter_context(_two_nodes(names))
        except (OSError, subprocess.CalledProcessError) as error:
            trial.not_run = f"no network namespaces here: {error}"
            return
        _link_down(trial, names, devices)


def _link_down(trial: Trial, names: list[str], devices: list[str]) -> None:
    known = _descendants()
    (trial.folder / "marks").mkdir()
    event = Event("note", 0, trial.rng.randint(2, STEPS - 1), "gradients", 0.0)
    words = trial.words("cp", "--comm-timeout", "5", joins=True)
    nodes = []
    for number, (name, device) in enumerate(zip(names, devices, strict=True), 1):
        command = ["ip", "netns", "exec", name, sys.executable, TORCHRUN, "--nnodes", "2"]
        command += ["--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "10.99.0.1:29400", "--rdzv-id", "faults"]
        command += ["--rdzv-conf", f"is_host={int(number == 1)}"]
        command += ["--local-addr", f"10.99.0.{number}", PROGRAM, str(event), "--", *words]
        marks = str(trial.folder / "marks")
        environment = {**os.environ, MARKS: marks, "GLOO_SOCKET_IFNAME": device}
        with (trial.folder / name).open("w") as log:
            nodes.append(subprocess.Popen(command, stderr=log, stdout=log, env=environment))
    deadline = time.monotonic() + SECONDS
    while not any((trial.folder / "marks").iterdir()) and time.monotonic() < deadline:
        if any(node.poll() is not None for node in nodes):
            break  # it was refused, which the statuses tell
        time.sleep(0.02)
    inside = ["ip", "netns", "exec", names[0], "ip", "link", "set", devices[0]]
    try:
        subprocess.run([*inside, "down"], check=True)
        time.sleep(trial.rng.choice([1.0, 20.0]))
        subprocess.run([*inside, "up"], check=True)
        statuses = [node.wait(max(1.0, deadline - time.monotonic())) for node in nodes]
        text = "\n".join((trial.folder / name).read_text()[-2000:] for name in names)
        trial.judge("lost", statuses != [0, 0], f"{statuses}: {text}")
        if statuses == [0, 0]:
            trial.compare("cp")
    except subprocess.TimeoutExpired:
        trial.judge("hangs", True, "\n".join((trial.folder / n).read_text()[-2000:] for n in names))
    finally:
        for node in nodes:
            node.kill()
            node.wait()
        for pid in _descendants() - known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _two_nodes(names: list[str]) -> Iterator[list[str]]:
    """Make two network namespaces with a link; give the names of its devices."""
    devices = ["fault-a", "fault-b"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ends = ["type", "veth", "peer", "name", devices[1], "netns", names[1]]
        ip("-n", names[0], "link", "add", devices[0], *ends)
        for number, (name, device) in enumerate(zip(names, devices, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield devices
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


_VALUES: dict[str, list[str]] = {
    **{name: [*"1234"] for name in ("dp-replicate", "dp-shard", "cp", "tp", "pp", "ep")},
    "procs": ["1", "2", "4", "0"],
    "batch-size": ["1", "4", "8", "-1"],
    "seq-len": ["1", "16", "32"],
    "accumulate": ["1", "2", "3"],
    "eval-every": ["1", "0"],
    "checkpoint-every": ["1", "2", "-3"],
    "keep": ["1", "3"],
    "comm-timeout": ["0", "5", "nan", "inf"],
    "lr": ["1e-3", "nan", "0"],
    "warmup-steps": ["0", "3"],
    "decay-steps": ["0", "9"],
    "dtype": ["float64", "float32", "bfloat16", "int8"],
    "pp-schedule": ["1f1b", "interleaved"],
    "stages-per-rank": ["1", "2"],
    "ulysses-degree": ["1", "2"],
    "vocab-size": ["1", "256", "320"],
    "profile": ["1:1", "2", "5:1"],
    "compare": ["0", "2"],
    "seed": ["0", "7", str(2**70)],
}


def _random_words(trial: Trial) -> list[str]:
    chosen = trial.rng.sample(sorted(_VALUES), trial.rng.randint(1, 6))
    pairs = (word for name in chosen for word in (f"--{name}", trial.rng.choice(_VALUES[name])))
    model = ["--model", str(trial.shared / "model.json"), "--out", str(trial.folder / "out")]
    return [*model, "--steps", "2", *pairs]


def _is_clear(message: str) -> bool:
    """Return whether a message has one line, or a line with the legal values for each rule."""
    lines = message.splitlines()
    return len(lines) == 1 or (len(lines) > 1 and all("use " in line for line in lines))


def _accepted(words: list[str], trial: Trial) -> bool:
    """Return whether the options are accepted; they are refused with one line."""
    try:
        with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
            parse(words)
    except (OptionsError, ParallelDimsError, ModelError, TextError) as error:
        trial.judge("unclear", not _is_clear(str(error)), f"{words}: {error}")
        return False
    except SystemExit as end:
        trial.judge("unclear", end.code != 2, f"{words} ended with {end.code}")
        return False
    except Exception as error:  # noqa: BLE001 - any other type is what this looks for
        trial.judge("broken", True, f"{words}: {type(error).__name__}: {error}")
        return False
    return True


def parsed(trial: Trial) -> None:
    """Parse a random set of options."""
    _accepted(_random_words(trial), trial)


def launched(trial: Trial) -> None:
    """Run a random set of options that is accepted."""
    while not _accepted(words := _random_words(trial), trial):
        pass
    done = trial.run(words)
    trial.judge("broken", done.status not in (0, 2, None), f"{words}: {done.stderr}")
    refused = done.status == 2
    trial.judge("unclear", refused and not _is_clear(done.stderr), f"{words}: {done.stderr}")


# Each row: a kind of trial, and how many make the whole suite.
ROWS: dict[str, tuple[Callable[[Trial], None], int]] = {
    "kill": (kill, 100),
    "cut": (cut, 80),
    "flip": (flip, 120),
    # torchrun's restarts, by the kind of rendezvous
    "static": (partial(restart, "static"), 7),
    "standalone": (partial(restart, "standalone"), 7),
    "c10d": (partial(restart, "c10d"), 6),
    "stop": (stop, 10),
    "signal": (stopped_by_signal, 20),
    "fill": (fill, 10),
    "link": (link, 2),
    "parse": (parsed, 1000),
    "launch": (launched, 50),
}
SAMPLE = {"kill": 1, "cut": 1, "flip": 2, "parse": 100, "launch": 1}


def prepare(shared: Path, names: Sequence[str]) -> None:
    """Make the undisturbed runs, and the checkpoints that trials damage copies of."""
    become_subreaper(shared)
    (shared / "model.json").write_text(json.dumps(MODEL))
    for name in names:
        trial, out = Trial(shared, shared, random.Random(0)), shared / "out"
        done = trial.run(trial.words(name, "--keep", "3"))
        if done.status != 0:
            raise RuntimeError(f"the undisturbed run failed: {done.stderr}")
        shutil.copytree(out, shared / name)
        # As if the run had ended before its last checkpoint.
        shutil.rmtree(out / "checkpoint")
        (out / f"checkpoint-{STEPS - EVERY}").rename(out / "checkpoint")
        out.rename(shared / f"{name}-saved")


def attempt(row: str, number: int, shared: Path) -> Trial:
    """Make one trial of a row, with random numbers of its own."""
    become_subreaper(shared)
    with tempfile.TemporaryDirectory(prefix=f"fault-{row}-") as folder:
        trial = Trial(shared, Path(folder), random.Random(f"{row}/{number}"))
        try:
            ROWS[row][0](trial)
        except Exception:  # noqa: BLE001 - the other trials go on
            trial.judge("broken", True, traceback.format_exc())
        return trial


def suite(counts: Mapping[str, int], jobs: int, degrees: Sequence[str] = (*DEGREES,)) -> bool:
    """Make the trials, print their table, and return whether all columns but the last are 0.

    Args:
        counts: How many trials of each row.
        jobs: How many trials run at a time.
        degrees: The names in `DEGREES` of which trials choose.
    """
    start, good = time.monotonic(), True
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        prepare(Path(folder), ("one", *degrees))
        head = f"{'':10}{'trials':>8}" + "".join(f"{name:>9}" for name in COLUMNS)
        print(f"undisturbed runs made in {time.monotonic() - start:.0f} s\n{head}", flush=True)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            for row, count in counts.items():
                numbers = range(count)
                trials = [
                    each.result()
                    for each in [pool.submit(attempt, row, n, Path(folder)) for n in numbers]
                ]
                ran = [trial for trial in trials if not trial.not_run]
                bad = [sum(column in trial.bad for trial in ran) for column in COLUMNS]
                print(f"{row:10}{len(ran):8}" + "".join(f"{n:9}" for n in bad), flush=True)
                good = good and not any(bad[:-1])
                for number, trial in enumerate(trials):
                    where = f"{row} {number}"
                    for column, text in trial.bad.items():
                        print(f"  {where}, {column}: {text}", flush=True)
                    if trial.not_run:
                        print(f"  {where} was NOT RUN: {trial.not_run}", flush=True)
        print(f"{time.monotonic() - start:.0f} s", flush=True)
    return good


def main() -> int:
    """Run the suite as the command line says."""
    parser = argparse.ArgumentParser(description="Trials of the trainer under faults.")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the trials")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    given = parser.parse_args()
    counts = {row: max(1, round(ROWS[row][1] * given.scale)) for row in given.only}
    return 0 if suite(counts, given.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
