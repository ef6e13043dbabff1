"""World meshes, and the functions that take the mesh of one kind of parallelism out of one."""

from dataclasses import dataclass
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._axis_names import AXES, choose_row
from ._errors import LayoutError
from ._mesh import ParallelMesh
from ._torch import flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldMesh:
    """Meshes of all views, and the axes that were asked for, outermost first.

    ``mesh`` resolves every name, ``axes`` are those that the getters know: an axis of one rank is
    among them if its degree was given. ``ep`` lies on ranks of the data-parallel axes.
    """

    mesh: ParallelMesh
    axes: tuple[str, ...]

    @property
    def device_mesh(self) -> DeviceMesh:
        """Return the axes but ``ep`` as one torch mesh of the whole world, outermost first."""
        return _slice(self, _own_axes(self))


AnyMesh: TypeAlias = WorldMesh | ParallelMesh | DeviceMesh


def get_dp_model_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh over which parameters are replicated and sharded, for FSDP or DDP.

    Two axes with HSDP, replicas outermost, else one. Ranks of ``cp`` hold the same parameters and
    join the sharding. Not for data: see `get_dp_mesh`.

    This and all other getters only look up: they neither communicate nor create process groups. In
    a `ParallelMesh` an axis is present if it has several ranks, and so is data parallelism. In a
    torch mesh the axes are those of its names. Raises `LayoutError` where the axes needed are
    absent, and for a torch mesh also where they are several that are to be one: `flatten_mesh`
    makes one of them.
    """
    return _look_up("get_dp_model_mesh", mesh)


def get_dp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the one-axis mesh of ranks that see different samples, for data loading.

    Ranks of ``ep`` see different samples, those of ``cp`` parts of the same ones: ``cp`` is never
    folded in.
    """
    return _look_up("get_dp_mesh", mesh)


def get_dp_shard_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the axis along which HSDP shards parameters: ``dp_shard``, with ``cp`` folded in."""
    return _look_up("get_dp_shard_mesh", mesh)


def get_dp_replicate_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the axis along which HSDP has replicas of the parameters."""
    return _look_up("get_dp_replicate_mesh", mesh)


def get_dp_process_group(mesh: AnyMesh) -> dist.ProcessGroup:
    """Return the process group of `get_dp_mesh`, which is there since the mesh was built."""
    return get_dp_mesh(mesh).get_group()


def get_ep_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of ranks that hold different experts."""
    return _look_up("get_ep_mesh", mesh)


def get_tp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of ranks that hold parts of one layer."""
    return _look_up("get_tp_mesh", mesh)


def get_cp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of ranks that see parts of one sequence."""
    return _look_up("get_cp_mesh", mesh)


def get_pp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of ranks that hold different pipeline stages."""
    return _look_up("get_pp_mesh", mesh)


