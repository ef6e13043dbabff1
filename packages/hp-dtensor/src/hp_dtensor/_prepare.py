"""Prepare redistributions: make the plan, find the process groups and bind the steps.

The function `prepare` does this once for equal arguments, because the result does not depend on the
values of the tensor. Later calls with equal arguments return the memoized result.
"""

from collections.abc import Callable, Mapping
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
    group_for,
    group_names,
    mesh_numbers,
    number_of,
    spanned_axes,
    transfer_group,
)
from ._layout import Layout, ShardOrder, checked_order, reduced_layout
from ._placements import Partial, in_tuple
from ._planner import Plan, PlanOptions, check_names, make_plan
from ._torch import dtensor_maker, group_count, local_part, spec_for, spec_parts
from ._transfer import same_mesh
from .collectives._c10d import TorchCollectives, checked_collectives
from .collectives._interface import Collectives
from .ragged._spec import RaggedSpec
from .ragged._tensor import RaggedTensor

Distributed: TypeAlias = DTensor | RaggedTensor | NonMember


class RunOptions(PlanOptions, total=False):
    """Keyword arguments of `redistribute` except ``placements``, ``mesh`` and ``async_op``.

    These are ``collectives`` and the keys of `PlanOptions`.
    """

    collectives: Collectives | None


class Options(NamedTuple):
    """The keyword arguments of one `redistribute` call after validation; see `RunOptions`.

    ``groups`` has the names of the given process groups that contain this rank.
    """

    collectives: Collectives = TorchCollectives()
    shard_order: ShardOrder | None = None
    max_bytes: int | None = None
    cost: CostModel | None = None
    groups: tuple[str, ...] = ()

    def plan_key(self) -> tuple[object, ...]:
        """Return all options except ``collectives``. Plans depend on these options only."""
        return self[1:]


NO_OPTIONS = Options()


