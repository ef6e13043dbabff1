"""Show the cases in which torch and this package give different results, on 4 local gloo ranks.

    python packages/hp-dtensor/benchmarks/show_torch.py

Both sides run in the same processes, with the installed torch. "Right" means that every rank holds
the chunk of the whole tensor that ``torch.chunk`` gives it. torch uses its default planner. Some
cases count the bytes that all ranks receive from other ranks. In these cases torch gets the
all-to-all between shards that it runs on GPUs, because on CPU meshes it gathers and slices. The
exit status is 1 if this package is wrong in any case.
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
LATE = 0.5  # seconds by which ranks 1 to 3 start a collective later than rank 0
SIZES = (1, 1, 2, 4)  # number of rows of each rank in an unequal split
BLOCKS = placement_types._StridedShard(0, split_factor=2)
Side = Callable[[], str]
Case = tuple[str, Side, Side]  # description, torch's call, our call


class Runs(Shard):
    """A user's first attempt at shards of unequal lengths: a subclass of `Shard`."""


def cases() -> Iterator[Case]:
    """Yield all cases."""
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
    """Compare the values of a rank with the expected values."""
    return "right" if torch.equal(found, wanted) else f"WRONG, without an error: {found.tolist()}"


def landed(x: DTensor, full: Tensor, mesh: DeviceMesh, placements: Placements) -> str:
    """Compare the mesh and this rank's part of a result with the expected ones."""
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
    """Return a matrix, and the same matrix as a DTensor, without communication."""
    full = torch.arange(32.0).view(8, 4)
    part = chunk_of(full, mesh, placements)
    return full, DTensor.from_local(part, mesh, placements, shape=full.shape, stride=(4, 1))


def between(old: DeviceMesh, source: Placements, mesh: DeviceMesh, target: Placements) -> Case:
    """Redistribute a matrix to another mesh."""
    full, x = matrix(old, source)
    return (
        f"{named(source)} on {old.mesh.tolist()} -> {named(target)} on {mesh.mesh.tolist()}",
        lambda: landed(x.redistribute(mesh, target), full, mesh, target),
        lambda: landed(hp.redistribute(x, target, mesh=mesh), full, mesh, target),  # type: ignore[arg-type]
    )


def received(mesh: DeviceMesh, source: Placements, target: Placements) -> Case:
    """Count the received bytes of a redistribution."""
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
    """Gather a tensor that torch has split into strided shards."""
    whole = torch.arange(float(rows))
    x = dt.distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return (
        f"{rows} rows in strided shards, {kind} -> whole",
        lambda: judged(x.full_tensor(), whole),
        lambda: judged(hp.redistribute(x).to_local(), whole),
    )


def refused(mesh: DeviceMesh, placements: Placements) -> Case:
    """Redistribute to placements that are impossible."""
    _, x = matrix(mesh, (S0, R))
    return (
        f"placements {placements} for a matrix on a mesh of two axes",
        lambda: str(x.redistribute(mesh, placements)),
        lambda: str(hp.redistribute(x, placements)),
    )


def started(mesh: DeviceMesh, source: Placements) -> Case:
    """Check whether a rank continues before the other ranks start the collective."""
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
    """Add 1 to a matrix that is split into unequal numbers of rows."""
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
    """Distribute a module of two layers that share a weight."""
    pair = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
    pair[1].weight = pair[0].weight
    distribute(pair, mesh)
    return "right" if pair[0].weight is pair[1].weight else "WRONG, without an error: two weights"


def outcome(side: Side) -> str:
    """Return the text of a call, or the name and text of its error."""
    try:
        return side()
    except hp.LayoutError as error:
        return f"right to refuse, {type(error).__name__}: {error}"
    except (IndexError, NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def merit(text: str) -> tuple[bool, bool]:
    """Return a sort key: wrong results first, right ones last."""
    return text.startswith("right"), text == "right"


def run_rank(rank: int, store: str) -> None:
    """Run all cases as one rank. Rank 0 prints the worst result of all ranks for each case."""
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
    # Meshes still refer to process groups. Leave without running destructors.
    os._exit(failed)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {RANKS} gloo ranks")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (f"{folder}/store",), nprocs=RANKS)
