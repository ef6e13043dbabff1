"""Sources: every expression equals torch's operations, for any box, in both directions."""

from collections.abc import Callable
from itertools import count
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hp_dtensor import LayoutError
from hp_dtensor.sources import (
    Concatenate,
    Reorder,
    Slice,
    Source,
    Stack,
    Stored,
    Transpose,
)

Shape = tuple[int, ...]
Made = tuple[Source, Tensor]  # an expression, and torch's result for the same tensors


class Files:
    """Stored tensors with distinct values, created on request."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._next = count()

    def make(self, shape: Shape) -> Made:
        """Store a new tensor."""
        name, size = f"t{next(self._next)}", torch.Size(shape).numel()
        first = 1000 * len(self.tensors)
        self.tensors[name] = torch.arange(first, first + size, dtype=torch.float64).reshape(shape)
        return Stored(name), self.tensors[name]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of the stored tensors, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


@st.composite
def expressions(draw: Any, depth: int = 3) -> tuple[Files, Source, Tensor]:
    files = Files()

    def upto(length: int) -> int:
        return int(draw(st.integers(0, length)))

    def a_dim(shape: Shape) -> int:
        return upto(len(shape) - 1)

    def resized(shape: Shape, dim: int, *lengths: int) -> Shape:
        return (*shape[:dim], *lengths, *shape[dim + 1 :])

    def make(shape: Shape, left: int) -> Made:
        kinds: list[Callable[[Shape, int], Made]] = [lambda shape, left: files.make(shape)]
        if left and shape:
            kinds += [joined, narrowed, transposed, reordered, *([stacked] if any(shape) else [])]
        return draw(st.sampled_from(kinds))(shape, left - 1)  # type: ignore[no-any-return]

    def stacked(shape: Shape, left: int) -> Made:
        dim = draw(st.sampled_from([d for d, length in enumerate(shape) if length]))
        parts = [make(resized(shape, dim), left) for _ in range(shape[dim])]
        sources, tensors = zip(*parts, strict=True)
        return Stack(sources, dim), torch.stack(tensors, dim)

    def joined(shape: Shape, left: int) -> Made:
        dim = a_dim(shape)
        first = upto(shape[dim])
        parts = [make(resized(shape, dim, n), left) for n in (first, shape[dim] - first)]
        sources, tensors = zip(*parts, strict=True)
        return Concatenate(sources, dim), torch.cat(tensors, dim)

    def narrowed(shape: Shape, left: int) -> Made:
        dim, before, after = a_dim(shape), upto(2), upto(2)
        source, tensor = make(resized(shape, dim, before + shape[dim] + after), left)
        stop = before + shape[dim]
        return Slice(source, dim, before, stop), tensor.narrow(dim, before, shape[dim])

    def transposed(shape: Shape, left: int) -> Made:
        dim0, dim1 = a_dim(shape), a_dim(shape)
        order = list(shape)
        order[dim0], order[dim1] = order[dim1], order[dim0]
        source, tensor = make(tuple(order), left)
        return Transpose(source, dim0, dim1), tensor.transpose(dim0, dim1)

    def reordered(shape: Shape, left: int) -> Made:
        dim = a_dim(shape)
        length = max(1, shape[dim] + upto(2) - 1)
        picks = st.lists(st.integers(0, length - 1), min_size=shape[dim], max_size=shape[dim])
        indices = tuple(draw(picks))
        source, tensor = make(resized(shape, dim, length), left)
        return Reorder(source, indices, dim), tensor.index_select(dim, torch.tensor(indices).int())

    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    source, tensor = make(shape, depth)
    return files, source, tensor


def ranges(box: Any) -> tuple[slice, ...]:
    return tuple(slice(*interval) for interval in box)


@settings(deadline=None, max_examples=400)
@given(expressions(), st.data())
def test_any_box_equals_torch(made: tuple[Files, Source, Tensor], data: st.DataObject) -> None:
    files, source, expected = made
    assert source.shape(files.shapes) == tuple(expected.shape)
    assert set(source.names) <= set(files.tensors)
    box = []
    for length in expected.shape:
        ends = sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2)))
        box.append((ends[0], ends[1]))
    found, filled = expected.new_full(expected.shape, -1), torch.zeros_like(expected)
    for piece in source.pieces(tuple(box), files.shapes):
        part = piece.as_target(files.tensors[piece.name][ranges(piece.stored)])
        found[ranges(piece.target)] = part
        filled[ranges(piece.target)] += 1
    assert torch.equal(found[ranges(box)], expected[ranges(box)])
    assert bool((filled[ranges(box)] == 1).all())
    assert int(filled.sum()) == filled[ranges(box)].numel()  # nothing outside of the box


@settings(deadline=None, max_examples=200)
@given(expressions())
def test_writing_restores_the_stored_tensors(made: tuple[Files, Source, Tensor]) -> None:
    files, source, parameter = made
    box = tuple((0, length) for length in parameter.shape)
    written = {name: torch.full_like(tensor, -1) for name, tensor in files.tensors.items()}
    for piece in source.pieces(box, files.shapes):
        view = written[piece.name][ranges(piece.stored)]
        view.copy_(piece.as_stored(parameter[ranges(piece.target)]))
    for name, tensor in written.items():
        touched = tensor != -1  # slices and reorders may leave out elements
        assert torch.equal(tensor[touched], files.tensors[name][touched])
    # The parameter can be assembled from the written tensors.
    again = torch.full_like(parameter, -1)
    for piece in source.pieces(box, files.shapes):
        again[ranges(piece.target)] = piece.as_target(written[piece.name][ranges(piece.stored)])
    assert torch.equal(again, parameter)


A, B = Stored("a"), Stored("b")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Stack([A, B]), ["a of shape (2, 3)", "b of shape (4, 3)", "one shape"]),
        (Concatenate([A, B], 1), ["(2, 3)", "(4, 3)", "dim 1 only"]),
        (Slice(A, 0, 1, 3), ["1 to 3", "dim 0 of a", "(2, 3)"]),
        (Slice(A, 0, -1, 1), ["-1 to 1"]),
        (Reorder(A, (0, 2)), ["index 2", "use 0 to 1"]),
        (Transpose(A, 0, 2), ["dim 2 of 2 dims", "use 0 to 1"]),
        (Stack([A], 3), ["dim 3 of 3 dims"]),
        (Slice(Concatenate([A, A]), 0, 0, 9), ["a (and 1 more)"]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(source: Source, words: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        source.shape({"a": (2, 3), "b": (4, 3)})
    assert [word for word in words if word not in str(caught.value)] == []


def test_an_expression_needs_parts() -> None:
    for kind in (Stack, Concatenate):
        with pytest.raises(LayoutError, match="at least one source"):
            kind([])


def test_a_missing_name_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        Stack([A, Stored("c")]).shape({"a": (2, 3)})
