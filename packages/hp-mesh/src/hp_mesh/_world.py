"""The world mesh of this process in its one slot, and how it and expert meshes are built."""

from dataclasses import replace
from typing import Protocol, TypeAlias, cast, runtime_checkable

import torch.distributed as dist

from ._axis_names import AXES
from ._degrees import INFERRED, as_degree
from ._dims import ParallelDims
from ._errors import MeshError, ParallelDimsError, Violation, join_words
from ._getters import WorldMesh, get_device_mesh_info
from ._groups import tell_refusal
from ._hybrid import HybridShard


@runtime_checkable
class HasDegree(Protocol):
    """A configuration of one kind of parallelism."""

    @property
    def degree(self) -> int:
        """Return the number of ranks."""


DegreeLike: TypeAlias = int | HasDegree

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

    Degrees are integers or objects with a ``degree``. ``dp`` is flat as an integer, -1 for all that
    the others leave, and HSDP as a `HybridShard`; without any degree all ranks are ``dp``, with any
    other it must be given. Axes lie as in `ParallelDims`, ``tp`` innermost. ``ep`` takes its ranks
    from those that shard the dense parameters: it divides ``dp_shard * cp``, and -1 is
    ``dp_shard``, which with ``cp=1`` are the very ranks of ``dp_shard``. Experts are cut over
    ``tp`` as the other layers are.

    Collective, as `ParallelDims.build_mesh` is: all process groups that a getter returns exist
    afterwards. Raises `ParallelDimsError` for degrees that do not make the world, `MeshError`
    without a default process group, where ranks disagree, and if there is a world mesh already.
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

    ``degree`` is the size of ``ep_shard``, the world if negative; ``ep_replicate`` is the rest. To
    the getters both together are ``dp``. Not kept: close it with ``.mesh.close()``. Collective, and
    raises, as `ParallelDims.build_mesh`.
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
        raise ParallelDimsError(
            [Violation(rule="dp", values={**degrees, "dp": None}, reason=reason)]
        )


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
