"""Steps of a plan, with their bytes, memory and estimated time; cost models.

A step is a local slice, one collective, or one transfer between two meshes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from ._boxes import Interval, intersect, longest, pieces, unravel, volume
from ._errors import LayoutError
from ._layout import (
    AxisSplit,
    Layout,
    is_local,
    moving_axes,
    with_placement,
    with_split,
    without_split,
)
from ._placements import Partial, Replicate
from ._transfer import plan_transfer

Kind = Literal[
    "slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "direct", "transfer"
]


class _Usage(NamedTuple):
    """Formulas for the communication and the memory of one kind of step.

    Both formulas are functions ``(held, result, n)``. ``held`` and ``result`` are the sizes of a
    rank's local tensor before and after the step. ``n`` is the number of ranks in the collective.

    Attributes:
        received: Returns the number of bytes that a rank receives from other ranks. Takes sizes in
            bytes. None for ``"direct"`` and ``"transfer"``: their bytes follow from the layouts,
            not from the sizes.
        memory: Returns the number of elements of the input, the output and the buffers. Takes sizes
            in elements.
    """

    received: Callable[[int, int, int], int] | None
    memory: Callable[[int, int, int], int]


_USAGE: dict[Kind, _Usage] = {
    "slice": _Usage(lambda held, result, n: 0, lambda held, result, n: held + result),
    "all_gather": _Usage(
        lambda held, result, n: (n - 1) * held,
        lambda held, result, n: held + result + max(held, result),
    ),
    "reduce_scatter": _Usage(
        lambda held, result, n: (n - 1) * result,
        lambda held, result, n: held + result + max(held, result),
    ),
    "all_reduce": _Usage(
        lambda held, result, n: 2 * held * (n - 1) // n, lambda held, result, n: held + result
    ),
    "all_to_all": _Usage(
        lambda held, result, n: held * (n - 1) // n,
        lambda held, result, n: held + result + max(held, result),
    ),
    "direct": _Usage(None, lambda held, result, n: 2 * (held + result)),
    "transfer": _Usage(None, lambda held, result, n: 2 * (held + result)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a plan: a local slice, one collective, or one transfer between two meshes.

    Attributes:
        kind: One of:

            - ``"slice"``: copies a part of the local tensor.
            - ``"all_gather"``, ``"all_to_all"``, ``"all_reduce"``: the native collective.
            - ``"reduce_scatter"``: the native collective, if all shards have equal length.
              Otherwise an all-to-all and a local reduction.
            - ``"direct"``: one all-to-all with uneven sizes. Each rank receives exactly the
              elements that it needs and does not hold.
            - ``"transfer"``: point-to-point messages between two meshes. Each rank receives exactly
              the elements that it needs and does not hold.
        axes: Mesh axes of the collective. Empty for a slice and for a transfer.
        source: Layout before the step.
        target: Layout after the step.
    """

    kind: Kind
    axes: tuple[int, ...]
    source: Layout
    target: Layout

    def received(self, shape: Sequence[int], rank: int, itemsize: int) -> int:
        """Return the number of bytes that a rank receives from other ranks in this step.

        For an all-reduce of ``b`` bytes over ``n`` ranks, this is ``2 * b * (n - 1) / n``.
        `RecordingCollectives` records the same numbers.
        """
        formula = _USAGE[self.kind].received
        if 0 in shape:
            return 0
        if formula is None:
            return self._missing(shape, rank) * itemsize
        held, result = self._sizes(shape, rank)
        return formula(held * itemsize, result * itemsize, self.ranks)

    def sent(self, shape: Sequence[int], rank: int, itemsize: int) -> int:
        """Return the number of bytes that a rank sends in a ``"direct"`` or ``"transfer"`` step."""
        messages = plan_transfer(self.source, self.target, shape, rank)
        return sum(volume(box) for _, box in messages.sends) * itemsize

    def peak(self, shape: Sequence[int], rank: int) -> int:
        """Return the peak memory of a rank in elements: input, output and buffers of this step."""
        return self._memory(*self._sizes(shape, rank), shape)

    def most(self, shape: Sequence[int]) -> int:
        """Return an upper bound on `peak` for all ranks, in elements."""
        return self._memory(most_held(self.source, shape), most_held(self.target, shape), shape)

    @property
    def ranks(self) -> int:
        """Number of ranks that take part in one collective of this step.

        1 for a slice. For a transfer, the sum of the numbers of ranks of both meshes.
        """
        if self.kind == "transfer":
            return self.source.size + self.target.size
        size = 1
        for axis in self.axes:
            size *= self.target.mesh_shape[axis]
        return size

    def __str__(self) -> str:
        if self.kind == "transfer":
            meshes = f"{list(self.source.mesh_shape)} to {list(self.target.mesh_shape)}"
            return f"transfer from mesh {meshes}: {self.source} -> {self.target}"
        over = f" over axes {self.axes}" if self.axes else ""
        return f"{self.kind}{over}: {self.source} -> {self.target}"

    def _sizes(self, shape: Sequence[int], rank: int) -> tuple[int, int]:
        """Return the number of elements that a rank holds before and after the step."""
        return _elements(self.source, shape, rank), _elements(self.target, shape, rank)

    def _memory(self, held: int, result: int, shape: Sequence[int]) -> int:
        total = _USAGE[self.kind].memory(held, result, self.ranks)
        if self.kind == "reduce_scatter" and not self.target.is_even(shape):
            # With unequal shards, a reduce-scatter runs as an all-to-all. A rank receives a tensor
            # of the size of its result from each rank, and then reduces these tensors.
            return 2 * held + (self.ranks + 1) * result
        if self.kind == "direct":
            # If the target replicates an axis that the source shards, a rank packs its elements
            # once for each rank on this axis.
            pairs = zip(self.source.placements, self.target.placements, strict=True)
            copied = [isinstance(new, Replicate) and bool(old.split_dims) for old, new in pairs]
            total += held * (_ranks_along(self.source, copied) - 1)
        return total

    def _missing(self, shape: Sequence[int], rank: int) -> int:
        """Return the number of elements that a rank needs after the step and does not hold yet."""
        if not (self.source.holds(rank) and self.target.holds(rank)):
            return _elements(self.target, shape, rank)
        here, there = self.source.coordinate(rank), self.target.coordinate(rank)
        return missing_at(self.source, self.target, shape, here, there)


