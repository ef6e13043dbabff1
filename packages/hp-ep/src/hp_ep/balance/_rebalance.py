"""Today's placement, changed as little as evens the load: few experts have to move."""

from collections.abc import Sequence

from ._placement import Placement

EVEN = 1.02  # a largest load within this of the mean needs no more swaps


def rebalance(load: Sequence[float], copies: Sequence[int], near: Placement) -> list[list[int]]:
    """Return the experts of each rank: those of ``near``, but ``copies[e]`` slots of expert ``e``.

    Slots of replicas that are given up go to new ones, then experts of the heaviest rank change
    places with lighter ones elsewhere as long as that lowers the larger of the two loads.
    """
    ranks = [list(near.on_rank(r)) for r in range(near.num_ranks)]
    weight = [x / n for x, n in zip(load, copies, strict=True)]
    _change_copies(ranks, copies, weight)
    loads = [sum(weight[e] for e in rank) for rank in ranks]
    mean = sum(loads) / len(loads)
    while max(loads) > EVEN * mean:
        heavy = max(range(len(ranks)), key=lambda r: loads[r])
        best = min(_swaps(ranks, loads, weight, heavy), default=None)
        if best is None or best[0] >= loads[heavy] * (1 - 1e-9):
            break
        _, other, i, j = best
        change = weight[ranks[heavy][i]] - weight[ranks[other][j]]
        ranks[heavy][i], ranks[other][j] = ranks[other][j], ranks[heavy][i]
        loads[heavy] -= change
        loads[other] += change
    return ranks


def _change_copies(ranks: list[list[int]], copies: Sequence[int], weight: Sequence[float]) -> None:
    """Give slots of experts that have too many to experts that have too few."""

    def load(rank: int) -> float:
        return sum(weight[e] for e in ranks[rank])

    have = [0] * len(copies)
    for held in ranks:
        for e in held:
            have[e] += 1
    wanting = sorted(
        (e for e, n in enumerate(copies) for _ in range(n - have[e])), key=lambda e: -weight[e]
    )
    for new in wanting:
        old_slots = [
            (load(r) - weight[e], r, i)
            for r, held in enumerate(ranks)
            if new not in held
            for i, e in enumerate(held)
            if have[e] > copies[e]
        ]
        if old_slots:
            _, rank, slot = min(old_slots)
            have[ranks[rank][slot]] -= 1
            ranks[rank][slot] = new
        else:  # every free slot is beside this expert: one that is not gives it its place
            _, rank, slot, free, i = min(
                (load(r), r, s, f, i)
                for r, held in enumerate(ranks)
                if new not in held
                for s, given in enumerate(held)
                for f, other in enumerate(ranks)
                if given not in other
                for i, e in enumerate(other)
                if have[e] > copies[e]
            )
            have[ranks[free][i]] -= 1
            ranks[free][i], ranks[rank][slot] = ranks[rank][slot], new
        have[new] += 1


def _swaps(
    ranks: list[list[int]], loads: list[float], weight: Sequence[float], heavy: int
) -> list[tuple[float, int, int, int]]:
    """Return swaps with the heaviest rank: the larger load after it, the rank, both slots."""
    found = []
    mine = set(ranks[heavy])
    for other, held in enumerate(ranks):
        if other == heavy or loads[other] >= loads[heavy]:
            continue
        theirs = set(held)
        for i, a in enumerate(ranks[heavy]):
            if a in theirs:
                continue
            for j, b in enumerate(held):
                change = weight[a] - weight[b]
                if change > 0 and b not in mine:
                    after = max(loads[heavy] - change, loads[other] + change)
                    found.append((after, other, i, j))
    return found
