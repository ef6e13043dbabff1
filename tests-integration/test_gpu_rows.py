"""Worlds and rows of the GPU checks, on CPUs."""

import contextlib
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import gpu_rows
import pytest
import torch
import torch.distributed as dist
from gpu_rows import Result, Row, Rows, World

TWO = World("two", "gloo", (2,))
Found = list[tuple[str, str, str]]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks, which are new processes, import the functions of this file."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)


def run(file: Path, checks: gpu_rows.Checks, world: World = TWO, seconds: float = 60) -> Found:
    """Run a world of two ranks, and return what the file then holds."""
    gpu_rows.spawned(Rows("part", world, file), "cpu", False, checks, seconds)
    return [(row.check, row.ours, row.status) for row in gpu_rows.read(file)]


def sums(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    def summed() -> str:
        x = torch.ones(1, device=device)
        dist.all_reduce(x)
        return f"{x.item():.0f}"

    def timeout() -> str:
        group: Any = dist.group.WORLD
        found: timedelta = group._get_backend(device).options._timeout
        return f"{found.total_seconds():.0f} s"

    def equal() -> str:
        assert dist.get_rank() == 0, "rank 1 saw another value"
        return "equal"

    rows.add("sum", summed)
    rows.add("timeout", timeout)
    rows.add("equal", equal)
    rows.add("time", lambda: Result("2 ms", "4 ms", 0.5))


def test_a_world_starts_where_the_usual_port_is_taken_and_each_rank_may_fail_a_check(
    tmp_path: Path,
) -> None:
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # someone else has it
            other.bind(("127.0.0.1", 29500))
            other.listen()
        found = run(tmp_path / "rows.jsonl", sums)
    assert sorted(found) == [
        ("equal", "AssertionError: rank 1 saw another value", "failed"),
        ("sum", "2", "passed"),
        ("time", "2 ms", "measured"),
        ("timeout", "60 s", "passed"),
    ]


def waits(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    if dist.get_rank() == 0:
        time.sleep(3600)


def test_a_world_that_does_not_end_is_a_row_that_failed(tmp_path: Path) -> None:
    found = run(tmp_path / "rows.jsonl", waits, seconds=1)
    assert found == [(gpu_rows.WHOLE, "its ranks did not end in 1 s", "failed")]


def dies(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    rows.add("before", lambda: "done")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_rows_are_kept_when_a_process_of_a_peer_is_killed(tmp_path: Path) -> None:
    world = World("two", "gloo", (2,), optional=True)
    before, last = run(tmp_path / "rows.jsonl", dies, world)
    assert before == ("before", "done", "passed")
    assert "SIGKILL" in last[1]
    assert (last[0], last[2]) == (gpu_rows.WHOLE, "skipped")


def script(part: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["script", "--device", "cpu", *words])
    return gpu_rows.main(part, "about", lambda _: [World("alone", "")], alone)


CALLS: list[str] = []


def alone(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    for name in ("one", "two"):
        rows.add(name, called, name)


def called(name: str) -> str:
    CALLS.append(name)
    return "done"


def test_rows_that_an_earlier_run_has_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, rows = tmp_path / "done.jsonl", tmp_path / "rows.jsonl"
    words = ("--rows", str(rows), "--done", str(done))
    gpu_rows.append(done, Row("part", "alone", "one", "done", "-", None, "passed"))
    gpu_rows.append(done, Row("part", "alone", "two", "wrong", "-", None, "failed"))
    CALLS.clear()
    assert script("part", monkeypatch, *words) == 0
    assert CALLS == ["two"]
    gpu_rows.append(done, Row("part", "alone", gpu_rows.WHOLE, "", "-", None, "passed"))
    assert script("part", monkeypatch, *words) == 0
    assert CALLS == ["two"]
    assert script("other", monkeypatch, *words) == 0
    assert CALLS == ["two", "one", "two"]


def test_under_torchrun_a_script_is_one_rank_of_its_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    rows = tmp_path / "rows.jsonl"
    assert script("part", monkeypatch, "--rows", str(rows)) == 0
    assert [row.world for row in gpu_rows.read(rows)] == ["1 ranks, 1 nodes"] * 2
    assert not dist.is_initialized()
