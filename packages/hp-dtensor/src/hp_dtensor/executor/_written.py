"""A plan for one rank as text that says all that carrying it out needs, and back."""

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from .._torch import group_name
from ..layouts._layout import Layout
from ..layouts._placements import Partial, RaggedShard, Replicate, Shard, StridedShard
from ..plans._plan import Plan
from ..plans._steps import Step
from ._stages import Fold

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
