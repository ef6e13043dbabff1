"""The steps that plans are made of: what each moves, holds and costs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from ._boxes import chunk, intersect, longest, unravel, volume
from ._errors import LayoutError
from ._layout import Layout, is_local, moving_axes, with_placement, with_split, without_last_split
from ._placements import Partial, Replicate
from ._transfer import plan_transfer

Kind = Literal[
    "slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "direct", "transfer"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change of layout: a local slice, or one collective over the mesh axes ``axes``.

    ``all_gather`` and ``all_to_all`` move equal parts over one axis; ``direct`` sends every rank
    exactly what it lacks, over any axes and with any sizes, and so does ``transfer`` from one mesh
    to another, point to point between the ranks that take part.
    """

    kind: Kind
    axes: tuple[int, ...]
    source: Layout
    target: Layout

    def received(self, shape: Sequence[int], rank: int, itemsize: int) -> int:
        """Return how many bytes ``rank`` receives from others; an all-reduce as bandwidth-optimal.

        The count is that of `RecordingCollectives`.
        """
        if self.kind == "slice" or 0 in shape:
            return 0
        if self.kind in ("direct", "transfer"):
            return self._lacking(shape, rank) * itemsize
        if not self.source.holds(rank):
            return 0
        held = _elements(self.source, shape, rank) * itemsize
        others = self.ranks - 1
        if self.kind == "all_gather":
            return others * held
        if self.kind == "reduce_scatter":
            return others * _elements(self.target, shape, rank) * itemsize
        if self.kind == "all_reduce":
            return 2 * held * others // self.ranks
        return held * others // self.ranks

    def sent(self, shape: Sequence[int], rank: int, itemsize: int) -> int:
        """Return how many bytes ``rank`` sends to others in a direct step or transfer."""
        moved = plan_transfer(self.source, self.target, shape, rank)
        return sum(volume(box) for _, box in moved.sends) * itemsize

    def peak(self, shape: Sequence[int], rank: int) -> int:
        """Return how many elements are alive at once: input, output and buffers between them."""
        return self._alive(
            _elements(self.source, shape, rank), _elements(self.target, shape, rank), shape
        )

    def most(self, shape: Sequence[int]) -> int:
        """Return a bound on `peak` over all ranks, the same on each of them."""
        held, result = most_held(self.source, shape), most_held(self.target, shape)
        return self._alive(held, result, shape)

    @property
    def ranks(self) -> int:
        """Return how many ranks take part in the step's collective."""
        if self.kind == "transfer":
            return self.source.size + self.target.size
        return math.prod(self.target.mesh_shape[axis] for axis in self.axes)

    def __str__(self) -> str:
        if self.kind == "transfer":
            meshes = f"{list(self.source.mesh_shape)} to {list(self.target.mesh_shape)}"
            return f"transfer from mesh {meshes}: {self.source} -> {self.target}"
        over = f" over axes {self.axes}" if self.axes else ""
        return f"{self.kind}{over}: {self.source} -> {self.target}"

    def _alive(self, held: int, result: int, shape: Sequence[int]) -> int:
        if self.kind in ("slice", "all_reduce"):
            return held + result
        if self.kind == "direct":
            return held * (1 + self._copies) + 2 * result
        if self.kind == "transfer":
            return 2 * (held + result)
        if self.kind == "reduce_scatter" and not self.target.is_even(shape):
            # Parts of the length of the longest come from every rank.
            return 2 * held + (self.ranks + 1) * result
        return held + result + max(held, result)

    @property
    def _copies(self) -> int:
        """Return how often a rank may send the same element, each time from a buffer of its own."""
        return math.prod(
            degree
            for degree, old, new in zip(
                self.source.mesh_shape, self.source.placements, self.target.placements, strict=True
            )
            if isinstance(new, Replicate) and not isinstance(old, Replicate | Partial)
        )

    def _lacking(self, shape: Sequence[int], rank: int) -> int:
        """Return how many elements ``rank`` needs and does not hold; a transfer moves no others."""
        needed = _elements(self.target, shape, rank)
        if not needed or not self.source.holds(rank):
            return needed
        here, there = self.source.coordinate(rank), self.target.coordinate(rank)
        if self.source.ragged is None and self.target.ragged is None:
            common = 1
            mine = self.source.intervals_at(shape, here)
            for ranges, others in zip(mine, self.target.intervals_at(shape, there), strict=True):
                common *= sum(
                    max(0, min(hi, stop) - max(lo, start))
                    for lo, hi in ranges
                    for start, stop in others
                )
            return needed - common
        held = self.source.boxes_at(shape, here)
        return needed - sum(
            volume(intersect(a, b)) for a in held for b in self.target.boxes_at(shape, there)
        )


