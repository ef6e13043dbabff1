"""Meshes that several test modules use."""

import torch.distributed as dist
from rank_pool import cached
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor import Axis


def world_axis() -> Axis:
    """Return the axis of a mesh over all ranks, created once per process."""
    mesh: DeviceMesh = cached(
        "mesh of the world",
        lambda: init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("w",)),
    )
    return Axis.of(mesh)
