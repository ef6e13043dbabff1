"""The cheapest steps from one layout to another."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ._cost import AlphaBeta, CostModel
from ._layout import Layout
from ._placements import Partial, Replicate, Shard
from ._steps import (
    Step,
    direct_step,
    is_local,
    merged,
    reduce_step,
    replicated,
    single_axis_steps,
    slice_step,
)
from ._transfer import check_pair

# Costs are compared on these many ranks, the same on all, so that every rank chooses alike.
_SAMPLED_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The steps that take one rank's part of a tensor from one layout to another.

    ``bytes_received`` is payload from other ranks, an all-reduce counted as bandwidth-optimal;
    ``peak_bytes`` the most that input, output and buffers of one step occupy; ``time`` seconds by
    the cost model. ``note`` says what would make a cheaper plan possible, or is empty.
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

    def __str__(self) -> str:
        lines = [
            f"{self.source} -> {self.target} for {list(self.shape)} on mesh "
            f"{list(self.target.mesh_shape)}: rank {self.rank} receives {self.bytes_received} "
            f"bytes, holds at most {self.peak_bytes}, about {self.time * 1e6:.1f} us"
        ]
        lines += [f"  {number}. {step}" for number, step in enumerate(self.steps, 1)]
        if not self.steps:
            lines.append("  nothing to do")
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def make_plan(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    rank: int,
    itemsize: int = 4,
    cost: CostModel | None = None,
    folded: frozenset[tuple[int, ...]] | None = None,
) -> Plan:
    """Return the cheapest plan for ``rank``; every rank finds the same steps.

    ``folded`` are the sets of mesh axes that one process group spans, besides the single axes; None
    means that any set has one. Raises as `plan_transfer` does, except for partial sources, which a
    plan reduces.
    """
    check_pair(src, dst, shape)
    model = AlphaBeta() if cost is None else cost
    steps, note = _choose(replicated(src), replicated(dst), shape, itemsize, model, folded)
    return Plan(
        source=src,
        target=dst,
        shape=shape,
        rank=rank,
        steps=steps,
        bytes_received=sum(step.received(shape, rank, itemsize) for step in steps),
        peak_bytes=max((step.peak(shape, rank) for step in steps), default=0) * itemsize,
        time=_seconds(steps, shape, itemsize, model),
        note=note,
    )


@lru_cache(maxsize=1024)
def _choose(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    cost: CostModel,
    folded: frozenset[tuple[int, ...]] | None,
) -> tuple[tuple[Step, ...], str]:
    """Return the cheapest candidate; among equals one of native collectives, then the shortest."""
    if src == dst:
        return (), ""
    candidates: list[tuple[Step, ...]] = []
    missing: list[tuple[Step, ...]] = []
    for reductions in _reductions(src, dst, shape):
        here = reductions[-1].target if reductions else src
        candidates.append(merged((*reductions, *single_axis_steps(here, dst, shape))))
        if not is_local(here, dst, len(shape)):
            step = direct_step(here, dst, len(shape))
            open_to_all = folded is None or len(step.axes) == 1 or step.axes in folded
            (candidates if open_to_all else missing).append(merged((*reductions, step)))

    def price(steps: tuple[Step, ...]) -> tuple[float, int, int]:
        direct = sum(step.kind == "direct" for step in steps)
        return _seconds(steps, shape, itemsize, cost), direct, len(steps)

    best = min(candidates, key=price)
    better = [steps for steps in missing if price(steps)[0] < price(best)[0]]
    if not better:
        return best, ""
    wanted = min(better, key=price)
    return best, (
        f"about {price(best)[0] / price(wanted)[0]:.1f}x faster with one process group over the "
        f"mesh axes {wanted[-1].axes}; build that alias with the mesh"
    )


def _reductions(src: Layout, dst: Layout, shape: tuple[int, ...]) -> list[tuple[Step, ...]]:
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
                    if isinstance(here.placements[axis], Replicate):
                        start.append(slice_step(here, dim, axis))
                        here = start[-1].target
        for scatter_targets, scatter_rest in ((True, False), (True, True), (False, False)):
            steps = list(start)
            after = here
            for axis in sorted(partial, key=turn):
                new = dst.placements[axis]
                onto: int | None = None
                if isinstance(new, Shard) and scatter_targets:
                    onto = new.dim
                elif not isinstance(new, Shard) and scatter_rest:
                    onto = _scatter_dim(after, shape, src.mesh_shape[axis])
                steps.append(reduce_step(after, axis, onto))
                after = steps[-1].target
            if tuple(steps) not in found:
                found.append(tuple(steps))
    return found


def _scatter_dim(layout: Layout, shape: Sequence[int], degree: int) -> int | None:
    """Return the first dim that still divides, else the longest; None for a scalar."""
    if not shape:
        return None
    parts = layout.local_shape(shape, layout.rank_at([0] * len(layout.mesh_shape)))
    for dim, length in enumerate(parts):
        if length % degree == 0 and layout.is_even(shape):
            return dim
    return max(range(len(parts)), key=lambda dim: parts[dim])


def _seconds(
    steps: Sequence[Step], shape: tuple[int, ...], itemsize: int, cost: CostModel
) -> float:
    if not steps:
        return 0.0
    layout = steps[0].source
    count = min(layout.size, _SAMPLED_RANKS)
    ranks = [
        layout.size * i // count if layout.ranks is None else layout.ranks[layout.size * i // count]
        for i in range(count)
    ]
    total = 0.0
    for step in steps:
        if step.kind != "slice":
            received = sum(step.received(shape, rank, itemsize) for rank in ranks) / count
            total += cost.seconds(step.axes, step.ranks, received)
    return total
