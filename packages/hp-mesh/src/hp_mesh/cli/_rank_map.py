"""Which rank sits where, as the table and the picture both need it."""

from collections.abc import Mapping
from dataclasses import dataclass

from .._dims import ParallelDims
from .._layout import RankLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMap:
    """Nodes, ranks and their coordinates, with the groups of one ``axis`` numbered.

    ``nesting`` are the axes with several ranks, outermost first; ``axes`` has a folded ep too,
    which has no place of its own among them. ``group_of`` gives the number of each rank's group,
    ``groups`` the ranks of each number. Without ``ranks_per_node`` all ranks share one box.
    """

    dims: ParallelDims
    layout: RankLayout
    ranks_per_node: int | None
    axis: str
    nesting: tuple[str, ...]
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    group_of: Mapping[int, int]

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.layout.world_size

    @property
    def width(self) -> int:
        """Return the ranks of one box: a node, or all where the nodes are not known."""
        return self.ranks_per_node or self.world

    @property
    def nodes(self) -> int:
        """Return the number of boxes, the last one perhaps not full."""
        return -(-self.world // self.width)

    @property
    def place(self) -> str:
        """Return in one line where the ranks are and which axes nest how."""
        ranks = f"{self.world} rank{'s' * (self.world != 1)}"
        nodes = f" on {self.nodes} node{'s' * (self.nodes != 1)} of {self.ranks_per_node}"
        if self.ranks_per_node is None:
            nodes = ", nodes not known: give --ranks-per-node"
        nesting = f"; outermost first: {' > '.join(self.nesting)}" if self.nesting else ""
        return f"{ranks}{nodes}{nesting}"

    def families(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of axes and aliases with several ranks, equal groups together.

        Groups of one name are shifted copies of each other, so that rank 0's tells them apart.
        """
        found: dict[tuple[int, ...], list[str]] = {}
        for name in (*self.axes, *self.layout.names):
            group = self.layout.group(name, 0)
            if len(group) > 1 and name not in found.setdefault(group, []):
                found[group].append(name)
        return tuple(map(tuple, found.values()))

    def ranks_of(self, node: int) -> range:
        """Return the ranks of one node."""
        first = node * self.width
        return range(first, min(first + self.width, self.world))

    def crosses_nodes(self, name: str) -> bool | None:
        """Return whether an axis or alias leaves a node, None where the nodes are not known."""
        node = self.ranks_per_node
        return None if node is None else self.layout.crosses_nodes(name, node)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on each of ``axes``."""
        return {axis: self.layout.coordinate(axis, rank) for axis in self.axes}


def map_ranks(dims: ParallelDims, ranks_per_node: int | None, axis: str | None) -> RankMap:
    """Return the map of resolved degrees; ``axis`` is by default the innermost one.

    Raises `LayoutError` for an axis that the layout does not have.
    """
    layout = dims.layout()
    folded = dims.ep_mode == "folded"
    names = [name for name in dims.order if not (folded and name == "ep")]
    nesting = tuple(name for name in names if layout.size(name) > 1)
    chosen = axis or (nesting or names)[-1]
    groups = tuple(layout.groups(chosen))
    return RankMap(
        dims=dims,
        layout=layout,
        ranks_per_node=ranks_per_node,
        axis=chosen,
        nesting=nesting,
        axes=(*nesting, "ep") if folded and layout.size("ep") > 1 else nesting,
        groups=groups,
        group_of={rank: number for number, group in enumerate(groups) for rank in group},
    )
