"""What a redistribution starts from: a DTensor, a ragged tensor, or nothing on this rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _placements as ours
from ._boxes import ravel
from ._caches import BoundedDict
from ._consistency import Agreement
from ._convert import AnyPlacement, is_torch_partial, to_layout, to_torch
from ._cost import CostModel, check_cost
from ._errors import (
    CrossMeshError,
    LayoutError,
    LocalShapeMismatch,
    NoPlan,
    PartialDtypeError,
    PartialTargetError,
    PlacementCountError,
)
from ._execute import Stage, prepare
from ._groups import fold_between, fold_for, found_folds, mesh_of, number_of, transfer_fold
from ._layout import Layout, ShardOrder, checked_order
from ._non_member import Absent
from ._placements import Partial, Replicate, in_tuple
from ._planner import Plan, make_plan
from ._shard_order import with_placement
from ._torch import (
    as_dtensor,
    flattened_count,
    local_part,
    order_of,
    shard_order_of,
    spec_elsewhere,
    spec_for,
    spec_of,
)
from ._transfer import same_mesh
from .ragged._spec import find_spec
from .ragged._tensor import RaggedTensor

Distributed: TypeAlias = DTensor | RaggedTensor | Absent


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How a tensor lies: ``layout`` by position in ``mesh``, by rank where this rank has no mesh.

    ``mesh`` is None for an `Absent`.
    """

    layout: Layout
    mesh: DeviceMesh | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def origin_of(x: object) -> Origin:
    """Return how ``x`` lies; raises `PlacementTypeError` for what is no distributed tensor."""
    if isinstance(x, Absent):
        return Origin(layout=x.layout, mesh=None, shape=x.shape, dtype=x.dtype)
    if isinstance(x, Origin):
        return x
    if isinstance(x, RaggedTensor):
        held = x._spec
        return Origin(layout=held.layout, mesh=held.mesh, shape=held.shape, dtype=x.dtype)
    spec = spec_of(x)
    return origin_of_parts(spec.mesh, spec.placements, spec.tensor_meta, shard_order_of(spec))


def origin_of_parts(mesh: DeviceMesh, placements: Any, meta: Any, order: Any) -> Origin:
    """Return how a DTensor lies whose spec has these parts."""
    shape = tuple(meta.shape)
    layout = to_layout(placements, tuple(mesh.shape), len(shape), order_of(order))
    return Origin(layout=layout, mesh=mesh, shape=shape, dtype=meta.dtype)


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the global ranks of a mesh, row-major."""
    return tuple(mesh.mesh.flatten().tolist())


def part_of(x: Any) -> torch.Tensor | None:
    """Return this rank's part, complete, without autograd; None where there is none."""
    if isinstance(x, DTensor):
        return local_part(x)
    return x._local if isinstance(x, RaggedTensor) else None


def mesh_under(x: Any) -> DeviceMesh | None:
    """Return the mesh of a tensor, None for an `Absent`."""
    return None if isinstance(x, Absent) else cast(DeviceMesh, x._spec.mesh)


def check_reducible(src: Layout, dst: Layout, dtype: torch.dtype) -> None:
    """Raise `PartialDtypeError` where partial values are reduced as their dtype cannot be."""
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
        raise PartialDtypeError(
            f"{placement} on mesh axis {axis} of a tensor of {dtype}, which has no such "
            f"reduction; {legal}"
        )


class TorchStep(NamedTuple):
    """What torch does first: to these placements; ``then`` is what is left, on ``origin``.

    Where a target keeps such values nothing is left to plan, and torch goes all the way.
    """

    placements: tuple[theirs.Placement, ...]
    origin: Origin
    then: tuple[AnyPlacement, ...]
    axes: tuple[int, ...]
    whole: bool

    @property
    def note(self) -> str:
        """Return what to say of it in a plan."""
        end = ", which takes all steps" if self.whole else " before these steps"
        return f"the mesh axes {self.axes} are reduced by torch's own redistribution{end}"

    def run(self, x: DTensor) -> DTensor:
        """Return the tensor after torch's part, recorded by autograd as torch does."""
        return x.redistribute(placements=list(self.placements))


