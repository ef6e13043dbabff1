"""Compare `redistribute` with torch's: bytes per pair, time on 4 gloo ranks, host time per call.

torch is given what it does on GPUs: on CPU meshes it replaces its shard-to-shard all-to-all by an
all-gather, so that function is replaced here by a real all-to-all (even sizes). Its planner is the
default (greedy) one; no mesh is flattened beforehand on either side.

Bytes are counted, not timed, as payload received from others (an all-reduce ``2 (n-1) / n`` times
its tensor): our plans for 64 MB averaged over all ranks, and torch's collectives on fake groups for
a small tensor, scaled to 64 MB; its steps do not depend on the size, ours may (default costs).

gloo times say something about copies, calls and bytes, nothing about GPUs. Times are taken in turn,
torch, ours, torch, ours, in the same processes; a ratio is torch's over ours, paired by round, as
median with quartiles. Host times are calls on fake groups, which move nothing.
"""

import argparse
import itertools
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.placement_types as placement_types
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor import Layout, RecordingCollectives, explain, redistribute
from hp_dtensor import Partial as OurPartial
from hp_dtensor import Replicate as OurReplicate
from hp_dtensor import Shard as OurShard

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Placements = tuple[Placement, ...]
OURS = {R: OurReplicate(), S0: OurShard(0), S1: OurShard(1), P: OurPartial()}
NAMES = {R: "R", S0: "S0", S1: "S1", P: "P"}
GLOO_PAIRS: list[tuple[Placements, Placements]] = [
    ((S0,), (S1,)),
    ((S0,), (R,)),
    ((S0, S1), (S1, S0)),
    ((S0, S0), (S1, S1)),
    ((S0, R), (R, S0)),
    ((P,), (S1,)),
]
HOST_PAIRS: list[tuple[str, Placements, Placements]] = [
    ("one axis", (S0,), (S1,)),
    ("one axis", (S0,), (R,)),
    ("one axis", (R,), (S0,)),
    ("one axis", (P,), (S0,)),
    ("several axes", (S0, S1), (S1, S0)),
    ("several axes", (S0, R), (R, S0)),
    ("several axes", (S0, S0), (S1, S1)),
    ("no-op", (S0,), (S0,)),
    ("no-op", (S0, S1), (S0, S1)),
]


def named(placements: Placements) -> str:
    """Return placements as short text."""
    return "(" + ",".join(NAMES[p] for p in placements) + ")"


def make_mesh(shape: Sequence[int]) -> DeviceMesh:
    """Return a CPU mesh of the whole world."""
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple("abc"[: len(shape)]))


def wrapped(placements: Placements, mesh: DeviceMesh, length: int) -> DTensor:
    """Return a square tensor of random values; ranks differ where they are partial."""
    coordinate = mesh.get_coordinate() or []
    seed = sum(i << axis * 4 for axis, i in enumerate(coordinate) if placements[axis] == P)
    local = torch.randn(length, length, generator=torch.Generator().manual_seed(seed))
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = local.chunk(mesh.size(axis), placement.dim)[coordinate[axis]]
    return DTensor.from_local(
        local.contiguous(), mesh, placements, shape=(length, length), stride=(length, 1)
    )