def direct_step(src: Layout, dst: Layout, ndim: int) -> Step:
    """Return the one step that moves every missing element straight to where it is needed."""
    if is_local(src, dst, ndim):
        return slice_step(src, dst)
    return Step(kind="direct", axes=moving_axes(src, dst, ndim), source=src, target=dst)


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


def slice_step(src: Layout, dst: Layout) -> Step:
    """Return the step in which every rank keeps a part of what it holds."""
    return Step(kind="slice", axes=(), source=src, target=dst)


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


def most_held(layout: Layout, shape: Sequence[int]) -> int:
    """Return how many elements of a tensor of ``shape`` the fullest rank holds."""
    lengths = [longest(length, layout.splits(dim)) for dim, length in enumerate(shape)]
    if layout.ragged is not None:
        placement = layout.ragged[1]
        lengths[: len(placement.dims)] = [max(placement.sizes)]
    return math.prod(lengths)


def _elements(layout: Layout, shape: Sequence[int], rank: int) -> int:
    return math.prod(layout.local_shape(shape, rank)) if layout.holds(rank) else 0


@runtime_checkable
class CostModel(Protocol):
    """The price of one collective; must be hashable, as plans are cached by it."""

    def seconds(self, axes: Sequence[int], ranks: int, received: float) -> float:
        """Return the time for one collective over mesh axes ``axes`` with ``ranks`` ranks.

        ``received`` is the payload in bytes that a rank receives from others. Without axes it is a
        transfer between two meshes, and ``received`` the most that a rank receives or sends.
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
            mesh axis. For a transfer between two meshes, the tuple needs as many numbers as the
            mesh with more axes has axes. Defaults to 10 us.
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
            ranks: Number of ranks. Not used by this model.
            received: Payload in bytes that one rank receives from others.

        Returns:
            The time in seconds.
        """
        return _largest(self.alpha, axes) + _largest(self.beta, axes) * received


def check_limits(cost: object, max_bytes: object) -> None:
    """Raise `LayoutError` for what a plan cannot be chosen by: a ``cost`` or a limit, or None."""
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
    """Raise `LayoutError` where a tuple of prices has fewer values than there are mesh axes."""
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
    """Let `clear_caches` drop the entries of a bounded cache; return it."""
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


# Costs are compared on at most these many ranks, the same on all, so that every rank chooses alike.
_SAMPLED_RANKS = 64
# What they pay may be more than all ranks pay on average.
_CERTAIN = 0.97


def seconds(steps: Sequence[Step], shape: tuple[int, ...], itemsize: int, cost: CostModel) -> float:
    """Return the modelled time of all steps, one after another."""
    return sum(step_seconds(step, shape, itemsize, cost) for step in steps)


@clearable
@lru_cache(maxsize=8192)
def step_seconds(step: Step, shape: tuple[int, ...], itemsize: int, cost: CostModel) -> float:
    """Return the modelled time of one step, by what its ranks receive on average."""
    if step.kind == "slice":
        return 0.0
    places = sampled(step.source.mesh_shape)
    if step.kind == "transfer":
        # One mesh may be much smaller than the other: senders are as busy as receivers.
        amounts = [
            step.sent(shape, step.source.rank_at(place), itemsize) for place in places[::8]
        ] + [
            step.received(shape, step.target.rank_at(place), itemsize)
            for place in sampled(step.target.mesh_shape)[::8]
        ]
        return cost.seconds(step.axes, step.ranks, max(amounts))
    if step.kind == "direct" and step.source.is_plain and step.target.is_plain:
        elements = lacking(step.source, step.target, shape, places)
        return cost.seconds(step.axes, step.ranks, elements * itemsize / len(places))
    if step.kind != "direct" and step.source.is_even(shape) and step.target.is_even(shape):
        places = places[:1]  # all receive alike
    ranks = [step.source.rank_at(place) for place in places]
    received = sum(step.received(shape, rank, itemsize) for rank in ranks) / len(ranks)
    return cost.seconds(step.axes, step.ranks, received)


