"""One device mesh over all ranks that a process stores, and functions that return slices of a mesh.

`build_world_mesh` builds the mesh and stores it. The getters (`get_dp_mesh`, `get_tp_mesh` and the
other functions ``get_..._mesh``) take a mesh as argument and return a slice of it.

| getter | mesh for | ranks of ``ep`` | ranks of ``cp`` |
|---|---|---|---|
| `get_dp_model_mesh` | FSDP and DDP | included | included |
| `get_dp_mesh` | data loading | included | not included |

In this module, an axis is a mesh dimension. To fold axes is to flatten them into one axis.
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
    plural,
    read_integer,
    refusal,
)
from ._groups import report_invalid_arguments
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
    """Names of mesh dimensions, for meshes that `build_world_mesh` and similar functions return.

    A member is a string, so ``mesh[MeshAxisName.tp]`` is ``mesh["tp"]``.

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


# Mesh dimensions that a `WorldMesh` can have, outermost first.
AXES = ("pp", "dp", "dp_replicate", "dp_shard", "ep", "cp", "tp")

# FSDP shards parameters over the ranks of cp and ep too. For data loading, the ranks of ep count as
# data-parallel ranks because their samples differ. The ranks of cp have parts of the same samples.
_SHARD = ("dp_shard", "ep", "cp")
_EXPERTS = ("ep_replicate", "ep_shard")

