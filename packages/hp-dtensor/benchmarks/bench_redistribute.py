"""Compare `redistribute` with torch's: time on 4 gloo ranks, and host time per call.

On CPU meshes, torch replaces its shard-to-shard all-to-all by an all-gather. This benchmark gives
torch the all-to-all that it runs on GPUs (for even sizes). torch's planner is the default one,
which is greedy. Neither side has a flattened mesh. torch cannot move a tensor to another mesh, so
the peer there is the code that a user would write: gather the tensor, and wrap each rank's slice on
the other mesh.

Times on gloo compare copies, calls and bytes. They say nothing about GPUs. Host times are calls on
fake groups, which move no data. Their floor is the bare collective: one call on the process group
with buffers that exist already, without packing, planning or a DTensor. The sides run in turn in
the same processes. A ratio is the median over rounds, with quartiles, of two times of one round.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.placement_types as placement_types
import torch.multiprocessing as mp
from placed import S0, S1, P, Placements, R, fake_world, make_mesh, named, quiet, wrapped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hp_dtensor import RecordingCollectives, explain, redistribute

GLOO_PAIRS: list[tuple[Placements, Placements]] = [
    ((S0,), (S1,)),
    ((S0,), (R,)),
    ((S0, S1), (S1, S0)),
    ((S0, S0), (S1, S1)),
    ((S0, R), (R, S0)),
    ((P,), (S1,)),
]
# From a 2 x 2 mesh to a mesh of 4 ranks in the given order.
MESH_PAIRS: list[tuple[Placements, Placements, list[int]]] = [
    ((S0, S1), (S0,), [0, 1, 2, 3]),
    ((S0, R), (S1,), [3, 1, 2, 0]),
]
# The last entry is the bare collective of the change. It is empty if the change needs none.
HOST_PAIRS: list[tuple[str, Placements, Placements, str]] = [
    ("one axis", (S0,), (R,), "all-gather"),
    ("one axis", (R,), (S0,), ""),
    ("one axis", (S0,), (S1,), "all-to-all"),
    ("one axis", (P,), (R,), "all-reduce"),
    ("one axis", (P,), (S0,), "reduce-scatter"),
    ("several axes", (S0, S0), (R, R), "all-gather"),
    ("several axes", (S0, S1), (R, R), "all-gather"),
    ("several axes", (S0, S1), (S1, S0), "all-to-all"),
    ("several axes", (S0, R), (R, S0), "all-to-all"),
    ("several axes", (S0, S0), (S1, S1), "all-to-all"),
    ("several axes", (P, P), (R, R), "all-reduce"),
    ("several axes", (P, P), (S0, S0), "reduce-scatter"),
    ("no-op", (S0,), (S0,), ""),
    ("no-op", (S0, S1), (S0, S1), ""),
]
HOST_LENGTH = 64  # side of the square tensor of the host times


def gpu_all_to_all(
    x: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, axis: int
) -> Tensor:
    """Run torch's shard-to-shard step of GPUs: chunk, all-to-all, concatenate."""
    n = mesh.size(axis)
    packed = torch.cat([part.contiguous().flatten() for part in x.chunk(n, dim=shard_dim)])
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed, group=mesh.get_group(axis))
    shape = list(x.shape)
    shape[shard_dim] //= n
    return torch.cat(list(received.view([n, *shape]).unbind(0)), dim=gather_dim)


def gloo_rank(rank: int, store: str, length: int, rounds: int, results: Connection) -> None:
    """Measure all pairs as one of 4 ranks. Rank 0 sends the rows."""
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
    for source, target, order in MESH_PAIRS:
        row = between(wrapped(source, meshes[2], length), source, target, order, rounds)
        if rank == 0:
            results.send(row)
    dist.barrier()
    # Meshes still refer to process groups. Leave without running destructors.
    results.close()
    os._exit(0)


def between(
    x: DTensor, source: Placements, target: Placements, order: list[int], rounds: int
) -> dict[str, Any]:
    """Measure a move to a mesh with another order of ranks. torch gathers the whole tensor."""
    other = DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=("d",))
    place = order.index(dist.get_rank())

    def by_hand() -> DTensor:
        part = x.full_tensor().chunk(len(order), target[0].dim)[place].contiguous()
        return DTensor.from_local(part, other, target, shape=x.shape, stride=x.stride())

    door = RecordingCollectives()
    with torch.no_grad():
        ours = redistribute(x, target, mesh=other, collectives=door)
        torch.testing.assert_close(ours.to_local(), by_hand().to_local(), rtol=0, atol=0)
        times = paired(by_hand, partial(redistribute, x, target, mesh=other), rounds)
    case = f"2x2 {named(source)} -> ranks {order} {named(target)}"
    row = summary("between meshes", case, *times)
    row["bytes_received"] = sum(t.bytes for t in door.by_axis.values())
    row["steps"] = [step.kind for step in explain(x, target, mesh=other).steps]
    return row