@clearable
@lru_cache(maxsize=256)
def sampled(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the coordinates of all ranks, or of a few spread over all axes alike."""
    size = math.prod(mesh_shape)
    if size <= _SAMPLED_RANKS:
        return [unravel(place, mesh_shape) for place in range(size)]
    # Multiples of the golden ratio fall evenly everywhere (Knuth, vol. 3, 6.4).
    places = [(i * 2654435769 % 2**32) * size >> 32 for i in range(_SAMPLED_RANKS)]
    return [unravel(place, mesh_shape) for place in places]


def lacking(
    src: Layout, dst: Layout, shape: Sequence[int], places: Sequence[tuple[int, ...]]
) -> int:
    """Return how many elements the ranks at these places need and do not hold, all together."""
    dims = [
        (length, src.shard_axes(dim), src.degrees(dim), dst.shard_axes(dim), dst.degrees(dim))
        for dim, length in enumerate(shape)
    ]
    known: list[dict[tuple[int, ...], tuple[int, int]]] = [{} for _ in dims]
    total = 0
    for place in places:
        needed = common = 1
        for (length, old, old_degrees, new, new_degrees), found in zip(dims, known, strict=True):
            key = tuple([place[axis] for axis in (*old, *new)])
            if key not in found:
                lo, hi = chunk(length, old_degrees, key[: len(old)])
                start, stop = chunk(length, new_degrees, key[len(old) :])
                found[key] = stop - start, max(0, min(hi, stop) - max(lo, start))
            lengths = found[key]
            needed *= lengths[0]
            common *= lengths[1]
        total += needed - common
    return total


def least_seconds(
    dst: Layout, shape: tuple[int, ...], itemsize: int, cost: CostModel
) -> Callable[[Layout], float]:
    """Return what gives a bound from below on the time from a plain layout to ``dst``.

    At least one call is made, and every byte costs the smallest price. Every rank must receive what
    it lacks; where ``n`` ranks hold terms of a sum that ``m`` ranks need, each element travels
    ``n - 1`` times to meet and ``m - 1`` times more. Nothing is known of other models than
    `AlphaBeta`.
    """
    if type(cost) is not AlphaBeta:
        return lambda here: 0.0
    alpha, beta = (min(p) if isinstance(p, tuple) else p for p in (cost.alpha, cost.beta))
    places = sampled(dst.mesh_shape)
    if dst.size > len(places):
        beta *= _CERTAIN
    needing = _degrees(dst, lambda axis: isinstance(dst.placements[axis], Replicate))
    known: dict[Layout, float] = {}

    def least(here: Layout) -> float:
        if here not in known:
            kept = [old == new for old, new in zip(here.placements, dst.placements, strict=True)]
            partial = [isinstance(old, Partial) for old in here.placements]
            terms = _degrees(here, lambda axis: partial[axis] and not kept[axis])
            if terms > 1:
                # Each coordinate of axes that keep their terms sums a tensor of its own.
                sums = _degrees(here, lambda axis: partial[axis] and kept[axis])
                elements = sums * math.prod(shape) * (terms + needing - 2) / here.size
            else:
                elements = lacking(here, dst, shape, places) / len(places)
            local = terms == 1 and is_local(here, dst, len(shape))
            # Steps count whole bytes, rounded down.
            left = max(0.0, elements * itemsize - len(dst.mesh_shape))
            known[here] = 0.0 if local else alpha + beta * left
        return known[here]

    return least


def _degrees(layout: Layout, chosen: Callable[[int], bool]) -> int:
    """Return the number of ranks along some axes."""
    return math.prod(degree for axis, degree in enumerate(layout.mesh_shape) if chosen(axis))


def is_least(
    best: Sequence[Step] | None,
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    cost: CostModel,
) -> bool:
    """Return whether nothing can be cheaper: what every rank lacks, in one call at one price."""
    if best is None:
        return False
    if src.has_partial or type(cost) is not AlphaBeta:
        return is_local(src, dst, len(shape)) and not src.has_partial
    if isinstance(cost.alpha, tuple) or isinstance(cost.beta, tuple):
        return all(step.kind == "slice" for step in best)
    calls = [step for step in best if step.kind != "slice"]
    if not calls:
        return True
    straight = Step(kind="direct", axes=calls[0].axes, source=src, target=dst)
    return len(calls) == 1 and seconds(best, shape, itemsize, cost) <= step_seconds(
        straight, shape, itemsize, cost
    )
