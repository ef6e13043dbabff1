"""One mesh of the world, built from degrees and read by getters.

For code that keeps one mesh per process. `build_world_mesh` builds the mesh and stores it.
`get_dp_mesh`, `get_tp_mesh` and the other getters return parts of it. The model mesh
(`get_dp_model_mesh`) includes the ranks of ``cp``; the data mesh (`get_dp_mesh`) does not. Both
include the ranks of ``ep``.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from os import environ
from typing import Protocol, TypeAlias, cast, runtime_checkable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._degrees import INFERRED, as_degree
from ._dims import ParallelDims
from ._errors import LayoutError, MeshError, ParallelDimsError, divisors, join_words, refusal
from ._groups import join_as_refusing
from ._mesh import ParallelMesh
from ._torch import flatten

__all__ = [
    "HybridShard",
    "MeshAxisName",
    "WorldMesh",
    "build_expert_parallel_mesh",
    "build_world_mesh",
    "flatten_mesh",
    "get_cp_mesh",
    "get_device_mesh_info",
    "get_dp_mesh",
    "get_dp_model_mesh",
    "get_dp_process_group",
    "get_dp_replicate_mesh",
    "get_dp_shard_mesh",
    "get_ep_mesh",
    "get_pp_mesh",
    "get_pp_stage_mesh",
    "get_tp_mesh",
    "get_world_mesh",
    "reset_world_mesh",
]

LOCAL_RANKS = "LOCAL_WORLD_SIZE"


class MeshAxisName(StrEnum):
    """Axis names of world meshes and of expert-parallel meshes.

    Members are strings, so they index meshes in the same way as plain names.

    Examples:
        >>> MeshAxisName.dp_shard == "dp_shard"
        True
    """

    pp = "pp"
    dp = "dp"
    dp_replicate = "dp_replicate"
    dp_shard = "dp_shard"
    dp_ep = "dp_ep"
    dp_cp = "dp_cp"
    ep = "ep"
    ep_replicate = "ep_replicate"
    ep_shard = "ep_shard"
    tp = "tp"
    cp = "cp"


# Those of a world mesh, outermost first.
AXES = ("pp", "dp", "dp_replicate", "dp_shard", "ep", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Row:
    """One way to answer a getter.

    Each of ``folds`` becomes one axis of the answer: its first name must be among the axes present,
    the others join it if they are. ``built`` names the same axes where every fold has its groups.
    """

    folds: tuple[tuple[str, ...], ...]
    built: tuple[str, ...]

    def parts(self, present: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Return the axes that each fold consists of, in the order in which they are present."""
        return tuple(tuple(name for name in present if name in fold) for fold in self.folds)

    def fits(self, present: tuple[str, ...]) -> bool:
        """Return whether every axis that the row needs is present."""
        return {fold[0] for fold in self.folds} <= set(present)


# Ranks of cp hold the same parameters and see parts of the same samples: they join the sharding of
# parameters, never the data. Ranks of ep see other samples: they join both.
_SHARD = ("dp_shard", "ep", "cp")
_EXPERTS = ("ep_replicate", "ep_shard")
ROWS = {
    "get_dp_model_mesh": (
        Row((("dp_replicate",), _SHARD), ("replicate", "fsdp")),
        Row((("dp", "ep", "cp"),), ("fsdp",)),
        Row((_SHARD,), ("fsdp",)),
        Row((_EXPERTS,), ("dp",)),
    ),
    "get_dp_mesh": (
        Row((("dp", "ep"),), ("dp",)),
        Row((("dp_replicate", "dp_shard", "ep"),), ("dp",)),
        Row((("dp_shard", "ep"),), ("dp",)),
        Row((_EXPERTS,), ("dp",)),
    ),
    "get_dp_shard_mesh": (Row((_SHARD,), ("fsdp",)),),
    "get_dp_replicate_mesh": (Row((("dp_replicate",),), ("replicate",)),),
    "get_ep_mesh": (Row((("ep",),), ("ep",)), Row((("ep_shard",),), ("ep",))),
    "get_tp_mesh": (Row((("tp",),), ("tp",)),),
    "get_cp_mesh": (Row((("cp",),), ("cp",)),),
    "get_pp_mesh": (Row((("pp",),), ("pp",)),),
    "get_pp_stage_mesh": (Row((("pp",),), ("pp",)),),  # of which it takes all other axes
}


