"""What the GPU checks share: worlds of ranks, and rows that are written as soon as they exist.

A script says which worlds there are and what to check in each:

    if __name__ == "__main__":
        sys.exit(gpu_rows.main("hp-dtensor", __doc__, worlds_of, checks))

Each rank of each world calls ``checks(world, device, large, rows)``, which adds rows:

    rows.add("all_gather", check, arguments)

A check returns a text, a `Result` or a `Timed`, and fails if it raises. Every row is appended to
the file of ``--rows`` at once, so that nothing is lost if the process is killed. The first rank
writes all rows, the others those that fail. Rows that ``--done`` lists are not run again.

Under torchrun, the script is one rank of the world that torchrun started, over several nodes too.
"""

import argparse
import faulthandler
import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

Status = Literal["passed", "failed", "measured", "skipped"]
LOOPBACK = "127.0.0.1"
GROUP_TIMEOUT = timedelta(seconds=60)
WORLD_SECONDS = 900.0
# Imported once for all ranks on CPUs, which are forks of a process that did nothing else.
PRELOAD = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo"]
WHOLE = "whole world"  # the row that says that all checks of a world were run


@dataclass(frozen=True)
class World:
    """Some ranks: their name in the table, backend, mesh shape, and what is missing here, if any.

    Without a backend, the world is this process alone and has no process group. If ``optional``, a
    process that ends with a signal is a skipped row: a peer did not run here.
    """

    name: str
    backend: str
    shape: tuple[int, ...] = (1,)
    missing: str | None = None
    optional: bool = False

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Row:
    """One line of the table: a check in a world, our figure, the peer's, their ratio."""

    part: str
    world: str
    check: str
    ours: str
    peer: str
    ratio: float | None
    status: Status

    @property
    def key(self) -> tuple[str, str, str]:
        """Return part, world and check, which identify the row."""
        return self.part, self.world, self.check


@dataclass(frozen=True)
class Result:
    """What a check found, if it is more than a text of a check that passed."""

    ours: str
    peer: str = "-"
    ratio: float | None = None
    status: Status = "measured"


def skipped(reason: str) -> Result:
    """Return the result of a check that cannot run here."""
    return Result(reason, status="skipped")


def interleaved(
    ours: Callable[[], object], peer: Callable[[], object], rounds: int, device: torch.device
) -> Result:
    """Run both sides in turn; return their median times and the median of the paired ratios.

    Times are those of CUDA events on a GPU, and of the host's clock else. Two rounds warm up.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 2):
        for side, step in zip(times, (ours, peer), strict=True):
            spent = milliseconds(step, device)
            if turn >= 2:
                side.append(spent)
    pairs = [one / other for one, other in zip(*times, strict=True)]
    mine, theirs = (f"{statistics.median(side):.2f} ms" for side in times)
    return Result(mine, theirs, statistics.median(pairs))


def peak_memory(step: Callable[[], object]) -> float:
    """Return the peak memory on the GPU of the second step, in MiB above the memory before it."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def milliseconds(step: Callable[[], object], device: torch.device) -> float:
    """Return the time of one step to its end on the device."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end))
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - began)


class Rows:
    """The rows of one world, as one rank sees them."""

    def __init__(
        self, part: str, world: World, file: Path | None = None, done: Iterable[Row] = ()
    ) -> None:
        self.part = part
        self.world = world
        self.file = file
        self.done = {row.key for row in done}
        self.found: list[Row] = []
        self.failed = False  # a row of this rank, or of any rank once all have ended

    def add(self, check: str, run: Callable[..., str | Result], *given: Any) -> None:
        """Add what a check returns, or that it raised, unless an earlier run has the row."""
        if (self.part, self.world.name, check) in self.done:
            return
        try:
            result = run(*given)
        except Exception as error:  # noqa: BLE001 - a row of the table, and the end of the run
            traceback.print_exc(limit=-6)
            result = Result(f"{type(error).__name__}: {error}", status="failed")
        if isinstance(result, str):
            result = Result(result, status="passed")
        self.write(check, result)

    def write(self, check: str, result: Result) -> None:
        """Append a row to the file and print it, from the first rank or if it failed."""
        ours = " ".join(result.ours.split())[:400]
        row = Row(self.part, self.world.name, check, ours, result.peer, result.ratio, result.status)
        self.found.append(row)
        self.failed |= row.status == "failed"
        if row.status != "failed" and dist.is_initialized() and dist.get_rank() > 0:
            return
        print(line_of(row), flush=True)
        if self.file is not None:
            append(self.file, row)


Checks = Callable[[World, torch.device, bool, Rows], None]


def append(file: Path, row: Row) -> None:
    """Add a row to a file of rows, with one write, so that ranks do not mix their lines."""
    line = json.dumps(asdict(row)) + "\n"
    with file.open("a", encoding="utf-8") as out:
        out.write(line)


def read(file: Path | None) -> list[Row]:
    """Return one row for each key: a failed one if there is one, else the last."""
    if file is None or not file.exists():
        return []
    found: dict[tuple[str, str, str], Row] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = Row(**json.loads(line))
        if row.key not in found or found[row.key].status != "failed":
            found[row.key] = row
    return list(found.values())


def line_of(row: Row) -> str:
    """Return a row as text."""
    ratio = "" if row.ratio is None else f", ratio {row.ratio:.3f}"
    peer = "" if row.peer == "-" else f", peer {row.peer}"
    mark = {"passed": "", "measured": "", "failed": "FAILED: ", "skipped": "skipped: "}[row.status]
    return f"{row.part:12} {row.world:18} {row.check:42} {mark}{row.ours}{peer}{ratio}"


def nccl(on_gpu: bool) -> str:
    """Return the backend of ranks with a GPU each, which may also talk over CPUs."""
    return "cpu:gloo,cuda:nccl" if on_gpu else "gloo"


def main(
    part: str,
    about: str | None,
    worlds_of: Callable[[bool], list[World]],
    checks: Checks,
) -> int:
    """Run all worlds and return 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--worlds", default="", help="only worlds whose names hold this text")
    parser.add_argument("--rows", type=Path, help="append the rows to this file")
    parser.add_argument("--done", type=Path, help="a file of rows that are not run again")
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("no GPU here; --device cpu runs the same code on CPUs")
        return 1
    done = [row for row in read(given.done) if row.status in ("passed", "measured")]
    if "RANK" in os.environ:
        ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        world = World(f"{ranks} ranks, {ranks // local} nodes", nccl(on_gpu), (ranks,))
        return joined(Rows(part, world, given.rows, done), given.device, not given.quick, checks)
    failed = False
    for world in worlds_of(on_gpu):
        rows = Rows(part, world, given.rows, done)
        if given.worlds not in world.name or (part, world.name, WHOLE) in rows.done:
            continue
        # Gloo goes through the CPU.
        large = on_gpu and not given.quick and world.backend != "gloo"
        if world.missing is not None:
            rows.write(WHOLE, skipped(world.missing))
        elif not world.backend:
            run_checks(rows, torch.device(given.device), large, checks)
        else:
            spawned(rows, given.device, large, checks)
        if not rows.failed and not any(row.check == WHOLE for row in rows.found):
            rows.write(WHOLE, Result("all checks were run", status="passed"))
        failed |= rows.failed
    return int(failed)


