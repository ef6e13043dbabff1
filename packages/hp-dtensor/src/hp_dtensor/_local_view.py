"""Where the boxes that a rank holds lie in its local tensor."""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ._boxes import Box, extent, place_in, run_boxes, volume
from ._layout import Layout

View: TypeAlias = Callable[[Tensor], Tensor]


class LocalView:
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


Shape: TypeAlias = tuple[int, ...]
Change: TypeAlias = Callable[[Tensor], Tensor]
Cut: TypeAlias = tuple[tuple[int, int, int], ...]  # (dim, start, length) where not everything


def splitter(shape: Shape, dim: int, parts: int, order: Sequence[int] | None = None) -> Change:
    """Return what lays the equal parts of ``dim`` of a tensor of ``shape`` one after another.

    ``order`` says which part comes when, if not one after another. The result is contiguous,
    ``[parts, ...]``; for the first dim in order that is the tensor itself.
    """
    if order is not None:

        def arrange(x: Tensor) -> Tensor:
            pieces = x.tensor_split(parts, dim)
            return torch.stack([pieces[i] for i in order])

        return arrange
    if dim == 0:
        return Tensor.contiguous
    split = (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
    dims = (dim, *(d for d in range(len(split)) if d != dim))
    return lambda x: x.reshape(split).permute(dims).contiguous()


def concatenator(part: Shape, dim: int, parts: int, order: Sequence[int] | None = None) -> Change:
    """Return what lays contiguous parts of shape ``part`` end to end along ``dim``.

    It undoes `splitter` with the same ``order`` and takes the parts in any shape.
    """
    stacked = (parts, *part)
    if order is not None:
        places = sorted(range(parts), key=order.__getitem__)
        return lambda x: torch.cat([x.view(stacked)[i] for i in places], dim)
    whole = (*part[:dim], parts * part[dim], *part[dim + 1 :])
    if dim == 0:
        return lambda x: x.view(whole)
    dims = (*range(1, dim + 1), 0, *range(dim + 1, len(stacked)))
    return lambda x: x.view(stacked).permute(dims).reshape(whole).contiguous()


def packer(boxes: Sequence[Box], frame: Box | None, view: Callable[[Box], Change]) -> Change:
    """Return what packs boxes of a tensor into one flat buffer.

    ``view`` takes a box out of the tensor, which covers the box ``frame``, or several if None.
    """
    if frame is not None and fills(boxes, frame):
        return lambda x: x.reshape(-1)
    if frame is not None and (dim := equal_parts(boxes, frame)) is not None:
        split_up = splitter(extent(frame), dim, len(boxes))
        return lambda x: split_up(x).view(-1)
    views = [view(box) for box in boxes]
    shapes = [extent(box) for box in boxes]
    if not views:
        return lambda x: x.new_empty(0)
    if len(set(shapes)) == 1:
        # Stacking copies once; flattening pieces before they are joined would copy twice.
        return lambda x: torch.stack([look(x) for look in views]).view(-1)
    sizes = [math.prod(shape) for shape in shapes]

    def pack(x: Tensor) -> Tensor:
        buffer = x.new_empty(sum(sizes))
        for space, shape, look in zip(buffer.split(sizes), shapes, views, strict=True):
            space.view(shape).copy_(look(x))
        return buffer

    return pack


def unpacker(
    boxes: Sequence[Box], view: Callable[[Box], Change]
) -> Callable[[Tensor, Tensor], None]:
    """Return what writes a flat buffer of the boxes into a tensor of which ``view`` takes them."""
    views = [view(box) for box in boxes]
    shapes = [extent(box) for box in boxes]
    sizes = [math.prod(shape) for shape in shapes]

    def unpack(buffer: Tensor, out: Tensor) -> None:
        for space, shape, look in zip(buffer.split(sizes), shapes, views, strict=True):
            look(out).copy_(space.view(shape))

    return unpack if boxes else lambda buffer, out: None


def shaped(shape: Shape) -> Change:
    """Return what gives a contiguous tensor another shape."""
    return lambda x: x.view(shape)


def taken(x: Tensor, cut: Cut) -> Tensor:
    """Return the part of ``x`` that a cut says, sharing memory."""
    for dim, start, length in cut:
        x = x.narrow(dim, start, length)
    return x


def within(box: Box, frame: Box) -> Cut:
    """Return how to cut ``box`` out of a tensor that covers ``frame``."""
    return tuple(
        (dim, lo - start, hi - lo)
        for dim, ((lo, hi), (start, end)) in enumerate(zip(box, frame, strict=True))
        if (lo, hi) != (start, end)
    )


def fills(boxes: Sequence[Box], frame: Box) -> bool:
    """Return whether the boxes, in order, lie one after another in a tensor that is the frame."""
    place = 0
    for box in boxes:
        if place_in(frame, [lo for lo, _ in box]) != place or not _is_run(box, frame):
            return False
        place += volume(box)
    return bool(boxes) and bool(frame) and place == volume(frame)


def equal_parts(boxes: Sequence[Box], frame: Box) -> int | None:
    """Return the dim of which the boxes, in order, are all the parts, of one length; or None."""
    for dim in range(len(frame)):
        lengths = {box[dim][1] - box[dim][0] for box in boxes}
        if len(lengths) == 1 and _consecutive(boxes, frame, dim):
            return dim
    return None


def _consecutive(boxes: Sequence[Box], frame: Box, dim: int) -> bool:
    position = frame[dim][0]
    for box in boxes:
        if box[dim][0] != position or box[:dim] + box[dim + 1 :] != frame[:dim] + frame[dim + 1 :]:
            return False
        position = box[dim][1]
    return position == frame[dim][1]


def _is_run(box: Box, frame: Box) -> bool:
    """Return whether the elements of ``box`` lie one after another in a tensor of ``frame``."""
    whole = True
    for interval, full in zip(reversed(box), reversed(frame), strict=True):
        if not whole and interval[1] - interval[0] != 1:
            return False
        whole = whole and interval == full
    return True