FlattenedAxes: TypeAlias = tuple[tuple[str, ...], ...]
# The possible results of each getter. A key of the outer dict is the name of the getter. The inner
# dict has one entry for each possible result. The getter returns the first result for which the
# mesh has all required axes.
# - A key of the inner dict has one tuple for each axis of the result. The tuple has the names of
#   the mesh's axes that are flattened into this axis. Its first name is required.
# - A value of the inner dict has the names of the result's axes if the mesh is a `ParallelMesh`.
RESULTS: dict[str, dict[FlattenedAxes, tuple[str, ...]]] = {
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
    "get_pp_stage_mesh": {(("pp",),): ("pp",)},  # requires pp, but returns all other axes
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridShard:
    """Sizes of HSDP: how many replicas there are and how many ranks each replica has.

    With hybrid sharding (HSDP), each replica has all parameters, sharded over the data-parallel
    ranks of the replica. Set ``replicas``, ``shard_degree`` or both. If both are None, there is one
    replica per node.

    Args:
        replicas: Number of replicas.
        shard_degree: Number of data-parallel ranks per replica.
        ranks_per_node: Number of ranks per node. Used only if ``replicas`` and ``shard_degree`` are
            None. Defaults to the environment variable ``LOCAL_WORLD_SIZE``, which ``torchrun``
            sets.

    Raises:
        ParallelDimsError: A value is not a positive integer, or ``ranks_per_node`` is given
            together with ``replicas`` or ``shard_degree``.

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
        """Compute the number of replicas and the number of ranks per replica.

        Args:
            dp_size: Number of data-parallel ranks.
            world_size: Number of all ranks. Used only for one replica per node.

        Returns:
            A tuple ``(replicas, shard_degree)``. ``shard_degree`` is the number of data-parallel
            ranks per replica. ``replicas * shard_degree`` is ``dp_size``.

        Raises:
            ParallelDimsError: The number of replicas or the number of ranks per replica does not
                divide ``dp_size``, or their product differs from ``dp_size``. With one replica per
                node: the number of ranks per node does not divide ``world_size``, or
                ``LOCAL_WORLD_SIZE`` is not set.
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
    """Any object with an attribute ``degree``, such as a configuration of tensor parallelism."""

    @property
    def degree(self) -> int:
        """Number of ranks, such as the size of a tensor-parallel group."""


DegreeLike: TypeAlias = int | HasDegree


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldMesh:
    """A `ParallelMesh` and the names of its dimensions that the user requested.

    `build_world_mesh` returns a `WorldMesh`. The functions ``get_*_mesh`` take it as argument.

    Args:
        mesh: All device meshes and process groups.
        axes: Names of the requested mesh dimensions, outermost first. A dimension is requested if
            `build_world_mesh` got its degree, even a degree of 1. ``ep`` is in ``axes`` if it was
            requested, but it reuses the ranks of the other dimensions: the product of the other
            sizes is the number of ranks.

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
        """Torch mesh of all ranks. Its dimensions are the names in ``axes`` without ``ep``."""
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

    Collective over the default process group. The functions ``get_*_mesh`` do not create process
    groups: they use the groups that this function creates. The mesh dimensions are in the default
    order of `ParallelDims`: ``pp`` is outermost and ``tp`` is innermost.

    A degree is the size of a mesh dimension: an integer, or an object with an integer attribute
    ``degree``.

    Args:
        dp: Number of data-parallel ranks, or a `HybridShard`. -1 means the number of ranks divided
            by ``tp * cp * pp``. Required if another degree is set. If no degree is set, all ranks
            are data-parallel.
        tp: Number of ranks that share one layer.
        cp: Number of ranks that share one sequence.
        pp: Number of pipeline stages.
        ep: Number of ranks with different experts. It must divide ``shards * cp``, and -1 means
            ``shards``. ``shards`` is ``dp``, or the number of data-parallel ranks per replica if
            ``dp`` is a `HybridShard`. Tensor parallelism shards each expert over ``tp``, like the
            other layers.
        device_type: Device type of the meshes, such as ``"cuda"``. Defaults to the accelerator's
            type if the default process group has a backend for it, else ``"cpu"``.

    Returns:
        A `WorldMesh`, which the functions ``get_*_mesh`` take as argument.

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
        # LOCAL_WORLD_SIZE may differ between nodes, so other ranks may have no error. They wait in
        # `ParallelDims.build_mesh` until this rank reports the error.
        report_invalid_arguments()
        raise
    data = ("dp_replicate", "dp_shard") if isinstance(dp, HybridShard) else ("dp",)
    axes = tuple(name for name in AXES if name in (*data, *degrees))
    _world_mesh = WorldMesh(mesh=dims.build_mesh(device_type), axes=axes)
    return _world_mesh


def get_world_mesh() -> WorldMesh | None:
    """Return the mesh that `build_world_mesh` stored.

    Returns:
        A `WorldMesh`, or None before `build_world_mesh` and after `reset_world_mesh`.

    Examples:
        >>> get_world_mesh() is None
        True
    """
    return _world_mesh


def reset_world_mesh() -> None:
    """Remove the stored world mesh and destroy its process groups.

    Every rank calls this function, after its last collective on these groups.

    Examples:
        >>> reset_world_mesh()  # a no-op without a world mesh
    """
    global _world_mesh
    mesh, _world_mesh = _world_mesh, None
    if mesh is not None:
        mesh.mesh.close()


def build_expert_parallel_mesh(degree: DegreeLike, device_type: str | None = None) -> WorldMesh:
    """Build a mesh of all ranks with the dimensions ``ep_replicate`` and ``ep_shard``.

    The ranks of one ``ep_shard`` group hold different experts. The ranks of one ``ep_replicate``
    group hold the same experts. Every rank is a data-parallel rank: it has its own samples.
    ``ep_shard`` is the innermost dimension.

    Collective over the default process group. `get_world_mesh` does not return this mesh.

    Args:
        degree: Size of ``ep_shard``. A negative number means the number of all ranks. The size of
            ``ep_replicate`` is the number of ranks divided by ``degree``.
        device_type: Device type of the meshes, as in `build_world_mesh`.

    Returns:
        A `WorldMesh`, which `get_ep_mesh`, `get_dp_mesh` and `get_dp_model_mesh` take as argument.
        Its method ``mesh.close()`` destroys the process groups.

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
        number = read_integer(given)
        ep = _degree("ep", degree if number is None else max(number, INFERRED))
        dims = ParallelDims(ep=default_group().size() if ep == INFERRED else ep)
    except ParallelDimsError:
        report_invalid_arguments()
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
    # `as_degree` raises an error if an object's attribute ``degree`` is None. For the automatic
    # size, the attribute must be -1.
    degree = value.degree if isinstance(value, HasDegree) else value
    return cast(int, as_degree(name, degree, inferable=inferable, optional=False))


def _equations(degrees: Mapping[str, int]) -> list[str]:
    return [f"{name}={degree}" for name, degree in degrees.items()]


AnyMesh: TypeAlias = WorldMesh | ParallelMesh | DeviceMesh


def get_dp_model_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh for FSDP or DDP: the ranks over which parameters are sharded or replicated.

    The ranks of ``cp`` are included, because they hold the same parameters. Use `get_dp_mesh` for
    data loading. The function does not communicate or create process groups.

    Args:
        mesh: A `WorldMesh`, a `ParallelMesh` or a torch mesh with names of dimensions.

    Returns:
        A torch mesh. With HSDP it has two dimensions: the outer one for the replicas, the inner one
        for the ranks that shard parameters. Without HSDP it has one dimension.

    Raises:
        LayoutError: ``mesh`` has no data-parallel dimension. Or ``mesh`` is a torch mesh in which
            the ranks that the result needs are in several dimensions, such as ``dp`` and ``cp``.
            The error contains the call of `flatten_mesh` that flattens these dimensions.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=2, cp=2)
        >>> get_dp_model_mesh(world).size()
        4
        >>> reset_world_mesh()
    """
    return _get_mesh("get_dp_model_mesh", mesh)


def get_dp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh for data loading: the ranks with different samples.

    The ranks of ``ep`` are included, because they have different samples. The ranks of ``cp`` are
    not included, because they have parts of the same samples. The function does not communicate or
    create process groups.

    Args:
        mesh: A `WorldMesh`, a `ParallelMesh` or a torch mesh with names of dimensions.

    Returns:
        A one-dimensional torch mesh.

    Raises:
        LayoutError: ``mesh`` has no data-parallel dimension. Or ``mesh`` is a torch mesh in which
            the data-parallel ranks are in several dimensions, such as ``dp_replicate`` and
            ``dp_shard``. The error contains the call of `flatten_mesh` that flattens these
            dimensions.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=2, cp=2)
        >>> get_dp_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    return _get_mesh("get_dp_mesh", mesh)


def get_dp_shard_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of the ranks over which one HSDP replica shards its parameters.

    The ranks of ``dp_shard``, ``cp`` and ``ep`` are included. The function does not communicate or
    create process groups.

    Args:
        mesh: A `WorldMesh`, a `ParallelMesh` or a torch mesh with names of dimensions.

    Returns:
        A one-dimensional torch mesh.

    Raises:
        LayoutError: ``mesh`` has no dimension ``dp_shard``. Or ``mesh`` is a torch mesh that also
            has a dimension ``cp`` or ``ep``. The error contains the call of `flatten_mesh` that
            flattens these dimensions.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=HybridShard(replicas=2))
        >>> get_dp_shard_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    return _get_mesh("get_dp_shard_mesh", mesh)


def get_dp_replicate_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of the ranks that hold the same shard in different HSDP replicas.

    The function does not communicate or create process groups.

    Args:
        mesh: A `WorldMesh`, a `ParallelMesh` or a torch mesh with names of dimensions.

    Returns:
        A one-dimensional torch mesh.

    Raises:
        LayoutError: ``mesh`` has no dimension ``dp_replicate``.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=HybridShard(replicas=4))
        >>> get_dp_replicate_mesh(world).size()
        4
        >>> reset_world_mesh()
    """
    return _get_mesh("get_dp_replicate_mesh", mesh)