def choose_row(getter: str, present: tuple[str, ...]) -> Row:
    """Return the first row of a getter whose axes are present; raise `LayoutError` without one."""
    for row in ROWS[getter]:
        if row.fits(present):
            return row
    needs = join_words(" and ".join(fold[0] for fold in row.folds) for row in ROWS[getter])
    raise LayoutError(f"{getter} needs {needs}; this mesh has {join_words(present, 'and')}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridShard:
    """Division of the data-parallel ranks into replicas that shard the parameters (HSDP).

    Args:
        replicas: Number of replicas.
        shard_degree: Number of ranks per replica. If neither this nor ``replicas`` is given, each
            node is one replica.
        ranks_per_node: Number of ranks per node. Defaults to the environment variable
            ``LOCAL_WORLD_SIZE``, which ``torchrun`` sets.

    Raises:
        ParallelDimsError: A value is not a positive integer, or ``ranks_per_node`` is given
            together with another value.

    Examples:
        >>> HybridShard(replicas=2).split(dp_size=8, world_size=16)
        (2, 4)
    """

    replicas: int | None = None
    shard_degree: int | None = None
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        for name in ("replicas", "shard_degree", "ranks_per_node"):
            value = as_degree(name, getattr(self, name), inferable=False, optional=True)
            object.__setattr__(self, name, value)
        given = self._given()
        if given and self.ranks_per_node is not None:
            named = join_words((f"{name}={degree}" for name, degree in given.items()), "and")
            reason = (
                f"ranks_per_node={self.ranks_per_node} has no effect with {named}; leave it out"
            )
            raise refusal("nodes", reason, {"ranks_per_node": self.ranks_per_node, **given})

    def split(self, dp_size: int, world_size: int) -> tuple[int, int]:
        """Return the number of replicas and the number of ranks per replica.

        Args:
            dp_size: Number of data-parallel ranks.
            world_size: Number of all ranks, on nodes of equal size.

        Returns:
            Two numbers with the product ``dp_size``.

        Raises:
            ParallelDimsError: No such numbers exist, for example with more nodes than data-parallel
                ranks.
        """
        sizes = {"dp_size": dp_size, "world_size": world_size}
        given = self._given()
        source = ""
        if not given:
            per_node = self._ranks_per_node(world_size)
            given = {"replicas": world_size // per_node}
            source = f"(one per node: world_size={world_size} / ranks_per_node={per_node}) "
            sizes["ranks_per_node"] = per_node
        product = prod(given.values())
        if dp_size % product or (len(given) == 2 and dp_size != product):
            raise _misfit(given, sizes, source)
        replicas = given.get("replicas", dp_size // product)
        return replicas, dp_size // replicas

    def _given(self) -> dict[str, int]:
        degrees = {"replicas": self.replicas, "shard_degree": self.shard_degree}
        return {name: degree for name, degree in degrees.items() if degree is not None}

    def _ranks_per_node(self, world_size: int) -> int:
        text, name = environ.get(LOCAL_RANKS), "ranks_per_node"
        ranks = self.ranks_per_node
        if ranks is None and text is not None:
            ranks, name = as_degree(LOCAL_RANKS, text, inferable=False, optional=False), LOCAL_RANKS
        if ranks is None:
            reason = f"one replica per node asked for, but {name}=None and {LOCAL_RANKS} is not "
            reason += "set; give replicas, shard_degree or ranks_per_node"
            raise refusal("nodes", reason, {name: None})
        if world_size % ranks:
            reason = f"{name}={ranks} does not divide world_size={world_size} into nodes"
            values = {name: ranks, "world_size": world_size}
            raise refusal("nodes", reason, values, {name: divisors(world_size)})
        return ranks


def _misfit(given: dict[str, int], sizes: dict[str, int], source: str) -> ParallelDimsError:
    dp_size = sizes["dp_size"]
    legal = {}
    for name in given:
        rest = prod(degree for other, degree in given.items() if other != name)
        exact = (dp_size // rest,) if dp_size % rest == 0 else ()
        legal[name] = exact if len(given) == 2 else divisors(dp_size)
    factors = " * ".join(f"{name}={degree}" for name, degree in given.items())
    fails = f"= {prod(given.values())} is not" if len(given) == 2 else f"{source}does not divide"
    reason = f"{factors} {fails} dp_size={dp_size}, the data-parallel ranks"
    reason += f" of world_size={sizes['world_size']}"
    return refusal("hybrid", reason, given | sizes, legal)


@runtime_checkable
class HasDegree(Protocol):
    """A configuration of one kind of parallelism."""

    @property
    def degree(self) -> int:
        """Return the number of ranks."""


DegreeLike: TypeAlias = int | HasDegree


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldMesh:
    """Meshes of all views, and the axes that were requested.

    Args:
        mesh: Meshes of all axes and aliases.
        axes: Axes that the getters know, outermost first. An axis of one rank is included if its
            degree was given. ``ep`` shares the ranks of the data-parallel axes.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=2, tp=2)
        >>> world.axes
        ('dp', 'tp')
        >>> reset_world_mesh()
    """

    mesh: ParallelMesh
    axes: tuple[str, ...]

    @property
    def device_mesh(self) -> DeviceMesh:
        """All axes except ``ep`` as one torch mesh of the whole world, outermost first."""
        return _slice(self, _own_axes(self))


_world_mesh: WorldMesh | None = None


def build_world_mesh(
    *,
    dp: DegreeLike | HybridShard | None = None,
    tp: DegreeLike | None = None,
    cp: DegreeLike | None = None,
    pp: DegreeLike | None = None,
    ep: DegreeLike | None = None,
    device_type: str | None = None,
) -> WorldMesh:
    """Build the mesh of all ranks and store it for `get_world_mesh`.

    Collective, like `ParallelDims.build_mesh`. It creates all process groups that the getters
    return. A degree is an integer or an object with an integer ``degree``. The order of the axes is
    that of `ParallelDims`, with ``tp`` innermost.

    Args:
        dp: Number of data-parallel ranks, -1 for all remaining ranks, or a `HybridShard`. It may be
            omitted only if no other degree is given; then all ranks are data-parallel.
        tp: Number of ranks that share one layer.
        cp: Number of ranks that share one sequence.
        pp: Number of pipeline stages.
        ep: Number of ranks with different experts. It divides ``dp_shard * cp``, and -1 means
            ``dp_shard``. Each expert is split over ``tp``, like the other layers.
        device_type: As in `ParallelDims.build_mesh`.

    Returns:
        The mesh, for the getters.

    Raises:
        ParallelDimsError: The degrees do not fit the world.
        MeshError: There is no default process group, the ranks have different degrees, or a world
            mesh exists already.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=HybridShard(replicas=2), tp=2)
        >>> get_dp_model_mesh(world).mesh_dim_names, get_tp_mesh(world).size()
        (('dp_replicate', 'fsdp'), 2)
        >>> reset_world_mesh()
    """
    global _world_mesh
    world_size = _world_size()
    try:
        _check_slot()
        given = {"tp": tp, "cp": cp, "pp": pp, "ep": ep}
        degrees = {n: _degree(n, degree) for n, degree in given.items() if degree is not None}
        if dp is None:
            _check_alone(degrees)
        dims = _dims(INFERRED if dp is None else dp, degrees, world_size)
    except (MeshError, ParallelDimsError):
        # What the launcher says of nodes may differ between ranks, and so may this error.
        join_as_refusing()
        raise
    data = ("dp_replicate", "dp_shard") if isinstance(dp, HybridShard) else ("dp",)
    axes = tuple(name for name in AXES if name in (*data, *degrees))
    _world_mesh = WorldMesh(mesh=dims.build_mesh(device_type), axes=axes)
    return _world_mesh


def get_world_mesh() -> WorldMesh | None:
    """Return the mesh that `build_world_mesh` stored.

    Returns:
        The mesh, or None before `build_world_mesh` and after `reset_world_mesh`.

    Examples:
        >>> get_world_mesh() is None
        True
    """
    return _world_mesh


def reset_world_mesh() -> None:
    """Remove the stored world mesh and destroy its process groups. Collective.

    Examples:
        >>> reset_world_mesh()  # a no-op without a world mesh
    """
    global _world_mesh
    forgotten, _world_mesh = _world_mesh, None
    if forgotten is not None:
        forgotten.mesh.close()


def build_expert_parallel_mesh(degree: DegreeLike, device_type: str | None = None) -> WorldMesh:
    """Build a mesh of all ranks with the axes ``ep_replicate`` and ``ep_shard``, innermost last.

    Collective. Both axes together are the data mesh. The mesh is not stored: close it with
    ``result.mesh.close()``.

    Args:
        degree: Size of ``ep_shard``. A negative number means the world size. ``ep_replicate`` has
            the remaining factor.
        device_type: As in `ParallelDims.build_mesh`.

    Returns:
        The mesh, for the getters.

    Raises:
        ParallelDimsError: The degree does not divide the world size.
        MeshError: As in `ParallelDims.build_mesh`.

    Examples:
        On 4 ranks:

        >>> experts = build_expert_parallel_mesh(2)
        >>> get_ep_mesh(experts).size(), get_dp_mesh(experts).size()
        (2, 4)
        >>> experts.mesh.close()
    """
    world_size = _world_size()
    try:
        dims = ParallelDims(ep=_expert_degree(degree, world_size))
    except ParallelDimsError:
        join_as_refusing()
        raise
    return WorldMesh(mesh=dims.build_mesh(device_type), axes=("ep_replicate", "ep_shard"))


def _dims(dp: DegreeLike | HybridShard, degrees: dict[str, int], world_size: int) -> ParallelDims:
    cp, tp, pp = (degrees.get(name, 1) for name in ("cp", "tp", "pp"))
    replicas = 1
    if isinstance(dp, HybridShard):
        flat = ParallelDims(dp_shard=INFERRED, cp=cp, tp=tp, pp=pp, world_size=world_size)
        replicas, shard_degree = dp.split(flat.dp_size, world_size)
    else:
        shard_degree = _degree("dp", dp)
    dims = ParallelDims(
        dp_replicate=replicas, dp_shard=shard_degree, cp=cp, tp=tp, pp=pp, world_size=world_size
    )
    if "ep" not in degrees:
        return dims
    ep = dims.layout().size("dp_shard") if degrees["ep"] == INFERRED else degrees["ep"]
    return replace(dims, ep=ep, etp=dims.tp)


def _check_alone(degrees: dict[str, int]) -> None:
    if degrees:
        others = join_words((f"{name}={degree}" for name, degree in degrees.items()), "and")
        reason = f"{others} given without dp; give dp too: a degree, -1 for all that the others "
        reason += "leave, or HybridShard(...)"
        raise refusal("dp", reason, {**degrees, "dp": None})


def _check_slot() -> None:
    if _world_mesh is not None:
        info = get_device_mesh_info(_world_mesh)
        raise MeshError(f"there is a world mesh already ({info}); call reset_world_mesh first")


def _degree(name: str, value: DegreeLike) -> int:
    # None here is that of a configuration, which says nothing: no way to ask for inference.
    return cast(int, as_degree(name, _given(value), inferable=True, optional=False))


def _expert_degree(value: DegreeLike, world_size: int) -> int:
    given: object = _given(value)
    if isinstance(given, int) and given < 0:
        return world_size
    degree = _degree("ep", value)
    return world_size if degree == INFERRED else degree


def _given(value: DegreeLike) -> int:
    return value.degree if isinstance(value, HasDegree) else value


def _world_size() -> int:
    if not dist.is_initialized():
        raise MeshError("no default process group; call torch.distributed.init_process_group first")
    return dist.get_world_size()


AnyMesh: TypeAlias = WorldMesh | ParallelMesh | DeviceMesh


def get_dp_model_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh over which parameters are replicated and sharded, for FSDP or DDP.

    It has two axes with HSDP, replicas outermost, else one. Ranks of ``cp`` hold the same
    parameters, so they are part of the sharding. Do not use it for data: see `get_dp_mesh`.

    This getter and all others neither communicate nor create process groups.

    Args:
        mesh: A world mesh; a `ParallelMesh`, of which the axes with several ranks and data
            parallelism are present; or a torch mesh, with its own axis names.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: A required axis is absent, or a torch mesh has several axes that would have to
            be one. `flatten_mesh` flattens them.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=2, cp=2)
        >>> get_dp_model_mesh(world).size()
        4
        >>> reset_world_mesh()
    """
    return _look_up("get_dp_model_mesh", mesh)


def get_dp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the one-dimensional mesh of ranks with different samples, for data loading.

    It includes the ranks of ``ep``, which have different samples. It excludes ``cp``: these ranks
    have parts of the same samples.

    Args:
        mesh: A mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: The axis is absent, or a torch mesh has several axes that would have to be one.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=2, cp=2)
        >>> get_dp_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    return _look_up("get_dp_mesh", mesh)


def get_dp_shard_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh over which HSDP shards parameters: ``dp_shard`` with ``cp`` and ``ep``.

    Args:
        mesh: A mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: The axis is absent, or a torch mesh has several axes that would have to be one.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=HybridShard(replicas=2))
        >>> get_dp_shard_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    return _look_up("get_dp_shard_mesh", mesh)


def get_dp_replicate_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh over which HSDP replicates parameters.

    Args:
        mesh: A mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: The axis is absent, or a torch mesh has several axes that would have to be one.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=HybridShard(replicas=4))
        >>> get_dp_replicate_mesh(world).size()
        4
        >>> reset_world_mesh()
    """
    return _look_up("get_dp_replicate_mesh", mesh)


def get_dp_process_group(mesh: AnyMesh) -> dist.ProcessGroup:
    """Return the process group of `get_dp_mesh`.

    Args:
        mesh: A mesh, as in `get_dp_model_mesh`.

    Returns:
        The process group.

    Raises:
        LayoutError: The axis is absent, or a torch mesh has several axes that would have to be one.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=4)
        >>> get_dp_process_group(world).size()
        4
        >>> reset_world_mesh()
    """
    return get_dp_mesh(mesh).get_group()


def get_ep_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of ranks with different experts.

    Args:
        mesh: A mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: The axis is absent, or a torch mesh has several axes that would have to be one.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=4, ep=2)
        >>> get_ep_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    return _look_up("get_ep_mesh", mesh)


def get_tp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of ranks that share one layer.

    Args:
        mesh: A mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: The axis is absent, or a torch mesh has several axes that would have to be one.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=2, tp=2)
        >>> get_tp_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    return _look_up("get_tp_mesh", mesh)


def get_cp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of ranks that share one sequence.

    Args:
        mesh: A mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: The axis is absent, or a torch mesh has several axes that would have to be one.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=1, cp=4)
        >>> get_cp_mesh(world).size()
        4
        >>> reset_world_mesh()
    """
    return _look_up("get_cp_mesh", mesh)


def get_pp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of ranks with different pipeline stages.

    Args:
        mesh: A mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: The axis is absent, or a torch mesh has several axes that would have to be one.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=1, pp=4)
        >>> get_pp_mesh(world).size()
        4
        >>> reset_world_mesh()
    """
    return _look_up("get_pp_mesh", mesh)


