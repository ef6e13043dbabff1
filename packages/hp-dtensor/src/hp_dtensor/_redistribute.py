"""Take a distributed tensor to another layout or mesh, with autograd."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._absent import Absent
from ._convert import AnyPlacement, DensePlacement
from ._cost import CostModel
from ._errors import LayoutError, RankNotInMesh
from ._execute import start
from ._origin import Distributed, part_of
from ._plan import Plan
from ._route import Order, Route, check_local, find_route, whole
from .collectives._interface import Collectives
from .collectives._torch import TorchCollectives

Result = TypeVar("Result", bound=Distributed)


class Pending(Generic[Result]):
    """A redistribution under way."""

    def __init__(self, finish: Callable[[], Result]) -> None:
        self._finish = finish
        self._done = False

    def wait(self) -> Result:
        """Return the result, complete for use on the caller's stream; may be called again.

        Until then what was given must stay untouched, and the result may share its memory.
        """
        if not self._done:
            self._result = self._finish()
            self._done = True
            del self._finish  # it holds the buffers of the last collective
        return self._result


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
) -> Pending[Distributed]: ...


def redistribute(
    x: Distributed,
    placements: Sequence[AnyPlacement] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    shard_order: Order = None,
    max_bytes: int | None = None,
    cost: CostModel | None = None,
    async_op: bool = False,
    collectives: Collectives | None = None,
) -> Distributed | Pending[Any]:
    """Return the tensor laid out as ``placements`` say, ours or torch's; all replicated if None.

    ``shard_order`` gives the order of axes that shard the same dim, as in `Layout`; the result then
    carries torch's strided shards; with a `RaggedShard` it is a `RaggedTensor`. Communicates what
    `explain` prints, chosen as the cheapest under ``cost`` of those that hold at most ``max_bytes``
    at once; groups are those that exist: of an axis, of the world, of a flattened mesh. A result in
    the layout of ``x`` is ``x``, and another may share its memory. With ``async_op`` the first
    collective is started and `Pending.wait` does the rest: until then ``x`` must stay untouched.
    Autograd records the result if it would at the call.

    To another ``mesh``, of another shape or other ranks, data goes point to point between the ranks
    that lack it and those that have it, over the group of the world. Every rank of either mesh
    calls; an `Absent` stands for the tensor, before and after, on a rank that is not in its mesh.

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
    ``placements`` no sequence, `PlacementTypeError`.
    """
    if is_compiling():
        from ._compile import trace  # it loads the compiler, which takes seconds

        return trace(x, placements, mesh, shard_order, max_bytes, cost, async_op, collectives)
    return _redistribute(x, placements, mesh, shard_order, max_bytes, cost, async_op, collectives)


def plan_for(
    x: Distributed,
    placements: Sequence[AnyPlacement] | None,
    mesh: DeviceMesh | None,
    shard_order: Order,
    cost: CostModel | None,
    max_bytes: int | None,
) -> Plan:
    """Return what `redistribute` would do; raises `RankNotInMesh` on a rank that has no part."""
    route = find_route(x, placements, mesh, shard_order, cost, max_bytes)
    if route.stages is None:
        lies = route.origin.layout.ranks or f"0 to {route.origin.layout.size - 1}"
        if route.origin.mesh is not None:
            lies = route.origin.mesh.mesh.flatten().tolist()
        raise RankNotInMesh(
            f"this rank is not in the mesh of the tensor, so it holds nothing of it; its ranks: "
            f"{lies}"
        )
    return route.plan


def _redistribute(
    x: Distributed,
    placements: Sequence[AnyPlacement] | None,
    mesh: Any,
    shard_order: Order,
    max_bytes: int | None,
    cost: CostModel | None,
    async_op: bool,
    collectives: Collectives | None,
) -> Distributed | Pending[Any]:
    route = find_route(x, placements, mesh, shard_order, cost, max_bytes)
    if not isinstance(collectives, Collectives | None):
        raise LayoutError(
            f"collectives={collectives!r} has not the methods of Collectives; give "
            "TorchCollectives(), or leave it out"
        )
    if route.unchanged:
        return Pending(lambda: x) if async_op else x
    graded = torch.is_grad_enabled() and x.requires_grad
    if graded:
        route.check_back()
    door = TorchCollectives() if collectives is None else collectives
    if async_op:
        finish = _started(x, route, door)
        return Pending(lambda: _waited(x, route, door, finish, graded))
    return _apply(x, route, door, None, graded)


def _started(x: Distributed, route: Route, door: Collectives) -> Callable[[], Tensor]:
    local = part_of(x)
    if local is None or (route.local_shape is None and route.stages is not None):
        local = torch.empty(0, dtype=route.origin.dtype, device=route.device)
    if route.stages is None:
        return lambda: local
    check_local(local, route)
    return start(route.stages, local, door)


def _finished(
    x: Distributed, route: Route, door: Collectives, finish: Callable[[], Tensor] | None
) -> Distributed:
    if finish is None:
        finish = _started(x, route, door)
    return route.wrap(finish())


def _waited(
    x: Distributed, route: Route, door: Collectives, finish: Callable[[], Tensor], graded: bool
) -> Distributed:
    with torch.set_grad_enabled(graded):
        return _apply(x, route, door, finish, graded)


def _apply(
    x: Distributed,
    route: Route,
    door: Collectives,
    finish: Callable[[], Tensor] | None,
    graded: bool,
) -> Distributed:
    if not graded:
        return _finished(x, route, door, finish)
    absent = x if isinstance(x, Absent) else None
    tensor = x if absent is None else absent.anchor()
    result: Tensor = _Redistribute.apply(tensor, absent, route, door, finish)  # type: ignore[no-untyped-call]
    if isinstance(result, Distributed):
        return result
    return replace(cast(Absent, route.wrap(result)), requires_grad=True, graph=result)


class _Redistribute(torch.autograd.Function):
    """Its result is the redistributed tensor; where there is none, an empty one to come back by."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Any,
        absent: Absent | None,
        route: Route,
        door: Collectives,
        finish: Callable[[], Tensor] | None,
    ) -> Tensor:
        result = _finished(tensor if absent is None else absent, route, door, finish)
        ctx.saved = (route, door, absent is None, isinstance(result, Absent))
        return torch.zeros(0) if isinstance(result, Absent) else result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        route, door, was_here, is_gone = ctx.saved
        grad = grads[0]
        if is_gone:
            plan = route.plan
            grad = Absent(
                plan.target,
                plan.shape,
                route.origin.dtype,
                requires_grad=torch.is_grad_enabled(),
            )
        source = whole(route.origin.layout)
        order, most, cost = source.shard_order, route.max_bytes, route.cost
        back = _redistribute(grad, source.placements, route.back, order, most, cost, False, door)
        if not was_here:
            return torch.zeros(0), None, None, None, None
        return None if isinstance(back, Absent) else back, None, None, None, None