def get_dp_process_group(mesh: AnyMesh) -> dist.ProcessGroup:
    """Return the process group of the ranks with different samples.

    The function returns the process group of the mesh that `get_dp_mesh` returns.

    Args:
        mesh: A `WorldMesh`, a `ParallelMesh` or a torch mesh with names of dimensions.

    Returns:
        The torch process group that contains this rank.

    Raises:
        LayoutError: ``mesh`` has no data-parallel dimension. Or ``mesh`` is a torch mesh in which
            the data-parallel ranks are in several dimensions, such as ``dp_replicate`` and
            ``dp_shard``.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=4)
        >>> get_dp_process_group(world).size()
        4
        >>> reset_world_mesh()
    """
    return get_dp_mesh(mesh).get_group()


def get_ep_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of the ranks with different experts.

    Args:
        mesh: A `WorldMesh`, a `ParallelMesh` or a torch mesh with names of dimensions.

    Returns:
        A one-dimensional torch mesh.

    Raises:
        LayoutError: ``mesh`` has neither a dimension ``ep`` nor a dimension ``ep_shard``.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=4, ep=2)
        >>> get_ep_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    return _get_mesh("get_ep_mesh", mesh)


def get_tp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh for tensor parallelism: the ranks that share one layer.

    Args:
        mesh: A `WorldMesh`, a `ParallelMesh` or a torch mesh with names of dimensions.

    Returns:
        A one-dimensional torch mesh.

    Raises:
        LayoutError: ``mesh`` has no dimension ``tp``.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=2, tp=2)
        >>> get_tp_mesh(world).size()
        2
        >>> reset_world_mesh()
    """
    return _get_mesh("get_tp_mesh", mesh)


def get_cp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh for context parallelism: the ranks that share one sequence.

    Args:
        mesh: A `WorldMesh`, a `ParallelMesh` or a torch mesh with names of dimensions.

    Returns:
        A one-dimensional torch mesh.

    Raises:
        LayoutError: ``mesh`` has no dimension ``cp``.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=1, cp=4)
        >>> get_cp_mesh(world).size()
        4
        >>> reset_world_mesh()
    """
    return _get_mesh("get_cp_mesh", mesh)