def get_pp_stage_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of all axes but ``pp``: the ranks of one pipeline stage."""
    choose_row("get_pp_stage_mesh", _axes(mesh))
    rest = tuple(name for name in _own_axes(mesh) if name != "pp")
    if not rest:
        raise LayoutError("get_pp_stage_mesh needs an axis besides pp; this mesh has pp alone")
    return _slice(mesh, rest)


def get_device_mesh_info(mesh: AnyMesh) -> str:
    """Return one line with the axes of a mesh and their sizes, whose product is its ranks.

    Folded ``ep`` is no factor of it and comes apart, after a semicolon.
    """
    source = _source(mesh)
    inside: tuple[str, ...] = ()
    if isinstance(source, DeviceMesh):
        names = source.mesh_dim_names or tuple(f"axis {index}" for index in range(source.ndim))
        sizes, ranks = dict(zip(names, source.shape, strict=True)), source.size()
    else:
        own = _own_axes(mesh)
        inside = tuple(name for name in _axes(mesh) if name not in own)
        sizes = {name: source.layout.size(name) for name in (*own, *inside)}
        ranks = source.layout.world_size
    axes = ", ".join(f"{name}={size}" for name, size in sizes.items() if name not in inside)
    shared = "".join(f"; {name}={sizes[name]} on the same ranks" for name in inside)
    return f"mesh of {ranks} ranks on {source.device_type}: {axes}{shared}"


def flatten_mesh(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """Return the axes of a torch mesh folded into one; keep it, since each call may create groups.

    Collective over the mesh that ``mesh`` is a slice of, and a slice of that one again, so that
    FSDP and tensor parallel combine both. ``name`` is by default the names of the axes with ``_``
    between them. Raises `LayoutError` for what is no torch mesh or has no names, or where the name
    is taken.
    """
    _check_flattened(mesh, name)
    names = _names(mesh)
    try:
        return flatten(mesh, name)
    except ValueError as error:
        taken = "_".join(names) if name is None else name
        reason = f"name={taken!r} is that of another axis of the mesh that has {list(names)}"
        raise LayoutError(f"{reason}; use another name") from error


def _check_flattened(mesh: object, name: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        reason = ""
        if isinstance(mesh, WorldMesh | ParallelMesh):
            reason = ", and this one has all its folds already: take them with the getters"
        raise LayoutError(f"flatten_mesh takes a torch DeviceMesh, not {_kind(mesh)}{reason}")
    if not isinstance(name, str | None):
        raise LayoutError(f"name={name!r} is no name; use a string or None")


def _look_up(getter: str, mesh: AnyMesh) -> DeviceMesh:
    present = _axes(mesh)
    row = choose_row(getter, present)
    if not isinstance(mesh, DeviceMesh):
        return _slice(mesh, row.built)
    # A fold would need groups that a look-up does not create.
    parts = row.parts(present)
    for fold in parts:
        if len(fold) > 1:
            raise LayoutError(
                f"{getter} needs {' x '.join(fold)} as one axis, and this mesh has them apart "
                f"({get_device_mesh_info(mesh)}); {_advice(fold, parts)}"
            )
    return _slice(mesh, tuple(fold[0] for fold in parts))


def _advice(fold: tuple[str, ...], parts: tuple[tuple[str, ...], ...]) -> str:
    call = f"flatten_mesh(mesh[{', '.join(map(repr, fold))}])"
    if len(parts) == 1:
        return f"keep what {call} returns and use it instead, or use build_world_mesh"
    # A torch mesh of a fold and of another axis beside it takes torch's private functions.
    return f"use build_world_mesh, which has all folds; {call} returns this axis alone"


def _slice(mesh: AnyMesh, names: tuple[str, ...]) -> DeviceMesh:
    return _source(mesh)[names if len(names) > 1 else names[0]]


def _source(mesh: AnyMesh) -> ParallelMesh | DeviceMesh:
    if isinstance(mesh, WorldMesh):
        return mesh.mesh
    if isinstance(mesh, ParallelMesh | DeviceMesh):
        return mesh
    raise LayoutError(
        f"{_kind(mesh)} given for a mesh; use a WorldMesh, a ParallelMesh or a torch DeviceMesh"
    )


def _kind(value: object) -> str:
    plain = value is None or isinstance(value, str | int)
    return repr(value) if plain else f"a {type(value).__name__}"


def _axes(mesh: AnyMesh) -> tuple[str, ...]:
    source = _source(mesh)
    if isinstance(mesh, WorldMesh):
        return mesh.axes
    if isinstance(source, DeviceMesh):
        return _names(source)
    size = source.layout.size
    data = ("dp_replicate", "dp_shard") if size("replicate") > 1 else ("dp",)
    several = tuple(name for name in ("pp", "ep", "cp", "tp") if size(name) > 1)
    return tuple(name for name in AXES if name in (*data, *several))


def _own_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Return the axes without those inside others: folded experts live on data-parallel ranks."""
    axes, source = _axes(mesh), _source(mesh)
    if isinstance(source, DeviceMesh) or "ep_shard" in axes:
        return axes
    view = source.layout.views["data" if "dp" in axes else "base"]
    return tuple(name for name in axes if name in view.axes)


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    if not mesh.mesh_dim_names:
        raise LayoutError(f"this mesh of shape {tuple(mesh.shape)} has no axis names; give it some")
    return mesh.mesh_dim_names
