"""Find or create the process group of a step.

The group has exactly the ranks along some mesh axes, or exactly the ranks of two meshes.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import combinations, count
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._cost import Step
from ._errors import LayoutError, MeshError
from ._planner import Plan
from ._torch import (
    alias_groups,
    flattened_meshes,
    group_name,
    make_group,
    makes_groups_alone,
    registered_group,
    resolve_group,
)
from .collectives._interface import Axis


class AxisGroup(NamedTuple):
    """A process group in which a step communicates.

    Attributes:
        find: Returns the group as an `Axis`. It looks the group up by name at each call, so that a
            memoized `AxisGroup` keeps no group alive.
        members: Maps each rank to its index in the group. For a group along mesh axes, this is a
            sequence: position ``i`` is the rank with row-major position ``i`` on these axes. For a
            group with the ranks of two meshes, it is a dict whose keys are global ranks.
        size: Number of ranks in the group.
    """

    find: Callable[[], Axis]
    members: Sequence[int] | Mapping[int, int]
    size: int

    @property
    def order(self) -> tuple[int, ...] | None:
        """The inverse of ``members``, for a group along mesh axes.

        ``order[i]`` is the row-major position, on these axes, of the rank with index ``i`` in the
        group. None if all positions equal the indices.
        """
        if tuple(self.members) == tuple(range(self.size)):
            return None
        return tuple(sorted(range(self.size), key=self.members.__getitem__))


# From the `id` of each mesh object that is alive to its number from `number_of`.
mesh_numbers: dict[int, int] = {}
_meshes: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()
_next = count(1)


def number_of(mesh: DeviceMesh) -> int:
    """Return a number that identifies a mesh object. It is never used for another mesh object.

    Equal meshes can have different process groups, so cache keys have this number instead of the
    mesh. The ``id`` of a mesh can be used again after the mesh is freed.
    """
    number = mesh_numbers.get(id(mesh))
    if number is None:
        number = mesh_numbers[id(mesh)] = next(_next)
        _meshes[number] = mesh
        weakref.finalize(mesh, mesh_numbers.pop, id(mesh), None).atexit = False
    return number


def group_names(groups: object) -> tuple[str, ...]:
    """Return torch's names of the given process groups that contain this rank.

    Raises `LayoutError` unless ``groups`` is a sequence of process groups and meshes of one axis.
    """
    if not isinstance(groups, list | tuple):
        _refuse_groups(f"groups= is a {type(groups).__name__} alone")
    found = []
    for group in groups:
        if isinstance(group, DeviceMesh) and group.ndim == 1:
            if group.get_coordinate() is not None:
                found.append(group_name(group.get_group()))
        elif isinstance(group, dist.ProcessGroup):
            found.append(group_name(group))
        elif isinstance(group, DeviceMesh):
            _refuse_groups(f"groups= has a mesh of shape {tuple(group.shape)}")
        elif group is not dist.GroupMember.NON_GROUP_MEMBER:
            _refuse_groups(f"groups= has a {type(group).__name__}")
    return tuple(found)


def _refuse_groups(problem: str) -> NoReturn:
    raise LayoutError(
        f"{problem}; give a sequence of the process groups that may carry the steps, as groups or "
        "as meshes of one axis, or leave it out"
    )


def find_group(
    mesh: DeviceMesh, axes: tuple[int, ...], given: tuple[str, ...] = ()
) -> AxisGroup | None:
    """Return an existing process group with exactly the ranks of `ranks_along`, or None.

    The order of the ranks in the group may differ; see `AxisGroup.members`. Communicates nothing.
    The first group with these ranks is returned. Groups are tried in this order:

    - The groups named in ``given``.
    - If ``axes`` has one axis and the mesh was built with groups: the group of this axis.
    - Otherwise: the groups of flattened meshes, then of hp-mesh aliases, then of the world.
    """
    names = mesh.mesh_dim_names or tuple([f"dim{axis}" for axis in range(mesh.ndim)])
    name = "_".join([names[axis] for axis in axes])
    existing = _axis_group(mesh, axes[0]) if len(axes) == 1 else _groups_over_axes(mesh)
    ranks = ranks_along(mesh, axes)
    for group, group_ranks in [*map(_with_ranks, given), *existing]:
        if len(group_ranks) != len(ranks):
            continue
        index = {rank: i for i, rank in enumerate(group_ranks)}
        if index.keys() == set(ranks):
            members = tuple([index[rank] for rank in ranks])
            return AxisGroup(_finder(name, group, group_ranks), members, len(ranks))
    return None


def ranks_along(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the global ranks along some mesh axes, including this rank.

    Their coordinates differ only on ``axes``. They are in row-major order of ``axes``.
    """
    return _ranks_along(number_of(mesh), axes, tuple(mesh.get_coordinate() or ()))


