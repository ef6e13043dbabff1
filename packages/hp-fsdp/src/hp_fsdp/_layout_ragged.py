"""Where all parameters of a group lie in one buffer that is split in equal shares: no copies."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ._offsets import ALIGNMENT, GradientRows, ShardSpec, elements_of, round_up
from ._tags import TAG_FLAGS

TRIES = 64  # shares of one step before the next step


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedPlan:
    """One group's buffer ``[degree * share]``; a parameter begins at ``starts[i]``, in one piece.

    Shares end between the atoms of a parameter: ``atoms[i]`` elements that stay together.
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
        """Return the shapes, as if each parameter were sharded evenly along dim 0."""
        return tuple(ShardSpec(shape=shape, dim=0, degree=self.degree) for shape in self.shapes)

    @property
    def shard_numel(self) -> int:
        """Return the elements per rank."""
        return self.share

    @property
    def full_numel(self) -> int:
        """Return the elements of the buffer."""
        return self.degree * self.share

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """Return the one piece of the share that the all-gather sends: all of it."""
        return ((0, self.share),)

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of the parameters themselves."""
        return sum(map(math.prod, self.shapes)) * self.itemsize

    @property
    def padding_bytes(self) -> int:
        """Return the bytes of every gather that no parameter needs."""
        return self.full_numel * self.itemsize - self.parameter_bytes

    @property
    def direct(self) -> tuple[bool, ...]:
        """Return True for each parameter: all are gathered into place."""
        return (True,) * len(self.shapes)

    def span(self, position: int, index: int) -> tuple[int, int]:
        """Return which elements ``[first, end)`` of a parameter the rank at ``index`` holds."""
        start, numel = self.starts[position], math.prod(self.shapes[position])
        first = min(max(index * self.share - start, 0), numel)
        end = min(max((index + 1) * self.share - start, 0), numel)
        return first, end

    def leading(self, position: int) -> int:
        """Return how many leading dims are flattened: the fewest whose rows do not cross atoms."""
        shape, atom = self.shapes[position], self.atoms[position]
        for count in range(1, len(shape)):
            row = math.prod(shape[count:])
            if row and atom % row == 0:
                return count
        return len(shape)

    def sizes(self, position: int) -> tuple[int, ...]:
        """Return how many rows of the flattened leading dims each rank holds."""
        row = math.prod(self.shapes[position][self.leading(position) :]) or 1
        spans = [self.span(position, index) for index in range(self.degree)]
        return tuple((end - first) // row for first, end in spans)

    def held(self, position: int, index: int) -> tuple[int, tuple[int, ...]]:
        """Return where in its share the rank at ``index`` holds a parameter, and in which shape."""
        first, _ = self.span(position, index)
        start = self.starts[position] + first - index * self.share
        leading = self.leading(position)
        shape = (self.sizes(position)[index], *self.shapes[position][leading:])
        return min(max(start, 0), self.share), shape

    def rows_per_rank(self, position: int) -> int:
        """Return how many rows of the flattened leading dims a rank holds at most."""
        return max(self.sizes(position))

    def spans(self, index: int) -> list[tuple[int, int]]:
        """Return which elements of the share of the rank at ``index`` are each parameter's."""
        held = [self.held(position, index) for position in range(len(self.shapes))]
        return [(start, start + math.prod(shape)) for start, shape in held]

    def wholes(self, memory: Tensor) -> list[Tensor]:
        """Return the parameters in the flat buffer, as views."""
        places = zip(self.starts, self.shapes, strict=True)
        return [memory[start : start + math.prod(shape)].view(shape) for start, shape in places]

    def copy_out(self, memory: Tensor) -> Callable[[], object] | None:
        """Return None: every parameter is gathered into its place."""
        return None

    def gradient_rows(self, chosen: Sequence[int], index: int, itemsize: int) -> GradientRows:
        """Return the offsets of gradients of ``chosen``: as in the buffer, in one row.

        Parameters that several ranks have a part of leave no columns for flags between the shares.
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
    """Return the plan with the smallest share, of those tried, that cuts no atom.

    Shares are multiples of 16 bytes, and of the atoms of parameters longer than a share. Parameters
    keep their order; one moves up where an atom would be cut. An atom is no longer than its
    parameter.
    """
    numels = [math.prod(shape) for shape in shapes]
    atoms = [min(atom, max(numel, 1)) for atom, numel in zip(atoms, numels, strict=True)]
    unit = elements_of(ALIGNMENT, itemsize)
    least = max(-(-sum(numels) // degree), 1)
    long = {atom for atom, numel in zip(atoms, numels, strict=True) if numel > least}
    best: tuple[int, list[int]] | None = None
    for step in _steps(unit, sorted(long)):
        fits_all = all(step % atom == 0 for atom in long)  # then it will succeed in the end
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
    """Return of what shares may be multiples: of no atom, of one, of two, of all."""
    pairs = itertools.combinations(atoms, 2)
    chosen = [(), *((atom,) for atom in atoms), *pairs, tuple(atoms)]
    return sorted({math.lcm(unit, *each) for each in chosen})


def _place(
    numels: Sequence[int], atoms: Sequence[int], share: int, degree: int
) -> list[int] | None:
    """Return where parameters start, one after another; None if they do not fit the shares."""
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
