"""Layouts, each in one spelling, and the splits of each dim, axis after axis."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeAlias, cast

from ._boxes import Box as Box
from ._boxes import Interval, Split, chunk, pieces, ravel, run_boxes, unravel
from ._errors import LayoutError, MeshError
from ._placements import (
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    in_tuple,
    split_dims,
)

ShardOrder: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
AxisSplit: TypeAlias = tuple[int, int]  # (axis, split factor)
AxisSplits: TypeAlias = dict[int, tuple[AxisSplit, ...]]


def checked_shape(mesh_shape: object) -> tuple[int, ...]:
    """Return the shape of a mesh as a tuple; raises `LayoutError` for what is none."""
    shape = whole_numbers(mesh_shape)
    if shape is None:
        raise LayoutError(
            f"mesh_shape={mesh_shape!r} is no shape of a mesh; give a sequence of degrees, one for "
            "each axis, such as (2, 4) or (8,)"
        )
    return shape


def checked_placements(placements: object, mesh_shape: Sequence[int]) -> tuple[Placement, ...]:
    """Return the placements as a tuple; raises what is wrong with them on a mesh of this shape."""
    result = in_tuple(placements)
    if any(degree < 1 for degree in mesh_shape):
        raise MeshError(f"a mesh of shape {tuple(mesh_shape)} has no ranks")
    check_count(result, mesh_shape)
    for placement in result:
        if not isinstance(placement, Placement):
            raise LayoutError(
                f"{placement!r} of {type(placement).__module__} is no placement of a layout; use "
                "Replicate(), Shard(dim), StridedShard(dim, split_factor), "
                "RaggedShard(dims, sizes) or Partial(op) of this package"
            )
    ops = {p.op for p in result if isinstance(p, Partial)}
    # Sums and averages are both linear, and so may be taken in any order.
    if len(ops) > 1 and ops != {"sum", "avg"}:
        raise LayoutError(
            f"partial values with {' and '.join(sorted(ops))} have no defined order of "
            "reduction; use one op on all axes, or reduce one axis first"
        )
    ragged = [axis for axis, p in enumerate(result) if isinstance(p, RaggedShard)]
    for axis in ragged:
        if len(result[axis].sizes) != mesh_shape[axis]:
            raise LayoutError(
                f"{result[axis]} on mesh axis {axis} of degree {mesh_shape[axis]}; give "
                f"{mesh_shape[axis]} sizes, one for each coordinate"
            )
    if len(ragged) > 1:
        raise LayoutError(
            f"the mesh axes {ragged} all hold ragged runs, which begin at dim 0; only one axis can"
        )
    return result


def check_count(placements: Sequence[object], mesh_shape: Sequence[int]) -> None:
    """Raise `LayoutError` unless there is a placement for each mesh axis."""
    if len(placements) != len(mesh_shape):
        raise LayoutError(
            f"{len(placements)} placements for a mesh of shape {tuple(mesh_shape)}; give "
            f"{len(mesh_shape)}, one for each axis"
        )


def ordered(
    placements: tuple[Placement, ...],
    mesh_shape: Sequence[int],
    given: ShardOrder | Mapping[int, Sequence[int]] | None,
) -> tuple[tuple[Placement, ...], ShardOrder | None]:
    """Return the placements and the order in which axes shard each dim, in one spelling.

    The order lists dims that are not split in mesh order, and those that some axis splits into
    blocks. Raises `LayoutError`.
    """
    given_order = dict(checked_order(given))
    spelled: list[Placement] = [
        Shard(p.dim) if isinstance(p, StridedShard) and p.split_factor == 1 else p
        for p in placements
    ]
    kept = []
    sharded = {p.dim for p in placements if isinstance(p, Shard | StridedShard)}
    for dim in sorted(sharded | set(given_order)):
        in_mesh_order = tuple(
            axis
            for axis, p in enumerate(placements)
            if isinstance(p, Shard | StridedShard) and p.dim == dim
        )
        axes = given_order.get(dim)
        if axes is None:
            axes = _spelled_order(dim, in_mesh_order, spelled, mesh_shape)
        elif tuple(sorted(axes)) != in_mesh_order:
            raise LayoutError(
                f"shard order {axes} for dim {dim}, which the axes {in_mesh_order} shard; "
                "list each of them once, the one that splits first in front"
            )
        if axes != in_mesh_order or any(isinstance(spelled[a], StridedShard) for a in axes):
            kept.append((dim, axes))
    return tuple(spelled), tuple(kept) or None


def checked_order(given: object) -> ShardOrder:
    """Return a shard order as pairs of a dim and its axes; raises `LayoutError`."""
    pairs: Any = () if given is None else given.items() if isinstance(given, Mapping) else given
    try:
        order = tuple((dim, tuple(axes)) for dim, axes in pairs)
        whole = all(isinstance(number, int) for dim, axes in order for number in (dim, *axes))
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise LayoutError(
            f"shard_order={given!r} gives no axes for each dim; write {{0: (1, 0)}} or "
            "((0, (1, 0)),) where axis 1 splits dim 0 first, axis 0 then"
        )
    return order


def checked_ranks(
    ranks: Sequence[int] | None, mesh_shape: Sequence[int]
) -> range | tuple[int, ...] | None:
    """Return the ranks, evenly spaced ones as a range; None for ``0 .. n-1``."""
    if ranks is None:
        return None
    size = math.prod(mesh_shape)
    given = ranks if isinstance(ranks, range) else tuple(ranks)
    if len(given) != size or (not isinstance(given, range) and len(set(given)) != size):
        raise MeshError(
            f"a mesh of shape {tuple(mesh_shape)} needs {size} different ranks, got {len(given)}"
        )
    step = given[1] - given[0] if size > 1 else 1
    spaced = range(given[0], given[0] + step * size, step)
    if spaced == range(size):
        return None
    return spaced if isinstance(given, range) or given == tuple(spaced) else given


def _spelled_order(
    dim: int, axes: Sequence[int], placements: list[Placement], mesh_shape: Sequence[int]
) -> tuple[int, ...]:
    """Return the order that split factors spell, and put plain shards where they do.

    An axis whose factor is the product of the degrees of later axes that split the dim first splits
    next after these. Any other factor means what it says, in mesh order.
    """
    order: list[int] = []
    for axis in reversed(axes):
        placement = placements[axis]
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        before = 1
        place = 0
        while before != factor and place < len(order):
            if isinstance(placements[order[place]], StridedShard):
                break
            before *= mesh_shape[order[place]]
            place += 1
        if before == factor:
            placements[axis] = Shard(dim)
            order.insert(place, axis)
        else:
            order.insert(0, axis)
    return tuple(order)


@dataclass(frozen=True, slots=True)
class Layout:
    """Placements of a tensor on a mesh, with the order in which axes shard the same dim.

    The same layout can be written with a `StridedShard` or with a ``shard_order``; both compare
    equal. Layouts do not need torch.

    Args:
        mesh_shape: Number of ranks on each mesh axis, outermost first.
        placements: One placement for each axis: `Replicate`, `Shard`, `StridedShard`, `RaggedShard`
            or `Partial`.
        shard_order: For each tensor dim, the mesh axes that shard it, in the order in which they
            split the dim. Defaults to mesh order, or to the order that the split factors of
            `StridedShard` imply. An axis with a `RaggedShard` always splits last and is not listed.
        ranks: Global ranks of the mesh in row-major order. Defaults to
            ``0 .. prod(mesh_shape) - 1``.

    Raises:
        LayoutError: The placements, orders or sizes contradict each other.
        MeshError: The mesh has no ranks, or ``ranks`` has a wrong number of them or duplicates.

    Examples:
        >>> Layout((2, 4), (Shard(0), Shard(0)), shard_order={0: (1, 0)}).boxes((16, 4), rank=3)
        (((12, 14), (0, 4)),)
    """

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    shard_order: ShardOrder | Mapping[int, Sequence[int]] | None = None
    ranks: Sequence[int] | None = None
    _positions: Mapping[int, int] | None = field(
        init=False, repr=False, compare=False, default=None
    )

    def __post_init__(self) -> None:
        _set(self, "mesh_shape", checked_shape(self.mesh_shape))
        placements = checked_placements(self.placements, self.mesh_shape)
        placements, order = ordered(placements, self.mesh_shape, self.shard_order)
        _set(self, "placements", placements)
        _set(self, "shard_order", order)
        ranks = checked_ranks(self.ranks, self.mesh_shape)
        _set(self, "ranks", ranks)
        if isinstance(ranks, tuple):
            _set(self, "_positions", {rank: place for place, rank in enumerate(ranks)})

    def __hash__(self) -> int:
        # Many ranks would make each look-up in a cache slow; the first and last tell enough.
        ends = None if self.ranks is None else (self.ranks[0], self.ranks[-1])
        return hash((self.mesh_shape, self.placements, self.shard_order, ends))

    @property
    def size(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.mesh_shape)

    @property
    def has_partial(self) -> bool:
        """Whether any mesh axis has a `Partial` placement."""
        return any(isinstance(p, Partial) for p in self.placements)

    @property
    def is_plain(self) -> bool:
        """Whether no axis has a `StridedShard` or a `RaggedShard`.

        Each rank then holds at most one rectangular region of the tensor.
        """
        return not any(isinstance(p, StridedShard | RaggedShard) for p in self.placements)

    @property
    def ragged(self) -> tuple[int, RaggedShard] | None:
        """Mesh axis that has a `RaggedShard`, and this `RaggedShard`. None if there is none."""
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, RaggedShard):
                return axis, placement
        return None

    def shard_axes(self, dim: int) -> tuple[int, ...]:
        """Return the mesh axes that shard a tensor dim.

        Args:
            dim: Tensor dim.

        Returns:
            Positions of the axes in the mesh, in the order in which they split the dim. The axis of
            a `RaggedShard` is not included.
        """
        for dim_in_order, axes in _pairs(self):
            if dim_in_order == dim:
                return axes
        return tuple(
            a for a, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == dim
        )

    def degrees(self, dim: int) -> tuple[int, ...]:
        """Return the number of ranks on each axis that shards a tensor dim.

        Args:
            dim: Tensor dim.

        Returns:
            One number for each axis, in the order of `shard_axes`.
        """
        return tuple(self.mesh_shape[a] for a in self.shard_axes(dim))

    def splits(self, dim: int) -> tuple[Split, ...]:
        """Return the degree and the split factor of each axis that shards a tensor dim.

        Args:
            dim: Tensor dim.

        Returns:
            One pair ``(degree, split factor)`` for each axis, in the order of `shard_axes`. The
            degree is the number of ranks on the axis. The split factor is 1 for `Shard`.
        """
        found = []
        for axis in self.shard_axes(dim):
            placement = self.placements[axis]
            factor = placement.split_factor if isinstance(placement, StridedShard) else 1
            found.append((self.mesh_shape[axis], factor))
        return tuple(found)

    def check(self, ndim: int) -> None:
        """Check that a tensor has every dim that this layout shards.

        Args:
            ndim: Number of dims of the tensor.

        Raises:
            LayoutError: A sharded dim does not exist.
        """
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, RaggedShard):
                wrong = len(placement.dims) > ndim
            else:
                wrong = isinstance(placement, Shard | StridedShard) and not (
                    0 <= placement.dim < ndim
                )
            if wrong:
                legal = f"0 to {ndim - 1}" if ndim else "none, as it is a scalar"
                raise LayoutError(
                    f"{placement} on mesh axis {axis} of a tensor with {ndim} dims; "
                    f"dims that can be sharded: {legal}"
                )

    def check_shape(self, shape: Sequence[int]) -> None:
        """Check that a tensor can have this layout.

        Args:
            shape: Global shape.

        Raises:
            LayoutError: A size is negative or not an integer; a sharded dim does not exist; the
                ``sizes`` of a `RaggedShard` do not add up to the number of elements that it splits;
                or another axis splits a dim of the `RaggedShard` unevenly.
        """
        self.check(len(checked_sizes(shape)))
        if self.ragged is None:
            return
        axis, placement = self.ragged
        count = 1
        for dim in placement.dims:
            others = math.prod(self.degrees(dim))
            plain = all(factor == 1 for _, factor in self.splits(dim))
            if shape[dim] % others or not plain:
                raise LayoutError(
                    f"{placement} on mesh axis {axis} runs over dim {dim} of length {shape[dim]}, "
                    f"which the axes {self.shard_axes(dim)} split; they must cut it into {others} "
                    "equal consecutive parts"
                )
            count *= shape[dim] // others
        if placement.starts[-1] != count:
            raise LayoutError(
                f"the sizes of {placement} on mesh axis {axis} sum to {placement.starts[-1]}; they "
                f"must sum to {count}, the elements of dims {placement.dims} of {tuple(shape)} "
                "there"
            )

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of a rank on each mesh axis.

        Args:
            rank: Global rank.

        Returns:
            One coordinate for each mesh axis.

        Raises:
            MeshError: The rank is not in the mesh.
        """
        if (position := self._position(rank)) is None:
            raise MeshError(
                f"rank {rank} is not in the mesh of shape {self.mesh_shape}; its ranks: "
                f"{self.ranks_in_words()}"
            )
        return unravel(position, self.mesh_shape)

    def holds(self, rank: int) -> bool:
        """Return whether a rank is in the mesh.

        Args:
            rank: Global rank.

        Returns:
            True if the mesh contains the rank.
        """
        return self._position(rank) is not None

    def all_ranks(self) -> Sequence[int]:
        """Return the global ranks of the mesh.

        Returns:
            Ranks in row-major order.
        """
        return range(self.size) if self.ranks is None else self.ranks

    def ranks_in_words(self) -> str:
        """Describe the ranks of the mesh for an error message.

        Returns:
            Text such as ``"4 to 7"`` for consecutive ranks, else the list of ranks.
        """
        ranks = self.all_ranks()
        if isinstance(ranks, range) and ranks.step == 1 and len(ranks) > 2:
            return f"{ranks[0]} to {ranks[-1]}"
        return str(list(ranks))

    def _position(self, rank: int) -> int | None:
        if self._positions is not None:
            return self._positions.get(rank)
        ranks = self.all_ranks()
        return ranks.index(rank) if rank in ranks else None

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the global rank at a coordinate of the mesh.

        Args:
            coordinate: One number for each mesh axis.

        Returns:
            The global rank.
        """
        position = ravel(coordinate, self.mesh_shape)
        return position if self.ranks is None else self.ranks[position]

    def intervals_at(
        self, shape: Sequence[int], coordinate: Sequence[int]
    ) -> list[tuple[Interval, ...]]:
        """Return the index ranges of each dim at a coordinate, before a `RaggedShard` splits them.

        Args:
            shape: Global shape.
            coordinate: One number for each mesh axis.

        Returns:
            One tuple for each dim: half-open ranges ``(start, stop)`` of global indices, in
            ascending order.
        """
        return [
            self.intervals_of(shape, dim, [coordinate[a] for a in self.shard_axes(dim)])
            for dim in range(len(shape))
        ]

    def intervals_of(
        self, shape: Sequence[int], dim: int, index: Sequence[int]
    ) -> tuple[Interval, ...]:
        """Return the index ranges of one dim, before a `RaggedShard` splits them.

        Args:
            shape: Global shape.
            dim: Tensor dim.
            index: One coordinate for each axis that shards the dim, in the order of `shard_axes`.

        Returns:
            Half-open ranges ``(start, stop)`` of global indices, in ascending order.
        """
        return pieces(shape[dim], self.splits(dim), index)

    def run_at(self, coordinate: Sequence[int]) -> Interval:
        """Return the range of elements that the `RaggedShard` assigns to a coordinate.

        Args:
            coordinate: One number for each mesh axis.

        Returns:
            Half-open range ``(start, stop)`` of positions in the flattened leading dims. If other
            axes shard these dims, positions count within the part of this coordinate.

        Raises:
            LayoutError: The layout has no `RaggedShard`.
        """
        if self.ragged is None:
            raise LayoutError(f"{self} has no ragged axis")
        axis, placement = self.ragged
        return placement.starts[coordinate[axis]], placement.starts[coordinate[axis] + 1]

    def box_at(self, shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        """Return the box of elements at a coordinate. Use it only if `is_plain` is True.

        A box is a rectangular region of the tensor: one half-open range of global indices per dim.

        Args:
            shape: Global shape.
            coordinate: One number for each mesh axis.

        Returns:
            One range ``(start, stop)`` for each dim. At least one range is empty if the coordinate
            holds no elements.
        """
        return tuple(
            chunk(length, self.degrees(dim), [coordinate[a] for a in self.shard_axes(dim)])
            for dim, length in enumerate(shape)
        )

    def boxes_at(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[Box, ...]:
        """Return the boxes of elements at a coordinate, without checking the shape.

        A box is a rectangular region of the tensor: one half-open range of global indices per dim.

        Args:
            shape: Global shape.
            coordinate: One number for each mesh axis.

        Returns:
            Boxes in the order of the local tensor. Each box has one range ``(start, stop)`` for
            each dim.
        """
        grid = self.intervals_at(shape, coordinate)
        if self.ragged is None:
            return tuple(product(*grid))
        leading = len(self.ragged[1].dims)
        if not all(grid[:leading]):
            return ()
        frame = tuple(ranges[0] for ranges in grid[:leading])
        runs = run_boxes(frame, *self.run_at(coordinate))
        return tuple((*run, *rest) for run in runs for rest in product(*grid[leading:]))

    def boxes(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        """Return the boxes of elements that a rank holds.

        A box is a rectangular region of the tensor: one half-open range of global indices per dim.

        Args:
            shape: Global shape.
            rank: Global rank.

        Returns:
            Boxes in the order of the local tensor. Each box has one range ``(start, stop)`` for
            each dim. There are no boxes if the rank holds no elements.

        Raises:
            LayoutError: A tensor of this shape cannot have this layout; see `check_shape`.
            MeshError: The rank is not in the mesh.
        """
        self.check_shape(shape)
        return self.boxes_at(shape, self.coordinate(rank))

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's local tensor.

        Args:
            shape: Global shape.
            rank: Global rank.

        Returns:
            The local shape.

        Raises:
            LayoutError: A tensor of this shape cannot have this layout; see `check_shape`.
            MeshError: The rank is not in the mesh.
        """
        self.check_shape(shape)
        coordinate = self.coordinate(rank)
        lengths = [
            sum(hi - lo for lo, hi in ranges) for ranges in self.intervals_at(shape, coordinate)
        ]
        if self.ragged is not None:
            start, stop = self.run_at(coordinate)
            lengths[: len(self.ragged[1].dims)] = [stop - start]
        return tuple(lengths)

    def is_even(self, shape: Sequence[int]) -> bool:
        """Return whether every axis splits its dim evenly, so that all local shapes are equal.

        Args:
            shape: Global shape.

        Returns:
            True if every split is even. False for a layout with `StridedShard` or `RaggedShard`.
        """
        return self.is_plain and all(
            n % math.prod(self.degrees(dim)) == 0 for dim, n in enumerate(shape)
        )

    def __str__(self) -> str:
        text = "(" + ", ".join(map(str, self.placements)) + ")"
        for dim, axes in _pairs(self):
            text += f" dim {dim} by axes {axes}"
        return text