def spawned(
    rows: Rows, kind: str, large: bool, checks: Checks, seconds: float = WORLD_SECONDS
) -> None:
    """Start the ranks of a world; they write the rows, and this process one if they die.

    Ranks that have not ended after ``seconds`` are killed. On GPUs each rank is a new interpreter,
    because CUDA does not survive a fork if an import has called it.
    """
    method = "forkserver" if kind == "cpu" else "spawn"
    context: Any = mp.get_context(method)
    context.set_forkserver_preload(PRELOAD)
    world, queue = rows.world, context.SimpleQueue()
    launch: Any = start_processes
    try:
        # In this process, which gets a free port from the system and keeps it.
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        given = (rows, store.port, kind, large, checks, queue)
        started = launch(serve, given, nprocs=world.ranks, join=False, start_method=method)
        end = time.monotonic() + seconds
        while not started.join(max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                for process in started.processes:
                    process.kill()
                raise TimeoutError(f"its ranks did not end in {seconds:.0f} s")
        rows.failed = any([queue.get() for _ in range(world.ranks)])
    except Exception as error:  # noqa: BLE001 - the other worlds are still run
        lines = str(error).strip().splitlines() or [type(error).__name__]
        rows.write(WHOLE, Result(lines[-1], status="skipped" if world.optional else "failed"))


def serve(
    rank: int, rows: Rows, port: int, kind: str, large: bool, checks: Checks, queue: Any
) -> None:
    """Be one rank of a world."""
    faulthandler.enable()
    device = own_device(kind, rank)
    dist.init_process_group(
        rows.world.backend,
        store=TCPStore(LOOPBACK, port, is_master=False, timeout=GROUP_TIMEOUT),
        rank=rank,
        world_size=rows.world.ranks,
        timeout=GROUP_TIMEOUT,
    )
    run_checks(rows, device, large, checks)
    # Not the rows: a pipe holds 64 KiB, and is read when all ranks have ended.
    queue.put(rows.failed)
    dist.barrier()
    dist.destroy_process_group()


def joined(rows: Rows, kind: str, large: bool, checks: Checks) -> int:
    """Be one rank of the world that torchrun started; return 1 if a check failed."""
    device = own_device(kind, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(rows.world.backend, timeout=GROUP_TIMEOUT)
    done = [rows.done]  # those of the first rank: nodes may not share a file
    dist.broadcast_object_list(done)
    rows.done = done[0]
    run_checks(rows, device, large and kind == "cuda", checks)
    dist.barrier()
    dist.destroy_process_group()
    return int(rows.failed)


def own_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of a rank of this machine; several ranks may share a GPU."""
    if kind == "cpu":
        torch.set_num_threads(1)
        return torch.device(kind)
    device = torch.device(kind, local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def run_checks(rows: Rows, device: torch.device, large: bool, checks: Checks) -> None:
    """Run all checks of a world; an error outside a check is a failed row."""
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        checks(rows.world, device, large, rows)
    except Exception as error:  # noqa: BLE001 - after the rows that there are
        traceback.print_exc()
        rows.write(WHOLE, Result(f"{type(error).__name__}: {error}", status="failed"))
