"""Layouts: boxes, order, equality, errors."""

import itertools
import math
import os
import pickle
import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from hp_dtensor import (
    Layout,
    LayoutError,
    MeshError,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    explain,
    plan_transfer,
)

from .strategies import MESHES, Case, cases, free_layouts, shapes

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@settings(deadline=None, max_examples=300)
@given(cases(partial=True))
def test_boxes_partition_the_tensor_for_each_replica(case: Case) -> None:
    layout, shape = case.source, case.shape
    whole = [axis for axis, p in enumerate(layout.placements) if not isinstance(p, Shard)]
    for fixed in itertools.product(*(range(layout.mesh_shape[axis]) for axis in whole)):
        held = np.zeros(shape, dtype=int)
        for rank in case.ranks:
            coordinate = layout.coordinate(rank)
            if [coordinate[axis] for axis in whole] == list(fixed):
                for box in layout.boxes(shape, rank):
                    held[tuple(slice(lo, hi) for lo, hi in box)] += 1
        assert (held == 1).all()


@settings(deadline=None, max_examples=200)
@given(cases())
def test_a_shard_is_torch_chunk_nested_in_shard_order(case: Case) -> None:
    layout, shape = case.source, case.shape
    full = torch.arange(math.prod(shape)).view(shape)
    for rank in case.ranks:
        part = full
        coordinate = layout.coordinate(rank)
        for dim in range(len(shape)):
            for axis in layout.shard_axes(dim):
                chunks = part.chunk(layout.mesh_shape[axis], dim)
                empty = part.narrow(dim, 0, 0)
                at = coordinate[axis]
                part = chunks[at] if at < len(chunks) else empty
        assert layout.local_shape(shape, rank) == tuple(part.shape)
        boxes = layout.boxes(shape, rank)
        assert len(boxes) == (1 if part.numel() else 0)
        for box in boxes:
            assert torch.equal(full[tuple(slice(lo, hi) for lo, hi in box)], part)


def test_fsdp_before_tp_splits_dim_0_by_the_inner_axis_first() -> None:
    layout = Layout((4, 2), (S0, S0), {0: (1, 0)})
    starts = [layout.box_at((15,), layout.coordinate(rank))[0] for rank in range(8)]
    assert starts == [(0, 2), (8, 10), (2, 4), (10, 12), (4, 6), (12, 14), (6, 8), (14, 15)]


def test_equal_layouts_compare_equal_however_the_order_is_spelled() -> None:
    plain = Layout((2, 2), (S0, S0))
    assert plain == Layout((2, 2), (S0, S0), {0: [0, 1]})
    assert plain == Layout((2, 2), (S0, S0), ((0, (0, 1)),))
    assert hash(plain) == hash(Layout((2, 2), (S0, S0), {0: (0, 1)}, ranks=(0, 1, 2, 3)))
    assert plain != Layout((2, 2), (S0, S0), {0: (1, 0)})


def test_ranks_are_places_in_the_mesh_not_numbers() -> None:
    layout = Layout((2,), (S0,), ranks=(7, 3))
    assert layout.boxes((4,), 7) == (((0, 2),),)
    assert layout.boxes((4,), 3) == (((2, 4),),)


def test_a_scalar_is_one_box_without_dims() -> None:
    assert Layout((2,), (R,)).boxes((), 1) == ((),)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_mesh_is_named(rank: int) -> None:
    with pytest.raises(MeshError, match=rf"rank {rank} .*0 to 3"):
        Layout((2, 2), (R, R)).boxes((4,), rank)


@pytest.mark.parametrize("shape", [2, "2", (2.0,), None])
def test_a_mesh_shape_is_a_sequence_of_degrees(shape: Any) -> None:
    with pytest.raises(LayoutError, match=r"mesh_shape=.* is no shape of a mesh; .* \(2, 4\)"):
        Layout(shape, (Shard(0),))
    assert Layout(np.array([2]), (Shard(0),)) == Layout((2,), (Shard(0),))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [4, "4", (4.0,), None, [(4,)]])