def options_of(given: Mapping[str, Any]) -> Options:
    """Check the keyword arguments of `redistribute`, and return them as `Options`.

    An argument that is None gets its default. Raises `LayoutError` for an invalid value, and
    TypeError for an unknown name.
    """
    check_names(given, RunOptions)
    checked = {name: value for name, value in given.items() if value is not None}
    check_limits(checked.get("cost"), checked.get("max_bytes"))
    if "shard_order" in checked:
        checked["shard_order"] = checked_order(checked["shard_order"])
    if "groups" in checked:
        checked["groups"] = group_names(checked["groups"])
    if "collectives" in checked:
        checked["collectives"] = checked_collectives(checked["collectives"])
    return Options(**checked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A redistribution that is ready to run on this rank.

    It is memoized, so it refers to no tensor, mesh or process group.

    Attributes:
        dtype: Dtype of the tensor.
        plan: Plan of this rank.
        steps: Functions that run the steps of the plan, from `bind`. None if this rank takes no
            part, because neither the source mesh nor the target mesh contains it.
        local_shape: Shape that the local input must have. None if this rank has no local input.
        wrap: Called as ``wrap(local, x, mesh)`` with the local result, the input and the target
            mesh. Returns the result of the redistribution. ``mesh`` is None if the mesh does not
            change.
        device: Device type such as ``"cuda"``. A rank without a local input starts with an empty
            tensor on this device.
        unchanged: Whether the result has the layout and the mesh of the input.
        backward_plan: Returns the plan of the gradient, from the target layout to the source
            layout. The gradient has `Replicate` instead of each `Partial`.
        first_group: Process group of the first step that communicates. None if no step
            communicates.
        crosses: Whether the target is on another mesh.
        check: Checks that all ranks of both meshes make the same call. None if the mesh does not
            change, or if this rank takes no part.
    """

    dtype: torch.dtype
    plan: Plan
    steps: tuple[BoundStep, ...] | None
    local_shape: tuple[int, ...] | None
    wrap: Callable[[Tensor, Any, DeviceMesh | None], Distributed]
    device: str
    unchanged: bool
    backward_plan: Callable[[], Plan]
    first_group: AxisGroup | None
    crosses: bool
    check: ConsistencyCheck | None

    def check_backward(self) -> None:
        """Raise `NoPlanError` if the gradient has no plan within ``max_bytes``."""
        try:
            self.backward_plan()
        except NoPlanError as error:
            raise NoPlanError(
                f"the gradient needs a plan too: {error}",
                max_bytes=error.max_bytes,
                best_peak=error.best_peak,
            ) from None

    def fault(self, local: Tensor | None) -> str:
        """Return an error message if the local input has a wrong shape, otherwise an empty string.

        ``local`` is the local tensor of the input. It is None if the input is a `NonMember`. That
        is an error if this rank is in the source mesh.
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


def prepare(x: object, placements: object, mesh: object, options: Options) -> Prepared:
    """Return the memoized `Prepared` of a redistribution of ``x`` to ``placements`` on ``mesh``.

    Communicates nothing.

    Args:
        x: A DTensor, a `RaggedTensor`, a `NonMember` or a `TensorSpec`.
        placements: Target placements, as in `redistribute`.
        mesh: Target mesh. None means the mesh of ``x``.
        options: Validated options.

    Raises:
        LayoutError: The target is invalid; see `redistribute` for this error and its subclasses.
        TorchPartial: Only torch can reduce the partial values of ``x``.
    """
    own: DeviceMesh | None
    start: tuple[Any, ...]
    if type(x) is not DTensor and isinstance(x, _OTHER_INPUTS):
        found = tensor_spec(x)
        own, start = found.mesh, (found.layout, found.shape, found.dtype)
        # The number of groups is a part of the key. If a mesh is flattened later, it gains a
        # process group, and a cheaper plan may use this group.
        number_of_groups = 0 if own is None else group_count(own)
        input_hash = hash(start)
    else:
        spec, own, order, number_of_groups = spec_parts(x)
        start = spec.placements, spec.tensor_meta, order
        # torch's spec memoizes its hash. Hashing the placements would take a fifth of the host time
        # of a call.
        input_hash = hash(spec)
    if mesh is not None:
        if mesh is own or (own is not None and mesh == own):
            mesh = None
        elif not isinstance(mesh, DeviceMesh):
            held = "" if own is None else f", one of shape {tuple(own.shape)} with axes"
            held += "" if own is None else f" {own.mesh_dim_names}"
            raise MeshError(
                f"mesh={mesh!r} is no DeviceMesh; give the target's, or, to stay on the mesh of "
                f"the tensor{held}: leave mesh= out"
            )
    if placements is not None and type(placements) is not tuple:
        placements = in_tuple(placements)
    # Equal meshes can have different process groups, so the key has a number for each mesh object.
    number = 0 if own is None else mesh_numbers.get(id(own)) or number_of(own)
    there = None if mesh is None else number_of(mesh)
    chosen = None if options is NO_OPTIONS else options.plan_key()
    # A placement of torch can be equal to a placement of this package, but give another layout. So
    # the key also has the types of the placements.
    kinds = None if placements is None else tuple(map(type, cast(Any, placements)))
    key = (input_hash, number, number_of_groups, there, placements, kinds, chosen)
    try:
        kept = _prepared.get(key)
    except TypeError:  # An unhashable placement is invalid; `_make` raises for it.
        kept = None
    if kept is not None and kept[0] == start:
        return kept[1]
    names = None if isinstance(start[0], Layout) else start[0]
    prepared = _make(tensor_spec(x), placements, mesh, options, names)
    for old in list(_prepared)[: max(0, len(_prepared) - _MOST_PREPARED + 1)]:
        _prepared.pop(old, None)  # Another thread may have removed it.
    _prepared[key] = start, prepared
    return prepared


_OTHER_INPUTS = (RaggedTensor, NonMember, TensorSpec)
# Keys contain only the hash of the input's spec. The spec itself is stored with the value, and
# `prepare` compares it.
_prepared: dict[tuple[Any, ...], tuple[tuple[Any, ...], Prepared]] = clearable({})
_MOST_PREPARED = 2048


def tensor_spec(x: object) -> TensorSpec:
    """Return the layout, mesh, shape and dtype of a distributed tensor.

    ``x`` is a DTensor, a `RaggedTensor`, a `NonMember` or a `TensorSpec`. Raises `LayoutError` for
    other objects.
    """
    if isinstance(x, NonMember):
        return TensorSpec(layout=x.layout, mesh=None, shape=x.shape, dtype=x.dtype)
    if isinstance(x, TensorSpec):
        return x
    if isinstance(x, RaggedTensor):
        held = x._spec
        return TensorSpec(layout=held.layout, mesh=held.mesh, shape=held.shape, dtype=x.dtype)
    spec, mesh, order, _ = spec_parts(x)
    return dense_spec(mesh, spec.placements, spec.tensor_meta, order)


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the global ranks of a mesh in row-major order."""
    return tuple(mesh.mesh.flatten().tolist())


def local_of(x: Any) -> Tensor | None:
    """Return the local tensor of a DTensor or `RaggedTensor`, without autograd history.

    Returns None for other objects.
    """
    if isinstance(x, DTensor):
        return local_part(x)
    return x._local if isinstance(x, RaggedTensor) else None


def plan_for(x: Any, placements: Any, mesh: Any, options: Options) -> Plan:
    """Return the plan that `redistribute` would run on this rank. Communicates nothing.

    ``placements`` can also be a `Layout` on the mesh of ``x``. Raises `MeshError` if this rank is
    neither in the source mesh nor in the target mesh.
    """
    if isinstance(placements, Layout):
        options = options._replace(shard_order=cast(ShardOrder | None, placements.shard_order))
        placements = _on_own_mesh(x, placements)
    try:
        prepared = prepare(x, placements, mesh, options)
    except TorchPartial:
        step = torch_step(x, placements, mesh is not None and mesh != x.device_mesh)
        plan = plan_for(step.spec, step.then, mesh, options)
        return replace(plan, note="; ".join(filter(None, (step.note, plan.note))))
    if prepared.steps is None:
        ranks = prepared.plan.source.ranks_in_words()
        if (own := tensor_spec(x).mesh) is not None:
            ranks = str(list(ranks_of(own)))
        raise MeshError(
            f"this rank is not in the mesh of the tensor, so it holds nothing of it; its ranks: "
            f"{ranks}"
        )
    return prepared.plan


def _on_own_mesh(x: Distributed, target: Layout) -> Any:
    """Return the placements of the layout ``target``, after a check of its mesh.

    Raises `MeshError` if the mesh of ``x`` has another shape or other ranks than the mesh of
    ``target``.
    """
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
    return target.placements


def _make(
    spec: TensorSpec,
    placements: object,
    mesh: DeviceMesh | None,
    options: Options,
    names: tuple[theirs.Placement, ...] | None,
) -> Prepared:
    """Plan a redistribution and bind its steps, without memoization.

    Args:
        spec: Layout, mesh, shape and dtype of the input.
        placements: Target placements, as in `redistribute`.
        mesh: Target mesh. None means the mesh of ``spec``.
        options: Validated options.
        names: torch's placements of the input. None if the input is not a DTensor. If the target
            keeps a `Partial` of the input, the result gets the torch placement from ``names``.
    """
    src, own, crosses = spec.layout, spec.mesh, mesh is not None
    if mesh is None:
        degrees, ranks = src.mesh_shape, src.ranks
        coordinate = None if own is None else own.get_coordinate()
        takes_part = coordinate is not None
        # On one mesh, plans number the ranks by their position in the mesh. A rank outside the mesh
        # plans for the first rank.
        rank = src.rank_at((0,) * len(degrees))
        if coordinate is not None:
            rank = ravel(coordinate, degrees)
        groups = None if own is None else spanned_axes(own, options.groups)
    else:
        degrees, ranks, rank = tuple(mesh.shape), ranks_of(mesh), dist.get_rank()
        if own is not None:
            src = replace(src, ranks=ranks_of(own))
        # A rank outside a mesh does not know the process groups of this mesh. All ranks must choose
        # the same plan, so each step on one mesh uses a single axis.
        groups = frozenset[tuple[int, ...]]()
    target = in_tuple(placements, len(degrees))
    dst = to_layout(target, degrees, len(spec.shape), options.shard_order, ranks)
    _check_reducible(src, dst, spec.dtype)
    shape, itemsize = spec.shape, spec.dtype.itemsize  # `spec` would keep the mesh alive.
    if mesh is not None:
        takes_part = src.holds(rank) or dst.holds(rank)
    limits = options.cost, groups, options.max_bytes  # `options` would keep the collectives alive.

    def plan_between(src: Layout, dst: Layout) -> Plan:
        return make_plan(src, dst, shape, rank, itemsize, *limits)

    plan = plan_between(src, dst)
    known = own if mesh is None else mesh
    device = "cpu" if known is None else known.device_type
    steps = first = check = None
    if takes_part:
        found = step_groups(plan, own, mesh, options.groups)
        steps, first = bind(plan, found), next(iter(found.values()), None)
        if crosses:
            between = transfer_group(plan, options.groups)
            check = ConsistencyCheck(plan, spec.dtype, between.find, device)
    has_input = takes_part and src.holds(rank)
    has_result = own is not None if mesh is None else dst.holds(rank)
    return Prepared(
        dtype=spec.dtype,
        plan=plan,
        steps=steps,
        local_shape=src.local_shape(shape, rank) if has_input else None,
        wrap=_wrap(spec, dst, known if has_result else None, None if crosses else names),
        device=device,
        unchanged=src == dst and not crosses,
        backward_plan=lambda: plan_between(reduced_layout(dst), reduced_layout(src)),
        first_group=first,
        crosses=crosses,
        check=check,
    )


def step_groups(
    plan: Plan,
    source: DeviceMesh | None,
    target: DeviceMesh | None,
    given: tuple[str, ...],
    *,
    create: bool = True,
) -> dict[Step, AxisGroup]:
    """Return a dict from each step in which this rank communicates to its process group.

    Args:
        plan: Plan of this rank.
        source: Mesh of the input, or None on a rank that has a `NonMember`.
        target: Mesh of the result, or None if the mesh does not change.
        given: Names of the process groups that were passed as ``groups=``.
        create: What to do if a transfer between two meshes has no process group. If True, the first
            call of `AxisGroup.find` creates the group. If False, `MeshError` is raised.

    Raises:
        MeshError: A required process group does not exist.
    """
    found: dict[Step, AxisGroup] = {}
    if 0 in plan.shape:
        return found
    for step in plan.steps:
        takes_part = step.source.holds(plan.rank) or step.target.holds(plan.rank)
        if step.kind == "slice" or not takes_part:
            continue
        if step.kind == "transfer":
            found[step] = transfer_group(plan, given, None if create else source)
        else:
            mesh = source if target is None or same_mesh(step.source, plan.source) else target
            found[step] = group_for(step, cast(DeviceMesh, mesh), given)
    return found


def _wrap(
    spec: TensorSpec,
    dst: Layout,
    mesh: DeviceMesh | None,
    names: tuple[theirs.Placement, ...] | None,
) -> Callable[[Tensor, Any, DeviceMesh | None], Distributed]:
    """Return the function for `Prepared.wrap`, which makes the result from the local result.

    Args:
        spec: Layout, mesh, shape and dtype of the input.
        dst: Target layout.
        mesh: Target mesh. None if this rank is not in the target mesh. The function then returns a
            `NonMember`.
        names: torch's placements of the input, or None; see `_make`.
    """
    if mesh is None:
        absent = NonMember(dst, spec.shape, spec.dtype)
        return lambda local, x, mesh: absent
    if dst.ragged is not None:
        layout = replace(dst, ranks=None)
        ragged = RaggedSpec(mesh=mesh, layout=layout, shape=spec.shape).on(None)
        return lambda local, x, mesh: RaggedTensor(local, ragged.on(mesh or x.device_mesh))
    placements = list(to_torch(dst))
    for axis, placement in enumerate(dst.placements):
        if isinstance(placement, Partial) and names is not None:
            placements[axis] = names[axis]
    return dtensor_maker(spec_for(mesh, tuple(placements), spec.shape, spec.dtype))


def _check_reducible(src: Layout, dst: Layout, dtype: torch.dtype) -> None:
    """Raise `LayoutError` if partial values need a reduction that ``dtype`` does not support.

    Examples are an average of integers and a maximum of complex numbers.
    """
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