def torch_step(x: Any, placements: Sequence[AnyPlacement] | None, other_mesh: bool) -> TorchStep:
    """Return torch's part of a redistribution; communicates nothing.

    Values go straight to the shards of the target where no other axis shards the same dim, and
    become replicated otherwise. Raises `PartialTargetError` for a target that asks for such values
    and does not have them, and `PlacementCountError`.
    """
    mesh = x.device_mesh
    held = tuple(x.placements)
    axes = tuple(axis for axis, p in enumerate(held) if is_torch_partial(p))
    ndim = len(held)
    wanted: tuple[AnyPlacement, ...] = (ours.Replicate(),) * ndim
    if placements is not None:
        wanted = in_tuple(placements)
    if not other_mesh and len(wanted) != ndim:
        raise PlacementCountError(
            f"{len(wanted)} placements for a mesh of shape {tuple(mesh.shape)}; give {ndim}, one "
            "for each axis"
        )
    kept = []
    for axis, placement in enumerate(wanted):
        if not is_torch_partial(placement):
            continue
        old = "another mesh" if other_mesh else held[axis]
        if other_mesh or old != placement:
            raise PartialTargetError(
                f"axis {axis} goes from {old} to {placement}; a target can keep partial values but "
                "not make them: use Replicate() or Shard(dim)"
            )
        if hasattr(old, "mask_buffer") and any(p != q for p, q in zip(held, wanted, strict=True)):
            raise PartialTargetError(
                f"{old} stays on axis {axis} while others go from {held} to {wanted}; its mask is "
                "that of the parts as they are: reduce it, with Replicate() or Shard(dim)"
            )
        kept.append(axis)
    whole = bool(kept)
    steps = [
        _onto(held, wanted, axis, x.ndim) if axis in axes and not other_mesh else p
        for axis, p in enumerate(held)
    ]
    if other_mesh:
        steps = [theirs.Replicate() if axis in axes else p for axis, p in enumerate(held)]
    # What is planned, and checked, has those values reduced on both sides.
    plain = [theirs.Replicate() if axis in kept else p for axis, p in enumerate(steps)]
    then = tuple(ours.Replicate() if axis in kept else p for axis, p in enumerate(wanted))
    origin = origin_of_parts(mesh, tuple(plain), x._spec.tensor_meta, None)
    if whole:
        steps = [_spelled(p, x.ndim) for p in wanted]
    return TorchStep(tuple(steps), replace(origin, dtype=x.dtype), then, axes, whole)


def _onto(
    held: Sequence[theirs.Placement], wanted: Sequence[AnyPlacement], axis: int, ndim: int
) -> theirs.Placement:
    """Return what torch makes of one axis: the target's shard, if that can be its place at once."""
    new = wanted[axis]
    if not isinstance(new, ours.Shard | theirs.Shard) or not -ndim <= new.dim < ndim:
        return theirs.Replicate()
    dim = new.dim % ndim
    others = [p for side in (held, wanted) for at, p in enumerate(side) if at != axis]
    taken = any(isinstance(p, ours.RaggedShard) for p in others)
    taken |= any(getattr(p, "dim", dim - ndim) % ndim == dim for p in others if hasattr(p, "dim"))
    return theirs.Replicate() if taken else theirs.Shard(dim)


def _spelled(placement: AnyPlacement, ndim: int) -> theirs.Placement:
    if isinstance(placement, theirs.Placement):
        return placement
    if isinstance(placement, ours.Shard):
        return theirs.Shard(placement.dim % ndim)
    if isinstance(placement, ours.Replicate):
        return theirs.Replicate()
    raise PartialTargetError(
        f"{placement} beside partial values that stay and that only torch reduces; reduce these "
        "first, with Replicate() or Shard(dim) on their axes"
    )


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
