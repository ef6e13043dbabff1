"""One mesh of the world, built by degrees and read by functions: ``hp_mesh.world``.

For code that keeps one mesh for a process and asks for its parts: `build_world_mesh` builds it and
keeps it in the one slot, `get_dp_mesh`, `get_tp_mesh` and the others look parts up. Which axes a
getter folds is a row of one table. The model mesh folds ``cp`` into data parallelism, the data mesh
never does; ``ep`` takes ranks of both.
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
from ._groups import tell_refusal
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
    """Names under which world meshes and expert-parallel meshes have their axes.

    Members are strings, so they index meshes as the plain names do.
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
    """How data-parallel ranks form replicas, each of which shards the parameters inside itself.

    Attributes:
        replicas: Number of replicas.
        shard_degree: Ranks of one replica. With neither this nor ``replicas`` there is one replica
            for each node.
        ranks_per_node: Ranks of a node, by default what the launcher has set as
            ``LOCAL_WORLD_SIZE``.

    Raises:
        ParallelDimsError: A value is no positive integer, or ``ranks_per_node`` is beside another.
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
        """Return the number of replicas and the shard degree; their product is ``dp_size``.

        Args:
            dp_size: Number of data-parallel ranks.
            world_size: Number of all ranks, on nodes of equal size.

        Raises:
            ParallelDimsError: No such product exists, as with more nodes than data-parallel ranks.
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
    """Meshes of all views, and the axes that were asked for.

    Attributes:
        mesh: Resolves every name.
        axes: Those that the getters know, outermost first: an axis of one rank is among them if its
            degree was given. ``ep`` has ranks of the data-parallel axes.
    """

    mesh: ParallelMesh
    axes: tuple[str, ...]

    @property
    def device_mesh(self) -> DeviceMesh:
        """Return the axes but ``ep`` as one torch mesh of the whole world, outermost first."""
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
    """Build the mesh of all ranks, keep it for `get_world_mesh` and return it for the getters.

    Collective, as `ParallelDims.build_mesh` is: all process groups that a getter returns exist
    afterwards. Degrees are integers or objects with a ``degree``; the order of the axes is that of
    `ParallelDims`, ``tp`` innermost.

    Args:
        dp: Data-parallel ranks: flat as an integer, -1 for all that the others leave, and HSDP as a
            `HybridShard`. Without any degree all ranks are ``dp``, with any other it must be given.
        tp: Parts of one layer.
        cp: Parts of one sequence.
        pp: Pipeline stages.
        ep: Ranks with different experts, of those that shard the dense parameters: it divides
            ``dp_shard * cp``, and -1 is ``dp_shard``, which with ``cp=1`` are the very ranks of
            ``dp_shard``. Experts are cut over ``tp`` as the other layers are.
        device_type: As in `ParallelDims.build_mesh`.

    Returns:
        The mesh that `get_world_mesh` returns from now on.

    Raises:
        ParallelDimsError: The degrees do not make the world.
        MeshError: There is no default process group, ranks disagree, or there is a world mesh.

    Example:
        >>> world = build_world_mesh(dp=HybridShard(replicas=2), tp=8)
        >>> fully_shard(model, mesh=get_dp_model_mesh(world))
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
        tell_refusal()
        raise
    data = ("dp_replicate", "dp_shard") if isinstance(dp, HybridShard) else ("dp",)
    axes = tuple(name for name in AXES if name in (*data, *degrees))
    _world_mesh = WorldMesh(mesh=dims.build_mesh(device_type), axes=axes)
    return _world_mesh


def get_world_mesh() -> WorldMesh | None:
    """Return what `build_world_mesh` has built in this process, None before and after a reset."""
    return _world_mesh


def reset_world_mesh() -> None:
    """Forget the world mesh and destroy the groups that its build created; collective."""
    global _world_mesh
    forgotten, _world_mesh = _world_mesh, None
    if forgotten is not None:
        forgotten.mesh.close()


def build_expert_parallel_mesh(degree: DegreeLike, device_type: str | None = None) -> WorldMesh:
    """Build the mesh of all ranks with the axes ``ep_replicate`` and ``ep_shard``, innermost last.

    Collective. To the getters both axes together are ``dp``. Not kept: close it with
    ``.mesh.close()``.

    Args:
        degree: Size of ``ep_shard``, the world if negative; ``ep_replicate`` is the rest.
        device_type: As in `ParallelDims.build_mesh`.

    Raises:
        ParallelDimsError: The degree does not divide the world.
        MeshError: As in `ParallelDims.build_mesh`.
    """
    world_size = _world_size()
    try:
        dims = ParallelDims(ep=_expert_degree(degree, world_size))
    except ParallelDimsError:
        tell_refusal()
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

    Two axes with HSDP, replicas outermost, else one. Ranks of ``cp`` hold the same parameters and
    join the sharding. Not for data: see `get_dp_mesh`.

    This and all other getters only look up: they neither communicate nor create process groups.

    Args:
        mesh: A world mesh; a `ParallelMesh`, where an axis is present if it has several ranks, and
            so is data parallelism; or a torch mesh, whose axes are those of its names.

    Raises:
        LayoutError: The axes needed are absent, or in a torch mesh several that are to be one:
            `flatten_mesh` makes one of them.
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
    FSDP and tensor parallel combine both.

    Args:
        mesh: A torch mesh with names.
        name: Of the folded axis; by default the names of its axes with ``_`` between them.

    Raises:
        LayoutError: It is no torch mesh or has no names, or the name is taken.
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
