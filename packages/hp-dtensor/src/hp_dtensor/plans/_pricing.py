"""What steps cost together, told from a few ranks, the same on all."""

import math
from collections.abc import Sequence

from .._caches import remembered
from ..layouts._intervals import Interval, chunk, unravel
from ..layouts._layout import Layout
from ._cost import CostModel
from ._steps import Step

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
        (length, src.chain(dim), src.degrees(dim), dst.chain(dim), dst.degrees(dim))
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
