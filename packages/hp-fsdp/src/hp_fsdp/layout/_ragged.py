"""The ragged layout: one buffer with all parameters of a group, split evenly over the ranks."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from hp_dtensor import RaggedShard

from .._tags import TAG_FLAGS
from ._offsets import GradientRows, ShardSpec, aligned_numel, round_up
from ._plan import FlatPlan

TRIES = 64  # number of shard sizes to try for each step size


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedPlan(FlatPlan):
    """Offsets of the parameters of one group in an output of ``degree * shard_numel`` elements.

    Rank r holds the elements ``[r * shard_numel, (r + 1) * shard_numel)`` of the output. Every
    parameter is contiguous in the output, so `copy_out` is not needed. The all-gather sends no tag,
    because a parameter may continue in the flat shard of the next rank.
    """

    kind: ClassVar[str] = "ragged"

    def elements(self, position: int, rank: int) -> tuple[int, int]:
        """Return the elements ``(first, end)`` of a flattened parameter that ``rank`` holds."""
        start, numel = self.output_starts[position], self.specs[position].numel
        first = min(max(rank * self.shard_numel - start, 0), numel)
        end = min(max((rank + 1) * self.shard_numel - start, 0), numel)
        return first, end

    def leading(self, position: int) -> int:
        """Return the number of leading dims that the `RaggedShard` of a parameter flattens.

        This is the smallest number for which the atom is a multiple of the product of the other
        sizes. For example, the result is 1 for the shape ``(8, 4)`` and an atom of 4 elements.
        """
        shape, atom = self.specs[position].shape, self.specs[position].atom
        for count in range(1, len(shape)):
            row = math.prod(shape[count:])
            if row and atom % row == 0:
                return count
        return len(shape)

    def rows(self, position: int) -> tuple[int, ...]:
        """Return the number of rows of a parameter that each rank holds.

        Rows are counted after the `leading` dims of the parameter are flattened to one dim.
        """
        numel = math.prod(self.specs[position].shape[self.leading(position) :]) or 1
        ranges = [self.elements(position, rank) for rank in range(self.degree)]
        return tuple((end - first) // numel for first, end in ranges)

    def ragged_shard(self, position: int) -> RaggedShard:
        """Return the placement of the sharded parameter, which is a `RaggedTensor`."""
        return RaggedShard(tuple(range(self.leading(position))), self.rows(position))

    def shard(self, position: int, rank: int) -> tuple[int, tuple[int, ...]]:
        """Return the offset and the shape of a parameter in the flat shard of ``rank``."""
        first, _ = self.elements(position, rank)
        start = self.output_starts[position] + first - rank * self.shard_numel
        shape = self.rows(position)[rank], *self.specs[position].shape[self.leading(position) :]
        return min(max(start, 0), self.shard_numel), shape

    def shard_ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the elements ``(start, end)`` of each parameter in the flat shard of ``rank``."""
        shards = [self.shard(position, rank) for position in range(len(self.specs))]
        return [(start, start + math.prod(shape)) for start, shape in shards]

    def part(self, position: int, unsharded: Tensor, rank: int) -> Tensor:
        """Return the shard of ``rank`` of an unsharded parameter, as a view."""
        first, end = self.elements(position, rank)
        return unsharded.flatten()[first:end].view(self.shard(position, rank)[1])

    def rows_per_rank(self, position: int) -> int:
        """Return the largest number of `rows` of a parameter that a rank holds."""
        return max(self.rows(position))

    def with_itemsize(self, itemsize: int, direct_bytes: float) -> "RaggedPlan":
        """Return the plan with the same offsets for elements of ``itemsize`` bytes."""
        return replace(self, itemsize=itemsize)

    def gradient_rows(self, chosen: Sequence[int], rank: int, itemsize: int) -> GradientRows:
        """Return the offsets of the packed gradients of the parameters at ``chosen``.

        The gradients are in one row, at the offsets of the parameters in the output. With two or
        more ranks, the flags are a separate tensor, because a gradient may continue in the share of
        the next rank.
        """
        specs = [replace(self.specs[i], degree=1) for i in chosen]
        apart = self.degree > 1
        flags = 0 if apart else round_up(len(chosen) + TAG_FLAGS, aligned_numel(itemsize))
        return GradientRows.of(
            specs,
            [self.output_starts[i] for i in chosen],
            1,
            self.output_numel + flags,
            [self.shard(i, rank) for i in chosen],
            self.shard_numel,
            separate_flags=apart,
        )


def plan_ragged(
    specs: Sequence[ShardSpec], degree: int, itemsize: int, direct_bytes: float = 0
) -> RaggedPlan:
    """Plan the offsets of parameters that are split over ``degree`` ranks in the ragged layout.

    An atom is a block of consecutive elements of a parameter that is not split between ranks; see
    `ShardSpec.atom`. The search tries several sizes of the flat shard and takes the smallest one
    that splits no atom:

    - The size is a multiple of 16 bytes.
    - If a parameter spans three or more flat shards, the size is also a multiple of its atom.
    - Parameters keep their order. If a shard boundary would split an atom, the parameter starts at
      a later offset.

    ``direct_bytes`` is ignored, because every parameter is contiguous in the output.
    """
    numels = [spec.numel for spec in specs]
    atoms = [min(spec.atom, max(spec.numel, 1)) for spec in specs]
    unit = aligned_numel(itemsize)
    least = max(-(-sum(numels) // degree), 1)
    long = {atom for atom, numel in zip(atoms, numels, strict=True) if numel > least}
    best: tuple[int, list[int]] | None = None
    for step in _steps(unit, sorted(long)):
        fits_all = all(step % atom == 0 for atom in long)  # then some size succeeds
        size, tries = round_up(least, step), 0
        while (best is None or size < best[0]) and (fits_all or tries < TRIES):
            starts = _starts(numels, atoms, size, degree)
            if starts is not None:
                best = size, starts
            size, tries = size + round_up(max(step, size // TRIES), step), tries + 1
    size, starts = best if best is not None else (least, [])
    return RaggedPlan(
        degree=degree,
        itemsize=itemsize,
        specs=tuple(replace(s, atom=atom) for s, atom in zip(specs, atoms, strict=True)),
        output_starts=tuple(starts),
        direct=(True,) * len(specs),
        slices=((0, size),),
        shard_numel=size,
        output_numel=degree * size,
    )


def _steps(unit: int, atoms: Sequence[int]) -> list[int]:
    """Return the step sizes of the search for a flat shard size, ascending.

    Each one is the least common multiple of ``unit`` and none, one, two or all of the atoms.
    """
    pairs = itertools.combinations(atoms, 2)
    chosen = [(), *((atom,) for atom in atoms), *pairs, tuple(atoms)]
    return sorted({math.lcm(unit, *each) for each in chosen})


def _starts(
    numels: Sequence[int], atoms: Sequence[int], size: int, degree: int
) -> list[int] | None:
    """Return the offset of each parameter, or None if flat shards of ``size`` are too small."""
    starts = []
    cursor = 0
    for numel, atom in zip(numels, atoms, strict=True):
        boundary = (cursor // size + 1) * size
        if cursor + numel > boundary:
            cursor += (boundary - cursor) % atom
            if cursor + numel > boundary + size and size % atom:
                return None
        starts.append(cursor)
        cursor += numel
    return starts if cursor <= degree * size else None
