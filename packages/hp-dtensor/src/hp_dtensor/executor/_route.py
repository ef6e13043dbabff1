"""What a redistribution needs besides its tensor, worked out once for all calls alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._absent import Absent
from .._caches import BoundedDict
from .._errors import (
    CrossMeshError,
    LayoutError,
    LocalShapeMismatch,
    NoPlan,
)
from .._torch import (
    as_dtensor,
    flattened_count,
    shard_order_of,
    spec_elsewhere,
    spec_for,
    spec_of,
)
from ..layouts._convert import AnyPlacement, to_layout, to_torch
from ..layouts._intervals import ravel
from ..layouts._layout import Layout, ShardOrder
from ..layouts._links import with_placement
from ..layouts._normal_form import checked_order
from ..layouts._placements import Partial, Replicate, in_tuple
from ..plans._cost import CostModel, check_cost
from ..plans._plan import Plan, make_plan
from ..ragged._spec import find_spec
from ..ragged._tensor import RaggedTensor
from ._agreement import Agreement
from ._execute import prepare
from ._groups import fold_between, fold_for, found_folds, transfer_fold
from ._meshes import mesh_of, number_of
from ._origin import Distributed, Origin, origin_of, origin_of_parts, ranks_of
from ._reducible import check_reducible
from ._stages import Stage

Order: TypeAlias = ShardOrder | Mapping[int, Sequence[int]] | None


_SPECLESS = (RaggedTensor, Absent, Origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way from one layout to another on this rank, ready to run; the same for all like calls.

    It is kept, and so holds no mesh. ``stages`` is None on a rank that takes no part.
    ``local_shape`` is what this rank's part must have, None where it has none; ``wrap`` makes the
    result of what the stages leave, on the mesh given; ``device`` is where a rank that had no part
    gets one. ``unchanged`` says that the result is the input. ``plan_back`` makes the plan of a
    gradient that lies as the result does; it and this one are chosen under ``cost`` and
    ``max_bytes``, with the ``groups`` that were given. Where there are two meshes, ``crosses`` is
    true and ``agree`` is called before anything is sent, unless this rank is in neither.
    """

    source: Layout
    dtype: torch.dtype
    plan: Plan
    stages: tuple[Stage, ...] | None
    local_shape: tuple[int, ...] | None
    wrap: Callable[[Tensor, DeviceMesh | None], Distributed]
    device: str
    unchanged: bool
    plan_back: Callable[[], Plan]
    cost: CostModel | None
    max_bytes: int | None
    groups: tuple[str, ...] = ()
    crosses: bool = False
    agree: Agreement | None = None

    def check_back(self) -> None:
        """Raise `NoPlan` unless a gradient can come back within ``max_bytes``."""
        if self.max_bytes is None:
            return
        try:
            self.plan_back()
        except NoPlan as error:
            raise NoPlan(
                f"the gradient needs a way back: {error}",
                max_bytes=error.max_bytes,
                best_peak=error.best_peak,
            ) from None


def find_route(
    x: object,
    placements: Sequence[AnyPlacement] | None,
    mesh: DeviceMesh | Layout | None,
    shard_order: Order,
    cost: CostModel | None,
    max_bytes: int | None = None,
    groups: tuple[str, ...] = (),
) -> Route:
    """Return the route for ``x``; raises what is wrong with the target. Communicates nothing.

    A `Layout` as ``mesh`` is one on whose ranks this one is not; ``groups`` are names of those that
    were given.
    """
    own: DeviceMesh | None
    start: tuple[Any, ...]
    if type(x) is not DTensor and isinstance(x, _SPECLESS):
        origin = origin_of(x)
        own, start = origin.mesh, (origin.layout, origin.shape, origin.dtype)
        mark = hash(start)
    else:
        spec = spec_of(x)
        own, start = spec.mesh, (spec.placements, spec.tensor_meta, shard_order_of(spec))
        mark = hash(spec)  # which it keeps; that of its placements takes a fifth of a call
    if mesh is not None and (mesh is own or (own is not None and mesh == own)):
        mesh = None
    given: object = mesh
    if given is not None and not isinstance(given, DeviceMesh | Layout):
        lies = "" if own is None else f", {_words(own, 'one')}"
        raise CrossMeshError(
            f"mesh={mesh!r} is no DeviceMesh; give the target's, or, to stay on the mesh of the "
            f"tensor{lies}: leave mesh= out"
        )
    if placements is not None and type(placements) is not tuple:
        placements = in_tuple(placements)
    if shard_order is not None:
        shard_order = checked_order(shard_order)
    if cost is not None:
        check_cost(cost)
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int)):
        raise LayoutError(f"max_bytes={max_bytes!r} is no number of bytes; give a whole number")
    # Equal meshes may have different groups: each has its own number.
    # A mesh that is flattened later brings a group that a better plan may use.
    number, flat = (0, 0) if own is None else (number_of(own), flattened_count(own))
    there = number_of(mesh) if mesh is not None and isinstance(mesh, DeviceMesh) else mesh
    key = (mark, number, flat, there, placements, shard_order, cost, max_bytes, groups)
    kept = _routes.get(key)
    if kept is not None and kept[0] == start:
        return kept[1]
    route = _route(start, number, there, placements, shard_order, cost, max_bytes, groups)
    _routes.keep(key, (start, route))
    return route