def fake_world(size: int) -> None:
    """Be rank 1 of a world that moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    quiet()
    dist.init_process_group("fake", rank=1, world_size=size, store=FakeStore())


class Counter(TorchDispatchMode):
    """Adds up what torch's functional collectives would receive."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.bytes = 0
        self._sizes = {mesh.get_group(i).group_name: mesh.size(i) for i in range(mesh.ndim)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if "_c10d_functional.all_reduce" in name:
            size = self._sizes[args[2]]
            self.bytes += 2 * (size - 1) * args[0].nbytes // size
        elif "_c10d_functional" in name and "wait" not in name:
            self.bytes += abs(out.nbytes - args[0].nbytes)
        return out

    def all_to_all(
        self, x: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, axis: int
    ) -> Tensor:
        """Stand in for torch's shard-to-shard step: an all-to-all keeps one n-th of the part."""
        n = mesh.size(axis)
        self.bytes += x.nbytes * (n - 1) // n
        shape = list(x.shape)
        shape[gather_dim] *= n
        shape[shard_dim] //= n
        return x.new_empty(shape)


def bytes_rows(shapes: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Sum received bytes over all pairs of {R, S0, S1}, then over those with P in the source."""
    rows = []
    for shape in shapes:
        fake_world(math.prod(shape))
        mesh = make_mesh(shape)
        counter = Counter(mesh)
        placement_types.shard_dim_alltoall = counter.all_to_all
        plain = list(itertools.product((R, S0, S1), repeat=len(shape)))
        sources = itertools.product((R, S0, S1, P), repeat=len(shape))
        reducing = [source for source in sources if P in source]
        for kind, group in (("R, S0, S1", plain), ("with P in the source", reducing)):
            sums, worse, pairs = [0.0, 0.0], 0, 0
            for source, target in itertools.product(group, plain):
                if source == target:
                    continue
                theirs, ours = pair_bytes(source, target, mesh, counter)
                sums[0] += theirs
                sums[1] += ours
                worse += ours > theirs
                pairs += 1
            rows.append(
                {
                    "part": "bytes",
                    "case": f"{'x'.join(map(str, shape))} {kind}",
                    "pairs": pairs,
                    "torch_bytes": sums[0],
                    "ours_bytes": sums[1],
                    "ratio": sums[0] / sums[1],
                    "pairs_where_ours_receives_more": worse,
                }
            )
            print(
                f"{rows[-1]['case']:32s} {pairs:4d} pairs  torch {sums[0] / 2**20:9.1f}  "
                f"ours {sums[1] / 2**20:9.1f}  ratio {sums[0] / sums[1]:.2f}  "
                f"ours more on {worse}",
                flush=True,
            )
        dist.destroy_process_group()
    return rows


def pair_bytes(
    source: Placements, target: Placements, mesh: DeviceMesh, counter: Counter
) -> tuple[float, float]:
    """Return what a rank receives for one pair of a 64 MB tensor: torch, ours."""
    small, length = 64, 4096
    x = wrapped(source, mesh, small)
    counter.bytes = 0
    with torch.no_grad(), counter:
        x.redistribute(mesh, target)
    degrees = tuple(mesh.shape)
    layouts = [Layout(degrees, tuple(OURS[p] for p in which)) for which in (source, target)]
    plans = [
        explain(layouts[0], layouts[1], shape=(length, length), rank=rank)
        for rank in range(mesh.size())
    ]
    scale = (length // small) ** 2
    return counter.bytes * scale, sum(plan.bytes_received for plan in plans) / len(plans)


def gpu_all_to_all(
    x: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, axis: int
) -> Tensor:
    """Do what torch does between shards on GPUs: chunk, all-to-all, concatenate."""
    n = mesh.size(axis)
    packed = torch.cat([part.contiguous().flatten() for part in x.chunk(n, dim=shard_dim)])
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed, group=mesh.get_group(axis))
    shape = list(x.shape)
    shape[shard_dim] //= n
    return torch.cat(list(received.view([n, *shape]).unbind(0)), dim=gather_dim)


def gloo_rank(rank: int, store: str, length: int, rounds: int, results: Connection) -> None:
    """Measure all pairs as one of 4 ranks; rank 0 reports."""
    quiet()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    placement_types.shard_dim_alltoall = gpu_all_to_all
    meshes = {1: make_mesh((4,)), 2: make_mesh((2, 2))}
    for source, target in GLOO_PAIRS:
        mesh = meshes[len(source)]
        x = wrapped(source, mesh, length)
        door = RecordingCollectives()
        with torch.no_grad():
            ours = redistribute(x, target, collectives=door)
            theirs = x.redistribute(mesh, target)
            torch.testing.assert_close(ours.to_local(), theirs.to_local(), rtol=0, atol=1e-5)
            times = paired(
                partial(x.redistribute, mesh, target),
                partial(redistribute, x, target),
                rounds,
            )
        row = summary("gloo", f"{named(source)} -> {named(target)}", *times)
        row["bytes_received"] = sum(t.bytes for t in door.by_axis.values())
        row["steps"] = [step.kind for step in explain(x, target).steps]
        if rank == 0:
            results.send(row)
    dist.barrier()
    # Meshes still hold groups: leave without running destructors.
    results.close()
    os._exit(0)


def paired(
    theirs: Callable[[], Any], ours: Callable[[], Any], rounds: int
) -> tuple[list[float], list[float]]:
    """Time both sides in turn until the slowest rank is done, after two uncounted rounds."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_number in range(rounds + 2):
        for side, call in enumerate((theirs, ours)):
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()
            if round_number >= 2:
                times[side].append(time.perf_counter() - start)
    return times


def gloo_rows(length: int, rounds: int, deadline: float) -> list[dict[str, Any]]:
    """Run 4 ranks for at most ``deadline`` seconds and return rank 0's rows; kill what is left."""
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + deadline
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=gloo_rank, args=(rank, f"{folder}/store", length, rounds, theirs)
            )
            for rank in range(4)
        ]
        for process in processes:
            process.start()
        theirs.close()
        try:
            while len(rows) < len(GLOO_PAIRS):
                if not wait([mine], timeout=max(0.0, end - time.monotonic())):
                    raise SystemExit(f"the gloo ranks did not finish in {deadline:.0f} s")
                try:
                    rows.append(mine.recv())
                except EOFError:
                    raise SystemExit("a gloo rank failed; see its traceback above") from None
                show(rows[-1])
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.join()
    return rows


