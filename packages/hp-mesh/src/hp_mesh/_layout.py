"""Ranks, coordinates and groups of all mesh dimensions, computed from sizes and strides alone.

Terms:

- An axis is a mesh dimension.
- A base axis is an axis of the view ``"base"``, such as ``tp``. The sizes of the base axes multiply
  to the world size. The size of a base axis is called a degree.
- To fold axes is to flatten them into one axis: ``fsdp`` folds ``dp_shard`` and ``cp``.
- To split an axis is the reverse: ``cp`` is split into ``cp_outer`` and ``ulysses``.
- A view is one device mesh over all ranks. The same ranks have several views, such as ``"dense"``.
- An alias is a second name of an axis.
- A group along an axis is a set of ranks. They have equal coordinates on the other axes of a view.
- The levels of an axis are (size, stride) pairs that describe its groups. A group has the ranks
  ``first + i * stride_0 + j * stride_1 + ...``, with ``i`` from 0 to ``size_0 - 1`` and so on. For
  example, the levels ``((2, 1), (4, 16))`` give the group 0, 1, 16, 17, 32, 33, 48, 49.

`view_axes` is the table of views. `axis_parts` is the table of folded and split axes. `RankLayout`
computes levels from the two tables, and coordinates and groups from levels. This module does not
communicate or import torch.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from math import gcd, lcm, prod
from typing import NamedTuple, SupportsIndex, TypeAlias

from ._errors import LayoutError, join_words, show

ALIASES = {"batch": "dp", "dp_ep": "dp", "dp_cp": "loss", "ep_shard": "ep"}
Levels: TypeAlias = tuple[
    tuple[int, int], ...
]  # (size, stride) pairs; the first pair changes fastest


class Folds(NamedTuple):
    """Options that decide which mesh dimensions exist and how they are flattened or split.

    Attributes:
        peer: True for ``ep_mode="peer"``: ``ep`` is a dimension of its own, and the world size is
            the product of ``ep`` and the other degrees. If False, ``ep`` reuses the ranks of
            ``dp_shard``, ``cp`` and ``tp``.
        over_tp: If True, each expert is sharded over the ranks of ``tp``: ``etp`` equals ``tp``.
        fsdp_folds_cp: If True, ``fsdp`` flattens ``dp_shard`` and ``cp``. If False, ``fsdp`` does
            not include ``cp``, and ``replicate`` flattens ``dp_replicate`` and ``cp``.
        ulysses: If True, ``cp`` is split into the dimensions ``cp_outer`` and ``ulysses``.
    """

    peer: bool = False
    over_tp: bool = False
    fsdp_folds_cp: bool = True
    ulysses: bool = False

    @property
    def sharding(self) -> tuple[str, ...]:
        """Names of the data-parallel dimensions in the ``"base"`` view other than ``dp_replicate``.

        Ranks along a data-parallel dimension have different samples. The value is
        ``("dp_shard", "ep")`` if ``peer`` is True, else ``("dp_shard",)``.
        """
        return ("dp_shard", "ep") if self.peer else ("dp_shard",)


@cache
def view_axes(folds: Folds) -> dict[str, tuple[str, ...]]:
    """Return the names of the mesh dimensions of each view (one device mesh over all ranks).

    A dimension can be in several views. `RankLayout.find` searches the views in the order of the
    dict and uses the first view with the dimension. ``"dense"`` is the first view, so the meshes of
    ``tp`` and ``fsdp`` are slices of the same torch mesh. FSDP with tensor parallelism requires
    this.

    Returns:
        A dict. Each key is the name of a view, such as ``"dense"``. Each value is a tuple with the
        names of the view's dimensions, outermost first.
    """
    data = ("dp_replicate", *folds.sharding)
    replicate = "dp_replicate" if folds.fsdp_folds_cp else "replicate"
    views: dict[str, tuple[str, ...]] = {
        "dense": ("pp", replicate, "fsdp", "tp"),
        "sparse": ("pp", "dp_replicate", "efsdp", "ep", "etp"),
        "base": ("pp", *data, "cp", "tp"),
        "data": ("pp", "dp", "cp", "tp"),
        "loss": ("pp", "loss", "tp"),
        "expert": ("pp", "ep_replicate", "ep", "etp"),
    }
    if folds.ulysses:
        views["sequence"] = ("pp", *data, "cp_outer", "ulysses", "tp")
    return views


@cache
def axis_parts(folds: Folds) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return which mesh dimensions are flattened or split into which other dimensions.

    The item ``("fsdp",): ("dp_shard", "cp")`` means that ``dp_shard`` and ``cp`` are flattened into
    ``fsdp``. The item ``("cp_outer", "ulysses"): ("cp",)`` means that ``cp`` is split into
    ``cp_outer`` and ``ulysses``.

    Returns:
        A dict from result names to source names, both tuples with the outermost dimension first.
        The source dimensions are flattened. If the key has several names, the flattened dimension
        is then split. The user sets the sizes of all results except the first. The size of the
        first result is the size of the flattened dimension, divided by the other sizes.
    """
    data = ("dp_replicate", *folds.sharding)
    parts: dict[tuple[str, ...], tuple[str, ...]] = {("dp",): data, ("loss",): (*data, "cp")}
    if folds.fsdp_folds_cp:
        parts["fsdp",] = (*folds.sharding, "cp")
    else:
        parts |= {("fsdp",): folds.sharding, ("replicate",): ("dp_replicate", "cp")}
    if folds.ulysses:
        parts["cp_outer", "ulysses"] = ("cp",)
    experts = ("efsdp",) if folds.peer else ("efsdp", "ep")
    if folds.over_tp:
        # Activations are sharded over tp, so the experts' weights are sharded over the same ranks.
        parts |= {experts: ("dp_shard", "cp"), ("etp",): ("tp",)}
    elif folds.peer:
        # Ranks of one tp group hold different FSDP shards of the experts, so efsdp includes tp.
        parts |= {experts: ("dp_shard", "cp", "tp"), ("etp",): ()}
    else:
        parts[*experts, "etp"] = ("dp_shard", "cp", "tp")
    parts["ep_replicate",] = ("dp_replicate", "efsdp")
    return parts


