"""Where the boxes that a rank holds lie in its local tensor."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from ..layouts._boxes import Box, extent, run_boxes, volume
from ..layouts._layout import Layout
from ._pieces import taken, within

View: TypeAlias = Callable[[Tensor], Tensor]


class Frame:
    """What one position of a layout holds, and how to look at a part of it.

    ``box`` is the one box that it holds, perhaps empty; None where it may hold several.
    """

    def __init__(self, layout: Layout, shape: Sequence[int], coordinate: Sequence[int]) -> None:
        self.box = layout.box_at(shape, coordinate) if layout.is_plain else None
        self._leading = 0
        self._runs: list[tuple[Box, int]] = []
        self._ranges: list[list[tuple[int, int, int]]] = []  # (start, stop, place) for each dim
        lengths = []
        for ranges in layout.intervals_at(shape, coordinate):
            placed, place = [], 0
            for lo, hi in ranges:
                placed.append((lo, hi, place))
                place += hi - lo
            self._ranges.append(placed)
            lengths.append(place)
        if layout.ragged is not None:
            self._leading = len(layout.ragged[1].dims)
            start, stop = layout.run_at(coordinate)
            self._place_runs(start, stop)
            lengths[: self._leading] = [stop - start]
        self.shape = tuple(lengths)

    def _place_runs(self, start: int, stop: int) -> None:
        if not all(self._ranges[: self._leading]):
            return
        frame = tuple((ranges[0][0], ranges[0][1]) for ranges in self._ranges[: self._leading])
        place = 0
        for box in run_boxes(frame, start, stop):
            self._runs.append((box, place))
            place += volume(box)

    def view(self, box: Box) -> View:
        """Return what takes ``box``, a part of one that is held, out of the local tensor, shared.

        The view has the lengths of the box.
        """
        if self.box is not None:
            cut = within(box, self.box)
            return lambda x: taken(x, cut)
        moved = 1 - self._leading if self._leading else 0
        cuts = []
        for dim in range(self._leading, len(box)):
            lo, hi = box[dim]
            start, place = next(
                (start, place) for start, stop, place in self._ranges[dim] if start <= lo < stop
            )
            cuts.append((dim + moved, place + lo - start, hi - lo))
        if not self._leading:
            return lambda x: taken(x, tuple(cuts))
        lead = box[: self._leading]
        run, first = next((run, place) for run, place in self._runs if _inside(lead, run))
        lengths, count, inner = extent(run), volume(run), within(lead, run)

        def look(x: Tensor) -> Tensor:
            rows = taken(x, tuple(cuts)).narrow(0, first, count)
            return taken(rows.view(*lengths, *rows.shape[1:]), inner)

        return look


def _inside(box: Box, frame: Box) -> bool:
    return all(
        start <= lo and hi <= stop for (lo, hi), (start, stop) in zip(box, frame, strict=True)
    )
