"""Packing pieces and laying them together, against plain slicing."""

import itertools
import math
from collections.abc import Callable
from importlib import import_module

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import Tensor

from hp_dtensor import plan_transfer

Box = tuple[tuple[int, int], ...]

_package = plan_transfer.__module__.rpartition("._")[0]
_execute = import_module(f"{_package}._execute")

frames = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6)).map(lambda pair: (pair[0], sum(pair))),
    min_size=1,
    max_size=3,
).map(tuple)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    """Draw a box and a list of boxes that tile it: cuts of one or two of its dims."""
    frame = draw(frames)
    boxes: list[Box] = [frame]
    for dim in draw(st.lists(st.integers(0, len(frame) - 1), min_size=1, max_size=2, unique=True)):
        lo, hi = frame[dim]
        inner = draw(st.sets(st.integers(lo, hi))) - {lo, hi}
        ends = [lo, *sorted(inner), hi]
        boxes = [
            (*box[:dim], piece, *box[dim + 1 :])
            for box in boxes
            for piece in itertools.pairwise(ends)
        ]
    return frame, draw(st.permutations(boxes)) if draw(st.booleans()) else boxes


def values(frame: Box) -> Tensor:
    shape = [hi - lo for lo, hi in frame]
    return torch.arange(math.prod(shape)).view(shape)


def piece(x: Tensor, box: Box, frame: Box) -> Tensor:
    within = [
        slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(box, frame, strict=True)
    ]
    return x[tuple(within)]


def viewer(frame: Box) -> Callable[[Box], Callable[[Tensor], Tensor]]:
    return lambda box: lambda x: _execute.narrowed(x, _execute.within(box, frame))


@settings(deadline=None, max_examples=200)
@given(tilings())
def test_a_packed_buffer_holds_the_pieces_in_order(case: tuple[Box, list[Box]]) -> None:
    frame, boxes = case
    x = values(frame)
    packed = _execute.packer(boxes, frame, viewer(frame))(x)
    assert torch.equal(packed, torch.cat([piece(x, box, frame).flatten() for box in boxes]))


@settings(deadline=None, max_examples=200)
@given(tilings())
def test_unpacking_undoes_packing(case: tuple[Box, list[Box]]) -> None:
    frame, boxes = case
    x = values(frame)
    out = torch.full_like(x, -1)
    packed = _execute.packer(boxes, frame, viewer(frame))(x)
    _execute.unpacker(boxes, viewer(frame))(packed, out)
    assert torch.equal(out, x)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), st.integers(1, 4), st.data())
def test_joining_undoes_parting(part: tuple[int, ...], parts: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(part) - 1))
    shape = (*part[:dim], part[dim] * parts, *part[dim + 1 :])
    x = torch.arange(math.prod(shape)).view(shape)
    apart = _execute.splitter(shape, [(dim, parts, 0)])(x)
    assert apart.is_contiguous()
    expected = x.chunk(parts, dim) if x.shape[dim] else [x] * parts
    assert torch.equal(apart.flatten(), torch.cat([chunk.flatten() for chunk in expected]))
    together = _execute.concatenator(part, [(dim, parts, 0)])(apart)
    assert torch.equal(together, x)
    assert together.is_contiguous()


def test_rows_are_packed_without_a_copy() -> None:
    x = torch.arange(12).view(4, 3)
    rows: list[Box] = [((0, 1), (0, 3)), ((1, 4), (0, 3))]
    frame: Box = ((0, 4), (0, 3))
    packed = _execute.packer(rows, frame, viewer(frame))(x)
    assert packed.data_ptr() == x.data_ptr()


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int, int]], list[int]]:
    """Draw the shape of a part, a grid with up to two entries for each dim, and an order."""
    part = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    dims = draw(st.lists(st.integers(0, len(part) - 1), min_size=1, max_size=3))
    levels = draw(st.permutations(range(len(dims))))
    grid = [(dim, draw(st.integers(1, 3)), level) for dim, level in zip(dims, levels, strict=True)]
    order = draw(st.permutations(range(math.prod(number for _, number, _ in grid))))
    return part, grid, order


@settings(deadline=None, max_examples=200)
@given(grids(), st.booleans())
def test_parts_of_a_grid_equal_successive_chunks(
    case: tuple[tuple[int, ...], list[tuple[int, int, int]], list[int]], ordered: bool
) -> None:
    part, grid, order = case
    shape = list(part)
    for dim, number, _ in grid:
        shape[dim] *= number
    x = torch.arange(math.prod(shape)).view(shape)
    expected = []
    for index in itertools.product(*(range(number) for _, number, _ in grid)):
        chunk = x
        for _, dim, number, i in sorted(
            (level, dim, number, i) for (dim, number, level), i in zip(grid, index, strict=True)
        ):
            chunk = chunk.chunk(number, dim)[i]
        expected.append(chunk)
    if ordered:
        expected = [expected[i] for i in order]
    given_order = order if ordered else None
    apart = _execute.splitter(tuple(shape), grid, given_order)(x)
    assert torch.equal(apart.flatten(), torch.stack(expected).flatten())
    together = _execute.concatenator(part, grid, given_order)(apart.contiguous())
    assert torch.equal(together, x)
    assert together.is_contiguous()


def test_equal_boxes_that_leave_a_rest_are_no_grid() -> None:
    x = torch.arange(10)
    frame: Box = ((0, 10),)
    boxes: list[Box] = [((0, 3),), ((3, 6),), ((6, 9),)]
    assert _execute.packer(boxes, frame, viewer(frame))(x).tolist() == list(range(9))
