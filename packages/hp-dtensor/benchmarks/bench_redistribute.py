"""Compare `redistribute` with torch's: time and bytes on 4 gloo ranks, host time on fake groups.

On CPU meshes torch replaces its shard-to-shard all-to-all by an all-gather. Here it is given the
all-to-all that it runs on GPUs (even sizes), so that both sides move what they would move there.
gloo times say something about copies, calls and bytes, nothing about GPUs. Both sides run in turn
in the same processes; a ratio is torch's time over ours, paired by repetition.
"""

import argparse
import itertools
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.placement_types as placement_types
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hp_dtensor import RecordingCollectives, explain, redistribute

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Placements = tuple[Placement, ...]
PAIRS: list[tuple[Placements, Placements]] = [
    ((S0,), (S1,)),
    ((S0,), (R,)),
    ((S1,), (R,)),
    ((P,), (S0,)),
    ((P,), (S1,)),
    ((S0, S1), (S1, S0)),
    ((S0, S0), (S1, S1)),
    ((S0, R), (R, S0)),
    ((R, S0), (S0, S0)),
    ((P, R), (R, S0)),
]


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


def local_of(placements: Placements, mesh: DeviceMesh, length: int) -> Tensor:
    """Return random values of a rank's local shape of a square tensor."""
    shape = [length, length]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] //= mesh.size(axis)
    return torch.randn(shape)


def wrapped(placements: Placements, mesh: DeviceMesh, length: int) -> DTensor:
    """Return them as a DTensor."""
    return DTensor.from_local(
        local_of(placements, mesh, length),
        mesh,
        placements,
        shape=(length, length),
        stride=(length, 1),
    )


def paired(
    torchs: Callable[[], Any], ours: Callable[[], Any], rounds: int
) -> tuple[list[float], list[float]]:
    """Time both sides in turn, after two rounds that do not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_number in range(rounds + 2):
        for side, call in enumerate((torchs, ours)):
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()
            if round_number >= 2:
                times[side].append(time.perf_counter() - start)
    return times


def gloo_rank(rank: int, store: str, length: int, rounds: int, results: Any) -> None:
    """Measure all pairs as one of 4 ranks; rank 0 reports."""
    quiet()
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    placement_types.shard_dim_alltoall = gpu_all_to_all
    meshes = {
        1: init_device_mesh("cpu", (4,), mesh_dim_names=("x",)),
        2: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")),
    }
    rows = []
    for source, target in PAIRS:
        mesh = meshes[len(source)]
        x = wrapped(source, mesh, length)
        door = RecordingCollectives()
        redistribute(x, target, collectives=door)
        with torch.no_grad():
            theirs, ours = paired(
                lambda x=x, target=target, mesh=mesh: x.redistribute(mesh, target),
                lambda x=x, target=target: redistribute(x, target),
                rounds,
            )
        rows.append(
            summary(f"{source} -> {target}", theirs, ours)
            | {
                "bytes_received": sum(t.bytes for t in door.by_axis.values()),
                "steps": [step.kind for step in explain(x, target).steps],
            }
        )
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def host_rows(rounds: int) -> list[dict[str, Any]]:
    """Time calls on fake groups of 8 ranks, which move nothing: what remains is host time."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    quiet()
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())

    def fake(x: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, axis: int) -> Tensor:
        return gpu_all_to_all(x, gather_dim, shard_dim, mesh, axis)

    placement_types.shard_dim_alltoall = fake
    meshes = {
        1: init_device_mesh("cpu", (8,), mesh_dim_names=("x",)),
        2: init_device_mesh("cpu", (4, 2), mesh_dim_names=("a", "b")),
    }
    rows = []
    pairs: list[tuple[Placements, Placements]] = [
        ((S0,), (S1,)), ((S0,), (R,)), ((R,), (S0,)), ((S0,), (S0,)),
        ((S0, S1), (S1, S0)), ((S0, R), (R, S0)), ((S0, S0), (S1, S1)),
    ]  # fmt: skip
    for source, target in pairs:
        mesh = meshes[len(source)]
        x = wrapped(source, mesh, 64)

        def many(call: Callable[[], Any]) -> float:
            start = time.perf_counter()
            for _ in range(50):
                call()
            return (time.perf_counter() - start) / 50

        theirs, ours = [], []
        with torch.no_grad():
            for round_number in range(rounds + 1):
                a = many(lambda x=x, target=target, mesh=mesh: x.redistribute(mesh, target))
                b = many(lambda x=x, target=target: redistribute(x, target))
                if round_number:
                    theirs.append(a)
                    ours.append(b)
        rows.append(summary(f"host {source} -> {target}", theirs, ours))
    dist.destroy_process_group()
    return rows


def summary(case: str, theirs: list[float], ours: list[float]) -> dict[str, Any]:
    """Return medians, and the paired ratio with its quartiles."""
    ratios = sorted(a / b for a, b in zip(theirs, ours, strict=True))
    return {
        "case": case,
        "torch_us": statistics.median(theirs) * 1e6,
        "ours_us": statistics.median(ours) * 1e6,
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[3 * len(ratios) // 4],
    }


def quiet() -> None:
    """Use one thread and print no warnings."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def main() -> None:
    """Run both parts and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    length, rounds = (64, 2) if options.quick else (2048, 11)
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(gloo_rank, (f"{folder}/store", length, rounds, results), nprocs=4)
        rows = results.get()
    print(f"4 gloo ranks, {length * length * 4 >> 20} MB, torch with its GPU all-to-all path")
    host = host_rows(rounds)
    for row in itertools.chain(rows, host):
        print(
            f"{row['case']:44s} torch {row['torch_us']:10.1f} us  ours {row['ours_us']:10.1f} us  "
            f"ratio {row['ratio']:5.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
        )
    if options.json:
        document = {"name": "redistribute", "rows": rows + host}
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
