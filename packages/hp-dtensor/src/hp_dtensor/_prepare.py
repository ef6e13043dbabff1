"""What a redistribution needs besides its tensor's values, worked out once for all like calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._between_meshes import ConsistencyCheck, NonMember
from ._boxes import ravel
from ._convert import (
    AnyPlacement,
    TensorSpec,
    TorchPartial,
    dense_spec,
    to_layout,
    to_torch,
    torch_step,
)
from ._cost import CostModel, Step, check_limits, clearable
from ._errors import LayoutError, MeshError, NoPlanError
from ._execute import BoundStep, bind
from ._groups import (
    AxisGroup,
    group_between,
    group_for,
    group_names,
    number_of,
    spanned_axes,
    transfer_group,
)
from ._layout import Layout, ShardOrder, checked_order, reduced_layout
from ._placements import Partial, in_tuple
from ._planner import Plan, Spanned, make_plan
from ._torch import (
    as_dtensor,
    flattened_count,
    local_part,
    shard_order_of,
    spec_elsewhere,
    spec_for,
    spec_of,
)
from ._transfer import same_mesh
from .ragged._tensor import RaggedSpec, RaggedTensor

Distributed: TypeAlias = DTensor | RaggedTensor | NonMember
Order: TypeAlias = ShardOrder | Mapping[int, Sequence[int]] | None


# Where a tensor goes: placements, mesh and shard order, as given. A `Layout` in place of a mesh is
# one on whose ranks this one is not. (A class of its own would take a fifth of a call that moves
# nothing.)
Target: TypeAlias = tuple[Sequence[AnyPlacement] | None, DeviceMesh | Layout | None, Order]


class Options(NamedTuple):
    """What a plan is chosen by, and the names of the groups that were given for it."""

    cost: CostModel | None = None
    max_bytes: int | None = None
    groups: tuple[str, ...] = ()


NO_OPTIONS = Options()


def options_of(cost: CostModel | None, max_bytes: int | None, groups: object) -> Options:
    """Return what was given to choose a plan by; raises `LayoutError` for what are no groups."""
    return Options(cost, max_bytes, () if groups is None else group_names(groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A redistribution on this rank, ready to run; the same for all like calls.

    It is kept between calls, and so holds no mesh and no group.

    Attributes:
        steps: What runs, None on a rank that takes no part.
        local_shape: What this rank's part must have, None where it has none.
        wrap: Makes the result of what the steps leave, on the mesh given.
        device: Where a rank that had no part gets one.
        unchanged: Whether the result is the input.
        plan_back: Makes the plan of a gradient in the layout of the result.
        first_group: Whose ranks the first step that communicates needs.
        crosses: Whether there are two meshes.
        check: Compares what the ranks of two meshes are about to do; None on other ranks.
        op_text: In a graph of the compiler, what its op is told; empty elsewhere.
    """

    source: Layout
    dtype: torch.dtype
    plan: Plan
    steps: tuple[BoundStep, ...] | None
    local_shape: tuple[int, ...] | None
    wrap: Callable[[Tensor, DeviceMesh | None], Distributed]
    device: str
    unchanged: bool
    plan_back: Callable[[], Plan]
    options: Options
    first_group: AxisGroup | None = None
    crosses: bool = False
    check: ConsistencyCheck | None = None
    op_text: str = ""

    def check_back(self) -> None:
        """Raise `NoPlanError` unless a gradient can come back within ``max_bytes``."""
        if self.options.max_bytes is None:
            return
        try:
            self.plan_back()
        except NoPlanError as error:
            raise NoPlanError(
                f"the gradient needs a plan too: {error}",
                max_bytes=error.max_bytes,
                best_peak=error.best_peak,
            ) from None

    def fault(self, local: Tensor | None) -> str:
        """Say what is wrong with this rank's part, which its peers cannot see; empty if nothing.

        None stands for the part of a `NonMember`.
        """
        if self.local_shape is None or (local is not None and local.shape == self.local_shape):
            return ""
        plan = self.plan
        if local is None:
            return (
                f"a NonMember where {plan.source} of {list(plan.shape)} on mesh "
                f"{list(plan.source.mesh_shape)} gives rank {plan.rank} of the mesh "
                f"{list(self.local_shape)}; give the tensor there"
            )
        return (
            f"the local tensor has shape {list(local.shape)} where {plan.source} of "
            f"{list(plan.shape)} on mesh {list(plan.source.mesh_shape)} gives rank {plan.rank} of "
            f"the mesh {list(self.local_shape)}; pass shape= and stride= to DTensor.from_local "
            "for uneven shards"
        )

    def check_local(self, local: Tensor | None) -> None:
        """Raise `LayoutError` for a part of another shape than the layout gives it."""
        if fault := self.fault(local):
            raise LayoutError(fault)


