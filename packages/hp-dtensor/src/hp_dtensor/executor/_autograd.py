"""Carry out a redistribution on this rank, at once or in two parts, recorded by autograd."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._absent import Absent
from .._errors import LayoutError, LocalShapeMismatch
from ..collectives._interface import Collectives
from ..collectives._torch import TorchCollectives
from ..layouts._convert import AnyPlacement, TorchPartial
from ..plans._cost import CostModel
from ._by_torch import torch_step
from ._execute import start
from ._origin import Distributed, mesh_under, part_of
from ._route import Order, Route, check_local, find_route, whole

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
