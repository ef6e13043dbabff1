"""The main job, started as a user starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rank_pool import run_program
from torch.distributed.checkpoint.filesystem import FileSystemReader

ROOT = Path(__file__).resolve().parents[1]
TRAIN = [sys.executable, str(ROOT / "tools" / "train")]
SMALL = ("--batch-size", "4", "--seq-len", "32")


def run(*words: str, command: list[str] | None = None, timeout: float = 300) -> str:
    """Return what a run printed; it must end well."""
    done = subprocess.run(
        [*(command or TRAIN), *words], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(out: Path) -> dict[int, float]:
    lines = (out / "log.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("words", "steps"),
    [(("--steps", "12"), 12), pytest.param((), 60, marks=pytest.mark.long)],
    ids=["shortened", "whole"],
)
def test_the_default_run_learns_and_equals_one_process_at_every_step(
    tmp_path: Path, words: tuple[str, ...], steps: int
) -> None:
    printed = run("--out", str(tmp_path), *words, timeout=1190)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["world_size"] == 4
    dims = summary["dims"]
    assert (dims["dp_shard"], dims["cp"], dims["ep"]) == (2, 2, 4)
    assert summary["final_loss"] <= 0.75 * summary["first_loss"]
    assert 0 <= summary["reference_max_rel_diff"] <= 1e-5
    assert summary["torch"] == torch.__version__
    assert summary["tokens_per_second"] > 0
    assert summary["peak_memory_bytes"] > 2**20
    for axis in ("fsdp", "cp", "ep"):
        assert summary["bytes_by_axis"][axis]["calls"] > 0
        assert summary["bytes_by_axis"][axis]["bytes"] > 0
    recorded = losses(tmp_path)
    assert list(recorded) == list(range(1, steps + 1))
    assert recorded[1] == summary["first_loss"]
    assert recorded[steps] == summary["final_loss"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "loss.svg").read_text()
    assert Path(summary["checkpoint"]) == tmp_path / "checkpoint"
    metadata = FileSystemReader(tmp_path / "checkpoint").read_metadata()
    assert any("head.weight" in key for key in metadata.state_dict_metadata)
    assert "checkpoint" in printed


def test_a_run_resumes_under_other_degrees(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    made = ["--procs", "2", "--dp-shard", "2", "--steps", "1", "--out", str(first)]
    assert run_program(TRAIN[1], made).status == 0
    words = ["--resume", str(first), "--procs", "2", "--tp", "2", "--steps", "2", "--compare", "2"]
    done = run_program(TRAIN[1], [*words, "--out", str(second)])
    assert done.status == 0, done.stderr
    summary = json.loads((second / "summary.json").read_text())
    assert summary["dims"]["tp"] == 2
    assert summary["reference_max_rel_diff"] <= 1e-12


def refused(*words: str, environment: dict[str, str]) -> str:
    """Return the message of a run that must end with status 2 and print nothing else."""
    done = subprocess.run(
        [*TRAIN, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("words", "given", "legal"),
    [
        (("--tp", "3"), "tp=3", "1, 2 or 4"),
        (("--ep", "5"), "ep=5", "1, 2 or 4"),
        (("--cp", "3"), "cp=3", "1, 2 or 4"),
        (("--dp-shard", "0"), "dp_shard='0'", "a positive integer"),
        (("--dp-replicate", "-2"), "dp_replicate='-2'", "a positive integer"),
        (("--dp-shard", "2", "--tp", "4"), "dp_shard*tp=2*4=8", "dp_shard=1, or tp=2"),
        (("--procs", "8", "--pp", "8"), "pp=8", "1, 2 or 4"),
        (("--etp", "2"), "etp=2", "1"),
        (("--cp", "4", "--ulysses-degree", "3"), "ulysses_degree=3", "1, 2 or 4"),
        (("--procs", "16", "--tp", "16"), "tp=16", "1, 2 or 4"),
        (("--procs", "0"), "procs=0", "1 or more"),
        (("--steps", "0"), "steps=0", "1 or more"),
        (("--resume", "nowhere"), "nowhere", "folder"),
        (("--tp", "two"), "two", "integer"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_options_end_with_one_message_before_anything_starts(
    words: tuple[str, ...], given: str, legal: str
) -> None:
    """Importing torch is what takes time: none of it is loaded, so no rank was started either."""
    printed = refused(*words, environment={"PYTHONPROFILEIMPORTTIME": "1"})
    imported = {line.split("|")[-1].strip() for line in printed.splitlines() if "|" in line}
    assert "argparse" in imported
    assert "torch" not in imported
    message = "\n".join(line for line in printed.splitlines() if "import time:" not in line)
    assert given in message
    assert legal in message
    assert "Traceback" not in message


def test_it_joins_the_world_of_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", str(ROOT / "tools" / "train")]
    words = ("--steps", "2", "--compare", "--tp", "2", *SMALL)
    run(*words, "--out", str(tmp_path), command=torchrun)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["dims"]["tp"] == 2
    assert summary["reference_max_rel_diff"] <= 1e-5


def hear_interrupts() -> None:
    """Undo what a shell does to jobs in the background, where tests may run: ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*words: str) -> subprocess.Popen[str]:
    """Start a run of many steps and return once it has made its first."""
    process = subprocess.Popen(
        [*TRAIN, "--steps", "100000", *SMALL, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "loss" in line:
            return process
    raise AssertionError(process.communicate()[1])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def assert_gone(pids: list[int], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_a_killed_rank_ends_the_run_and_is_named_first(tmp_path: Path) -> None:
    process = start("--procs", "2", "--out", str(tmp_path))
    ranks = children(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode not in (0, 2)
    assert errors.startswith("rank 1 was killed by SIGKILL")
    assert_gone(ranks)


FAILING = """
import os, sys
sys.path[:0] = sys.argv[1:2]
from train.loop import Trainer
from train.program import main

update = Trainer.update
def fail(self):
    if os.environ["RANK"] == "1" and self.step == 1:
        raise ArithmeticError("only rank 1 says this")
    return update(self)
Trainer.update = fail
sys.exit(main(sys.argv[2:]))
"""


def test_a_failing_rank_ends_the_run_with_its_own_traceback_first(tmp_path: Path) -> None:
    program = tmp_path / "failing.py"
    program.write_text(FAILING)
    words = [str(ROOT / "tools"), "--procs", "2", "--out", str(tmp_path / "run")]
    done = run_program(str(program), words)
    assert done.status not in (0, 2)
    first = done.stderr.splitlines()[0]
    assert first.startswith("rank 1 failed")
    traceback, _, _ = done.stderr.partition("ArithmeticError: only rank 1 says this")
    assert "Traceback" in traceback
    assert "rank 0" not in traceback
    assert "Connection closed" not in traceback


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    process = start("--procs", "2", "--out", str(tmp_path))
    ranks = children(process.pid)
    process.send_signal(number)
    try:
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert_gone(ranks)
    assert (tmp_path / "checkpoint").exists() == (number == signal.SIGTERM)