def get_pp_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh for pipeline parallelism: one rank of each pipeline stage.

    Args:
        mesh: A `WorldMesh`, a `ParallelMesh` or a torch mesh with names of dimensions.

    Returns:
        A one-dimensional torch mesh.

    Raises:
        LayoutError: ``mesh`` has no dimension ``pp``.

    Examples:
        On 4 ranks:

        >>> world = build_world_mesh(dp=1, pp=4)
        >>> get_pp_mesh(world).size()
        4
        >>> reset_world_mesh()
    """
    return _get_mesh("get_pp_mesh", mesh)


def get_pp_stage_mesh(mesh: AnyMesh) -> DeviceMesh:
    """Return the mesh of all ranks in this rank's pipeline stage.

    Args:
        mesh: A `WorldMesh`, a `ParallelMesh` or a torch mesh with names of dimensions.

    Returns:
        A torch mesh with all dimensions except ``pp``.

    Raises:
        LayoutError: ``mesh`` has no dimension ``pp``, or ``pp`` is its only dimension.

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
    """Describe the dimensions of a mesh in one line.

    Args:
        mesh: A `WorldMesh`, a `ParallelMesh` or a torch mesh.

    Returns:
        A string with the number of ranks, the device type, and the size of each dimension. If
        ``ep`` reuses the ranks of other dimensions, the size of ``ep`` is at the end.

    Raises:
        LayoutError: ``mesh`` is not a mesh.

    Examples:
        On 4 ranks:

        >>> get_device_mesh_info(build_world_mesh(dp=4, ep=2))
        'mesh of 4 ranks on cpu: dp=4; ep=2 on the same ranks'
        >>> reset_world_mesh()
    """
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or tuple(f"axis {index}" for index in range(mesh.ndim))
        kind, sizes, inside = mesh.device_type, dict(zip(names, mesh.shape, strict=True)), ""
    else:
        _, present = _source_and_axes(mesh)
        built = mesh.mesh if isinstance(mesh, WorldMesh) else mesh
        names = _world_axes(built, present)
        # The layout knows the sizes even if the process groups are destroyed.
        kind, size = built.device_type, built.layout.size
        sizes = {name: size(name) for name in names}
        inside = "" if names == present else f"; ep={size('ep')} on the same ranks"
    axes = ", ".join(_equations(sizes))
    return f"mesh of {plural(prod(sizes.values()), 'rank')} on {kind}: {axes}{inside}"


