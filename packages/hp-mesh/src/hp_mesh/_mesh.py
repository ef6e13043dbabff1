"""`ParallelMesh`: torch device meshes for every axis and alias of a configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._errors import LayoutError, MeshError, ParallelDimsError, join_words, raise_errors
from ._groups import create_meshes, destroy_groups, join_as_refusing
from ._layout import RankLayout
from ._rules import Topology, topology_violations
from ._torch import default_group, register_fold, share_rank_map

if TYPE_CHECKING:
    from ._dims import ParallelDims


class ParallelMesh:
    """Torch device meshes of all axes, over one set of process groups.

    `ParallelDims.build_mesh` returns it. A view is one division of all ranks into axes; it has one
    device mesh of the whole world. ``mesh["tp"]`` is the one-dimensional mesh of an axis or alias.
    ``mesh["dp_replicate", "fsdp"]`` is the mesh of several axes of one view, outermost first. Both
    are slices of the mesh of a view, so FSDP, tensor parallel, DTensor and checkpoints accept and
    combine them. Indexing never communicates.

    Args:
        dims: Resolved degrees.
        layout: Coordinates and groups of all ranks.
        views: One mesh of the whole world for each view.
        created: Groups that `close` destroys.
        topology: Number of ranks per node, or None.

    Examples:
        On 4 ranks:

        >>> mesh = ParallelDims(tp=2).build_mesh()
        >>> mesh
        ParallelMesh(pp=1, dp_replicate=1, dp_shard=2, cp=1, tp=2; 4 ranks, on cpu)
        >>> mesh["fsdp", "tp"].mesh_dim_names
        ('fsdp', 'tp')
        >>> mesh.close()
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
        self._with_folds: set[str] = set()
        self._closed = False

    def __repr__(self) -> str:
        """Return the axes that multiply to the world, outermost first, and their sizes."""
        view = self.layout.views["base"]
        axes = ", ".join(f"{axis}={size}" for axis, size in zip(view.axes, view.shape, strict=True))
        where = "closed" if self._closed else f"on {self.device_type}"
        return f"ParallelMesh({axes}; {self.layout.world_size} ranks, {where})"

    def __getitem__(self, names: str | Sequence[str]) -> DeviceMesh:
        """Return the mesh of one axis or alias, or of several axes of one view.

        ``layout.views`` lists the views and their axes. The dimensions of the result have the names
        of the axes, also if an alias was given. ``mesh["batch"]`` is an exception: its dimension is
        called ``"batch"``, because data loaders look for this name.

        Args:
            names: One name, or several axes of one view, outermost first.

        Returns:
            A torch mesh.

        Raises:
            LayoutError: A name does not exist, or no view has all of them in this order.
            MeshError: The mesh is closed.
        """
        key = names if isinstance(names, str) else _as_names(names)
        mesh = self._meshes.get(key)
        if mesh is None:
            mesh = self._meshes[key] = self._slice((key,) if isinstance(key, str) else key)
        return mesh

    def __contains__(self, name: object) -> bool:
        """Return whether the mesh has an axis or alias of this name."""
        return name in self.layout.names

    def get_optional_mesh(self, names: str | Sequence[str]) -> DeviceMesh | None:
        """Return ``mesh[names]``, or None if one of its axes has a single rank.

        Args:
            names: One name, or several axes of one view, outermost first.

        Returns:
            A torch mesh, or None. Code that skips a kind of parallelism at size 1 can test for
            None.

        Raises:
            LayoutError: A name does not exist, or no view has all of them in this order.
            MeshError: The mesh is closed.
        """
        mesh = self[names]
        return None if 1 in mesh.shape else mesh

    def _slice(self, names: tuple[str, ...]) -> DeviceMesh:
        view, axes = self.layout.find(*names)
        in_order = [axis for axis in view.axes if axis in axes]
        if list(axes) != in_order:
            raise LayoutError(
                f"axes {list(names)} given; the {view.name} view has them as {in_order}"
            )
        full = self.view(view.name) if len(axes) > 1 else self._view(view.name)
        if names == ("batch",):
            full, axes = _renamed(full, axes[0], "batch"), names
        mesh = full[axes]
        share_rank_map(mesh, full)
        return mesh

    def _register_folds(self, full: DeviceMesh) -> None:
        """Register the groups of axes that fold several axes of a mesh of the whole world."""
        layout, axes = self.layout, full.mesh_dim_names or ()
        along = [{*dist.get_process_group_ranks(group)} for group in full.get_all_groups()]
        for axis in dict.fromkeys(axis for view in layout.views.values() for axis in view.axes):
            if axis not in axes and layout.size(axis) > 1:
                ranks = dist.get_process_group_ranks(self[axis].get_group())
                if _is_fold(full, along, ranks):
                    register_fold(full, self[axis])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all axes and aliases."""
        return self.layout.names

    @property
    def device_type(self) -> str:
        """Device type of all meshes."""
        return self._view("base").device_type

    def view(self, name: str) -> DeviceMesh:
        """Return the mesh of the whole world for one view.

        Args:
            name: Name of the view, such as ``"base"`` or ``"sparse"``.

        Returns:
            A torch mesh with one dimension for each axis of the view.

        Raises:
            LayoutError: The view does not exist.
            MeshError: The mesh is closed.
        """
        full = self._view(name)
        if name not in self._with_folds:
            self._register_folds(full)
            self._with_folds.add(name)  # not before: after an interrupt the next call repeats it
        return full

    def _view(self, name: str) -> DeviceMesh:
        if self._closed:
            raise MeshError("this mesh is closed; build another")
        if name not in self._views:
            raise LayoutError(f"no view {name!r}; use one of {list(self._views)}")
        return self._views[name]

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def crosses_nodes(self, name: str) -> bool:
        """Return whether a group of an axis has ranks on several nodes.

        Args:
            name: Axis or alias.

        Returns:
            True if at least one group of the axis has ranks on more than one node.

        Raises:
            LayoutError: The name does not exist.
            MeshError: The mesh was built without a topology.
        """
        if self.topology is None:
            raise MeshError("this mesh has no topology; build it with topology=Topology(...)")
        return self.layout.crosses_nodes(name, self.topology.ranks_per_node)

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of one axis.

        Args:
            name: Axis or alias.

        Returns:
            The process group of this rank.

        Raises:
            LayoutError: The name does not exist, or it is not a string.
            MeshError: The mesh is closed.
        """
        if not isinstance(name, str):
            raise LayoutError(
                f"group({name!r}) is not of one axis; give one name, such as an alias that folds "
                f"several axes: {join_words(self.names)}"
            )
        return self[name].get_group()

    def __deepcopy__(self, memo: dict[int, object]) -> "ParallelMesh":
        """Return a mesh over the same groups. Closing the copy does not destroy them.

        Modules that hold a mesh can be copied. No group is created and nothing is communicated.
        """
        memo[id(self)] = copy = ParallelMesh(self.dims, self.layout, self._views, [], self.topology)
        copy._closed = self._closed
        return copy

    def close(self) -> None:
        """Destroy the process groups that the build created.

        Every rank calls it, after its last collective on these groups. A second call is a no-op.

        Groups that this mesh did not create remain: the default group, and the groups of other
        meshes. Groups that are already destroyed are skipped. Slices of this mesh, and tensors that
        are sharded over them, cannot communicate afterwards.

        Note:
            DTensor caches meshes, with their groups, by ranks and names. After this call, do not
            use DTensors over an equal mesh that the same process builds later.
        """
        self._closed = True
        self._meshes.clear()
        self._views.clear()
        destroy_groups(self._created)

    def __enter__(self) -> Self:
        """Return this mesh. The end of the ``with`` statement closes it; see `close`.

        If ``with`` statements of one mesh are nested, the inner one closes it. Meshes that are
        built inside have their own groups and must be closed separately.

        Raises:
            MeshError: The mesh is closed.
        """
        if self._closed:
            raise MeshError("this mesh is closed; build another")
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the mesh, also after an exception."""
        self.close()


def build_mesh(
    dims: "ParallelDims",
    device_type: str | None,
    topology: Topology | None,
    timeout: timedelta | None,
) -> ParallelMesh:
    """Create the groups and meshes of ``dims``; see `ParallelDims.build_mesh`."""
    world = default_group()
    try:
        _check_types(topology, timeout)
        dims, plan = dims._plan_mesh(world.size(), world.rank())
        if topology is not None:
            raise_errors(topology_violations(plan.layout, topology))
    except (MeshError, ParallelDimsError):
        join_as_refusing()
        raise
    compared = {**asdict(dims), "topology": topology}
    created: list[dist.ProcessGroup] = []
    views = create_meshes(plan, device_type, timeout, compared, created)
    return ParallelMesh(dims, plan.layout, views, created, topology)


def _is_fold(full: DeviceMesh, along: Sequence[set[int]], ranks: Sequence[int]) -> bool:
    """Return whether ``ranks`` are all ranks along several axes of a mesh, in row-major order.

    Args:
        full: Mesh of the whole world.
        along: Ranks of this rank's group on each axis of the mesh.
        ranks: Ranks of one group that contains this rank.
    """
    members = {*ranks}
    folded = [len(group) > 1 and group <= members for group in along]
    if sum(folded) < 2:
        return False
    here = full.get_coordinate() or ()
    index = tuple(slice(None) if fold else i for fold, i in zip(folded, here, strict=True))
    return full.mesh[index].flatten().tolist() == [*ranks]


def _check_types(topology: object, timeout: object) -> None:
    if not isinstance(topology, Topology | None):
        raise MeshError(
            f"topology={topology!r} is not a Topology; use Topology(ranks_per_node=...) or None"
        )
    if not isinstance(timeout, timedelta | None):
        raise MeshError(
            f"timeout={timeout!r} is not a timedelta; use timedelta(seconds=...) or None"
        )
    if timeout is not None and timeout <= timedelta(0):
        raise MeshError(f"timeout={timeout} is not positive; use timedelta(seconds=...) or None")


def _as_names(names: object) -> tuple[str, ...]:
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise LayoutError(f"mesh[{names!r}] given; use the name of an axis, or several in a tuple")


def _renamed(full: DeviceMesh, axis: str, name: str) -> DeviceMesh:
    """Return a mesh over the same groups in which one axis has another name."""
    axes = full.mesh_dim_names or ()
    renamed = DeviceMesh.from_group(
        [full.get_group(each) for each in axes],
        full.device_type,
        mesh=full.mesh,
        mesh_dim_names=tuple(name if each == axis else each for each in axes),
    )
    share_rank_map(renamed, full)
    return renamed