def axis_sizes(folds: Folds, degrees: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of all mesh dimensions.

    Args:
        folds: Options that decide which dimensions exist.
        degrees: Positive sizes of ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``, ``ep``
            and ``etp``, by name. If ``folds.ulysses`` is True, ``"ulysses"`` is required too.

    Returns:
        A dict from the name of each dimension to its size, in ranks. It has no aliases.
    """
    sizes = {axis: degrees[axis] for axis in view_axes(folds)["base"]}
    for (first, *others), parts in axis_parts(folds).items():
        sizes |= {axis: degrees[axis] for axis in others}
        folded = prod([sizes[part] for part in parts])
        sizes[first] = folded // prod([sizes[axis] for axis in others])
    return sizes


@cache
def _axis_names(folds: Folds) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(view_axes(folds).values())))


def _aliases(folds: Folds) -> dict[str, str]:
    return {**ALIASES, "replicate": "dp_replicate"} if folds.fsdp_folds_cp else ALIASES


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Names, shape and ranks of one device mesh over all ranks.

    Attributes:
        name: Name of the view, such as ``"dense"``.
        axes: Names of the mesh dimensions, outermost first.
        shape: Sizes of the mesh dimensions, outermost first.
        levels: (size, stride) pairs of all dimensions, innermost first. `ranks` computes the ranks
            from them. It ignores ``levels`` if ``listed`` is not empty.
        listed: All ranks in row-major order, if (size, stride) pairs cannot describe the groups
            along one of the dimensions. Else empty.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    levels: Levels
    listed: tuple[int, ...] = ()

    def ranks(self) -> Sequence[int]:
        """Return all global ranks as a flat sequence, in row-major order of ``shape``."""
        return self.listed or _ranks_from(0, self.levels)


def _ranks_from(first: int, levels: Levels) -> Sequence[int]:
    """Return the ranks of one group.

    For example, ``first=3`` and ``levels=((2, 1), (2, 16))`` give the ranks 3, 4, 19 and 20.

    Args:
        first: Lowest rank of the group.
        levels: (size, stride) pairs, smallest stride first. The first pair changes fastest.

    Returns:
        A list or range of global ranks.
    """
    if len(levels) == 1:
        ((size, stride),) = levels
        return range(first, first + size * stride, stride)
    ranks = [first]
    for size, stride in reversed(levels):
        ranks = [rank + index * stride for rank in ranks for index in range(size)]
    return ranks


def _first_rank(rank: int, levels: Levels) -> int:
    """Return the lowest rank of the group that contains ``rank``.

    ``levels`` describes the mesh dimension of the group by (size, stride) pairs. There are several
    pairs if the dimension flattens dimensions whose ranks are not evenly spaced.
    """
    return rank - sum([rank // stride % size * stride for size, stride in levels])


def _slices(shape: Sequence[int], axis: int) -> Iterator[slice]:
    """Yield one slice for each group along a mesh dimension, in row-major order of the groups.

    Args:
        shape: Shape of a device mesh over all ranks.
        axis: Index of the mesh dimension in ``shape``.

    Yields:
        A slice. Applied to the mesh's ranks in row-major order, it returns the ranks of one group.
    """
    stride = prod(shape[axis + 1 :])
    span = shape[axis] * stride
    for outer in range(0, prod(shape), span):
        for first in range(outer, outer + stride):
            yield slice(first, first + span, stride)


def _merge(levels: Iterable[tuple[int, int]]) -> Levels:
    """Merge neighbouring (size, stride) pairs if one pair describes the same ranks.

    For example, ``(2, 1)`` and ``(4, 2)`` become ``(8, 1)``.

    Args:
        levels: (size, stride) pairs, smallest stride first.

    Returns:
        The merged pairs, smallest stride first.
    """
    merged: list[tuple[int, int]] = []
    for size, stride in levels:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return tuple(merged)


def _fold(parts: Iterable[Levels | None]) -> Levels | None:
    """Flatten several mesh dimensions into one, and return its (size, stride) pairs.

    Args:
        parts: One item per flattened dimension: its (size, stride) pairs, or None if such pairs
            cannot describe its groups.

    Returns:
        The pairs of the result, smallest stride first. The result is None if an item is None.
    """
    levels: list[tuple[int, int]] = []
    for part in parts:
        if part is None:
            return None
        levels += part
    return _merge(sorted(levels, key=operator.itemgetter(1)))


def _split(levels: Levels, sizes: Sequence[int]) -> list[Levels | None]:
    """Split one mesh dimension into several, and return the (size, stride) pairs of each.

    For example, the pairs ``((4, 1),)`` and the sizes 2 and 2 give ``((2, 2),)`` and ``((2, 1),)``.
    The pairs ``((3, 1), (4, 6))`` describe the ranks 0, 1, 2, 6, 7, 8, ... They cannot be split
    into the sizes 6 and 2: the first inner groups would be (0, 1) and (2, 6), with strides 1 and 4.

    Args:
        levels: (size, stride) pairs of the dimension to split, smallest stride first.
        sizes: Sizes of the resulting dimensions, outermost first. Their product is the product of
            the sizes in ``levels``.

    Returns:
        One item per size. It is the tuple of (size, stride) pairs of the resulting dimension,
        smallest stride first. All items are None if such pairs cannot describe the groups.
    """
    remaining = [*reversed(levels)]
    axes: list[Levels | None] = []
    for size in reversed(sizes):
        taken: list[tuple[int, int]] = []
        while size > 1:
            whole, stride = remaining.pop() if remaining else (1, 1)
            part = gcd(size, whole)
            if part == 1 or part not in (size, whole):
                return [None] * len(sizes)
            taken.append((part, stride))
            if part < whole:
                remaining.append((whole // part, stride * part))
            size //= part
        axes.append(tuple(taken))
    return axes[::-1]


class AxisGroup(NamedTuple):
    """Size and strides of the groups along one mesh dimension.

    Attributes:
        size: Number of ranks per group.
        levels: (size, stride) pairs, smallest stride first. For example, ``((2, 1), (4, 16))``
            means that rank 0 is in the group 0, 1, 16, 17, 32, 33, 48, 49. Empty if ``size`` is 1
            or ``listed`` has groups.
        listed: One tuple of global ranks per group, if (size, stride) pairs cannot describe the
            groups. Else empty.
    """

    size: int
    levels: Levels
    listed: tuple[tuple[int, ...], ...] = ()

    def on_one_node(self, ranks_per_node: int, world_size: int) -> int:
        """Return the smallest number of ranks that any group has on a node.

        Nodes without a rank of the group do not count. For example, the result is 1 if one of the
        groups has 3 ranks on one node and 1 rank on another node.

        Args:
            ranks_per_node: Number of ranks per node. Node ``i`` starts at rank
                ``i * ranks_per_node``.
            world_size: Number of all ranks.

        Returns:
            A number from 1 to ``size``. It is ``size`` if every group is on one node.
        """
        node, shares = ranks_per_node, 1
        if self.listed:
            return min(min(Counter(r // node for r in ranks).values()) for ranks in self.listed)
        for size, stride in self.levels:
            span = size * stride
            if stride % node == 0:
                continue
            if node % span == 0:
                shares *= size
            elif node % stride == 0 and span % node == 0:
                shares *= node // stride
            else:
                return self._fewest_on_one_node(node, world_size)
        return shares

    def _fewest_on_one_node(self, node: int, world_size: int) -> int:
        # Nodes have different numbers of ranks of a group, so this method counts the ranks of each
        # group on each node. The numbers repeat after lcm(size * stride, node) ranks, because
        # size * stride consecutive ranks consist of whole groups.
        size, stride = self.levels[-1]
        ranks = range(min(world_size, lcm(size * stride, node)))
        nodes = Counter((_first_rank(rank, self.levels), rank // node) for rank in ranks)
        return min(nodes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """One process group that contains this rank, before it is created.

    Attributes:
        axes: Names of all mesh dimensions that share this group.
        ranks: Global ranks, ascending. Empty for torch's default group, which has all ranks and
            exists already.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """The process groups and ranks from which one rank builds its device meshes.

    Attributes:
        layout: Coordinates and groups of all ranks.
        groups: The groups that contain this rank, without duplicates. ``groups[i].axes`` is the
            same on all ranks. Ranks therefore cannot deadlock if they create the groups in order.
        views: One tuple ``(view, ranks)`` for each device mesh over all ranks. ``view`` has the
            names and sizes of the dimensions. ``ranks`` has the global ranks in row-major order.
    """

    layout: "RankLayout"
    groups: tuple[PlannedGroup, ...]
    views: tuple[tuple[View, Sequence[int]], ...]


def plan_mesh(
    degrees: Mapping[str, int], folds: Folds, order: Sequence[str], rank: int
) -> MeshPlan:
    """Compute which process groups and device meshes one rank must create.

    The function does not communicate. Mesh dimensions with the same ranks share one process group.
    For example, all dimensions of size 1 share the group that has this rank only. Whether two
    dimensions share a group is the same on every rank, so all ranks create their groups in the same
    order.

    Args:
        degrees: Positive sizes of ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``, ``ep``
            and ``etp``, by name. If ``folds.ulysses`` is True, ``"ulysses"`` is required too.
        folds: Options that decide which dimensions exist.
        order: Names of the base dimensions, outermost first. Their sizes multiply to the world
            size.
        rank: Global rank of this process.

    Returns:
        The plan, as an argument for `create_meshes`.
    """
    layout = RankLayout(degrees, folds, order)
    axes_of: dict[tuple[int, ...], list[str]] = {}
    for axis in _axis_names(folds):
        is_world = layout.size(axis) == layout.world_size
        axes_of.setdefault(() if is_world else layout.group(axis, rank), []).append(axis)
    groups = [PlannedGroup(axes=tuple(axes), ranks=ranks) for ranks, axes in axes_of.items()]
    views = tuple((view, view.ranks()) for view in layout.views.values())
    return MeshPlan(layout=layout, groups=tuple(groups), views=views)


class RankLayout:
    """Coordinates and groups of all ranks along every mesh dimension.

    `ParallelDims.layout` returns a `RankLayout`. It is computed without communication.

    - An axis is a mesh dimension. An alias is a second name of an axis.
    - A view is one device mesh over all ranks. The same ranks have several views: the view
      ``"dense"`` has the axes ``fsdp`` and ``tp``, and the view ``"sparse"`` has the axes ``efsdp``
      and ``ep``.
    - A group along an axis is a set of ranks. They have equal coordinates on the view's other axes.

    The time to compute a group depends on the size of the group, but not on the world size: ranks
    are computed from strides. There is one exception. If ``order`` puts another axis between two of
    ``dp_shard``, ``cp`` and ``tp``, the groups of ``ep``, ``etp`` or ``efsdp`` may have no regular
    stride. The layout then computes these groups for all ranks when the first one is needed, and
    keeps them. This needs time and memory proportional to the world size.

    Args:
        degrees: Positive sizes of ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``, ``ep``
            and ``etp``, by name. If ``folds.ulysses`` is True, ``"ulysses"`` is required too.
        folds: Options that decide which axes exist.
        order: Names of the axes that multiply to the world size, outermost first, such as ``pp``
            and ``tp``. They do not include axes that are flattened from others, such as ``fsdp``.

    Examples:
        >>> layout = ParallelDims(cp=2, tp=2, world_size=8).layout()
        >>> layout.coordinates(5)
        {'pp': 0, 'dp_replicate': 0, 'dp_shard': 1, 'cp': 0, 'tp': 1}
        >>> layout.group("fsdp", rank=5)
        (1, 3, 5, 7)
    """

    def __init__(self, degrees: Mapping[str, int], folds: Folds, order: Sequence[str]) -> None:
        self._sizes = axis_sizes(folds, degrees)
        self._order = [name for name in order if name in view_axes(folds)["base"]]
        self.world_size = prod(self._sizes[name] for name in self._order)
        self._folds, self._aliases = folds, _aliases(folds)
        self._views: dict[str, View] = {}

    @cached_property
    def _levels(self) -> Mapping[str, Levels | None]:
        """Dict from the name of each mesh dimension to its (size, stride) pairs.

        The pairs have the smallest stride first. The value of a dimension is None if such pairs
        cannot describe its groups.
        """
        levels: dict[str, Levels | None] = {}
        stride = 1
        for name in reversed(self._order):
            size = self._sizes[name]
            levels[name] = ((size, stride),) if size > 1 else ()
            stride *= size
        for axes, parts in axis_parts(self._folds).items():
            folded = _fold([levels[part] for part in parts])
            if folded is None or len(axes) == 1:
                levels |= dict.fromkeys(axes, folded)
            else:
                split = _split(folded, [self._sizes[axis] for axis in axes])
                levels |= zip(axes, split, strict=True)
        return levels

    @property
    def views(self) -> Mapping[str, View]:
        """All views (device meshes over all ranks): a dict from the name of a view to the view.

        A view has the attributes ``axes`` (names of its dimensions) and ``shape`` (their sizes),
        and the method ``ranks()``. `find` searches the views in the order of the dict.
        """
        return {name: self._view(name) for name in view_axes(self._folds)}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all mesh dimensions, followed by all aliases (second names)."""
        return (*_axis_names(self._folds), *self._aliases)

    def find(self, *names: str) -> tuple[View, tuple[str, ...]]:
        """Return the first view (device mesh over all ranks) that has all named mesh dimensions.

        Args:
            *names: Names or aliases of mesh dimensions, in any order.

        Returns:
            A tuple ``(view, axes)``. ``axes`` is the tuple of mesh dimensions for ``names``, in the
            same order: ``"batch"`` in ``names`` gives ``"dp"`` in ``axes``.

        Raises:
            LayoutError: ``names`` is empty, a name does not exist, two names mean the same
                dimension, or no view has all dimensions.
        """
        if not names:
            raise LayoutError(f"no axis given; use one or more of {join_words(self.names)}")
        axes = tuple(map(self._resolve, names))
        if len(set(axes)) < len(axes):
            found = f"which are {list(axes)}" if list(names) != list(axes) else "one of them twice"
            raise LayoutError(f"{list(names)} given, {found}; use each axis once")
        for view, its_axes in view_axes(self._folds).items():
            if {*axes} <= {*its_axes}:
                return self._view(view), axes
        raise LayoutError(self._explain_no_view(names, axes))

    def size(self, name: str) -> int:
        """Return the size of a mesh dimension.

        Args:
            name: Name or alias of a mesh dimension.

        Returns:
            The number of ranks in each group along the dimension.

        Raises:
            LayoutError: The name does not exist.
        """
        return self._sizes[self._resolve(name)]

    def coordinate(self, name: str, rank: int) -> int:
        """Return the coordinate of a rank on one mesh dimension.

        Args:
            name: Name or alias of a mesh dimension.
            rank: Global rank.

        Returns:
            An integer from 0 to ``size(name) - 1``.

        Raises:
            LayoutError: The name or the rank does not exist.
        """
        levels = self._levels[self._resolve(name)]
        if levels is None:
            return self.group(name, rank).index(rank)
        rank, coordinate, weight = self._checked_rank(rank), 0, 1
        for size, stride in levels:
            coordinate += rank // stride % size * weight
            weight *= size
        return coordinate

    def coordinates(self, rank: int, view: str = "base") -> dict[str, int]:
        """Return the coordinates of a rank in one device mesh over all ranks.

        Args:
            rank: Global rank.
            view: Name of the mesh, such as ``"base"``, ``"dense"`` or ``"sparse"``.

        Returns:
            A dict from the name of each dimension of the mesh to the coordinate, outermost
            dimension first.

        Raises:
            LayoutError: The rank or the view does not exist.
        """
        return {axis: self.coordinate(axis, rank) for axis in self._view(view).axes}

    def rank(self, coordinates: Mapping[str, int], view: str = "base") -> int:
        """Return the rank at the given coordinates.

        Args:
            coordinates: Dict from the name of each dimension of the mesh to a coordinate.
            view: Name of the mesh, such as ``"base"``, ``"dense"`` or ``"sparse"``.

        Returns:
            The global rank.

        Raises:
            LayoutError: The mesh does not exist, a dimension is missing or unknown, or a coordinate
                is out of range.

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
        for name, size in zip(found.axes, found.shape, strict=True):
            number = _index(coordinates[name])
            if number is None or number >= size:
                raise LayoutError(f"{name}={show(coordinates[name])} given; use 0 to {size - 1}")
            position = position * size + number
        if found.listed:
            return found.listed[position]
        rank = 0
        for size, stride in found.levels:
            position, index = divmod(position, size)
            rank += index * stride
        return rank

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the ranks of one group along a mesh dimension: the group that contains ``rank``.

        Args:
            name: Name or alias of a mesh dimension.
            rank: Global rank.

        Returns:
            The global ranks of the group in ascending order, as in torch process groups. The ranks
            have the same coordinates as ``rank`` on the view's other dimensions.

        Raises:
            LayoutError: The name or the rank does not exist.
        """
        levels, number = self._levels[self._resolve(name)], self._checked_rank(rank)
        if levels is None:
            view, (axis,) = self.find(name)
            groups = _slices(view.shape, view.axes.index(axis))
            return next(view.listed[group] for group in groups if number in view.listed[group])
        return tuple(_ranks_from(_first_rank(number, levels), levels))

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """Return all groups along a mesh dimension.

        Args:
            name: Name or alias of a mesh dimension.

        Returns:
            One tuple of global ranks for each group. The groups are sorted by their first rank.

        Raises:
            LayoutError: The name does not exist.
        """
        view, (axis,) = self.find(name)
        ranks = view.ranks()
        return sorted(tuple(ranks[group]) for group in _slices(view.shape, view.axes.index(axis)))

    def axis_group(self, name: str) -> AxisGroup:
        """Return the size and the strides of the groups along a mesh dimension.

        Args:
            name: Name or alias of a mesh dimension.

        Returns:
            An object with three attributes. ``size`` is the number of ranks per group. ``levels``
            has (size, stride) pairs that describe the ranks of a group. If such pairs cannot
            describe the groups, ``listed`` has one tuple of ranks per group, else it is empty.

        Raises:
            LayoutError: The name does not exist.
        """
        axis = self._resolve(name)
        levels = self._levels[axis]
        listed = tuple(self.groups(name)) if levels is None else ()
        return AxisGroup(self._sizes[axis], levels or (), listed)

    def crosses_nodes(self, name: str, ranks_per_node: int) -> bool:
        """Return whether a group along a mesh dimension has ranks on several nodes.

        Args:
            name: Name or alias of a mesh dimension.
            ranks_per_node: Number of ranks per node. Node ``i`` starts at rank
                ``i * ranks_per_node``.

        Returns:
            True if at least one group has ranks on more than one node.

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
        names = view_axes(self._folds)
        if not isinstance(name, str) or name not in names:
            raise LayoutError(f"no view {show(name)}; use {join_words(names)}")
        if name not in self._views:
            axes = names[name]
            shape = tuple(self._sizes[axis] for axis in axes)
            parts = [self._levels[axis] for axis in reversed(axes)]
            listed = self._list_expert_view(shape) if None in parts else ()
            levels = () if listed else _merge(chain.from_iterable(part or () for part in parts))
            self._views[name] = View(
                name=name, axes=axes, shape=shape, levels=levels, listed=listed
            )
        return self._views[name]

    def _list_expert_view(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return all ranks of the view ``"sparse"`` or ``"expert"``, in row-major order.

        `_view` calls this method only if (size, stride) pairs cannot describe the groups of
        ``ep``, ``etp`` or ``efsdp``. The method lists all ranks with ``pp`` outermost, then
        ``dp_replicate``, then ``dp_shard``, ``cp`` and ``tp``. It reads this list as an array with
        the given shape. The ranks of each group are then sorted, as in torch process groups.

        Args:
            shape: Sizes of the view's dimensions, outermost first.

        Returns:
            All global ranks.
        """
        experts = [
            parts for axes, parts in axis_parts(self._folds).items() if axes[-1] in ("ep", "etp")
        ]
        outermost_first = [("pp",), ("dp_replicate",), *experts]
        levels = [_fold(map(self._levels.get, parts)) or () for parts in reversed(outermost_first)]
        ranks = [*_ranks_from(0, tuple(chain.from_iterable(levels)))]
        for axis in range(len(shape)):
            for group in _slices(shape, axis):
                ranks[group] = sorted(ranks[group])
        return tuple(ranks)

    def _checked_rank(self, rank: int) -> int:
        number = _index(rank)
        if number is None or number >= self.world_size:
            raise LayoutError(
                f"rank={show(rank)} is not in a world of {self.world_size}; "
                f"use 0 to {self.world_size - 1}"
            )
        return number

    def _resolve(self, name: object) -> str:
        axis = self._aliases.get(name, name) if isinstance(name, str) else None
        if axis in self._sizes:
            return axis
        hint = " (set ulysses_degree to have it)" if name in ("ulysses", "cp_outer") else ""
        raise LayoutError(f"no axis {show(name)}{hint}; use {join_words(self.names)}")

    def _explain_no_view(self, names: tuple[str, ...], axes: tuple[str, ...]) -> str:
        views = view_axes(self._folds)
        found = (
            f"{name} is in {join_words(view for view in views if a in views[view])}"
            for name, a in zip(names, axes, strict=True)
        )
        table = "; ".join(f"{view}: {' '.join(its_axes)}" for view, its_axes in views.items())
        return f"no view has all of {list(names)}: {', '.join(found)}. Views: {table}"


def _keys(mapping: object) -> list[object] | None:
    return [*mapping] if isinstance(mapping, Mapping) else None


def _index(value: object) -> int | None:
    """Return ``value`` as an int, or None if it is a bool, negative or not an integer.

    Integers of other types, such as numpy integers, are converted.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    number = operator.index(value)
    return number if number >= 0 else None