def prepare(x: object, target: Target, options: Options) -> Prepared:
    """Return the redistribution of ``x``; raises what is wrong with the target.

    Communicates nothing.
    """
    placements, mesh, shard_order = target
    own: DeviceMesh | None
    start: tuple[Any, ...]
    if type(x) is not DTensor and isinstance(x, _WITHOUT_SPEC):
        found = tensor_spec(x)
        own, start = found.mesh, (found.layout, found.shape, found.dtype)
        mark = hash(start)
    else:
        spec = spec_of(x)
        own, start = spec.mesh, (spec.placements, spec.tensor_meta, shard_order_of(spec))
        mark = hash(spec)  # which it keeps; that of its placements takes a fifth of a call
    if mesh is not None and (mesh is own or (own is not None and mesh == own)):
        mesh = None
    given: object = mesh
    if given is not None and not isinstance(given, DeviceMesh | Layout):
        held = "" if own is None else f", {_words(own, 'one')}"
        raise MeshError(
            f"mesh={mesh!r} is no DeviceMesh; give the target's, or, to stay on the mesh of the "
            f"tensor{held}: leave mesh= out"
        )
    if placements is not None and type(placements) is not tuple:
        placements = in_tuple(placements)
    if shard_order is not None:
        shard_order = checked_order(shard_order)
    chosen = None
    if options is not NO_OPTIONS:
        check_limits(options.cost, options.max_bytes)
        chosen = options
    # Equal meshes may have different groups: each has its own number.
    # A mesh that is flattened later brings a group that a better plan may use.
    number, flat = (0, 0) if own is None else (number_of(own), flattened_count(own))
    there = number_of(mesh) if mesh is not None and isinstance(mesh, DeviceMesh) else mesh
    key = (mark, number, flat, there, placements, shard_order, chosen)
    try:
        kept = _prepared.get(key)
    except TypeError:  # what has no hash is no placement, which is said below
        kept = None
    if kept is not None and kept[0] == start:
        return kept[1]
    found = tensor_spec(x)
    kept_spelling = None if isinstance(start[0], Layout) else start[0]
    clean: Target = (placements, mesh, shard_order)
    prepared = (
        _on_one_mesh(found, clean, options, kept_spelling)
        if mesh is None
        else _between_meshes(found, clean, options)
    )
    for old in list(_prepared)[: max(0, len(_prepared) - _MOST_PREPARED + 1)]:
        _prepared.pop(old, None)  # another thread may too
    _prepared[key] = start, prepared
    return prepared


_WITHOUT_SPEC = (RaggedTensor, NonMember, TensorSpec)
# By the hash of what a tensor starts from: what that is stands beside what was prepared.
_prepared: dict[tuple[Any, ...], tuple[tuple[Any, ...], Prepared]] = clearable({})
_MOST_PREPARED = 2048


def tensor_spec(x: object) -> TensorSpec:
    """Return the layout of ``x``; raises `LayoutError` for what is no distributed tensor."""
    if isinstance(x, NonMember):
        return TensorSpec(layout=x.layout, mesh=None, shape=x.shape, dtype=x.dtype)
    if isinstance(x, TensorSpec):
        return x
    if isinstance(x, RaggedTensor):
        held = x._spec
        return TensorSpec(layout=held.layout, mesh=held.mesh, shape=held.shape, dtype=x.dtype)
    spec = spec_of(x)
    return dense_spec(spec.mesh, spec.placements, spec.tensor_meta, shard_order_of(spec))


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the global ranks of a mesh, row-major."""
    return tuple(mesh.mesh.flatten().tolist())


def local_of(x: Any) -> Tensor | None:
    """Return this rank's part, complete, without autograd; None where there is none."""
    if isinstance(x, DTensor):
        return local_part(x)
    return x._local if isinstance(x, RaggedTensor) else None


