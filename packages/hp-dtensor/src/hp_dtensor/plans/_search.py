"""The cheapest walk over layouts, step by step, where the usual ways may not be the cheapest."""

import heapq
import math
import operator
from collections.abc import Callable, Iterator
from itertools import combinations, count

from ..layouts._layout import Layout
from ..layouts._links import is_local
from ..layouts._placements import Partial, Replicate
from ._steps import Step
from ._walk import direct_step, gather_step, move_step, reduce_step, slice_step

# A bound on the work for meshes with many axes; walks of usual meshes visit some dozen layouts.
_MOST_LAYOUTS = 4000


def cheapest_walk(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    price: Callable[[Step], float],
    allowed: Callable[[Step], bool],
    least: Callable[[Layout], float],
    bound: float = math.inf,
    join: Callable[[float, float], float] = operator.add,
) -> tuple[Step, ...] | None:
    """Return the cheapest allowed steps that cost less than ``bound``, None if there are none.

    Prices of steps add up, or are joined otherwise (with ``max``: the least of the dearest);
    ``least`` says what a layout's way to ``dst`` costs at least. Each step changes one axis,
    reduces several, or goes straight to ``dst``: all that torch's planners choose from is among
    these. A* search (Hart, Nilsson and Raphael, IEEE Trans. SSC 4, 1968). Ties go to native
    collectives, to fewer steps, and to what was found first, so that every rank finds the same.
    Both layouts are plain.
    """
    serial = count()
    best = {src: (0.0, 0)}  # what was spent, and on how many steps that are no native collectives
    queue: list[tuple[float, int, int, int, float, Layout, tuple[Step, ...]]] = [
        (least(src), 0, 0, 0, 0.0, src, ())
    ]
    visits = 0
    while queue and visits < _MOST_LAYOUTS:
        _, direct, _, _, spent, here, steps = heapq.heappop(queue)
        if here == dst:
            return steps
        if (spent, direct) > best[here]:
            continue
        visits += 1
        for step in _next_steps(here, dst, shape):
            if not allowed(step):
                continue
            total = join(spent, price(step)), direct + (step.kind == "direct")
            if total >= best.get(step.target, (bound, 0)):
                continue
            whole = join(total[0], least(step.target))
            if whole >= bound:
                continue
            best[step.target] = total
            order = whole, total[1], len(steps) + 1, next(serial)
            heapq.heappush(queue, (*order, total[0], step.target, (*steps, step)))
    return None


def _next_steps(here: Layout, dst: Layout, shape: tuple[int, ...]) -> Iterator[Step]:
    dims = range(len(shape))
    partial = [
        axis
        for axis, (old, new) in enumerate(zip(here.placements, dst.placements, strict=True))
        if isinstance(old, Partial) and old != new
    ]
    if not partial:
        yield direct_step(here, dst, len(shape))
        if is_local(here, dst, len(shape)):
            return
    for axis, placement in enumerate(here.placements):
        if isinstance(placement, Replicate) and here.mesh_shape[axis] > 1:
            for dim in dims:
                yield slice_step(here, dim, axis)
    for dim in dims:
        if here.chain(dim):
            yield gather_step(here, dim, shape)
            for new in dims:
                if new != dim:
                    yield move_step(here, dim, new, shape)
    for size in range(1, len(partial) + 1):
        for axes in combinations(partial, size):
            yield reduce_step(here, axes, None)
            for dim in dims:
                yield reduce_step(here, axes, dim)
