"""The packed gradients of one group, written as they come, before they are reduced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._cut import Cut
from ._plan import Slot, plan_gradients


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one parameter's gradient lies in the rank-major rows.

    ``blocks`` full ones ``[blocks, ...]``, then the rows of a block that is not full; ``rest`` is
    what no gradient reaches. Cut along another dim than the first, all blocks are full.
    """

    cut: Cut
    rows: int
    blocks: Tensor
    tail: Tensor | None
    rest: tuple[Tensor, ...]


class Sink:
    """Rank-major rows ``[degree, shard]`` that gradients are added to one after another.

    The first of a parameter overwrites what was there; what no gradient reached becomes zero at
    the end.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        cuts: Sequence[Cut],
        degree: int,
        dtype: torch.dtype,
        take: Callable[[int], Tensor],
    ) -> None:
        """Lay out rows for the gradients of ``slots`` in memory that ``take(numel)`` gives."""
        self.plan = plan_gradients(slots, dtype.itemsize)
        self.rows = take(degree * self.plan.shard_numel).view(degree, self.plan.shard_numel)
        self._places = []
        offset = 0
        for slot, cut in zip(slots, cuts, strict=True):
            part = self.rows[:, offset : offset + slot.shard_numel]
            self._places.append(_place(part, slot, cut))
            offset += slot.shard_numel
        self._padding = self.rows[:, offset:]
        self._written = [False] * len(slots)

    def add(self, index: int, gradient: Tensor) -> None:
        """Add the gradient of the parameter at ``index``: one copy or addition, or two."""
        place = self._places[index]
        if place.cut.dim:
            sources = [place.cut.by_rank(gradient)]
        else:
            count = len(place.blocks) * place.rows
            sources = [gradient[:count].view(place.blocks.shape), gradient[count:]]
        targets = [place.blocks] if place.tail is None else [place.blocks, place.tail]
        first = self._first(index)
        for target, source in zip(targets, sources, strict=False):
            if first:
                target.copy_(source)
            else:
                target.add_(source)

    def add_product(self, index: int, left: Tensor, right: Tensor) -> None:
        """Add ``left.T @ right``, for ``[tokens, out]`` and ``[tokens, in]``, without a copy.

        One matrix product writes the full blocks, another the rows of a block that is not full.
        """
        place = self._places[index]
        blocks, rows = len(place.blocks), place.rows
        beta = 0 if self._first(index) else 1
        if blocks:
            cut = left[:, : blocks * rows].unflatten(1, (blocks, rows)).permute(1, 2, 0)
            both = right.expand(blocks, *right.shape)
            torch.baddbmm(place.blocks, cut, both, beta=beta, out=place.blocks)
        if place.tail is not None:
            rest = left[:, blocks * rows :].t()
            torch.addmm(place.tail, rest, right, beta=beta, out=place.tail)

    def takes_products(self, index: int, dtype: torch.dtype) -> bool:
        """Return whether `add_product` can write gradients of that dtype."""
        place = self._places[index]
        return not place.cut.dim and place.blocks.dtype == dtype and place.blocks.ndim == 3

    def _first(self, index: int) -> bool:
        first, self._written[index] = not self._written[index], True
        return first

    def finish(self) -> Tensor:
        """Return the rows, zero where no gradient came."""
        for place, written in zip(self._places, self._written, strict=True):
            if not written:
                place.blocks.zero_()
                if place.tail is not None:
                    place.tail.zero_()
            for rest in place.rest:
                rest.zero_()
        if self._padding.numel():
            self._padding.zero_()
        return self.rows


def _place(part: Tensor, slot: Slot, cut: Cut) -> _Place:
    if cut.dim:
        parts = cut.by_rank(torch.empty(cut.shape, device="meta"))
        return _Place(cut, 1, part.view(parts.shape), None, ())
    degree, shape = len(part), slot.shape[1:]
    blocks = slot.shape[0] // slot.rows if slot.rows else 0
    left = slot.shape[0] - blocks * slot.rows
    full = part[:blocks].view(blocks, slot.rows, *shape)
    if not left:
        rest = (part[blocks:],) if blocks < degree and slot.shard_numel else ()
        return _Place(cut, slot.rows, full, None, rest)
    end = left * slot.row_numel
    tail = part[blocks, :end].view(left, *shape)
    return _Place(cut, slot.rows, full, tail, (part[blocks, end:], part[blocks + 1 :]))
