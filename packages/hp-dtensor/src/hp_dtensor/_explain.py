"""Say what a redistribution would do, without doing it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ._cost import CostModel, check_cost
from ._errors import CrossMeshError, PlacementCountError, RankNotInMesh
from ._layout import Layout, ShardOrder
from ._placements import Placement, Replicate, in_tuple
from ._planner import Plan, make_plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ._prepare import Distributed


def explain(
    x: "Distributed | Layout",
    placements: "Sequence[Any] | Layout | None" = None,
    *,
    mesh: "DeviceMesh | None" = None,
    shard_order: ShardOrder | Mapping[int, Sequence[int]] | None = None,
    shape: Sequence[int] | None = None,
    rank: int = 0,
    itemsize: int = 4,
    cost: CostModel | None = None,
    max_bytes: int | None = None,
    groups: "Sequence[ProcessGroup | DeviceMesh] | None" = None,
) -> Plan:
    """Return the plan with which `redistribute` would take ``x`` to ``placements``.

    ``x`` is a DTensor, a RaggedTensor or an Absent, planned with the groups that exist, or a
    `Layout` with the global ``shape``, a ``rank`` and an ``itemsize`` in bytes, planned as if any
    set of axes had a group, without torch, whatever ``groups`` says; the target is then a `Layout`
    too where it lies on another mesh. ``str(plan)`` lists the steps with bytes, peak memory, time
    and why. Communicates nothing. Raises as `redistribute` does, `RankNotInMesh` on a rank, or for
    a ``rank``, that has no part, `PlacementCountError` for a `Layout` without ``shape``, and
    `LayoutError` for negative sizes.
    """
    if not isinstance(x, Layout):
        # Layouts are planned without loading torch.
        from ._prepare import origin_of, ranks_of
        from ._redistribute import plan_for

        if isinstance(placements, Layout):
            origin = origin_of(x)
            lies = origin.layout
            if placements.mesh_shape != lies.mesh_shape:
                raise CrossMeshError(
                    f"the tensor lies on a mesh of shape {lies.mesh_shape} and the target on one "
                    f"of shape {placements.mesh_shape}; give placements and mesh="
                )
            ranks = lies.ranks if origin.mesh is None else ranks_of(origin.mesh)
            wanted_ranks = placements.ranks
            if wanted_ranks is not None and wanted_ranks != replace(lies, ranks=ranks).ranks:
                raise CrossMeshError(
                    f"the tensor lies on ranks {ranks} and the target on {wanted_ranks}; give "
                    "placements and mesh="
                )
            shard_order, placements = placements.shard_order, placements.placements
        return plan_for(x, placements, mesh, shard_order, cost, max_bytes, groups)
    check_cost(cost)
    if shape is None:
        raise PlacementCountError("a plan between layouts needs the tensor's global shape=")
    if mesh is not None:
        raise CrossMeshError(
            f"mesh={mesh!r} beside a Layout, which lies on its own mesh of shape {x.mesh_shape}; "
            "leave mesh= out"
        )
    if not isinstance(placements, Layout):
        wanted: tuple[Placement, ...] = (
            (Replicate(),) * len(x.mesh_shape) if placements is None else in_tuple(placements)
        )
        placements = Layout(x.mesh_shape, wanted, shard_order, x.ranks)
    if not x.holds(rank) and not placements.holds(rank):
        held = sorted({*(x.ranks or range(x.size)), *(placements.ranks or range(placements.size))})
        raise RankNotInMesh(
            f"rank={rank} is in neither layout's mesh, so that it has no part; use one of "
            f"{_short(held)}"
        )
    return make_plan(x, placements, tuple(shape), rank, itemsize, cost, max_bytes=max_bytes)


def _short(ranks: Sequence[int]) -> str:
    first, last = ranks[0], ranks[-1]
    consecutive = last - first + 1 == len(ranks)
    return f"{first} to {last}" if consecutive else str(ranks)
