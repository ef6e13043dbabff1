"""Take a DTensor to another layout, with autograd."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ._convert import AnyPlacement, to_layout, to_torch
from ._cost import CostModel
from ._errors import CrossMeshError, LocalShapeMismatch
from ._execute import Fold, start
from ._groups import find_fold, found_folds
from ._layout import ShardOrder, ravel
from ._placements import Partial, Replicate
from ._plan import Plan, make_plan
from ._torch import local_part, ordered_axes, with_placements
from .collectives._interface import Collectives
from .collectives._torch import TorchCollectives

Order: TypeAlias = ShardOrder | Mapping[int, Sequence[int]] | None


class Pending:
    """A redistribution under way."""

    def __init__(self, finish: Callable[[], DTensor]) -> None:
        self._finish = finish
        self._done = False

    def wait(self) -> DTensor:
        """Return the result, complete for use on the caller's stream; may be called again."""
        if not self._done:
            self._result = self._finish()
            self._done = True
            del self._finish  # it holds the buffers of the last collective
        return self._result


@overload
def redistribute(
    x: DTensor,
    placements: Sequence[AnyPlacement] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    shard_order: Order = None,
    cost: CostModel | None = None,
    async_op: Literal[False] = False,
    collectives: Collectives | None = None,
) -> DTensor: ...


@overload
def redistribute(
    x: DTensor,
    placements: Sequence[AnyPlacement] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    shard_order: Order = None,
    cost: CostModel | None = None,
    async_op: Literal[True],
    collectives: Collectives | None = None,
) -> Pending: ...


def redistribute(
    x: DTensor,
    placements: Sequence[AnyPlacement] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    shard_order: Order = None,
    cost: CostModel | None = None,
    async_op: bool = False,
    collectives: Collectives | None = None,
) -> DTensor | Pending:
    """Return ``x`` with ``placements`` (ours or torch's; replicated on all axes if None).

    ``shard_order`` gives the order of axes that shard the same dim, as in `Layout`; the result then
    carries torch's strided shards. Communicates what `explain` prints, chosen as the cheapest under
    ``cost``; groups are those that exist: of an axis, of the world, of a flattened mesh. A result
    with the placements of ``x`` is ``x``. With ``async_op`` the first collective is started and
    `Pending.wait` does the rest.

    Backward redistributes the gradient to the layout of ``x``, with partial values replicated: the
    gradient of a sum with respect to each of its terms is the sum's.

    Raises before any communication: `CrossMeshError`, `PlacementCountError`, `PlacementTypeError`,
    `ShardDimError`, `ShardOrderError`, `MixedPartialError`, `PartialTargetError`, and
    `LocalShapeMismatch` on a rank whose local tensor has another shape than its layout gives it.
    """
    route = _route(x, placements, mesh, shard_order, cost)
    door = TorchCollectives() if collectives is None else collectives
    if route.target == x.placements:
        return Pending(lambda: x) if async_op else x
    if async_op:
        finish = _started(x, route, door)
        return Pending(lambda: _apply(x, route, door, finish))
    return _apply(x, route, door, None)


def plan_for(
    x: DTensor,
    placements: Sequence[AnyPlacement] | None,
    mesh: DeviceMesh | None,
    shard_order: Order,
    cost: CostModel | None,
) -> Plan:
    """Return what `redistribute` would do."""
    return _route(x, placements, mesh, shard_order, cost).plan


class _Route(NamedTuple):
    """What a call needs besides its tensor: the same for all calls with equal layouts."""

    plan: Plan
    target: tuple[Placement, ...]
    local_shape: tuple[int, ...]


def _route(
    x: DTensor,
    placements: Sequence[AnyPlacement] | None,
    mesh: DeviceMesh | None,
    shard_order: Order,
    cost: CostModel | None,
) -> _Route:
    own = x.device_mesh
    if mesh is not None and mesh is not own and mesh != own:
        raise CrossMeshError(
            f"the tensor lies on {own} and the target on {mesh}; redistribute stays on one mesh: "
            "leave mesh= out"
        )
    if isinstance(shard_order, Mapping):
        shard_order = tuple((dim, tuple(axes)) for dim, axes in shard_order.items())
    coordinate = own.get_coordinate()
    return _routed(
        x.placements,
        ordered_axes(x),
        None if placements is None else tuple(placements),
        shard_order,
        tuple(own.shape),
        None if coordinate is None else tuple(coordinate),
        tuple(x.shape),
        x.dtype.itemsize,
        cost,
        found_folds(own),
    )


@lru_cache(maxsize=4096)
def _routed(
    source: tuple[Placement, ...],
    source_order: ShardOrder | None,
    placements: tuple[AnyPlacement, ...] | None,
    shard_order: ShardOrder | None,
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...] | None,
    shape: tuple[int, ...],
    itemsize: int,
    cost: CostModel | None,
    folded: frozenset[tuple[int, ...]] | None,
) -> _Route:
    ndim = len(shape)
    if placements is None:
        placements = (Replicate(),) * len(mesh_shape)
    src = to_layout(source, mesh_shape, ndim, source_order)
    dst = to_layout(placements, mesh_shape, ndim, shard_order)
    # A rank outside the mesh raises what the others raise, and holds nothing to move.
    rank = 0 if coordinate is None else ravel(coordinate, mesh_shape)
    plan = make_plan(src, dst, shape, rank, itemsize, cost, folded)
    local_shape = (0,) if coordinate is None else src.local_shape(shape, rank)
    return _Route(plan=plan, target=to_torch(dst), local_shape=local_shape)


def _started(x: DTensor, route: _Route, door: Collectives) -> Callable[[], torch.Tensor]:
    local = local_part(x)
    mesh = x.device_mesh
    if mesh.get_coordinate() is None:
        return lambda: local
    if tuple(local.shape) != route.local_shape:
        raise LocalShapeMismatch(
            f"the local tensor has shape {list(local.shape)} where {route.plan.source} of "
            f"{list(x.shape)} on mesh {list(mesh.shape)} gives rank {route.plan.rank} of the mesh "
            f"{list(route.local_shape)}; pass shape= and stride= to DTensor.from_local for uneven "
            "shards"
        )

    def fold(axes: tuple[int, ...]) -> Fold:
        found = find_fold(mesh, axes)
        if found is None:  # the plan was made with the groups that exist
            raise RuntimeError(f"the group over mesh axes {axes} of {mesh} is gone")
        return found

    with torch.no_grad():
        return start(route.plan, local, fold, door)


def _apply(
    x: DTensor, route: _Route, door: Collectives, finish: Callable[[], torch.Tensor] | None
) -> DTensor:
    if torch.is_grad_enabled() and x.requires_grad:
        result: DTensor = _Redistribute.apply(x, route, door, finish)  # type: ignore[no-untyped-call]
        return result
    return _finished(x, route, door, finish)


def _finished(
    x: DTensor, route: _Route, door: Collectives, finish: Callable[[], torch.Tensor] | None
) -> DTensor:
    if finish is None:
        finish = _started(x, route, door)
    with torch.no_grad():
        return with_placements(x, finish(), route.target)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: DTensor,
        route: _Route,
        door: Collectives,
        finish: Callable[[], torch.Tensor] | None,
    ) -> DTensor:
        ctx.saved = (route.plan.source, door)
        return _finished(x, route, door, finish)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor | None, ...]:
        source, door = ctx.saved
        placements = tuple(Replicate() if isinstance(p, Partial) else p for p in source.placements)
        grad = redistribute(grads[0], placements, shard_order=source.shard_order, collectives=door)
        return grad, None, None, None