def test_a_shape_is_a_sequence_of_whole_numbers(shape: Any) -> None:
    """A plan for 4.0 rows would be found again for 4."""
    rows, whole = Layout((2,), (S0,)), Layout((2,), (R,))
    with pytest.raises(LayoutError, match=r"shape="):
        explain(rows, whole, shape=shape)
    for call in (lambda: rows.boxes(shape, 0), lambda: plan_transfer(rows, whole, shape, 0)):
        with pytest.raises(LayoutError, match=r"shape=.* is no shape of a tensor"):
            call()
    for rows_of_4 in ([4], np.array([4]), (np.int64(4),)):
        made = explain(rows, whole, shape=rows_of_4)  # type: ignore[arg-type]
        assert repr(made) == repr(explain(rows, whole, shape=(4,)))
        assert [type(n) for n in (*made.shape, made.bytes_received)] == [int, int]


@pytest.mark.parametrize("placements", [{S0, R}, {S0: 0, R: 1}, "SR", frozenset([S0, R])])
def test_placements_come_in_the_order_of_the_axes(placements: Any) -> None:
    with pytest.raises(LayoutError, match="placements are a sequence"):
        Layout((2, 2), placements)
    with pytest.raises(LayoutError, match="RaggedShard takes sizes as a sequence"):
        RaggedShard((0,), {1, 3})  # type: ignore[arg-type]


def test_errors_name_the_legal_values() -> None:
    with pytest.raises(LayoutError, match="give 2, one for each axis"):
        Layout((2, 2), (R,))
    with pytest.raises(LayoutError, match="0 to 1"):
        Layout((2,), (Shard(2),)).boxes((4, 4), 0)
    with pytest.raises(LayoutError, match="'a'"):
        Shard("a")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"axes \(0, 1\) shard"):
        Layout((2, 2), (S0, S0), {0: (1,)})
    with pytest.raises(LayoutError, match="dim 1"):
        Layout((2, 2), (S0, S0), {1: (0, 1)})
    with pytest.raises(LayoutError, match="max and sum"):
        Layout((2, 2), (Partial("sum"), Partial("max")))
    with pytest.raises(LayoutError, match="sum, avg, max, min, prod"):
        Partial("mean")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"use Replicate\(\)"):
        Layout((2,), ("R",))  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="needs 4 different ranks"):
        Layout((2, 2), (R, R), ranks=(0, 1, 2, 2))
    with pytest.raises(LayoutError, match=r"each mesh axis, got Shard\(dim=0\) alone"):
        Layout((2,), S0)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"shape=\(-1, 4\) has negative sizes"):
        Layout((2,), (S0,)).boxes((-1, 4), 0)
    with pytest.raises(LayoutError, match="negative sizes"):
        Layout((2,), (S0,)).local_shape((-1, 4), 0)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 40), st.lists(st.integers(1, 5), max_size=3))
def test_boxes_of_nested_shards_ascend_in_shard_order(length: int, degrees: list[int]) -> None:
    layout = Layout(tuple(degrees), (S0,) * len(degrees))
    intervals = [layout.box_at((length,), layout.coordinate(r))[0] for r in range(layout.size)]
    filled = [interval for interval in intervals if interval[0] < interval[1]]
    assert [lo for lo, _ in filled] == [0, *(hi for _, hi in filled[:-1])][: len(filled)]
    assert (filled[-1][1] if filled else 0) == length


