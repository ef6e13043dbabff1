"""Show what torch does where this package does otherwise, case by case, on 4 local gloo ranks.

    python packages/hp-dtensor/benchmarks/show_torch.py

Both sides run in the same processes, with the installed torch. "Right" means that every rank holds
the chunk of the whole tensor that ``torch.chunk`` gives it. torch plans by default; where bytes are
counted, the sum of what all ranks receive from others, it is given its all-to-all of GPUs between
shards: on CPU meshes it would gather and cut. Exits with 1 where this package is not right.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
import torch.distributed.tensor.placement_types as placement_types
import torch.multiprocessing as mp
from bench_bytes import Counter
from bench_redistribute import gpu_all_to_all
from placed import S0, S1, Placements, R, make_mesh, named, quiet
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import hp_dtensor as hp

RANKS = 4
LATE = 0.5  # seconds by which the other ranks come late to a collective
SIZES = (1, 1, 2, 4)  # rows of the ranks in unequal runs
BLOCKS = placement_types._StridedShard(0, split_factor=2)
Side = Callable[[], str]
Case = tuple[str, Side, Side]  # what is asked, torch's side, ours


class Runs(Shard):
    """What one would try for runs of unequal lengths: a placement of one's own."""


def cases() -> Iterator[Case]:
    """Go through all cases."""
    line, square = make_mesh((RANKS,)), make_mesh((2, 2))
    reverse = DeviceMesh("cpu", torch.tensor([3, 2, 1, 0]), mesh_dim_names=("d",))
    yield between(line, (S0,), reverse, (S0,))
    yield between(line, (S0,), reverse, (S1,))
    yield between(line, (S0,), square, (S0, S1))
    for source, target in (((S0, S1), (S1, S0)), ((S0, S0), (S1, S1)), ((S0, R), (R, S0))):
        yield received(square, source, target)
    yield received(line, (S0,), (S1,))
    yield strided(square, 3, [BLOCKS, BLOCKS], "blocks of blocks")
    yield strided(square, 8, [BLOCKS, BLOCKS], "blocks of blocks")
    yield strided(square, 15, [BLOCKS, S0], "FSDP over tensor parallelism")
    yield refused(square, (S0,))
    yield refused(square, (Shard(7), R))
    yield started(line, (S0,))
    yield started(line, (S1,))
    yield added(line)
    name = "distribute_module of two layers that share a weight"
    yield name, lambda: tied(dt.distribute_module, line), lambda: tied(hp.distribute_module, line)


def judged(found: Tensor, wanted: Tensor) -> str:
    """Return whether a rank holds what it should."""
    return "right" if torch.equal(found, wanted) else f"WRONG, without an error: {found.tolist()}"


def landed(x: DTensor, full: Tensor, mesh: DeviceMesh, placements: Placements) -> str:
    """Judge a result by its mesh and this rank's part."""
    if x.device_mesh != mesh:
        return f"WRONG, without an error: still on ranks {x.device_mesh.mesh.tolist()}"
    return judged(x.to_local(), chunk_of(full, mesh, placements))


def chunk_of(full: Tensor, mesh: DeviceMesh, placements: Sequence[dt.Placement]) -> Tensor:
    """Return this rank's part of ``full``."""
    for axis, place in enumerate(mesh.get_coordinate() or []):
        placement = placements[axis]
        if isinstance(placement, Shard):
            full = full.chunk(mesh.size(axis), placement.dim)[place]
    return full.contiguous()


def matrix(mesh: DeviceMesh, placements: Placements) -> tuple[Tensor, DTensor]:
    """Return a whole matrix, and the same made of every rank's part, without communication."""
    full = torch.arange(32.0).view(8, 4)
    part = chunk_of(full, mesh, placements)
    return full, DTensor.from_local(part, mesh, placements, shape=full.shape, stride=(4, 1))


def between(old: DeviceMesh, source: Placements, mesh: DeviceMesh, target: Placements) -> Case:
    """Go to another mesh."""
    full, x = matrix(old, source)
    return (
        f"{named(source)} on {old.mesh.tolist()} -> {named(target)} on {mesh.mesh.tolist()}",
        lambda: landed(x.redistribute(mesh, target), full, mesh, target),
        lambda: landed(hp.redistribute(x, target, mesh=mesh), full, mesh, target),  # type: ignore[arg-type]
    )


