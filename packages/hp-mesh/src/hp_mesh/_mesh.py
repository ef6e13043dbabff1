"""`ParallelMesh`: torch device meshes for every mesh dimension of a configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._errors import LayoutError, MeshError, ParallelDimsError, join_words, plural, raise_errors
from ._groups import create_meshes, destroy_groups, report_invalid_arguments
from ._layout import RankLayout
from ._rules import Topology, topology_violations
from ._torch import default_group, register_flattened, share_rank_map

if TYPE_CHECKING:
    from ._dims import ParallelDims


class ParallelMesh:
    """All device meshes of one training run. Meshes with the same ranks share process groups.

    `ParallelDims.build_mesh` returns a `ParallelMesh`.

    - An axis is a mesh dimension. An alias is a second name of an axis: ``"batch"`` is ``"dp"``.
    - A view is one device mesh over all ranks. The same ranks have several views: ``"dense"`` has
      the axes ``fsdp`` and ``tp``, and ``"sparse"`` has the axes ``efsdp`` and ``ep``.

    ``mesh["tp"]`` returns a one-dimensional torch mesh. ``mesh["dp_replicate", "fsdp"]`` returns a
    two-dimensional torch mesh. The two axes must be in one view, outermost first. The results are
    slices of the view's mesh. FSDP, tensor parallel, DTensor and checkpoints accept them, and can
    combine several slices of one view. Indexing never communicates.

    Args:
        dims: Degrees, with numbers in place of the automatic values -1 and None.
        layout: Coordinates and groups of all ranks.
        views: Dict from the name of a view to its torch mesh.
        created: Process groups that `close` destroys.
        topology: Number of ranks per node, or None if it is unknown.

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
        """Return the sizes of the base axes, outermost first, and the device type or "closed"."""
        view = self.layout.views["base"]
        axes = ", ".join(f"{axis}={size}" for axis, size in zip(view.axes, view.shape, strict=True))
        where = "closed" if self._closed else f"on {self.device_type}"
        return f"ParallelMesh({axes}; {plural(self.layout.world_size, 'rank')}, {where})"

    def __getitem__(self, names: str | Sequence[str]) -> DeviceMesh:
        """Return the device mesh of one axis, or of several axes of one view.

        A view is one device mesh over all ranks. ``layout.views`` lists the views and their axes.

        Args:
            names: Name or alias of one axis, or several names in a tuple, outermost first. One view
                must have all of these axes.

        Returns:
            A torch mesh with one dimension for each name. ``mesh_dim_names`` has the names of the
            axes, not their aliases: ``mesh["dp_ep"].mesh_dim_names`` is ``("dp",)``. There is one
            exception: ``mesh["batch"].mesh_dim_names`` is ``("batch",)``, because data loaders
            look for this name.

        Raises:
            LayoutError: A name does not exist, or no view has all names in this order.
            MeshError: The mesh is closed.
        """
        key = names if isinstance(names, str) else _as_names(names)
        mesh = self._meshes.get(key)
        if mesh is None:
            mesh = self._meshes[key] = self._slice((key,) if isinstance(key, str) else key)
        return mesh

    def __contains__(self, name: object) -> bool:
        """Return whether ``name`` is the name or alias of a mesh dimension."""
        return name in self.layout.names

    def get_optional_mesh(self, names: str | Sequence[str]) -> DeviceMesh | None:
        """Return ``mesh[names]``, or None if one of the axes has size 1.

        Args:
            names: Name or alias of one axis, or several names in a tuple, as in ``mesh[names]``.

        Returns:
            A torch mesh. The result is None if an axis has size 1, so that code can skip this kind
            of parallelism.

        Raises:
            LayoutError: A name does not exist, or no view has all names in this order.
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

    def _register_flattened(self, full: DeviceMesh) -> None:
        """Store the flattened dimensions of ``full``, with their process groups, in ``full``.

        They are dimensions of other views. For example, if ``full`` has the dimensions
        ``dp_replicate`` and ``dp_shard``, it stores ``dp``. hp-dtensor can then use the group of
        ``dp`` for collectives.

        Args:
            full: Mesh over all ranks.
        """
        layout, axes = self.layout, full.mesh_dim_names or ()
        groups = [{*dist.get_process_group_ranks(group)} for group in full.get_all_groups()]
        for axis in dict.fromkeys(axis for view in layout.views.values() for axis in view.axes):
            if axis not in axes and layout.size(axis) > 1:
                ranks = dist.get_process_group_ranks(self[axis].get_group())
                if _is_flattened(full, groups, ranks):
                    register_flattened(full, self[axis])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all mesh dimensions, followed by all aliases (second names)."""
        return self.layout.names

    @property
    def device_type(self) -> str:
        """Device type of all meshes, such as ``"cuda"``."""
        return self._view("base").device_type

    def view(self, name: str) -> DeviceMesh:
        """Return one of the device meshes over all ranks.

        Args:
            name: Name of the mesh, such as ``"base"``, ``"dense"`` or ``"sparse"``.
                ``layout.views`` lists the names and the mesh dimensions.

        Returns:
            A torch mesh of all ranks.

        Raises:
            LayoutError: No mesh has this name.
            MeshError: The mesh is closed.
        """
        full = self._view(name)
        if name not in self._with_folds:
            self._register_flattened(full)
            self._with_folds.add(
                name
            )  # after the registration, so that an interrupted call is repeated
        return full

    def _view(self, name: object) -> DeviceMesh:
        if self._closed:
            raise MeshError("this mesh is closed; build another")
        if not isinstance(name, str) or name not in self._views:
            raise LayoutError(f"no view {name!r}; use one of {list(self._views)}")
        return self._views[name]

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def crosses_nodes(self, name: str) -> bool:
        """Return whether a group along a mesh dimension has ranks on several nodes.

        Args:
            name: Name or alias of a mesh dimension.

        Returns:
            True if at least one group has ranks on more than one node.

        Raises:
            LayoutError: The name does not exist.
            MeshError: The mesh was built without a topology.
        """
        if self.topology is None:
            raise MeshError("this mesh has no topology; build it with topology=Topology(...)")
        return self.layout.crosses_nodes(name, self.topology.ranks_per_node)

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of this rank along one mesh dimension.

        Args:
            name: Name or alias of a mesh dimension.

        Returns:
            The torch process group that contains this rank.

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
        """Return a `ParallelMesh` that uses the same process groups.

        ``copy.deepcopy`` can therefore copy modules that have a mesh as an attribute. The copy does
        not create process groups. Closing the copy does not destroy the shared groups.
        """
        memo[id(self)] = copy = ParallelMesh(self.dims, self.layout, self._views, [], self.topology)
        copy._closed = self._closed
        return copy

    def close(self) -> None:
        """Destroy the process groups that `ParallelDims.build_mesh` created for this mesh.

        Every rank calls this method, after its last collective on these groups. A second call is a
        no-op. The default group and the groups of other meshes remain. Groups that are already
        destroyed are skipped.

        After the call, slices of this mesh and DTensors on the slices cannot communicate.

        Note:
            Do not use DTensors on a mesh that the same process builds later with the same ranks and
            dimension names. DTensor has a cache of meshes, with ranks and dimension names as the
            key, and may find the destroyed groups in it.
        """
        self._closed = True
        self._meshes.clear()
        self._views.clear()
        destroy_groups(self._created)

    def __enter__(self) -> Self:
        """Return this mesh. The end of the ``with`` block calls `close`.

        If ``with`` blocks of one mesh are nested, the end of the inner block closes the mesh.
        Meshes that are built inside the block have their own groups and must be closed separately.

        Raises:
            MeshError: The mesh is closed.
        """
        self._view("base")  # raises an error if the mesh is closed
        return self

    def __exit__(self, *exception: object) -> None:
        """Call `close`, also after an exception."""
        self.close()


