"""Shared by the benchmarks: placements, meshes of fake or real ranks, one plan, quiet output."""

import logging
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hp_dtensor import Layout, explain
from hp_dtensor import Partial as OurPartial
from hp_dtensor import Replicate as OurReplicate
from hp_dtensor import Shard as OurShard
from hp_dtensor.testing import clear_caches

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Placements = tuple[Placement, ...]
OURS = {R: OurReplicate(), S0: OurShard(0), S1: OurShard(1), P: OurPartial()}
NAMES = {R: "R", S0: "S0", S1: "S1", P: "P"}


def named(placements: Placements) -> str:
    """Return placements as a short text, such as ``(S0,R)``."""
    return "(" + ",".join(NAMES[p] for p in placements) + ")"


def make_mesh(shape: Sequence[int]) -> DeviceMesh:
    """Return a CPU mesh of the whole world."""
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple("abc"[: len(shape)]))


def wrapped(placements: Placements, mesh: DeviceMesh, length: int) -> DTensor:
    """Return a square tensor of random values. Ranks differ along partial axes only."""
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
    """Join a fake world as rank 1. Its collectives move no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    quiet()
    dist.init_process_group("fake", rank=1, world_size=size, store=FakeStore())


def quiet() -> None:
    """Use one thread, and hide warnings."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def five_axes_row(rounds: int) -> dict[str, Any]:
    """Time one plan over five axes of two ranks, with empty caches: the worst case of a search."""
    mesh = (2,) * 5
    source = Layout(mesh, tuple(OURS[p] for p in (P, S0, S1, R, S0)))
    target = Layout(mesh, tuple(OURS[p] for p in (R, S1, S0, S0, R)))
    times = []
    for _ in range(rounds):
        clear_caches()
        start = time.perf_counter()
        explain(source, target, shape=(4096, 4096), rank=1)
        times.append(time.perf_counter() - start)
    median = statistics.median(times) * 1e6
    return {"part": "plans", "case": "plan for 5 axes, cold", "ranks": 32, "plan_us": median}
