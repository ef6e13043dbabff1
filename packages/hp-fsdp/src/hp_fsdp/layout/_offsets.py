"""Shapes of shards, and offsets of packed gradients: pure functions of shapes."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._tags import TAG_FLAGS
from .._torch import split_like

ALIGNMENT = 16  # bytes; vectorized kernels and network transports need aligned starts
# Shards of at least this size are all-gathered without a copy afterwards. Smaller ones are packed
# into one slice, because each slice of an all-gather has a fixed cost. Measured on gloo with
# benchmarks/bench_gather.py.
DIRECT_BYTES = 64 * 1024
# Exceptions, by the name of the backend. Estimated, not measured: a slice of a grouped NCCL call
# takes about 2 us, in which an accelerator of 2 TB/s copies the shards of 8 ranks of 256 KiB each.
# benchmarks/gpu.py has a row that measures it.
DIRECT_BYTES_OF = {"nccl": 256 * 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """A tensor of ``shape`` that is sharded along ``dim`` over ``degree`` ranks.

    If ``dim`` is 0, the tensor is split as by ``torch.chunk``. Otherwise its size along ``dim`` is
    divisible by ``degree``. In flat buffers, every shard is padded to the size of the largest one.

    Attributes:
        atom: Only for the ragged layout, which does not split along a dim. The flattened tensor
            consists of atoms: blocks of ``atom`` elements that are never split between ranks.
    """

    shape: tuple[int, ...]
    dim: int
    degree: int
    atom: int = 1

    @property
    def numel(self) -> int:
        """Return the number of elements of the unsharded tensor."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Return the size of the largest shard along ``dim``."""
        return -(-self.shape[self.dim] // self.degree)

    @property
    def shard_numel(self) -> int:
        """Return the number of elements of a padded shard."""
        return math.prod(self.shape[: self.dim]) * self.rows * math.prod(self.shape[self.dim + 1 :])

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the shard of ``rank``, without padding."""
        rows = max(0, min(self.rows, self.shape[self.dim] - rank * self.rows))
        return *self.shape[: self.dim], rows, *self.shape[self.dim + 1 :]

    def part(self, unsharded: Tensor, rank: int) -> Tensor:
        """Return the shard of ``rank``, a view of the unsharded tensor."""
        start = min(rank * self.rows, self.shape[self.dim])
        return unsharded.narrow(self.dim, start, self.local_shape(rank)[self.dim])

    def by_rank(self, unsharded: Tensor) -> Tensor:
        """Return a view of the unsharded tensor with the shards in the order of their ranks.

        If ``dim`` is 0, this is the tensor itself. Otherwise the view has the shape
        ``[degree, before, rest]``, and ``view[r]`` has the elements of the shard of rank r.
        ``before`` is the product of the sizes before ``dim``. ``rest`` is the product of the
        shard's sizes from ``dim`` on.
        """
        if self.dim == 0:
            return unsharded
        before, rest = math.prod(self.shape[: self.dim]), math.prod(self.shape[self.dim :])
        return unsharded.view(before, self.degree, rest // self.degree).transpose(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientColumns:
    """Columns of one gradient in the packed gradients, a tensor ``[degree, width]``.

    The gradient is in the columns from ``start`` to `end`. In these columns, row r has the shard of
    rank r, then padding. Only gradients that are sharded along dim 0 have padding.
    """

    spec: ShardSpec
    start: int

    @property
    def end(self) -> int:
        """Return the column after the last column of this gradient and its padding."""
        return self.start + self.spec.shard_numel

    @property
    def full(self) -> int:
        """Return the number of rows without padding. These are the first rows."""
        spec = self.spec
        if spec.dim:
            return spec.degree
        return spec.shape[0] // spec.rows if spec.rows else 0

    @property
    def left(self) -> int:
        """Return the size along dim 0 of the shard in row `full`, which has padding.

        0 if there is no such row. Later rows have padding only.
        """
        return 0 if self.spec.dim else self.spec.shape[0] - self.full * self.spec.rows

    @property
    def padding_start(self) -> int:
        """Return the first padding column of row number `full`, which is only partly filled."""
        return self.start + self.left * math.prod(self.spec.shape[1:])

    def full_rows(self, packed: Tensor) -> Tensor:
        """Return this gradient's columns of the rows of ``packed`` without padding, as a view.

        ``packed``: the packed gradients of a group, ``[degree, width]``, one row for each rank. If
        the gradient is sharded along dim 0, the view has the shape ``[full, spec.rows, ...]``;
        `full` is the number of these rows. Otherwise it has the shape of `ShardSpec.by_rank`.
        """
        spec = self.spec
        shape: tuple[int, ...] = (spec.rows, *spec.shape[1:])
        if spec.dim:
            before = math.prod(spec.shape[: spec.dim])
            shape = (before, spec.shard_numel // before if before else 0)
        return packed[: self.full, self.start : self.end].view(self.full, *shape)

    def last_row(self, packed: Tensor) -> Tensor:
        """Return a view of this gradient in ``packed``: the shard in row `full`, without padding.

        ``packed`` are the packed gradients, ``[degree, width]``.
        """
        shard = packed[self.full, self.start : self.padding_start]
        return shard.view(self.left, *self.spec.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRows:
    """Offsets in the packed gradients, a tensor ``[degree, width]``.

    The reduce-scatter sums this tensor over all ranks, and rank r receives row r. In the ragged
    layout there is one row, and each rank receives an equal share of it.

    Attributes:
        degree: Number of rows.
        width: Number of columns.
        columns: Columns of each gradient.
        gaps: Columns ``[start, end)`` without a gradient, as ``(i, start, end)``. Gradient ``i``
            follows the gap.
        shards: Offset and shape of each gradient's shard in the tensor that this rank receives. The
            offsets are ascending.
        pieces: Meta tensors with the shapes of consecutive pieces of the tensor that this rank
            receives: the shards and the padding between them.
        positions: For each gradient, the position of its shard in ``pieces``. None if there is no
            padding, so that each piece is a shard.
        empty: Positions of the empty shards with two or more dims. Before torch 2.13, `split_like`
            returns tensors of shape ``[0]`` for them.
        flags: Offset of the flags in the tensor that this rank receives. There is one flag for each
            parameter, nonzero if any rank has a gradient of it. Then follow the flags of the unit's
            tag.
        separate_flags: Whether the flags are a second tensor that is reduced in the same call. If
            False, the flags are columns of the packed gradients.
    """

    degree: int
    width: int
    columns: tuple[GradientColumns, ...]
    gaps: tuple[tuple[int, int, int], ...]
    shards: tuple[tuple[int, tuple[int, ...]], ...]
    pieces: tuple[Tensor, ...]
    positions: tuple[int, ...] | None
    empty: tuple[int, ...]
    flags: int
    separate_flags: bool = False

    @staticmethod
    def of(
        specs: Sequence[ShardSpec],
        starts: Sequence[int],
        degree: int,
        width: int,
        shards: Sequence[tuple[int, tuple[int, ...]]],
        flags: int,
        separate_flags: bool = False,
    ) -> "GradientRows":
        """Return the rows with the gradients of ``specs`` at the columns ``starts``.

        ``starts`` must be ascending. The gaps are computed from the columns, and the pieces from
        the shards.
        """
        shapes: list[tuple[int, ...]] = []
        positions = []
        end = 0
        for start, shape in shards:
            if start > end:
                shapes.append((start - end,))
            positions.append(len(shapes))
            shapes.append(shape)
            end = start + math.prod(shape)
        pairs = zip(specs, starts, strict=True)
        columns = tuple(GradientColumns(spec=spec, start=start) for spec, start in pairs)
        between = zip((0, *(each.end for each in columns)), (*starts, width), strict=True)
        return GradientRows(
            degree=degree,
            width=width,
            columns=columns,
            gaps=tuple((i, end, start) for i, (end, start) in enumerate(between) if start > end),
            shards=tuple(shards),
            pieces=tuple(torch.empty(shape, device="meta") for shape in shapes),
            positions=tuple(positions) if len(positions) < len(shapes) else None,
            empty=tuple(i for i, (_, shape) in enumerate(shards) if 0 in shape and len(shape) > 1),
            flags=flags,
            separate_flags=separate_flags,
        )

    @property
    def numel(self) -> int:
        """Return the number of elements of the packed gradients."""
        return self.degree * self.width

    @property
    def reduced_numel(self) -> int:
        """Return the number of elements that each rank receives, flags included."""
        return self.flags + self.flag_count if self.separate_flags else self.width

    @property
    def tag_start(self) -> int:
        """Return the offset of the tag's flags in this rank's output of the reduce-scatter."""
        return self.flags + len(self.columns)

    @property
    def flag_count(self) -> int:
        """Return the number of flags: one for each parameter, then the flags of the tag."""
        return len(self.columns) + TAG_FLAGS

    def views(self, reduced: Tensor) -> list[Tensor]:
        """Return this rank's shard of each gradient, as views of ``reduced``.

        ``reduced`` is the flat tensor that this rank receives from the reduce-scatter.
        """
        parts = split_like(reduced, self.pieces)
        if self.positions is not None:
            parts = [parts[i] for i in self.positions]
        if self.empty:
            parts = list(parts)
            for i in self.empty:
                parts[i] = parts[i].view(self.shards[i][1])
        return parts


def rows_by_rank(specs: Sequence[ShardSpec], rank: int, itemsize: int) -> GradientRows:
    """Return the offsets of packed gradients for the exact layout.

    There is one row for each rank: the padded shards of all gradients, then the flags. Each row
    starts at a multiple of 16 bytes.
    """
    ends = list(itertools.accumulate((spec.shard_numel for spec in specs), initial=0))
    width = round_up(ends[-1] + len(specs) + TAG_FLAGS, aligned_numel(itemsize))
    shapes = [spec.local_shape(rank) for spec in specs]
    shards = list(zip(ends, shapes, strict=False))
    return GradientRows.of(specs, ends[:-1], specs[0].degree, width, shards, ends[-1])


def direct_bytes_of(backend: str) -> int:
    """Return the default of ``direct_bytes`` for a backend such as "nccl"."""
    return DIRECT_BYTES_OF.get(backend, DIRECT_BYTES)


def aligned_numel(itemsize: int) -> int:
    """Return how many elements of ``itemsize`` bytes 16 bytes have; at least 1."""
    return max(1, ALIGNMENT // itemsize)


def round_up(number: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is at least ``number``."""
    return -(-number // unit) * unit