def received(mesh: DeviceMesh, source: Placements, target: Placements) -> Case:
    """Count the bytes of a redistribution."""
    full, x = matrix(mesh, source)

    def described(y: DTensor, count: float) -> str:
        total = torch.tensor(count)
        dist.all_reduce(total)
        return f"{landed(y, full, mesh, target)}, {int(total)} bytes"

    def theirs() -> str:
        counter = Counter(mesh)

        def exchange(x: Tensor, gather: int, shard: int, mesh: DeviceMesh, axis: int) -> Tensor:
            counter.bytes += x.nbytes * (mesh.size(axis) - 1) // mesh.size(axis)
            return gpu_all_to_all(x, gather, shard, mesh, axis)

        placement_types.shard_dim_alltoall = exchange
        with counter:
            y = x.redistribute(mesh, target)
        return described(y, counter.bytes)

    def ours() -> str:
        door = hp.RecordingCollectives()
        y = hp.redistribute(x, target, collectives=door)
        return described(y, sum(traffic.bytes for traffic in door.by_axis.values()))

    return f"{named(source)} -> {named(target)} of 128 bytes on {mesh.mesh.tolist()}", theirs, ours


def strided(mesh: DeviceMesh, rows: int, placements: list[dt.Placement], kind: str) -> Case:
    """Put together what torch itself has cut."""
    whole = torch.arange(float(rows))
    x = dt.distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return (
        f"{rows} rows in strided shards, {kind} -> whole",
        lambda: judged(x.full_tensor(), whole),
        lambda: judged(hp.redistribute(x).to_local(), whole),
    )


def refused(mesh: DeviceMesh, placements: Placements) -> Case:
    """Ask for what cannot be."""
    _, x = matrix(mesh, (S0, R))
    return (
        f"placements {placements} for a matrix on a mesh of two axes",
        lambda: str(x.redistribute(mesh, placements)),
        lambda: str(hp.redistribute(x, placements)),
    )


def started(mesh: DeviceMesh, source: Placements) -> Case:
    """See whether a rank can go on while the others have not come to the collective yet."""
    full, x = matrix(mesh, source)

    def timed(call: Callable[[], Any]) -> str:
        dist.barrier()
        begin = time.perf_counter()
        time.sleep(LATE if dist.get_rank() else 0)
        result = call()
        waited = not dist.get_rank() and time.perf_counter() - begin > LATE / 2
        y = result if isinstance(result, Tensor) else result.wait()
        return landed(y, full, mesh, (R,)) + (", but blocks until the others come" * waited)

    return (
        f"{named(source)} -> (R) with async_op=True",
        lambda: timed(lambda: x.redistribute(mesh, [R], async_op=True)),
        lambda: timed(lambda: hp.redistribute(x, [R], async_op=True)),
    )


def added(mesh: DeviceMesh) -> Case:
    """Compute with rows in unequal runs."""
    full = torch.arange(32.0).view(8, 4)
    part = full.split(SIZES)[dist.get_rank()]

    def theirs() -> str:
        y = DTensor.from_local(part, mesh, [Runs(0)], shape=full.shape, stride=(4, 1)) + 1
        if isinstance(y.placements[0], Runs):
            return "right"
        return f"WRONG, without an error: {len(part)} rows are a plain {y.placements[0]} of 8"

    def ours() -> str:
        runs = hp.RaggedShard((0,), SIZES)
        y = hp.RaggedTensor.from_local(part, mesh, [runs], shape=full.shape) + 1
        return judged(y.full_tensor(), full + 1)  # type: ignore[attr-defined]

    return (
        f"x + 1 for {SIZES} rows on the ranks; torch: as a subclass of Shard",
        theirs,
        ours,
    )


def tied(distribute: Callable[[nn.Module, DeviceMesh], object], mesh: DeviceMesh) -> str:
    """Distribute a module whose two layers share a weight."""
    pair = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
    pair[1].weight = pair[0].weight
    distribute(pair, mesh)
    return "right" if pair[0].weight is pair[1].weight else "WRONG, without an error: two weights"


def outcome(side: Side) -> str:
    """Return what a side says, or what it raises."""
    try:
        return side()
    except hp.LayoutError as error:
        return f"right to refuse, {type(error).__name__}: {error}"
    except (IndexError, NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def merit(text: str) -> tuple[bool, bool]:
    """Order outcomes from wrong to right."""
    return text.startswith("right"), text == "right"


def run_rank(rank: int, store: str) -> None:
    """Go through the cases as one rank; rank 0 prints what is least right on some rank."""
    quiet()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    failed = False
    with torch.no_grad():
        for name, *sides in cases():
            seen: list[Any] = [None] * RANKS
            dist.all_gather_object(seen, [outcome(side) for side in sides])
            worst = [min(each, key=merit) for each in zip(*seen, strict=True)]
            failed |= not worst[1].startswith("right")
            if rank == 0:
                print(f"\n{name}\n  torch: {worst[0]}\n  here:  {worst[1]}", flush=True)
    dist.barrier()
    # Meshes still hold groups: leave without running destructors.
    os._exit(failed)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {RANKS} gloo ranks")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (f"{folder}/store",), nprocs=RANKS)
