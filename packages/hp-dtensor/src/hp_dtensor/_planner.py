"""The planner: finds the cheapest steps that change a tensor from one layout to another.

A step is a local slice, one collective, or one transfer between two meshes. The memory of each step
can be limited.
"""

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

# Number of layouts after which a round of the search stops, if it has found a plan. The limit is
# for meshes with many axes: most searches expand at most a few hundred layouts.
_MOST_LAYOUTS = 4000

Steps: TypeAlias = tuple[Step, ...]
# Total of a sequence of steps: (price, number of "direct" steps, bytes received). Python compares
# the price first, so that the other numbers decide only between equal prices.
_Total: TypeAlias = tuple[float, float, float]
# Sets of mesh axes that have a process group, such as {(0, 1)}. Each set is an ascending tuple. A
# step can run over several axes only if their set has a group. None: every set has a group.
Spanned: TypeAlias = frozenset[tuple[int, ...]] | None


class PlanOptions(TypedDict, total=False):
    """Optional keyword arguments that `redistribute` and `explain` share; see `redistribute`."""

    shard_order: ShardOrder | Mapping[int, Sequence[int]] | None
    max_bytes: int | None
    cost: CostModel | None
    groups: "Sequence[ProcessGroup | DeviceMesh] | None"


def check_names(given: Mapping[str, object], options: Any) -> None:
    """Raise TypeError if ``given`` has a name that is not a key of the TypedDict ``options``."""
    known = options.__optional_keys__
    if unknown := sorted(given.keys() - known):
        raise TypeError(f"unexpected keyword arguments {unknown}; use {', '.join(sorted(known))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The steps that change the layout of a tensor, with their communication and memory on a rank.

    Attributes:
        source: Layout before the first step.
        target: Layout after the last step.
        shape: Global shape of the tensor.
        rank: Global rank for which ``bytes_received``, ``step_bytes`` and ``peak_bytes`` are
            computed.
        steps: The steps, in order. All ranks have the same steps.
        bytes_received: Number of bytes that the rank receives from other ranks in all steps. For an
            all-reduce of ``b`` bytes over ``n`` ranks, this is ``2 * b * (n - 1) / n``.
        peak_bytes: Peak memory of the rank in bytes. The memory of a step is its input, output and
            buffers. From the second step on, the original tensor is added, because the caller still
            holds it.
        time: Estimated time of all steps in seconds, by the cost model.
        note: Sentence about a missing process group that would allow a faster plan. Empty if no
            group would help.
        why: Phrase about the search, such as ``"the cheapest of 3 candidates"``. Empty if the plan
            has no steps.
        step_bytes: Number of bytes that the rank receives from other ranks in each step.
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
    """Return the cheapest plan from ``src`` to ``dst``.

    All ranks find the same steps. The bytes and the memory in the plan are for ``rank``.

    Args:
        src: Layout of the source.
        dst: Layout of the target.
        shape: Global shape.
        rank: Global rank, in the mesh of ``src`` or of ``dst``.
        itemsize: Bytes per element.
        cost: Cost model. Defaults to ``AlphaBeta()``.
        groups: Sets of mesh axes that have a process group, such as ``{(0, 1)}``. Each set is an
            ascending tuple of two or more axes. A step runs over several axes only if ``groups``
            contains them. If None, every set has a group. Each single axis always has a group.
        max_bytes: Upper bound on the memory of each step on every rank, in bytes. None means no
            limit.

    Raises:
        LayoutError: A layout is impossible for ``shape``. Or ``dst`` has a `Partial` that ``src``
            does not have. Or ``cost`` has fewer values than the mesh has axes.
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
    """Raise `LayoutError` if ``target`` is a `Layout` and ``shard_order`` is given in addition.

    A `Layout` already has a shard order.
    """
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
    """Return the plan between two layouts. Does not need torch.

    The arguments, defaults and errors are the same as in `explain`.
    """
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
    """Return ``(steps, why, note)``: the cheapest steps, and the texts `Plan.why` and `Plan.note`.

    Raises `NoPlanError` if every plan needs more than ``max_bytes``.
    """
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

    This is an A* search (Hart, Nilsson and Raphael, IEEE Trans. SSC 4, 1968). Its nodes are layouts
    and its edges are steps. All ranks generate the steps in the same order, so they find the same
    plan. The steps include all steps of torch's own planners for DTensors.

    The search has up to two rounds. The first round considers only steps that lead towards the
    target. The second round considers all steps.

    If several plans take the same time, the search prefers fewer ``"direct"`` steps, then fewer
    bytes, then fewer steps.

    Attributes:
        ended: False if a round stopped at the limit on the number of layouts. A cheaper plan may
            then exist.
        wide: False in the first round, True in the second.
        searchable: Whether the search needs a second round. Set by `next_steps`.
        candidates: Layouts of the first round from which one allowed step reaches the target.
            `Plan.why` reports their number.
        over_limit: Layouts of the first round from which one step reaches the target, if this step
            needs more than ``max_bytes``.
        without_group: Pair ``(time, axes)`` of the fastest plan that is not allowed because the
            last step has no process group. ``time`` is the time of the plan in seconds, and
            ``axes`` are the mesh axes of the last step. ``(inf, ())`` if there is no such plan.
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
        """Return the cheapest steps that need at most ``max_bytes``, or None if there are none."""
        least = lower_bound(self.dst, self.shape, self.itemsize, self.cost)
        steps = self._run(self.price, least, operator.add)
        return None if steps is None else _merged(steps)

    def least_memory(self) -> int:
        """Return the peak memory of the plan that needs the least memory, in elements.

        The peak memory of a plan is the maximum of `memory` over all steps. This method removes the
        limit ``max_bytes`` for good, so call `cheapest` first.
        """
        self.max_bytes, self.one_step = None, False
        # The memory limit applies to single slices, before `_merged` joins consecutive slices.
        steps = self._run(lambda step, received: self.memory(step), lambda here: 0, max)
        return max(map(self.memory, steps or ()), default=0)

    def price(self, step: Step, received: float) -> float:
        """Return the time of a step in seconds, if each rank receives ``received`` bytes."""
        return step_seconds(step, received, self.cost)

    def memory(self, step: Step) -> int:
        """Return an upper bound on the number of elements that any rank holds during a step.

        This includes the input, output and buffers of the step, and the original tensor.
        """
        # The caller holds the original tensor until the last step ends. In the first step, the
        # original tensor is the input, which is already counted.
        given = 0 if step.source == self.src else most_held(self.src, self.shape)
        return step.most(self.shape) + given

    def _run(
        self,
        price: Callable[[Step, float], float],
        least: Callable[[Layout], float],
        join: Callable[[float, float], float],
    ) -> Steps | None:
        """Search for the steps with the lowest total price.

        The price is a time or an amount of memory. The first round considers only steps that lead
        towards the target. The second round considers all steps, and looks only for a cheaper plan
        than the first round found. The second round is skipped if `searchable` is False.

        Args:
            price: Function that takes a step and the number of bytes that a rank receives in it.
                Returns the price of the step.
            least: The A* heuristic. Function that takes a layout. Returns a lower bound on the
                price from this layout to the target.
            join: Function that takes the price of all steps so far and the price of the next step.
                Returns the sum for times, and the maximum for memory.

        Returns:
            The steps, or None if no allowed steps lead to the target.
        """
        serial = count()
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
        """Yield the steps from layout ``here`` that fit ``max_bytes`` and have a process group.

        ``spent`` is the price of the steps from the source to ``here``. For ``price`` and ``join``,
        see `_run`. If a step reaches the target, the method also updates `candidates`, `over_limit`
        or `without_group`.
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
        # No data has to move along an unchanged axis. Steps that communicate over such an axis, or
        # slice along it, are left out.
        return not self.unchanged or self.unchanged.isdisjoint(step.axes or _sliced_axes(step))

    def _has_group(self, step: Step) -> bool:
        return self.groups is None or len(step.axes) <= 1 or step.axes in self.groups

    def _fits(self, step: Step) -> bool:
        return self.max_bytes is None or self.memory(step) * self.itemsize <= self.max_bytes

    def next_steps(self, here: Layout) -> Iterator[Step]:
        """Yield the steps from layout ``here`` that the search considers.

        `_allowed_steps` then removes steps that need too much memory or have no process group.
        """
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
                # No other plan is faster than the direct step. A native collective can take the
                # same time, and is then preferred.
                yield from self._native_steps(here)
                return
        # There is no second round for a StridedShard, a RaggedShard or an empty tensor.
        self.searchable = self.src.is_plain and dst.is_plain and 0 not in self.shape
        yield from self._slices(here)
        yield from self._gathers_and_moves(here)

    def _native_steps(self, here: Layout) -> Iterator[Step]:
        """Yield the all-gathers and all-to-alls after which only local slices are missing.

        If a local slice towards the target is possible right away, yield only this slice.
        """
        if (sliced := self._sliced(here)) != here:
            yield slice_step(here, sliced)
            return
        for dim in here.axis_splits:
            step = self._move(here, dim) or gather_step(here, dim, self.shape)
            if step.kind != "direct" and is_local(step.target, self.dst):
                yield step

    def _sliced(self, here: Layout) -> Layout:
        """Return the layout that ``here`` becomes by all possible local slices towards the target.

        A dim can be sliced if ``here`` has `Replicate` on the mesh axis of `_next_split`.
        """
        for dim in self._free_dims(here):
            while (split := self._next_split(here, dim)) is not None:
                if not isinstance(here.placements[split[0]], Replicate):
                    break
                here = with_split(here, dim, split[0], split[2])
        return here

    def _next_split(self, here: Layout, dim: int) -> AxisSplit | None:
        """Return the first split of a dim that the target has and ``here`` lacks.

        Example: if axes 0 and 1 split the dim in the target, and only axis 0 in ``here``, the
        result is the split of axis 1, as ``(mesh axis, degree, split factor)``. Returns None if
        ``here`` lacks no split, or has a split of the dim that differs from the target.
        """
        have, want = here.axis_splits.get(dim, ()), self.dst.axis_splits.get(dim, ())
        return want[len(have)] if len(want) > len(have) and want[: len(have)] == have else None

    def _free_dims(self, here: Layout) -> range:
        """Return the tensor dims with splits that a step may change.

        These are all dims, except the dims that a `RaggedShard` of ``here`` flattens.
        """
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
        # If all axes have the same prices, `_slowest_gather` saves no time, but can save memory.
        if not self.wide and not (self.one_step and self.max_bytes is None):
            yield from self._slowest_gather(here)

    def _slowest_gather(self, here: Layout) -> Iterator[Step]:
        """Yield the gather over the slowest mesh axis that the target replicates.

        A gather over a slow axis is cheapest early, while the local tensors are small. Yields
        nothing if a split is uneven. Also yields nothing if the axis is the last one that splits
        its dim, because `_gathers_and_moves` already yields this gather.
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
        """Return the step that moves a split from dim ``old`` to the dim that the target requires.

        ``here`` is the layout before the step. The step moves the split of one mesh axis: the last
        axis that splits dim ``old`` in ``here``. In the target, this axis splits another dim.

        Returns None in these cases:

        - The axis splits no other dim in the target.
        - The split of this axis is not the next split that ``here`` lacks on the new dim; see
          `_next_split`.
        - A `RaggedShard` of ``here`` flattens the new dim.
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
    """Return whether all ranks get shards of equal length.

    True if every split divides its dim into blocks of equal length, and each block into chunks of
    equal length. A `Shard` has one block, and a `StridedShard` has several. False for a layout with
    a `RaggedShard`. Unlike `Layout.is_even`, the result can be True with `StridedShard`.
    """
    for dim, splits in layout.axis_splits.items():
        length = shape[dim]
        for _, degree, factor in splits:
            if length % (degree * factor):
                return False
            length //= degree
    return layout.ragged is None


def _spread(dst: Layout, shape: tuple[int, ...]) -> Layout:
    """Return ``dst`` with each `Replicate` changed to a `Shard` of a dim that divides evenly.

    The planner uses it as an intermediate layout. A transfer from another mesh to this layout sends
    fewer copies of each element. A gather on the target mesh then restores the replicas. An axis
    keeps `Replicate` if no dim divides evenly.
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
    """Return the mesh axes on which a step changes the placement."""
    pairs = zip(step.source.placements, step.target.placements, strict=True)
    return [axis for axis, (old, new) in enumerate(pairs) if old != new]


def _merged(steps: Steps) -> Steps:
    """Return the steps with consecutive slices merged into one slice."""
    result: list[Step] = []
    for step in steps:
        if result and step.kind == "slice" == result[-1].kind:
            step = slice_step(result.pop().source, step.target)
        result.append(step)
    return tuple(result)


def _peak(steps: Steps, shape: tuple[int, ...], rank: int) -> int:
    """Return the peak memory of a sequence of steps on one rank, in elements.

    The input of the first step is included in all steps, because the caller still holds it.
    """
    given = 0
    if steps and steps[0].source.holds(rank):
        given = math.prod(steps[0].source.local_shape(shape, rank))
    peaks = [step.peak(shape, rank) + given * (number > 0) for number, step in enumerate(steps)]
    return max(peaks, default=0)
