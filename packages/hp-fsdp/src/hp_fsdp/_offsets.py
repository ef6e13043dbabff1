"""Offsets of parameters and gradients in flat buffers: pure functions of shapes."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ._tags import TAG_FLAGS

ALIGNMENT = 16  # bytes; what vectorised kernels and network transports like a start to be
# Smaller shards are gathered packed, because each part of a gather has a fixed cost: on gloo as
# measured (benchmarks/bench_gather.py), and where nothing else is known.
DIRECT_BYTES = 64 * 1024
# By the name of the backend, where it is another. On NCCL a part of a grouped call is taken to cost
# about 2 us, in which an accelerator of 2 TB/s copies what 8 ranks have of a parameter of 256 KiB
# each: worked out, not measured. benchmarks/gpu.py has a row that measures it.
DIRECT_BYTES_OF = {"nccl": 256 * 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """A tensor of ``shape`` sharded along ``dim`` over ``degree`` ranks.

    Along dim 0 as ``torch.chunk`` does; along another dimension the shards must be equal. Every
    rank has room for the largest shard.
    """

    shape: tuple[int, ...]
    dim: int
    degree: int

    @property
    def numel(self) -> int:
        """Return the elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Return the size along ``dim`` of the largest shard."""
        return -(-self.shape[self.dim] // self.degree)

    @property
    def shard_numel(self) -> int:
        """Return the elements of the largest shard, which every rank has room for."""
        return math.prod(self.shape[: self.dim]) * self.rows * math.prod(self.shape[self.dim + 1 :])

    def local_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of one rank's shard."""
        held = max(0, min(self.rows, self.shape[self.dim] - index * self.rows))
        return *self.shape[: self.dim], held, *self.shape[self.dim + 1 :]

    def part(self, whole: Tensor, index: int) -> Tensor:
        """Return one rank's shard of the whole tensor, as a view."""
        start = min(index * self.rows, self.shape[self.dim])
        return whole.narrow(self.dim, start, self.local_shape(index)[self.dim])

    def by_rank(self, whole: Tensor) -> Tensor:
        """Return a view of the whole tensor whose elements, in order, are shard after shard.

        Sharded along dim 0 it is the tensor itself; otherwise ``[degree, before, rest]``.
        """
        if self.dim == 0:
            return whole
        before, rest = math.prod(self.shape[: self.dim]), math.prod(self.shape[self.dim :])
        return whole.view(before, self.degree, rest // self.degree).transpose(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One tensor in a flat buffer: a run of ``spec.shard_numel`` elements for each rank.

    The run of rank r begins at ``start + r * stride`` and holds its shard, then padding. The first
    ``full`` runs have no padding; the next one has ``left`` rows, the others none. ``strides`` are
    those of the full runs, viewed as ``[full, *run_shape]``.
    """

    spec: ShardSpec
    start: int
    stride: int
    full: int
    left: int
    run_shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(spec: ShardSpec, start: int, stride: int) -> "Extent":
        """Return the extent of a tensor whose runs begin ``stride`` elements apart."""
        rows = spec.rows
        if spec.dim:
            before = math.prod(spec.shape[: spec.dim])
            full, left = spec.degree, 0
            run_shape: tuple[int, ...] = (before, spec.shard_numel // before if before else 0)
        else:
            full = spec.shape[0] // rows if rows else 0
            left = spec.shape[0] - full * rows
            run_shape = (rows, *spec.shape[1:])
        lengths = itertools.accumulate(reversed(run_shape[1:]), lambda a, b: a * b, initial=1)
        return Extent(
            spec=spec,
            start=start,
            stride=stride,
            full=full,
            left=left,
            run_shape=run_shape,
            strides=(stride, *reversed(list(lengths))),
        )

    @property
    def end(self) -> int:
        """Return the end of the first run."""
        return self.start + self.spec.shard_numel

    @property
    def padded(self) -> int:
        """Return the offset in a run of the rank that has ``left`` rows, where its padding begins.

        Only along dim 0 a shard has padding.
        """
        return self.left * math.prod(self.run_shape[1:])

    def runs(self, flat: Tensor) -> Tensor:
        """Return all runs, padding included, as ``[degree, shard_numel]``."""
        shape = (self.spec.degree, self.spec.shard_numel)
        return flat.as_strided(shape, (self.stride, 1), flat.storage_offset() + self.start)

    def full_runs(self, flat: Tensor) -> Tensor:
        """Return the runs without padding as ``[full, *run_shape]``."""
        shape = (self.full, *self.run_shape)
        return flat.as_strided(shape, self.strides, flat.storage_offset() + self.start)

    def tail(self, flat: Tensor) -> Tensor:
        """Return the rows of the run that is not full."""
        start = self.start + self.full * self.stride
        return flat[start : start + self.padded].view(self.left, *self.run_shape[1:])

    def whole(self, flat: Tensor) -> Tensor:
        """Return the whole tensor, where its runs follow one another."""
        return flat[self.start : self.start + self.spec.numel].view(self.spec.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRows:
    """Packed gradients of some parameters, ``[degree, width]``; row r goes to rank r.

    In the ragged layout there is one row, and each rank receives a part of it. Columns of the
    reduced row, which is what one rank receives:

    - ``held[i]``: start and shape of this rank's part of parameter i.
    - ``flags``: start of the flags, one for each parameter. A flag is nonzero if a rank has a
      gradient of the parameter. The flags of the unit's tag follow.

    ``gaps``: columns of the packed rows without a parameter, as ``(i, start, end)`` before
    parameter i. ``flags_apart``: flags are not columns of the rows. They are a second tensor, which
    is reduced in the same call.
    """

    degree: int
    width: int
    extents: tuple[Extent, ...]
    gaps: tuple[tuple[int, int, int], ...]
    held: tuple[tuple[int, tuple[int, ...]], ...]
    flags: int
    flags_apart: bool = False

    @staticmethod
    def of(
        specs: Sequence[ShardSpec],
        starts: Sequence[int],
        degree: int,
        width: int,
        held: Sequence[tuple[int, tuple[int, ...]]],
        flags: int,
        flags_apart: bool = False,
    ) -> "GradientRows":
        """Return the rows of parameters that begin at the columns ``starts``, in that order."""
        extents = tuple(
            Extent.of(spec, start, width) for spec, start in zip(specs, starts, strict=True)
        )
        between = zip((0, *(e.end for e in extents)), (*starts, width), strict=True)
        return GradientRows(
            degree=degree,
            width=width,
            extents=extents,
            gaps=tuple((i, end, start) for i, (end, start) in enumerate(between) if start > end),
            held=tuple(held),
            flags=flags,
            flags_apart=flags_apart,
        )

    @property
    def numel(self) -> int:
        """Return the elements of all rows."""
        return self.degree * self.width

    @property
    def reduced_numel(self) -> int:
        """Return the elements that a rank has after the reduction, flags included."""
        return self.flags + self.flag_count if self.flags_apart else self.width

    @property
    def tag_start(self) -> int:
        """Return the offset of the tag's flags in the reduced row."""
        return self.flags + len(self.extents)

    @property
    def flag_count(self) -> int:
        """Return the number of flags: one for each parameter, and those of the tag."""
        return len(self.extents) + TAG_FLAGS

    def views(self, reduced: Tensor) -> list[Tensor]:
        """Return this rank's part of each parameter, as views of its reduced row."""
        # Only `map` calls functions in C without a step of the interpreter for each parameter.
        starts, shapes = [start for start, _ in self.held], [shape for _, shape in self.held]
        rows, dims, counts = itertools.repeat(reduced), itertools.repeat(0), map(math.prod, shapes)
        flats = map(Tensor.narrow, rows, dims, starts, counts)
        return list(map(Tensor.view, flats, shapes))


def rows_by_rank(specs: Sequence[ShardSpec], index: int, itemsize: int) -> GradientRows:
    """Return gradients packed densely and in order, one row for each rank, then the flags.

    The rows end in up to 15 bytes of padding, so that each starts at a multiple of 16 bytes.
    """
    ends = list(itertools.accumulate((spec.shard_numel for spec in specs), initial=0))
    width = round_up(ends[-1] + len(specs) + TAG_FLAGS, elements_of(ALIGNMENT, itemsize))
    held = [(start, spec.local_shape(index)) for start, spec in zip(ends[:-1], specs, strict=True)]
    return GradientRows.of(specs, ends[:-1], specs[0].degree, width, held, ends[-1])


def is_large(numel: int, itemsize: int, direct_bytes: float | None = None) -> bool:
    """Return whether a shard has at least ``direct_bytes`` (64 KiB)."""
    return numel * itemsize >= (DIRECT_BYTES if direct_bytes is None else direct_bytes)


def direct_bytes_of(backend: str) -> int:
    """Return from how many bytes per rank on a backend gathers a parameter into place."""
    return DIRECT_BYTES_OF.get(backend, DIRECT_BYTES)


def elements_of(size: int, itemsize: int) -> int:
    """Return how many elements have ``size`` bytes, at least one."""
    return max(1, size // itemsize)


def round_up(number: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` from ``number`` on."""
    return -(-number // unit) * unit
