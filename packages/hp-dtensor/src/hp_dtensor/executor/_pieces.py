"""Cut tensors into pieces and lay pieces together, with as few copies and calls as can be.

Everything that follows from shapes is worked out once; what is returned is applied to tensors.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..layouts._boxes import Box, extent, place_in, volume

Shape: TypeAlias = tuple[int, ...]
Change: TypeAlias = Callable[[Tensor], Tensor]
Cut: TypeAlias = tuple[tuple[int, int, int], ...]  # (dim, start, length) where not everything


def parter(shape: Shape, dim: int, parts: int) -> Change:
    """Return what lays the equal parts of ``dim`` of a tensor of ``shape`` one after another.

    Its result is contiguous, ``[parts, ...]``; for the first dim that is the tensor itself.
    """
    if dim == 0:
        return Tensor.contiguous
    split = (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
    order = (dim, *(d for d in range(len(split)) if d != dim))
    return lambda x: x.reshape(split).permute(order).contiguous()


def joiner(part: Shape, dim: int, parts: int) -> Change:
    """Return what lays contiguous parts of shape ``part`` end to end along ``dim``.

    It undoes `parter` and takes the parts in any shape.
    """
    whole = (*part[:dim], parts * part[dim], *part[dim + 1 :])
    if dim == 0:
        return lambda x: x.view(whole)
    stacked = (parts, *part)
    order = (*range(1, dim + 1), 0, *range(dim + 1, len(stacked)))
    return lambda x: x.view(stacked).permute(order).reshape(whole).contiguous()


def packer(boxes: Sequence[Box], frame: Box | None, view: Callable[[Box], Change]) -> Change:
    """Return what packs boxes of a tensor into one flat buffer.

    ``view`` takes a box out of the tensor, which covers the box ``frame``, or several if None.
    """
    if frame is not None and fills(boxes, frame):
        return lambda x: x.reshape(-1)
    if frame is not None and (dim := equal_parts(boxes, frame)) is not None:
        parted = parter(extent(frame), dim, len(boxes))
        return lambda x: parted(x).view(-1)
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
