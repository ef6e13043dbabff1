"""Layouts say what torch's placements say."""

from importlib import import_module
from typing import Any

import pytest
import torch.distributed.tensor as theirs
from hypothesis import given, settings

from hp_dtensor import (
    Layout,
    Partial,
    PlacementCountError,
    PlacementTypeError,
    Replicate,
    Shard,
    ShardDimError,
    plan_transfer,
)

from .strategies import Case, cases

_package = plan_transfer.__module__.rpartition(".")[0]
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


def test_what_has_no_layout_is_refused_by_name() -> None:
    with pytest.raises(PlacementTypeError, match="split factor 3"):
        _convert.to_layout((_torch.strided_shard(0, 3), theirs.Shard(0)), (4, 2), 1)
    with pytest.raises(PlacementTypeError, match="no layout for 'R' on mesh axis 0"):
        _convert.to_layout(("R",), (2,), 1)
    with pytest.raises(PlacementCountError, match="1 placements for a mesh of shape"):
        _convert.to_layout((theirs.Shard(0),), (2, 2), 1)
    with pytest.raises(ShardDimError, match="0 to 1"):
        _convert.to_layout((theirs.Shard(2),), (2,), 2)
    with pytest.raises(ShardDimError, match="-3"):
        _convert.to_layout((theirs.Shard(-3),), (2,), 2)
