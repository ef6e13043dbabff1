"""A placement for a load: replicas for hot experts, then even ranks."""

import heapq
from collections import Counter
from collections.abc import Sequence

from .._errors import ExpertConfigError
from .._sizes import Listed, as_loads, check_sizes, is_count
from ._nearness import near_placement
from ._placement import Placement
from ._rebalance import rebalance

NEAR = 1.05  # this much less even is worth not moving everything


def plan_placement(
    load: Sequence[float] | Listed,
    num_ranks: int,
    *,
    num_replicas: int = 0,
    node_size: int | None = None,
    near: Placement | None = None,
) -> Placement:
    """Return a placement of ``len(load)`` experts whose ranks have about the same load.

    ``load`` are numbers, or a tensor of them, which is read once.

    ``num_replicas`` slots beyond one per expert go, one after the other, to the expert with the
    most load per replica. Then the heaviest first, each goes to the least loaded rank with room
    (longest processing time first, Graham 1969, section 5); with ``node_size`` ranks per node,
    first to nodes and then inside them.

    ``near`` is the placement of today: then only as many experts change places with others as it
    takes to be within `NEAR` of that plan, or if that does not get there, ranks of that plan are
    numbered so that many experts stay.

    `ExpertConfigError` where slots do not divide by ranks, ranks by nodes, for more replicas than
    ranks can hold, and for loads that are negative or not finite.
    """
    load = as_loads(load)
    _check(len(load), num_ranks, num_replicas, node_size)
    copies = _copies(load, num_replicas, num_ranks)
    items = sorted(
        (e for e, n in enumerate(copies) for _ in range(n)), key=lambda e: (-load[e] / copies[e], e)
    )
    weight = [x / n for x, n in zip(load, copies, strict=True)]
    node_size = node_size or 1
    nodes = num_ranks // node_size
    ranks = [
        sorted(rank)
        for node in _pack(items, weight, nodes, node_size)
        for rank in _pack(sorted(node, key=lambda e: (-weight[e], e)), weight, node_size, 1)
    ]
    if near is None:
        return _placed(ranks, len(load))
    fresh = _placed(near_placement(ranks, near, node_size), len(load))
    today = near.num_experts, len(near.experts), near.num_ranks
    if today != (len(load), len(fresh.experts), num_ranks):
        return fresh
    enough = NEAR * fresh.imbalance(load)
    if near.imbalance(load) <= enough:
        return near
    changed = _placed(rebalance(load, copies, near), len(load))
    return changed if changed.imbalance(load) <= enough else fresh


def _placed(ranks: Sequence[Sequence[int]], num_experts: int) -> Placement:
    experts = tuple(e for rank in ranks for e in rank)
    return Placement(num_ranks=len(ranks), num_experts=num_experts, experts=experts)


def _check(num_experts: int, num_ranks: int, num_replicas: int, node_size: int | None) -> None:
    check_sizes({"num_ranks": num_ranks})
    most = num_experts * (num_ranks - 1)
    if not is_count(num_replicas, 0, most) or (num_experts + num_replicas) % num_ranks:
        least = -num_experts % num_ranks
        legal = list(range(least, most + 1, num_ranks))[:4]
        raise ExpertConfigError(
            f"num_replicas={num_replicas!r} with {num_experts} experts does not fill the slots of "
            f"{num_ranks} ranks evenly; use {', '.join(map(str, legal))} or more in such steps, "
            f"at most {most}"
        )
    if node_size is not None and (not is_count(node_size, 1) or num_ranks % node_size):
        raise ExpertConfigError(f"node_size={node_size!r} must divide num_ranks={num_ranks}")


def _copies(load: Sequence[float], num_replicas: int, most: int) -> list[int]:
    """Return how many slots each expert gets."""
    copies = [1] * len(load)
    heap = [(-x, e) for e, x in enumerate(load)] if most > 1 else []
    heapq.heapify(heap)
    for _ in range(num_replicas):
        _, e = heapq.heappop(heap)
        copies[e] += 1
        if copies[e] < most:
            heapq.heappush(heap, (-load[e] / copies[e], e))
    return copies


def _pack(
    items: Sequence[int], weight: Sequence[float], num_bins: int, most_copies: int
) -> list[list[int]]:
    """Return equally many ``items`` in each bin, heaviest first to the bin with the least weight.

    A bin takes an item ``most_copies`` times at most.
    """
    room = len(items) // num_bins
    bins: list[Counter[int]] = [Counter() for _ in range(num_bins)]
    loads = [0.0] * num_bins
    sizes = [0] * num_bins
    for item in items:
        free = [b for b in range(num_bins) if sizes[b] < room]
        legal = [b for b in free if bins[b][item] < most_copies]
        if legal:
            target = min(legal, key=lambda b: (loads[b], sizes[b], b))
        else:
            # Free bins are full of this item: one that is not makes room by giving another away.
            free_bin = free[0]
            target, given = _exchange(bins, item, free_bin, most_copies, weight)
            bins[target][given] -= 1
            bins[free_bin][given] += 1
            loads[target] -= weight[given]
            loads[free_bin] += weight[given]
            sizes[target] -= 1
            sizes[free_bin] += 1
        bins[target][item] += 1
        loads[target] += weight[item]
        sizes[target] += 1
    return [list(b.elements()) for b in bins]


def _exchange(
    bins: list[Counter[int]], item: int, free: int, most_copies: int, weight: Sequence[float]
) -> tuple[int, int]:
    """Return a bin that can take ``item`` once it gives the other item to the bin ``free``."""
    pairs = (
        (b, other)
        for b, held in enumerate(bins)
        if held[item] < most_copies
        for other in held.elements()
        if other != item and bins[free][other] < most_copies
    )
    return min(pairs, key=lambda pair: (abs(weight[pair[1]] - weight[item]), pair))
