"""Meshes of parameter groups, and the placements of sharded parameters on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from hp_dtensor import Axis, concatenate_meshes
from hp_dtensor.torch_compat import strided_shard

from ._errors import MeshError, MeshTypeError, ParameterError, shown
from ._torch import flatten_axes


class Alone:
    """Replaces a process group if there is only this rank. Nothing is communicated over it."""

    def rank(self) -> int:
        """Return 0."""
        return 0

    def size(self) -> int:
        """Return 1."""
        return 1


@dataclass(frozen=True, slots=True)
class DataAxes:
    """The mesh axes over which gradients are reduced.

    Attributes:
        shard: Axis of the all-gathers and reduce-scatters.
        replicate: Axes of the all-reduces, outermost first.
    """

    shard: Axis
    replicate: tuple[Axis, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of ranks over which gradients are reduced."""
        size = self.shard.size
        for axis in self.replicate:
            size *= axis.size
        return size

    @property
    def named(self) -> tuple[Axis, ...]:
        """Return all axes, outermost first. Excludes the shard axis if its group is `Alone`."""
        own = () if isinstance(self.shard.group, Alone) else (self.shard,)
        return (*self.replicate, *own)

    def replicated(self) -> "DataAxes":
        """Return the axes for parameters that are not sharded.

        All axes become replicate axes. The shard axis has only this rank.
        """
        rank = self.shard.ranks[self.shard.index]
        return DataAxes(Axis("alone", Alone(), (rank,)), (*self.replicate, self.shard))


def check_member(mesh: DeviceMesh) -> None:
    """Raise `MeshError` if this rank is not in ``mesh``."""
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"rank {dist.get_rank()} is not in {mesh}; call fully_shard only on the ranks "
            f"{mesh.mesh.flatten().tolist()} of the mesh"
        )


def split_axis(axis: Axis, size: int) -> Axis:
    """Split an axis into blocks of ``size`` consecutive ranks, and return the block of this rank.

    Creates a process group. All ranks of the block must make this call.
    """
    start = axis.index // size * size
    return new_axis(axis, axis.ranks[start : start + size], f"{axis.name}[{size}]")


def new_axis(axis: Axis, ranks: tuple[int, ...], name: str) -> Axis:
    """Return an axis with a new process group over ``ranks``, which are some ranks of ``axis``.

    All of ``ranks`` must make this call. Raises `MeshError` if ``axis`` has no process group.
    """
    if not isinstance(axis.group, dist.ProcessGroup):
        raise MeshError(
            f"axis {axis.name!r} has no process group, so none like it can be made; leave "
            "reshard_after_forward a bool, and reductions on the mesh's groups"
        )
    group = dist.new_group(
        list(ranks), backend=dist.get_backend(axis.group), use_local_synchronization=True
    )
    return Axis(name, group, ranks)


# Mesh and placements of a parameter that was a DTensor before `fully_shard`.
Own: TypeAlias = tuple[DeviceMesh, tuple[Placement, ...]]


@runtime_checkable
class DataAxisNames(Protocol):
    """Interface of the ``DataParallelMeshDims`` of this package and of torch."""

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Return the names of the axes to shard over."""
        ...

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Return the names of the axes to replicate over."""
        ...


@dataclass(frozen=True, slots=True)
class DataParallelMeshDims:
    """Selects the data-parallel axes of a mesh, for ``dp_mesh_dims`` of `fully_shard`.

    Use it if all parameters are DTensors on the whole mesh already, for example after tensor
    parallelism.

    Args:
        shard: Name of the axis over which to shard parameters. Several axes, given as a tuple of
            names, are flattened into one. If None, parameters are not sharded.
        replicate: Name of the axis over which parameters are replicated. Several axes, given as a
            tuple of names, are flattened into one. If None, parameters are not replicated.

    Raises:
        MeshError: ``shard`` and ``replicate`` are both empty, or one of them is not a name, a tuple
            of names or None.

    Examples:
        >>> DataParallelMeshDims(shard=("dp_shard", "cp"), replicate="dp_replicate").shard_names
        ('dp_shard', 'cp')
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raise `MeshError` if an argument has a wrong type, or if no axis is named."""
        for name, given in (("shard", self.shard), ("replicate", self.replicate)):
            each: tuple[object, ...] = given if isinstance(given, tuple) else (given,)
            if given is not None and not all(isinstance(axis, str) for axis in each):
                raise MeshTypeError(
                    f"{name} is {shown(given)}; allowed: the name of an axis, a tuple of such, "
                    "and None"
                )
        if not self.shard_names and not self.replicate_names:
            raise MeshError("shard and replicate are both empty; name at least one axis of data")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names in ``shard`` as a tuple; empty if ``shard`` is None."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names in ``replicate`` as a tuple; empty if ``replicate`` is None."""
        return _names(self.replicate)


