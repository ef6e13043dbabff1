"""Carry out a redistribution on this rank, at once or in two parts, recorded by autograd."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._convert import AnyPlacement, DensePlacement, TorchPartial
from ._cost import CostModel
from ._errors import (
    LayoutError,
    LocalShapeMismatch,
    PlacementTypeError,
    RankNotInMesh,
)
from ._execute import start
from ._groups import checked_groups
from ._non_member import Absent
from ._planner import Plan
from ._prepare import (
    Distributed,
    Order,
    Origin,
    Route,
    check_local,
    find_route,
    mesh_under,
    origin_of,
    part_of,
    ranks_of,
    torch_step,
    whole,
)
from .collectives._interface import Collectives
from .collectives._torch import TorchCollectives

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ._prepare import Distributed

Result = TypeVar("Result", bound=Distributed)


class Pending(Generic[Result]):
    """A redistribution under way."""

    def __init__(self, finish: Callable[[], Result]) -> None:
        self._finish = finish
        self._done = False
        self._error: BaseException | None = None

    def wait(self) -> Result:
        """Return the result, complete for use on the caller's stream; may be called again.

        Until then what was given must stay untouched, and the result may share its memory. Where a
        collective fails, nothing further is started, and every call raises that first error.
        """
        if self._error is not None:
            raise self._error
        if not self._done:
            try:
                self._result = self._finish()
            except BaseException as error:
                self._error = error
                raise
            finally:
                del self._finish  # it holds the buffers of the last collective
            self._done = True
        return self._result


def carry_out(
    x: Distributed,
    placements: Sequence[AnyPlacement] | None,
    mesh: Any,
    shard_order: Order,
    max_bytes: int | None,
    cost: CostModel | None,
    async_op: bool,
    collectives: Collectives | None,
    groups: tuple[str, ...] = (),
) -> Distributed | Pending[Any]:
    """Return what `redistribute` does where nothing is traced; groups are given by name."""
    try:
        route = find_route(x, placements, mesh, shard_order, cost, max_bytes, groups)
    except TorchPartial:
        step = torch_step(x, placements, mesh is not None and mesh != mesh_under(x))
        # What is wrong with the rest is said before torch communicates.
        find_route(step.origin, step.then, mesh, shard_order, cost, max_bytes, groups)
        y = step.run(cast(DTensor, x))
        if step.whole:
            return _at_hand(y) if async_op else y
        return carry_out(
            y, step.then, mesh, shard_order, max_bytes, cost, async_op, collectives, groups
        )
    # Looking through a protocol takes longer than all else here.
    if collectives is not None and not isinstance(collectives, Collectives):
        raise LayoutError(
            f"collectives={collectives!r} has not the methods of Collectives; give "
            "TorchCollectives(), or leave it out"
        )
    graded = x.requires_grad and torch.is_grad_enabled()
    if route.unchanged and not graded:
        return _at_hand(x) if async_op else x
    return _moved(x, route, mesh, async_op, collectives, graded)


def _at_hand(x: Result) -> Pending[Result]:
    return Pending(lambda: x)


def _moved(
    x: Distributed,
    route: Route,
    mesh: Any,
    async_op: bool,
    collectives: Collectives | None,
    graded: bool,
) -> Distributed | Pending[Any]:
    # Where nothing moves, the gradient may still lie otherwise than x, and is brought back.
    if graded:
        route.check_back()
    compared = None
    if route.agree is not None:
        fault = _fault(x, route)
        compared = route.agree.start(graded, fault)
        # What all have meant before goes on its way; whether they mean it again is seen in wait().
        if fault or not async_op or graded not in route.agree.agreed:
            compared()
            compared = None
    door = TorchCollectives() if collectives is None else collectives
    call = Call(route, mesh if route.crosses else mesh_under(x), door)
    if async_op:
        finish = _started(x, call)
        return Pending(lambda: _waited(x, call, finish, graded, compared))
    return _apply(x, call, None, graded)


class Call(NamedTuple):
    """A route with what is not kept: the mesh of the result, and what communicates."""

    route: Route
    mesh: Any
    door: Collectives


def _fault(x: Distributed, route: Route) -> str:
    """Return what is wrong with this rank's part, which its peers cannot see."""
    local = part_of(x)
    if local is not None:
        try:
            check_local(local, route)
        except LocalShapeMismatch as error:
            return str(error)
    return ""


def _started(x: Distributed, call: Call) -> Callable[[], Tensor]:
    route = call.route
    local = part_of(x)
    if local is None or (route.local_shape is None and route.stages is not None):
        local = torch.empty(0, dtype=route.dtype, device=route.device)
    if route.stages is None:
        return lambda: local
    check_local(local, route)
    return start(route.stages, local, call.door)


def _finished(x: Distributed, call: Call, finish: Callable[[], Tensor] | None) -> Distributed:
    if finish is None:
        finish = _started(x, call)
    return call.route.wrap(finish(), call.mesh)


def _waited(
    x: Distributed,
    call: Call,
    finish: Callable[[], Tensor],
    graded: bool,
    compared: Callable[[], None] | None,
) -> Distributed:
    if compared is not None:
        compared()
    with torch.set_grad_enabled(graded):
        return _apply(x, call, finish, graded)


def _apply(
    x: Distributed, call: Call, finish: Callable[[], Tensor] | None, graded: bool
) -> Distributed:
    if not graded:
        return _finished(x, call, finish)
    absent = x if isinstance(x, Absent) else None
    tensor = x if absent is None else absent.anchor()
    result: Tensor = _Redistribute.apply(tensor, absent, call, finish)  # type: ignore[no-untyped-call]
    if isinstance(result, Distributed):
        return result
    made = cast(Absent, call.route.wrap(result, None))
    return replace(made, requires_grad=True, graph=result)


class _Redistribute(torch.autograd.Function):
    """Its result is the redistributed tensor; where there is none, an empty one to come back by."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Any,
        absent: Absent | None,
        call: Call,
        finish: Callable[[], Tensor] | None,
    ) -> Tensor:
        x = tensor if absent is None else absent
        result = _finished(x, call, finish)
        back: Any = None
        if call.route.crosses:
            # A gradient goes back to this mesh, or to this layout of other ranks.
            back = mesh_under(x) if absent is None else whole(call.route.source)
        ctx.saved = (call.route, call.door, back, absent is None, isinstance(result, Absent))
        return torch.zeros(0) if isinstance(result, Absent) else result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        route, door, there, was_here, is_gone = ctx.saved
        grad, plan = grads[0], route.plan
        most, cost, groups = route.max_bytes, route.cost, route.groups
        if is_gone:
            recorded = torch.is_grad_enabled()
            grad = Absent(plan.target, plan.shape, route.dtype, requires_grad=recorded)
        elif route.agree is not None:
            # Ranks without a gradient take it to lie as the result does.
            lies = whole(plan.target)
            order = lies.shard_order
            grad = carry_out(grad, lies.placements, None, order, most, cost, False, door, groups)
        source = whole(route.source)
        order = source.shard_order
        back = carry_out(grad, source.placements, there, order, most, cost, False, door, groups)
        if not was_here:
            return torch.zeros(0), None, None, None
        return None if isinstance(back, Absent) else back, None, None, None


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
        from ._compile import trace  # it loads the compiler, which takes seconds

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
