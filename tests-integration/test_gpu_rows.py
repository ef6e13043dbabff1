"""Worlds of the scripts for GPUs, on CPUs."""

import contextlib
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import gpu_rows
import pytest
import torch
import torch.distributed as dist
from gpu_rows import Rows, World


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks, which are new processes, import the functions of this file."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)


def sums(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    def summed() -> str:
        x = torch.ones(1, device=device)
        dist.all_reduce(x)
        return f"{x.item():.0f}"

    def timeout() -> str:
        group: Any = dist.group.WORLD
        found: timedelta = group._get_backend(device).options._timeout
        return f"{found.total_seconds():.0f} s"

    rows.add("sum", summed)
    rows.add("timeout", timeout)


def test_a_world_starts_where_the_usual_port_is_taken_and_its_group_has_a_short_timeout() -> None:
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # someone else has it
            other.bind(("127.0.0.1", 29500))
            other.listen()
        found = gpu_rows.spawned(World("two", "gloo", (2,)), "cpu", False, sums)
    assert found == [("two", "sum", "2"), ("two", "timeout", "60 s")]


def waits(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    if dist.get_rank() == 0:
        time.sleep(3600)


def test_a_world_that_does_not_end_is_a_row() -> None:
    found = gpu_rows.spawned(World("two", "gloo", (2,)), "cpu", False, waits, seconds=1)
    assert found == [("two", "the whole world", "FAILED: its ranks did not end in 1 s")]
