"""What communication costs: the model that plans are chosen with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ._boxes import Interval, chunk, unravel
from ._caches import remembered
from ._errors import LayoutError
from ._layout import Layout
from ._steps import Step


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
    """Each collective costs ``alpha`` seconds and ``beta`` seconds a received byte.

    Hockney's model (Parallel Computing 20, 1994). A collective over several axes pays the largest
    of their prices; a transfer between two meshes pays the largest of all. Any other hashable
    object with `seconds` may be given as ``cost=`` too.

    Args:
        alpha: Seconds a call, one number or one for each mesh axis; between two meshes for the axes
            of the one with the most, by position.
        beta: Seconds a byte, likewise. The defaults are 10 us and 50 GB/s.

    Raises:
        LayoutError: What is no finite number of 0 or more.

    Example:
        >>> AlphaBeta(alpha=2e-5, beta=(4e-11, 3e-12))  # a slow axis and a fast one
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
        """Return ``alpha + beta * received``; see `CostModel.seconds`."""
        return _largest(self.alpha, axes) + _largest(self.beta, axes) * received


def check_cost(cost: object) -> None:
    """Raise `LayoutError` for what is neither None nor a hashable `CostModel`."""
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


# Costs are compared on at most these many ranks, the same on all, so that every rank chooses alike.
_SAMPLED_RANKS = 64


def seconds(steps: Sequence[Step], shape: tuple[int, ...], itemsize: int, cost: CostModel) -> float:
    """Return the modelled time of all steps, one after another."""
    return sum(step_seconds(step, shape, itemsize, cost) for step in steps)


@remembered(8192)
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
        lacking = _lacking(step.source, step.target, shape, places)
        return cost.seconds(step.axes, step.ranks, lacking * itemsize / len(places))
    if step.kind != "direct" and step.source.is_even(shape) and step.target.is_even(shape):
        places = places[:1]  # all receive alike
    ranks = [step.source.rank_at(place) for place in places]
    received = sum(step.received(shape, rank, itemsize) for rank in ranks) / len(ranks)
    return cost.seconds(step.axes, step.ranks, received)


@remembered(256)
def sampled(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the coordinates of all ranks, or of a few spread over all axes alike."""
    size = math.prod(mesh_shape)
    if size <= _SAMPLED_RANKS:
        return [unravel(place, mesh_shape) for place in range(size)]
    # Multiples of the golden ratio fall evenly everywhere (Knuth, vol. 3, 6.4).
    places = [(i * 2654435769 % 2**32) * size >> 32 for i in range(_SAMPLED_RANKS)]
    return [unravel(place, mesh_shape) for place in places]


def _lacking(
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
                held = chunk(length, old_degrees, key[: len(old)])
                wanted = chunk(length, new_degrees, key[len(old) :])
                found[key] = wanted[1] - wanted[0], _overlap(held, wanted)
            lengths = found[key]
            needed *= lengths[0]
            common *= lengths[1]
        total += needed - common
    return total


def _overlap(a: Interval, b: Interval) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))