@st.composite
def placed(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    """Draw a layout of any kind and a valid tensor shape for it."""
    shape = draw(shapes)
    return draw(free_layouts(draw(st.sampled_from(MESHES)), shape)), shape


@settings(deadline=None, max_examples=400)
@given(placed())
def test_strided_and_ragged_tiles_partition_the_tensor_for_each_replica(
    case: tuple[Layout, tuple[int, ...]],
) -> None:
    layout, shape = case
    whole = [axis for axis, p in enumerate(layout.placements) if isinstance(p, Replicate)]
    held: dict[tuple[int, ...], np.ndarray[Any, np.dtype[np.int_]]] = {}
    for rank in range(layout.size):
        coordinate = layout.coordinate(rank)
        replica = tuple(coordinate[axis] for axis in whole)
        counts = held.setdefault(replica, np.zeros(shape, dtype=int))
        boxes = layout.boxes(shape, rank)
        for box in boxes:
            counts[tuple(slice(lo, hi) for lo, hi in box)] += 1
        assert sum(math.prod(hi - lo for lo, hi in box) for box in boxes) == math.prod(
            layout.local_shape(shape, rank)
        )
    assert len(held) == math.prod(layout.mesh_shape[axis] for axis in whole)
    assert all((counts == 1).all() for counts in held.values())


@settings(deadline=None, max_examples=200)
@given(placed())
def test_ragged_runs_are_consecutive_rows_of_the_flattened_dims(
    case: tuple[Layout, tuple[int, ...]],
) -> None:
    layout, shape = case
    if layout.ragged is None:
        return
    axis, placement = layout.ragged
    count = len(placement.dims)
    full = torch.arange(math.prod(shape)).view(shape)
    without = list(layout.placements)
    without[axis] = Replicate()
    frame = Layout(layout.mesh_shape, tuple(without), layout.shard_order)
    for rank in range(layout.size):
        part = full
        for dim, ranges in enumerate(frame.intervals_at(shape, frame.coordinate(rank))):
            taken = [part.narrow(dim, lo, hi - lo) for lo, hi in ranges]
            part = torch.cat(taken, dim) if taken else part.narrow(dim, 0, 0)
        rows = part.reshape(-1, *part.shape[count:]) if part.numel() else part.new_empty(0)
        at = layout.coordinate(rank)[axis]
        start = sum(placement.sizes[:at])
        mine = rows[start : start + placement.sizes[at]]
        boxes = [full[tuple(slice(lo, hi) for lo, hi in box)] for box in layout.boxes(shape, rank)]
        flat = torch.cat([box.reshape(-1) for box in boxes]) if boxes else full.new_empty(0)
        assert sorted(mine.flatten().tolist()) == sorted(flat.tolist())
        if count == len(shape):
            assert torch.equal(mine.flatten(), flat)


def test_a_split_factor_of_later_degrees_is_the_order_right_to_left() -> None:
    strided = Layout((4, 2), (StridedShard(0, 2), S0))
    assert strided == Layout((4, 2), (S0, S0), {0: (1, 0)})
    assert hash(strided) == hash(Layout((4, 2), (S0, S0), {0: (1, 0)}))
    three = Layout((2, 3, 2), (StridedShard(0, 6), StridedShard(0, 2), S0))
    assert three == Layout((2, 3, 2), (S0, S0, S0), {0: (2, 1, 0)})
    assert Layout((4,), (StridedShard(0, 1),)) == Layout((4,), (S0,))


def test_any_other_factor_cuts_blocks() -> None:
    layout = Layout((4,), (StridedShard(0, 2),))
    assert [layout.boxes((9,), rank) for rank in range(4)] == [
        (((0, 2),), ((5, 6),)),
        (((2, 4),), ((6, 7),)),
        (((4, 5),), ((7, 8),)),
        (((8, 9),),),
    ]
    assert not layout.is_plain
    assert layout == Layout((4,), (StridedShard(0, 2),), {0: (0,)})


def test_a_run_over_several_dims_is_few_boxes() -> None:
    layout = Layout((2,), (RaggedShard((0, 1), (7, 5)),))
    assert layout.boxes((3, 4), 0) == (((0, 1), (0, 4)), ((1, 2), (0, 3)))
    assert layout.boxes((3, 4), 1) == (((1, 2), (3, 4)), ((2, 3), (0, 4)))
    assert layout.local_shape((3, 4), 1) == (5,)
    rows = Layout((3,), (RaggedShard((0,), (2, 0, 1)),))
    assert [rows.boxes((3, 4), r) for r in range(3)] == [
        (((0, 2), (0, 4)),),
        (),
        (((2, 3), (0, 4)),),
    ]
    assert rows.local_shape((3, 4), 1) == (0, 4)


def test_evenly_spaced_ranks_cost_nothing_and_compare_equal() -> None:
    spaced = Layout((2, 2), (S0, R), ranks=(4, 6, 8, 10))
    assert spaced == Layout((2, 2), (S0, R), ranks=range(4, 12, 2))
    assert spaced.coordinate(8) == (1, 0)
    assert not spaced.holds(5)
    assert Layout((4,), (S0,), ranks=range(4)) == Layout((4,), (S0,))
    shuffled = Layout((3,), (S0,), ranks=(5, 1, 9))
    assert [shuffled.coordinate(rank) for rank in (5, 1, 9)] == [(0,), (1,), (2,)]
    assert shuffled == Layout((3,), (S0,), ranks=[5, 1, 9])


def test_errors_of_ragged_and_strided_shards_name_the_legal_values() -> None:
    with pytest.raises(LayoutError, match=r"degree 2; give 2 sizes"):
        Layout((2,), (RaggedShard((0,), (1, 2, 3)),))
    with pytest.raises(LayoutError, match=r"sum to 5; they must sum to 6"):
        Layout((2,), (RaggedShard((0,), (2, 3)),)).boxes((6, 2), 0)
    with pytest.raises(LayoutError, match="0 or more"):
        RaggedShard((0,), (2, -1))
    with pytest.raises(LayoutError, match="dims as a sequence"):
        RaggedShard(0, (2, 1))  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="without gaps"):
        RaggedShard((1,), (2, 1))
    with pytest.raises(LayoutError, match="0 to 0"):
        Layout((2,), (RaggedShard((0, 1), (2, 1)),)).boxes((3,), 0)
    with pytest.raises(LayoutError, match="only one axis can"):
        Layout((1, 1), (RaggedShard((0,), (2,)), RaggedShard((0,), (2,))))
    with pytest.raises(LayoutError, match="2 equal consecutive parts"):
        Layout((2, 2), (S0, RaggedShard((0,), (2, 1)))).boxes((5,), 0)
    with pytest.raises(LayoutError, match="1 or more"):
        StridedShard(0, 0)
    with pytest.raises(LayoutError, match="0 to 0"):
        Layout((2,), (StridedShard(1, 3),)).boxes((5,), 0)


