"""The ragged layout: all parameters of a group in one buffer, split evenly over the ranks."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ._offsets import ALIGNMENT, GradientRows, ShardSpec, elements_of, round_up
from ._tags import TAG_FLAGS

TRIES = 64  # sizes of the share that are tried for each step


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedPlan:
    """Offsets of the parameters of one group in a buffer of ``degree * share`` elements.

    Rank ``r`` holds the elements ``[r * share, (r + 1) * share)`` of the buffer, its share. The
    all-gather of the shares yields every parameter in one piece, so it needs no copy.

    Attributes:
        degree: Number of ranks.
        itemsize: Bytes per element.
        share: Number of elements per rank.
        shapes: Shape of each parameter.
        atoms: Number of consecutive elements of each parameter that are never split between ranks.
        starts: Offset of each parameter in the buffer.
    """

    kind: ClassVar[str] = "ragged"
    tag_numel: ClassVar[int] = 0  # parameters cross the ends of shares: no room for a tag
    degree: int
    itemsize: int
    share: int
    shapes: tuple[tuple[int, ...], ...]
    atoms: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def specs(self) -> tuple[ShardSpec, ...]:
        """Return the parameters as if they were sharded evenly along dim 0."""
        return tuple(ShardSpec(shape=shape, dim=0, degree=self.degree) for shape in self.shapes)

    @property
    def shard_numel(self) -> int:
        """Return the number of elements per rank."""
        return self.share

    @property
    def full_numel(self) -> int:
        """Return the number of elements of the buffer."""
        return self.degree * self.share

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """Return the ``(start, length)`` of the one piece that each rank sends: its share."""
        return ((0, self.share),)

    @property
    def parameter_bytes(self) -> int:
        """Return the number of bytes of the parameters, without padding."""
        return sum(map(math.prod, self.shapes)) * self.itemsize

    @property
    def padding_bytes(self) -> int:
        """Return the number of bytes of padding in each all-gather."""
        return self.full_numel * self.itemsize - self.parameter_bytes

    @property
    def direct(self) -> tuple[bool, ...]:
        """Return True for each parameter: the all-gather writes all of them to their place."""
        return (True,) * len(self.shapes)

    def span(self, position: int, index: int) -> tuple[int, int]:
        """Return the elements ``[first, end)`` of a parameter that the rank at ``index`` holds."""
        start, numel = self.starts[position], math.prod(self.shapes[position])
        first = min(max(index * self.share - start, 0), numel)
        end = min(max((index + 1) * self.share - start, 0), numel)
        return first, end

    def leading(self, position: int) -> int:
        """Return the number of leading dims that the `RaggedShard` of a parameter flattens.

        This is the smallest number for which the size of an atom is a multiple of the rest.
        """
        shape, atom = self.shapes[position], self.atoms[position]
        for count in range(1, len(shape)):
            row = math.prod(shape[count:])
            if row and atom % row == 0:
                return count
        return len(shape)

    def sizes(self, position: int) -> tuple[int, ...]:
        """Return the number of rows of the flattened leading dims for each rank."""
        row = math.prod(self.shapes[position][self.leading(position) :]) or 1
        spans = [self.span(position, index) for index in range(self.degree)]
        return tuple((end - first) // row for first, end in spans)

    def held(self, position: int, index: int) -> tuple[int, tuple[int, ...]]:
        """Return the offset and the shape of a parameter in the share of the rank at ``index``."""
        first, _ = self.span(position, index)
        start = self.starts[position] + first - index * self.share
        leading = self.leading(position)
        shape = (self.sizes(position)[index], *self.shapes[position][leading:])
        return min(max(start, 0), self.share), shape

    def rows_per_rank(self, position: int) -> int:
        """Return the largest number of rows of the flattened leading dims on any rank."""
        return max(self.sizes(position))

    def spans(self, index: int) -> list[tuple[int, int]]:
        """Return the elements ``[start, end)`` of each parameter in the share of a rank."""
        held = [self.held(position, index) for position in range(len(self.shapes))]
        return [(start, start + math.prod(shape)) for start, shape in held]

    def wholes(self, memory: Tensor) -> list[Tensor]:
        """Return the parameters in the flat buffer, as views."""
        places = zip(self.starts, self.shapes, strict=True)
        return [memory[start : start + math.prod(shape)].view(shape) for start, shape in places]

    def copy_out(self, memory: Tensor) -> Callable[[], object] | None:
        """Return None: the all-gather writes every parameter to its place."""
        return None

    def gradient_rows(self, chosen: Sequence[int], index: int, itemsize: int) -> GradientRows:
        """Return the offsets of the packed gradients of the parameters at ``chosen``.

        They are the offsets of the parameters in the buffer, in one row. A parameter may extend
        over several shares, so there is no space for flags between the shares.
        """
        specs = [ShardSpec(shape=self.shapes[i], dim=0, degree=1) for i in chosen]
        apart = self.degree > 1
        flags = 0 if apart else round_up(len(chosen) + TAG_FLAGS, elements_of(ALIGNMENT, itemsize))
        return GradientRows.of(
            specs,
            [self.starts[i] for i in chosen],
            1,
            self.full_numel + flags,
            [self.held(i, index) for i in chosen],
            self.share,
            flags_apart=apart,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenPlan:
    """Offsets of an all-gather in which ranks send parts of different sizes.

    Each rank sends its parts of all tensors one after the other, padded to ``shard_numel``
    elements. After the all-gather, `copy_out` joins the parts of each tensor in the order of the
    ranks.

    Attributes:
        degree: Number of ranks.
        sizes: Number of elements: ``sizes[i][rank]`` of tensor ``i``.
    """

    tag_numel: ClassVar[int] = 0
    degree: int
    sizes: tuple[tuple[int, ...], ...]

    @property
    def shard_numel(self) -> int:
        """Return the number of elements that each rank sends, padding included."""
        return max(map(sum, zip(*self.sizes, strict=True)))

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """Return the ``(start, length)`` of the one piece that each rank sends."""
        return ((0, self.shard_numel),)

    @property
    def _ends(self) -> list[int]:
        """Return the end of the gathered pieces in the output, then the end of each tensor."""
        lengths = (self.degree * self.shard_numel, *map(sum, self.sizes))
        return list(itertools.accumulate(round_up(length, ALIGNMENT) for length in lengths))

    @property
    def full_numel(self) -> int:
        """Return the number of elements of the output: the gathered pieces, then the tensors."""
        return self._ends[-1]

    def spans(self, index: int) -> list[tuple[int, int]]:
        """Return the elements ``[start, end)`` of each tensor that the rank at ``index`` sends."""
        ends = itertools.accumulate((each[index] for each in self.sizes), initial=0)
        return list(itertools.pairwise(ends))

    def wholes(self, memory: Tensor) -> list[Tensor]:
        """Return the joined tensors, 1-D views of the output."""
        starts = zip(self._ends, self.sizes, strict=False)
        return [memory[start : start + sum(each)] for start, each in starts]

    def copy_out(self, memory: Tensor) -> Callable[[], object] | None:
        """Return the function that joins the parts of each tensor. ``memory`` is the output."""
        pieces = memory[: self.degree * self.shard_numel].view(self.degree, self.shard_numel)
        copies = [
            (part, piece[start:end])
            for rank, piece in enumerate(pieces)
            for (start, end), whole, sizes in zip(
                self.spans(rank), self.wholes(memory), self.sizes, strict=True
            )
            for part in [whole.split(sizes)[rank]]
            if end > start
        ]

        def copy_out() -> None:
            for part, piece in copies:
                part.copy_(piece)

        return copy_out


def plan_ragged(
    shapes: Sequence[tuple[int, ...]], atoms: Sequence[int], degree: int, itemsize: int
) -> RaggedPlan:
    """Plan the buffer with the smallest share, of the sizes tried, that splits no atom.

    The share is a multiple of 16 bytes, and of the atoms of parameters that are longer than a
    share. Parameters keep their order. If an atom would be split, its parameter moves to a later
    offset. An atom has at most the size of its parameter.
    """
    numels = [math.prod(shape) for shape in shapes]
    atoms = [min(atom, max(numel, 1)) for atom, numel in zip(atoms, numels, strict=True)]
    unit = elements_of(ALIGNMENT, itemsize)
    least = max(-(-sum(numels) // degree), 1)
    long = {atom for atom, numel in zip(atoms, numels, strict=True) if numel > least}
    best: tuple[int, list[int]] | None = None
    for step in _steps(unit, sorted(long)):
        fits_all = all(step % atom == 0 for atom in long)  # then some share succeeds
        share, tries = round_up(least, step), 0
        while (best is None or share < best[0]) and (fits_all or tries < TRIES):
            starts = _place(numels, atoms, share, degree)
            if starts is not None:
                best = share, starts
            share, tries = share + round_up(max(step, share // TRIES), step), tries + 1
    share, starts = best if best is not None else (least, [])
    return RaggedPlan(
        degree=degree,
        itemsize=itemsize,
        share=share,
        shapes=tuple(shapes),
        atoms=tuple(atoms),
        starts=tuple(starts),
    )


def _steps(unit: int, atoms: Sequence[int]) -> list[int]:
    """Return steps for the size of the share: multiples of no, one, two or all atoms."""
    pairs = itertools.combinations(atoms, 2)
    chosen = [(), *((atom,) for atom in atoms), *pairs, tuple(atoms)]
    return sorted({math.lcm(unit, *each) for each in chosen})


def _place(
    numels: Sequence[int], atoms: Sequence[int], share: int, degree: int
) -> list[int] | None:
    """Return the offset of each parameter, or None if the parameters do not fit this share."""
    starts = []
    cursor = 0
    for numel, atom in zip(numels, atoms, strict=True):
        boundary = (cursor // share + 1) * share
        if cursor + numel > boundary:
            cursor += (boundary - cursor) % atom
            if cursor + numel > boundary + share and share % atom:
                return None
        starts.append(cursor)
        cursor += numel
    return starts if cursor <= degree * share else None