def own_mesh(x: Any) -> DeviceMesh | None:
    """Return the mesh of a tensor, None for a `NonMember`."""
    return None if isinstance(x, NonMember) else cast(DeviceMesh, x._spec.mesh)


def plan_for(x: Any, target: Any, options: Options) -> Plan:
    """Return the plan of a redistribution, to a `Layout` in place of placements too.

    Raises `MeshError` on a rank that has no part.
    """
    placements, mesh, shard_order = target
    if isinstance(placements, Layout):
        placements, shard_order = _on_own_mesh(x, placements)
        target = placements, mesh, shard_order
    try:
        prepared = prepare(x, target, options)
    except TorchPartial:
        step = torch_step(x, placements, mesh is not None and mesh != own_mesh(x))
        plan = plan_for(step.spec, (step.then, mesh, shard_order), options)
        return replace(plan, note="; ".join(filter(None, (step.note, plan.note))))
    if prepared.steps is None:
        ranks = prepared.source.ranks_in_words()
        if (own := tensor_spec(x).mesh) is not None:
            ranks = str(list(ranks_of(own)))
        raise MeshError(
            f"this rank is not in the mesh of the tensor, so it holds nothing of it; its ranks: "
            f"{ranks}"
        )
    return prepared.plan


def _on_own_mesh(x: Distributed, target: Layout) -> tuple[Any, Any]:
    """Return placements and shard order of a layout; raises `MeshError` for another mesh."""
    spec = tensor_spec(x)
    held = spec.layout
    if target.mesh_shape != held.mesh_shape:
        raise MeshError(
            f"the tensor is on a mesh of shape {held.mesh_shape} and the target on one of shape "
            f"{target.mesh_shape}; give placements and mesh="
        )
    ranks = held.ranks if spec.mesh is None else ranks_of(spec.mesh)
    if target.ranks is not None and target.ranks != replace(held, ranks=ranks).ranks:
        raise MeshError(
            f"the tensor is on ranks {list(ranks or ())} and the target on "
            f"{target.ranks_in_words()}; give placements and mesh="
        )
    return target.placements, target.shard_order


def _on_one_mesh(
    spec: TensorSpec,
    target: Target,
    options: Options,
    spelling: tuple[theirs.Placement, ...] | None,
) -> Prepared:
    src, mesh = spec.layout, spec.mesh
    dst = _target_layout(spec, target, src.mesh_shape, src.ranks)
    coordinate = None if mesh is None else mesh.get_coordinate()
    rank = src.rank_at((0,) * len(src.mesh_shape))
    if coordinate is not None:
        rank = ravel(coordinate, src.mesh_shape)
    given = options.groups
    groups = None if mesh is None else spanned_axes(mesh, given)
    plan, plan_back = _plans(src, dst, spec, rank, options, groups)
    steps = first = None
    if mesh is not None and coordinate is not None:
        found = step_groups(plan, lambda step: group_for(step, mesh, given))
        steps, first = bind(plan, found), next(iter(found.values()), None)
    return Prepared(
        source=src,
        dtype=spec.dtype,
        plan=plan,
        steps=steps,
        local_shape=None if coordinate is None else src.local_shape(spec.shape, rank),
        wrap=_wrap(spec, dst, mesh, mesh is not None, spelling),
        device="cpu" if mesh is None else mesh.device_type,
        unchanged=src == dst,
        plan_back=plan_back,
        options=options,
        first_group=first,
    )


def _between_meshes(spec: TensorSpec, target: Target, options: Options) -> Prepared:
    src, mesh = spec.layout, target[1]
    if spec.mesh is not None:
        src = replace(src, ranks=ranks_of(spec.mesh))
    if isinstance(mesh, DeviceMesh):
        dst = _target_layout(spec, target, tuple(mesh.shape), ranks_of(mesh))
    else:
        dst = cast(Layout, mesh)
    rank = dist.get_rank()
    given = options.groups
    # A rank outside a mesh knows none of its groups, and all choose alike: one axis at a time.
    plan, plan_back = _plans(src, dst, spec, rank, options, frozenset())
    known = mesh if isinstance(mesh, DeviceMesh) else spec.mesh
    device = "cpu" if known is None else known.device_type
    steps = check = None
    if src.holds(rank) or dst.holds(rank):
        check = ConsistencyCheck(plan, spec.dtype, transfer_group(plan, given).find, device)
        here = mesh if isinstance(mesh, DeviceMesh) else None
        steps = bind(
            plan, step_groups(plan, lambda step: group_between(step, plan, spec.mesh, here, given))
        )
    return Prepared(
        source=src,
        dtype=spec.dtype,
        plan=plan,
        steps=steps,
        local_shape=src.local_shape(spec.shape, rank) if src.holds(rank) else None,
        wrap=_wrap(spec, dst, mesh, dst.holds(rank)),
        device=device,
        unchanged=False,
        plan_back=plan_back,
        options=options,
        crosses=True,
        check=check,
    )