@pytest.mark.parametrize("order", [5, (1, 0), ((0, 1),), ((0, ("a", "b")),), {0: 1}, {0: "10"}])
def test_a_shard_order_gives_axes_for_each_dim(order: Any) -> None:
    with pytest.raises(LayoutError, match=r"shard_order=.* gives no axes for each dim; write"):
        Layout((2, 2), (Shard(0), Shard(0)), order)


def test_a_shard_order_may_be_made_of_lists() -> None:
    order: Any = [(0, [1, 0])]
    listed = Layout((2, 2), (Shard(0), Shard(0)), order)
    assert listed == Layout((2, 2), (Shard(0), Shard(0)), {0: (1, 0)})


def test_a_layout_from_another_process_is_found_in_a_dict() -> None:
    """Hashes of strings differ between processes."""
    program = "import sys, pickle, hp_dtensor as d; sys.stdout.buffer.write(pickle.dumps("
    program = program.replace("hp_dtensor", Layout.__module__.rpartition("._")[0])
    program += "d.Layout((2, 2), (d.Partial('max'), d.Shard(0)), ranks=(3, 1, 2, 0))))"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        sent = pickle.loads(done.stdout)
        mine = Layout((2, 2), (Partial("max"), Shard(0)), ranks=(3, 1, 2, 0))
        assert {mine: 1}.get(sent) == 1
        assert sent.coordinate(2) == (1, 0)


@pytest.mark.parametrize("wrong", [(0.0, 1.0), 5, "01", (0, None)])
def test_ranks_are_whole_numbers(wrong: Any) -> None:
    with pytest.raises(MeshError, match=r"ranks=.* sequence of 2 whole numbers"):
        Layout((2,), (S0,), ranks=wrong)
    numbered = Layout((2,), (S0,), ranks=np.array([7, 3]))  # type: ignore[arg-type]
    assert numbered == Layout((2,), (S0,), ranks=(7, 3))


def test_a_shard_order_lists_each_dim_once() -> None:
    for order in (((0, (0,)), (0, (0, 1))), ((0, (0, 1)), (0, (0, 1)))):
        with pytest.raises(LayoutError, match="lists a dim twice"):
            Layout((2, 2), (S0, S0), shard_order=order)