def checked_sizes(shape: object) -> tuple[int, ...]:
    """Return the shape of a tensor as a tuple; raises `LayoutError` for what is none."""
    sizes = whole_numbers(shape)
    if sizes is None:
        raise LayoutError(f"shape={shape!r} is no shape of a tensor; give a sequence of sizes")
    if min(sizes, default=0) < 0:
        raise LayoutError(f"shape={sizes} has negative sizes; give sizes of 0 or more")
    return sizes


def whole_numbers(values: object) -> tuple[int, ...] | None:
    """Return numbers as plain ints, None where some are not whole numbers.

    What is kept between calls is found by equal numbers: 4.0 would stand for 4 in later calls.
    """
    try:
        return tuple(map(int, map(operator.index, cast(Any, values))))
    except TypeError:
        return None


def _pairs(layout: Layout) -> ShardOrder:
    order = layout.shard_order
    # __post_init__ leaves a normalised tuple or None.
    return order if isinstance(order, tuple) else ()


def _set(layout: Layout, name: str, value: object) -> None:
    object.__setattr__(layout, name, value)


def axis_splits(layout: Layout, dim: int) -> tuple[AxisSplit, ...]:
    """Return the axes that split ``dim`` in turn, each with its factor."""
    return tuple(
        (axis, factor)
        for axis, (_, factor) in zip(layout.shard_axes(dim), layout.splits(dim), strict=True)
    )


