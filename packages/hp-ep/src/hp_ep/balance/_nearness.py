"""Names for ranks that let experts stay where they are."""

from collections.abc import Sequence

from ._placement import Placement


def near_placement(
    ranks: Sequence[Sequence[int]], near: Placement, node_size: int
) -> list[list[int]]:
    """Return ``ranks``, each the experts of one rank, in an order and with slots like ``near``'s.

    Nodes of ``node_size`` ranks stay together. What overlaps most is matched first, which is not
    always the best matching but within half of it.
    """
    if near.num_ranks != len(ranks) or near.slots_per_rank != len(ranks[0]):
        return [list(rank) for rank in ranks]
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
