"""Ranks, coordinates and groups in closed form, without a process group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ._errors import LayoutError, join_words
from ._views import Cut, Cutting, aliases, axis_sizes, view_cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One way to cut the world: axis names and sizes, and which rank sits at each position.

    A position counts row-major over the view's axes. ``digits`` are (size, stride) pairs, outermost
    first: the position's digits in these sizes, times the strides, sum up to the rank. Where no
    digits do, ``table`` lists the rank at every position.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    digits: tuple[tuple[int, int], ...]
    table: tuple[int, ...] | None = None

    def rank_at(self, position: int) -> int:
        """Return the rank at a position."""
        if self.table is not None:
            return self.table[position]
        rank = 0
        for size, stride in reversed(self.digits):
            position, digit = divmod(position, size)
            rank += digit * stride
        return rank

    def position_of(self, rank: int) -> int:
        """Return the position of a rank, the inverse of `rank_at`."""
        if self.table is not None:
            return self.table.index(rank)
        position, weights = 0, _strides([size for size, _ in self.digits])
        for (size, stride), weight in zip(self.digits, weights, strict=True):
            position += rank // stride % size * weight
        return position

    def ranks(self) -> Sequence[int]:
        """Return the rank at every position."""
        if self.in_rank_order:
            return range(prod(self.shape))
        if self.table is not None:
            return self.table
        ranks = [0]
        for size, stride in self.digits:
            ranks = [rank + digit * stride for rank in ranks for digit in range(size)]
        return ranks

    @property
    def in_rank_order(self) -> bool:
        """Return whether every rank is its own position."""
        return len(self.digits) == 1 and self.table is None

    def stride(self, axis: int) -> int:
        """Return how many positions lie between neighbours on an axis."""
        return prod(self.shape[axis + 1 :])


class RankLayout:
    """Which rank sits where, for every axis and alias of every view.

    Made by `ParallelDims.layout`. Nothing here communicates; an axis's group costs time in
    proportion to its own size, so that a layout of 100,000 ranks is as cheap as one of four.
    Unknown names and ranks raise `LayoutError`.
    """

    __slots__ = ("_aliases", "_sizes", "_views", "world_size")

    def __init__(self, cutting: Cutting, order: Sequence[str]) -> None:
        sizes = axis_sizes(cutting)
        # Folded experts have no place of their own among the ranks.
        base = [name for name in order if name != "ep" or cutting.peer]
        strides = dict(zip(base, _strides([sizes[name] for name in base]), strict=True))
        self.world_size = prod(sizes[name] for name in base)
        self._sizes = sizes
        self._aliases = aliases(cutting)
        self._views = {
            name: _cut_view(name, cuts, sizes, strides, base)
            for name, cuts in view_cuts(cutting).items()
        }

    @property
    def views(self) -> Mapping[str, View]:
        """Return the views by name, in the order in which axis names are looked up."""
        return self._views

    @property
    def names(self) -> tuple[str, ...]:
        """Return every axis and alias, each once."""
        return (*dict.fromkeys(a for v in self._views.values() for a in v.axes), *self._aliases)

    def find(self, *names: str) -> tuple[View, tuple[str, ...]]:
        """Return the first view that has all these axes, and their names without aliases."""
        if not names:
            raise LayoutError(f"no axis given; use one or more of {join_words(self.names)}")
        axes = tuple(self._aliases.get(name, name) for name in names)
        for name, axis in zip(names, axes, strict=True):
            if axis not in self._sizes:
                raise LayoutError(self._unknown(name))
        if len(set(axes)) < len(axes):
            raise LayoutError(f"{list(names)} given, which are {list(axes)}; use each axis once")
        for view in self._views.values():
            if all(axis in view.axes for axis in axes):
                return view, axes
        raise LayoutError(self._mixed(names, axes))

    def size(self, name: str) -> int:
        """Return the number of ranks on an axis or alias."""
        _, (axis,) = self.find(name)
        return self._sizes[axis]

    def coordinate(self, name: str, rank: int) -> int:
        """Return a rank's coordinate on one axis or alias."""
        view, (axis,) = self.find(name)
        index = view.axes.index(axis)
        return view.position_of(self._checked(rank)) // view.stride(index) % view.shape[index]

    def coordinates(self, rank: int, view: str = "base") -> dict[str, int]:
        """Return a rank's coordinate on every axis of a view, outermost first."""
        cut = self._view(view)
        position = cut.position_of(self._checked(rank))
        return {name: position // cut.stride(i) % cut.shape[i] for i, name in enumerate(cut.axes)}

    def rank(self, coordinates: Mapping[str, int], view: str = "base") -> int:
        """Return the rank at the given coordinates, one for every axis of the view."""
        cut = self._view(view)
        if set(coordinates) != set(cut.axes):
            raise LayoutError(f"coordinates of {sorted(coordinates)} given; use {list(cut.axes)}")
        position = 0
        for i, (name, size) in enumerate(zip(cut.axes, cut.shape, strict=True)):
            if not 0 <= coordinates[name] < size:
                raise LayoutError(f"{name}={coordinates[name]} given; use 0 to {size - 1}")
            position += coordinates[name] * cut.stride(i)
        return cut.rank_at(position)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along an axis, in axis order.

        That order is always ascending, which is how torch orders the ranks of a process group.
        """
        view, (axis,) = self.find(name)
        index = view.axes.index(axis)
        size, stride = view.shape[index], view.stride(index)
        position = view.position_of(self._checked(rank))
        first = position - position // stride % size * stride
        positions = range(first, first + size * stride, stride)
        return tuple(positions if view.in_rank_order else map(view.rank_at, positions))

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """Return all groups of an axis or alias, sorted by their first rank."""
        view, (axis,) = self.find(name)
        index = view.axes.index(axis)
        size, stride = view.shape[index], view.stride(index)
        ranks = view.ranks()
        return sorted(
            tuple(ranks[first : first + size * stride : stride])
            for block in range(0, self.world_size, size * stride)
            for first in range(block, block + stride)
        )

    def crosses_nodes(self, name: str, ranks_per_node: int) -> bool:
        """Return whether a group of an axis or alias has ranks of several nodes.

        Node ``i`` holds the ranks from ``i * ranks_per_node`` on.
        """
        return any(
            group[0] // ranks_per_node != group[-1] // ranks_per_node for group in self.groups(name)
        )

    def _view(self, name: str) -> View:
        if name not in self._views:
            raise LayoutError(f"no view {name!r}; use {join_words(self._views)}")
        return self._views[name]

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank={rank} is not in a world of {self.world_size}; "
                f"use 0 to {self.world_size - 1}"
            )
        return rank

    def _unknown(self, name: str) -> str:
        hint = " (set ulysses_degree to have it)" if name in ("ulysses", "cp_outer") else ""
        return f"no axis {name!r}{hint}; use {join_words(self.names)}"

    def _mixed(self, names: tuple[str, ...], axes: tuple[str, ...]) -> str:
        homes = (
            f"{name} is in {join_words(v.name for v in self._views.values() if a in v.axes)}"
            for name, a in zip(names, axes, strict=True)
        )
        table = "; ".join(f"{v.name}: {' '.join(v.axes)}" for v in self._views.values())
        return f"no view has all of {list(names)}: {', '.join(homes)}. Views: {table}"


def _strides(sizes: Sequence[int]) -> list[int]:
    return [prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _cut_view(
    name: str,
    cuts: tuple[Cut, ...],
    sizes: Mapping[str, int],
    strides: Mapping[str, int],
    order: Sequence[str],
) -> View:
    axes = tuple(axis for cut in cuts for axis in cut.axes)
    digits: list[tuple[int, int]] = []
    for part in (part for cut in cuts for part in _fold_order(cut, order)):
        size, stride = sizes[part], strides[part]
        if size == 1:
            continue
        if digits and digits[-1][1] == size * stride:
            size *= digits.pop()[0]
        digits.append((size, stride))
    shape = tuple(sizes[axis] for axis in axes)
    view = View(name=name, axes=axes, shape=shape, digits=tuple(digits) or ((1, 1),))
    for cut in cuts:
        if (
            cut.outside
            and sizes[cut.parts[0]] > 1
            and _fold_order(cut, order) != _by_order(cut, order)
        ):
            return _sort_along(view, axes.index(cut.axes[0]))
    return view


def _fold_order(cut: Cut, order: Sequence[str]) -> list[str]:
    # In rank order, so that the groups of a fold come out ascending.
    parts = _by_order(cut, order)
    return sorted(parts, key=cut.parts[0].__ne__) if cut.outside else parts


def _by_order(cut: Cut, order: Sequence[str]) -> list[str]:
    return sorted(cut.parts, key=order.index)


def _sort_along(view: View, axis: int) -> View:
    """Return the view with the ranks along one axis ascending, as torch orders those of a group."""
    size, stride, ranks = view.shape[axis], view.stride(axis), [*view.ranks()]
    for block in range(0, len(ranks), size * stride):
        for first in range(block, block + stride):
            along = slice(first, first + size * stride, stride)
            ranks[along] = sorted(ranks[along])
    return replace(view, digits=(), table=tuple(ranks))
