"""The plan as pure integers: partitions, alignment, and a gather simulated over all ranks."""

import itertools
import math
from typing import Any
from unittest import mock

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hp_fsdp.layout import _exact
from hp_fsdp.layout._exact import ExactPlan, plan_exact
from hp_fsdp.layout._offsets import ALIGNMENT, DIRECT_BYTES, ShardSpec

from .strategies import degrees, itemsizes, shapes, thresholds

Shapes = list[tuple[int, ...]]
relaxed = settings(deadline=None, max_examples=100)


def planned(
    shapes: Shapes, degree: int, itemsize: int, direct_bytes: float = DIRECT_BYTES
) -> ExactPlan:
    specs = [ShardSpec(shape=shape, dim=0, degree=degree) for shape in shapes]
    return plan_exact(specs, degree, itemsize, direct_bytes)


def spans(plan: ExactPlan) -> list[tuple[int, int]]:
    return plan.shard_ranges(0)


@relaxed
@given(shapes, degrees, itemsizes, thresholds)
def test_shards_partition_the_shard_up_to_padding(
    shapes: Shapes, degree: int, itemsize: int, threshold: int
) -> None:
    plan = planned(shapes, degree, itemsize, threshold)
    end = 0
    for start, stop in sorted(span for span in spans(plan) if span[0] < span[1]):
        assert end <= start < end + max(1, ALIGNMENT // itemsize)
        end = stop
    end += plan.tag_numel
    assert end <= plan.shard_numel < end + max(1, ALIGNMENT // itemsize)


@relaxed
@given(shapes, degrees, itemsizes, thresholds)
def test_unsharded_places_do_not_overlap_and_fit(
    shapes: Shapes, degree: int, itemsize: int, threshold: int
) -> None:
    plan = planned(shapes, degree, itemsize, threshold)
    places = sorted(
        (start, start + degree * spec.shard_numel)
        for start, spec in zip(plan.output_starts, plan.specs, strict=True)
        if spec.shard_numel
    )
    arrivals = sorted((degree * a, degree * (a + n)) for a, n in plan.slices)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(arrivals))
    assert max((stop for _, stop in places + arrivals), default=0) <= plan.output_numel


@relaxed
@given(shapes, degrees, itemsizes, thresholds)
def test_simulated_gather_reassembles_every_parameter(
    shapes: Shapes, degree: int, itemsize: int, threshold: int
) -> None:
    # Every element is named (parameter, index); all ranks' shards are filled, "gathered" by the
    # segments and unpacked by the slots, and the prefix of each place must be the parameter.
    plan = planned(shapes, degree, itemsize, threshold)
    shards = [[None] * plan.shard_numel for _ in range(degree)]  # type: list[list[object]]
    for name, (start, spec) in enumerate(zip(plan.shard_starts, plan.specs, strict=True)):
        for rank in range(degree):
            held = math.prod(spec.local_shape(rank))
            for i in range(held):
                shards[rank][start + i] = (name, rank * spec.shard_numel + i)
    full = [None] * plan.output_numel  # type: list[object]
    for start, n in plan.slices:
        for rank in range(degree):
            at = degree * start + rank * n
            full[at : at + n] = shards[rank][start : start + n]
    for i in plan.packed:
        width = plan.specs[i].shard_numel
        for rank in range(degree):
            at = degree * plan.packed_start + rank * plan.packed_numel
            at += plan.shard_starts[i] - plan.packed_start
            to = plan.output_starts[i] + rank * width
            full[to : to + width] = full[at : at + width]
    for name, (start, spec) in enumerate(zip(plan.output_starts, plan.specs, strict=True)):
        assert full[start : start + spec.numel] == [(name, i) for i in range(spec.numel)]


@relaxed
@given(
    shapes,
    st.integers(1, 9),
    degrees,
    st.randoms(use_true_random=False),
    st.sampled_from(["at once", "split", "alike"]),
)
def test_packed_parameters_are_copied_to_their_places(
    shapes: Shapes, times: int, degree: int, random: Any, how: str
) -> None:
    specs = []
    for shape in shapes:
        dim = random.randrange(len(shape))
        if dim:
            shape = (*shape[:dim], shape[dim] * degree, *shape[dim + 1 :])
        specs.append(ShardSpec(shape=shape, dim=dim, degree=degree))
    specs *= times  # equal parameters at equal distances
    if how == "alike" and random.random() < 0.3:
        random.shuffle(specs)  # or at different distances
    plan = plan_exact(specs, degree, 4, 1 << 30)
    assume(plan.packed_numel)
    wholes = [torch.rand(spec.shape) for spec in specs]
    ranks = torch.zeros(degree, plan.packed_numel)
    for rank in range(degree):
        for i in plan.packed:
            part = specs[i].part(wholes[i], rank).flatten()
            start = plan.shard_starts[i] - plan.packed_start
            ranks[rank, start : start + len(part)] = part
    full = torch.full((plan.output_numel,), torch.nan)
    start, end = degree * plan.packed_start, degree * (plan.packed_start + plan.packed_numel)
    full[start:end] = ranks.flatten()
    limits: dict[str, Any] = {
        "INDEXED_NUMEL": 2**30 if how == "at once" else 0,
        "SERIES_LENGTH": 0 if how == "alike" else 2**30,
    }
    with mock.patch.multiple(_exact, **limits):
        copy_out = plan.copy_out(full)
        assert copy_out is not None
        copy_out()
    unsharded = plan.unsharded(full)
    for i in plan.packed:
        assert torch.equal(unsharded[i], wholes[i])


@relaxed
@given(shapes, degrees, itemsizes, thresholds)
def test_direct_parameters_start_aligned_and_packed_ones_too(
    shapes: Shapes, degree: int, itemsize: int, threshold: int
) -> None:
    plan = planned(shapes, degree, itemsize, threshold)
    for start, spec, direct in zip(plan.output_starts, plan.specs, plan.direct, strict=True):
        assert start * itemsize % ALIGNMENT == 0
        if direct and degree > 1:
            assert spec.shard_numel * itemsize % ALIGNMENT == 0
            assert spec.shard_numel * itemsize >= threshold


def test_the_threshold_counts_the_bytes_of_one_rank() -> None:
    rows = 64 * 1024 // 4
    assert planned([(2 * rows,)], 2, 4).direct == (True,)
    assert planned([(2 * rows - 8,)], 2, 4).direct == (False,)


@relaxed
@given(shapes, itemsizes)
def test_one_rank_needs_no_memory_in_addition_to_its_shard(shapes: Shapes, itemsize: int) -> None:
    plan = planned(shapes, 1, itemsize)
    assert all(plan.direct)
    assert plan.output_starts == plan.shard_starts
    assert plan.output_numel == plan.shard_numel