def all_axis_splits(layout: Layout) -> AxisSplits:
    """Return `axis_splits` of each dim that is split."""
    dims = {p.dim for p in layout.placements if isinstance(p, Shard | StridedShard)}
    return {dim: axis_splits(layout, dim) for dim in sorted(dims)}


def with_axis_splits(layout: Layout, splits: Mapping[int, Sequence[AxisSplit]]) -> Layout:
    """Return the layout with dims split as ``splits`` say; axes in none become replicated.

    Partial and ragged axes that are in none keep what they have.
    """
    placements: list[Placement] = [
        Replicate() if isinstance(p, Shard | StridedShard) else p for p in layout.placements
    ]
    for dim, of_dim in splits.items():
        for axis, factor in of_dim:
            placements[axis] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    order = tuple((dim, tuple(a for a, _ in of_dim)) for dim, of_dim in splits.items() if of_dim)
    return replace(layout, placements=tuple(placements), shard_order=order)


def with_split(layout: Layout, dim: int, split: AxisSplit) -> Layout:
    """Return the layout with one more split of ``dim``, after the others."""
    splits = all_axis_splits(layout)
    splits[dim] = (*splits.get(dim, ()), split)
    return with_axis_splits(layout, splits)


def without_last_split(layout: Layout, dim: int) -> Layout:
    """Return the layout without the last split of ``dim``."""
    splits = all_axis_splits(layout)
    splits[dim] = splits[dim][:-1]
    return with_axis_splits(layout, splits)


