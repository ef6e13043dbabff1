"""What a redistribution needs besides its tensor, worked out once for all calls alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._convert import AnyPlacement, to_layout, to_torch
from ._cost import CostModel
from ._errors import CrossMeshError
from ._execute import prepare
from ._groups import find_fold, found_folds
from ._layout import ShardOrder, ravel
from ._placements import Replicate, in_tuple
from ._plan import Plan, make_plan
from ._stages import Fold, Stage
from ._torch import Spec, dtype_of, flattened_count, order_of, spec_of, spec_with

Order: TypeAlias = ShardOrder | Mapping[int, Sequence[int]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way from one layout to another on this rank, ready to run; the same for all like calls.

    ``stages`` is None on a rank outside the mesh, which holds nothing to move. ``spec`` describes
    the result to torch; ``unchanged`` says that source and target are one layout.
    """

    plan: Plan
    stages: tuple[Stage, ...] | None
    local_shape: tuple[int, ...]
    spec: Spec
    unchanged: bool


def find_route(
    x: DTensor,
    placements: Sequence[AnyPlacement] | None,
    mesh: DeviceMesh | None,
    shard_order: Order,
    cost: CostModel | None,
) -> Route:
    """Return the route for ``x``; raises what is wrong with the target. Communicates nothing."""
    spec = spec_of(x)
    own = spec.mesh
    if mesh is not None and mesh is not own and mesh != own:
        if not isinstance(mesh, DeviceMesh):
            raise CrossMeshError(
                f"mesh={mesh!r} is no DeviceMesh; redistribute stays on the mesh of the tensor, "
                f"{_words(own, 'one')}: leave mesh= out"
            )
        raise CrossMeshError(
            f"the tensor lies on {_words(own)}, the target on {_words(mesh, 'one')}; redistribute "
            "stays on one mesh: leave mesh= out"
        )
    if placements is not None and type(placements) is not tuple:
        placements = in_tuple(placements)
    if shard_order is not None and isinstance(shard_order, Mapping):
        shard_order = tuple((dim, tuple(axes)) for dim, axes in shard_order.items())
    # Equal meshes may have different groups: the key holds the mesh itself, alive with its spec.
    # A mesh that is flattened later brings a group that a better plan may use.
    return _route(spec, id(own), flattened_count(own), placements, shard_order, cost)


@lru_cache(maxsize=2048)
def _route(
    spec: Spec,
    mesh_id: int,
    flattened: int,
    placements: tuple[AnyPlacement, ...] | None,
    shard_order: ShardOrder | None,
    cost: CostModel | None,
) -> Route:
    mesh: DeviceMesh = spec.mesh
    degrees, shape = tuple(mesh.shape), tuple(spec.shape)
    if placements is None:
        placements = (Replicate(),) * len(degrees)
    src = to_layout(spec.placements, degrees, len(shape), order_of(spec))
    dst = to_layout(placements, degrees, len(shape), shard_order)
    coordinate = mesh.get_coordinate()
    rank = 0 if coordinate is None else ravel(coordinate, degrees)
    itemsize = dtype_of(spec).itemsize
    plan = make_plan(src, dst, shape, rank, itemsize, cost, found_folds(mesh))
    return Route(
        plan=plan,
        stages=None if coordinate is None else _stages(plan, mesh),
        local_shape=src.local_shape(shape, rank),
        spec=spec_with(spec, to_torch(dst)),
        unchanged=src == dst,
    )


def _stages(plan: Plan, mesh: DeviceMesh) -> tuple[Stage, ...]:
    def fold(axes: tuple[int, ...]) -> Fold:
        found = find_fold(mesh, axes)
        if found is None:  # the plan was made with the groups that exist
            raise RuntimeError(f"the group over mesh axes {axes} of {mesh} is gone")
        return found

    return prepare(plan, fold)


def _words(mesh: DeviceMesh, noun: str = "a mesh") -> str:
    return f"{noun} of shape {tuple(mesh.shape)} with axes {mesh.mesh_dim_names}"
