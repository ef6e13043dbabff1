"""The ways between two layouts that are worth a price."""

from collections.abc import Iterator, Sequence

from ..layouts._layout import Layout
from ..layouts._links import extended, with_placement
from ..layouts._placements import Partial, Replicate, Shard
from ._cost import CostModel
from ._steps import Step
from ._walk import (
    direct_step,
    gathers_in_turn,
    merged,
    reduce_step,
    single_axis_steps,
    slice_step,
)

Way = tuple[Step, ...]


def ways(src: Layout, dst: Layout, shape: tuple[int, ...], cost: CostModel) -> Iterator[Way]:
    """Yield ways on one mesh: reductions first, then straight, axis by axis, or slow axes first."""
    for reductions in reductions_to(src, dst, shape):
        here = reductions[-1].target if reductions else src
        yield merged((*reductions, *single_axis_steps(here, dst, shape)))
        yield merged((*reductions, direct_step(here, dst, len(shape))))
        turn = sorted(
            range(len(src.mesh_shape)),
            key=lambda axis: (-cost.seconds((axis,), src.mesh_shape[axis], 1e9), axis),
        )
        gathers = gathers_in_turn(here, dst, shape, turn)
        if gathers is not None:
            yield merged((*reductions, *gathers))


def ways_between(
    src: Layout, dst: Layout, shape: tuple[int, ...], cost: CostModel
) -> Iterator[Way]:
    """Yield ways from one mesh to another: reductions there, one transfer, gathers here.

    What the target replicates may arrive in parts, one for each replica, that these then gather.
    """
    whole = src
    for axis, placement in enumerate(src.placements):
        if isinstance(placement, Partial):
            whole = with_placement(whole, axis, Replicate())
    arrivals = [dst]
    if (spread := _spread(dst, shape)) != dst:
        arrivals.append(spread)
    for reductions in reductions_to(src, whole, shape):
        here = reductions[-1].target if reductions else src
        for there in arrivals:
            move = Step(kind="transfer", axes=(), source=here, target=there)
            if there == dst:
                yield (*reductions, move)
                continue
            for rest in ways(there, dst, shape, cost):
                yield (*reductions, move, *rest)


def reductions_to(src: Layout, dst: Layout, shape: tuple[int, ...]) -> list[Way]:
    """Return the ways to make everything whole that ``dst`` does not keep partial."""
    partial = [
        axis
        for axis, (old, new) in enumerate(zip(src.placements, dst.placements, strict=True))
        if isinstance(old, Partial) and old != new
    ]
    if not partial:
        return [()]

    def turn(axis: int) -> tuple[bool, int]:
        # Scattering first leaves less to reduce; in shard order it leaves the least to move.
        new = dst.placements[axis]
        if isinstance(new, Shard):
            return False, dst.chain(new.dim).index(axis)
        return True, axis

    found = []
    for slice_first in (True, False):
        start: list[Step] = []
        here = src
        if slice_first:
            for dim in range(len(shape)):
                for axis in dst.chain(dim):
                    if isinstance(here.placements[axis], Replicate) and _may_split(here, dim):
                        start.append(slice_step(here, dim, axis))
                        here = start[-1].target
        for scatter_targets, scatter_rest in ((True, False), (True, True), (False, False)):
            steps = list(start)
            after = here
            for axis in sorted(partial, key=turn):
                new = dst.placements[axis]
                onto: int | None = None
                if isinstance(new, Shard) and scatter_targets and _may_split(after, new.dim):
                    onto = new.dim
                elif not isinstance(new, Shard) and scatter_rest:
                    onto = _scatter_dim(after, shape, src.mesh_shape[axis])
                steps.append(reduce_step(after, (axis,), onto))
                after = steps[-1].target
            if tuple(steps) not in found:
                found.append(tuple(steps))
    return found


def _may_split(layout: Layout, dim: int) -> bool:
    """Return whether a dim can be split further; ragged runs must fit what others leave."""
    return layout.ragged is None or dim not in layout.ragged[1].dims


def _scatter_dim(layout: Layout, shape: Sequence[int], degree: int) -> int | None:
    """Return the first dim that still divides, else the longest; None for a scalar."""
    dims = [dim for dim in range(len(shape)) if _may_split(layout, dim)]
    if not dims:
        return None
    first = layout.intervals_at(shape, (0,) * len(layout.mesh_shape))
    parts = {dim: sum(hi - lo for lo, hi in first[dim]) for dim in dims}
    for dim, length in parts.items():
        if length % degree == 0 and layout.is_even(shape):
            return dim
    return max(dims, key=lambda dim: parts[dim])


def _spread(dst: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the target with its replicas holding different parts, where they divide evenly."""
    here = dst
    if not dst.is_even(shape):
        return dst
    for axis, placement in enumerate(dst.placements):
        if isinstance(placement, Replicate) and dst.mesh_shape[axis] > 1:
            for dim in range(len(shape)):
                wider = extended(here, dim, (axis, 1))
                if wider.is_even(shape):
                    here = wider
                    break
    return here
