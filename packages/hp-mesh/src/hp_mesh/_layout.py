"""Ranks, coordinates and groups of all axes, computed from sizes and strides alone.

`view_blocks` is the one table of axes: it says which base axes each view folds and splits again.
Sizes, coordinates and groups follow from it. Nothing here communicates or needs torch.
"""

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import lcm, prod
from typing import NamedTuple, SupportsIndex, TypeAlias

from ._errors import LayoutError, join_words, show

ALIASES = {"batch": "dp", "dp_ep": "dp", "dp_cp": "loss", "ep_shard": "ep"}
Levels: TypeAlias = tuple[tuple[int, int], ...]  # pairs of size and stride


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisBlock:
    """Base axes that a view folds into one axis and splits again.

    Attributes:
        parts: Base axes. They are folded in rank order.
        axes: Axes of the view, outermost first. The sizes of all but the first are degrees; the
            first has the remaining factor of the folded size.
        outside: If True, the first part is outermost whatever the rank order.
    """

    parts: tuple[str, ...]
    axes: tuple[str, ...]
    outside: bool = False


class Folds(NamedTuple):
    """Options that decide which axes are folded (merged) into each axis of a view.

    Attributes:
        peer: The experts' axis ``ep`` is a separate axis of the world (``ep_mode="peer"``).
        over_tp: The ranks of ``tp`` split each expert.
        fsdp_folds_cp: Parameters are sharded over ``cp`` too.
        ulysses: ``cp`` is split into ``cp_outer`` and ``ulysses``.
    """

    peer: bool = False
    over_tp: bool = False
    fsdp_folds_cp: bool = True
    ulysses: bool = False

    @property
    def sharding(self) -> tuple[str, ...]:
        """Axes with different samples, without ``dp_replicate``.

        They are ``dp_shard`` and, in peer mode, ``ep``.
        """
        return ("dp_shard", "ep") if self.peer else ("dp_shard",)


def _same(name: str) -> AxisBlock:
    return AxisBlock(parts=(name,), axes=(name,))


_PP, _REPLICATE, _EP, _CP, _TP = map(_same, ("pp", "dp_replicate", "ep", "cp", "tp"))


@cache
def view_blocks(folds: Folds) -> dict[str, tuple[AxisBlock, ...]]:
    """Return the blocks of each view. An axis is looked up in the first view that has it.

    The dense view is first: ``tp`` and ``fsdp`` are then axes of one torch mesh, as FSDP with
    tensor parallelism requires. The sparse view is next, for ``efsdp`` and ``ep``.
    """
    samples = tuple(map(_same, folds.sharding))
    data = ("dp_replicate", *folds.sharding)
    views = {
        "dense": (_PP, *_dense_blocks(folds), _TP),
        "sparse": (_PP, _REPLICATE, *_expert_blocks(folds)),
        "base": (_PP, _REPLICATE, *samples, _CP, _TP),
        "data": (_PP, AxisBlock(parts=data, axes=("dp",)), _CP, _TP),
        "loss": (_PP, AxisBlock(parts=(*data, "cp"), axes=("loss",)), _TP),
        "expert": (_PP, *_replicated_expert_blocks(folds)),
    }
    if folds.ulysses:
        inner = AxisBlock(parts=("cp",), axes=("cp_outer", "ulysses"))
        views["sequence"] = (_PP, _REPLICATE, *samples, inner, _TP)
    return views


def _dense_blocks(folds: Folds) -> tuple[AxisBlock, ...]:
    if folds.fsdp_folds_cp:
        return _REPLICATE, AxisBlock(parts=(*folds.sharding, "cp"), axes=("fsdp",))
    replicate = AxisBlock(parts=("dp_replicate", "cp"), axes=("replicate",))
    return replicate, AxisBlock(parts=folds.sharding, axes=("fsdp",))


def _expert_blocks(folds: Folds) -> tuple[AxisBlock, ...]:
    if folds.peer:
        return _peer_blocks(folds, (), "efsdp")
    if not folds.over_tp:
        return (AxisBlock(parts=("dp_shard", "cp", "tp"), axes=("efsdp", "ep", "etp")),)
    # Activations are split over tp, so weights of experts must be split over the same ranks.
    return AxisBlock(parts=("dp_shard", "cp"), axes=("efsdp", "ep")), AxisBlock(
        parts=("tp",), axes=("etp",)
    )


