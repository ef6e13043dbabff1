"""Which nodes the ranks are on, as every command understands it."""

from itertools import islice

from .._errors import raise_errors
from .._layout import RankLayout
from .._topology import Topology, topology_violations

NODE = 8  # ranks of a usual one


def choose_nodes(world: int, ranks_per_node: int | None) -> Topology | None:
    """Return the nodes; usual ones that the world would not fill are not assumed."""
    if ranks_per_node is None and world > NODE and world % NODE:
        return None
    return Topology(ranks_per_node=ranks_per_node or NODE)


def check_nodes(layout: RankLayout, topology: Topology | None) -> None:
    """Raise `ParallelDimsError` for nodes that the ranks do not fill."""
    if topology is not None:
        # What is wrong comes first; advice on each axis takes time and is not asked for here.
        raise_errors(islice(topology_violations(layout, topology), 1))
