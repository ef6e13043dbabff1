"""The steps that plans are made of: what each moves, receives and holds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ._boxes import intersect, volume
from ._layout import Layout
from ._placements import Partial, Replicate
from ._transfer import plan_transfer

Kind = Literal[
    "slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "direct", "transfer"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change of layout: a local slice, or one collective over the mesh axes ``axes``.

    ``all_gather`` and ``all_to_all`` move equal parts over one axis; ``direct`` sends every rank
    exactly what it lacks, over any axes and with any sizes, and so does ``transfer`` from one mesh
    to another, point to point between the ranks that take part.
    """

    kind: Kind
    axes: tuple[int, ...]
    source: Layout
    target: Layout

    def received(self, shape: Sequence[int], rank: int, itemsize: int) -> int:
        """Return how many bytes ``rank`` receives from others; an all-reduce as bandwidth-optimal.

        The count is that of `RecordingCollectives`.
        """
        if self.kind == "slice" or 0 in shape:
            return 0
        if self.kind in ("direct", "transfer"):
            return self._lacking(shape, rank) * itemsize
        if not self.source.holds(rank):
            return 0
        held = self._held(shape, rank) * itemsize
        others = self.ranks - 1
        if self.kind == "all_gather":
            return others * held
        if self.kind == "reduce_scatter":
            return others * self._result(shape, rank) * itemsize
        if self.kind == "all_reduce":
            return 2 * held * others // self.ranks
        return held * others // self.ranks

    def sent(self, shape: Sequence[int], rank: int, itemsize: int) -> int:
        """Return how many bytes ``rank`` sends to others in a direct step or transfer."""
        moved = plan_transfer(self.source, self.target, shape, rank)
        return sum(volume(box) for _, box in moved.sends) * itemsize

    def peak(self, shape: Sequence[int], rank: int) -> int:
        """Return how many elements are alive at once: input, output and buffers between them."""
        return self._alive(self._held(shape, rank), self._result(shape, rank), shape)

    def most(self, shape: Sequence[int]) -> int:
        """Return a bound on `peak` over all ranks, the same on each of them."""
        held, result = most_held(self.source, shape), most_held(self.target, shape)
        return self._alive(held, result, shape)

    @property
    def ranks(self) -> int:
        """Return how many ranks take part in the step's collective."""
        if self.kind == "transfer":
            return self.source.size + self.target.size
        return math.prod(self.target.mesh_shape[axis] for axis in self.axes)

    def __str__(self) -> str:
        if self.kind == "transfer":
            meshes = f"{list(self.source.mesh_shape)} to {list(self.target.mesh_shape)}"
            return f"transfer from mesh {meshes}: {self.source} -> {self.target}"
        over = f" over axes {self.axes}" if self.axes else ""
        return f"{self.kind}{over}: {self.source} -> {self.target}"

    def _alive(self, held: int, result: int, shape: Sequence[int]) -> int:
        if self.kind in ("slice", "all_reduce"):
            return held + result
        if self.kind == "direct":
            return held * (1 + self._copies) + 2 * result
        if self.kind == "transfer":
            return 2 * (held + result)
        if self.kind == "reduce_scatter" and not self.target.is_even(shape):
            # Parts of the length of the longest come from every rank.
            return 2 * held + (self.ranks + 1) * result
        return held + result + max(held, result)

    @property
    def _copies(self) -> int:
        """Return how often a rank may send the same element, each time from a buffer of its own."""
        return math.prod(
            degree
            for degree, old, new in zip(
                self.source.mesh_shape, self.source.placements, self.target.placements, strict=True
            )
            if isinstance(new, Replicate) and not isinstance(old, Replicate | Partial)
        )

    def _held(self, shape: Sequence[int], rank: int) -> int:
        return _elements(self.source, shape, rank)

    def _result(self, shape: Sequence[int], rank: int) -> int:
        return _elements(self.target, shape, rank)

    def _lacking(self, shape: Sequence[int], rank: int) -> int:
        """Return how many elements ``rank`` needs and does not hold; a transfer moves no others."""
        needed = self._result(shape, rank)
        if not needed or not self.source.holds(rank):
            return needed
        here, there = self.source.coordinate(rank), self.target.coordinate(rank)
        if self.source.ragged is None and self.target.ragged is None:
            common = 1
            mine = self.source.intervals_at(shape, here)
            for ranges, wanted in zip(mine, self.target.intervals_at(shape, there), strict=True):
                common *= sum(
                    max(0, min(hi, stop) - max(lo, start))
                    for lo, hi in ranges
                    for start, stop in wanted
                )
            return needed - common
        held = self.source.boxes_at(shape, here)
        return needed - sum(
            volume(intersect(a, b)) for a in held for b in self.target.boxes_at(shape, there)
        )


def most_held(layout: Layout, shape: Sequence[int]) -> int:
    """Return how many elements of a tensor of ``shape`` the fullest rank holds."""
    # The first chunk is nowhere shorter than another.
    lengths = [
        sum(hi - lo for lo, hi in ranges)
        for ranges in layout.intervals_at(shape, (0,) * len(layout.mesh_shape))
    ]
    if layout.ragged is not None:
        placement = layout.ragged[1]
        lengths[: len(placement.dims)] = [max(placement.sizes)]
    return math.prod(lengths)


def _elements(layout: Layout, shape: Sequence[int], rank: int) -> int:
    return math.prod(layout.local_shape(shape, rank)) if layout.holds(rank) else 0
