"""`ParallelDims` as a value."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings

from hp_mesh import ParallelDims, ParallelDimsError

from .strategies import BASE, dims

NAMES = (*BASE, "ep", "etp")


def test_the_core_works_without_loading_torch() -> None:
    root = ParallelDims.__module__.rpartition(".")[0]
    code = f"""
import importlib, sys
root = importlib.import_module({root!r})
dims = root.ParallelDims(tp=2, ep=2, world_size=8)
dims.validate({{"num_attention_heads": 8}}, seq_len=16, global_batch=8)
assert dims.layout().group("tp", 3) == (2, 3)
assert not [name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@given(dims())
@settings(deadline=None, max_examples=50)
def test_sizes_multiply_to_the_world(dims: ParallelDims) -> None:
    layout = dims.layout()
    assert dims.dp_size * dims.non_dp_size == dims.world_size == layout.world_size
    assert layout.size("dp") == layout.size("batch") == dims.dp_size


@given(dims())
@settings(deadline=None, max_examples=50)
def test_an_axis_is_enabled_exactly_when_its_degree_is_above_one(dims: ParallelDims) -> None:
    for name in NAMES:
        assert getattr(dims, f"{name}_enabled") == (getattr(dims, name) > 1)
    assert dims.dp_enabled == (dims.layout().size("dp") > 1)
    assert dims.fsdp_enabled == (dims.layout().size("fsdp") > 1)


@given(dims())
@settings(deadline=None, max_examples=50)
def test_the_summary_is_one_line_with_every_degree(dims: ParallelDims) -> None:
    words = dims.summary().split(" ")
    for name in NAMES:
        assert f"{name}={getattr(dims, name)}" in words
    assert f"world={dims.world_size}" in words
    assert "\n" not in dims.summary()


@pytest.mark.parametrize(("cp", "tp", "divisor"), [(1, 1, 1), (1, 4, 4), (2, 1, 4), (2, 4, 16)])
def test_sequences_divide_over_tp_and_twice_cp(cp: int, tp: int, divisor: int) -> None:
    dims = ParallelDims(cp=cp, tp=tp, world_size=cp * tp)
    assert dims.seq_len_divisor == divisor
    dims.validate({}, seq_len=divisor, causal_balance=True)


def test_what_needs_the_world_says_so_before_it_is_known() -> None:
    unknown = r"dp_shard is not known.*resolve\(world_size"
    with pytest.raises(ParallelDimsError, match=unknown):
        _ = ParallelDims(tp=2).dp_size
    with pytest.raises(ParallelDimsError, match=unknown):
        ParallelDims(tp=2).layout()
    with pytest.raises(ParallelDimsError, match=unknown):
        ParallelDims(tp=2).check({})


def test_degrees_that_are_all_given_make_their_own_world() -> None:
    dims = ParallelDims(dp_shard=3, tp=2, ep=3)
    assert dims.layout().world_size == 6
    assert dims.world_size is None
    with pytest.raises(ParallelDimsError, match="ep=4 does not divide"):
        _ = ParallelDims(dp_shard=3, tp=2, ep=4).dp_size


def test_configurations_are_values() -> None:
    first: dict[Any, int] = {ParallelDims(tp=2, world_size=4): 1}
    assert first[ParallelDims(tp=2, dp_shard=2, world_size=4)] == 1
    with pytest.raises(AttributeError):
        ParallelDims(tp=2).tp = 4  # type: ignore[misc]


def test_whether_experts_are_split_is_unknown_while_ep_is() -> None:
    with pytest.raises(ParallelDimsError, match="ep is not known yet"):
        ParallelDims(ep=-1, ep_mode="peer").ep_enabled  # noqa: B018
    assert ParallelDims(ep=2).ep_enabled
    assert not ParallelDims(tp=-1).etp_enabled
