"""`ParallelMesh`: torch device meshes for every axis and alias of a configuration."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._errors import LayoutError, MeshError, ParallelDimsError, join_words, raise_errors
from ._groups import (
    all_or_none,
    check_consistency,
    checked_device_type,
    create_groups,
    destroy_groups,
    tell_refusal,
)
from ._layout import RankLayout, View
from ._topology import Topology, topology_violations
from ._torch import know_fold, share_ranks

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
        self._sharing: set[str] = set()
        self._closed = False

    def __repr__(self) -> str:
        """Return the axes that multiply to the world, outermost first, and their sizes."""
        view = self.layout.views["base"]
        axes = ", ".join(f"{axis}={size}" for axis, size in zip(view.axes, view.shape, strict=True))
        where = "closed" if self._closed else f"on {self.device_type}"
        return f"ParallelMesh({axes}; {self.layout.world_size} ranks, {where})"

    def __getitem__(self, names: str | Sequence[str]) -> DeviceMesh:
        """Return the mesh of one axis or alias, or of several axes of one view.

        Its axes are named as in the view, whatever alias was given; but ``mesh["batch"]``, which
        data loaders ask for by that name, has the one axis ``"batch"``.

        Raises:
            LayoutError: A name is none, or no view has all of them.
            MeshError: The mesh is closed.
        """
        key = names if isinstance(names, str) else _as_names(names)
        mesh = self._meshes.get(key)
        if mesh is None:
            mesh = self._meshes[key] = self._slice((key,) if isinstance(key, str) else key)
        return mesh

    def get_optional_mesh(self, names: str | Sequence[str]) -> DeviceMesh | None:
        """Return the mesh that ``mesh[names]`` is, or None if one of its axes has one rank.

        For code that leaves a kind of parallelism out where its axis has one rank; ``mesh[names]``
        resolves then too.

        Raises:
            LayoutError: A name is none, or no view has all of them.
            MeshError: The mesh is closed.
        """
        mesh = self[names]
        return None if 1 in mesh.shape else mesh

    def _slice(self, names: tuple[str, ...]) -> DeviceMesh:
        view, axes = self.layout.find(*names)
        if list(axes) != [axis for axis in view.axes if axis in axes]:
            raise LayoutError(
                f"axes {list(names)} given; the {view.name} view has them as "
                f"{[axis for axis in view.axes if axis in axes]}"
            )
        full = self._view(view.name)
        if len(axes) > 1:
            self._share_folds(view.name)
        if names == ("batch",):
            full, axes = _renamed(full, axes[0], "batch"), names
        mesh = full[axes]
        share_ranks(mesh, full)
        return mesh

    def _share_folds(self, name: str) -> None:
        """Let the mesh of a view know the groups that fold several of its axes, of other views."""
        if name in self._sharing:
            return
        own, full = self.layout.views[name], self._view(name)
        place = full.get_coordinate()
        others = dict.fromkeys(a for view in self.layout.views.values() for a in view.axes)
        for axis in (a for a in others if a not in own.axes and self.layout.size(a) > 1):
            ranks = dist.get_process_group_ranks(self[axis].get_group())
            if place is not None and _folds(full, place, ranks):
                know_fold(full, self[axis])
        self._sharing.add(name)  # an interrupted call begins anew

    @property
    def names(self) -> tuple[str, ...]:
        """Return every axis and alias that can be looked up."""
        return self.layout.names

    @property
    def device_type(self) -> str:
        """Return the device type of all meshes."""
        return self._view("base").device_type

    def view(self, name: str) -> DeviceMesh:
        """Return the full-world mesh of one view, such as ``"base"`` or ``"sparse"``."""
        full = self._view(name)
        self._share_folds(name)
        return full

    def _view(self, name: str) -> DeviceMesh:
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
        if not isinstance(name, str):
            raise LayoutError(
                f"group({name!r}) is not of one axis; give one name, such as that of an alias "
                f"that folds several: {join_words(self.names)}"
            )
        return self[name].get_group()

    def __deepcopy__(self, memo: dict[int, object]) -> "ParallelMesh":
        """Return a mesh over the same groups, which this one closes, not the copy.

        Modules that hold a mesh can be copied; nothing is communicated and no group is created.
        """
        memo[id(self)] = copy = ParallelMesh(self.dims, self.layout, self._views, [], self.topology)
        copy._closed = self._closed
        return copy

    def close(self) -> None:
        """Destroy the groups that the build created; may be called again.

        Groups that this mesh only uses stay: the default one, which is the group of an axis over
        the whole world, and those of other meshes, also of equal ones. Groups that are gone
        already, as after the default one was destroyed, are left alone. Meshes that were taken from
        this one, and what is sharded over them, cannot communicate afterwards.

        Every rank calls it, after its last collective over these groups. DTensor caches what it
        knows of a mesh by its ranks and names, groups and all: in one process, use no DTensor over
        an equal mesh that is built after closing this one.
        """
        self._closed = True
        self._meshes.clear()
        self._views.clear()
        destroy_groups(self._created)

    def __enter__(self) -> Self:
        """Return this mesh, which the end of the block closes; see `close`.

        Where blocks of one mesh are nested, the inner one closes it. Meshes that are built inside
        the block have groups of their own, and are closed on their own.

        Raises:
            MeshError: The mesh is closed.
        """
        if self._closed:
            raise MeshError("this mesh is closed; build another")
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the mesh, also where the block raises."""
        self.close()