def _replicated_expert_blocks(folds: Folds) -> tuple[AxisBlock, ...]:
    if folds.peer:
        return _peer_blocks(folds, ("dp_replicate",), "ep_replicate")
    block, *rest = _expert_blocks(folds)
    parts, axes = ("dp_replicate", *block.parts), ("ep_replicate", *block.axes[1:])
    return AxisBlock(parts=parts, axes=axes, outside=True), *rest


def _peer_blocks(folds: Folds, replicas: tuple[str, ...], name: str) -> tuple[AxisBlock, ...]:
    # If tp does not split experts, its ranks hold other experts or other shards of an expert.
    shards = ("dp_shard", "cp") if folds.over_tp else ("dp_shard", "cp", "tp")
    etp = AxisBlock(parts=("tp",) if folds.over_tp else (), axes=("etp",))
    return AxisBlock(parts=(*replicas, *shards), axes=(name,)), _EP, etp


def axis_sizes(folds: Folds, degrees: Mapping[str, int]) -> dict[str, int]:
    """Return the size of every axis of every view.

    Args:
        folds: Options of the views.
        degrees: Positive degrees; ``"ulysses"`` among them if ``folds.ulysses`` is set.
    """
    return {
        axis: prod([degrees[name] for name in parts]) // prod([degrees[name] for name in others])
        for axis, (parts, others) in _size_rules(folds).items()
    }


@cache
def _size_rules(folds: Folds) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return two lists of degrees for each axis.

    The size of the axis is the product of the first list divided by the product of the second.
    """
    rules: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for blocks in view_blocks(folds).values():
        for block in blocks:
            first, *others = block.axes
            rules.setdefault(first, (block.parts, (*others,)))
            for other in others:
                rules.setdefault(other, ((other,), ()))
    return rules


@cache
def _view_axes(folds: Folds) -> dict[str, tuple[str, ...]]:
    views = view_blocks(folds).items()
    return {name: tuple(axis for block in blocks for axis in block.axes) for name, blocks in views}


@cache
def _first_views(folds: Folds) -> dict[str, tuple[str, int]]:
    """Return the first view that has each axis, and the index of the axis in it."""
    found: dict[str, tuple[str, int]] = {}
    for view, axes in _view_axes(folds).items():
        for index, axis in enumerate(axes):
            found.setdefault(axis, (view, index))
    return found


def _aliases(folds: Folds) -> dict[str, str]:
    return {**ALIASES, "replicate": "dp_replicate"} if folds.fsdp_folds_cp else ALIASES


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One division of the world into axes.

    A position is a row-major index over the axes of the view.

    Attributes:
        name: Name of the view.
        axes: Names of the axes, outermost first.
        shape: Sizes of the axes.
        levels: (size, stride) pairs, outermost first. The position written in these sizes, times
            the strides, is the rank.
        sorted_axis: Index of the axis whose groups are sorted, because the levels alone would not
            give them in ascending order. None if there is none.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    levels: Levels
    sorted_axis: int | None = None

    def rank_at(self, position: int) -> int:
        """Return the rank at a position."""
        if self.sorted_axis is not None:
            return self.along(self.sorted_axis, position)[self.index_of(self.sorted_axis, position)]
        return self._unsorted_rank(position)

    def position_of(self, rank: int) -> int:
        """Return the position of a rank."""
        position, weights = 0, strides_of([size for size, _ in self.levels])
        for (size, stride), weight in zip(self.levels, weights, strict=True):
            position += rank // stride % size * weight
        if self.sorted_axis is None:
            return position
        moved = self.along(self.sorted_axis, position).index(rank)
        moved -= self.index_of(self.sorted_axis, position)
        return position + moved * self.stride(self.sorted_axis)

    def along(self, axis: int, position: int) -> Sequence[int]:
        """Return the ranks of all positions that differ from ``position`` only along ``axis``."""
        size, stride = self.shape[axis], self.stride(axis)
        first = position - self.index_of(axis, position) * stride
        positions = range(first, first + size * stride, stride)
        if self.in_rank_order:
            return positions
        if self.sorted_axis not in (None, axis):
            return [*map(self.rank_at, positions)]
        levels = _levels_between(self.levels, stride, size * stride)
        if levels is None:
            ranks = [*map(self._unsorted_rank, positions)]
        else:
            ranks = _expand(self._unsorted_rank(first), levels)
        return ranks if self.sorted_axis is None else sorted(ranks)

    def levels_along(self, axis: int) -> Levels | None:
        """Return the (size, stride) pairs of the groups along an axis, sorted by stride.

        Returns None if the groups do not all have the same pairs.
        """
        if self.sorted_axis not in (None, axis):
            return None
        stride = self.stride(axis)
        levels = _levels_between(self.levels, stride, self.shape[axis] * stride)
        return None if levels is None else tuple(sorted(levels, key=lambda level: level[1]))

    def ranks(self) -> Sequence[int]:
        """Return the rank at every position."""
        if self.in_rank_order:
            return range(prod(self.shape))
        ranks = _expand(0, self.levels)
        if self.sorted_axis is not None:
            size, stride = self.shape[self.sorted_axis], self.stride(self.sorted_axis)
            for block in range(0, len(ranks), size * stride):
                for first in range(block, block + stride):
                    along = slice(first, first + size * stride, stride)
                    ranks[along] = sorted(ranks[along])
        return ranks

    @property
    def in_rank_order(self) -> bool:
        """Whether every rank equals its position."""
        return len(self.levels) == 1 and self.sorted_axis is None

    def stride(self, axis: int) -> int:
        """Return the distance of two positions that are neighbours on an axis."""
        return prod(self.shape[axis + 1 :])

    def index_of(self, axis: int, position: int) -> int:
        """Return the coordinate of a position (a flat index) along one axis."""
        return position // self.stride(axis) % self.shape[axis]

    def _unsorted_rank(self, position: int) -> int:
        rank = 0
        for size, stride in reversed(self.levels):
            position, index = divmod(position, size)
            rank += index * stride
        return rank


def strides_of(sizes: Sequence[int]) -> list[int]:
    """Return the row-major strides of a shape."""
    return [prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _expand(first: int, levels: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ranks of all index combinations of some levels, row-major, from ``first``."""
    ranks = [first]
    for size, stride in levels:
        ranks = [rank + index * stride for rank in ranks for index in range(size)]
    return ranks


