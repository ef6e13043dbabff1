"""Ways from one layout to another over one axis at a time, and single steps."""

from collections.abc import Iterator, Sequence

from ._cost import CostModel, Kind, Step
from ._layout import (
    Layout,
    axis_splits,
    common,
    is_local,
    moving_axes,
    reduced_layout,
    same_runs,
    with_placement,
    with_split,
    without,
    without_last_split,
)
from ._placements import Partial, Replicate, Shard, StridedShard


def direct_step(src: Layout, dst: Layout, ndim: int) -> Step:
    """Return the one step that moves every missing element straight to where it is needed."""
    if is_local(src, dst, ndim):
        return Step(kind="slice", axes=(), source=src, target=dst)
    return Step(kind="direct", axes=moving_axes(src, dst, ndim), source=src, target=dst)


def single_axis_steps(src: Layout, dst: Layout, shape: tuple[int, ...]) -> list[Step]:
    """Return steps over one axis each that end in ``dst``.

    Slice as soon as possible, move an axis to its place where it is next in turn, gather it
    otherwise; ragged runs are gathered first and cut last. Partial axes stay as they are.
    """
    steps: list[Step] = []
    here = src
    if src.ragged is not None and not same_runs(src, dst):
        target = with_placement(src, src.ragged[0], Replicate())
        steps.append(direct_step(src, target, len(shape)))
        here = target
    while True:
        step = _slice(here, dst, shape) or _move(here, dst, shape) or _gather(here, dst, shape)
        if step is None:
            break
        steps.append(step)
        here = step.target
    if dst.ragged is not None and here.ragged is None:
        axis, placement = dst.ragged
        target = with_placement(here, axis, placement)
        steps.append(Step(kind="slice", axes=(), source=here, target=target))
    return steps


def reduce_step(src: Layout, axes: tuple[int, ...], dim: int | None) -> Step:
    """Return the step that reduces partial axes, onto shards of ``dim`` or onto every rank."""
    target = src
    for axis in axes:
        target = with_placement(target, axis, Replicate())
    if dim is None:
        return Step(kind="all_reduce", axes=axes, source=src, target=target)
    for axis in axes:
        target = with_split(target, dim, (axis, 1))
    return Step(kind="reduce_scatter", axes=axes, source=src, target=target)


def slice_step(src: Layout, dim: int, axis: int) -> Step:
    """Return the step that keeps this coordinate's chunk of ``dim`` on a replicated axis."""
    return Step(kind="slice", axes=(), source=src, target=with_split(src, dim, (axis, 1)))


def gather_step(src: Layout, dim: int, shape: Sequence[int]) -> Step:
    """Return the step that gathers the last split of ``dim``."""
    kind: Kind = "all_gather" if src.is_even(shape) else "direct"
    return Step(
        kind=kind, axes=(src.shard_axes(dim)[-1],), source=src, target=without_last_split(src, dim)
    )


def move_step(src: Layout, old: int, new: int, shape: Sequence[int], factor: int = 1) -> Step:
    """Return the step that takes the last split of dim ``old`` to the end of dim ``new``."""
    axis = src.shard_axes(old)[-1]
    target = with_split(without_last_split(src, old), new, (axis, factor))
    even = src.is_even(shape) and target.is_even(shape)
    return Step(kind="all_to_all" if even else "direct", axes=(axis,), source=src, target=target)


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
            step = Step(kind="slice", axes=(), source=result.pop().source, target=step.target)
        result.append(step)
    return tuple(result)


def _slice(here: Layout, dst: Layout, shape: tuple[int, ...]) -> Step | None:
    for dim in range(len(shape)):
        have, want = axis_splits(here, dim), axis_splits(dst, dim)
        if want[: len(have)] == have and len(want) > len(have):
            link = want[len(have)]
            if isinstance(here.placements[link[0]], Replicate):
                target = with_split(here, dim, link)
                return Step(kind="slice", axes=(), source=here, target=target)
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
        want, there = axis_splits(dst, new.dim), axis_splits(here, new.dim)
        if want[: len(there)] == there and want[len(there) : len(there) + 1]:
            link = want[len(there)]
            if link[0] == axis:
                return move_step(here, dim, new.dim, shape, link[1])
    return None


def _gather(here: Layout, dst: Layout, shape: tuple[int, ...]) -> Step | None:
    for dim in range(len(shape)):
        have = axis_splits(here, dim)
        if common(have, axis_splits(dst, dim)) < len(have):
            return gather_step(here, dim, shape)
    return None


Steps = tuple[Step, ...]


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
            return False, dst.shard_axes(new.dim).index(axis)
        return True, axis

    found = []
    for slice_first in (True, False):
        start: list[Step] = []
        here = src
        if slice_first:
            for dim in range(len(shape)):
                for axis in dst.shard_axes(dim):
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
                wider = with_split(here, dim, (axis, 1))
                if wider.is_even(shape):
                    here = wider
                    break
    return here
