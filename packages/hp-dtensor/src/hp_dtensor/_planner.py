"""The planner: the cheapest steps from one layout to another under a memory limit."""

import heapq
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, count
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, cast

from ._cost import (
    AlphaBeta,
    CostModel,
    Step,
    check_length,
    check_limits,
    clearable,
    direct_step,
    gather_step,
    lower_bound,
    most_held,
    move_step,
    prefers_one_step,
    reduce_step,
    seconds,
    slice_step,
    step_bytes,
    step_seconds,
)
from ._errors import LayoutError, MeshError, NoPlanError
from ._layout import (
    AxisSplit,
    Layout,
    ShardOrder,
    checked_sizes,
    is_local,
    replicated,
    same_runs,
    unchanged_axes,
    whole_numbers,
    with_placement,
    with_split,
)
from ._placements import Partial, Replicate, in_tuple
from ._transfer import check_pair, same_mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Limit on the work for meshes with many axes. Usual searches expand a few to some hundred layouts.
_MOST_LAYOUTS = 4000

Steps: TypeAlias = tuple[Step, ...]
_Total: TypeAlias = tuple[float, float, float]
# Sets of mesh axes that have a process group of exactly their ranks. None means all sets.
Spanned: TypeAlias = frozenset[tuple[int, ...]] | None


class PlanOptions(TypedDict, total=False):
    """Keyword arguments that `redistribute` and `explain` share."""

    shard_order: ShardOrder | Mapping[int, Sequence[int]] | None
    max_bytes: int | None
    cost: CostModel | None
    groups: "Sequence[ProcessGroup | DeviceMesh] | None"