def without(layout: Layout, dim: int, place: int) -> Layout:
    """Return the layout without one split of ``dim``, each rank keeping all that it holds.

    Later splits then cut every block that the split had made; for lengths that divide evenly.
    """
    splits = all_axis_splits(layout)
    of_dim = splits[dim]
    degree = layout.mesh_shape[of_dim[place][0]]
    later = tuple((axis, factor * degree) for axis, factor in of_dim[place + 1 :])
    splits[dim] = (*of_dim[:place], *later)
    return with_axis_splits(layout, splits)


def with_placement(layout: Layout, axis: int, placement: Placement) -> Layout:
    """Return the layout with another placement, that splits no dim in turn, on one axis."""
    placements = list(layout.placements)
    placements[axis] = placement
    return replace(layout, placements=tuple(placements))


def reduced_layout(layout: Layout) -> Layout:
    """Return the layout with partial values replicated: that of a gradient, too."""
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            layout = with_placement(layout, axis, Replicate())
    return layout


def common(a: Sequence[AxisSplit], b: Sequence[AxisSplit]) -> int:
    """Return how many splits both begin with."""
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def same_runs(a: Layout, b: Layout) -> bool:
    """Return whether both hold the same ragged runs, of parts split alike."""
    if a.ragged is None or a.ragged != b.ragged:
        return False
    return all(axis_splits(a, dim) == axis_splits(b, dim) for dim in a.ragged[1].dims)


