"""Take a distributed tensor to another layout or mesh."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, overload

from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._errors import PlacementTypeError, RankNotInMesh
from .collectives._interface import Collectives
from .executor._autograd import Pending, carry_out
from .executor._by_torch import torch_step
from .executor._groups import checked_groups
from .executor._origin import Distributed, Origin, mesh_under, origin_of, ranks_of
from .executor._route import Order, find_route
from .layouts._convert import AnyPlacement, DensePlacement, TorchPartial
from .plans._cost import CostModel
from .plans._plan import Plan


@overload
def redistribute(
    x: DTensor,
    placements: Sequence[DensePlacement] | None = None,
    *,
    mesh: None = None,
    shard_order: Order = None,
    max_bytes: int | None = None,
    cost: CostModel | None = None,
    async_op: Literal[False] = False,
    collectives: Collectives | None = None,
    groups: Sequence[ProcessGroup | DeviceMesh] | None = None,
) -> DTensor: ...


@overload
def redistribute(
    x: DTensor,
    placements: Sequence[DensePlacement] | None = None,
    *,
    mesh: None = None,
    shard_order: Order = None,
    max_bytes: int | None = None,
    cost: CostModel | None = None,
    async_op: Literal[True],
    collectives: Collectives | None = None,
    groups: Sequence[ProcessGroup | DeviceMesh] | None = None,
) -> Pending[DTensor]: ...


@overload
def redistribute(
    x: Distributed,
    placements: Sequence[AnyPlacement] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    shard_order: Order = None,
    max_bytes: int | None = None,
    cost: CostModel | None = None,
    async_op: Literal[False] = False,
    collectives: Collectives | None = None,
    groups: Sequence[ProcessGroup | DeviceMesh] | None = None,
) -> Distributed: ...


@overload
def redistribute(
    x: Distributed,
    placements: Sequence[AnyPlacement] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    shard_order: Order = None,
    max_bytes: int | None = None,
    cost: CostModel | None = None,
    async_op: Literal[True],
    collectives: Collectives | None = None,
    groups: Sequence[ProcessGroup | DeviceMesh] | None = None,
) -> Pending[Distributed]: ...


@overload
def redistribute(
    x: Distributed,
    device_mesh: DeviceMesh | None,
    /,
    placements: Sequence[AnyPlacement] | None = None,
    *,
    shard_order: Order = None,
    max_bytes: int | None = None,
    cost: CostModel | None = None,
    async_op: Literal[False] = False,
    collectives: Collectives | None = None,
    groups: Sequence[ProcessGroup | DeviceMesh] | None = None,
) -> Distributed: ...


@overload
def redistribute(
    x: Distributed,
    device_mesh: DeviceMesh | None,
    /,
    placements: Sequence[AnyPlacement] | None = None,
    *,
    shard_order: Order = None,
    max_bytes: int | None = None,
    cost: CostModel | None = None,
    async_op: Literal[True],
    collectives: Collectives | None = None,
    groups: Sequence[ProcessGroup | DeviceMesh] | None = None,
) -> Pending[Distributed]: ...


def redistribute(
    x: Distributed,
    *where: DeviceMesh | Sequence[AnyPlacement] | None,
    placements: Sequence[AnyPlacement] | None = None,
    mesh: DeviceMesh | None = None,
    shard_order: Order = None,
    max_bytes: int | None = None,
    cost: CostModel | None = None,
    async_op: bool = False,
    collectives: Collectives | None = None,
    groups: Sequence[ProcessGroup | DeviceMesh] | None = None,
) -> Distributed | Pending[Any]:
    """Return the tensor laid out as ``placements`` say, ours or torch's; all replicated if None.

    ``redistribute(x, placements, mesh=mesh)`` and torch's ``redistribute(x, mesh, placements)`` are
    the same.

    ``shard_order`` gives the order of axes that shard the same dim, as in `Layout`; the result then
    carries torch's strided shards; with a `RaggedShard` it is a `RaggedTensor`. Communicates what
    `explain` prints, chosen as the cheapest under ``cost`` of those that hold at most ``max_bytes``
    at once. Each step runs in a group of exactly the ranks along its axes; groups are those that
    exist: of ``groups``, of an axis, of the world, of a flattened mesh, of an alias of hp-mesh. All
    ranks give the same ``groups``, in the same order. A result in
    the layout of ``x`` shares its memory, and is ``x`` where autograd records nothing; another may
    share it too. With ``async_op`` the first
    collective is started and `Pending.wait` does the rest: until then ``x`` must stay untouched.
    Autograd records the result if it would at the call.

    To another ``mesh``, of another shape or other ranks, data goes point to point between the ranks
    that lack it and those that have it, over a group of the ranks of both meshes: one of
    ``groups``, the world's, or one that the first such call makes. Every rank of either mesh
    calls; an `Absent` stands for the tensor, before and after, on a rank that is not in its mesh.
    Beforehand these ranks compare what they mean, in one all-reduce of 32 bytes that
    ``collectives`` do not see, and wait for each other in that. With ``async_op`` they wait in the
    first call of its kind only, and see in `Pending.wait` whether all meant the same.

    Backward redistributes the gradient to the layout of ``x``, with partial values replicated: the
    gradient of a sum with respect to each of its terms is the sum's. For other ops than sum that is
    a convention: every term gets the gradient of the result. The way back is chosen under ``cost``
    and ``max_bytes`` too: `NoPlan` is raised by the call if a gradient that lies as the result does
    has none, and by backward for one that lies otherwise. A rank whose result is an
    `Absent` takes part by `Absent.backward`, one that gives an `Absent` says there if the tensor
    requires a gradient.

    In a function that ``torch.compile`` traces, the plan is made while it traces, for the sizes at
    hand, and one opaque op carries it out; ``async_op`` has then no effect but on the type.
    Ragged and absent tensors, meshes of other ranks and ``collectives`` are refused there.

    Raises before any communication: `CrossMeshError`, `PlacementCountError`, `PlacementTypeError`,
    `ShardDimError`, `ShardOrderError`, `RaggedSizesError`, `MixedPartialError`,
    `PartialTargetError`, `PartialDtypeError` for a reduction that the dtype has not,
    `CostModelError`, `NoPlan`, `MissingGroup`, and `LocalShapeMismatch` on a rank whose local
    tensor has another shape than its layout gives it. Where ``x`` is no distributed tensor, or
    ``placements`` no sequence, `PlacementTypeError`. Between meshes `RanksDisagree`, on all ranks,
    where they mean different changes or one has a wrong local tensor, before any of it is sent.
    """
    if where:
        first: Any = where[0]
        # Whether it is a mesh takes longer to ask than all else here.
        listed = type(first) is list or type(first) is tuple
        if listed and placements is None and len(where) == 1:
            placements = first
        else:
            mesh, placements = _sorted_out(where, mesh, placements)
    if is_compiling():
        from .executor._compile import trace  # it loads the compiler, which takes seconds

        return trace(
            x, placements, mesh, shard_order, max_bytes, cost, async_op, collectives, groups
        )
    named = () if groups is None else checked_groups(groups)
    return carry_out(
        x, placements, mesh, shard_order, max_bytes, cost, async_op, collectives, named
    )


def _sorted_out(
    where: tuple[Any, ...], mesh: DeviceMesh | None, placements: Sequence[AnyPlacement] | None
) -> tuple[DeviceMesh | None, Sequence[AnyPlacement] | None]:
    """Return mesh and placements of a call, given by position as ours are or as torch's."""
    first, *more = where
    if not more and not isinstance(first, DeviceMesh):
        if placements is None:
            return mesh, first
        if first is None:
            return mesh, placements
    elif (first is None or isinstance(first, DeviceMesh)) and mesh is None:
        if not more:
            return first, placements
        if len(more) == 1 and placements is None and not isinstance(more[0], DeviceMesh):
            return first, more[0]
    raise PlacementTypeError(
        "call redistribute(x, placements, mesh=mesh) or redistribute(x, mesh, placements), with "
        "the mesh and the placements once each"
    )


def plan_for(
    x: Distributed | Origin,
    placements: Sequence[AnyPlacement] | None,
    mesh: DeviceMesh | None,
    shard_order: Order,
    cost: CostModel | None,
    max_bytes: int | None,
    groups: object = None,
) -> Plan:
    """Return what `redistribute` would do; raises `RankNotInMesh` on a rank that has no part."""
    named = () if groups is None else checked_groups(groups)
    try:
        route = find_route(x, placements, mesh, shard_order, cost, max_bytes, named)
    except TorchPartial:
        step = torch_step(x, placements, mesh is not None and mesh != mesh_under(x))
        plan = plan_for(step.origin, step.then, mesh, shard_order, cost, max_bytes, groups)
        return replace(plan, note="; ".join(filter(None, (step.note, plan.note))))
    if route.stages is None:
        lies = route.source.ranks or f"0 to {route.source.size - 1}"
        if (own := origin_of(x).mesh) is not None:
            lies = list(ranks_of(own))
        raise RankNotInMesh(
            f"this rank is not in the mesh of the tensor, so it holds nothing of it; its ranks: "
            f"{lies}"
        )
    return route.plan