def _plans(
    src: Layout, dst: Layout, spec: TensorSpec, rank: int, options: Options, groups: Spanned
) -> tuple[Plan, Callable[[], Plan]]:
    """Return the plan, and what makes that of a gradient in the layout of the result."""
    _check_reducible(src, dst, spec.dtype)
    shape, itemsize = spec.shape, spec.dtype.itemsize  # the spec has a mesh, which is not kept

    def plan(src: Layout, dst: Layout) -> Plan:
        return make_plan(src, dst, shape, rank, itemsize, options.cost, groups, options.max_bytes)

    return plan(src, dst), lambda: plan(reduced_layout(dst), reduced_layout(src))


def step_groups(plan: Plan, find: Callable[[Step], AxisGroup]) -> dict[Step, AxisGroup]:
    """Return the group of each step in which this rank communicates."""
    if 0 in plan.shape:
        return {}
    return {
        step: find(step)
        for step in plan.steps
        if step.kind != "slice" and (step.source.holds(plan.rank) or step.target.holds(plan.rank))
    }


def _target_layout(
    spec: TensorSpec, target: Target, degrees: tuple[int, ...], ranks: Sequence[int] | None
) -> Layout:
    placements, _, shard_order = target
    placements = in_tuple(placements, len(degrees))
    return to_layout(placements, degrees, len(spec.shape), shard_order, ranks)


def _wrap(
    spec: TensorSpec,
    dst: Layout,
    mesh: DeviceMesh | Layout | None,
    here: bool,
    spelling: tuple[theirs.Placement, ...] | None = None,
) -> Callable[[Tensor, DeviceMesh | None], Distributed]:
    """Return what makes the result of this rank's part on a mesh equal to ``mesh``."""
    if not here or not isinstance(mesh, DeviceMesh):
        absent = NonMember(dst, spec.shape, spec.dtype)
        return lambda local, mesh: absent
    if dst.ragged is not None:
        layout = replace(dst, ranks=None)
        ragged = RaggedSpec(mesh=mesh, layout=layout, shape=spec.shape).on(None)
        return lambda local, mesh: RaggedTensor(local, ragged.on(mesh))
    placements = list(to_torch(dst))
    for axis, placement in enumerate(dst.placements):
        if isinstance(placement, Partial) and spelling is not None:
            placements[axis] = spelling[axis]  # it stays, under the name that it has
    spec_on = spec_elsewhere(spec_for(mesh, tuple(placements), spec.shape, spec.dtype))
    return lambda local, mesh: as_dtensor(local, spec_on(cast(DeviceMesh, mesh)))


def _check_reducible(src: Layout, dst: Layout, dtype: torch.dtype) -> None:
    """Raise `LayoutError` where partial values are reduced as their dtype cannot be."""
    one_mesh = same_mesh(src, dst)
    for axis, placement in enumerate(src.placements):
        if not isinstance(placement, Partial) or src.mesh_shape[axis] == 1:
            continue
        if one_mesh and dst.placements[axis] == placement:
            continue
        if placement.op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
            legal = "convert to a floating dtype first, or use Partial('sum')"
        elif placement.op in ("max", "min", "prod") and dtype.is_complex:
            legal = "use Partial('sum') or Partial('avg')"
        else:
            continue
        raise LayoutError(
            f"{placement} on mesh axis {axis} of a tensor of {dtype}, which does not support this "
            f"reduction; {legal}"
        )


def _words(mesh: DeviceMesh, noun: str = "a mesh") -> str:
    return f"{noun} of shape {tuple(mesh.shape)} with axes {mesh.mesh_dim_names}"