def direct_step(src: Layout, dst: Layout, shape: Sequence[int]) -> Step:
    """Return the step that changes ``src`` to ``dst`` at once. Both layouts are on one mesh.

    The kind of the step is:

    - ``"slice"`` if no data has to move between ranks;
    - ``"all_gather"`` if shards of equal length are gathered and nothing else changes;
    - ``"direct"`` otherwise.
    """
    if is_local(src, dst):
        return slice_step(src, dst)
    axes = moving_axes(src, dst)
    kind: Kind = "all_gather" if _only_gathers(src, dst, axes, shape) else "direct"
    return Step(kind=kind, axes=axes, source=src, target=dst)


def _only_gathers(src: Layout, dst: Layout, axes: tuple[int, ...], shape: Sequence[int]) -> bool:
    """Return whether one all-gather of equal shards over ``axes`` changes ``src`` to ``dst``.

    Returns False if the placement of any other axis changes, too.
    """
    if not src.is_even(shape) or any(dst.placements[axis].split_dims for axis in axes):
        return False
    for dim, splits in src.axis_splits.items():
        kept = dst.axis_splits.get(dim, ())
        if splits[: len(kept)] != kept or any(
            axis not in axes for axis, _, _ in splits[len(kept) :]
        ):
            return False
    return all(
        axis in axes or old == new
        for axis, (old, new) in enumerate(zip(src.placements, dst.placements, strict=True))
    )


def reduce_step(src: Layout, axes: tuple[int, ...], dim: int | None) -> Step:
    """Return the step that reduces the `Partial` placements on ``axes``.

    If ``dim`` is None, the step is an all-reduce and the result has `Replicate` on these axes.
    Otherwise it is a reduce-scatter and the axes shard ``dim``.
    """
    target = src
    for axis in axes:
        target = with_placement(target, axis, Replicate())
    if dim is None:
        return Step(kind="all_reduce", axes=axes, source=src, target=target)
    for axis in axes:
        target = with_split(target, dim, axis)
    return Step(kind="reduce_scatter", axes=axes, source=src, target=target)


