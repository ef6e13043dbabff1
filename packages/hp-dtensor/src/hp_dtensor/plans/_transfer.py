"""Who sends which box to whom, from interval arithmetic: the cost grows with peers, not ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from .._errors import (
    PartialSourceError,
    PartialTargetError,
    PlacementTypeError,
    RankNotInMesh,
)
from ..layouts._boxes import Box
from ..layouts._layout import Layout
from ..layouts._placements import Partial
from ._pairing import Pairing


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One rank's part in a change of layout; boxes are global half-open ranges.

    ``sends`` and ``recvs`` pair a peer with what goes there and comes from there, by ascending
    peer, never the rank itself; ``local`` is what it keeps.
    """

    sends: tuple[tuple[int, Box], ...]
    recvs: tuple[tuple[int, Box], ...]
    local: tuple[Box, ...]


def plan_transfer(src: Layout, dst: Layout, shape: Sequence[int], rank: int) -> Transfer:
    """Return what ``rank`` sends and receives to take a tensor from ``src`` to ``dst``.

    The layouts may lie on different meshes: of another shape, over other ranks, of which ``rank``
    is in one or both. Every rank receives exactly the elements that it needs and does not hold.
    Among replicas the source is chosen by a rule that both sides evaluate alone, and that deals the
    receivers of a tile out over its replicas (balanced). On one mesh, axes that both layouts
    replicate keep the receiver's coordinate, as do axes along which all receivers need the tile
    alike; between meshes, receivers and replicas are matched in the order of their meshes (near).
    An axis with the same partial values in both layouts takes no part: each coordinate moves its
    own values.

    Communicates nothing. Raises `PartialSourceError`, `PartialTargetError`, `ShardDimError`,
    `RaggedSizesError`, `RankNotInMesh` for a rank in neither mesh, `PlacementTypeError` for what is
    no `Layout`, and `LayoutError` for negative sizes.
    """
    check_pair(src, dst, shape)
    for axis, placement in enumerate(src.placements):
        if not isinstance(placement, Partial) or src.mesh_shape[axis] == 1:
            continue
        if not same_mesh(src, dst) or placement != dst.placements[axis]:
            new = f"to {dst.placements[axis]}" if same_mesh(src, dst) else "to another mesh"
            raise PartialSourceError(
                f"a transfer moves data and reduces none: axis {axis} goes from {placement} "
                f"{new}; reduce it first"
            )
    if not (src.holds(rank) or dst.holds(rank)):
        raise RankNotInMesh(
            f"rank {rank} is neither in the source's mesh of shape {src.mesh_shape} nor in the "
            f"target's of shape {dst.mesh_shape}"
        )
    pairing = Pairing(src, dst, tuple(shape), same_mesh(src, dst))
    recvs: list[tuple[int, Box]] = []
    local = []
    for peer, box in pairing.sources(rank):
        if peer == rank:
            local.append(box)
        else:
            recvs.append((peer, box))
    sends = sorted(pairing.targets(rank))
    return Transfer(sends=tuple(sends), recvs=tuple(sorted(recvs)), local=tuple(local))


def same_mesh(src: Layout, dst: Layout) -> bool:
    """Return whether both layouts lie on the same ranks in the same shape."""
    return src.mesh_shape == dst.mesh_shape and src.ranks == dst.ranks


def check_pair(src: Layout, dst: Layout, shape: Sequence[int]) -> None:
    """Raise unless a tensor of ``shape`` can go from ``src`` to ``dst``."""
    for side, layout in (("source", src), ("target", dst)):
        if not isinstance(layout, Layout):
            raise PlacementTypeError(
                f"the {side} must be a Layout, got {layout!r}; use Layout(mesh_shape, placements)"
            )
    src.check_shape(shape)
    dst.check_shape(shape)
    same = same_mesh(src, dst)
    for axis, new in enumerate(dst.placements):
        if not isinstance(new, Partial) or dst.mesh_shape[axis] == 1:
            continue
        old = src.placements[axis] if same else "another mesh"
        if new != old:
            raise PartialTargetError(
                f"axis {axis} goes from {old} to {new}; a target can keep partial values but not "
                "make them: use Replicate() or Shard(dim)"
            )
