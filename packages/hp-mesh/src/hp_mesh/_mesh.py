"""`ParallelMesh`: torch device meshes for every axis and alias of a configuration."""

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._errors import LayoutError, MeshError, ParallelDimsError, raise_errors
from ._groups import create_groups, tell_refusal
from ._layout import RankLayout, View
from ._topology import Topology, topology_violations
from ._torch import share_ranks

if TYPE_CHECKING:
    from ._dims import ParallelDims


class ParallelMesh:
    """Torch device meshes of all views over one set of process groups.

    ``mesh["tp"]`` is the one-axis mesh of an axis or alias, ``mesh["dp_replicate", "fsdp"]`` one of
    several axes of one view, outermost first. All are slices of full-world meshes, so FSDP, tensor
    parallel, DTensor and checkpoints accept and combine them. Looking up never communicates. Made
    by `ParallelDims.build_mesh`.
    """

    def __init__(
        self,
        dims: "ParallelDims",
        layout: RankLayout,
        views: Mapping[str, DeviceMesh],
        created: list[dist.ProcessGroup],
        topology: Topology | None = None,
    ) -> None:
        self.dims = dims
        self.topology = topology
        self.layout = layout
        self._views = dict(views)
        self._created = created
        self._meshes: dict[str | tuple[str, ...], DeviceMesh] = {}
        self._closed = False

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of one axis or alias, or of several axes of one view."""
        mesh = self._meshes.get(names)
        if mesh is None:
            mesh = self._meshes[names] = self._slice((names,) if isinstance(names, str) else names)
        return mesh

    def _slice(self, names: tuple[str, ...]) -> DeviceMesh:
        view, axes = self.layout.find(*names)
        if list(axes) != [axis for axis in view.axes if axis in axes]:
            raise LayoutError(
                f"axes {list(names)} given; the {view.name} view has them as "
                f"{[axis for axis in view.axes if axis in axes]}"
            )
        full = self.view(view.name)
        mesh = full[axes]
        share_ranks(mesh, full)
        return mesh

    @property
    def names(self) -> tuple[str, ...]:
        """Return every axis and alias that can be looked up."""
        return self.layout.names

    @property
    def device_type(self) -> str:
        """Return the device type of all meshes."""
        return self.view("base").device_type

    def view(self, name: str) -> DeviceMesh:
        """Return the full-world mesh of one view, such as ``"base"`` or ``"sparse"``."""
        if self._closed:
            raise MeshError("this mesh is closed; build another")
        if name not in self._views:
            raise LayoutError(f"no view {name!r}; use one of {list(self._views)}")
        return self._views[name]

    def crosses_nodes(self, name: str) -> bool:
        """Return whether groups of an axis or alias have ranks of several nodes.

        Raises `MeshError` where the mesh was built without a topology.
        """
        if self.topology is None:
            raise MeshError("this mesh knows no nodes; build it with topology=Topology(...)")
        return self.layout.crosses_nodes(name, self.topology.ranks_per_node)

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of one axis or alias."""
        return self[name].get_group()

    def close(self) -> None:
        """Destroy the groups that the build created, not the default one; may be called again.

        Collective. DTensor caches what it knows of a mesh by its ranks and names, groups and all:
        in one process, use no DTensor over an equal mesh that is built after closing this one.
        """
        self._closed = True
        self._meshes.clear()
        self._views.clear()
        while self._created:
            dist.destroy_process_group(self._created.pop())


def build_mesh(
    dims: "ParallelDims",
    device_type: str | None,
    topology: Topology | None,
    timeout: timedelta | None,
) -> ParallelMesh:
    """Create the groups and views of ``dims``; see `ParallelDims.build_mesh`."""
    if not dist.is_initialized():
        raise MeshError("no default process group; call torch.distributed.init_process_group first")
    device_type = device_type or default_device_type()
    try:
        dims = dims.resolve(dist.get_world_size())
        layout = dims.layout()
        if topology is not None:
            raise_errors(topology_violations(layout, topology))
    except ParallelDimsError as error:
        tell_refusal(device_type, str(error))
        raise
    agreed = f"{dims.to_dict()} on {device_type}"
    groups, created = create_groups(layout, dist.get_rank(), device_type, timeout, agreed)
    views: dict[str, DeviceMesh] = {}
    for name, view in layout.views.items():
        ranks = _rank_tensor(view)
        views[name] = DeviceMesh.from_group(
            [groups[axis] for axis in view.axes],
            device_type,
            mesh=ranks,
            mesh_dim_names=view.axes,
        )
        share_ranks(views[name], views["dense"])
    return ParallelMesh(dims, layout, views, created, topology)


def _rank_tensor(view: View) -> torch.Tensor:
    if view.in_rank_order:
        ranks = torch.arange(len(view.ranks()), dtype=torch.int, device="cpu")
    else:
        ranks = torch.tensor(view.ranks(), dtype=torch.int, device="cpu")
    return ranks.view(view.shape)


def default_device_type() -> str:
    """Return the accelerator's type, or that of the CPU where the world runs on gloo alone."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or dist.get_backend() == "gloo":
        return "cpu"
    return accelerator.type
