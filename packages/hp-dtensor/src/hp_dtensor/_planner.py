"""The cheapest steps from one layout to another, under a memory bound, and why."""

import heapq
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, count
from typing import Any, cast

from ._cost import (
    AlphaBeta,
    CostModel,
    Kind,
    Step,
    check_length,
    check_limits,
    clearable,
    direct_step,
    gather_step,
    is_least,
    least_seconds,
    most_held,
    move_step,
    reduce_step,
    seconds,
    slice_step,
    step_seconds,
)
from ._errors import LayoutError, MeshError, NoPlanError
from ._layout import (
    AxisSplit,
    Layout,
    ShardOrder,
    axis_splits,
    checked_sizes,
    common,
    is_local,
    reduced_layout,
    replicated,
    same_runs,
    unchanged_axes,
    whole_numbers,
    with_placement,
    with_split,
    without,
)
from ._placements import Partial, Replicate, Shard, StridedShard, in_tuple
from ._transfer import check_pair, same_mesh

# A bound on the work for meshes with many axes; usual ones take some dozen to hundreds of layouts.
_MOST_LAYOUTS = 4000

Steps = tuple[Step, ...]
Spanned = frozenset[tuple[int, ...]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The steps that take one rank's part of a tensor from one layout to another.

    ``bytes_received`` is payload from other ranks, an all-reduce counted as bandwidth-optimal, and
    ``step_bytes`` that of each step; ``peak_bytes`` the most that the tensor given and the input,
    output and buffers of a step occupy; ``time`` seconds by the cost model. ``why`` says what it
    was chosen from, ``note`` what would make a cheaper plan possible, or is empty.
    """

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    rank: int
    steps: tuple[Step, ...]
    bytes_received: int
    peak_bytes: int
    time: float
    note: str = ""
    why: str = ""
    step_bytes: tuple[int, ...] = ()

    def __str__(self) -> str:
        mesh = f"mesh {list(self.target.mesh_shape)}"
        if not same_mesh(self.source, self.target):
            mesh = f"mesh {list(self.source.mesh_shape)} to another, {mesh}"
        lines = [
            f"{self.source} -> {self.target} for {list(self.shape)} on {mesh}: rank {self.rank} "
            f"receives {self.bytes_received} bytes, holds at most {self.peak_bytes}, about "
            f"{self.time * 1e6:.1f} us"
        ]
        received = zip(self.steps, self.step_bytes, strict=False)
        lines += [f"  {n}. {step}, {count} bytes" for n, (step, count) in enumerate(received, 1)]
        if not self.steps:
            lines.append("  nothing to do")
        lines += [f"  {text}" for text in (self.why, self.note) if text]
        return "\n".join(lines)


@clearable
@lru_cache(maxsize=4096)
def make_plan(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    rank: int,
    itemsize: int = 4,
    cost: CostModel | None = None,
    groups: Spanned = None,
    max_bytes: int | None = None,
) -> Plan:
    """Return the cheapest plan for ``rank``; every rank finds the same steps.

    ``groups`` are the sets of mesh axes that have a process group of exactly their ranks, besides
    the single axes; None means that any set has one. No step holds more than ``max_bytes`` on any
    rank. Raises as `plan_transfer` does, except for partial sources, which a plan reduces, and
    `NoPlanError`.
    """
    check_pair(src, dst, shape)
    model = AlphaBeta() if cost is None else cost
    check_length(model, max(len(src.mesh_shape), len(dst.mesh_shape)))
    steps, why, note = _choose(
        replicated(src), replicated(dst), shape, itemsize, model, groups, max_bytes
    )
    step_bytes = tuple([step.received(shape, rank, itemsize) for step in steps])
    return Plan(
        source=src,
        target=dst,
        shape=shape,
        rank=rank,
        steps=steps,
        bytes_received=sum(step_bytes),
        peak_bytes=_peak(steps, shape, rank) * itemsize,
        time=seconds(steps, shape, itemsize, model),
        note=note,
        why=why,
        step_bytes=step_bytes,
    )


def explain_layouts(
    source: Layout,
    target: Sequence[Any] | Layout | None,
    *,
    shape: Sequence[int] | None = None,
    rank: int | None = None,
    itemsize: int | None = None,
    shard_order: ShardOrder | Mapping[int, Sequence[int]] | None = None,
    max_bytes: int | None = None,
    cost: CostModel | None = None,
    groups: object = None,
) -> Plan:
    """Return the plan between two layouts, as `explain` documents it."""
    check_limits(cost, max_bytes)
    rank = 0 if rank is None else rank
    itemsize = 4 if itemsize is None else itemsize
    if shape is None:
        raise LayoutError("a plan between layouts needs the tensor's global shape=")
    if groups is not None:
        raise LayoutError(
            f"groups={groups!r} beside a Layout, which is planned as if any set of axes had a "
            "group; leave groups= out"
        )
    if not isinstance(cast(object, itemsize), int) or itemsize < 1:
        raise LayoutError(f"itemsize={itemsize!r} is no number of bytes; give 1 or more")
    if not isinstance(target, Layout):
        placements = in_tuple(target, len(source.mesh_shape))
        target = Layout(source.mesh_shape, placements, shard_order, source.ranks)
    numbers = whole_numbers([rank])
    if numbers is None or not (source.holds(rank) or target.holds(rank)):
        held = sorted({*source.all_ranks(), *target.all_ranks()})
        consecutive = held[-1] - held[0] + 1 == len(held)
        legal = f"{held[0]} to {held[-1]}" if consecutive else str(held)
        raise MeshError(
            f"rank={rank} is in neither layout's mesh, so that it has no part; use one of {legal}"
        )
    sizes = checked_sizes(shape)
    return make_plan(source, target, sizes, *numbers, itemsize, cost, max_bytes=max_bytes)


@clearable
@lru_cache(maxsize=1024)
def _choose(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    cost: CostModel,
    groups: Spanned,
    max_bytes: int | None,
) -> tuple[Steps, str, str]:
    """Return the cheapest steps, why they are, and what would be cheaper with other groups.

    Among equals one of native collectives is chosen, then the shortest.
    """
    if src == dst:
        return (), "", ""

    def price(steps: Steps) -> tuple[float, int, int]:
        direct = sum(step.kind == "direct" for step in steps)
        return seconds(steps, shape, itemsize, cost), direct, len(steps)

    one_mesh = same_mesh(src, dst)
    unchanged = unchanged_axes(src, dst, len(shape)) if one_mesh else frozenset()

    def has_group(step: Step) -> bool:
        return groups is None or len(step.axes) <= 1 or step.axes in groups

    def stays(step: Step) -> bool:
        # Ranks that differ along an axis that keeps what it has take no part, nor do they help.
        return not unchanged or unchanged.isdisjoint(step.axes or _sliced(step))

    def may_run(step: Step) -> bool:
        return stays(step) and has_group(step)

    def most(step: Step) -> int:
        # What the caller gave stays while later steps work on what earlier ones made of it.
        return step.most(shape) + (0 if step.source == src else most_held(src, shape))

    def fits(step: Step) -> bool:
        return max_bytes is None or most(step) * itemsize <= max_bytes

    found = (candidates if one_mesh else candidates_between)(src, dst, shape, cost)
    every = [steps for steps in dict.fromkeys(found) if all(map(stays, steps))]
    open_steps = [steps for steps in every if all(map(has_group, steps))]
    fitting = [steps for steps in open_steps if all(map(fits, steps))]
    best = min(fitting, key=price, default=None)
    searchable = one_mesh and src.is_plain and dst.is_plain and 0 not in shape
    searched = searchable and not is_least(best, src, dst, shape, itemsize, cost)
    among = f"{len(fitting)} candidates"
    if searched:
        cheaper, ended = search(
            src,
            dst,
            shape,
            lambda step: step_seconds(step, shape, itemsize, cost),
            lambda step: may_run(step) and fits(step),
            least_seconds(dst, shape, itemsize, cost),
            math.inf if best is None else price(best)[0],
        )
        best = best if cheaper is None else merged(cheaper)
        among += " and of all steps" if ended else "; the search for others gave up"
    if best is None:
        if searchable:
            low, _ = search(src, dst, shape, most, may_run, join=max)
            open_steps += [low] if low else []
        least = min(max(map(most, steps)) for steps in open_steps) * itemsize
        raise NoPlanError(
            f"no plan from {src} to {dst} for {list(shape)} holds at most max_bytes={max_bytes} at "
            f"once; the least found is {least}: allow that much",
            max_bytes=max_bytes or 0,
            best_peak=least,
        )
    why = f"the cheapest of {among}"
    if len(open_steps) > len(fitting):
        why += f"; {len(open_steps) - len(fitting)} more hold over {max_bytes} bytes"
    now = price(best)[0]
    better = [steps for steps in every if steps not in open_steps and price(steps)[0] < now]
    if not better:
        return best, why, ""
    wanted = min(better, key=price)
    axes = next(step.axes for step in wanted if not has_group(step))
    then = price(wanted)[0]
    gain = f"about {now / then:.1f}x faster" if then > 0 else "at no cost"
    note = (
        f"{gain} with one process group over the mesh axes {axes}; flatten the mesh over "
        "them, or give groups="
    )
    return best, why, note


def _sliced(step: Step) -> list[int]:
    """Return the axes whose placements a slice changes."""
    pairs = zip(step.source.placements, step.target.placements, strict=True)
    return [axis for axis, (old, new) in enumerate(pairs) if old != new]


def _peak(steps: Sequence[Step], shape: tuple[int, ...], rank: int) -> int:
    """Return how many elements are alive at once, what the steps began with always."""
    given = 0
    if steps and steps[0].source.holds(rank):
        given = math.prod(steps[0].source.local_shape(shape, rank))
    peaks = [step.peak(shape, rank) + given * (number > 0) for number, step in enumerate(steps)]
    return max(peaks, default=0)


def candidates(
    src: Layout, dst: Layout, shape: tuple[int, ...], cost: CostModel
) -> Iterator[Steps]:
    """Yield steps on one mesh: reductions first, then direct, axis by axis, or slow axes first."""
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


def candidates_between(
    src: Layout, dst: Layout, shape: tuple[int, ...], cost: CostModel
) -> Iterator[Steps]:
    """Yield steps from one mesh to another: reductions there, one transfer, gathers here.

    What the target replicates may arrive in parts, one for each replica, that these then gather.
    """
    whole = reduced_layout(src)
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
            for rest in candidates(there, dst, shape, cost):
                yield (*reductions, move, *rest)


def reductions_to(src: Layout, dst: Layout, shape: tuple[int, ...]) -> list[Steps]:
    """Return the steps that may reduce what ``dst`` does not keep partial, in several orders."""
    partial = _reduced_axes(src, dst)
    if not partial:
        return [()]

    def turn(axis: int) -> tuple[bool, int]:
        # Scattering first leaves less to reduce; in shard order it leaves the least to move.
        new = dst.placements[axis]
        if isinstance(new, Shard):
            return False, dst.shard_axes(new.dim).index(axis)
        return True, axis

    found: list[Steps] = []
    for slice_first in (True, False):
        start: list[Step] = []
        here = src
        if slice_first:
            for dim in range(len(shape)):
                for axis in dst.shard_axes(dim):
                    if isinstance(here.placements[axis], Replicate) and _may_split(here, dim):
                        start.append(slice_step(here, with_split(here, dim, (axis, 1))))
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
                wider = with_split(here, dim, (axis, 1))
                if wider.is_even(shape):
                    here = wider
                    break
    return here


def _reduced_axes(src: Layout, dst: Layout) -> list[int]:
    """Return the axes whose partial values ``dst`` does not keep."""
    return [
        axis
        for axis, (old, new) in enumerate(zip(src.placements, dst.placements, strict=True))
        if isinstance(old, Partial) and old != new
    ]


def single_axis_steps(src: Layout, dst: Layout, shape: tuple[int, ...]) -> list[Step]:
    """Return steps over one axis each that end in ``dst``.

    Slice as soon as possible, move an axis to its place where it is next in turn, gather it
    otherwise; ragged runs are gathered first and cut last. Partial axes stay as they are.
    """
    steps: list[Step] = []
    here = src
    if src.ragged is not None and not same_runs(src, dst):
        here = with_placement(src, src.ragged[0], Replicate())
        steps.append(direct_step(src, here, len(shape)))
    while step := _slice(here, dst, shape) or _move(here, dst, shape) or _gather(here, dst, shape):
        steps.append(step)
        here = step.target
    if dst.ragged is not None and here.ragged is None:
        steps.append(slice_step(here, with_placement(here, *dst.ragged)))
    return steps


def gathers_in_turn(
    src: Layout, dst: Layout, shape: Sequence[int], turn: Sequence[int]
) -> list[Step] | None:
    """Return one gather for each axis that ``dst`` replicates instead, in the order of ``turn``.

    Whichever splits first: what remains is then cut into blocks. None unless ``dst`` is ``src``
    with some axes gathered, and where lengths do not divide evenly.
    """
    if not src.is_even(shape):
        return None
    steps = []
    here = src
    for axis in turn:
        old = here.placements[axis]
        if isinstance(old, Shard | StridedShard) and isinstance(dst.placements[axis], Replicate):
            place = here.shard_axes(old.dim).index(axis)
            target = without(here, old.dim, place)
            last = place + 1 == len(here.shard_axes(old.dim)) and here.is_plain
            kind: Kind = "all_gather" if last else "direct"
            steps.append(Step(kind=kind, axes=(axis,), source=here, target=target))
            here = target
    return steps if here == dst else None


def merged(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps with each run of slices made one."""
    result: list[Step] = []
    for step in steps:
        if result and step.kind == "slice" == result[-1].kind:
            step = slice_step(result.pop().source, step.target)
        result.append(step)
    return tuple(result)


def _next_split(here: Layout, dst: Layout, dim: int) -> AxisSplit | None:
    """Return the split of ``dst`` that comes after those of ``here``; None if these are others."""
    have, want = axis_splits(here, dim), axis_splits(dst, dim)
    return want[len(have)] if want[: len(have)] == have and len(want) > len(have) else None


def _slice(here: Layout, dst: Layout, shape: tuple[int, ...]) -> Step | None:
    for dim in range(len(shape)):
        split = _next_split(here, dst, dim)
        if split is not None and isinstance(here.placements[split[0]], Replicate):
            return slice_step(here, with_split(here, dim, split))
    return None


def _move(here: Layout, dst: Layout, shape: tuple[int, ...]) -> Step | None:
    for dim in range(len(shape)):
        have = axis_splits(here, dim)
        if common(have, axis_splits(dst, dim)) == len(have):
            continue
        axis = have[-1][0]
        new = dst.placements[axis]
        if not isinstance(new, Shard | StridedShard) or new.dim == dim:
            continue
        split = _next_split(here, dst, new.dim)
        if split is not None and split[0] == axis:
            return move_step(here, dim, new.dim, shape, split[1])
    return None


def _gather(here: Layout, dst: Layout, shape: tuple[int, ...]) -> Step | None:
    for dim in range(len(shape)):
        have = axis_splits(here, dim)
        if common(have, axis_splits(dst, dim)) < len(have):
            return gather_step(here, dim, shape)
    return None


def search(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    price: Callable[[Step], float],
    allowed: Callable[[Step], bool],
    least: Callable[[Layout], float] = lambda here: 0.0,
    bound: float = math.inf,
    join: Callable[[float, float], float] = operator.add,
) -> tuple[tuple[Step, ...] | None, bool]:
    """Return the cheapest allowed steps that cost less than ``bound``, None if none were found.

    And whether the search came to its end; it gives up at a bound on its work.
    Prices of steps add up, or are joined otherwise (with ``max``: the least of the dearest);
    ``least`` is a bound from below on what is left from a layout to ``dst``. Each step changes one
    axis, reduces several, or goes straight to ``dst``: all that torch's planners choose from is
    among these. A* search (Hart, Nilsson and Raphael, IEEE Trans. SSC 4, 1968). Ties go to native
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
            return steps, True
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
            if whole < bound:
                best[step.target] = total
                order = whole, total[1], len(steps) + 1, next(serial)
                heapq.heappush(queue, (*order, total[0], step.target, (*steps, step)))
    return None, not queue


def _next_steps(here: Layout, dst: Layout, shape: tuple[int, ...]) -> Iterator[Step]:
    dims = range(len(shape))
    partial = _reduced_axes(here, dst)
    if not partial:
        yield direct_step(here, dst, len(shape))
        if is_local(here, dst, len(shape)):
            return
    for axis, placement in enumerate(here.placements):
        if isinstance(placement, Replicate) and here.mesh_shape[axis] > 1:
            for dim in dims:
                yield slice_step(here, with_split(here, dim, (axis, 1)))
    for dim in dims:
        if here.shard_axes(dim):
            yield gather_step(here, dim, shape)
            for new in dims:
                if new != dim:
                    yield move_step(here, dim, new, shape)
    for size in range(1, len(partial) + 1):
        for axes in combinations(partial, size):
            yield reduce_step(here, axes, None)
            for dim in dims:
                yield reduce_step(here, axes, dim)
