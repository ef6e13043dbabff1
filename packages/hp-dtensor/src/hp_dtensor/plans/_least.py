"""The least that any walk to a layout costs, told without walking."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeAlias

from .._caches import remembered
from ..layouts._intervals import Interval, chunk
from ..layouts._layout import Layout
from ..layouts._links import is_local
from ..layouts._placements import Partial, Replicate
from ._cost import AlphaBeta, CostModel
from ._pricing import sampled

Axes: TypeAlias = tuple[int, ...]
Sides: TypeAlias = tuple[int | None, ...]  # coordinates, None for any

# Where prices are told from a few ranks they may be lower than all ranks pay together.
_CERTAIN = 0.97


def least_seconds(
    dst: Layout, shape: tuple[int, ...], itemsize: int, cost: CostModel, widest: int
) -> Callable[[Layout], float]:
    """Return what gives the least time that steps from a plain layout to ``dst`` can take.

    In both, axes of one rank are replicated.

    Take the ranks apart along some axes: each side must receive what it needs and none of it holds,
    and every step that crosses pays at least the smallest price of these axes. Axes are taken in
    layers, those of the highest price alone, then the next with them; each layer pays by how much
    its price is above the next. Where ``n`` sides hold terms of a sum that ``m`` sides need, each
    element crosses ``n - 1`` times to meet and ``m - 1`` times more. A call crosses at most
    ``widest`` axes, and each axis that must be crossed is by some call. On over 64 ranks, where
    prices are told from 64, it may exceed them by the error of that. Of other models than
    `AlphaBeta` nothing is known, which gives 0.
    """
    if not isinstance(cost, AlphaBeta):
        return lambda here: 0.0
    degrees = dst.mesh_shape
    alphas, betas = (
        given if isinstance(given, tuple) else (given,) * len(degrees)
        for given in (cost.alpha, cost.beta)
    )
    axes = [axis for axis, degree in enumerate(degrees) if degree > 1]
    layers, below = [], 0.0
    for price in sorted({betas[axis] for axis in axes}):
        layer = tuple(axis for axis in axes if betas[axis] >= price)
        layers.append((layer, price - below, min(alphas[axis] for axis in layer)))
        below = price
    sampled_only = dst.size > len(sampled(degrees))
    known: dict[Layout, float] = {}

    def seconds(here: Layout) -> float:
        if is_local(here, dst, len(shape)) and _terms(here, dst, axes) == 1:
            return 0.0
        call, total = min(alphas[axis] for axis in axes), 0.0
        if widest < len(axes):
            crossed = [axis for axis in axes if _crossing(here, dst, shape, (axis,)) > 0]
            call *= max(1, -(-len(crossed) // widest))
        for layer, price, alpha in layers:
            crossing = _crossing(here, dst, shape, layer)
            if sampled_only and (len(layer) < len(axes) or _terms(here, dst, layer) > 1):
                crossing *= _CERTAIN
            if crossing > 0:
                call = max(call, alpha)
                # Steps count whole bytes, rounded down.
                total += price * max(0.0, crossing * itemsize - len(degrees))
        return call + total

    def least(here: Layout) -> float:
        if here not in known:
            known[here] = seconds(here)
        return known[here]

    return least


def _crossing(here: Layout, dst: Layout, shape: Sequence[int], axes: Axes) -> float:
    """Return how many elements a rank receives, on average, from ranks elsewhere along ``axes``."""
    degrees = here.mesh_shape
    kept = [
        axis
        for axis, (old, new) in enumerate(zip(here.placements, dst.placements, strict=True))
        if isinstance(old, Partial) and old == new
    ]
    if (terms := _terms(here, dst, axes)) > 1:
        # Each coordinate of axes that keep their terms sums a tensor of its own.
        needing = math.prod(degrees[a] for a in axes if isinstance(dst.placements[a], Replicate))
        tensors = math.prod(degrees[a] for a in kept)
        return tensors * math.prod(shape) * (terms + needing - 2) / here.size
    dims = [
        (length, here.chain(dim), here.degrees(dim), dst.chain(dim), dst.degrees(dim))
        for dim, length in enumerate(shape)
    ]
    known: list[dict[Sides, tuple[int, int]]] = [{} for _ in dims]
    places = sampled(degrees)
    total = 0
    for place in places:
        side = [at if axis in axes else None for axis, at in enumerate(place)]
        needed = common = 1
        for (length, old, old_degrees, new, new_degrees), found in zip(dims, known, strict=True):
            key = tuple([side[axis] for axis in (*old, *new)])
            if key not in found:
                held = _covered(length, old_degrees, key[: len(old)])
                wanted = _covered(length, new_degrees, key[len(old) :])
                found[key] = sum(hi - lo for lo, hi in wanted), _overlap(held, wanted)
            needed *= found[key][0]
            common *= found[key][1]
        total += needed - common
    # All ranks of one side are counted, but together they need to receive it once.
    together = math.prod(n for a, n in enumerate(degrees) if a not in axes and a not in kept)
    return total / len(places) / together


def _terms(here: Layout, dst: Layout, axes: Sequence[int]) -> int:
    """Return over how many coordinates of ``axes`` a sum is still to be taken."""
    return math.prod(
        here.mesh_shape[axis]
        for axis in axes
        if isinstance(here.placements[axis], Partial)
        and here.placements[axis] != dst.placements[axis]
    )


@remembered(4096)
def _covered(length: int, degrees: Axes, index: Sides) -> tuple[Interval, ...]:
    """Return the ranges of a dim that the chunks of an index cover, of all where it has None."""
    while index and index[-1] is None:
        degrees, index = degrees[:-1], index[:-1]
    choices = [
        range(degree) if at is None else (at,) for degree, at in zip(degrees, index, strict=True)
    ]
    return tuple(sorted(chunk(length, degrees, each) for each in product(*choices)))


def _overlap(a: Sequence[Interval], b: Sequence[Interval]) -> int:
    return sum(max(0, min(hi, stop) - max(lo, start)) for lo, hi in a for start, stop in b)
