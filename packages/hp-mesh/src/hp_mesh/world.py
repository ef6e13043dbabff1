"""One mesh of all ranks for the whole process, and functions that return slices of it.

`build_world_mesh` builds the mesh and stores it. The getters (`get_dp_mesh`, `get_tp_mesh` and the
other functions ``get_..._mesh``) return slices of a given mesh. To fold axes is to flatten them
into one. The model mesh (`get_dp_model_mesh`) includes the ranks of ``cp``; the data mesh
(`get_dp_mesh`) does not. Both include the ranks of ``ep``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from os import environ
from typing import Protocol, TypeAlias, cast, runtime_checkable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._dims import ParallelDims
from ._errors import (
    INFERRED,
    LayoutError,
    MeshError,
    ParallelDimsError,
    as_degree,
    divisors,
    join_words,
    refusal,
)
from ._groups import join_as_refusing
from ._mesh import ParallelMesh
from ._torch import default_group, flatten

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


# Axes of a world mesh, outermost first.
AXES = ("pp", "dp", "dp_replicate", "dp_shard", "ep", "cp", "tp")

# Ranks of cp have the same dense parameters and share their samples: they are part of the sharding
# of parameters, but not of data loading. Ranks of ep have different samples: they are part of both.
_SHARD = ("dp_shard", "ep", "cp")
_EXPERTS = ("ep_replicate", "ep_shard")

Folds: TypeAlias = tuple[tuple[str, ...], ...]
# The possible results of each getter. A key has one tuple for each axis of the result: the axes of
# a torch mesh that are folded into it. The mesh must have the first of them; the others are folded
# in if the mesh has them. The value has the names of the folded axes in a `ParallelMesh`.
RESULTS: dict[str, dict[Folds, tuple[str, ...]]] = {
    "get_dp_model_mesh": {
        (("dp_replicate",), _SHARD): ("replicate", "fsdp"),
        (("dp", "ep", "cp"),): ("fsdp",),
        (_SHARD,): ("fsdp",),
        (_EXPERTS,): ("dp",),
    },
    "get_dp_mesh": {
        (("dp", "ep"),): ("dp",),
        (("dp_replicate", "dp_shard", "ep"),): ("dp",),
        (("dp_shard", "ep"),): ("dp",),
        (_EXPERTS,): ("dp",),
    },
    "get_dp_shard_mesh": {(_SHARD,): ("fsdp",)},
    "get_dp_replicate_mesh": {(("dp_replicate",),): ("replicate",)},
    "get_ep_mesh": {(("ep",),): ("ep",), (("ep_shard",),): ("ep",)},
    "get_tp_mesh": {(("tp",),): ("tp",)},
    "get_cp_mesh": {(("cp",),): ("cp",)},
    "get_pp_mesh": {(("pp",),): ("pp",)},
    "get_pp_stage_mesh": {(("pp",),): ("pp",)},  # it returns all other axes
}


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
        given, ranks = self._given(), self.ranks_per_node
        if given and ranks is not None:
            named = join_words(_equations(given), "and")
            reason = f"ranks_per_node={ranks} has no effect with {named}; leave it out"
            raise refusal("nodes", reason, {"ranks_per_node": ranks, **given})

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
        given, source = self._given(), ""
        sizes = {"dp_size": dp_size, "world_size": world_size}
        if not given:
            per_node = sizes["ranks_per_node"] = self._ranks_per_node(world_size)
            given = {"replicas": world_size // per_node}
            source = f" (one per node: world_size={world_size} / ranks_per_node={per_node})"
        product, both = prod(given.values()), len(given) == 2
        if product == dp_size or (dp_size % product == 0 and not both):
            replicas = given.get("replicas", dp_size // product)
            return replicas, dp_size // replicas
        relation = f" = {product} is not" if both else f"{source} does not divide"
        reason = f"{' * '.join(_equations(given))}{relation} dp_size={dp_size}, "
        reason += f"the data-parallel ranks of world_size={world_size}"
        legal = {
            name: tuple(n for n in divisors(dp_size) if not both or n * product == dp_size * degree)
            for name, degree in given.items()
        }
        raise refusal("hybrid", reason, given | sizes, legal)

    def _given(self) -> dict[str, int]:
        degrees = {"replicas": self.replicas, "shard_degree": self.shard_degree}
        return {name: degree for name, degree in degrees.items() if degree is not None}

    def _ranks_per_node(self, world_size: int) -> int:
        name, given = "ranks_per_node", self.ranks_per_node or environ.get(LOCAL_RANKS)
        if given is None:
            reason = f"{LOCAL_RANKS} is not set; give replicas, shard_degree or ranks_per_node"
            raise refusal("nodes", reason, {name: None})
        if self.ranks_per_node is None:
            name = LOCAL_RANKS
        ranks = _degree(name, given, inferable=False)
        if world_size % ranks:
            reason = f"{name}={ranks} does not divide world_size={world_size} into nodes"
            values = {name: ranks, "world_size": world_size}
            raise refusal("nodes", reason, values, {name: divisors(world_size)})
        return ranks


@runtime_checkable
class HasDegree(Protocol):
    """A configuration of one kind of parallelism."""

    @property
    def degree(self) -> int:
        """Return the number of ranks."""


DegreeLike: TypeAlias = int | HasDegree


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldMesh:
    """All meshes over one world of ranks, with the names of the requested axes.

    Args:
        mesh: Meshes of all axes and aliases.
        axes: Names of the axes that the getters can return, outermost first. An axis of one rank is
            included if its degree was given. ``ep`` shares the ranks of the data-parallel axes.

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
        return _slice(self.mesh, _world_axes(self.mesh, self.axes))


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

    Collective, like `ParallelDims.build_mesh`. It creates all process groups that the functions
    ``get_*_mesh`` return. A degree can be an integer, or an object with an integer attribute
    ``degree``. The order of the axes is the default order of `ParallelDims`, with ``tp`` innermost.

    Args:
        dp: Number of data-parallel ranks, -1 for all remaining ranks, or a `HybridShard`. It may be
            omitted only if no other degree is given; then all ranks are data-parallel.
        tp: Number of ranks that share one layer.
        cp: Number of ranks that share one sequence.
        pp: Number of pipeline stages.
        ep: Number of ranks with different experts. It divides the number of ranks that shard
            parameters: ``dp``, without the replicas of a `HybridShard`, times ``cp``. -1 means
            ``dp`` without the replicas. Each expert is split over ``tp``, like the other layers.
        device_type: Device type of the meshes, such as ``"cuda"``. Defaults to the accelerator's
            type if the default process group has a backend for it, else ``"cpu"``.

    Returns:
        The world mesh. The functions ``get_*_mesh`` take it as their argument.

    Raises:
        ParallelDimsError: The degrees do not fit the number of ranks.
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
    try:
        if _world_mesh is not None and not _world_mesh.mesh.is_closed:
            info = get_device_mesh_info(_world_mesh)
            raise MeshError(f"there is a world mesh already ({info}); call reset_world_mesh first")
        given = {"tp": tp, "cp": cp, "pp": pp, "ep": ep}
        degrees = {n: _degree(n, degree) for n, degree in given.items() if degree is not None}
        dims = _choose_dims(dp, degrees, default_group().size())
    except (MeshError, ParallelDimsError):
        # The number of ranks per node may differ between ranks, and valid ranks wait in the build.
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
    mesh, _world_mesh = _world_mesh, None
    if mesh is not None:
        mesh.mesh.close()


