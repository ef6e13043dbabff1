"""Find the process group that spans given axes of a mesh, or two meshes."""

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
    """A process group of the ranks along some mesh axes, and where their positions are in it.

    ``find`` looks the group up at each call, so that what is kept never outlives a group.
    ``members[i]`` is the group index of the rank at row-major position ``i`` on the axes, between
    meshes of the rank ``i``; ``size`` the number of ranks in the group.
    """

    find: Callable[[], Axis]
    members: Sequence[int] | Mapping[int, int]
    size: int

    @property
    def order(self) -> tuple[int, ...] | None:
        """Return the position on the axes of each group index; None where both are the same.

        For a group of axes, not for one between meshes.
        """
        if tuple(self.members) == tuple(range(self.size)):
            return None
        return tuple(sorted(range(self.size), key=self.members.__getitem__))


# Numbers of the meshes that are alive, by their id.
mesh_numbers: dict[int, int] = {}
_meshes: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()
_next = count(1)


def number_of(mesh: DeviceMesh) -> int:
    """Return the mesh's number, which no other mesh has had or will have in this process.

    Equal meshes may have different groups, so that each has its own.
    """
    number = mesh_numbers.get(id(mesh))
    if number is None:
        number = mesh_numbers[id(mesh)] = next(_next)
        _meshes[number] = mesh
        weakref.finalize(mesh, mesh_numbers.pop, id(mesh), None).atexit = False
    return number


def group_names(groups: object) -> tuple[str, ...]:
    """Return the names of groups that were given, of which this rank is a member.

    Raises `LayoutError` for what is no sequence of process groups and meshes of one axis.
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


def _refuse_groups(wrong: str) -> NoReturn:
    raise LayoutError(
        f"{wrong}; give a sequence of the process groups that may carry the steps, as groups or as "
        "meshes of one axis, or leave it out"
    )


def find_group(
    mesh: DeviceMesh, axes: tuple[int, ...], given: tuple[str, ...] = ()
) -> AxisGroup | None:
    """Return the group over ``axes``: given, the axis's own, flattened, an alias's, the world's.

    Groups are ``given`` by name, and come first. It has the ranks that differ from this one on
    these axes, and no others: ranks that differ on another axis take no part. None if there is no
    such group. Communicates nothing.
    """
    name = _name(mesh, axes)
    coordinate = tuple(mesh.get_coordinate() or ())
    found = _lines(mesh, axes[0]) if len(axes) == 1 else _candidates(mesh)
    for group, ranks in [*_by_name(given), *found]:
        if (members := _members(mesh, axes, coordinate, ranks)) is not None:
            return AxisGroup(_finder(name, group, ranks), members, len(ranks))
    return None


def ranks_along(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the global ranks that differ from this one only on ``axes``, row-major."""
    return _ranks_along(number_of(mesh), axes, tuple(mesh.get_coordinate() or ()))