# By the hash of what a tensor starts from: what that is stands beside the route.
_routes: BoundedDict[tuple[Any, ...], tuple[tuple[Any, ...], Route]] = BoundedDict(2048)


def _route(
    start: tuple[Any, ...],
    number: int,
    there: int | Layout | None,
    placements: tuple[AnyPlacement, ...] | None,
    shard_order: ShardOrder | None,
    cost: CostModel | None,
    max_bytes: int | None,
    groups: tuple[str, ...],
) -> Route:
    origin = _origin(start, mesh_of(number) if number else None)
    given = None if isinstance(start[0], Layout) else start[0]
    mesh = mesh_of(there) if isinstance(there, int) else there
    if mesh is None:
        return _on_one_mesh(origin, given, placements, shard_order, cost, max_bytes, groups)
    src = origin.layout
    if origin.mesh is not None:
        src = replace(src, ranks=ranks_of(origin.mesh))
    if isinstance(mesh, Layout):
        dst = mesh
    else:
        dst = _target(origin, placements, tuple(mesh.shape), shard_order, ranks_of(mesh))
        if origin.mesh is not None and mesh.device_type != origin.mesh.device_type:
            raise CrossMeshError(
                f"the tensor lies on {origin.mesh.device_type}, the target on {mesh.device_type}; "
                "a transfer stays on one kind of device: move the local tensors first"
            )
    rank = dist.get_rank()
    itemsize = origin.dtype.itemsize
    # A rank outside a mesh knows none of its groups, and all choose alike: one axis at a time.
    none: frozenset[tuple[int, ...]] = frozenset()
    check_reducible(src, dst, origin.dtype)
    plan = make_plan(src, dst, origin.shape, rank, itemsize, cost, none, max_bytes, none)
    known = mesh if isinstance(mesh, DeviceMesh) else origin.mesh
    device = "cpu" if known is None else known.device_type
    stages = agree = None
    if src.holds(rank) or dst.holds(rank):
        agree = Agreement(plan, origin.dtype, transfer_fold(plan, groups).find, device)
        here = None if isinstance(mesh, Layout) else mesh
        stages = prepare(plan, lambda step: fold_between(step, plan, origin.mesh, here, groups))
    return Route(
        source=src,
        dtype=origin.dtype,
        plan=plan,
        stages=stages,
        local_shape=src.local_shape(origin.shape, rank) if src.holds(rank) else None,
        wrap=_wrap(origin, dst, mesh, dst.holds(rank)),
        device=device,
        unchanged=False,
        plan_back=lambda: make_plan(
            whole(dst), whole(src), plan.shape, rank, itemsize, cost, none, max_bytes, none
        ),
        cost=cost,
        max_bytes=max_bytes,
        groups=groups,
        crosses=True,
        agree=agree,
    )


def _origin(start: tuple[Any, ...], mesh: DeviceMesh | None) -> Origin:
    first, second, third = start
    if isinstance(first, Layout):
        return Origin(layout=first, mesh=mesh, shape=second, dtype=third)
    return origin_of_parts(cast(DeviceMesh, mesh), first, second, third)


