"""Seconds of collectives: latency and bandwidth of the links that a group's ranks share."""

from ._cluster import Cluster
from ._constants import LINK_EFFICIENCY
from ._point import Group


class Links:
    """The links of a cluster, as groups of ranks see them.

    Rings cross every node once, so that the cards of all members in a node carry them together
    (Thakur et al., Optimization of Collective Communication Operations in MPICH, for the
    ``latency + bytes / bandwidth`` form). All sizes are bytes.
    """

    __slots__ = ("_fast", "_node", "_slow")

    def __init__(self, cluster: Cluster) -> None:
        self._node = cluster.ranks_per_node
        self._fast = cluster.fast.bandwidth * LINK_EFFICIENCY, cluster.fast.latency
        self._slow = cluster.slow.bandwidth * LINK_EFFICIENCY, cluster.slow.latency

    def members(self, group: Group) -> int:
        """Return how many ranks of a group share a node."""
        return max(1, min(group.size, self._node // group.stride))

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