def check_names(given: Mapping[str, object], options: Any) -> None:
    """Raise TypeError for a keyword argument that is not a field of the class of options."""
    known = options.__optional_keys__
    if unknown := sorted(given.keys() - known):
        raise TypeError(f"unexpected keyword arguments {unknown}; use {', '.join(sorted(known))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The steps that change the layout of a tensor, as seen by one rank.

    Attributes:
        source: Layout before the first step.
        target: Layout after the last step.
        shape: Global shape of the tensor.
        rank: Global rank of this plan.
        steps: The steps, in order. All ranks have the same ones.
        bytes_received: Payload in bytes that the rank receives from others. An all-reduce counts as
            bandwidth-optimal.
        peak_bytes: Largest number of bytes in memory at once: the given tensor, and the input, the
            output and the buffers of a step.
        time: Seconds by the cost model.
        note: A process group that would allow a cheaper plan, or empty.
        why: How many plans were compared.
        step_bytes: Payload in bytes that the rank receives in each step.
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
    """Return the cheapest plan of a rank. All ranks find the same steps.

    Args:
        src: Layout of the source.
        dst: Layout of the target.
        shape: Global shape.
        rank: Global rank, in the mesh of ``src`` or of ``dst``.
        itemsize: Bytes per element.
        cost: Cost model. Defaults to ``AlphaBeta()``.
        groups: Sets of several mesh axes that have a process group of exactly their ranks. None
            means that all sets have one. Single axes always do.
        max_bytes: Upper bound on the memory of each step on any rank.

    Raises:
        LayoutError: As in `plan_transfer`, but partial values of the source can be reduced.
        NoPlanError: Every plan needs more than ``max_bytes``.
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


def check_order_left_out(target: object, shard_order: object) -> None:
    """Raise `LayoutError` if a target `Layout`, which has a shard order, is given another one."""
    if shard_order is not None and isinstance(target, Layout):
        raise LayoutError(
            f"shard_order={shard_order!r} beside the Layout {target}, which has its own; leave "
            "shard_order= out"
        )


def explain_layouts(
    source: Layout,
    target: Sequence[Any] | Layout | None,
    *,
    shape: Sequence[int] | None,
    rank: int | None,
    itemsize: int | None,
    options: PlanOptions,
) -> Plan:
    """Return the plan between two layouts, without torch. Arguments and errors as in `explain`."""
    cost, max_bytes = options.get("cost"), options.get("max_bytes")
    check_limits(cost, max_bytes)
    rank = 0 if rank is None else rank
    itemsize = 4 if itemsize is None else itemsize
    if shape is None:
        raise LayoutError("a plan between layouts needs the tensor's global shape=")
    if (groups := options.get("groups")) is not None:
        raise LayoutError(
            f"groups={groups!r} beside a Layout, which is planned as if any set of axes had a "
            "group; leave groups= out"
        )
    if not isinstance(cast(object, itemsize), int) or itemsize < 1:
        raise LayoutError(f"itemsize={itemsize!r} is no number of bytes; give 1 or more")
    if not isinstance(target, Layout):
        placements = in_tuple(target, len(source.mesh_shape))
        order = options.get("shard_order")
        target = Layout(source.mesh_shape, placements, order, source.ranks)
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
    """Return the cheapest steps, how they were found, and a note on a missing process group."""
    if src == dst:
        return (), "", ""
    search = Search(src, dst, shape, itemsize, cost, groups, max_bytes)
    steps = search.cheapest()
    if steps is None:
        least = search.least_memory() * itemsize
        raise NoPlanError(
            f"no plan from {src} to {dst} for {list(shape)} holds at most max_bytes={max_bytes} at "
            f"once; the least found is {least}: allow that much",
            max_bytes=max_bytes or 0,
            best_peak=least,
        )
    number = len(search.candidates)
    why = f"the cheapest of {number} candidate{'s' * (number != 1)}"
    if not search.ended:
        why += "; the search for others gave up"
    elif search.searchable:
        why += " and of all steps"
    if search.over_limit:
        why += f"; {len(search.over_limit)} more hold over {max_bytes} bytes"
    now, (then, axes) = seconds(steps, shape, itemsize, cost), search.without_group
    if then >= now:
        return steps, why, ""
    gain = f"about {now / then:.1f}x faster" if then > 0 else "at no cost"
    note = (
        f"{gain} with one process group over the mesh axes {axes}; flatten the mesh over "
        "them, or give groups="
    )
    return steps, why, note


class Search:
    """A search for the cheapest steps from one layout to another.

    This is A* (Hart, Nilsson and Raphael, IEEE Trans. SSC 4, 1968) over layouts. Each step changes
    one axis, reduces several axes, or changes to the target at once. The steps include all steps of
    torch's planners. If times are equal, plans with more native collectives win, then plans with
    fewer bytes, then plans with fewer steps. The order of the steps is fixed, so that all ranks
    find the same plan.

    Attributes:
        ended: False if the search gave up at the limit on the number of layouts.
        wide: Whether steps that lead away from the target are included.
        searchable: Whether the first round left out steps that can improve the plan.
        candidates: Layouts from which one allowed step reached the target in the first round.
        over_limit: Layouts from which this step would have needed too much memory.
        without_group: Time of the cheapest plan whose last step has no process group, and the axes
            of this step.
    """

    def __init__(
        self,
        src: Layout,
        dst: Layout,
        shape: tuple[int, ...],
        itemsize: int,
        cost: CostModel,
        groups: Spanned = None,
        max_bytes: int | None = None,
    ) -> None:
        self.src, self.dst, self.shape, self.itemsize = src, dst, shape, itemsize
        self.cost, self.groups, self.max_bytes = cost, groups, max_bytes
        self.one_step = prefers_one_step(cost)
        one_mesh = same_mesh(src, dst)
        self.unchanged = unchanged_axes(src, dst) if one_mesh else frozenset[int]()
        self.arrivals = [dst] if one_mesh else list(dict.fromkeys((dst, _spread(dst, shape))))
        self.ended, self.wide, self.searchable = True, False, False
        self.candidates, self.over_limit = set[Layout](), set[Layout]()
        self.without_group: tuple[float, tuple[int, ...]] = (math.inf, ())

    def cheapest(self) -> Steps | None:
        """Return the cheapest steps within the memory limit, or None if no steps are."""
        least = lower_bound(self.dst, self.shape, self.itemsize, self.cost)
        steps = self._run(self.price, least, operator.add)
        return None if steps is None else _merged(steps)

    def least_memory(self) -> int:
        """Return the smallest number of elements that some plan has in memory at once."""
        self.max_bytes, self.one_step = None, False
        # Limits hold for the steps as they are searched, before slices are merged.
        steps = self._run(lambda step, received: self.memory(step), lambda here: 0, max)
        return max(map(self.memory, steps or ()), default=0)

    def price(self, step: Step, received: float) -> float:
        """Return the time of a step in seconds, if each rank receives ``received`` bytes."""
        return step_seconds(step, received, self.cost)

    def memory(self, step: Step) -> int:
        """Return the number of elements in memory during a step, on any rank at most."""
        # The caller holds the given tensor until the end.
        given = 0 if step.source == self.src else most_held(self.src, self.shape)
        return step.most(self.shape) + given

    def _run(
        self,
        price: Callable[[Step, float], float],
        least: Callable[[Layout], float],
        join: Callable[[float, float], float],
    ) -> Steps | None:
        """Search for the steps with the lowest total price.

        There are two rounds. The first has few steps: those that lead towards the target. Its
        result is an upper bound for the second round, which has all steps.

        Args:
            price: Returns the price of a step, given the bytes that it receives.
            least: Returns a lower bound on the price from a layout to the target.
            join: Combines the prices of consecutive steps.
        """
        serial = count()
        # Price so far, number of steps that are no native collectives, and bytes received.
        never: tuple[_Total, Steps] = (math.inf, math.inf, math.inf), ()
        found = never
        for wide in (False, True):
            self.wide = wide
            best: dict[Layout, tuple[_Total, Steps]] = {self.src: ((0.0, 0, 0.0), ())}
            if found is not never:
                best[self.dst] = found
            queue = [(best[self.src][0], 0, next(serial), self.src, best[self.src][0])]
            visits = 0
            while queue and (visits < _MOST_LAYOUTS or self.dst not in best):
                visits += 1
                _, _, _, here, spent = heapq.heappop(queue)
                known, path = best[here]
                if here == self.dst:
                    break
                if spent > known:
                    continue
                for step in self._allowed_steps(here, spent[0], price, join):
                    received = step_bytes(step, self.shape, self.itemsize)
                    total = (
                        join(spent[0], price(step, received)),
                        spent[1] + (step.kind == "direct"),
                        spent[2] + received,
                    )
                    if total >= best.get(step.target, never)[0]:
                        continue
                    whole = (join(total[0], least(step.target)), *total[1:])
                    if whole >= best.get(self.dst, never)[0]:
                        continue
                    steps = (*path, step)
                    best[step.target] = total, steps
                    heapq.heappush(queue, (whole, len(steps), next(serial), step.target, total))
            else:
                self.ended &= not queue
            found = best.get(self.dst, never)
            if not self.searchable:
                break
        return None if found is never else found[1]

    def _allowed_steps(
        self,
        here: Layout,
        spent: float,
        price: Callable[[Step, float], float],
        join: Callable[[float, float], float],
    ) -> Iterator[Step]:
        """Yield the next steps that fit into memory and have a process group.

        The last steps of plans that lack memory or a group are recorded.
        """
        for step in self.next_steps(here):
            if not self._may_run(step):
                continue
            if not self._fits(step):
                if step.target == self.dst and not self.wide:
                    self.over_limit.add(here)
            elif self._has_group(step):
                if step.target == self.dst and not self.wide:
                    self.candidates.add(here)
                yield step
            elif step.target == self.dst:
                time = join(spent, price(step, step_bytes(step, self.shape, self.itemsize)))
                self.without_group = min(self.without_group, (time, step.axes))

    def _may_run(self, step: Step) -> bool:
        # Ranks that differ only on an unchanged axis neither take part nor help.
        return not self.unchanged or self.unchanged.isdisjoint(step.axes or _sliced_axes(step))

    def _has_group(self, step: Step) -> bool:
        return self.groups is None or len(step.axes) <= 1 or step.axes in self.groups

    def _fits(self, step: Step) -> bool:
        return self.max_bytes is None or self.memory(step) * self.itemsize <= self.max_bytes

    def next_steps(self, here: Layout) -> Iterator[Step]:
        """Yield the steps that the search considers after a layout."""
        dst = self.dst
        if not same_mesh(here, dst):
            partial = [a for a, p in enumerate(here.placements) if isinstance(p, Partial)]
            yield from self._reductions(here, partial)
            if not partial:
                for there in self.arrivals:
                    yield Step(kind="transfer", axes=(), source=here, target=there)
            return
        pairs = enumerate(zip(here.placements, dst.placements, strict=True))
        partial = [a for a, (old, new) in pairs if isinstance(old, Partial) and old != new]
        if partial:
            yield from self._reductions(here, partial)
        else:
            straight = direct_step(here, dst, self.shape)
            yield straight
            if straight.kind == "slice":
                return
            if self.one_step and self._has_group(straight) and self._fits(straight):
                # No other plan is cheaper. A native collective can take the same time.
                yield from self._native_steps(here)
                return
        # The first round is enough between layouts with blocks or ragged parts.
        self.searchable = self.src.is_plain and dst.is_plain and 0 not in self.shape
        yield from self._slices(here)
        yield from self._gathers_and_moves(here)

    def _native_steps(self, here: Layout) -> Iterator[Step]:
        """Yield slices and native collectives after which no rank lacks elements."""
        if (sliced := self._sliced(here)) != here:
            yield slice_step(here, sliced)
            return
        for dim in here.axis_splits:
            step = self._move(here, dim) or gather_step(here, dim, self.shape)
            if step.kind != "direct" and is_local(step.target, self.dst):
                yield step

    def _sliced(self, here: Layout) -> Layout:
        """Return the layout after all slices that the target needs and that are possible now."""
        for dim in self._free_dims(here):
            while (split := self._next_split(here, dim)) is not None:
                if not isinstance(here.placements[split[0]], Replicate):
                    break
                here = with_split(here, dim, split[0], split[2])
        return here

    def _next_split(self, here: Layout, dim: int) -> AxisSplit | None:
        """Return the mesh axis split that the target applies to a dim after the splits of ``here``.

        The result is ``(mesh axis, degree, split factor)``. Returns None if ``here`` has all splits
        of the target, or if the target does not begin with the splits of ``here``.
        """
        have, want = here.axis_splits.get(dim, ()), self.dst.axis_splits.get(dim, ())
        return want[len(have)] if len(want) > len(have) and want[: len(have)] == have else None

    def _free_dims(self, here: Layout) -> range:
        """Return the dims whose splits may change. A `RaggedShard` flattens and splits others."""
        return range(len(here.ragged[1].dims) if here.ragged else 0, len(self.shape))

    def _slices(self, here: Layout) -> Iterator[Step]:
        if (sliced := self._sliced(here)) != here:
            yield slice_step(here, sliced)
        for axis, placement in enumerate(here.placements):
            if isinstance(placement, Replicate) and axis not in self.unchanged:
                new = self.dst.placements[axis].split
                for dim in self._free_dims(here):
                    if self.wide or (new is not None and new[0] == dim):
                        yield slice_step(here, with_split(here, dim, axis))

    def _gathers_and_moves(self, here: Layout) -> Iterator[Step]:
        if here.ragged is not None and not same_runs(here, self.dst):
            gathered = with_placement(here, here.ragged[0], Replicate())
            yield direct_step(here, gathered, self.shape)
        free = self._free_dims(here)
        for dim in free:
            if dim not in here.axis_splits:
                continue
            yield gather_step(here, dim, self.shape)
            if (step := self._move(here, dim)) is not None:
                yield step
            if self.wide:
                yield from (move_step(here, dim, new, self.shape) for new in free if new != dim)
        # With equal prices this saves no time, but it can save memory.
        if not self.wide and not (self.one_step and self.max_bytes is None):
            yield from self._slowest_gather(here)

    def _slowest_gather(self, here: Layout) -> Iterator[Step]:
        """Yield the gather over the slowest axis, if it does not split its dim last.

        It is cheapest while the ranks hold little.
        """
        found = [
            (self.cost.seconds((axis,), degree, 1e9), -axis, dim, position)
            for dim in self._free_dims(here)
            for position, (axis, degree, factor) in enumerate(here.axis_splits.get(dim, ()))
            if factor == 1 and isinstance(self.dst.placements[axis], Replicate)
        ]
        if found and _splits_evenly(here, self.shape):
            _, _, dim, position = max(found)
            if position + 1 < len(here.axis_splits[dim]):
                yield gather_step(here, dim, self.shape, position)

    def _move(self, here: Layout, old: int) -> Step | None:
        """Return the step that moves the last split of a dim to another dim.

        The other dim is the one that the same axis splits in the target. Returns None if there is
        none, or if the target has other splits of that dim first.
        """
        axis = here.axis_splits[old][-1][0]
        for new in self.dst.placements[axis].split_dims:
            split = self._next_split(here, new)
            movable = new != old and new in self._free_dims(here)
            if movable and split is not None and split[0] == axis:
                return move_step(here, old, new, self.shape, split[2])
        return None

    def _reductions(self, here: Layout, partial: list[int]) -> Iterator[Step]:
        for size in range(1, len(partial) + 1):
            for axes in combinations(partial, size):
                yield reduce_step(here, axes, None)
                for dim in self._free_dims(here):
                    yield reduce_step(here, axes, dim)


def _splits_evenly(layout: Layout, shape: Sequence[int]) -> bool:
    """Return whether all blocks and chunks of each dim have equal lengths."""
    for dim, splits in layout.axis_splits.items():
        length = shape[dim]
        for _, degree, factor in splits:
            if length % (degree * factor):
                return False
            length //= degree
    return layout.ragged is None


def _spread(dst: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the target with replicas that hold different parts, if lengths divide evenly.

    The parts arrive from another mesh, and are then gathered on the target mesh.
    """
    here = dst
    if not dst.is_even(shape):
        return dst
    for axis, placement in enumerate(dst.placements):
        if isinstance(placement, Replicate) and dst.mesh_shape[axis] > 1:
            for dim in range(len(shape)):
                wider = with_split(here, dim, axis)
                if wider.is_even(shape):
                    here = wider
                    break
    return here


def _sliced_axes(step: Step) -> list[int]:
    """Return the axes whose placements a slice changes."""
    pairs = zip(step.source.placements, step.target.placements, strict=True)
    return [axis for axis, (old, new) in enumerate(pairs) if old != new]


def _merged(steps: Steps) -> Steps:
    """Return the steps with consecutive slices replaced by one."""
    result: list[Step] = []
    for step in steps:
        if result and step.kind == "slice" == result[-1].kind:
            step = slice_step(result.pop().source, step.target)
        result.append(step)
    return tuple(result)


def _peak(steps: Steps, shape: tuple[int, ...], rank: int) -> int:
    """Return the peak memory of a sequence of steps on one rank, in elements.

    The input of the first step counts during all steps, because the caller still holds it.
    """
    given = 0
    if steps and steps[0].source.holds(rank):
        given = math.prod(steps[0].source.local_shape(shape, rank))
    peaks = [step.peak(shape, rank) + given * (number > 0) for number, step in enumerate(steps)]
    return max(peaks, default=0)