def slice_step(src: Layout, dst: Layout) -> Step:
    """Return the step in which every rank slices its local tensor, without communication."""
    return Step(kind="slice", axes=(), source=src, target=dst)


def gather_step(src: Layout, dim: int, shape: Sequence[int], position: int = -1) -> Step:
    """Return the step that gathers a dim over one mesh axis. The axis then has `Replicate`.

    ``position`` is the index of the axis in ``src.axis_splits[dim]``. Defaults to the last axis.
    """
    kind: Kind = "all_gather" if src.is_even(shape) and position == -1 else "direct"
    axis = src.axis_splits[dim][position][0]
    return Step(kind=kind, axes=(axis,), source=src, target=without_split(src, dim, position))


def move_step(src: Layout, old: int, new: int, shape: Sequence[int], factor: int = 1) -> Step:
    """Return the step after which a mesh axis splits dim ``new`` instead of dim ``old``.

    The axis is the last one that splits dim ``old``. ``factor`` is the split factor on dim ``new``.
    The step is an all-to-all if all ranks have equal local shapes, both before and after the step.
    Otherwise it is a ``"direct"`` step.
    """
    axis = src.axis_splits[old][-1][0]
    target = with_split(without_split(src, old), new, axis, factor)
    even = src.is_even(shape) and target.is_even(shape)
    return Step(kind="all_to_all" if even else "direct", axes=(axis,), source=src, target=target)


def most_held(layout: Layout, shape: Sequence[int]) -> int:
    """Return the largest number of elements of a tensor that any rank holds."""
    lengths = list(shape)
    for dim in layout.axis_splits:
        lengths[dim] = longest(shape[dim], layout.splits(dim))
    if layout.ragged is not None:
        placement = layout.ragged[1]
        lengths[: len(placement.dims)] = [max(placement.sizes)]
    return math.prod(lengths)


def _elements(layout: Layout, shape: Sequence[int], rank: int) -> int:
    if not layout.holds(rank):
        return 0
    if layout.is_even(shape):
        return most_held(layout, shape)
    return math.prod(layout.local_shape(shape, rank))


@runtime_checkable
class CostModel(Protocol):
    """Protocol of cost models, which estimate the time of one collective.

    A cost model must be hashable, because it is a part of the cache keys of plans.
    """

    def seconds(self, axes: Sequence[int], ranks: int, received: float) -> float:
        """Return the time in seconds of one collective.

        Args:
            axes: Mesh axes over which the collective runs. Empty for a transfer between two meshes.
            ranks: Number of ranks that take part.
            received: Number of bytes that a rank receives from other ranks. For a transfer between
                two meshes, the largest number of bytes that one rank receives or sends.
        """
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """Linear cost model: each collective costs ``alpha + beta * received_bytes`` seconds.

    This is Hockney's model (Parallel Computing 20, 1994). A collective over several axes uses the
    largest ``alpha`` and the largest ``beta`` of these axes. A transfer between two meshes uses the
    largest values of all axes. Any other hashable object with a `seconds` method can also be passed
    as ``cost=``.

    Args:
        alpha: Latency of a collective in seconds: one number, or a tuple with one number for each
            mesh axis. For a transfer between two meshes, give one number for each axis of the mesh
            that has more axes. Defaults to 10 us.
        beta: Transfer time in seconds per byte: one number, or a tuple as for ``alpha``. The
            default corresponds to 50 GB/s.

    Raises:
        LayoutError: ``alpha`` or ``beta`` has a value that is not a finite number of at least 0.

    Examples:
        >>> cost = AlphaBeta(alpha=2e-5, beta=(4e-11, 3e-12))  # a slow axis and a fast one
        >>> cost.seconds(axes=(1,), ranks=8, received=0)
        2e-05
    """

    alpha: float | tuple[float, ...] = 1e-5
    beta: float | tuple[float, ...] = 2e-11

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            given = getattr(self, name)
            values = given if isinstance(given, tuple) else (given,)
            if not values or not all(map(_is_price, values)):
                raise LayoutError(
                    f"{name}={given!r} is no price; give finite seconds of 0 or more, one for all "
                    "mesh axes or a tuple with one for each"
                )

    def seconds(self, axes: Sequence[int], ranks: int, received: float) -> float:
        """Return the estimated time of one collective.

        Args:
            axes: Mesh axes over which the collective runs. Empty for a transfer between two meshes.
            ranks: Number of ranks. This model does not use it.
            received: Number of bytes that one rank receives from other ranks.

        Returns:
            The time in seconds.
        """
        return _largest(self.alpha, axes) + _largest(self.beta, axes) * received