class TorchMeshInfo(Protocol):
    """Interface of torch's ``FSDPMeshInfo`` and ``HSDPMeshInfo``."""

    @property
    def mesh(self) -> DeviceMesh:
        """Return the data-parallel mesh."""
        ...

    @property
    def shard_mesh_dim(self) -> int | None:
        """Return the mesh dim to shard over, or None."""
        ...

    @property
    def replicate_mesh_dim(self) -> int | None:
        """Return the mesh dim to replicate over, or None."""
        ...


@runtime_checkable
class PlacementOnMesh(Protocol):
    """Interface of torch's ``ShardPlacementResult``: placement and mesh of one parameter."""

    @property
    def placement(self) -> Shard | None:
        """Return the placement of the sharded parameter, or None for the default."""
        ...

    @property
    def mesh_info(self) -> TorchMeshInfo:
        """Return the data-parallel mesh to shard over."""
        ...


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """The data-parallel mesh of some parameters: ``(shard,)`` or ``(replicate, shard)``.

    A parameter that was a DTensor before `fully_shard` also has its own mesh, for example of
    tensor parallelism.
    """

    mesh: DeviceMesh
    axes: DataAxes

    @property
    def shards(self) -> bool:
        """Return whether there is an axis to shard over."""
        return True

    @staticmethod
    def on(mesh: DeviceMesh) -> "MeshInfo":
        """Return the mesh info of a mesh with one or two axes. The last one is the shard axis.

        Raises `MeshError` if this rank is not in the mesh.
        """
        check_member(mesh)
        replicate = (Axis.of(mesh, 0),) if mesh.ndim == 2 else ()
        return MeshInfo(mesh, DataAxes(Axis.of(mesh, mesh.ndim - 1), replicate))

    @staticmethod
    def from_torch(info: TorchMeshInfo, name: str) -> "MeshInfo":
        """Convert the mesh info of torch that ``shard_placement_fn`` returned for a parameter.

        ``name`` is the name of the parameter. Raises `MeshError` unless ``info`` shards over the
        last axis and replicates over the other axis, if there is one.
        """
        mesh = info.mesh
        said = (info.replicate_mesh_dim, info.shard_mesh_dim)
        if said != (0 if mesh.ndim == 2 else None, mesh.ndim - 1) or mesh.ndim > 2:
            raise MeshError(
                f"shard_placement_fn gives {name} a mesh {mesh} to replicate over axis {said[0]} "
                f"and to shard over axis {said[1]}; allowed: one axis to shard over, and two, "
                "the first of which replicates"
            )
        return MeshInfo.on(mesh)

    def layout(
        self, own: Own | None, name: str, dim: int | None
    ) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return the mesh and the placements of a sharded parameter.

        The mesh has the data-parallel axes followed by the axes of ``own``. If the mesh of ``own``
        contains the data-parallel axes already, the mesh of ``own`` is returned instead. If axes of
        ``own`` shard ``dim``, too, the data-parallel axes shard the local tensors of ``own``.

        Args:
            own: Mesh and placements of the parameter before `fully_shard`, or None for a plain
                tensor.
            name: Name of the parameter for error messages.
            dim: Dimension to shard. If None, the parameter is replicated.
        """
        placement: Placement = Replicate() if dim is None else Shard(dim)
        placements: list[Placement] = [Replicate()] * (self.mesh.ndim - 1)
        if own is None:
            return self.mesh, (*placements, placement)
        mesh, own_placements = own
        if self.axes_within(own):
            shard = (self.mesh.mesh_dim_names or ())[-1:] if dim is not None else ()
            return _sharded_within(own, self.axes_within(own), shard, dim, name)
        return joint_mesh(self.mesh, mesh, name), (
            *placements,
            _placement_after(placement, dim, mesh, own_placements, 0),
            *own_placements,
        )

    def axes_within(self, own: Own | None) -> tuple[int, ...]:
        """Return the positions of the data-parallel axes in the parameter's own mesh.

        ``own``: mesh and placements of the parameter before `fully_shard`. Returns an empty tuple
        if this mesh does not contain all data-parallel axes, or if ``own`` is None.
        """
        data = self.mesh.mesh_dim_names or ()
        names = (own[0].mesh_dim_names or ()) if own is not None else ()
        if own is None or not data or not set(data) <= set(names):
            return ()
        mesh = own[0][data] if len(data) > 1 else own[0][data[0]]
        return tuple(names.index(each) for each in data) if mesh == self.mesh else ()


@dataclass(frozen=True, slots=True)
class WholeMeshInfo(MeshInfo):
    """Mesh info for the argument ``dp_mesh_dims`` of `fully_shard`.

    All parameters are DTensors on ``mesh``. ``dims`` names the data-parallel axes of this mesh.
    """

    dims: DataAxisNames

    @property
    def shards(self) -> bool:
        """Return whether ``dims`` names an axis to shard over."""
        return bool(self.dims.shard_names)

    @staticmethod
    def within(mesh: DeviceMesh, dims: DataAxisNames) -> "WholeMeshInfo":
        """Return the mesh info of parameters on ``mesh``.

        Flattening several axes creates a process group. Raises `MeshError` if this rank is not in
        ``mesh``, or if ``dims`` has unknown or repeated names.
        """
        check_member(mesh)
        present = mesh.mesh_dim_names or ()
        for name in (*dims.shard_names, *dims.replicate_names):
            if name not in present:
                raise MeshError(f"no axis {name!r} in a mesh with axes {list(present)}")
        for names in (dims.shard_names, dims.replicate_names):
            if twice := [name for name in names if names.count(name) > 1]:
                raise MeshError(f"axis {twice[0]!r} is named twice in {names}; name each once")
        both = set(dims.shard_names) & set(dims.replicate_names)
        if both:
            raise MeshError(f"axes {sorted(both)} are in both shard and replicate; choose one")
        folded = [_fold(mesh, each) for each in (dims.replicate_names, dims.shard_names) if each]
        axes = [Axis.of(each, 0) for each in folded]
        if not dims.shard_names:
            return WholeMeshInfo(mesh, DataAxes(axes[0]).replicated(), dims)
        return WholeMeshInfo(mesh, DataAxes(axes[-1], tuple(axes[:-1])), dims)

    def layout(
        self, own: Own | None, name: str, dim: int | None
    ) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return the mesh and the placements of a sharded parameter.

        The mesh is the mesh of ``own``. Several shard axes are flattened into one axis. Raises
        `ParameterError` for a plain tensor, and `MeshError` for a DTensor on another mesh.
        """
        mesh = self.mesh
        if own is None:
            raise ParameterError(
                f"{name} is a plain tensor; with dp_mesh_dims every parameter is a DTensor on the "
                "whole mesh, so distribute it first"
            )
        if own[0] != mesh:
            raise MeshError(f"{name} is a DTensor on {own[0]}; with dp_mesh_dims it is on {mesh}")
        shard = self.dims.shard_names if dim is not None else ()
        return _sharded_within(own, self.axes_within(own), shard, dim, name)

    def axes_within(self, own: Own | None) -> tuple[int, ...]:
        """Return the positions of the data-parallel axes in the mesh. ``own`` has no effect."""
        data = {*self.dims.shard_names, *self.dims.replicate_names}
        names = self.mesh.mesh_dim_names or ()
        return tuple(axis for axis, name in enumerate(names) if name in data)


