"""Find or create the process groups in which the steps of a plan communicate.

A step on one mesh needs a group with exactly the ranks along some mesh axes. A transfer between two
meshes needs a group with exactly the ranks of both meshes.
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
        find: Returns the group as an `Axis`. It looks up the group by name at each call, so a
            memoized `AxisGroup` keeps no group alive.
        members: Group rank of each member, as in ``torch.distributed.get_group_rank``. The type
            depends on the group:

            - Group along mesh axes: a sequence. ``members[i]`` is the group rank of the member at
              row-major position ``i`` on these axes.
            - Group with the ranks of two meshes: a dict from global ranks to group ranks.
        size: Number of ranks in the group.
    """

    find: Callable[[], Axis]
    members: Sequence[int] | Mapping[int, int]
    size: int

    @property
    def order(self) -> tuple[int, ...] | None:
        """Positions of the ranks on the mesh axes, in the order of their indices in the group.

        ``order[i]`` is the row-major position of the rank with index ``i``. None if every position
        is equal to the index. Only for a group along mesh axes.
        """
        if tuple(self.members) == tuple(range(self.size)):
            return None
        return tuple(sorted(range(self.size), key=self.members.__getitem__))


# The number from `number_of` of each mesh object that is alive. Keys: ``id`` of the mesh object.
mesh_numbers: dict[int, int] = {}
_meshes: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()
_next = count(1)


def number_of(mesh: DeviceMesh) -> int:
    """Return a number that identifies a mesh object.

    Unlike ``id(mesh)``, the number is not used again after the mesh is freed. It replaces the mesh
    in cache keys, because equal meshes can have different process groups.
    """
    number = mesh_numbers.get(id(mesh))
    if number is None:
        number = mesh_numbers[id(mesh)] = next(_next)
        _meshes[number] = mesh
        weakref.finalize(mesh, mesh_numbers.pop, id(mesh), None).atexit = False
    return number


def group_names(groups: object) -> tuple[str, ...]:
    """Return torch's names of the process groups that the caller passed as ``groups=``.

    Each item of ``groups`` is a process group or a 1-D mesh, which stands for the group of its
    axis. Groups and meshes that do not contain this rank are left out.

    Raises `LayoutError` if ``groups`` is not a list or tuple of such items.
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
    """Return an existing process group with exactly the ranks along some mesh axes.

    Returns None if there is no such group. Communicates nothing. The ranks along the axes are the
    result of `ranks_along`. Their order in the group may differ; see `AxisGroup.members`.

    Groups are tried in this order, and the first suitable one is returned:

    1. The groups whose names are in ``given``.
    2. If ``axes`` has one axis, and the mesh was built with groups: the group of this axis.
    3. Otherwise: the groups of flattened meshes, the groups of aliases in hp-mesh, the world.
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

    These are the ranks that have the coordinates of this rank on all other axes. They are in
    row-major order of ``axes``. For example, on a mesh ``[[0, 1], [2, 3]]``, the ranks along axis 1
    are ``(0, 1)`` on ranks 0 and 1, and ``(2, 3)`` on ranks 2 and 3.
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
    """Return the `Axis` objects for an all-reduce over several mesh axes.

    An all-reduce over each returned `Axis`, one after the other, reduces over all ``axes``. Mesh
    axes with one rank are ignored.

    Returns:
        - One `Axis`, if a single process group spans all of the mesh axes.
        - Otherwise one `Axis` for each mesh axis.
        - An empty tuple, if no mesh axis has several ranks, or if this rank is not in the mesh.

    Raises:
        MeshError: A mesh axis has no process group.
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
    """Return the sets of two or more mesh axes that have a common process group.

    `find_group` finds these groups. Each set is a tuple of axes in ascending order, such as
    ``(0, 2)``. Returns None if the mesh has one axis, or if this rank is not in the mesh and so
    does not know its groups.
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

    This can be one of the groups in ``given``, the world, or a group that an earlier call has
    created. If there is no such group, ``find`` of the result creates it when it is first called.
    Only the ranks of both meshes take part in the creation. All ranks choose the same group.

    Args:
        plan: Plan between two meshes.
        given: Names of process groups to try first.
        existing: Source mesh, or None. If it is given, no group is created. Instead, a group with
            all ranks of this mesh is also tried.

    Raises:
        MeshError: ``existing`` is given, and there is no suitable group. Also raised by ``find`` of
            the result, if a group has to be created and the backend can create groups only with all
            ranks of the world.
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
    """Return the global ranks of both meshes of a plan, without duplicates, in ascending order."""
    return tuple(sorted({*plan.source.all_ranks(), *plan.target.all_ranks()}))


def _between(find: Callable[[], Axis], ranks: tuple[int, ...]) -> AxisGroup:
    return AxisGroup(find, {rank: index for index, rank in enumerate(ranks)}, len(ranks))


# torch's name of a process group, and the global ranks of the group in group order.
_Named: TypeAlias = tuple[str, tuple[int, ...]]


def _axis_group(mesh: DeviceMesh, axis: int) -> list[_Named]:
    """Return ``(name, ranks)`` of each process group that may have the ranks along one mesh axis.

    If the mesh was built with groups, there is one entry, the group of the axis. Otherwise, there
    is one entry for each group that `_groups_over_axes` returns. The ranks are in group order. The
    order in the mesh can differ, because ``torch.distributed.new_group`` sorts ranks.
    """
    try:
        return [_named(mesh.get_group(axis))]
    except RuntimeError:  # The mesh was built without groups.
        return _groups_over_axes(mesh)


def _groups_over_axes(mesh: DeviceMesh) -> list[_Named]:
    """Return ``(name, ranks)`` of each process group that may span several axes of a mesh.

    These are the groups of flattened meshes and the groups of aliases in hp-mesh. If the mesh has
    all ranks, the world is included.
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
