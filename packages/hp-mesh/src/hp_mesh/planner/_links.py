"""Seconds of collectives: latency and bandwidth of the links that a group's ranks share."""

from collections import Counter
from math import lcm, prod

from ._cluster import Cluster
from ._constants import LINK_EFFICIENCY
from ._point import Group


class Links:
    """The links of a cluster, as groups of ranks see them.

    Rings cross every node once, so that the cards of all members in a node carry them together
    (Thakur et al., Optimization of Collective Communication Operations in MPICH, for the
    ``latency + bytes / bandwidth`` form). All sizes are bytes.
    """

    __slots__ = ("_fast", "_node", "_shared", "_slow", "_world")

    def __init__(self, cluster: Cluster) -> None:
        self._node, self._world = cluster.ranks_per_node, cluster.world_size
        self._shared: dict[Group, int] = {}
        self._fast = cluster.fast.bandwidth * LINK_EFFICIENCY, cluster.fast.latency
        self._slow = cluster.slow.bandwidth * LINK_EFFICIENCY, cluster.slow.latency

    def members(self, group: Group) -> int:
        """Return how many ranks of a group share a node, where that is fewest.

        Groups need not be aligned with nodes: the one that is cut worst counts.
        """
        if group not in self._shared:
            self._shared[group] = self._fewest(group)
        return self._shared[group]

    def _fewest(self, group: Group) -> int:
        node, shares = self._node, []
        for size, stride in group.digits:
            block = size * stride
            if stride % node == 0:
                shares.append(1)
            elif node % block == 0:
                shares.append(size)
            elif node % stride == 0 and block % node == 0:
                shares.append(node // stride)
            else:
                return self._counted(group)
        return prod(shares)

    def _counted(self, group: Group) -> int:
        """Return the same where nodes and groups are not aligned, over all that they repeat."""
        size, stride = group.digits[-1]
        ranks = range(min(self._world, lcm(size * stride, self._node)))
        counts = Counter((_first(rank, group), rank // self._node) for rank in ranks)
        return min(counts.values())

    def crosses(self, group: Group) -> bool:
        """Return whether a group's ranks are in more than one node."""
        return self.members(group) < group.size

    def gather(self, group: Group, size: float) -> float:
        """Return the seconds of an all-gather, or reduce-scatter, of ``size`` bytes in total."""
        if group.size == 1:
            return 0.0
        bandwidth, latency = self._fast
        members = self.members(group)
        hops = (group.size - 1) * latency
        if members < group.size:
            slow, slow_latency = self._slow
            bandwidth = min(bandwidth, slow * members)
            hops += group.size / members * (slow_latency - latency)
        return hops + size * (group.size - 1) / group.size / bandwidth

    def all_reduce(self, group: Group, size: float) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes on each rank."""
        return 2 * self.gather(group, size)

    def all_to_all(self, group: Group, size: float) -> float:
        """Return the seconds of an all-to-all in which every rank sends ``size`` bytes."""
        if group.size == 1:
            return 0.0
        fast, latency = self._fast
        members = self.members(group)
        inside = size * (members - 1) / group.size / fast
        if members == group.size:
            return (group.size - 1) * latency + inside
        slow, slow_latency = self._slow
        outside = size * (group.size - members) / group.size / slow
        return (group.size - members) * slow_latency + max(inside, outside)

    def send(self, group: Group, size: float) -> float:
        """Return the seconds in which a rank sends ``size`` bytes to the next of its group."""
        if group.size == 1:
            return 0.0
        bandwidth, latency = self._slow if self.crosses(group) else self._fast
        return latency + size / bandwidth


def _first(rank: int, group: Group) -> int:
    """Return the first rank of the group that a rank is in."""
    return rank - sum(rank // stride % size * stride for size, stride in group.digits)