def build_expert_parallel_mesh(degree: DegreeLike, device_type: str | None = None) -> WorldMesh:
    """Build a mesh of all ranks with the axes ``ep_replicate`` and ``ep_shard``, innermost last.

    Collective. Both axes together are the data mesh. The mesh is not stored: close it with
    ``result.mesh.close()``.

    Args:
        degree: Size of ``ep_shard``. A negative number means the world size. ``ep_replicate`` has
            the remaining factor.
        device_type: Device type of the meshes, as in `build_world_mesh`.

    Returns:
        The meshes, which the getters take as their argument.

    Raises:
        ParallelDimsError: The degree does not divide the number of ranks.
        MeshError: There is no default process group, or the ranks have different degrees.

    Examples:
        On 4 ranks:

        >>> experts = build_expert_parallel_mesh(2)
        >>> get_ep_mesh(experts).size(), get_dp_mesh(experts).size()
        (2, 4)
        >>> experts.mesh.close()
    """
    try:
        given: object = degree.degree if isinstance(degree, HasDegree) else degree
        # -1 is the only negative number that `as_degree` accepts.
        ep = _degree("ep", max(given, INFERRED) if isinstance(given, int) else degree)
        dims = ParallelDims(ep=default_group().size() if ep == INFERRED else ep)
    except ParallelDimsError:
        join_as_refusing()
        raise
    return WorldMesh(mesh=dims.build_mesh(device_type), axes=("ep_replicate", "ep_shard"))


