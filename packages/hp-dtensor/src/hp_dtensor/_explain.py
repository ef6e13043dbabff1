"""Say what a redistribution would do, without doing it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._cost import CostModel
from ._errors import CrossMeshError, PlacementCountError
from ._layout import Layout, ShardOrder
from ._placements import Placement, Replicate, in_tuple
from ._plan import Plan, make_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def explain(
    x: "DTensor | Layout",
    placements: "Sequence[Any] | Layout | None" = None,
    *,
    mesh: "DeviceMesh | None" = None,
    shard_order: ShardOrder | Mapping[int, Sequence[int]] | None = None,
    shape: Sequence[int] | None = None,
    rank: int = 0,
    itemsize: int = 4,
    cost: CostModel | None = None,
) -> Plan:
    """Return the plan with which `redistribute` would take ``x`` to ``placements``.

    ``x`` is a DTensor, planned with the groups that exist, or a `Layout` with the global ``shape``,
    a ``rank`` and an ``itemsize`` in bytes, planned as if any set of axes had a group, without
    torch. ``str(plan)`` lists the steps. Communicates nothing. Raises as `redistribute` does,
    `RankNotInMesh` on a rank outside the mesh of ``x``, `PlacementCountError` for a `Layout`
    without ``shape``, and `LayoutError` for negative sizes.
    """
    if not isinstance(x, Layout):
        # Layouts are planned without loading torch.
        from ._redistribute import plan_for
        from ._torch import spec_of

        spec_of(x)  # raises for what is no DTensor
        if isinstance(placements, Layout):
            if placements.mesh_shape != tuple(x.device_mesh.shape):
                raise CrossMeshError(
                    f"the tensor lies on a mesh of shape {tuple(x.device_mesh.shape)} and the "
                    f"target on one of shape {placements.mesh_shape}"
                )
            ranks = tuple(x.device_mesh.mesh.flatten().tolist())
            if placements.ranks not in (None, ranks):
                raise CrossMeshError(
                    f"the tensor lies on ranks {ranks} and the target on {placements.ranks}"
                )
            shard_order, placements = placements.shard_order, placements.placements
        return plan_for(x, placements, mesh, shard_order, cost)
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
    return make_plan(x, placements, tuple(shape), rank, itemsize, cost)