def check_limits(cost: object, max_bytes: object) -> None:
    """Raise `LayoutError` if ``cost`` is no hashable cost model or ``max_bytes`` is no integer.

    Both may be None.
    """
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int)):
        raise LayoutError(f"max_bytes={max_bytes!r} is no number of bytes; give a whole number")
    if cost is None or isinstance(cost, AlphaBeta):
        return
    try:
        legal = isinstance(cost, CostModel) and not isinstance(cost, type)
        hash(cost)
    except TypeError:
        legal = False
    if not legal:
        raise LayoutError(
            f"cost={cost!r} is no cost model that plans can be kept by; give AlphaBeta(...), or a "
            "hashable object with the method seconds(axes, ranks, received)"
        )


def check_length(cost: CostModel, axes: int) -> None:
    """Raise `LayoutError` if ``alpha`` or ``beta`` is a tuple with fewer than ``axes`` values.

    ``axes`` is the number of mesh axes. Only an `AlphaBeta` is checked.
    """
    if not isinstance(cost, AlphaBeta):
        return
    for name, given in (("alpha", cost.alpha), ("beta", cost.beta)):
        if isinstance(given, tuple) and len(given) < axes:
            raise LayoutError(
                f"{name}={given!r} prices {len(given)} mesh axes of {axes}; give {axes} values, or "
                "one number for all"
            )