def host_rows(rounds: int, calls: int) -> list[dict[str, Any]]:
    """Time calls on fake groups of 8 ranks: what remains is host time."""
    fake_world(8)
    placement_types.shard_dim_alltoall = gpu_all_to_all
    meshes = {1: make_mesh((8,)), 2: make_mesh((4, 2))}
    rows = []

    def many(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    for kind, source, target in HOST_PAIRS:
        mesh = meshes[len(source)]
        x = wrapped(source, mesh, 64)
        theirs, ours = [], []
        with torch.no_grad():
            for round_number in range(rounds + 1):
                a = many(partial(x.redistribute, mesh, target))
                b = many(partial(redistribute, x, target))
                if round_number:
                    theirs.append(a)
                    ours.append(b)
        rows.append(summary("host", f"{kind}: {named(source)} -> {named(target)}", theirs, ours))
        show(rows[-1])
    dist.destroy_process_group()
    return rows


def summary(part: str, case: str, theirs: list[float], ours: list[float]) -> dict[str, Any]:
    """Return medians in microseconds, and the paired ratio with its quartiles."""
    ratios = sorted(a / b for a, b in zip(theirs, ours, strict=True))
    return {
        "part": part,
        "case": case,
        "torch_us": statistics.median(theirs) * 1e6,
        "ours_us": statistics.median(ours) * 1e6,
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[3 * len(ratios) // 4],
    }


def show(row: dict[str, Any]) -> None:
    """Print a timed row."""
    print(
        f"{row['case']:36s} torch {row['torch_us']:10.1f} us  ours {row['ours_us']:10.1f} us  "
        f"ratio {row['ratio']:5.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})",
        flush=True,
    )


def quiet() -> None:
    """Use one thread and print no warnings."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def main() -> None:
    """Run the three parts and print their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes and two meshes")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    shapes = [(2, 2), (2, 4)] if options.quick else [(2, 2), (2, 4), (8, 8), (2, 2, 2)]
    length, rounds, deadline = (256, 5, 45.0) if options.quick else (2048, 15, 200.0)
    print("torch: greedy planner, real all-to-all between shards as on GPUs; nothing flattened")
    print("MB received per rank, float32 [4096, 4096], summed over all pairs")
    rows = bytes_rows(shapes)
    print(f"host time per call, fake group, float32 [64, 64], {rounds} paired rounds")
    rows += host_rows(rounds, 20 if options.quick else 100)
    print(f"4 gloo ranks, {length * length * 4 / 2**20:g} MB, {rounds} paired rounds")
    rows += gloo_rows(length, rounds, deadline)
    if options.json:
        document = {"name": "redistribute", "rows": rows}
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
