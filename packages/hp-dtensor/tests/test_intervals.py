"""Intervals of one dim under nested splits, forwards and backwards, against splitting a list."""

from importlib import import_module

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from hp_dtensor import plan_transfer

_package = plan_transfer.__module__.rpartition("._")[0]
_boxes = import_module(f"{_package}._boxes")

splits = st.lists(
    st.tuples(st.integers(1, 4), st.one_of(st.just(1), st.integers(1, 5))), max_size=3
).map(tuple)


def torch_parts(
    length: int, nested: tuple[tuple[int, int], ...]
) -> dict[tuple[int, ...], list[int]]:
    """Split ``0 .. length`` with torch's own chunk, block by block."""
    held: dict[tuple[int, ...], torch.Tensor] = {(): torch.arange(length)}
    for degree, factor in nested:
        cut: dict[tuple[int, ...], torch.Tensor] = {}
        for index, values in held.items():
            blocks = [b.chunk(degree) for b in values.chunk(factor)] if len(values) else []
            for i in range(degree):
                mine = [chunks[i] for chunks in blocks if i < len(chunks)]
                cut[*index, i] = torch.cat(mine) if mine else values[:0]
        held = cut
    return {index: values.tolist() for index, values in held.items()}


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 40), splits)
def test_pieces_are_torch_chunks_of_blocks(
    length: int, nested: tuple[tuple[int, int], ...]
) -> None:
    for index, values in torch_parts(length, nested).items():
        held = _boxes.pieces(length, nested, index)
        assert [i for lo, hi in held for i in range(lo, hi)] == values
        assert all(lo < hi for lo, hi in held)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 40), splits)
def test_the_holder_of_a_position_inverts_pieces(
    length: int, nested: tuple[tuple[int, int], ...]
) -> None:
    for index in torch_parts(length, nested):
        for lo, hi in _boxes.pieces(length, nested, index):
            for position in range(lo, hi):
                assert _boxes.held_at(length, nested, position) == (index, hi)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 40), splits)
def test_the_longest_part_is_that_of_some_index(
    length: int, nested: tuple[tuple[int, int], ...]
) -> None:
    lengths = [len(values) for values in torch_parts(length, nested).values()]
    assert _boxes.longest(length, nested) == max(lengths)
