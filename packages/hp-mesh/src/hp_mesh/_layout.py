"""Ranks, coordinates and groups in closed form, without a process group.

The degrees and their order give strides; a view folds base axes and splits them again; a group is
an arithmetic of positions. One table has the views, and nothing else knows how axes fold.
"""

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import lcm, prod
from typing import NamedTuple, SupportsIndex

from ._errors import LayoutError, join_words, show

ALIASES = {"batch": "dp", "dp_ep": "dp", "dp_cp": "loss", "ep_shard": "ep"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisBlock:
    """Base axes ``parts`` folded into one and split again into ``axes``, outermost first.

    Parts fold in rank order; ``outside`` keeps the first part outermost all the same.
    """

    parts: tuple[str, ...]
    axes: tuple[str, ...]
    outside: bool = False


class Folds(NamedTuple):
    """How views fold the axes, whatever their degrees.

    ``peer`` experts have an axis of their own, ``over_tp`` the ranks of ``tp`` cut each expert, and
    ``ulysses`` ranks are told apart in ``cp``.
    """

    peer: bool
    over_tp: bool
    fsdp_folds_cp: bool
    ulysses: bool

    @property
    def sharding(self) -> tuple[str, ...]:
        """Return the base axes whose ranks see other samples and share a dense replica."""
        return ("dp_shard", "ep") if self.peer else ("dp_shard",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewConfig:
    """What decides the views besides the order of ranks: resolved degrees and how they fold."""

    degrees: Mapping[str, int]
    ulysses_degree: int | None = None
    peer: bool = False
    fsdp_folds_cp: bool = True

    @property
    def folds(self) -> Folds:
        """Return how the views fold the axes."""
        over_tp = self.degrees["etp"] == self.degrees["tp"] > 1
        return Folds(self.peer, over_tp, self.fsdp_folds_cp, self.ulysses_degree is not None)


def _same(name: str) -> AxisBlock:
    return AxisBlock(parts=(name,), axes=(name,))


_PP, _REPLICATE, _EP, _CP, _TP = map(_same, ("pp", "dp_replicate", "ep", "cp", "tp"))


@cache
def view_blocks(folds: Folds) -> dict[str, tuple[AxisBlock, ...]]:
    """Return each view as its blocks, in the order in which names are looked up.

    Dense comes first so that ``tp`` and ``fsdp`` are axes of one torch mesh, which is what FSDP
    with tensor parallel needs whatever the rank order; sparse next, for ``efsdp`` and ``ep``.
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


@cache
def _view_axes(folds: Folds) -> dict[str, tuple[str, ...]]:
    views = view_blocks(folds).items()
    return {name: tuple(axis for block in blocks for axis in block.axes) for name, blocks in views}


@cache
def _homes(folds: Folds) -> dict[str, tuple[str, int]]:
    """Return the first view of each axis, and the axis's place there."""
    found: dict[str, tuple[str, int]] = {}
    for view, axes in _view_axes(folds).items():
        for index, axis in enumerate(axes):
            found.setdefault(axis, (view, index))
    return found


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
    # A weight that is cut over etp meets activations that are cut over tp: the same ranks.
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
    # Where tp does not cut experts, its ranks hold other experts or other shards of one.
    shards = ("dp_shard", "cp") if folds.over_tp else ("dp_shard", "cp", "tp")
    etp = AxisBlock(parts=("tp",) if folds.over_tp else (), axes=("etp",))
    return AxisBlock(parts=(*replicas, *shards), axes=(name,)), _EP, etp


def axis_sizes(config: ViewConfig) -> dict[str, int]:
    """Return the size of every axis of every view."""
    degrees = config.degrees
    replicate, shard, cp, tp = (degrees[n] for n in ("dp_replicate", "dp_shard", "cp", "tp"))
    ep, etp = degrees["ep"], degrees["etp"]
    sharding = prod(degrees[name] for name in config.folds.sharding)
    efsdp = shard * cp * tp // etp if config.peer else shard * cp * tp // (ep * etp)
    sizes = {n: degrees[n] for n in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")}
    sizes |= {"dp": replicate * sharding, "loss": replicate * sharding * cp}
    sizes |= {"efsdp": efsdp, "ep_replicate": replicate * efsdp}
    if config.fsdp_folds_cp:
        sizes |= {"fsdp": sharding * cp}
    else:
        sizes |= {"fsdp": sharding, "replicate": replicate * cp}
    if config.ulysses_degree is not None:
        sizes |= {"cp_outer": cp // config.ulysses_degree, "ulysses": config.ulysses_degree}
    return sizes


def aliases(config: ViewConfig) -> dict[str, str]:
    """Return the names that stand for an axis of another name."""
    return {**ALIASES, "replicate": "dp_replicate"} if config.fsdp_folds_cp else ALIASES


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One division of the world into axes: their names and sizes, and the rank at each position.

    A position counts row-major over the view's axes. ``digits`` are (size, stride) pairs, outermost
    first: the position's digits in these sizes, times the strides, sum up to a rank. Where these
    would not ascend along one axis, ``sorted_axis`` is that one, and its groups are sorted.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    digits: tuple[tuple[int, int], ...]
    sorted_axis: int | None = None

    def rank_at(self, position: int) -> int:
        """Return the rank at a position."""
        if self.sorted_axis is not None:
            return self.along(self.sorted_axis, position)[self.index_of(self.sorted_axis, position)]
        return self._sum_digits(position)

    def position_of(self, rank: int) -> int:
        """Return the position of a rank, the inverse of `rank_at`."""
        position, weights = 0, strides_of([size for size, _ in self.digits])
        for (size, stride), weight in zip(self.digits, weights, strict=True):
            position += rank // stride % size * weight
        if self.sorted_axis is None:
            return position
        moved = self.along(self.sorted_axis, position).index(rank)
        moved -= self.index_of(self.sorted_axis, position)
        return position + moved * self.stride(self.sorted_axis)

    def along(self, axis: int, position: int) -> Sequence[int]:
        """Return the ranks at the positions that differ from this one only along an axis."""
        size, stride = self.shape[axis], self.stride(axis)
        first = position - self.index_of(axis, position) * stride
        positions = range(first, first + size * stride, stride)
        if self.in_rank_order:
            return positions
        if self.sorted_axis not in (None, axis):
            return [*map(self.rank_at, positions)]
        digits = _split_digits(self.digits, stride, size * stride)
        if digits is None:
            ranks = [*map(self._sum_digits, positions)]
        else:
            ranks = _spell(self._sum_digits(first), digits)
        return ranks if self.sorted_axis is None else sorted(ranks)

    def digits_along(self, axis: int) -> tuple[tuple[int, int], ...] | None:
        """Return the digits of every group along an axis, nearest first; None where it has none."""
        if self.sorted_axis not in (None, axis):
            return None
        stride = self.stride(axis)
        digits = _split_digits(self.digits, stride, self.shape[axis] * stride)
        return None if digits is None else tuple(reversed(digits))

    def ranks(self) -> Sequence[int]:
        """Return the rank at every position."""
        if self.in_rank_order:
            return range(prod(self.shape))
        ranks = _spell(0, self.digits)
        if self.sorted_axis is not None:
            size, stride = self.shape[self.sorted_axis], self.stride(self.sorted_axis)
            for block in range(0, len(ranks), size * stride):
                for first in range(block, block + stride):
                    along = slice(first, first + size * stride, stride)
                    ranks[along] = sorted(ranks[along])
        return ranks

    @property
    def in_rank_order(self) -> bool:
        """Return whether every rank is its own position."""
        return len(self.digits) == 1 and self.sorted_axis is None

    def stride(self, axis: int) -> int:
        """Return how many positions lie between neighbours on an axis."""
        return prod(self.shape[axis + 1 :])

    def index_of(self, axis: int, position: int) -> int:
        """Return a position's coordinate on an axis."""
        return position // self.stride(axis) % self.shape[axis]

    def _sum_digits(self, position: int) -> int:
        rank = 0
        for size, stride in reversed(self.digits):
            position, digit = divmod(position, size)
            rank += digit * stride
        return rank


def strides_of(sizes: Sequence[int]) -> list[int]:
    """Return how far apart neighbours are on each of some axes, row-major."""
    return [prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _spell(first: int, digits: Sequence[tuple[int, int]]) -> list[int]:
    """Return ``first`` plus what the digits sum up to, for all their values, in order."""
    ranks = [first]
    for size, stride in digits:
        ranks = [rank + digit * stride for rank in ranks for digit in range(size)]
    return ranks


def _split_digits(
    digits: Sequence[tuple[int, int]], low: int, high: int
) -> list[tuple[int, int]] | None:
    """Return the digits between two weights, None where a weight falls inside a digit's unit."""
    between, upper = [], prod(size for size, _ in digits)
    for size, stride in digits:
        lower = upper // size
        bottom, top = max(lower, low), min(upper, high)
        if bottom < top:
            if bottom % lower or top % bottom or upper % top:
                return None
            between.append((top // bottom, stride * (bottom // lower)))
        upper = lower
    return between


class AxisGroup(NamedTuple):
    """The ranks of an axis's groups, by all that groups of one axis have in common.

    A rank's group has every combination of ``digits``, pairs of a count of ranks and how far apart
    they are, the nearest first. ``size`` is the product of the counts. Where no digits describe the
    groups, all of them are ``listed``.
    """

    size: int
    digits: tuple[tuple[int, int], ...]
    listed: tuple[tuple[int, ...], ...] = ()

    def on_one_node(self, ranks_per_node: int, world_size: int) -> int:
        """Return how many ranks of a group share a node, where that is fewest.

        Groups need not be aligned with nodes: the one that is cut worst counts.
        """
        node, shares = ranks_per_node, 1
        if self.listed:
            return min(min(Counter(r // node for r in ranks).values()) for ranks in self.listed)
        for size, stride in self.digits:
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
        """Return the same where nodes and groups are not aligned, over all that they repeat."""
        size, stride = self.digits[-1]
        ranks = range(min(world_size, lcm(size * stride, node)))
        return min(Counter((self._first(rank), rank // node) for rank in ranks).values())

    def _first(self, rank: int) -> int:
        """Return the first rank of the group that a rank is in."""
        return rank - sum(rank // stride % size * stride for size, stride in self.digits)


class RankLayout:
    """Positions of all ranks, for every axis and alias of every view.

    `ParallelDims.layout` makes it. It communicates nothing. The ranks of one group take time in
    proportion to the size of the group, so layouts of 100,000 ranks are as fast as small ones.

    Args:
        config: Sizes and options of the axes.
        order: Names of the axes, outermost first.

    Examples:
        >>> layout = ParallelDims(cp=2, tp=2, world_size=8).layout()
        >>> layout.coordinates(5)
        {'pp': 0, 'dp_replicate': 0, 'dp_shard': 1, 'cp': 0, 'tp': 1}
        >>> layout.group("fsdp", rank=5)
        (1, 3, 5, 7)
    """

    __slots__ = ("_aliases", "_folds", "_order", "_sizes", "_strides", "_views", "world_size")

    def __init__(self, config: ViewConfig, order: Sequence[str]) -> None:
        self._sizes = sizes = axis_sizes(config)
        # Folded experts have no place of their own among the ranks.
        self._order = base = tuple(name for name in order if name != "ep" or config.peer)
        self._strides = dict(zip(base, strides_of([sizes[name] for name in base]), strict=True))
        self.world_size = prod(sizes[name] for name in base)
        self._folds, self._aliases = config.folds, aliases(config)
        self._views: dict[str, View] = {}

    @property
    def views(self) -> Mapping[str, View]:
        """Views by name, in the order in which axis names are searched."""
        return {name: self._view(name) for name in _view_axes(self._folds)}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all axes and aliases."""
        return (*_homes(self._folds), *self._aliases)

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
            raise LayoutError(f"{list(names)} given, which are {list(axes)}; use each axis once")
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
        home, index = _homes(self._folds)[axis]
        digits = self._view(home).digits_along(index)
        if digits is None:
            return AxisGroup(self._sizes[axis], (), tuple(self.groups(name)))
        return AxisGroup(self._sizes[axis], digits)

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
        homes = (
            f"{name} is in {join_words(view for view in views if a in views[view])}"
            for name, a in zip(names, axes, strict=True)
        )
        table = "; ".join(f"{view}: {' '.join(its_axes)}" for view, its_axes in views.items())
        return f"no view has all of {list(names)}: {', '.join(homes)}. Views: {table}"


def _keys(mapping: object) -> list[object] | None:
    return [*mapping] if isinstance(mapping, Mapping) else None


def _index(value: object) -> int | None:
    """Return an integer of any type from 0, None for anything else."""
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
    digits: list[tuple[int, int]] = []
    for part in _fold_orders(name, folds, order):
        size, stride = sizes[part], strides[part]
        if size == 1:
            continue
        if digits and digits[-1][1] == size * stride:
            size *= digits.pop()[0]
        digits.append((size, stride))
    shape = tuple(sizes[axis] for axis in axes)
    view = View(name=name, axes=axes, shape=shape, digits=tuple(digits) or ((1, 1),))
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
    # In rank order, so that the groups of a fold come out ascending.
    parts = _by_order(block, order)
    return sorted(parts, key=block.parts[0].__ne__) if block.outside else parts


def _by_order(block: AxisBlock, order: Sequence[str]) -> list[str]:
    return sorted(block.parts, key=order.index)