def _choose_dims(
    dp: DegreeLike | HybridShard | None, degrees: dict[str, int], world_size: int
) -> ParallelDims:
    if dp is None and degrees:
        others = join_words(_equations(degrees), "and")
        reason = f"{others} given without dp; give dp too: a degree, -1 or a HybridShard"
        raise refusal("dp", reason, {**degrees, "dp": None})
    cp, tp, pp = (degrees.get(name, 1) for name in ("cp", "tp", "pp"))
    shard = INFERRED if dp is None or isinstance(dp, HybridShard) else _degree("dp", dp)
    dims = ParallelDims(dp_shard=shard, cp=cp, tp=tp, pp=pp, world_size=world_size)
    if isinstance(dp, HybridShard):
        replicas, shard_degree = dp.split(dims.dp_size, world_size)
        dims = replace(dims, dp_replicate=replicas, dp_shard=shard_degree)
    if "ep" not in degrees:
        return dims
    ep = dims.layout().size("dp_shard") if degrees["ep"] == INFERRED else degrees["ep"]
    return replace(dims, ep=ep, etp=dims.tp)


def _degree(name: str, value: DegreeLike | str, *, inferable: bool = True) -> int:
    # The degree of a configuration may be None, which is an error: it does not mean -1.
    degree = value.degree if isinstance(value, HasDegree) else value
    return cast(int, as_degree(name, degree, inferable=inferable, optional=False))


def _equations(degrees: Mapping[str, int]) -> list[str]:
    return [f"{name}={degree}" for name, degree in degrees.items()]


AnyMesh: TypeAlias = WorldMesh | ParallelMesh | DeviceMesh


def get_dp_model_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh over which FSDP or DDP replicates and shards parameters.

    With HSDP it has two axes, replicas outermost. Without HSDP it has one axis. Ranks of ``cp``
    hold the same parameters, so they are part of the sharding. For data loading use `get_dp_mesh`.

    Neither this getter nor another one communicates or creates process groups.

    Args:
        mesh: A world mesh, a `ParallelMesh` or a torch mesh with axis names. A `ParallelMesh` has
            the data-parallel axes, and all other axes with more than one rank.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: ``mesh`` has no data-parallel axis, or it is a torch mesh with axes that have
            to be folded into one first. The error names the call of `flatten_mesh`.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=2, cp=2)
        >>> get_dp_model_mesh(world).size()
        4
        >>> reset_world_mesh()
    """
    return _get_mesh("get_dp_model_mesh", mesh)


def get_dp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the one-dimensional mesh of ranks with different samples, for data loading.

    It includes the ranks of ``ep``, which have different samples. It does not include the ranks of
    ``cp``, which have parts of the same samples.

    Args:
        mesh: World mesh, `ParallelMesh` or torch mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: ``mesh`` has no data-parallel axis, or it is a torch mesh with axes that have
            to be folded into one first. The error names the call of `flatten_mesh`.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=2, cp=2)
        >>> get_dp_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    return _get_mesh("get_dp_mesh", mesh)


def get_dp_shard_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh over which HSDP shards parameters: ``dp_shard`` with ``cp`` and ``ep``.

    Args:
        mesh: World mesh, `ParallelMesh` or torch mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: ``mesh`` has no axis ``dp_shard``, or it is a torch mesh with a separate axis
            ``cp`` or ``ep``.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=HybridShard(replicas=2))
        >>> get_dp_shard_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    return _get_mesh("get_dp_shard_mesh", mesh)


def get_dp_replicate_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh over which HSDP replicates parameters.

    Args:
        mesh: World mesh, `ParallelMesh` or torch mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: ``mesh`` has no axis ``dp_replicate``.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=HybridShard(replicas=4))
        >>> get_dp_replicate_mesh(world).size()
        4
        >>> reset_world_mesh()
    """
    return _get_mesh("get_dp_replicate_mesh", mesh)