def axes_over(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[Axis, ...]:
    """Return axes whose all-reduces in turn cover mesh axes: one if a group spans them.

    None of them where none has several ranks. Raises `MeshError`.
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
    """Return the sets of several axes that one process group spans, without any other rank.

    A rank outside the mesh has no groups to look at and answers None.
    """
    coordinate = mesh.get_coordinate()
    if mesh.ndim == 1 or coordinate is None:
        return None
    sizes = {len(ranks) for _, ranks in [*_by_name(given), *_candidates(mesh)]}
    sets = [
        axes
        for count in range(2, mesh.ndim + 1)
        for axes in combinations(range(mesh.ndim), count)
        if math.prod(mesh.shape[axis] for axis in axes) in sizes
    ]
    return frozenset(axes for axes in sets if find_group(mesh, axes, given) is not None)


def transfer_group(
    plan: Plan, given: tuple[str, ...] = (), existing: DeviceMesh | None = None
) -> AxisGroup:
    """Return the group of the ranks of two meshes and no others.

    One that was ``given``, the world's where they are all, one of their own if there is one
    already, that of the ``existing`` mesh, or else one that its first use makes: all of these ranks
    use it, and no others have to. What all of them know decides, so that all choose alike. Raises
    `MeshError` where it is to exist and does not, and at the first use where only the whole world
    can make groups.
    """
    ranks = ranks_of_both(plan)
    world = dist.get_world_size() == len(ranks)
    for name, members in [*_by_name(given), *([_named(dist.group.WORLD)] if world else [])]:
        if set(members) == set(ranks):
            return _between(_finder("world" if world else "transfer", name, members), members)
    own = _own_name(ranks)
    if existing is not None and registered_group(own) is None:
        axes = tuple(axis for axis in range(existing.ndim) if existing.size(axis) > 1)
        found = find_group(existing, axes) if existing.size() == len(ranks) else None
        if found is None:
            raise MeshError(
                f"no process group has the ranks {list(ranks)} of both meshes and no others, which "
                "a compiled function cannot make; redistribute once outside of it, or flatten the "
                "mesh"
            )
        axis = found.find()
        return _between(found.find, axis.ranks)

    def find_or_make() -> Axis:
        group = registered_group(own)
        if group is None:
            if not makes_groups_alone():
                raise MeshError(
                    f"no process group has the ranks {list(ranks)} of both meshes and no others, "
                    "and the world's communicator is split by all ranks together; make one with "
                    "torch.distributed.new_group on all of them and give groups=[group]"
                )
            group = make_group(ranks, own)
        return Axis("transfer", group, ranks)

    return _between(find_or_make, ranks)


def _between(find: Callable[[], Axis], ranks: tuple[int, ...]) -> AxisGroup:
    return AxisGroup(find, {rank: place for place, rank in enumerate(ranks)}, len(ranks))


def ranks_of_both(plan: Plan) -> tuple[int, ...]:
    """Return the ranks of the meshes of source and target, ascending."""
    return tuple(sorted({*plan.source.all_ranks(), *plan.target.all_ranks()}))


def _own_name(ranks: tuple[int, ...]) -> str:
    return f"hp_dtensor_transfer_{sha256(repr(ranks).encode()).hexdigest()[:16]}"


def group_for(step: Step, mesh: DeviceMesh, given: tuple[str, ...] = ()) -> AxisGroup:
    """Return the group of a step on one mesh; raises `MeshError`."""
    found = find_group(mesh, step.axes, given)
    if found is None:
        raise MeshError(
            f"no process group has the ranks along the axes {step.axes} of {mesh} and no others; "
            "build the mesh with groups, or an alias over these axes with it, or give groups="
        )
    return found


# Names under which torch finds groups again, so that what is kept never outlives them, with ranks.
_Groups: TypeAlias = list[tuple[str, tuple[int, ...]]]


def _lines(mesh: DeviceMesh, axis: int) -> _Groups:
    """Return the axis's own group, with its ranks, which it may hold in another order.

    ``torch.distributed.new_group`` sorts them; a mesh may list its ranks in any order.
    """
    try:
        group = mesh.get_group(axis)
    except RuntimeError:  # a mesh that was built without groups
        return _candidates(mesh)
    return [_named(group)]


def _candidates(mesh: DeviceMesh) -> _Groups:
    """Return the groups that may span several axes, with their ranks."""
    found = [_named(flattened.get_group()) for flattened in flattened_meshes(mesh)]
    # Whoever built the mesh may have destroyed them since.
    there = (registered_group(name) for name in alias_groups(mesh))
    found += [_named(group) for group in there if group is not None]
    if mesh.size() == dist.get_world_size():
        found.append(_named(dist.group.WORLD))
    return found


def _by_name(names: tuple[str, ...]) -> _Groups:
    return [_named(resolve_group(name)) for name in names]


def _named(group: Any) -> tuple[str, tuple[int, ...]]:
    return group_name(group), tuple(dist.get_process_group_ranks(group))


def _finder(name: str, group: str, ranks: tuple[int, ...]) -> Callable[[], Axis]:
    return lambda: Axis(name, resolve_group(group), ranks)


@lru_cache(maxsize=256)
def _ranks_along(
    number: int, axes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    here = tuple(slice(None) if axis in axes else i for axis, i in enumerate(coordinate))
    order = [sorted(axes).index(axis) for axis in axes]
    return tuple(_meshes[number].mesh[here].permute(order).flatten().tolist())


def _members(
    mesh: DeviceMesh,
    axes: tuple[int, ...],
    coordinate: tuple[int, ...],
    group_ranks: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Return the group index of each rank along the axes; None unless the group has no others."""
    if math.prod(mesh.shape[axis] for axis in axes) != len(group_ranks):
        return None
    ranks = _ranks_along(number_of(mesh), axes, coordinate)
    index = {rank: i for i, rank in enumerate(group_ranks)}
    return tuple(index[rank] for rank in ranks) if index.keys() == set(ranks) else None


def _name(mesh: DeviceMesh, axes: tuple[int, ...]) -> str:
    names = mesh.mesh_dim_names or tuple(f"dim{axis}" for axis in range(mesh.ndim))
    return "_".join(names[axis] for axis in axes)
