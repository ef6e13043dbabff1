"""Where a rank sits: its place in the sequence, its Ulysses neighbours and its schedule's ranks."""

from dataclasses import dataclass

import torch

from hp_dtensor import Axis, AxisMesh, Collectives

from ._errors import DegreeError, InputError, described
from ._plan import check_degree
from .schedules._peers import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """Rank ``rank`` of ``n``: ``inside`` exchange heads, ``across`` the schedule runs."""

    n: int
    rank: int
    inside: Peers
    across: Peers


def check_mesh(mesh: object) -> None:
    """Raise `InputError` for what is no mesh."""
    if not (hasattr(mesh, "ndim") and hasattr(mesh, "get_local_rank")):
        raise InputError(
            f"mesh must be a DeviceMesh, got {described(mesh)}; make one with init_device_mesh "
            f"and pass its axis, as mesh['cp']"
        )


def axes_of(mesh: AxisMesh) -> list[Axis]:
    """Return the one or two axes of a context parallel mesh, the outer one first.

    Raises `InputError` for what is no mesh, and `DegreeError` for one of more axes.
    """
    check_mesh(mesh)
    if mesh.ndim not in (1, 2):
        raise DegreeError(
            f"context parallelism runs over a mesh of one axis, or of two, (outer, ulysses), got "
            f"axes {list(mesh.mesh_dim_names or range(mesh.ndim))}; pass one axis, as mesh['cp']"
        )
    return [Axis.of(mesh, position) for position in range(mesh.ndim)]


def place_of(mesh: AxisMesh) -> tuple[int, int]:
    """Return the number of ranks that a sequence lies over, and this rank's place among them."""
    n = place = 0
    for axis in axes_of(mesh):
        n, place = max(n, 1) * axis.size, place * axis.size + axis.index
    return n, place


def device_of(mesh: AxisMesh) -> torch.device:
    """Return the kind of device that a mesh is of; a CPU where it does not say."""
    return torch.device(getattr(mesh, "device_type", "cpu"))


def list_ranks(mesh: AxisMesh) -> list[int]:
    """Return the global ranks that a sequence lies over, in its order."""
    *outer, inner = axes_of(mesh)
    rows = mesh.mesh.tolist()
    return [rank for row in rows for rank in row] if outer else list(inner.ranks)


def default_degree(mesh: AxisMesh) -> int:
    """Return the size of the last axis: all ranks of one, the Ulysses ranks of two."""
    return axes_of(mesh)[-1].size


def seats_of(mesh: AxisMesh, ulysses_degree: int, collectives: Collectives) -> Seats:
    """Return this rank's seats.

    Neighbouring ranks exchange heads: on a mesh of two axes those of the last one, on one axis each
    ``ulysses_degree`` in turn. Raises `DegreeError` for a mesh or a degree that does not fit.
    """
    axes = axes_of(mesh)
    n, rank = place_of(mesh)
    if len(axes) == 2:
        outer, inner = axes
        if ulysses_degree != inner.size:
            raise DegreeError(
                f"ulysses_degree={ulysses_degree} on a mesh of {outer.name} ({outer.size} ranks) "
                f"and {inner.name} ({inner.size}), whose last axis exchanges heads; use "
                f"ulysses_degree={inner.size}, or a mesh of one axis"
            )
        return Seats(
            n=n,
            rank=rank,
            inside=Peers.on(inner, collectives),
            across=Peers.on(outer, collectives),
        )
    check_degree(ulysses_degree, n)
    (axis,) = axes
    group, place = divmod(rank, ulysses_degree)
    first = group * ulysses_degree
    inside = tuple(range(first, first + ulysses_degree))
    across = tuple(range(place, n, ulysses_degree))
    return Seats(
        n=n,
        rank=rank,
        inside=Peers(axis=axis, members=inside, collectives=collectives),
        across=Peers(axis=axis, members=across, collectives=collectives),
    )