def _is_price(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _largest(value: float | tuple[float, ...], axes: Sequence[int]) -> float:
    if isinstance(value, tuple):
        return max(value[axis] for axis in axes) if axes else max(value)
    return value


C = TypeVar("C")
_clears: list[Callable[[], object]] = []


def clearable(cache: C) -> C:
    """Register a cache, so that `clear_caches` clears it. Returns the cache.

    The cache is a dict, or a function with ``lru_cache``. It must have a maximum size.
    """
    kept: Any = cache
    _clears.append(kept.clear if isinstance(kept, dict) else kept.cache_clear)
    return cache


def clear_caches() -> None:
    """Clear all caches of plans, for tests and timings.

    The caches are bounded and hold no tensors, meshes or process groups. Communicates nothing.

    Examples:
        >>> clear_caches()
    """
    for clear in _clears:
        clear()


# The bytes of a step are averaged over at most this many ranks, for speed. Every rank uses the same
# sample, so that all ranks choose the same plan.
_SAMPLED_RANKS = 64
# The average over the sample can be higher than the average over all ranks. `lower_bound` therefore
# multiplies the time per byte by this factor.
_SAMPLING_MARGIN = 0.97


def seconds(steps: Sequence[Step], shape: tuple[int, ...], itemsize: int, cost: CostModel) -> float:
    """Return the estimated time of a sequence of steps, in seconds."""
    return sum([step_seconds(step, step_bytes(step, shape, itemsize), cost) for step in steps])


def step_seconds(step: Step, received: float, cost: CostModel) -> float:
    """Return the estimated time of one step in seconds. A slice takes no time.

    ``received`` is the result of `step_bytes` for the step.
    """
    return 0.0 if step.kind == "slice" else cost.seconds(step.axes, step.ranks, received)


@clearable
@lru_cache(maxsize=8192)
def step_bytes(step: Step, shape: tuple[int, ...], itemsize: int) -> float:
    """Estimate the number of bytes that a rank communicates in a step.

    - For a slice, the result is 0.
    - For a transfer between two meshes, the result is the maximum of two numbers: the most bytes
      that a source rank sends, and the most bytes that a target rank receives.
    - For all other steps, the result is the average number of bytes that a rank receives.

    The numbers can come from a sample of the ranks of a large mesh; see `sampled`.
    """
    if step.kind == "slice":
        return 0.0
    if step.kind == "transfer":
        # If the source mesh is much smaller than the target mesh, sending takes the longest.
        amounts = [
            use(shape, layout.rank_at(at), itemsize)
            for layout, use in ((step.source, step.sent), (step.target, step.received))
            for at in sampled(layout.mesh_shape)[:: max(1, min(layout.size, _SAMPLED_RANKS) // 8)]
        ]
        return max(amounts)
    if step.kind == "direct":
        return average_missing(step.source, step.target, shape) * itemsize
    coordinates = sampled(step.source.mesh_shape)
    if step.source.is_even(shape) and step.target.is_even(shape):
        coordinates = coordinates[:1]  # all ranks receive the same number of bytes
    amounts = [step.received(shape, step.source.rank_at(at), itemsize) for at in coordinates]
    return sum(amounts) / len(amounts)


@clearable
@lru_cache(maxsize=256)
def sampled(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the coordinates of at most `_SAMPLED_RANKS` ranks of a mesh.

    If the mesh has more ranks, the returned ranks are spread evenly over all axes.
    """
    size = math.prod(mesh_shape)
    if size <= _SAMPLED_RANKS:
        return [unravel(position, mesh_shape) for position in range(size)]
    # Multiples of the golden ratio are spread evenly (Knuth, vol. 3, 6.4).
    spread = [(i * 2654435769 % 2**32) * size >> 32 for i in range(_SAMPLED_RANKS)]
    return [unravel(position, mesh_shape) for position in spread]


def missing_at(
    src: Layout, dst: Layout, shape: Sequence[int], here: Sequence[int], there: Sequence[int]
) -> int:
    """Return the number of elements that one rank holds in ``dst`` but not in ``src``.

    ``here`` is the coordinate of the rank in the mesh of ``src``. ``there`` is the coordinate of
    the rank in the mesh of ``dst``.
    """
    if src.ragged is not None or dst.ragged is not None:
        held, needed = src.boxes_at(shape, here), dst.boxes_at(shape, there)
        common = sum(volume(intersect(a, b)) for a in held for b in needed)
        return sum(map(volume, needed)) - common
    total = common = 1
    sides = src.intervals_at(shape, here), dst.intervals_at(shape, there)
    for held_ranges, needed_ranges in zip(*sides, strict=True):
        total *= sum([hi - lo for lo, hi in needed_ranges])
        common *= _overlap(held_ranges, needed_ranges)
    return total - common


def average_missing(src: Layout, dst: Layout, shape: Sequence[int]) -> float:
    """Return the average number of elements that a rank holds in ``dst`` but not in ``src``.

    Both layouts are on one mesh. The average is over the ranks that `sampled` returns.
    """
    coordinates = sampled(src.mesh_shape)
    if src.ragged is not None or dst.ragged is not None:
        return sum(missing_at(src, dst, shape, at, at) for at in coordinates) / len(coordinates)
    # The layouts of a search differ in few dims. So the lengths are cached for each dim separately.
    unsplit, columns = 1, []
    for dim, length in enumerate(shape):
        old, new = src.axis_splits.get(dim, ()), dst.axis_splits.get(dim, ())
        if old or new:
            columns.append(_dim_lengths(length, old, new, src.mesh_shape))
        else:
            unsplit *= length
    total = 0
    for lengths in zip(*columns, strict=True):
        needed = common = unsplit
        for length, overlap in lengths:
            needed *= length
            common *= overlap
        total += needed - common
    return total / len(coordinates)


@clearable
@lru_cache(maxsize=4096)
def _dim_lengths(
    length: int,
    old: tuple[AxisSplit, ...],
    new: tuple[AxisSplit, ...],
    mesh_shape: tuple[int, ...],
) -> list[tuple[int, int]]:
    """Return how many indices of one tensor dim each rank needs, and how many it already holds.

    ``length`` is the global length of the dim. ``old`` and ``new`` are the splits of the dim in the
    old and the new layout. The result has a pair ``(needed, common)`` for each rank that `sampled`
    returns: the number of indices in the new layout, and the number of indices in both layouts.
    """
    known: dict[tuple[int, ...], tuple[int, int]] = {}
    axes = [axis for axis, _, _ in (*old, *new)]
    old_splits, new_splits = ([split[1:] for split in splits] for splits in (old, new))
    found = []
    for at in sampled(mesh_shape):
        index = tuple([at[axis] for axis in axes])
        if index not in known:
            held = pieces(length, old_splits, index[: len(old)])
            needed = pieces(length, new_splits, index[len(old) :])
            known[index] = sum([hi - lo for lo, hi in needed]), _overlap(held, needed)
        found.append(known[index])
    return found


def _overlap(ranges: Sequence[Interval], others: Sequence[Interval]) -> int:
    total = 0
    for lo, hi in ranges:
        for start, stop in others:
            total += max(0, min(hi, stop) - max(lo, start))
    return total


def prefers_one_step(cost: CostModel) -> bool:
    """Return whether no plan is faster than one direct step, if nothing has to be reduced.

    True for an `AlphaBeta` with one ``alpha`` above 0 and one ``beta`` for all mesh axes.
    """
    if type(cost) is not AlphaBeta or isinstance(cost.beta, tuple):
        return False
    return not isinstance(cost.alpha, tuple) and cost.alpha > 0


def lower_bound(
    dst: Layout, shape: tuple[int, ...], itemsize: int, cost: CostModel
) -> Callable[[Layout], float]:
    """Return the A* heuristic: a function from a layout to a lower bound on the time to ``dst``.

    The bound is the time in seconds of one collective, with the lowest ``alpha`` and the lowest
    ``beta`` of all axes. In this collective, each rank receives the fewest bytes that any plan
    needs on average. The bound is 0 in these cases:

    - The layout is on another mesh than ``dst``.
    - Local slices are enough to reach ``dst``.
    - ``cost`` is not an `AlphaBeta`.
    """
    if type(cost) is not AlphaBeta:
        return lambda here: 0.0
    alpha, beta = (min(p) if isinstance(p, tuple) else p for p in (cost.alpha, cost.beta))
    if dst.size > _SAMPLED_RANKS:
        beta *= _SAMPLING_MARGIN
    needing = _ranks_along(dst, [isinstance(new, Replicate) for new in dst.placements])

    @lru_cache(maxsize=8192)
    def bound(here: Layout) -> float:
        if here.mesh_shape != dst.mesh_shape or here.ranks != dst.ranks:
            return 0.0
        kept = [old == new for old, new in zip(here.placements, dst.placements, strict=True)]
        partial = [isinstance(old, Partial) for old in here.placements]
        terms = _ranks_along(here, [p and not k for p, k in zip(partial, kept, strict=True)])
        if terms == 1:
            # Nothing has to be reduced. A rank receives at least the elements that it lacks.
            elements = average_missing(here, dst, shape)
            return 0.0 if is_local(here, dst) else alpha + beta * elements * itemsize
        # `terms` ranks hold the terms of each sum, and `needing` ranks need the sum. Each element
        # is sent at least `terms - 1` times to be summed, and `needing - 1` times to be
        # distributed. `Partial` axes that `dst` keeps are not reduced. So each coordinate on these
        # axes has a separate sum.
        sums = _ranks_along(here, [p and k for p, k in zip(partial, kept, strict=True)])
        elements = sums * math.prod(shape) * (terms + needing - 2) / here.size
        # `Step.received` rounds the bytes of an all-reduce down, and there is at most one
        # all-reduce for each axis. So one byte for each axis is subtracted.
        return alpha + beta * max(0.0, elements * itemsize - len(dst.mesh_shape))

    return bound


def _ranks_along(layout: Layout, chosen: Sequence[bool]) -> int:
    """Return the product of the sizes of the mesh axes for which ``chosen`` is True."""
    pairs = zip(layout.mesh_shape, chosen, strict=True)
    return math.prod([degree if wanted else 1 for degree, wanted in pairs])
