"""The packed gradients of one group, written as they come, before they are reduced."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._cut import Cut
from ._plan import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one parameter's gradient lies in rows of ``width`` elements: from column ``start`` on.

    ``blocks`` rows are full, with ``rows`` rows of the parameter each; of the next one the first
    ``left`` are. Cut along another dim than the first, all are full.
    """

    cut: Cut
    start: int
    width: int
    rows: int
    row_numel: int
    blocks: int
    left: int
    shape: tuple[int, ...]  # of the full blocks
    strides: tuple[int, ...]

    @staticmethod
    def of(slot: Slot, cut: Cut, start: int, width: int) -> "Place":
        """Return the place of a parameter that is cut as ``cut`` says."""
        if cut.dim:
            before = math.prod(cut.shape[: cut.dim])
            rest = math.prod(cut.shape[cut.dim :]) // cut.degree
            rows, blocks, left = before, cut.degree, 0
            held: tuple[int, ...] = (before, rest)
        else:
            rows = slot.rows
            blocks = slot.shape[0] // rows if rows else 0
            left = slot.shape[0] - blocks * rows
            held = (rows, *slot.shape[1:])
        lengths = itertools.accumulate(reversed(held[1:]), lambda a, b: a * b, initial=1)
        return Place(
            cut=cut,
            start=start,
            width=width,
            rows=rows,
            row_numel=slot.row_numel,
            blocks=blocks,
            left=left,
            shape=(blocks, *held),
            strides=(width, *reversed(list(lengths))),
        )

    def full(self, flat: Tensor, blocks: int | None = None) -> Tensor:
        """Return the full blocks, or as many as are said, as ``[blocks, rows, ...]``."""
        shape = self.shape if blocks is None else (blocks, *self.shape[1:])
        return flat.as_strided(shape, self.strides, flat.storage_offset() + self.start)

    def tail(self, flat: Tensor) -> Tensor:
        """Return the rows of the block that is not full."""
        start = self.blocks * self.width + self.start
        return flat[start : start + self.left * self.row_numel].view(self.left, *self.shape[2:])


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkPlan:
    """Places in ``degree`` rows of ``width`` elements.

    ``gaps`` are columns that none has: ``(i, start, end)`` lies before place ``i``.
    """

    degree: int
    width: int
    places: tuple[Place, ...]
    gaps: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(
        slots: Sequence[Slot], cuts: Sequence[Cut], starts: Sequence[int], degree: int, width: int
    ) -> "SinkPlan":
        """Return the plan of parameters whose parts begin at the columns ``starts``, in order."""
        ends = [start + s.shard_numel for start, s in zip(starts, slots, strict=True)]
        spans = zip((0, *ends), (*starts, width), strict=True)
        return SinkPlan(
            degree=degree,
            width=width,
            places=tuple(
                Place.of(slot, cut, start, width)
                for slot, cut, start in zip(slots, cuts, starts, strict=True)
            ),
            gaps=tuple((i, end, start) for i, (end, start) in enumerate(spans) if start > end),
        )


class Sink:
    """Rows ``[degree, width]`` that gradients are added to one after another.

    The first of a parameter overwrites what was there; what no gradient reached becomes zero at
    the end.
    """

    def __init__(self, plan: SinkPlan, flat: Tensor, flags: int | None = None) -> None:
        """Write into ``flat``, whose contents are arbitrary.

        From the column ``flags`` on, if that is given, 1 for each parameter that got a gradient.
        """
        self._plan = plan
        self._flags = flags
        self._flat = flat
        self.written = [False] * len(plan.places)  # which gradients came

    def add(self, index: int, gradient: Tensor) -> None:
        """Add the gradient of the parameter at ``index``: one copy or addition, or two."""
        place = self._plan.places[index]
        count = place.blocks * place.rows
        first = self._first(index)
        if place.cut.dim or not place.left:
            _write(place.full(self._flat), place.cut.by_rank(gradient).view(place.shape), first)
            return
        if count:
            _write(place.full(self._flat), gradient[:count].view(place.shape), first)
        _write(place.tail(self._flat), gradient[count:], first)

    def add_product(self, index: int, left: Tensor, right: Tensor) -> None:
        """Add ``left.T @ right``, for ``[tokens, out]`` and ``[tokens, in]``, without a copy.

        One matrix product writes the full blocks, another the rows of a block that is not full.
        """
        place = self._plan.places[index]
        blocks, count = place.blocks, place.blocks * place.rows
        beta = 0 if self._first(index) else 1
        if blocks:
            full = place.full(self._flat)
            cut = left[:, :count].unflatten(1, (blocks, place.rows)).permute(1, 2, 0)
            torch.baddbmm(full, cut, right.expand(blocks, *right.shape), beta=beta, out=full)
        if place.left:
            tail = place.tail(self._flat)
            torch.addmm(tail, left[:, count:].t(), right, beta=beta, out=tail)

    def add_rows(self, index: int, ids: Tensor, rows: Tensor) -> None:
        """Add ``rows[i]`` of ``[tokens, ...]`` to row ``ids[i]`` of the gradient."""
        place = self._plan.places[index]
        whole = place.full(self._flat, self._plan.degree)  # rows of padding are in no id
        if self._first(index):
            whole.zero_()
        where = (ids // place.rows, ids % place.rows)
        whole.index_put_(where, rows.to(whole.dtype), accumulate=True)

    def takes_products(self, index: int, dtype: torch.dtype) -> bool:
        """Return whether `add_product` can write gradients of that dtype."""
        place = self._plan.places[index]
        return not place.cut.dim and self._flat.dtype == dtype and len(place.shape) == 3

    def takes_rows(self, index: int) -> bool:
        """Return whether `add_rows` can write the gradient."""
        return not self._plan.places[index].cut.dim

    def _first(self, index: int) -> bool:
        first, self.written[index] = not self.written[index], True
        return first

    def finish(self) -> Tensor:
        """Return all rows, flat, zero where no gradient came."""
        rows = self._flat.view(self._plan.degree, self._plan.width)
        for place, written in zip(self._plan.places, self.written, strict=True):
            end = place.start + place.rows * place.row_numel
            if place.cut.dim:
                end = place.start + math.prod(place.shape[1:])
            first = place.blocks if written else 0
            if written and place.left:
                rows[first, place.start + place.left * place.row_numel : end].zero_()
                first += 1
            if first < self._plan.degree and end > place.start:
                rows[first:, place.start : end].zero_()
        for _, start, end in self._plan.gaps:
            if self._flags is None or not start <= self._flags < end:
                rows[:, start:end].zero_()
                continue
            if start < self._flags:
                rows[:, start : self._flags].zero_()
            rows[:, self._flags : end].fill_(1)
            for i, written in enumerate(self.written):
                if not written:
                    rows[:, self._flags + i].zero_()
        return self._flat


def _write(target: Tensor, source: Tensor, first: bool) -> None:
    if first:
        target.copy_(source)
    else:
        target.add_(source)