def _levels_between(levels: Levels, low: int, high: int) -> list[tuple[int, int]] | None:
    """Return the levels from position stride ``low`` up to ``high``.

    Returns None if a bound is inside a level and does not divide it.
    """
    between, upper = [], prod(size for size, _ in levels)
    for size, stride in levels:
        lower = upper // size
        bottom, top = max(lower, low), min(upper, high)
        if bottom < top:
            if bottom % lower or top % bottom or upper % top:
                return None
            between.append((top // bottom, stride * (bottom // lower)))
        upper = lower
    return between


class AxisGroup(NamedTuple):
    """The common structure of all groups of one axis.

    Attributes:
        size: Number of ranks per group.
        levels: (size, stride) pairs, the smallest stride first. A group has one rank for each
            combination.
        listed: All groups, if they have no common strides; else empty.
    """

    size: int
    levels: Levels
    listed: tuple[tuple[int, ...], ...] = ()

    def on_one_node(self, ranks_per_node: int, world_size: int) -> int:
        """Return the smallest number of ranks of a group that share a node.

        Groups need not be aligned with nodes. The group that is divided worst counts.
        """
        node, shares = ranks_per_node, 1
        if self.listed:
            return min(min(Counter(r // node for r in ranks).values()) for ranks in self.listed)
        for size, stride in self.levels:
            block = size * stride
            if stride % node == 0:
                continue
            if node % block == 0:
                shares *= size
            elif node % stride == 0 and block % node == 0:
                shares *= node // stride
            else:
                return self._counted(node, world_size)
        return shares

    def _counted(self, node: int, world_size: int) -> int:
        """Count the ranks of each group on each node, and return the smallest number.

        Used if groups are not aligned with nodes. The pattern repeats after the least common
        multiple of both lengths, so only so many ranks are visited.
        """
        size, stride = self.levels[-1]
        ranks = range(min(world_size, lcm(size * stride, node)))
        return min(Counter((self._first(rank), rank // node) for rank in ranks).values())

    def _first(self, rank: int) -> int:
        """Return the first rank of the group that contains a rank."""
        return rank - sum(rank // stride % size * stride for size, stride in self.levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGroup:
    """One process group of a rank.

    Attributes:
        axes: All axes that have these ranks.
        ranks: Global ranks, ascending. Empty for the whole world, whose group exists already.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """The groups and views that one rank needs for its device meshes.

    Attributes:
        layout: Positions of all ranks.
        own_groups: Groups of this rank, without duplicates. All ranks list them in the same order
            of axes, so that creating them cannot deadlock.
        views: Each view, with the global ranks in row-major order of its axes.
    """

    layout: "RankLayout"
    own_groups: tuple[OwnGroup, ...]
    views: tuple[tuple[View, Sequence[int]], ...]


def plan_mesh(
    degrees: Mapping[str, int], folds: Folds, order: Sequence[str], rank: int
) -> MeshPlan:
    """Return the layout, and the groups and views of one rank.

    Axes of size 1 share one group of the rank alone. Two axes have equal groups on every rank or on
    none, so the order of the groups is the same on all ranks.
    """
    layout = RankLayout(degrees, folds, order)
    axes_of: dict[tuple[int, ...], list[str]] = {}
    views = layout.views.values()
    for axis in dict.fromkeys(axis for view in views for axis in view.axes):
        whole = layout.size(axis) == layout.world_size
        axes_of.setdefault(() if whole else layout.group(axis, rank), []).append(axis)
    own = [OwnGroup(axes=tuple(axes), ranks=ranks) for ranks, axes in axes_of.items()]
    ranks_of = tuple((view, view.ranks()) for view in views)
    return MeshPlan(layout=layout, own_groups=tuple(own), views=ranks_of)


class RankLayout:
    """Positions of all ranks, for every axis and alias of every view.

    `ParallelDims.layout` makes it. It communicates nothing. The ranks of one group take time in
    proportion to the size of the group, so layouts of 100,000 ranks are as fast as small ones.

    Args:
        degrees: Positive degrees by name; ``"ulysses"`` among them if ``folds.ulysses`` is set.
        folds: Options that decide which axes each view folds.
        order: Names of the axes, outermost first.

    Examples:
        >>> layout = ParallelDims(cp=2, tp=2, world_size=8).layout()
        >>> layout.coordinates(5)
        {'pp': 0, 'dp_replicate': 0, 'dp_shard': 1, 'cp': 0, 'tp': 1}
        >>> layout.group("fsdp", rank=5)
        (1, 3, 5, 7)
    """

    __slots__ = ("_aliases", "_folds", "_order", "_sizes", "_strides", "_views", "world_size")

    def __init__(self, degrees: Mapping[str, int], folds: Folds, order: Sequence[str]) -> None:
        self._sizes = sizes = axis_sizes(folds, degrees)
        # Folded experts use the ranks of other axes.
        self._order = base = tuple(name for name in order if name != "ep" or folds.peer)
        self._strides = dict(zip(base, strides_of([sizes[name] for name in base]), strict=True))
        self.world_size = prod(sizes[name] for name in base)
        self._folds, self._aliases = folds, _aliases(folds)
        self._views: dict[str, View] = {}

    @property
    def views(self) -> Mapping[str, View]:
        """Views by name, in the order in which axis names are searched."""
        return {name: self._view(name) for name in _view_axes(self._folds)}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all axes and aliases."""
        return (*_first_views(self._folds), *self._aliases)

    def find(self, *names: str) -> tuple[View, tuple[str, ...]]:
        """Return the first view that has all the given axes.

        Args:
            *names: Axes or aliases.

        Returns:
            The view, and the names of the axes with aliases resolved.

        Raises:
            LayoutError: A name does not exist or is given twice, or no view has all of them.
        """
        if not names:
            raise LayoutError(f"no axis given; use one or more of {join_words(self.names)}")
        axes = tuple(map(self._axis, names))
        if len(set(axes)) < len(axes):
            found = f"which are {list(axes)}" if list(names) != list(axes) else "one of them twice"
            raise LayoutError(f"{list(names)} given, {found}; use each axis once")
        for view, its_axes in _view_axes(self._folds).items():
            if all(axis in its_axes for axis in axes):
                return self._view(view), axes
        raise LayoutError(self._mixed(names, axes))

    def size(self, name: str) -> int:
        """Return the number of ranks on an axis.

        Args:
            name: Axis or alias.

        Returns:
            The number of ranks of each group of the axis.

        Raises:
            LayoutError: The name does not exist.
        """
        _, (axis,) = self.find(name)
        return self._sizes[axis]

    def coordinate(self, name: str, rank: int) -> int:
        """Return the coordinate of a rank on one axis.

        Args:
            name: Axis or alias.
            rank: Global rank.

        Returns:
            A number from 0 to ``size(name) - 1``.

        Raises:
            LayoutError: The name or the rank does not exist.
        """
        view, (axis,) = self.find(name)
        return view.index_of(view.axes.index(axis), view.position_of(self._checked(rank)))

    def coordinates(self, rank: int, view: str = "base") -> dict[str, int]:
        """Return the coordinates of a rank on all axes of a view.

        Args:
            rank: Global rank.
            view: Name of the view.

        Returns:
            Coordinates by axis, outermost first.

        Raises:
            LayoutError: The rank or the view does not exist.
        """
        found = self._view(view)
        position = found.position_of(self._checked(rank))
        return {name: found.index_of(i, position) for i, name in enumerate(found.axes)}

    def rank(self, coordinates: Mapping[str, int], view: str = "base") -> int:
        """Return the rank at the given coordinates.

        Args:
            coordinates: One coordinate for each axis of the view.
            view: Name of the view.

        Returns:
            The global rank.

        Raises:
            LayoutError: The view does not exist, an axis is missing or unknown, or a coordinate is
                out of range.

        Examples:
            >>> layout = ParallelDims(tp=2, world_size=4).layout()
            >>> layout.rank({"pp": 0, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 0})
            2
        """
        found = self._view(view)
        given = _keys(coordinates)
        if given is None or {*given} != {*found.axes}:
            shown = show(coordinates if given is None else given)
            raise LayoutError(f"coordinates of {shown} given; use {list(found.axes)}")
        position = 0
        for i, (name, size) in enumerate(zip(found.axes, found.shape, strict=True)):
            number = _index(coordinates[name])
            if number is None or number >= size:
                raise LayoutError(f"{name}={show(coordinates[name])} given; use 0 to {size - 1}")
            position += number * found.stride(i)
        return found.rank_at(position)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from a rank along one axis only.

        Args:
            name: Axis or alias.
            rank: Global rank, which is one of the result.

        Returns:
            Global ranks in the order of the axis. The order is ascending, as in torch process
            groups.

        Raises:
            LayoutError: The name or the rank does not exist.
        """
        view, (axis,) = self.find(name)
        return tuple(view.along(view.axes.index(axis), view.position_of(self._checked(rank))))

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """Return all groups of an axis.

        Args:
            name: Axis or alias.

        Returns:
            The ranks of each group, sorted by the first rank.

        Raises:
            LayoutError: The name does not exist.
        """
        view, (axis,) = self.find(name)
        index = view.axes.index(axis)
        size, stride = view.shape[index], view.stride(index)
        ranks = view.ranks()
        return sorted(
            tuple(ranks[first : first + size * stride : stride])
            for block in range(0, self.world_size, size * stride)
            for first in range(block, block + stride)
        )

    def axis_group(self, name: str) -> AxisGroup:
        """Return the common structure of all groups of an axis, without listing ranks.

        Args:
            name: Axis or alias.

        Returns:
            The size of the groups, and the counts and strides of their ranks. If the groups have no
            common strides, ``listed`` has all of them.

        Raises:
            LayoutError: The name does not exist.
        """
        axis = self._axis(name)
        view, index = _first_views(self._folds)[axis]
        levels = self._view(view).levels_along(index)
        if levels is None:
            return AxisGroup(self._sizes[axis], (), tuple(self.groups(name)))
        return AxisGroup(self._sizes[axis], levels)

    def crosses_nodes(self, name: str, ranks_per_node: int) -> bool:
        """Return whether a group of an axis has ranks on several nodes.

        Args:
            name: Axis or alias.
            ranks_per_node: Number of ranks per node. Node ``i`` starts at rank
                ``i * ranks_per_node``.

        Returns:
            True if at least one group of the axis has ranks on more than one node.

        Raises:
            LayoutError: The name does not exist, or ``ranks_per_node`` is not a positive integer.
        """
        node = _index(ranks_per_node)
        if not node:
            raise LayoutError(
                f"ranks_per_node={show(ranks_per_node)} given; use a positive integer"
            )
        group = self.axis_group(name)
        return group.on_one_node(node, self.world_size) < group.size

    def _view(self, name: object) -> View:
        if not isinstance(name, str) or name not in _view_axes(self._folds):
            raise LayoutError(f"no view {show(name)}; use {join_words(_view_axes(self._folds))}")
        if name not in self._views:
            parts = self._folds, self._sizes, self._strides, self._order
            self._views[name] = _make_view(name, *parts)
        return self._views[name]

    def _checked(self, rank: int) -> int:
        number = _index(rank)
        if number is None or number >= self.world_size:
            raise LayoutError(
                f"rank={show(rank)} is not in a world of {self.world_size}; "
                f"use 0 to {self.world_size - 1}"
            )
        return number

    def _axis(self, name: object) -> str:
        axis = self._aliases.get(name, name) if isinstance(name, str) else None
        if axis in self._sizes:
            return axis
        hint = " (set ulysses_degree to have it)" if name in ("ulysses", "cp_outer") else ""
        raise LayoutError(f"no axis {show(name)}{hint}; use {join_words(self.names)}")

    def _mixed(self, names: tuple[str, ...], axes: tuple[str, ...]) -> str:
        views = _view_axes(self._folds)
        found = (
            f"{name} is in {join_words(view for view in views if a in views[view])}"
            for name, a in zip(names, axes, strict=True)
        )
        table = "; ".join(f"{view}: {' '.join(its_axes)}" for view, its_axes in views.items())
        return f"no view has all of {list(names)}: {', '.join(found)}. Views: {table}"


def _keys(mapping: object) -> list[object] | None:
    return [*mapping] if isinstance(mapping, Mapping) else None


def _index(value: object) -> int | None:
    """Return a non-negative integer of any type as an int, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    number = operator.index(value)
    return number if number >= 0 else None


def _make_view(
    name: str,
    folds: Folds,
    sizes: Mapping[str, int],
    strides: Mapping[str, int],
    order: tuple[str, ...],
) -> View:
    axes = _view_axes(folds)[name]
    levels: list[tuple[int, int]] = []
    for part in _fold_orders(name, folds, order):
        size, stride = sizes[part], strides[part]
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:  # one level for both
            size *= levels.pop()[0]
        levels.append((size, stride))
    shape = tuple(sizes[axis] for axis in axes)
    view = View(name=name, axes=axes, shape=shape, levels=tuple(levels) or ((1, 1),))
    for block in view_blocks(folds)[name]:
        if (
            block.outside
            and sizes[block.parts[0]] > 1
            and _fold_order(block, order) != _by_order(block, order)
        ):
            return replace(view, sorted_axis=axes.index(block.axes[0]))
    return view


@lru_cache(maxsize=1024)
def _fold_orders(name: str, folds: Folds, order: tuple[str, ...]) -> tuple[str, ...]:
    blocks = view_blocks(folds)[name]
    return tuple(part for block in blocks for part in _fold_order(block, order))


def _fold_order(block: AxisBlock, order: Sequence[str]) -> list[str]:
    # In rank order, so that the ranks of a folded group ascend.
    parts = _by_order(block, order)
    return sorted(parts, key=block.parts[0].__ne__) if block.outside else parts


def _by_order(block: AxisBlock, order: Sequence[str]) -> list[str]:
    return sorted(block.parts, key=order.index)
