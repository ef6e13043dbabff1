"""`redistribute` under ``torch.compile``: planned during tracing, and run by one operator.

1. Dynamo traces `trace`, and puts a call of `redistribute_in_graph` into its graph.
2. AOTAutograd runs `redistribute_in_graph` on fake tensors. It records one call of the operator
   `execute_plan` in the forward graph, and one in the backward graph.
3. At run time, `execute_plan` gets the local tensor and the plan as JSON text, and runs the plan.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ._cost import Step, clearable
from ._errors import LayoutError, MeshError
from ._execute import BoundStep, bind, start
from ._groups import AxisGroup
from ._layout import Layout
from ._placements import Placement, RaggedShard
from ._planner import Plan
from ._prepare import Options, Prepared, options_of, prepare, step_groups, tensor_spec
from ._run import Pending, run
from ._torch import group_name, no_modes, opaque_op, resolve_group
from .collectives._c10d import TorchCollectives
from .collectives._interface import Axis


def trace(
    x: object, placements: Any, mesh: Any, options: Mapping[str, Any], async_op: bool
) -> DTensor | Pending[DTensor]:
    """Redistribute ``x`` inside a compiled function.

    Arguments and errors are as in `redistribute`. In addition, `LayoutError` is raised in these
    cases:

    - ``x`` is not a DTensor.
    - The target has a `RaggedShard`.
    - ``options`` has ``collectives`` or ``groups``.
    """
    if not isinstance(x, DTensor):
        raise LayoutError(
            f"in a compiled function a redistribution starts from a DTensor, got an object of type "
            f"{type(x).__name__}; redistribute it outside of the function"
        )
    if isinstance(placements, tuple | list) and any(isinstance(p, RaggedShard) for p in placements):
        raise LayoutError(
            "a compiled function cannot hold the RaggedTensor that a RaggedShard makes; "
            "redistribute to it outside of the function, or to Shard or Replicate here"
        )
    if options.get("collectives") is not None:
        raise LayoutError(
            f"collectives={options['collectives']!r} cannot be part of a compiled function; leave "
            "it out, or redistribute outside of the function"
        )
    if options.get("groups") is not None:
        raise LayoutError(
            "groups= cannot be part of a compiled function; flatten the mesh over the axes, which "
            "it then finds, or redistribute outside of the function"
        )
    result: DTensor = redistribute_in_graph(x, placements, mesh, **options)
    return Pending(lambda: result) if async_op else result


def _redistribute_in_graph(x: DTensor, placements: Any, mesh: Any, **options: Any) -> Any:
    return run(x, placements, mesh, options_of(options), prepare=prepare_in_graph)


redistribute_in_graph = torch.compiler.allow_in_graph(_redistribute_in_graph)


def prepare_in_graph(x: Any, placements: Any, mesh: Any, options: Options) -> Prepared:
    """Return a `Prepared` with a single step that runs the whole plan. Used during tracing.

    The arguments are the same as for `prepare`. The step calls the operator `execute_plan`, so the
    graph gets one node. Raises `MeshError` if the two meshes have different ranks.
    """
    found = tensor_spec(x)
    # Reading a dynamic size adds a guard, so that another size is traced again with its own plan.
    spec = replace(found, shape=tuple(int(length) for length in found.shape))
    with no_modes():
        prepared = prepare(spec, placements, mesh, options)
        plan = prepared.plan
        _check_everywhere(plan)
        there = mesh if prepared.crosses else None
        text = write_plan(plan, step_groups(plan, spec.mesh, there, (), create=False))
    steps: tuple[BoundStep, ...] = (lambda local, collectives: execute_plan(local, text),)
    return replace(prepared, check=None, steps=steps)


def _check_everywhere(plan: Plan) -> None:
    source, target = (set(layout.all_ranks()) for layout in (plan.source, plan.target))
    if source != target:
        raise MeshError(
            f"ranks {sorted(source ^ target)} are in one of the two meshes only; a compiled "
            "function needs a tensor on every rank: redistribute to a mesh of other ranks outside "
            "of it"
        )


def _execute_plan(local: Tensor, text: str) -> Tensor:
    _, steps = _read(text)
    result = start(steps, local, TorchCollectives())()
    # An operator must not return its input. Tracing has assumed that the result is contiguous.
    return result.contiguous() if steps else result.clone(memory_format=torch.contiguous_format)


def _empty(local: Tensor, text: str) -> Tensor:
    return local.new_empty(_read(text)[0])


# A vendored copy of the package has another name, so it registers its own operator.
_package = __name__.rpartition(".")[0].replace(".", "_")
execute_plan = opaque_op(f"{_package}::execute_plan", _execute_plan, _empty)


@clearable
@lru_cache(maxsize=2048)
def _read(text: str) -> tuple[tuple[int, ...], tuple[BoundStep, ...]]:
    """Read a plan from the text of `write_plan`, and make the functions that run its steps.

    Returns the shape of this rank's local result, and the functions from `bind`. Results are cached
    by ``text``. The functions look up process groups by name at each call, so the cache keeps no
    process group alive.
    """
    plan, groups = read_plan(text)
    return plan.target.local_shape(plan.shape, plan.rank), bind(plan, groups)


_TYPES: dict[str, Any] = {
    cls.__name__: cls for cls in (Layout, Plan, Step, *Placement.__subclasses__())
}


def write_plan(plan: Plan, groups: Mapping[Step, AxisGroup]) -> str:
    """Write a plan as JSON text, with the names of the process groups of its steps."""
    named = [_named(groups[step]) if step in groups else None for step in plan.steps]
    return json.dumps([_plain(replace(plan, why="", note="")), named], separators=(",", ":"))


def read_plan(text: str) -> tuple[Plan, dict[Step, AxisGroup]]:
    """Read a plan from the JSON text that `write_plan` returned.

    Returns the plan and a dict. The keys of the dict are the steps that communicate, and the values
    are their process groups.
    """
    plan, named = _rebuilt(json.loads(text))
    return plan, {
        step: _group(step, *found)
        for step, found in zip(plan.steps, named, strict=True)
        if found is not None
    }


def _named(group: AxisGroup) -> tuple[str, str, tuple[int, ...], int]:
    axis = group.find()
    return axis.name, group_name(axis.group), tuple(group.members), group.size


def _group(step: Step, name: str, group: str, written: tuple[int, ...], size: int) -> AxisGroup:
    members: Any = written
    if step.kind == "transfer":
        members = {rank: place for place, rank in enumerate(written)}

    def find() -> Axis:
        found = resolve_group(group)
        return Axis(name, found, tuple(dist.get_process_group_ranks(found)))

    return AxisGroup(find, members, size)


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