def build_mesh(
    dims: "ParallelDims",
    device_type: str | None,
    topology: Topology | None,
    timeout: timedelta | None,
) -> ParallelMesh:
    """Create the process groups of ``dims`` and return the `ParallelMesh` that uses them.

    `ParallelDims.build_mesh` explains the arguments and errors.
    """
    world = default_group()
    try:
        _check_types(topology, timeout)
        dims, plan = dims._plan_mesh(world.size(), world.rank())
        if topology is not None:
            raise_errors(topology_violations(plan.layout, topology))
    except (MeshError, ParallelDimsError):
        report_invalid_arguments()
        raise
    compared = {**asdict(dims), "topology": topology}
    created: list[dist.ProcessGroup] = []
    views = create_meshes(plan, device_type, timeout, compared, created)
    return ParallelMesh(dims, plan.layout, views, created, topology)


def _is_flattened(full: DeviceMesh, groups: Sequence[set[int]], ranks: Sequence[int]) -> bool:
    """Return whether flattening several dimensions of ``full`` gives the group ``ranks``.

    For example, if ``full`` has the dimensions ``dp_replicate``, ``dp_shard`` and ``tp``, the
    result is True for the ranks of ``dp``: ``dp`` flattens ``dp_replicate`` and ``dp_shard``.

    Args:
        full: Mesh over all ranks.
        groups: One set for each dimension of ``full``. It has the ranks of the group along this
            dimension that contains this rank.
        ranks: Ranks of a process group that contains this rank, in the order of the group.

    Returns:
        True if ``ranks`` lists the ranks of at least two dimensions of size above 1 in row-major
        order.
    """
    members = {*ranks}
    folded = [len(group) > 1 and group <= members for group in groups]
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
    """Return a copy of ``full`` in which the dimension ``axis`` is called ``name``.

    The copy uses the process groups of ``full``.

    Args:
        full: Mesh over all ranks.
        axis: Name of one dimension of ``full``.
        name: New name of the dimension.
    """
    axes = full.mesh_dim_names or ()
    renamed = DeviceMesh.from_group(
        [full.get_group(each) for each in axes],
        full.device_type,
        mesh=full.mesh,
        mesh_dim_names=tuple(name if each == axis else each for each in axes),
    )
    share_rank_map(renamed, full)
    return renamed
