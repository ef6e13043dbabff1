"""Where experts live: placements for a load, what a load says, and the way from one to another.

Pure: needs no torch and communicates nothing.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .._errors import ExpertConfigError
from .._sizes import Listed, as_loads, check_sizes, is_count, is_factor

NEAR = 1.05  # this much less even is worth not moving everything
EVEN = 1.02  # a largest load within this of the mean needs no more swaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Assigns experts to ranks.

    Each rank has the same number of slots, and each slot holds one expert. Every expert has at
    least one slot. If an expert has several slots, these copies are called replicas; they are on
    different ranks.

    Args:
        num_ranks: Number of ranks that split the experts.
        num_experts: Number of experts.
        experts: Expert of each slot, rank by rank: the slots of rank 0 are first.

    Raises:
        ExpertConfigError: A number is not a positive int, ``experts`` is not a tuple of expert ids,
            the number of slots is not divisible by ``num_ranks``, an expert has no slot, or a rank
            has two replicas of an expert.

    Examples:
        >>> Placement.contiguous(num_experts=4, num_ranks=2).experts
        (0, 1, 2, 3)
        >>> replicated = Placement(num_ranks=2, num_experts=3, experts=(0, 1, 0, 2))
        >>> replicated.imbalance(load=[4.0, 1.0, 1.0])
        1.0
    """

    num_ranks: int
    num_experts: int
    experts: tuple[int, ...]

    def __post_init__(self) -> None:
        check_sizes({"num_experts": self.num_experts, "num_ranks": self.num_ranks})
        if not isinstance(self.experts, tuple):
            raise ExpertConfigError(
                f"experts={self.experts!r} must be a tuple of integers, so that placements compare"
            )
        if len(self.experts) % self.num_ranks:
            raise ExpertConfigError(
                f"{len(self.experts)} slots on {self.num_ranks} ranks; every rank must have as many"
            )
        if not all(is_count(expert, 0) for expert in self.experts):
            raise ExpertConfigError(
                f"experts {list(self.experts)} must be integers from 0 to {self.num_experts - 1}"
            )
        if set(self.experts) != set(range(self.num_experts)):
            wrong = sorted(set(self.experts) ^ set(range(self.num_experts)))
            raise ExpertConfigError(
                f"experts {wrong} are missing or unknown; place each of 0 .. "
                f"{self.num_experts - 1} at least once"
            )
        for rank in range(self.num_ranks):
            here = self.on_rank(rank)
            if len(set(here)) < len(here):
                raise ExpertConfigError(
                    f"rank {rank} holds experts {list(here)}; replicas must be on different ranks"
                )

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> "Placement":
        """Return the placement that gives each rank an equal block of consecutive experts.

        Args:
            num_experts: Number of experts.
            num_ranks: Number of ranks.

        Returns:
            A placement without replicas.

        Raises:
            ExpertConfigError: A number is not a positive int, or ``num_experts`` is not divisible
                by ``num_ranks``.
        """
        check_sizes({"num_experts": num_experts, "num_ranks": num_ranks})
        return cls(num_ranks=num_ranks, num_experts=num_experts, experts=tuple(range(num_experts)))

    @property
    def slots_per_rank(self) -> int:
        """Number of slots of each rank."""
        return len(self.experts) // self.num_ranks

    @property
    def slots_of(self) -> tuple[tuple[int, ...], ...]:
        """Slots of each expert: one tuple of indices into ``experts`` per expert, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            found[expert].append(slot)
        return tuple(map(tuple, found))

    def on_rank(self, rank: int) -> tuple[int, ...]:
        """Return the experts of one rank.

        Args:
            rank: Rank from 0 to ``num_ranks - 1``.

        Returns:
            The expert of each slot of the rank.

        Raises:
            ExpertConfigError: ``rank`` is not an int from 0 to ``num_ranks - 1``.
        """
        if not is_count(rank, 0, self.num_ranks - 1):
            raise ExpertConfigError(f"rank={rank!r} is not one of 0 .. {self.num_ranks - 1}")
        size = self.slots_per_rank
        return self.experts[rank * size : (rank + 1) * size]

    def rank_load(self, load: Sequence[float]) -> tuple[float, ...]:
        """Return the load of each rank. Replicas share the load of their expert equally.

        Args:
            load: Load of each expert, such as its number of tokens, ``[num_experts]``.

        Returns:
            The load of each rank, ``[num_ranks]``.

        Raises:
            ExpertConfigError: ``load`` does not have ``num_experts`` numbers.
        """
        if len(load) != self.num_experts:
            raise ExpertConfigError(
                f"a load of {len(load)} numbers for num_experts={self.num_experts}; give one each"
            )
        share = [x / len(slots) for x, slots in zip(load, self.slots_of, strict=True)]
        return tuple(sum(share[e] for e in self.on_rank(r)) for r in range(self.num_ranks))

    def imbalance(self, load: Sequence[float]) -> float:
        """Return the largest load of a rank divided by the mean load of ranks.

        Args:
            load: Load of each expert, such as its number of tokens, ``[num_experts]``.

        Returns:
            A number of at least 1. It is 1.0 if all ranks have equal loads, or if all loads are 0.

        Raises:
            ExpertConfigError: ``load`` does not have ``num_experts`` numbers.
        """
        loads = self.rank_load(load)
        total = sum(loads)
        return max(loads) * len(loads) / total if total else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStats:
    """Statistics of the load of one step under a placement.

    Args:
        expert_load: Number of tokens that chose each expert, on all ranks. A tensor is copied to
            the host once.
        placement: Placement of the experts.

    Raises:
        ExpertConfigError: A load is negative or not finite, or ``expert_load`` does not have one
            number per expert of the placement.

    Examples:
        >>> stats = LoadStats(expert_load=(6, 2, 2, 2), placement=Placement.contiguous(4, 2))
        >>> stats.rank_load
        (8.0, 4.0)
        >>> round(stats.rank_imbalance, 2)
        1.33
    """

    expert_load: tuple[float, ...]
    placement: Placement

    def __post_init__(self) -> None:
        object.__setattr__(self, "expert_load", as_loads(self.expert_load))
        self.placement.rank_load(self.expert_load)

    @property
    def rank_load(self) -> tuple[float, ...]:
        """Load of each rank, ``[num_ranks]``. Replicas share the load of their expert equally."""
        return self.placement.rank_load(self.expert_load)

    @property
    def rank_imbalance(self) -> float:
        """Largest load of a rank divided by the mean load of ranks; 1 if all loads are 0."""
        return self.placement.imbalance(self.expert_load)

    @property
    def expert_imbalance(self) -> float:
        """Largest load of an expert divided by the mean load of experts; 1 if all loads are 0."""
        total = sum(self.expert_load)
        return max(self.expert_load) * len(self.expert_load) / total if total else 1.0

    @property
    def idle_experts(self) -> int:
        """Number of experts that no token chose."""
        return sum(x == 0 for x in self.expert_load)

    @property
    def entropy(self) -> float:
        """Entropy of the expert loads divided by its maximum, from 0 to 1.

        1 if all experts have equal loads, 0 if one expert has the whole load.
        """
        total = sum(self.expert_load)
        if not total or len(self.expert_load) == 1:
            return 1.0
        shares = [x / total for x in self.expert_load if x]
        return -sum(p * math.log(p) for p in shares) / math.log(len(self.expert_load))


def smooth_load(
    before: Sequence[float] | None, load: Sequence[float] | Listed, decay: float
) -> tuple[float, ...]:
    """Return the exponential moving average of loads.

    Args:
        before: Average so far; None for the first load.
        load: New load of each expert, as numbers or as a tensor.
        decay: Weight of ``before``, at least 0 and below 1.

    Returns:
        ``decay * before + (1 - decay) * load``; ``load`` if ``before`` is None.

    Raises:
        ExpertConfigError: ``decay`` is out of range, a load is invalid, or lengths differ.

    Examples:
        >>> smooth_load([4.0, 0.0], [2.0, 2.0], decay=0.5)
        (3.0, 1.0)
    """
    if not is_factor(decay) or decay >= 1:
        raise ExpertConfigError(f"decay={decay!r} must be at least 0 and below 1")
    load = as_loads(load)
    if before is None:
        return load
    if len(before) != len(load):
        raise ExpertConfigError(f"loads of {len(before)} and {len(load)} experts; give one length")
    return tuple(decay * a + (1 - decay) * b for a, b in zip(before, load, strict=True))


def plan_placement(
    load: Sequence[float] | Listed,
    num_ranks: int,
    *,
    num_replicas: int = 0,
    node_size: int | None = None,
    near: Placement | None = None,
) -> Placement:
    """Return a placement in which all ranks have about the same load.

    There is one copy of each expert, and ``num_replicas`` more. Each of these goes to the expert
    with the most load per copy so far. Then all copies are assigned to ranks in order of decreasing
    load, each to the rank with the least load among those with a free slot (longest processing time
    first, Graham 1969, section 5). With ``node_size``, copies are first assigned to nodes and then
    to the ranks of a node. The function is pure and communicates nothing.

    Args:
        load: Load of each expert, as numbers or as a tensor, which is copied to the host once.
        num_ranks: Number of ranks that split the experts.
        num_replicas: Number of slots in addition to one per expert. Defaults to 0.
        node_size: Number of ranks per node. Defaults to None: nodes are not considered.
        near: Current placement. If given, few experts move: the result is ``near``, or ``near``
            after some swaps, if its imbalance is at most 5 % above the imbalance of a
            new plan. Otherwise
            the result is the new plan, with its ranks numbered so that many experts stay on their
            rank. Defaults to None: a new plan.

    Returns:
        A placement of ``len(load)`` experts.

    Raises:
        ExpertConfigError: The number of slots is not divisible by ``num_ranks``, or ``num_ranks``
            by ``node_size``; ``num_replicas`` is too large; a load is negative or not finite; or
            ``near`` has another number of experts, slots or ranks.

    Examples:
        >>> placement = plan_placement([6.0, 2.0, 2.0, 2.0], num_ranks=2, num_replicas=2)
        >>> placement.experts
        (0, 1, 2, 0, 1, 3)
        >>> placement.imbalance([6.0, 2.0, 2.0, 2.0])
        1.0
    """
    load = as_loads(load)
    _check(len(load), num_ranks, num_replicas, node_size)
    if near is not None:
        _check_near(near, len(load), num_ranks, num_replicas)
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
    fresh = _placed(_near(ranks, near, node_size), len(load))
    enough = NEAR * fresh.imbalance(load)
    if near.imbalance(load) <= enough:
        return near
    changed = _placed(_rebalance(load, copies, near), len(load))
    return changed if changed.imbalance(load) <= enough else fresh


def _check_near(near: object, num_experts: int, num_ranks: int, num_replicas: int) -> None:
    if not isinstance(near, Placement):
        raise ExpertConfigError(f"near must be a Placement, got {near!r}")
    today = near.num_experts, len(near.experts), near.num_ranks
    if today != (num_experts, num_experts + num_replicas, num_ranks):
        raise ExpertConfigError(
            f"near has {today[0]} experts in {today[1]} slots on {today[2]} ranks; these loads and "
            f"numbers say {num_experts} in {num_experts + num_replicas} slots on {num_ranks}: "
            "give the placement of today of the same sizes, or no near for a fresh one"
        )


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


def _near(ranks: Sequence[Sequence[int]], near: Placement, node_size: int) -> list[list[int]]:
    """Return ``ranks``, each the experts of one rank, in an order and with slots like ``near``'s.

    Nodes of ``node_size`` ranks stay together. What overlaps most is matched first, which is not
    always the best matching but within half of it.
    """
    old = [near.on_rank(r) for r in range(near.num_ranks)]
    starts = range(0, len(ranks), node_size)
    new_nodes = [ranks[i : i + node_size] for i in starts]
    old_nodes = [old[i : i + node_size] for i in starts]
    nodes = _match([_flat(n) for n in new_nodes], [_flat(n) for n in old_nodes])
    result: list[list[int]] = []
    for position, node in enumerate(nodes):
        order = _match(new_nodes[node], old_nodes[position])
        for rank, experts in zip(order, old_nodes[position], strict=True):
            result.append(_in_place(new_nodes[node][rank], experts))
    return result


def _flat(node: Sequence[Sequence[int]]) -> list[int]:
    return [e for rank in node for e in rank]


def _match(new: Sequence[Sequence[int]], old: Sequence[Sequence[int]]) -> list[int]:
    """Return which of ``new`` takes the place of each of ``old``, largest overlaps first."""
    overlaps = sorted(
        (-len(set(a) & set(b)), i, j) for i, a in enumerate(new) for j, b in enumerate(old)
    )
    chosen: dict[int, int] = {}
    taken: set[int] = set()
    for _, i, j in overlaps:
        if j not in chosen and i not in taken:
            chosen[j] = i
            taken.add(i)
    return [chosen[j] for j in range(len(old))]


def _in_place(experts: Sequence[int], old: Sequence[int]) -> list[int]:
    """Return ``experts`` so that those that were here before have their old slots."""
    arriving = iter(sorted(set(experts) - set(old)))
    return [e if e in experts else next(arriving) for e in old]


def _rebalance(load: Sequence[float], copies: Sequence[int], near: Placement) -> list[list[int]]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """The way from one placement to another, made by `plan_migration`.

    Attributes:
        old: Current placement.
        new: Next placement.
        sources: Old slot that each new slot gets its values from.
    """

    old: Placement
    new: Placement
    sources: tuple[int, ...]

    @property
    def moved(self) -> int:
        """Number of slots that get their values from another rank."""
        return len(self._travels())

    def bytes(self, expert_bytes: int) -> int:
        """Return the number of bytes that travel between ranks.

        Args:
            expert_bytes: Bytes of one expert, with its gradients and optimizer state.

        Returns:
            Bytes of all experts that change rank.
        """
        return self.moved * expert_bytes

    def sent(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the slots, counted on ``rank``, whose values go to each rank, in its order."""
        parts: list[list[int]] = [[] for _ in range(self.new.num_ranks)]
        for (to, _), (source, row) in self._travels():
            if source == rank:
                parts[to].append(row)
        return tuple(map(tuple, parts))

    def received(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the slots, counted on ``rank``, whose values come from each rank, in its order."""
        parts: list[list[int]] = [[] for _ in range(self.new.num_ranks)]
        for (to, row), (source, _) in self._travels():
            if to == rank:
                parts[source].append(row)
        return tuple(map(tuple, parts))

    def kept(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return ``(slot, old slot)`` pairs, counted on ``rank``, of values that stay there."""
        return tuple(
            (row, from_row)
            for (to, row), (source, from_row) in self._pairs()
            if to == source == rank
        )

    def _travels(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        return [(target, source) for target, source in self._pairs() if target[0] != source[0]]

    def _pairs(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return each new slot and the old one it takes from, as rank and slot on that rank."""
        new, old = self.new.slots_per_rank, self.old.slots_per_rank
        return [
            (divmod(slot, new), divmod(source, old)) for slot, source in enumerate(self.sources)
        ]


def plan_migration(old: Placement, new: Placement) -> Migration:
    """Plan which rank sends which expert to change from one placement to another.

    If a rank holds an expert in both placements, it receives nothing for this expert. Otherwise,
    among the ranks that hold the expert, the one that has sent the fewest experts so far sends it.
    The function is pure; `migrate_experts` executes the plan.

    Args:
        old: Current placement.
        new: Next placement, with the same number of ranks and experts.

    Returns:
        The plan. For each slot of ``new``, ``sources`` has the slot of ``old`` that its values come
        from. ``moved`` is the number of slots whose values come from another rank.

    Raises:
        ExpertConfigError: The placements have different numbers of ranks or experts.

    Examples:
        >>> old = Placement.contiguous(num_experts=4, num_ranks=2)
        >>> new = Placement(num_ranks=2, num_experts=4, experts=(0, 2, 1, 3))
        >>> plan_migration(old, new).moved
        2
    """
    a, b = (dict(num_ranks=p.num_ranks, num_experts=p.num_experts) for p in (old, new))
    if a != b:
        raise ExpertConfigError(
            f"experts cannot move from a placement with {a} to one with {b}; they must agree"
        )
    size, new_size = old.slots_per_rank, new.slots_per_rank
    slots_of = old.slots_of
    sent = [0] * old.num_ranks
    sources = []
    for slot, expert in enumerate(new.experts):
        held = slots_of[expert]
        here = [t for t in held if t // size == slot // new_size]
        source = here[0] if here else min(held, key=lambda t: (sent[t // size], t))
        if not here:
            sent[source // size] += 1
        sources.append(source)
    return Migration(old=old, new=new, sources=tuple(sources))