def get_pp_stage_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of the ranks of one pipeline stage: all axes except ``pp``.

    Args:
        mesh: A mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: The axis is absent, or a torch mesh has several axes that would have to be one.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=1, pp=2, tp=2)
        >>> get_pp_stage_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    choose_row("get_pp_stage_mesh", _axes(mesh))
    rest = tuple(name for name in _own_axes(mesh) if name != "pp")
    if not rest:
        raise LayoutError("get_pp_stage_mesh needs an axis besides pp; this mesh has pp alone")
    return _slice(mesh, rest)


def get_device_mesh_info(mesh: AnyMesh) -> str:
    """Describe the axes of a mesh in one line.

    Args:
        mesh: A mesh, as in `get_dp_model_mesh`.

    Returns:
        The number of ranks, the device type, and the sizes of the axes. Folded ``ep`` is no factor
        of the number of ranks; it has its own clause at the end.

    Raises:
        LayoutError: ``mesh`` is not a mesh.

    Examples:
        On 4 ranks:

        >>> get_device_mesh_info(build_world_mesh(dp=4, ep=2))
        'mesh of 4 ranks on cpu: dp=4; ep=2 on the same ranks'
        >>> reset_world_mesh()
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
    """Flatten the axes of a torch mesh into one axis.

    Collective over the mesh of which ``mesh`` is a slice. The result is a slice of the same mesh,
    so FSDP and tensor parallel can combine both. Keep the result: each call may create groups.

    Args:
        mesh: A torch mesh with axis names.
        name: Name of the flattened axis. Defaults to the names of its axes, joined by ``_``.

    Returns:
        A one-dimensional torch mesh.

    Raises:
        LayoutError: ``mesh`` is not a torch mesh or has no axis names, or the name is taken.

    Examples:
        On 4 ranks:

        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
        >>> flatten_mesh(mesh).mesh_dim_names
        ('dp_shard_cp',)
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
