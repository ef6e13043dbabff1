"""Take a DTensor to another layout, with autograd."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._convert import AnyPlacement
from ._cost import CostModel
from ._errors import LocalShapeMismatch, RankNotInMesh
from ._execute import start
from ._placements import Partial, Replicate
from ._plan import Plan
from ._route import Order, Route, find_route
from ._torch import as_dtensor, local_part
from .collectives._interface import Collectives
from .collectives._torch import TorchCollectives


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
    in the layout of ``x`` is ``x``; a rank outside the mesh moves nothing. With ``async_op`` the
    first collective is started and `Pending.wait` does the rest.

    Backward redistributes the gradient to the layout of ``x``, with partial values replicated: the
    gradient of a sum with respect to each of its terms is the sum's.

    Raises before any communication: `CrossMeshError`, `PlacementCountError`, `PlacementTypeError`,
    `ShardDimError`, `ShardOrderError`, `MixedPartialError`, `PartialTargetError`, and
    `LocalShapeMismatch` on a rank whose local tensor has another shape than its layout gives it.
    Where ``x`` is no DTensor, or ``placements`` no sequence, `PlacementTypeError`.
    """
    route = find_route(x, placements, mesh, shard_order, cost)
    if route.unchanged:
        return Pending(lambda: x) if async_op else x
    door = TorchCollectives() if collectives is None else collectives
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
    """Return what `redistribute` would do; raises `RankNotInMesh` on a rank that has no part."""
    route = find_route(x, placements, mesh, shard_order, cost)
    if route.stages is None:
        raise RankNotInMesh(
            f"this rank is not in {x.device_mesh}, so it holds nothing of the tensor; its ranks: "
            f"{x.device_mesh.mesh.flatten().tolist()}"
        )
    return route.plan


def _started(x: DTensor, route: Route, door: Collectives) -> Callable[[], torch.Tensor]:
    local = local_part(x)
    if route.stages is None:
        return lambda: local
    if local.shape != route.local_shape:
        raise LocalShapeMismatch(
            f"the local tensor has shape {list(local.shape)} where {route.plan.source} of "
            f"{list(x.shape)} on mesh {list(x.device_mesh.shape)} gives rank {route.plan.rank} of "
            f"the mesh {list(route.local_shape)}; pass shape= and stride= to DTensor.from_local "
            "for uneven shards"
        )
    return start(route.stages, local, door)


def _apply(
    x: DTensor, route: Route, door: Collectives, finish: Callable[[], torch.Tensor] | None
) -> DTensor:
    if torch.is_grad_enabled() and x.requires_grad:
        result: DTensor = _Redistribute.apply(x, route, door, finish)  # type: ignore[no-untyped-call]
        return result
    return _finished(x, route, door, finish)


def _finished(
    x: DTensor, route: Route, door: Collectives, finish: Callable[[], torch.Tensor] | None
) -> DTensor:
    if finish is None:
        finish = _started(x, route, door)
    return as_dtensor(finish(), route.spec)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: DTensor,
        route: Route,
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
