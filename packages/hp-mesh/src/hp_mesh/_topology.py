"""Nodes of a cluster, and advice about axes that cross nodes."""

from collections.abc import Iterator
from dataclasses import dataclass

from ._errors import Explanation, Verdict, Violation, as_degree, divisors, refusal, show
from ._layout import RankLayout

AXES = ("pp", "dp_replicate", "dp_shard", "ep", "etp", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Number of ranks per node. Node ``i`` starts at rank ``i * ranks_per_node``.

    Args:
        ranks_per_node: Number of ranks that share the fast links of one node.

    Raises:
        ParallelDimsError: ``ranks_per_node`` is not a positive integer.

    Examples:
        >>> dims = ParallelDims(tp=8, world_size=16)
        >>> [str(advice) for advice in dims.check({}, topology=Topology(ranks_per_node=4))]
        ['dp_shard=2 crosses nodes of 4 ranks', 'tp=8 crosses nodes of 4 ranks']
    """

    ranks_per_node: int

    def __post_init__(self) -> None:
        number = as_degree("ranks_per_node", self.ranks_per_node, inferable=False, optional=False)
        object.__setattr__(self, "ranks_per_node", number)


def node_size(topology: object) -> int:
    """Return the number of ranks per node.

    Raises:
        ParallelDimsError: ``topology`` is not a `Topology`.
    """
    if isinstance(topology, Topology):
        return topology.ranks_per_node
    reason = f"topology={show(topology)} is not a Topology; use Topology(ranks_per_node=8)"
    raise refusal("topology", reason, {"topology": topology})


def topology_violations(layout: RankLayout, topology: Topology) -> Iterator[Violation]:
    """Yield an error if the ranks do not fill the nodes, else advice for each axis across nodes.

    Raises:
        ParallelDimsError: ``topology`` is not a `Topology`.
    """
    world, node = layout.world_size, node_size(topology)
    if world > node and world % node:
        yield Violation(
            rule="topology",
            values={"world_size": world, "ranks_per_node": node},
            reason=f"ranks_per_node={node} does not divide world_size={world}",
            legal={"ranks_per_node": divisors(world)},
        )
        return
    for axis in AXES:
        degree = layout.size(axis)
        if degree > 1 and layout.crosses_nodes(axis, node):
            yield Violation(
                rule=f"node-{axis.replace('_', '-')}",
                values={axis: degree, "ranks_per_node": node},
                reason=f"{axis}={degree} crosses nodes of {node} ranks",
                level="advice",
            )


def explain_topology(layout: RankLayout, topology: Topology) -> tuple[Explanation, ...]:
    """Return one explanation for each axis: whether its groups are inside one node."""
    node = node_size(topology)
    found = {next(iter(v.values)): v for v in topology_violations(layout, topology)}
    is_uneven = "world_size" in found
    sentence = "Groups inside one node use its fast links only."
    explanations = []
    for axis in ("world_size", *AXES):
        size = layout.world_size if axis == "world_size" else layout.size(axis)
        violation = found.get(axis)
        if violation:
            text = str(violation)
        elif axis != "world_size" and is_uneven:
            text = f"{axis}={size}, but the ranks do not fill nodes of {node} ranks"
        elif axis != "world_size":
            text = f"{axis}={size} stays inside nodes of {node} ranks"
        elif size < node:
            text = f"world_size={size} fits one node of {node} ranks"
        else:
            text = f"world_size={size} fills nodes of {node} ranks"
        verdict: Verdict = "idle" if is_uneven or size == 1 else "holds"
        explanations.append(
            Explanation(
                rule="topology" if axis == "world_size" else f"node-{axis.replace('_', '-')}",
                sentence=sentence,
                values={axis: size, "ranks_per_node": node},
                verdict=violation.level if violation else verdict,
                text=text,
            )
        )
    return tuple(explanations)
