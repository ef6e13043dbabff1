"""Where the parameters of a group lie in one buffer that is cut in equal shares: pure functions."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ._cut import Cut
from ._packing import Packing, RowPlan
from ._plan import ALIGNMENT, Slot
from ._sink import SinkPlan

TRIES = 64  # shares of one step before the next step


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedPlan:
    """One group's buffer ``[degree * share]``; a parameter lies at ``starts[i]`` in one piece.

    Shares end between the atoms of a parameter: ``atoms[i]`` elements that stay together.
    """

    degree: int
    itemsize: int
    share: int
    shapes: tuple[tuple[int, ...], ...]
    atoms: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def shard_numel(self) -> int:
        """Return the elements per rank."""
        return self.share

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of the parameters themselves."""
        return sum(map(math.prod, self.shapes)) * self.itemsize

    @property
    def gather_bytes(self) -> int:
        """Return the bytes of one gathered output, padding included."""
        return self.degree * self.share * self.itemsize

    @property
    def padding_bytes(self) -> int:
        """Return the bytes of every gather that no parameter needs."""
        return self.gather_bytes - self.parameter_bytes

    def span(self, position: int, index: int) -> tuple[int, int]:
        """Return which elements ``[first, end)`` of a parameter the rank at ``index`` holds."""
        start, numel = self.starts[position], math.prod(self.shapes[position])
        first = min(max(index * self.share - start, 0), numel)
        end = min(max((index + 1) * self.share - start, 0), numel)
        return first, end

    def leading(self, position: int) -> int:
        """Return how many leading dims are flattened: the fewest whose rows lie within atoms."""
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

    def row(self, chosen: Sequence[int], index: int) -> RowPlan:
        """Return how one rank's share of the buffer splits in its parts of ``chosen``."""
        widths, positions, cursor = [], [], 0
        for position in chosen:
            first, end = self.span(position, index)
            start = max(self.starts[position] + first - index * self.share, cursor)
            if end > first and start > cursor:
                widths.append(start - cursor)
                cursor = start
            positions.append(len(widths))
            widths.append(end - first)
            cursor += end - first
        shapes = [(self.sizes(i)[index], *self.shapes[i][self.leading(i) :]) for i in chosen]
        return RowPlan(
            widths=(*widths, self.share - cursor),
            positions=tuple(positions),
            shapes=tuple(None if len(shape) == 1 else shape for shape in shapes),
        )

    def packing(self, chosen: Sequence[int], index: int) -> Packing:
        """Return where gradients of ``chosen`` lie, as in the buffer, and in one rank's share.

        Parameters that several ranks have a part of leave no columns for flags between the shares.
        """
        slots = [
            Slot(
                shape=self.shapes[i],
                rows=self.shapes[i][0],
                row_numel=math.prod(self.shapes[i][1:]),
                shard_offset=self.starts[i],
                full_offset=self.starts[i],
                direct=True,
            )
            for i in chosen
        ]
        cuts = [Cut(shape=slot.shape, dim=0, degree=1) for slot in slots]
        starts = [self.starts[i] for i in chosen]
        width, row, apart = self.degree * self.share, self.row(chosen, index), self.degree > 1
        if not apart:
            flags = _round_up(len(chosen), max(1, ALIGNMENT // self.itemsize))
            width, row = width + flags, replace(row, widths=(*row.widths, flags))
        return Packing(
            sink=SinkPlan.of(slots, cuts, starts, 1, width),
            row=row,
            flags=self.share,
            apart=apart,
        )

    def slots(self, index: int) -> tuple[Slot, ...]:
        """Return where the parameters lie, as the rank at ``index`` holds them."""
        made = []
        for position, shape in enumerate(self.shapes):
            row = math.prod(shape[self.leading(position) :])
            first, _ = self.span(position, index)
            place = self.starts[position] + first - index * self.share
            made.append(
                Slot(
                    shape=shape,
                    rows=max(self.sizes(position)),
                    row_numel=row,
                    shard_offset=min(max(place, 0), self.share),
                    full_offset=self.starts[position],
                    direct=True,
                )
            )
        return tuple(made)


def plan_ragged(
    shapes: Sequence[tuple[int, ...]], atoms: Sequence[int], degree: int, itemsize: int
) -> RaggedPlan:
    """Return the plan with the smallest share, of those tried, that cuts no atom.

    Shares are multiples of 16 bytes, and of the atoms of parameters longer than a share. Parameters
    keep their order; one moves up where an atom would be cut.
    """
    numels = [math.prod(shape) for shape in shapes]
    unit = max(1, ALIGNMENT // itemsize)
    least = max(-(-sum(numels) // degree), 1)
    long = {atom for atom, numel in zip(atoms, numels, strict=True) if numel > least}
    best: tuple[int, list[int]] | None = None
    for step in _steps(unit, sorted(long)):
        fits_all = all(step % atom == 0 for atom in long)  # then it will succeed in the end
        share, tries = _round_up(least, step), 0
        while (best is None or share < best[0]) and (fits_all or tries < TRIES):
            starts = _place(numels, atoms, share, degree)
            if starts is not None:
                best = share, starts
            share, tries = share + _round_up(max(step, share // TRIES), step), tries + 1
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


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
