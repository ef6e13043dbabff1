"""Names of torch that are not public, touched here and nowhere else (torch 2.11 to 2.13)."""

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh


def splits_world(world: dist.ProcessGroup) -> bool:
    """Return whether subgroups must be split off the world's communicator by all ranks together.

    ``ProcessGroup.bound_device_id`` is set when NCCL was initialised eagerly (``device_id=`` of
    ``init_process_group``); ``torch.distributed.config.use_torchcomms`` (2.13) asks for the same.
    A public predicate does not exist; `torch.distributed.split_group` raises where it cannot work.
    """
    config = getattr(dist, "config", None)
    return world.bound_device_id is not None or bool(getattr(config, "use_torchcomms", False))


def registered_groups() -> int:
    """Return how many process groups this rank is in.

    ``new_group(use_local_synchronization=True)`` hashes ``len(_world.pg_names)`` into the name
    under which members meet, so members that count differently wait for each other for ever. A
    public replacement would be a name that the caller gives.
    """
    return len(distributed_c10d._world.pg_names)


def share_ranks(mesh: DeviceMesh, other: DeviceMesh) -> None:
    """Let ``mesh`` hold the tuple of ranks of ``other`` where its own is an equal copy.

    Each mesh and submesh has ``_flatten_rank_map`` (2.11 to 2.13), a tuple as long as the world,
    which is 4.7 MB at 131,072 ranks. Nothing public replaces it; without it only memory is lost.
    """
    ranks = getattr(other, "_flatten_rank_map", None)
    if ranks is not None and ranks == getattr(mesh, "_flatten_rank_map", None):
        mesh._flatten_rank_map = ranks


def flatten(mesh: DeviceMesh, name: str | None) -> DeviceMesh:
    """Return all axes of a mesh folded into one, which is a slice of the same mesh as ``mesh`` is.

    ``DeviceMesh._flatten`` (2.11 to 2.13). Publicly only ``DeviceMesh.from_group`` makes a mesh of
    ranks that are there, and that one is a slice of nothing.
    """
    return mesh._flatten(name)