def _sharded_within(
    own: Own, data: Sequence[int], shard: tuple[str, ...], dim: int | None, name: str
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the mesh and the placements of a DTensor after sharding it over the axes ``shard``.

    ``own`` is the mesh and the placements before. Several ``shard`` axes are flattened into one.
    Raises `MeshError` if the DTensor was not replicated over the axes at the positions ``data``.
    """
    mesh, before = own
    names = mesh.mesh_dim_names or ()
    for axis in data:
        if not before[axis].is_replicate():
            raise MeshError(
                f"{name} is a DTensor on a mesh with axes {list(names)}, which share "
                f"{[names[axis]]} with the axes of data; it is placed {before[axis]} there, where "
                "only Replicate() is allowed"
            )
    meshes: list[DeviceMesh] = []
    placements: list[Placement] = []
    for axis, axis_name in enumerate(names):
        if axis_name not in shard:
            meshes.append(mesh[axis_name])
            placements.append(before[axis])
        elif axis_name == shard[0]:
            meshes.append(_fold(mesh, shard))
            placements.append(_placement_after(Shard(dim or 0), dim, mesh, before, axis + 1))
    if len(placements) == mesh.ndim:
        return mesh, tuple(placements)
    return concatenate_meshes(meshes), tuple(placements)


def _fold(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else flatten_axes(mesh, names)


def _placement_after(
    placement: Placement, dim: int | None, mesh: DeviceMesh, own: Sequence[Placement], first: int
) -> Placement:
    """Return ``placement``, or a strided shard if an inner axis of ``mesh`` also shards ``dim``.

    Inner axes have the positions ``first``, ``first + 1``, ... in ``mesh``. They follow the
    data-parallel axis in the mesh order, but they shard ``dim`` before it.
    """
    splits = 1
    for size, earlier in list(zip(mesh.shape, own, strict=True))[first:]:
        splits *= size if dim is not None and earlier.is_shard(dim) else 1
    return placement if dim is None or splits == 1 else strided_shard(dim, splits)


def joint_mesh(data: DeviceMesh, own: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh with the axes of ``data`` followed by the axes of ``own``.

    Raises `MeshError` if an axis has no name, if both meshes have an axis of the same name, or if
    they are not submeshes of one root mesh. ``name`` is the parameter's name for the message.
    """
    data_names, own_names = data.mesh_dim_names, own.mesh_dim_names
    if not data_names or not own_names:
        raise MeshError(
            f"{name} is a DTensor on mesh {own}, to be sharded over {data}: both meshes need axis "
            f"names, as submeshes of one root mesh have{_own_call(name, own)}"
        )
    shared = sorted(set(data_names) & set(own_names))
    if shared:
        raise MeshError(
            f"{name} is a DTensor on a mesh with axes {list(own_names)}, which share {shared} with "
            f"the axes {list(data_names)} to shard over; place it on the other axes only"
            f"{_own_call(name, own)}"
        )
    try:
        return concatenate_meshes([data, own])
    except RuntimeError as error:
        raise MeshError(
            f"{name} is on axes {list(own_names)}, which cannot be joined with "
            f"{list(data_names)}: both must be slices of one root mesh that do not overlap"
            f"{_own_call(name, own)}"
        ) from error


def _own_call(name: str, own: DeviceMesh) -> str:
    """Return a hint for error messages: call `fully_shard` on the parameter's module first.

    The experts of a mixture-of-experts layer need a separate `fully_shard` call over other mesh
    axes, which users may forget. Returns "" if ``name`` is not in a submodule.
    """
    module, _, _ = name.rpartition(".")
    if not module:
        return ""
    axes = f"the mesh that has {list(own.mesh_dim_names)}" if own.mesh_dim_names else "its own mesh"
    return (
        f"; if fully_shard was forgotten for {module}, call fully_shard({module}, mesh) first, "
        f"over other axes of {axes}, such as those over which experts are replicated"
    )