def flatten_mesh(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """Flatten all dimensions of a torch mesh into one dimension.

    Collective over the root mesh, which is the mesh from which ``mesh`` was sliced. The result is a
    slice of the root mesh too. FSDP and tensor parallel can therefore combine the result with other
    slices of the root mesh. Each call may create process groups, so call the function once and
    store the result.

    Args:
        mesh: A torch mesh with names of dimensions.
        name: Name of the flattened dimension. Defaults to the names of the dimensions, joined by
            ``_``.

    Returns:
        A one-dimensional torch mesh.

    Raises:
        LayoutError: ``mesh`` is not a torch mesh, the dimensions of ``mesh`` have no names, or the
            root mesh already has a different dimension with the name ``name``.

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
    # Flattening the separate axes here would create a process group, but getters do not
    # communicate. torch has no public function that returns a mesh of a flattened axis and another
    # axis.
    call = f"flatten_mesh(mesh[{', '.join(map(repr, separate))}])"
    if len(parts) == 1:
        advice = f"keep the result of {call} and use it instead, or use build_world_mesh"
    else:
        advice = f"use build_world_mesh, which has all folds; {call} returns this axis alone"
    raise LayoutError(
        f"{getter} needs {' x '.join(separate)} as one axis, but this mesh has separate axes "
        f"({get_device_mesh_info(mesh)}); {advice}"
    )


def _choose_result(getter: str, present: tuple[str, ...]) -> tuple[FlattenedAxes, tuple[str, ...]]:
    for folds, names in RESULTS[getter].items():
        if all(fold[0] in present for fold in folds):
            return folds, names
    needs = join_words(" and ".join(fold[0] for fold in folds) for folds in RESULTS[getter])
    raise LayoutError(f"{getter} needs {needs}; this mesh has {join_words(present, 'and')}")


def _source_and_axes(mesh: AnyMesh) -> tuple[ParallelMesh | DeviceMesh, tuple[str, ...]]:
    """Return the mesh that a ``get_*_mesh`` function slices, and the names of its dimensions.

    Args:
        mesh: Argument of a ``get_*_mesh`` function.

    Returns:
        A tuple ``(source, names)``, with the names outermost first. It depends on the type of
        ``mesh``:

        - `WorldMesh`: ``mesh.mesh`` and ``mesh.axes``.
        - Torch mesh: ``mesh`` and its ``mesh_dim_names``.
        - `ParallelMesh`: ``mesh`` and the names of the data-parallel dimensions, of any size, and
          of ``pp``, ``ep``, ``cp`` and ``tp`` if their size is above 1.

    Raises:
        LayoutError: The argument is not a mesh, or the dimensions of a torch mesh have no names.
    """
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


def _world_axes(source: ParallelMesh | DeviceMesh, names: tuple[str, ...]) -> tuple[str, ...]:
    """Remove ``ep`` from ``names`` if ``ep`` reuses the ranks of other dimensions.

    Args:
        source: Mesh that has the dimensions.
        names: Names of dimensions, as in the result of `_source_and_axes`.

    Returns:
        The remaining names. The product of the sizes of these dimensions is the number of ranks.
    """
    if isinstance(source, DeviceMesh) or ("dp" not in names and source.dims.ep_mode == "peer"):
        return names
    return tuple(name for name in names if name != "ep")


def _slice(source: ParallelMesh | DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return source[names if len(names) > 1 else names[0]]
