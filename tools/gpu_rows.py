"""What every `packages/*/benchmarks/gpu.py` shares: worlds of ranks, rows of a table, how it ends.

A script says which worlds there are and what to look at in each:

    if __name__ == "__main__":
        sys.exit(gpu_rows.main(__doc__, worlds_of, checks))

Each rank of each world calls ``checks(world, device, large, rows)``. A check that raises is a row
too, and so is a world that does not start; a row that says FAILED ends the script with 1.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

Row = tuple[str, str, str]  # world, what, result
LOOPBACK = "127.0.0.1"
GROUP_TIMEOUT = timedelta(seconds=60)
WORLD_SECONDS = 900.0  # torch gives the groups of a mesh its own timeout: 10 or 30 minutes


@dataclass(frozen=True)
class World:
    """Some ranks: their name in the table, backend, mesh, and what they lack here, if anything.

    Without a backend it is no process group but this process alone.
    """

    name: str
    backend: str
    shape: tuple[int, ...] = (1,)
    lack: str | None = None

    @property
    def ranks(self) -> int:
        """Return how many there are."""
        return math.prod(self.shape)


class Rows:
    """The rows of one world, as one rank sees them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.found: list[Row] = []

    def add(self, what: str, check: Callable[..., str], *given: Any) -> None:
        """Add what a check says, or that it raised."""
        try:
            result = check(*given)
        except Exception as error:  # noqa: BLE001 - a row of the table, and the end of the run
            result = f"FAILED: {type(error).__name__}: {error}"
        self.found.append((self.world.name, what, " ".join(result.split())[:400]))


Checks = Callable[[World, torch.device, bool, Rows], None]


def nccl(on_gpu: bool) -> str:
    """Return the backend of ranks with a GPU each, which may also talk over CPUs."""
    return "cpu:gloo,cuda:nccl" if on_gpu else "gloo"


def main(about: str | None, worlds_of: Callable[[bool], list[World]], checks: Checks) -> int:
    """Run all worlds, print the table, and return 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("no GPU here; --device cpu runs the same code on CPUs")
        return 1
    rows: list[Row] = []
    for world in worlds_of(on_gpu):
        # Gloo goes through the CPU.
        large = on_gpu and not arguments.quick and world.backend != "gloo"
        if world.lack is not None:
            found: list[Row] = [(world.name, "the whole world", f"SKIPPED: {world.lack}")]
        elif not world.backend:
            found = seen(world, torch.device(arguments.device), large, checks)
        else:
            found = spawned(world, arguments.device, large, checks)
        for row in found:
            print(f"{row[0]:18} {row[1]:40} {row[2]}", flush=True)
        rows += found
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any("FAILED" in result for _, _, result in rows))


def spawned(
    world: World, kind: str, large: bool, checks: Checks, seconds: float = WORLD_SECONDS
) -> list[Row]:
    """Start the ranks of a world and return the rows that their first rank sends.

    Ranks that have not ended after ``seconds`` are killed.
    """
    queue: Any = mp.get_context("spawn").SimpleQueue()
    launch: Any = start_processes
    try:
        # In this process, which gets a free port from the system and keeps it.
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        given = (world, store.port, kind, large, checks, queue)
        started = launch(serve, given, nprocs=world.ranks, join=False, start_method="spawn")
        end = time.monotonic() + seconds
        while not started.join(max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                for process in started.processes:
                    process.kill()
                raise TimeoutError(f"its ranks did not end in {seconds:.0f} s")
        found: list[Row] = queue.get()
    except Exception as error:  # noqa: BLE001 - the other worlds still say what they see
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return [(world.name, "the whole world", f"FAILED: {lines[-1]}")]
    return found


def serve(
    rank: int, world: World, port: int, kind: str, large: bool, checks: Checks, queue: Any
) -> None:
    """Be one rank of a world; the first one sends the rows, of each the worst that a rank saw."""
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        world.backend,
        store=TCPStore(LOOPBACK, port, is_master=False, timeout=GROUP_TIMEOUT),
        rank=rank,
        world_size=world.ranks,
        timeout=GROUP_TIMEOUT,
    )
    found = seen(world, device, large, checks)
    every: list[Any] = [None] * world.ranks
    dist.all_gather_object(every, found)
    if rank == 0:
        queue.put([worst_of(each) for each in zip_longest(*every)])
    dist.barrier()
    dist.destroy_process_group()


def seen(world: World, device: torch.device, large: bool, checks: Checks) -> list[Row]:
    """Return the rows that this rank sees, with one that says where the checks ended early."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = Rows(world)
    try:
        checks(world, device, large, rows)
    except Exception as error:  # noqa: BLE001 - after the rows that there are
        rows.found.append((world.name, "what follows", f"FAILED: {type(error).__name__}: {error}"))
    return rows.found


def worst_of(rows: tuple[Row | None, ...]) -> Row:
    """Return the row of a rank that failed, if one did, else that of the first that has one."""
    here = [row for row in rows if row is not None]
    return next((row for row in here if "FAILED" in row[2]), here[0])