def get_dp_process_group(mesh: AnyMesh) -> dist.ProcessGroup:
    """Return the process group of `get_dp_mesh`.

    Args:
        mesh: World mesh, `ParallelMesh` or torch mesh, as in `get_dp_model_mesh`.

    Returns:
        The process group.

    Raises:
        LayoutError: ``mesh`` has no data-parallel axis, or it is a torch mesh with axes that have
            to be folded into one first.

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
        mesh: World mesh, `ParallelMesh` or torch mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: ``mesh`` has no axis ``ep`` or ``ep_shard``.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=4, ep=2)
        >>> get_ep_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    return _get_mesh("get_ep_mesh", mesh)


def get_tp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of ranks that share one layer.

    Args:
        mesh: World mesh, `ParallelMesh` or torch mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: ``mesh`` has no axis ``tp``.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=2, tp=2)
        >>> get_tp_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    return _get_mesh("get_tp_mesh", mesh)


def get_cp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of ranks that share one sequence.

    Args:
        mesh: World mesh, `ParallelMesh` or torch mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: ``mesh`` has no axis ``cp``.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=1, cp=4)
        >>> get_cp_mesh(world).size()
        4
        >>> reset_world_mesh()
    """
    return _get_mesh("get_cp_mesh", mesh)


def get_pp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of ranks with different pipeline stages.

    Args:
        mesh: World mesh, `ParallelMesh` or torch mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: ``mesh`` has no axis ``pp``.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=1, pp=4)
        >>> get_pp_mesh(world).size()
        4
        >>> reset_world_mesh()
    """
    return _get_mesh("get_pp_mesh", mesh)


def get_pp_stage_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of the ranks of one pipeline stage: all axes except ``pp``.

    Args:
        mesh: World mesh, `ParallelMesh` or torch mesh, as in `get_dp_model_mesh`.

    Returns:
        A torch mesh.

    Raises:
        LayoutError: ``mesh`` has no axis ``pp``, or no other axis.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=1, pp=2, tp=2)
        >>> get_pp_stage_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    source, present = _source_and_axes(mesh)
    _choose_result("get_pp_stage_mesh", present)
    others = tuple(name for name in _world_axes(source, present) if name != "pp")
    if not others:
        raise LayoutError("get_pp_stage_mesh needs another axis than pp; this mesh has pp alone")
    return _slice(source, others)


def get_device_mesh_info(mesh: AnyMesh) -> str:
    """Describe the axes of a mesh in one line.

    Args:
        mesh: World mesh, `ParallelMesh` or torch mesh, as in `get_dp_model_mesh`.

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
    if isinstance(mesh, DeviceMesh):
        whole, inside = mesh, ""
        names = mesh.mesh_dim_names or tuple(f"axis {index}" for index in range(mesh.ndim))
    else:
        source, present = _source_and_axes(mesh)
        names = _world_axes(source, present)
        whole = _slice(source, names)
        inside = "" if names == present else f"; ep={source['ep'].size()} on the same ranks"
    axes = ", ".join(_equations(dict(zip(names, whole.shape, strict=True))))
    return f"mesh of {whole.size()} ranks on {whole.device_type}: {axes}{inside}"


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
    _, names = _source_and_axes(mesh)
    try:
        return flatten(mesh, name)
    except ValueError as error:
        taken = "_".join(names) if name is None else name
        raise LayoutError(f"name={taken!r} is taken; use another name for {list(names)}") from error


