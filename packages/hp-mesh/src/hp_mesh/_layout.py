"""Ranks, coordinates and groups in closed form, without a process group."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import SupportsIndex

from ._errors import LayoutError, join_words, show
from ._positions import View as View
from ._positions import strides_of
from ._views import Cut, Cutting, aliases, axis_sizes, view_cuts


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
        strides = dict(zip(base, strides_of([sizes[name] for name in base]), strict=True))
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
        axes = tuple(map(self._axis, names))
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
        return view.index_of(view.axes.index(axis), view.position_of(self._checked(rank)))

    def coordinates(self, rank: int, view: str = "base") -> dict[str, int]:
        """Return a rank's coordinate on every axis of a view, outermost first."""
        cut = self._view(view)
        position = cut.position_of(self._checked(rank))
        return {name: cut.index_of(i, position) for i, name in enumerate(cut.axes)}

    def rank(self, coordinates: Mapping[str, int], view: str = "base") -> int:
        """Return the rank at the given coordinates, one for every axis of the view."""
        cut = self._view(view)
        given = _keys(coordinates)
        if given is None or {*given} != {*cut.axes}:
            shown = show(coordinates if given is None else given)
            raise LayoutError(f"coordinates of {shown} given; use {list(cut.axes)}")
        position = 0
        for i, (name, size) in enumerate(zip(cut.axes, cut.shape, strict=True)):
            number = _index(coordinates[name])
            if number is None or number >= size:
                raise LayoutError(f"{name}={show(coordinates[name])} given; use 0 to {size - 1}")
            position += number * cut.stride(i)
        return cut.rank_at(position)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along an axis, in axis order.

        That order is always ascending, which is how torch orders the ranks of a process group.
        """
        view, (axis,) = self.find(name)
        return tuple(view.along(view.axes.index(axis), view.position_of(self._checked(rank))))

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
        node = _index(ranks_per_node)
        if not node:
            raise LayoutError(
                f"ranks_per_node={show(ranks_per_node)} given; use a positive integer"
            )
        return any(group[0] // node != group[-1] // node for group in self.groups(name))

    def _view(self, name: object) -> View:
        if not isinstance(name, str) or name not in self._views:
            raise LayoutError(f"no view {show(name)}; use {join_words(self._views)}")
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
        homes = (
            f"{name} is in {join_words(v.name for v in self._views.values() if a in v.axes)}"
            for name, a in zip(names, axes, strict=True)
        )
        table = "; ".join(f"{v.name}: {' '.join(v.axes)}" for v in self._views.values())
        return f"no view has all of {list(names)}: {', '.join(homes)}. Views: {table}"


def _keys(mapping: object) -> list[object] | None:
    return [*mapping] if isinstance(mapping, Mapping) else None


def _index(value: object) -> int | None:
    """Return an integer of any type from 0, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    number = operator.index(value)
    return number if number >= 0 else None


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
            return replace(view, sorted_axis=axes.index(cut.axes[0]))
    return view


def _fold_order(cut: Cut, order: Sequence[str]) -> list[str]:
    # In rank order, so that the groups of a fold come out ascending.
    parts = _by_order(cut, order)
    return sorted(parts, key=cut.parts[0].__ne__) if cut.outside else parts


def _by_order(cut: Cut, order: Sequence[str]) -> list[str]:
    return sorted(cut.parts, key=order.index)