def paired(
    theirs: Callable[[], Any], ours: Callable[[], Any], rounds: int
) -> tuple[list[float], list[float]]:
    """Time both sides in turn until the slowest rank ends. Two rounds before that warm up."""
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
    """Run 4 ranks for at most ``deadline`` seconds, and return the rows of rank 0."""
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
            while len(rows) < len(GLOO_PAIRS) + len(MESH_PAIRS):
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
    """Time calls on fake groups of 8 ranks, so that only host time remains."""
    fake_world(8)
    placement_types.shard_dim_alltoall = gpu_all_to_all
    meshes = {1: make_mesh((8,)), 2: make_mesh((4, 2))}
    rows = []

    def many(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    for kind, source, target, collective in HOST_PAIRS:
        mesh = meshes[len(source)]
        x = wrapped(source, mesh, HOST_LENGTH)
        sides: dict[str, Callable[[], Any]] = {
            "torch": partial(x.redistribute, mesh, target),
            "ours": partial(redistribute, x, target),
        }
        if collective:
            sides["bare"] = bare_collective(collective, x.to_local())
        times: dict[str, list[float]] = {side: [] for side in sides}
        with torch.no_grad():
            for round_number in range(rounds + 1):
                for side, call in sides.items():
                    seconds = many(call)
                    if round_number:  # the first round warms up
                        times[side].append(seconds)
        case = f"{kind}: {named(source)} -> {named(target)}"
        rows.append(summary("host", case, times["torch"], times["ours"], times.get("bare")))
        show(rows[-1])
    dist.destroy_process_group()
    return rows


def bare_collective(name: str, local: Tensor) -> Callable[[], Any]:
    """Return a call of one collective on the world's process group, with buffers that exist."""
    group: Any = dist.group.WORLD
    gather = getattr(group, "all_gather_single", None) or group._allgather_base
    scatter = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
    flat, size = local.flatten(), dist.get_world_size()
    calls: dict[str, Callable[[], Any]] = {
        "all-gather": partial(gather, flat.new_empty(flat.numel() * size), flat),
        "all-reduce": partial(group.allreduce, [flat]),
        "all-to-all": partial(group.alltoall_base, torch.empty_like(flat), flat, [], []),
        "reduce-scatter": partial(scatter, flat.new_empty(flat.numel() // size), flat),
    }
    start = calls[name]
    return lambda: start().wait()


def summary(
    part: str,
    case: str,
    theirs: list[float],
    ours: list[float],
    bare: list[float] | None = None,
) -> dict[str, Any]:
    """Return medians in microseconds, and ratios paired by round with their quartiles."""
    row: dict[str, Any] = {
        "part": part,
        "case": case,
        "torch_us": statistics.median(theirs) * 1e6,
        "ours_us": statistics.median(ours) * 1e6,
        **quartiles("ratio", theirs, ours),
    }
    if bare is not None:
        row["bare_us"] = statistics.median(bare) * 1e6
        row |= quartiles("over_bare", ours, bare)
    return row


def quartiles(name: str, above: list[float], below: list[float]) -> dict[str, float]:
    """Return the median of the ratios of two sides, and their quartiles as ``_low``, ``_high``."""
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    return {
        name: statistics.median(ratios),
        f"{name}_low": ratios[len(ratios) // 4],
        f"{name}_high": ratios[3 * len(ratios) // 4],
    }


def show(row: dict[str, Any]) -> None:
    """Print a timed row."""
    spread = f"({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
    text = (
        f"{row['case']:36s} torch {row['torch_us']:10.1f} us  ours {row['ours_us']:10.1f} us  "
        f"torch/ours {row['ratio']:5.2f} {spread}"
    )
    if "bare_us" in row:
        text += f"  bare {row['bare_us']:6.1f} us  ours/bare {row['over_bare']:5.2f}"
    print(text, flush=True)


def main() -> None:
    """Run both parts and print their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    length, rounds, deadline = (256, 5, 45.0) if options.quick else (2048, 15, 200.0)
    print("torch: greedy planner, real all-to-all between shards as on GPUs; nothing flattened")
    size = f"[{HOST_LENGTH}, {HOST_LENGTH}]"
    print(f"host time per call, fake group, float32 {size}, {rounds} paired rounds")
    rows = host_rows(rounds, 20 if options.quick else 100)
    print(f"4 gloo ranks, {length * length * 4 / 2**20:g} MB, {rounds} paired rounds")
    rows += gloo_rows(length, rounds, deadline)
    if options.json:
        document = {"name": "redistribute", "rows": rows}
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
