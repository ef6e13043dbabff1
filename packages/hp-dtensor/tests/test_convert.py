"""Layouts and torch's placements describe the same local tensors."""

import math
from importlib import import_module
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.tensor as theirs
from hypothesis import assume, given, settings

from hp_dtensor import (
    Layout,
    LayoutError,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    plan_transfer,
)

from .strategies import Case, cases

_package = plan_transfer.__module__.rpartition("._")[0]
_convert: Any = import_module(f"{_package}._convert")
_torch: Any = import_module(f"{_package}._torch")


@settings(deadline=None, max_examples=300)
@given(cases(partial=True))
def test_to_torch_and_back_is_identity(case: Case) -> None:
    layout = case.source
    placements = _convert.to_torch(layout)
    again = _convert.to_layout(placements, layout.mesh_shape, len(case.shape))
    # Axes of degree one have no place in an order.
    assert again.placements == layout.placements
    for rank in case.ranks:
        assert again.boxes(case.shape, rank) == layout.boxes(case.shape, rank)


def test_fsdp_before_tp_is_torchs_strided_form() -> None:
    layout = Layout((4, 2), (Shard(0), Shard(0)), {0: (1, 0)})
    assert _convert.to_torch(layout) == (_torch.strided_shard(0, 2), theirs.Shard(0))


def test_ops_and_negative_dims_convert() -> None:
    layout = _convert.to_layout((theirs.Partial("product"), theirs.Shard(-1)), (2, 2), 3)
    assert layout.placements == (Partial("prod"), Shard(2))
    assert _convert.to_torch(layout) == (theirs.Partial("product"), theirs.Shard(2))
    assert _convert.to_layout((Shard(-3), Replicate()), (2, 2), 3).placements[0] == Shard(0)


def test_a_factor_that_no_order_explains_means_blocks_here_and_there() -> None:
    placements = (_torch.strided_shard(0, 3), theirs.Shard(0))
    layout = _convert.to_layout(placements, (4, 2), 1)
    assert layout.placements == (StridedShard(0, 3), Shard(0))
    assert _convert.to_torch(layout) == placements
    lone = Layout((4, 2), (StridedShard(1, 5), Replicate()))
    assert _convert.to_torch(lone) == (_torch.strided_shard(1, 5), theirs.Replicate())


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 24),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3),
)
def test_blocks_equal_the_splits_of_torchs_strided_shard(
    length: int, nested: list[tuple[int, int]]
) -> None:
    """torch splits axis by axis. With a shard order, results agree for even lengths only."""
    degrees = tuple(degree for degree, _ in nested)
    placements = [_torch.strided_shard(0, factor) for _, factor in nested]
    layout = _convert.to_layout(placements, degrees, 1)
    assume(not layout.is_plain or length % math.prod(degrees) == 0)
    assume(layout.is_plain or layout.shard_axes(0) == tuple(range(len(degrees))))
    full = torch.arange(length)
    for rank in range(layout.size):
        part = full
        for placement, degree, i in zip(placements, degrees, layout.coordinate(rank), strict=True):
            part = placement._split_tensor(part, degree, with_padding=False)[0][i]
        ours = [i for box in layout.boxes((length,), rank) for i in range(*box[0])]
        assert ours == part.tolist()


def test_layouts_that_torch_cannot_express_raise() -> None:
    with pytest.raises(LayoutError, match=r"hold Ragged\(0: \[3, 1\]\) on mesh axis 0"):
        _convert.to_torch(Layout((2,), (RaggedShard((0,), (3, 1)),)))
    with pytest.raises(LayoutError, match="read in mesh order"):
        _convert.to_torch(Layout((4, 2), (StridedShard(0, 2), Shard(0)), {0: (0, 1)}))


def test_placements_without_a_layout_raise() -> None:
    with pytest.raises(LayoutError, match="no layout for 'R' on mesh axis 0"):
        _convert.to_layout(("R",), (2,), 1)
    with pytest.raises(LayoutError, match="1 placements for a mesh of shape"):
        _convert.to_layout((theirs.Shard(0),), (2, 2), 1)
    with pytest.raises(LayoutError, match="0 to 1"):
        _convert.to_layout((theirs.Shard(2),), (2,), 2)
    with pytest.raises(LayoutError, match="-3"):
        _convert.to_layout((theirs.Shard(-3),), (2,), 2)
