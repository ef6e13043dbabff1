"""Find the process group that spans given axes of a mesh; never makes one."""

from functools import lru_cache
from itertools import product
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._execute import Fold
from ._layout import ravel
from ._torch import flattened_meshes
from .collectives._interface import Axis


def find_fold(mesh: DeviceMesh, axes: tuple[int, ...]) -> Fold | None:
    """Return the group over ``axes``: the axis's own, the world's, or that of a flattened mesh.

    None if there is no such group. Communicates nothing.
    """
    coordinate = tuple(mesh.get_coordinate() or ())
    if len(axes) == 1:
        ranks = ranks_along(mesh, axes)
        axis = Axis(_name(mesh, axes), mesh.get_group(axes[0]), ranks)
        return Fold(axis, tuple(range(len(ranks))))
    for group, ranks in _candidates(mesh):
        if (members := _members(mesh, axes, coordinate, ranks)) is not None:
            return Fold(Axis(_name(mesh, axes), group, ranks), members)
    return None


def ranks_along(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the global ranks that differ from this one only on ``axes``, row-major."""
    return _ranks_along(mesh, axes, tuple(mesh.get_coordinate() or ()))


def found_folds(mesh: DeviceMesh) -> frozenset[tuple[int, ...]] | None:
    """Return the sets of axes that one group spans; None if any set has one."""
    if mesh.ndim == 1 or mesh.size() == dist.get_world_size():
        return None
    coordinate = tuple(mesh.get_coordinate() or ())
    sets = (
        tuple(axis for axis, taken in enumerate(choice) if taken)
        for choice in product((False, True), repeat=mesh.ndim)
        if sum(choice) > 1
    )
    groups = _candidates(mesh)
    return frozenset(
        axes
        for axes in sets
        if any(_members(mesh, axes, coordinate, ranks) is not None for _, ranks in groups)
    )


def _candidates(mesh: DeviceMesh) -> list[tuple[Any, tuple[int, ...]]]:
    """Return groups that may span several axes, smallest first, with their ranks in group order."""
    found: list[tuple[Any, tuple[int, ...]]] = []
    for flattened in flattened_meshes(mesh):
        group = flattened.get_group()
        found.append((group, tuple(dist.get_process_group_ranks(group))))
    found.sort(key=lambda pair: len(pair[1]))
    if mesh.size() == dist.get_world_size():
        found.append((dist.group.WORLD, tuple(range(dist.get_world_size()))))
    return found


# The two caches hold what follows from a mesh's ranks alone; groups are looked up at each call.
@lru_cache(maxsize=256)
def _ranks_along(
    mesh: DeviceMesh, axes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    degrees = tuple(mesh.shape)
    flat = mesh.mesh.flatten()
    ranks = []
    for index in product(*(range(degrees[axis]) for axis in axes)):
        position = list(coordinate)
        for axis, i in zip(axes, index, strict=True):
            position[axis] = i
        ranks.append(int(flat[ravel(position, degrees)]))
    return tuple(ranks)


@lru_cache(maxsize=256)
def _members(
    mesh: DeviceMesh,
    axes: tuple[int, ...],
    coordinate: tuple[int, ...],
    group_ranks: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Return the group index of each rank along the axes; None if the group lacks one.

    Only a group that is a union of such sets may serve: all of its ranks must make the call.
    """
    index = {rank: i for i, rank in enumerate(group_ranks)}
    ranks = _ranks_along(mesh, axes, coordinate)
    inside = set(mesh.mesh.flatten().tolist())
    if not all(rank in index for rank in ranks) or not inside.issuperset(group_ranks):
        return None
    return tuple(index[rank] for rank in ranks)


def _name(mesh: DeviceMesh, axes: tuple[int, ...]) -> str:
    names = mesh.mesh_dim_names or tuple(f"dim{axis}" for axis in range(mesh.ndim))
    return "_".join(names[axis] for axis in axes)