def build_mesh(
    dims: "ParallelDims",
    device_type: str | None,
    topology: Topology | None,
    timeout: timedelta | None,
) -> ParallelMesh:
    """Create the groups and views of ``dims``; see `ParallelDims.build_mesh`."""
    if not dist.is_initialized():
        raise MeshError("no default process group; call torch.distributed.init_process_group first")
    try:
        device_type = checked_device_type(device_type)
        _check_kinds(topology, timeout)
        dims = dims.resolve(dist.get_world_size())
        layout = dims.layout()
        if topology is not None:
            raise_errors(topology_violations(layout, topology))
    except (MeshError, ParallelDimsError):
        tell_refusal()
        raise
    fields = dims.to_dict() | {"device_type": device_type, "topology": topology}
    consistency = check_consistency(fields, layout)
    created: list[dist.ProcessGroup] = []
    with all_or_none(created):
        groups = create_groups(layout, timeout, consistency, created)
        return ParallelMesh(dims, layout, _views(layout, groups, device_type), created, topology)


def _views(
    layout: RankLayout, groups: Mapping[str, dist.ProcessGroup], device_type: str
) -> dict[str, DeviceMesh]:
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
    return views


def _folds(full: DeviceMesh, place: Sequence[int], ranks: list[int]) -> bool:
    """Return whether these are the ranks along several axes of a mesh, from one position on."""
    shape = tuple(full.shape)
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    for count in range(2, len(axes) + 1):
        for along in combinations(axes, count):
            if prod(shape[axis] for axis in along) == len(ranks):
                index = tuple(slice(None) if a in along else place[a] for a in range(len(shape)))
                if full.mesh[index].flatten().tolist() == ranks:
                    return True
    return False


def _check_kinds(topology: object, timeout: object) -> None:
    if not isinstance(topology, Topology | None):
        raise MeshError(
            f"topology={topology!r} is no topology; use Topology(ranks_per_node=...) or None"
        )
    if not isinstance(timeout, timedelta | None):
        raise MeshError(f"timeout={timeout!r} is no time; use timedelta(seconds=...) or None")
    if timeout is not None and timeout <= timedelta(0):
        raise MeshError(f"timeout={timeout} is not positive; use timedelta(seconds=...) or None")


def _as_names(names: object) -> tuple[str, ...]:
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise LayoutError(f"mesh[{names!r}] given; use the name of an axis, or several in a tuple")


def _renamed(full: DeviceMesh, axis: str, name: str) -> DeviceMesh:
    """Return the same mesh over the same groups, one of its axes under another name."""
    axes = full.mesh_dim_names or ()
    renamed = DeviceMesh.from_group(
        [full.get_group(each) for each in axes],
        full.device_type,
        mesh=full.mesh,
        mesh_dim_names=tuple(name if each == axis else each for each in axes),
    )
    share_ranks(renamed, full)
    return renamed


def _rank_tensor(view: View) -> torch.Tensor:
    if view.in_rank_order:
        ranks = torch.arange(len(view.ranks()), dtype=torch.int, device="cpu")
    else:
        ranks = torch.tensor(view.ranks(), dtype=torch.int, device="cpu")
    return ranks.view(view.shape)