def replicated(layout: Layout) -> Layout:
    """Return the layout with axes of degree one, which mean nothing, replicated."""
    if 1 not in layout.mesh_shape:
        return layout
    splits = {
        dim: [split for split in of_dim if layout.mesh_shape[split[0]] > 1]
        for dim, of_dim in all_axis_splits(layout).items()
    }
    placements = tuple(
        Replicate() if degree == 1 and isinstance(p, Partial | RaggedShard) else p
        for degree, p in zip(layout.mesh_shape, layout.placements, strict=True)
    )
    return with_axis_splits(replace(layout, placements=placements), splits)


def is_local(src: Layout, dst: Layout, ndim: int) -> bool:
    """Return whether every rank holds all that it needs, whatever the shape."""
    if src.ragged is not None and not same_runs(src, dst):
        return False
    return all(
        common(axis_splits(src, dim), axis_splits(dst, dim)) == len(src.shard_axes(dim))
        for dim in range(ndim)
    )


def moving_axes(src: Layout, dst: Layout, ndim: int) -> tuple[int, ...]:
    """Return the axes on which senders and receivers of `plan_transfer` can differ."""
    divided = {dim for dim in range(ndim) if src.shard_axes(dim)}
    if src.ragged is not None:
        divided.update(src.ragged[1].dims)
    still = _splitting_alike(src, dst, ndim)
    for axis, (old, new) in enumerate(zip(src.placements, dst.placements, strict=True)):
        alone = src.mesh_shape[axis] == 1 or isinstance(old, Partial)
        cut_here = isinstance(old, Replicate) and not divided.intersection(split_dims(new))
        if alone or cut_here:
            still.add(axis)
    return tuple(axis for axis in range(len(src.mesh_shape)) if axis not in still)


def unchanged_axes(src: Layout, dst: Layout, ndim: int) -> frozenset[int]:
    """Return the axes along which every rank keeps its part: no step may involve their ranks.

    Both layouts replicate them or hold the same partial values there, or they split a dim first and
    alike in both.
    """
    kept = {
        axis
        for axis, (old, new) in enumerate(zip(src.placements, dst.placements, strict=True))
        if src.mesh_shape[axis] == 1 or (old == new and isinstance(old, Replicate | Partial))
    }
    return frozenset(kept | _splitting_alike(src, dst, ndim))


def _splitting_alike(src: Layout, dst: Layout, ndim: int) -> set[int]:
    """Return the axes that split a dim first, and alike in both layouts, or hold the same runs."""
    found: set[int] = set()
    for dim in range(ndim):
        of_dim = axis_splits(src, dim)
        found.update(axis for axis, _ in of_dim[: common(of_dim, axis_splits(dst, dim))])
    if src.ragged is not None and same_runs(src, dst):
        found.add(src.ragged[0])
    return found