def _check_flattened(mesh: object, name: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        is_built = isinstance(mesh, WorldMesh | ParallelMesh)
        advice = ", and this one has all its folds already: use the getters" if is_built else ""
        raise LayoutError(f"flatten_mesh takes a torch DeviceMesh, not {_describe(mesh)}{advice}")
    if not isinstance(name, str | None):
        raise LayoutError(f"name={name!r} is no name; use a string or None")


def _get_mesh(getter: str, mesh: AnyMesh) -> DeviceMesh:
    source, present = _source_and_axes(mesh)
    folds, names = _choose_result(getter, present)
    if isinstance(source, ParallelMesh):
        return _slice(source, names)
    parts = [tuple(name for name in present if name in fold) for fold in folds]
    separate = next((part for part in parts if len(part) > 1), None)
    if separate is None:
        return _slice(source, tuple(part[0] for part in parts))
    # Folding the separate axes would create a process group. Only private functions of torch put a
    # flattened axis and another axis into one mesh.
    call = f"flatten_mesh(mesh[{', '.join(map(repr, separate))}])"
    if len(parts) == 1:
        advice = f"keep the result of {call} and use it instead, or use build_world_mesh"
    else:
        advice = f"use build_world_mesh, which has all folds; {call} returns this axis alone"
    raise LayoutError(
        f"{getter} needs {' x '.join(separate)} as one axis, but this mesh has separate axes "
        f"({get_device_mesh_info(mesh)}); {advice}"
    )


def _choose_result(getter: str, present: tuple[str, ...]) -> tuple[Folds, tuple[str, ...]]:
    for folds, names in RESULTS[getter].items():
        if all(fold[0] in present for fold in folds):
            return folds, names
    needs = join_words(" and ".join(fold[0] for fold in folds) for folds in RESULTS[getter])
    raise LayoutError(f"{getter} needs {needs}; this mesh has {join_words(present, 'and')}")


def _source_and_axes(mesh: AnyMesh) -> tuple[ParallelMesh | DeviceMesh, tuple[str, ...]]:
    """Return the mesh that a getter slices, and the names of its axes, outermost first."""
    if isinstance(mesh, WorldMesh):
        return mesh.mesh, mesh.axes
    if isinstance(mesh, DeviceMesh):
        if not mesh.mesh_dim_names:
            raise LayoutError(f"a mesh of shape {tuple(mesh.shape)} has no axis names; name them")
        return mesh, mesh.mesh_dim_names
    if isinstance(mesh, ParallelMesh):
        size = mesh.layout.size
        data = ("dp_replicate", "dp_shard") if size("replicate") > 1 else ("dp",)
        several = tuple(name for name in ("pp", "ep", "cp", "tp") if size(name) > 1)
        return mesh, tuple(name for name in AXES if name in (*data, *several))
    raise LayoutError(
        f"{_describe(mesh)} given for a mesh; use a WorldMesh, a ParallelMesh or a torch DeviceMesh"
    )


def _describe(value: object) -> str:
    return repr(value) if isinstance(value, str | int | None) else f"a {type(value).__name__}"


def _world_axes(source: ParallelMesh | DeviceMesh, present: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes whose sizes multiply to the number of ranks: all but a folded ``ep``."""
    if isinstance(source, DeviceMesh) or ("dp" not in present and source.dims.ep_mode == "peer"):
        return present
    return tuple(name for name in present if name != "ep")


def _slice(source: ParallelMesh | DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return source[names if len(names) > 1 else names[0]]
