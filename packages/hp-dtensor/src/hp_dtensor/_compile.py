"""A plan for one rank as text that says all that carrying it out needs, and back."""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._caches import remembered
from ._convert import AnyPlacement, TorchPartial
from ._cost import CostModel
from ._errors import CrossMeshError, LayoutError, PlacementTypeError
from ._execute import Fold, Stage, prepare, start
from ._groups import fold_between
from ._layout import Layout
from ._placements import Partial, RaggedShard, Replicate, Shard, StridedShard
from ._planner import Plan
from ._prepare import Order, Route, check_local, find_route, origin_of, torch_step, whole
from ._redistribute import Pending
from ._steps import Step
from ._torch import find_group, group_name, local_part, no_modes, opaque_op
from .collectives._interface import Axis, Collectives
from .collectives._torch import TorchCollectives

_TYPES = {
    cls.__name__: cls
    for cls in (Layout, Partial, Plan, RaggedShard, Replicate, Shard, Step, StridedShard)
}
Found = tuple[str, str, tuple[int, ...], int]  # name of axis, name of group, members, size


def write_plan(plan: Plan, fold: Callable[[Step], Fold]) -> str:
    """Return the plan with the groups of its collectives, by torch's names for them."""
    folds = [None if step.kind == "slice" else _named(fold(step)) for step in plan.steps]
    return json.dumps([_plain(replace(plan, why="", note="")), folds], separators=(",", ":"))


def read_plan(text: str) -> tuple[Plan, dict[Step, Found]]:
    """Return what `write_plan` was given, with a group for each step that needs one."""
    plan, folds = _rebuilt(json.loads(text))
    return plan, {step: fold for step, fold in zip(plan.steps, folds, strict=True) if fold}


def _named(fold: Fold) -> Found:
    axis = fold.find()
    return axis.name, group_name(axis.group), tuple(fold.members), fold.size


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.init}
        return {type(value).__name__: given}
    if isinstance(value, tuple | list | range):
        return [_plain(item) for item in value]
    return value


def _rebuilt(value: Any) -> Any:
    if isinstance(value, dict):
        ((name, given),) = value.items()
        return _TYPES[name](**{field: _rebuilt(item) for field, item in given.items()})
    return tuple(map(_rebuilt, value)) if isinstance(value, list) else value


def trace(
    x: object,
    placements: Sequence[AnyPlacement] | None,
    mesh: DeviceMesh | None,
    shard_order: Order,
    max_bytes: int | None,
    cost: CostModel | None,
    async_op: bool,
    collectives: Collectives | None,
    groups: object = None,
) -> DTensor | Pending[DTensor]:
    """Return what `redistribute` does; raises as it does, and for what a graph cannot hold."""
    if not isinstance(x, DTensor):
        raise PlacementTypeError(
            f"in a compiled function a redistribution starts from a DTensor, got an object of type "
            f"{type(x).__name__}; redistribute it outside of the function"
        )
    if isinstance(placements, tuple | list) and any(isinstance(p, RaggedShard) for p in placements):
        raise PlacementTypeError(
            "a compiled function cannot hold the RaggedTensor that a RaggedShard makes; "
            "redistribute to it outside of the function, or to Shard or Replicate here"
        )
    if collectives is not None:
        raise LayoutError(
            f"collectives={collectives!r} cannot be part of a compiled function; leave it out, or "
            "redistribute outside of the function"
        )
    if groups is not None:
        raise LayoutError(
            "groups= cannot be part of a compiled function; flatten the mesh over the axes, which "
            "it then finds, or redistribute outside of the function"
        )
    result: DTensor = redistribute_in_graph(x, placements, mesh, shard_order, cost, max_bytes)
    return Pending(lambda: result) if async_op else result


def _redistribute_in_graph(
    x: DTensor,
    placements: Sequence[AnyPlacement] | None,
    mesh: DeviceMesh | None,
    shard_order: Order,
    cost: CostModel | None,
    max_bytes: int | None,
) -> DTensor:
    try:
        return _planned(x, placements, mesh, shard_order, cost, max_bytes)
    except TorchPartial:
        step = torch_step(x, placements, mesh is not None and mesh != x.device_mesh)
        y = step.run(x)
        if step.whole:
            return y
        return _planned(y, step.then, mesh, shard_order, cost, max_bytes)


def _planned(
    x: DTensor,
    placements: Sequence[AnyPlacement] | None,
    mesh: DeviceMesh | None,
    shard_order: Order,
    cost: CostModel | None,
    max_bytes: int | None,
) -> DTensor:
    found = origin_of(x)
    # A dynamic size becomes a number here, and a guard: there is a plan for each size.
    origin = replace(found, shape=tuple(int(length) for length in found.shape))
    with no_modes():
        route = find_route(origin, placements, mesh, shard_order, cost, max_bytes)
        _check_everywhere(route)
        text = write_plan(
            route.plan,
            lambda step: fold_between(step, route.plan, origin.mesh, mesh, make=False),
        )
    graded = torch.is_grad_enabled() and x.requires_grad
    if route.unchanged and not graded:
        return x
    if graded:
        route.check_back()
    there = mesh if route.crosses else origin.mesh
    result: DTensor = _InGraph.apply(x, route, text, there)  # type: ignore[no-untyped-call]
    return result


redistribute_in_graph = torch.compiler.allow_in_graph(_redistribute_in_graph)


class _InGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, route: Route, text: str, there: DeviceMesh) -> Any:
        ctx.route, ctx.mesh = route, x.device_mesh
        local = local_part(x)
        check_local(local, route)
        return route.wrap(carry_out(local, text), there)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        route: Route = ctx.route
        source = whole(route.source)
        order = source.shard_order
        back = _redistribute_in_graph(
            grads[0], source.placements, ctx.mesh, order, route.cost, route.max_bytes
        )
        return back, None, None, None


def _check_everywhere(route: Route) -> None:
    plan = route.plan
    source, target = (
        set(layout.ranks or range(layout.size)) for layout in (plan.source, plan.target)
    )
    if source != target:
        raise CrossMeshError(
            f"ranks {sorted(source ^ target)} are in one of the two meshes only; a compiled "
            "function needs a tensor on every rank: redistribute to a mesh of other ranks outside "
            "of it"
        )


def _carry_out(local: Tensor, text: str) -> Tensor:
    _, stages = _read(text)
    result = start(stages, local, TorchCollectives())()
    # An op gives memory of its own, laid out as the trace was told.
    return result.contiguous() if stages else result.clone(memory_format=torch.contiguous_format)


def _empty(local: Tensor, text: str) -> Tensor:
    return local.new_empty(_read(text)[0])


# Copies of the package under other roots have ops of their own.
_package = __name__.rpartition(".")[0].replace(".", "_")
carry_out = opaque_op(f"{_package}::carry_out", _carry_out, _empty)


@remembered(2048)
def _read(text: str) -> tuple[tuple[int, ...], tuple[Stage, ...]]:
    """Return the shape of the result and the stages; they hold names of groups, no groups."""
    plan, folds = read_plan(text)

    def fold(step: Step) -> Fold:
        name, group, written, size = folds[step]
        members: Any = written
        if step.kind == "transfer":
            members = {rank: place for place, rank in enumerate(written)}

        def find() -> Axis:
            found = find_group(group)
            return Axis(name, found, tuple(dist.get_process_group_ranks(found)))

        return Fold(find, members, size)

    return plan.target.local_shape(plan.shape, plan.rank), prepare(plan, fold)