@lru_cache(maxsize=256)
def _ranks_along(
    number: int, axes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    here = tuple([slice(None) if axis in axes else i for axis, i in enumerate(coordinate)])
    order = [sorted(axes).index(axis) for axis in axes]
    return tuple(_meshes[number].mesh[here].permute(order).flatten().tolist())


def axes_over(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[Axis, ...]:
    """Return the `Axis` objects over which to all-reduce, one after the other, to reduce ``axes``.

    This is a single `Axis` if one process group spans all mesh axes in ``axes``. Otherwise it is
    one `Axis` for each mesh axis with several ranks. The result is empty if no axis has several
    ranks, or if this rank is not in the mesh. Raises `MeshError` if an axis has no process group.
    """
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if not axes or mesh.get_coordinate() is None:
        return ()
    if (together := find_group(mesh, axes)) is not None:
        return (together.find(),)
    found = [find_group(mesh, (axis,)) for axis in axes]
    for axis, group in zip(axes, found, strict=True):
        if group is None:
            raise MeshError(
                f"no process group has the ranks of axis {axis} of {mesh} alone, over which a "
                "tensor is sharded or replicated; build the mesh with groups"
            )
    return tuple(group.find() for group in found if group is not None)


def spanned_axes(
    mesh: DeviceMesh, given: tuple[str, ...] = ()
) -> frozenset[tuple[int, ...]] | None:
    """Return the sets of two or more mesh axes for which `find_group` finds a process group.

    Each set is a tuple of axes in ascending order. Returns None if the mesh has one axis. Also
    returns None on a rank outside the mesh, which does not know the groups of the mesh.
    """
    if mesh.ndim == 1 or mesh.get_coordinate() is None:
        return None
    sizes = {len(ranks) for _, ranks in [*map(_with_ranks, given), *_groups_over_axes(mesh)]}
    sets = [
        axes
        for number in range(2, mesh.ndim + 1)
        for axes in combinations(range(mesh.ndim), number)
        if math.prod(mesh.shape[axis] for axis in axes) in sizes
    ]
    return frozenset(axes for axes in sets if find_group(mesh, axes, given) is not None)


def group_for(step: Step, mesh: DeviceMesh, given: tuple[str, ...] = ()) -> AxisGroup:
    """Return the process group of a step on one mesh. Raises `MeshError` if no group exists."""
    found = find_group(mesh, step.axes, given)
    if found is None:
        raise MeshError(
            f"no process group has the ranks along the axes {step.axes} of {mesh} and no others; "
            "build the mesh with groups, or an alias over these axes with it, or give groups="
        )
    return found


def transfer_group(
    plan: Plan, given: tuple[str, ...] = (), existing: DeviceMesh | None = None
) -> AxisGroup:
    """Return the process group with exactly the ranks of the two meshes of a plan.

    This is a group named in ``given``, the group of the world, or a group that the first call of
    ``find`` creates. All ranks of both meshes choose the same group. Ranks outside both meshes take
    no part in creating it.

    Args:
        plan: Plan between two meshes.
        given: Names of process groups to try first.
        existing: Mesh of the source. If given, no group is created. Only existing groups are used,
            including a group with all ranks of this mesh.

    Raises:
        MeshError: ``existing`` is given and no group has these ranks. The result's ``find`` raises
            it if a group is missing and the backend can create groups only with all ranks of the
            world.
    """
    ranks = ranks_of_both(plan)
    world = dist.get_world_size() == len(ranks)
    usable = [*map(_with_ranks, given), *([_named(dist.group.WORLD)] if world else [])]
    for group, members in usable:
        if set(members) == set(ranks):
            return _between(_finder("world" if world else "transfer", group, members), members)
    name = f"hp_dtensor_transfer_{sha256(repr(ranks).encode()).hexdigest()[:16]}"
    if existing is not None and registered_group(name) is None:
        axes = tuple(axis for axis in range(existing.ndim) if existing.size(axis) > 1)
        found = find_group(existing, axes) if existing.size() == len(ranks) else None
        if found is None:
            raise MeshError(
                f"no process group has the ranks {list(ranks)} of both meshes and no others, which "
                "a compiled function cannot make; redistribute once outside of it, or flatten the "
                "mesh"
            )
        return _between(found.find, found.find().ranks)

    def find_or_create() -> Axis:
        group = registered_group(name)
        if group is None:
            if not makes_groups_alone():
                raise MeshError(
                    f"no process group has the ranks {list(ranks)} of both meshes and no others, "
                    "and the world's communicator is split by all ranks together; make one with "
                    "torch.distributed.new_group on all of them and give groups=[group]"
                )
            group = make_group(ranks, name)
        return Axis("transfer", group, ranks)

    return _between(find_or_create, ranks)


def ranks_of_both(plan: Plan) -> tuple[int, ...]:
    """Return the global ranks of the source mesh and of the target mesh, in ascending order."""
    return tuple(sorted({*plan.source.all_ranks(), *plan.target.all_ranks()}))


def _between(find: Callable[[], Axis], ranks: tuple[int, ...]) -> AxisGroup:
    return AxisGroup(find, {rank: index for index, rank in enumerate(ranks)}, len(ranks))


# torch's name of a process group, and the global ranks of the group in group order.
_Named: TypeAlias = tuple[str, tuple[int, ...]]


def _axis_group(mesh: DeviceMesh, axis: int) -> list[_Named]:
    """Return the name and the ranks of each process group that may belong to one mesh axis.

    This is the group of the axis. If the mesh was built without groups, these are the groups of
    `_groups_over_axes`. Ranks are in group order, which can differ from the order in the mesh,
    because ``torch.distributed.new_group`` sorts ranks.
    """
    try:
        return [_named(mesh.get_group(axis))]
    except RuntimeError:  # The mesh was built without groups.
        return _groups_over_axes(mesh)


def _groups_over_axes(mesh: DeviceMesh) -> list[_Named]:
    """Return the name and the ranks of each process group that may span several axes of a mesh.

    These are the groups of flattened meshes and of hp-mesh aliases, and the group of the world if
    the mesh has all ranks.
    """
    found = [_named(flattened.get_group()) for flattened in flattened_meshes(mesh)]
    # An alias can name a group that has been destroyed since.
    alive = (registered_group(name) for name in alias_groups(mesh))
    found += [_named(group) for group in alive if group is not None]
    if mesh.size() == dist.get_world_size():
        found.append(_named(dist.group.WORLD))
    return found


def _with_ranks(name: str) -> _Named:
    return _named(resolve_group(name))


def _named(group: Any) -> _Named:
    return group_name(group), tuple(dist.get_process_group_ranks(group))


def _finder(name: str, group: str, ranks: tuple[int, ...]) -> Callable[[], Axis]:
    return lambda: Axis(name, resolve_group(group), ranks)
