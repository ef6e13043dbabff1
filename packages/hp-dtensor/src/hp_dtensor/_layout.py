"""Layouts: the placements of a tensor on a mesh, and the boxes that each rank holds."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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
)

# Pairs (tensor dim, mesh axes that shard the dim, in the order in which they split it). Example:
# ((0, (1, 0)),) means that axis 1 splits dim 0 first, and axis 0 second.
ShardOrder: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
AxisSplit: TypeAlias = tuple[int, int, int]  # (mesh axis, degree, split factor)
# Maps each sharded tensor dim to its splits, the first split in front. The degree is the number of
# ranks on the mesh axis. The split factor is 1 for `Shard`, and the number of blocks otherwise.
AxisSplits: TypeAlias = Mapping[int, tuple[AxisSplit, ...]]

_REPLICATE = Replicate()


@dataclass(frozen=True, slots=True)
class Layout:
    """The placements of a tensor on a mesh.

    If several mesh axes shard the same tensor dim, the layout also has the order in which they
    split the dim. This order can be given as ``shard_order``, or by the split factors of
    `StridedShard`. Both give equal layouts. Layouts do not need torch.

    Args:
        mesh_shape: Number of ranks on each mesh axis, outermost first.
        placements: One placement for each axis: `Replicate`, `Shard`, `StridedShard`, `RaggedShard`
            or `Partial`.
        shard_order: For each tensor dim, the mesh axes that shard it, in the order in which they
            split the dim. Defaults to mesh order, or to the order that the split factors of
            `StridedShard` imply. An axis with a `RaggedShard` always splits last and is not listed.
        ranks: Global ranks of the mesh in row-major order. Defaults to
            ``0 .. prod(mesh_shape) - 1``.

    Attributes:
        size: Number of ranks in the mesh.
        has_partial: Whether any mesh axis has a `Partial` placement.
        is_plain: Whether no axis has a `StridedShard` or a `RaggedShard`. If True, each rank holds
            at most one rectangular region of the tensor.
        ragged: Pair ``(mesh axis, RaggedShard)`` of the axis that has a `RaggedShard`. None if no
            axis has one.
        axis_splits: Dict with the splits of each sharded dim. A split is a tuple ``(mesh axis,
            degree, split factor)``. The degree is the number of ranks on the axis. The split factor
            is 1 for `Shard`. The axis that splits the dim first is in front.

    Raises:
        LayoutError: ``mesh_shape``, ``placements`` or ``shard_order`` is invalid, or they
            contradict each other.
        MeshError: The mesh has no ranks; or ``ranks`` has the wrong length, duplicates, or values
            that are not integers.

    Examples:
        >>> Layout((2, 4), (Shard(0), Shard(0)), shard_order={0: (1, 0)}).boxes((16, 4), rank=3)
        (((12, 14), (0, 4)),)
    """

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    shard_order: ShardOrder | Mapping[int, Sequence[int]] | None = None
    ranks: Sequence[int] | None = None
    size: int = field(init=False, repr=False, compare=False)
    has_partial: bool = field(init=False, repr=False, compare=False)
    is_plain: bool = field(init=False, repr=False, compare=False)
    ragged: tuple[int, RaggedShard] | None = field(init=False, repr=False, compare=False)
    axis_splits: AxisSplits = field(init=False, repr=False, compare=False)
    _positions: Mapping[int, int] | None = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        mesh_shape = _checked_shape(self.mesh_shape)
        placements = _checked_placements(self.placements, mesh_shape)
        splits = _checked_splits(placements, mesh_shape, self.shard_order)
        ranks = _checked_ranks(self.ranks, mesh_shape)
        positions = None
        if isinstance(ranks, tuple):
            positions = {rank: position for position, rank in enumerate(ranks)}
        _fill(self, mesh_shape, placements, splits, ranks, positions)

    def __hash__(self) -> int:
        return self._hash

    def shard_axes(self, dim: int) -> tuple[int, ...]:
        """Return the mesh axes that shard a tensor dim.

        Args:
            dim: Tensor dim.

        Returns:
            Numbers of the mesh axes, in the order in which they split the dim. Empty if no axis
            shards the dim. The axis of a `RaggedShard` is not included.
        """
        return tuple([axis for axis, _, _ in self.axis_splits.get(dim, ())])

    def degrees(self, dim: int) -> tuple[int, ...]:
        """Return the number of ranks on each axis that shards a tensor dim.

        Args:
            dim: Tensor dim.

        Returns:
            One number for each axis, in the order of `shard_axes`.
        """
        return tuple([degree for _, degree, _ in self.axis_splits.get(dim, ())])

    def splits(self, dim: int) -> tuple[Split, ...]:
        """Return the degree and the split factor of each axis that shards a tensor dim.

        Args:
            dim: Tensor dim.

        Returns:
            One pair ``(degree, split factor)`` for each axis, in the order of `shard_axes`. The
            degree is the number of ranks on the axis. The split factor is 1 for `Shard`.
        """
        return tuple([split[1:] for split in self.axis_splits.get(dim, ())])

    def check(self, ndim: int) -> None:
        """Check that a tensor has every dim that this layout shards.

        Args:
            ndim: Number of dims of the tensor.

        Raises:
            LayoutError: A sharded dim does not exist.
        """
        for axis, placement in enumerate(self.placements):
            dims = placement.split_dims
            if dims and not (min(dims) >= 0 and max(dims) < ndim):
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
            LayoutError: Raised in these cases:

                - A size is negative or not an integer.
                - A sharded dim does not exist.
                - The ``sizes`` of a `RaggedShard` do not add up to the number of elements that it
                  splits.
                - Another axis splits a dim of the `RaggedShard` unevenly, or with a split factor
                  above 1.
        """
        self.check(len(checked_sizes(shape)))
        if self.ragged is None:
            return
        axis, placement = self.ragged
        count = 1
        for dim in placement.dims:
            others = math.prod(self.degrees(dim))
            strided = any(factor != 1 for _, factor in self.splits(dim))
            if shape[dim] % others or strided:
                raise LayoutError(
                    f"{placement} on mesh axis {axis} runs over dim {dim} of length {shape[dim]}, "
                    f"which the axes {self.shard_axes(dim)} split; they must split it into "
                    f"{others} equal consecutive parts"
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
        if self._positions is not None:
            return rank in self._positions
        return rank in (range(self.size) if self.ranks is None else self.ranks)

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
        ranks = range(self.size) if self.ranks is None else self.ranks
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
        """Return the index ranges of each tensor dim that the rank at a mesh coordinate holds.

        A `RaggedShard` is ignored. Use `run_at` for it.

        Args:
            shape: Global shape.
            coordinate: One number for each mesh axis.

        Returns:
            One tuple for each dim: half-open ranges ``(start, stop)`` of global indices, in
            ascending order.
        """
        found: list[tuple[Interval, ...]] = []
        for dim, length in enumerate(shape):
            if splits := self.axis_splits.get(dim):
                index = [coordinate[axis] for axis, _, _ in splits]
                found.append(self.intervals_of(shape, dim, index))
            else:
                found.append(((0, length),) if length else ())
        return found

    def intervals_of(
        self, shape: Sequence[int], dim: int, index: Sequence[int]
    ) -> tuple[Interval, ...]:
        """Return the index ranges of one tensor dim that a rank holds.

        A `RaggedShard` is ignored. Use `run_at` for it.

        Args:
            shape: Global shape.
            dim: Tensor dim.
            index: Coordinate of the rank on each axis that shards the dim, in the order of
                `shard_axes`.

        Returns:
            Half-open ranges ``(start, stop)`` of global indices, in ascending order.
        """
        return pieces(shape[dim], self.splits(dim), index)

    def run_at(self, coordinate: Sequence[int]) -> Interval:
        """Return the range of elements that the `RaggedShard` assigns to a mesh coordinate.

        Args:
            coordinate: One number for each mesh axis.

        Returns:
            Half-open range ``(start, stop)`` of positions in the flattened leading dims. If other
            axes shard these dims too, position 0 is the start of the shard of the other axes.

        Raises:
            LayoutError: The layout has no `RaggedShard`.
        """
        if self.ragged is None:
            raise LayoutError(f"{self} has no ragged axis")
        axis, placement = self.ragged
        return placement.starts[coordinate[axis]], placement.starts[coordinate[axis] + 1]

    def box_at(self, shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        """Return the box that the rank at a mesh coordinate holds.

        Valid only if `is_plain` is True. For other layouts, use `boxes_at`.

        A box is a rectangular region of the tensor: one half-open range of global indices per dim.

        Args:
            shape: Global shape.
            coordinate: One number for each mesh axis.

        Returns:
            One range ``(start, stop)`` for each dim. If the rank holds no elements, at least one
            range is empty.
        """
        box: list[Interval] = []
        for dim, length in enumerate(shape):
            splits = self.axis_splits.get(dim, ())
            index = [coordinate[axis] for axis, _, _ in splits]
            box.append(chunk(length, [degree for _, degree, _ in splits], index))
        return tuple(box)

    def boxes_at(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[Box, ...]:
        """Return the boxes that the rank at a mesh coordinate holds, without checking the shape.

        A box is a rectangular region of the tensor: one half-open range of global indices per dim.

        Args:
            shape: Global shape.
            coordinate: One number for each mesh axis.

        Returns:
            Boxes in ascending order of indices, which is also their order in the local tensor. Each
            box has one range ``(start, stop)`` for each dim. There are no boxes if the rank holds
            no elements.
        """
        if self.is_plain:
            box = self.box_at(shape, coordinate)
            return (box,) if all([lo < hi for lo, hi in box]) else ()
        grid = self.intervals_at(shape, coordinate)
        if self.ragged is None:
            return tuple(product(*grid))
        leading = len(self.ragged[1].dims)
        if not all(grid[:leading]):
            return ()
        flattened = tuple(ranges[0] for ranges in grid[:leading])
        runs = run_boxes(flattened, *self.run_at(coordinate))
        return tuple((*run, *rest) for run in runs for rest in product(*grid[leading:]))

    def boxes(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        """Return the boxes of elements that a rank holds.

        A box is a rectangular region of the tensor: one half-open range of global indices per dim.

        Args:
            shape: Global shape.
            rank: Global rank.

        Returns:
            Boxes in ascending order of indices, which is also their order in the local tensor. Each
            box has one range ``(start, stop)`` for each dim. There are no boxes if the rank holds
            no elements.

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
            sum([hi - lo for lo, hi in ranges]) for ranges in self.intervals_at(shape, coordinate)
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
        if not self.is_plain:
            return False
        for dim, length in enumerate(shape):
            if dim in self.axis_splits and length % math.prod(self.degrees(dim)):
                return False
        return True

    def __str__(self) -> str:
        text = "(" + ", ".join(map(str, self.placements)) + ")"
        for dim, axes in cast(ShardOrder, self.shard_order or ()):
            if len(axes) > 1:
                text += f" dim {dim} by axes {axes}"
        return text


def _fill(
    layout: Layout,
    mesh_shape: tuple[int, ...],
    placements: Iterable[Placement],
    splits: AxisSplits,
    ranks: range | tuple[int, ...] | None,
    positions: Mapping[int, int] | None,
) -> None:
    """Set all fields of a layout.

    Each axis in ``splits`` gets a `Shard` or `StridedShard`. The other axes get their placement
    from ``placements``.
    """
    # Equal layouts must have equal fields. So an axis with split factor 1 gets a `Shard`, never a
    # `StridedShard`. `shard_order` lists a dim only if its axes do not split it in mesh order, or
    # if a split factor is not 1.
    given, order, is_plain = list(placements), [], True
    splits = {dim: splits[dim] for dim in sorted(splits)}
    for dim in splits:
        axes, strided = [], False
        for axis, _, factor in splits[dim]:
            axes.append(axis)
            strided |= factor != 1
            given[axis] = _shard(dim, factor)
        is_plain &= not strided
        if strided or axes != sorted(axes):
            order.append((dim, tuple(axes)))
    ragged, partial = None, []
    for axis, placement in enumerate(given):
        if isinstance(placement, RaggedShard):
            ragged, is_plain = (axis, placement), False
        elif isinstance(placement, Partial):
            partial.append(axis)
    # Layouts are cache keys. The first and last rank are usually enough to make hashes differ.
    ends = () if ranks is None else (ranks[0], ranks[-1])
    ragged_axis = -1 if ragged is None else ragged[0]
    values = {
        "mesh_shape": mesh_shape,
        "placements": tuple(given),
        "shard_order": tuple(order) or None,
        "ranks": ranks,
        "size": math.prod(mesh_shape),
        "has_partial": bool(partial),
        "is_plain": is_plain,
        "ragged": ragged,
        "axis_splits": splits,
        "_positions": positions,
        # The tuple contains only numbers, because the hashes of strings differ between processes.
        "_hash": hash((mesh_shape, ends, ragged_axis, *partial, *splits.items())),
    }
    for name, value in values.items():
        object.__setattr__(layout, name, value)


@lru_cache(maxsize=256)
def _shard(dim: int, factor: int) -> Placement:
    return Shard(dim) if factor == 1 else StridedShard(dim, factor)


def _checked_shape(mesh_shape: object) -> tuple[int, ...]:
    shape = whole_numbers(mesh_shape)
    if shape is None:
        raise LayoutError(
            f"mesh_shape={mesh_shape!r} is no shape of a mesh; give a sequence of degrees, one for "
            "each axis, such as (2, 4) or (8,)"
        )
    return shape


def _checked_placements(placements: object, mesh_shape: Sequence[int]) -> tuple[Placement, ...]:
    """Return the placements as a tuple.

    Raises `LayoutError` if a placement is invalid on a mesh of this shape. Raises `MeshError` if
    the mesh has no ranks.
    """
    result = in_tuple(placements)
    if min(mesh_shape, default=1) < 1:
        raise MeshError(f"a mesh of shape {tuple(mesh_shape)} has no ranks")
    check_count(result, mesh_shape)
    ops, ragged = set(), []
    for axis, placement in enumerate(result):
        if not isinstance(placement, Placement):
            raise LayoutError(
                f"{placement!r} of {type(placement).__module__} is no placement of a layout; use "
                "Replicate(), Shard(dim), StridedShard(dim, split_factor), "
                "RaggedShard(dims, sizes) or Partial(op) of this package"
            )
        if isinstance(placement, Partial):
            ops.add(placement.op)
        elif isinstance(placement, RaggedShard):
            ragged.append(axis)
    # Sums and averages are both linear, so their order does not matter.
    if len(ops) > 1 and ops != {"sum", "avg"}:
        raise LayoutError(
            f"partial values with {' and '.join(sorted(ops))} have no defined order of "
            "reduction; use one op on all axes, or reduce one axis first"
        )
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
    """Raise `LayoutError` unless there is one placement for each mesh axis."""
    if len(placements) != len(mesh_shape):
        raise LayoutError(
            f"{len(placements)} placements for a mesh of shape {tuple(mesh_shape)}; give "
            f"{len(mesh_shape)}, one for each axis"
        )


def _checked_splits(
    placements: tuple[Placement, ...],
    mesh_shape: Sequence[int],
    given: ShardOrder | Mapping[int, Sequence[int]] | None,
) -> AxisSplits:
    """Return the splits of each sharded dim, in the order in which the axes split the dim.

    ``given`` is a shard order or None. If ``given`` lists a dim, the order comes from ``given``.
    Otherwise the order follows from the split factors; see `_by_factor`. Raises `LayoutError` if
    ``given`` lists a dim with other axes than those that shard the dim.
    """
    found: dict[int, list[AxisSplit]] = {}
    for axis, placement in enumerate(placements):
        if (split := placement.split) is not None:
            dim, factor = split
            found.setdefault(dim, []).append((axis, mesh_shape[axis], factor))
    order = dict(checked_order(given)) if given else {}
    result = {dim: _by_factor(of_dim) for dim, of_dim in found.items() if dim not in order}
    for dim, axes in order.items():
        by_axis = {split[0]: split for split in found.get(dim, ())}
        if sorted(axes) != list(by_axis):
            raise LayoutError(
                f"shard order {axes} for dim {dim}, which the axes {tuple(by_axis)} shard; "
                "list each of them once, the one that splits first in front"
            )
        if axes:
            result[dim] = tuple(by_axis[axis] for axis in axes)
    return result


def _by_factor(splits: list[AxisSplit]) -> tuple[AxisSplit, ...]:
    """Find the order in which several axes split one dim, from their split factors.

    ``splits`` has one tuple ``(mesh axis, degree, split factor)`` for each axis, in mesh order. The
    result has the axis that splits the dim first in front.

    Example: on a mesh of 2 FSDP and 4 TP ranks, torch uses ``StridedShard(dim, 4)`` and
    ``Shard(dim)`` if TP splits the dim first. So ``[(0, 2, 4), (1, 4, 1)]`` gives
    ``((1, 4, 1), (0, 2, 1))``.
    """
    order: list[AxisSplit] = []
    # If a split factor is the product of the degrees of the axes in front, insert the axis after
    # these axes, with split factor 1. Otherwise insert it in front, with its split factor.
    for axis, degree, factor in reversed(splits):
        before, position = 1, 0
        while before != factor and position < len(order) and order[position][2] == 1:
            before *= order[position][1]
            position += 1
        if before == factor:
            order.insert(position, (axis, degree, 1))
        else:
            order.insert(0, (axis, degree, factor))
    return tuple(order)


def checked_order(given: object) -> ShardOrder:
    """Return a shard order as a tuple of pairs ``(tensor dim, mesh axes)``.

    ``given`` is such a sequence of pairs, a dict such as ``{0: (1, 0)}``, or None. The result is
    empty for None. Raises `LayoutError` if ``given`` has another form, or lists a dim twice.
    """
    pairs: Any = () if given is None else given.items() if isinstance(given, Mapping) else given
    try:
        order = tuple([(dim, tuple(axes)) for dim, axes in pairs])
        whole = all(isinstance(number, int) for dim, axes in order for number in (dim, *axes))
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise LayoutError(
            f"shard_order={given!r} gives no axes for each dim; write {{0: (1, 0)}} or "
            "((0, (1, 0)),) where axis 1 splits dim 0 first, axis 0 then"
        )
    if len({dim for dim, _ in order}) < len(order):
        raise LayoutError(
            f"shard_order={given!r} lists a dim twice; list all axes of a dim in one pair"
        )
    return order


def _checked_ranks(
    ranks: Sequence[int] | None, mesh_shape: Sequence[int]
) -> range | tuple[int, ...] | None:
    """Return the ranks of a mesh, as a range if they are evenly spaced, otherwise as a tuple.

    Returns None if ``ranks`` is None or ``0 .. n - 1``. Raises `MeshError` if ``ranks`` has the
    wrong length, duplicates, or values that are not integers.
    """
    if ranks is None:
        return None
    size = math.prod(mesh_shape)
    given = ranks if isinstance(ranks, range) else whole_numbers(ranks)
    if given is None:
        raise MeshError(
            f"ranks={ranks!r} are no ranks of a mesh; give a sequence of {size} whole numbers, or "
            "None for the ranks from 0"
        )
    if len(given) != size or (not isinstance(given, range) and len(set(given)) != size):
        raise MeshError(
            f"a mesh of shape {tuple(mesh_shape)} needs {size} different ranks, got {len(given)}"
        )
    step = given[1] - given[0] if size > 1 else 1
    spaced = range(given[0], given[0] + step * size, step)
    if spaced == range(size):
        return None
    return spaced if isinstance(given, range) or given == tuple(spaced) else given


def checked_sizes(shape: object) -> tuple[int, ...]:
    """Return the shape of a tensor as a tuple.

    Raises `LayoutError` if ``shape`` is not a sequence of integers of at least 0.
    """
    sizes = whole_numbers(shape)
    if sizes is None:
        raise LayoutError(f"shape={shape!r} is no shape of a tensor; give a sequence of sizes")
    if min(sizes, default=0) < 0:
        raise LayoutError(f"shape={sizes} has negative sizes; give sizes of 0 or more")
    return sizes


def whole_numbers(values: object) -> tuple[int, ...] | None:
    """Return ``values`` as a tuple of ints. Returns None if a value is not an integer.

    Plans are cached by these numbers. So floats are not accepted: ``4.0`` equals ``4``, and the
    invalid shape ``(4.0,)`` would find the cached plan for ``(4,)``.
    """
    try:
        return tuple(map(int, map(operator.index, cast(Any, values))))
    except TypeError:
        return None


def _changed(layout: Layout, placements: Iterable[Placement], splits: AxisSplits) -> Layout:
    """Return a layout with other placements and splits on the mesh of ``layout``.

    The placements and splits are not checked.
    """
    result = object.__new__(Layout)
    ranks = cast("range | tuple[int, ...] | None", layout.ranks)
    _fill(result, layout.mesh_shape, placements, splits, ranks, layout._positions)
    return result


def with_placement(layout: Layout, axis: int, placement: Placement) -> Layout:
    """Return the layout with another placement on one mesh axis.

    The old and the new placement must be a `Replicate`, `Partial` or `RaggedShard`. To change a
    `Shard` or `StridedShard`, use `with_splits`.
    """
    placements = list(layout.placements)
    placements[axis] = placement
    return _changed(layout, placements, layout.axis_splits)


def with_splits(layout: Layout, splits: Mapping[int, Sequence[AxisSplit]]) -> Layout:
    """Return the layout with all splits replaced by ``splits``.

    ``splits`` maps each sharded dim to tuples ``(mesh axis, degree, split factor)``, as in
    `Layout.axis_splits`. Axes that no longer split a dim get `Replicate`.
    """
    placements = list(layout.placements)
    for of_dim in layout.axis_splits.values():
        for axis, _, _ in of_dim:
            placements[axis] = _REPLICATE
    filled = {dim: tuple(of_dim) for dim, of_dim in splits.items() if of_dim}
    return _changed(layout, placements, filled)


def with_split(layout: Layout, dim: int, axis: int, factor: int = 1) -> Layout:
    """Return the layout with one more split: mesh axis ``axis`` splits tensor dim ``dim``.

    The axis splits the dim after all other axes that split it. A ``factor`` of 1 gives a `Shard`.
    Any other value gives a `StridedShard` with this split factor.
    """
    split = (axis, layout.mesh_shape[axis], factor)
    splits = layout.axis_splits
    return with_splits(layout, {**splits, dim: (*splits.get(dim, ()), split)})


def without_split(layout: Layout, dim: int, position: int = -1) -> Layout:
    """Return the layout with `Replicate` on a mesh axis that splits ``dim``.

    ``position`` is the index of the axis in ``layout.axis_splits[dim]``. Defaults to the last axis.
    Each rank still holds all elements that it holds in ``layout``. If lengths do not divide evenly,
    only the last axis can be replaced.
    """
    # Axes that split the dim later must keep their elements. So their split factors are multiplied
    # by the number of ranks on the removed axis.
    of_dim = layout.axis_splits[dim]
    before, (_, removed, _), later = of_dim[:position], of_dim[position], of_dim[position:][1:]
    after = [(axis, degree, factor * removed) for axis, degree, factor in later]
    return with_splits(layout, {**layout.axis_splits, dim: (*before, *after)})


def reduced_layout(layout: Layout) -> Layout:
    """Return the layout with `Replicate` in place of each `Partial`.

    The gradient of a tensor has this layout.
    """
    if not layout.has_partial:
        return layout
    reduced = [_REPLICATE if isinstance(p, Partial) else p for p in layout.placements]
    return _changed(layout, reduced, layout.axis_splits)


def replicated(layout: Layout) -> Layout:
    """Return an equivalent layout that has `Replicate` on all mesh axes with one rank."""
    if 1 not in layout.mesh_shape:
        return layout
    pairs = zip(layout.mesh_shape, layout.placements, strict=True)
    placements = [_REPLICATE if degree == 1 else p for degree, p in pairs]
    splits = {
        dim: tuple(split for split in of_dim if split[1] > 1)
        for dim, of_dim in layout.axis_splits.items()
    }
    return with_splits(_changed(layout, placements, layout.axis_splits), splits)


def same_runs(a: Layout, b: Layout) -> bool:
    """Return whether two layouts split the dims of their `RaggedShard` in the same way.

    This is True if both layouts have an equal `RaggedShard` on the same mesh axis, and all other
    mesh axes split the dims of the `RaggedShard` in the same way. It is False if ``a`` has no
    `RaggedShard`.
    """
    if a.ragged is None or a.ragged != b.ragged:
        return False
    return all(a.axis_splits.get(dim) == b.axis_splits.get(dim) for dim in a.ragged[1].dims)


def is_local(src: Layout, dst: Layout) -> bool:
    """Return whether local slices change ``src`` to ``dst``, for tensors of any shape.

    In each dim, the splits of ``dst`` must begin with all splits of ``src``. A `RaggedShard` of
    ``src`` must be the same in ``dst``. `Partial` placements are not compared.
    """
    if src.ragged is not None and not same_runs(src, dst):
        return False
    for dim, splits in src.axis_splits.items():
        if dst.axis_splits.get(dim, ())[: len(splits)] != splits:
            return False
    return True


def moving_axes(src: Layout, dst: Layout) -> tuple[int, ...]:
    """Return the mesh axes along which `plan_transfer` can send data between ranks.

    Both layouts are on one mesh. On all other axes, the sender and the receiver of a message have
    the same coordinate.
    """
    divided = set(src.axis_splits)
    if src.ragged is not None:
        divided.update(src.ragged[1].dims)
    fixed = _same_splits(src, dst)
    for axis, (old, new) in enumerate(zip(src.placements, dst.placements, strict=True)):
        replica = isinstance(old, Replicate) and divided.isdisjoint(new.split_dims)
        if replica or src.mesh_shape[axis] == 1 or isinstance(old, Partial):
            fixed.add(axis)
    return tuple([axis for axis in range(len(src.mesh_shape)) if axis not in fixed])


def unchanged_axes(src: Layout, dst: Layout) -> frozenset[int]:
    """Return the mesh axes along which no data has to move.

    The planner never communicates over these axes. They are:

    - axes with `Replicate` in both layouts, or with the same `Partial` in both;
    - axes that split the same dim in the same way in both layouts; see `_same_splits`;
    - axes with one rank.
    """
    unchanged = _same_splits(src, dst)
    for axis, (old, new) in enumerate(zip(src.placements, dst.placements, strict=True)):
        if src.mesh_shape[axis] == 1 or (isinstance(old, Replicate | Partial) and old == new):
            unchanged.add(axis)
    return frozenset(unchanged)


def _same_splits(src: Layout, dst: Layout) -> set[int]:
    """Return the mesh axes that split a dim in the same way in both layouts.

    If several axes split one dim, their splits are compared in order, and only the axes before the
    first difference are returned. The axis of a `RaggedShard` is included if `same_runs` is True.
    """
    found: set[int] = set()
    for dim, splits in src.axis_splits.items():
        for old, new in zip(splits, dst.axis_splits.get(dim, ()), strict=False):
            if old != new:
                break
            found.add(old[0])
    if src.ragged is not None and same_runs(src, dst):
        found.add(src.ragged[0])
    return found
