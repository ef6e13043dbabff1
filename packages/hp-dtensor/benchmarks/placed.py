"""What the benchmarks share: placements, meshes of fake or real ranks, and quiet output."""

import logging
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from hp_dtensor import Partial as OurPartial
from hp_dtensor import Replicate as OurReplicate
from hp_dtensor import Shard as OurShard

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Placements = tuple[Placement, ...]
OURS = {R: OurReplicate(), S0: OurShard(0), S1: OurShard(1), P: OurPartial()}
NAMES = {R: "R", S0: "S0", S1: "S1", P: "P"}


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


def quiet() -> None:
    """Use one thread and print no warnings."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