def check_local(local: Tensor, route: Route) -> None:
    """Raise `LocalShapeMismatch` for a part of another shape than the layout gives this rank."""
    if route.local_shape is not None and local.shape != route.local_shape:
        plan = route.plan
        raise LocalShapeMismatch(
            f"the local tensor has shape {list(local.shape)} where {plan.source} of "
            f"{list(plan.shape)} on mesh {list(plan.source.mesh_shape)} gives rank {plan.rank} of "
            f"the mesh {list(route.local_shape)}; pass shape= and stride= to DTensor.from_local "
            "for uneven shards"
        )


def whole(layout: Layout) -> Layout:
    """Return the layout of a gradient: that of the tensor, with partial values replicated."""
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            layout = with_placement(layout, axis, Replicate())
    return layout


def _on_one_mesh(
    origin: Origin,
    given: tuple[theirs.Placement, ...] | None,
    placements: tuple[AnyPlacement, ...] | None,
    shard_order: ShardOrder | None,
    cost: CostModel | None,
    max_bytes: int | None,
    groups: tuple[str, ...],
) -> Route:
    src, mesh = origin.layout, origin.mesh
    dst = _target(origin, placements, src.mesh_shape, shard_order, src.ranks)
    coordinate = None if mesh is None else mesh.get_coordinate()
    rank = src.rank_at((0,) * len(src.mesh_shape))
    if coordinate is not None:
        rank = ravel(coordinate, src.mesh_shape)
    itemsize = origin.dtype.itemsize
    folded = None if mesh is None else found_folds(mesh, groups)
    check_reducible(src, dst, origin.dtype)
    plan = make_plan(src, dst, origin.shape, rank, itemsize, cost, folded, max_bytes, folded)
    stages = None
    if mesh is not None and coordinate is not None:
        stages = prepare(plan, lambda step: fold_for(step, mesh, groups))
    return Route(
        source=src,
        dtype=origin.dtype,
        plan=plan,
        stages=stages,
        local_shape=None if coordinate is None else src.local_shape(origin.shape, rank),
        wrap=_wrap(origin, dst, mesh, mesh is not None, given),
        device="cpu" if mesh is None else mesh.device_type,
        unchanged=src == dst,
        plan_back=lambda: make_plan(
            whole(dst), whole(src), plan.shape, rank, itemsize, cost, folded, max_bytes, folded
        ),
        cost=cost,
        max_bytes=max_bytes,
        groups=groups,
    )


def _target(
    origin: Origin,
    placements: tuple[AnyPlacement, ...] | None,
    degrees: tuple[int, ...],
    shard_order: ShardOrder | None,
    ranks: Sequence[int] | None,
) -> Layout:
    if placements is None:
        placements = (Replicate(),) * len(degrees)
    return to_layout(placements, degrees, len(origin.shape), shard_order, ranks)


def _wrap(
    origin: Origin,
    dst: Layout,
    mesh: DeviceMesh | Layout | None,
    here: bool,
    given: tuple[theirs.Placement, ...] | None = None,
) -> Callable[[Tensor, DeviceMesh | None], Distributed]:
    """Return what makes the result of this rank's part on a mesh equal to ``mesh``."""
    if not here or not isinstance(mesh, DeviceMesh):
        absent = Absent(dst, origin.shape, origin.dtype)
        return lambda local, mesh: absent
    if dst.ragged is not None:
        axis, runs = dst.ragged
        spelled: list[Any] = list(to_torch(with_placement(dst, axis, Replicate())))
        spelled[axis] = runs
        ragged = find_spec(mesh, spelled, origin.shape).on(None)
        return lambda local, mesh: RaggedTensor(local, ragged.on(mesh))
    placements = list(to_torch(dst))
    for axis, placement in enumerate(dst.placements):
        if isinstance(placement, Partial) and given is not None:
            placements[axis] = given[axis]  # it stays, under the name that it has
    spec_on = spec_elsewhere(spec_for(mesh, tuple(placements), origin.shape, origin.dtype))
    return lambda local, mesh: as_dtensor(local, spec_on(cast(DeviceMesh, mesh)))


def _words(mesh: DeviceMesh, noun: str = "a mesh") -> str:
    return f"{noun} of shape {tuple(mesh.shape)} with axes {mesh.mesh_dim_names}"
