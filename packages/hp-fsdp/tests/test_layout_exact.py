"""The plan as pure integers: partitions, alignment, and a gather simulated over all ranks."""

import itertools
import math

from hypothesis import given, settings

from hp_fsdp._plan import ALIGNMENT, GroupPlan, plan_gradients, plan_group

from .strategies import degrees, itemsizes, shapes, thresholds

Shapes = list[tuple[int, ...]]
relaxed = settings(deadline=None, max_examples=100)


def spans(plan: GroupPlan) -> list[tuple[int, int]]:
    return [(s.shard_offset, s.shard_offset + s.shard_numel) for s in plan.slots]


@relaxed
@given(shapes, degrees, itemsizes, thresholds)
def test_slots_partition_the_shard_up_to_padding(
    shapes: Shapes, degree: int, itemsize: int, threshold: int
) -> None:
    plan = plan_group(shapes, degree, itemsize, threshold)
    end = 0
    for start, stop in sorted(span for span in spans(plan) if span[0] < span[1]):
        assert end <= start < end + max(1, ALIGNMENT // itemsize)
        end = stop
    assert end <= plan.shard_numel < end + max(1, ALIGNMENT // itemsize)


@relaxed
@given(shapes, degrees, itemsizes, thresholds)
def test_unsharded_places_do_not_overlap_and_fit(
    shapes: Shapes, degree: int, itemsize: int, threshold: int
) -> None:
    plan = plan_group(shapes, degree, itemsize, threshold)
    places = sorted(
        (s.full_offset, s.full_offset + degree * s.shard_numel) for s in plan.slots if s.shard_numel
    )
    arrivals = sorted((degree * a, degree * (a + n)) for a, n in plan.segments)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(arrivals))
    assert max((stop for _, stop in places + arrivals), default=0) <= plan.full_numel


@relaxed
@given(shapes, degrees, itemsizes, thresholds)
def test_simulated_gather_reassembles_every_parameter(
    shapes: Shapes, degree: int, itemsize: int, threshold: int
) -> None:
    # Every element is named (parameter, index); all ranks' shards are filled, "gathered" by the
    # segments and unpacked by the slots, and the prefix of each place must be the parameter.
    plan = plan_group(shapes, degree, itemsize, threshold)
    shards = [[None] * plan.shard_numel for _ in range(degree)]  # type: list[list[object]]
    for name, slot in enumerate(plan.slots):
        for rank in range(degree):
            held = slot.held_rows(rank) * slot.row_numel
            for i in range(held):
                shards[rank][slot.shard_offset + i] = (name, rank * slot.shard_numel + i)
    full = [None] * plan.full_numel  # type: list[object]
    for start, n in plan.segments:
        for rank in range(degree):
            at = degree * start + rank * n
            full[at : at + n] = shards[rank][start : start + n]
    for slot in plan.slots:
        if not slot.direct:
            for rank in range(degree):
                at = degree * plan.packed_offset + rank * plan.packed_numel
                at += slot.shard_offset - plan.packed_offset
                to = slot.full_offset + rank * slot.shard_numel
                full[to : to + slot.shard_numel] = full[at : at + slot.shard_numel]
    for name, slot in enumerate(plan.slots):
        found = full[slot.full_offset : slot.full_offset + slot.numel]
        assert found == [(name, i) for i in range(slot.numel)]


@relaxed
@given(shapes, degrees, itemsizes, thresholds)
def test_direct_parameters_start_aligned_and_packed_ones_too(
    shapes: Shapes, degree: int, itemsize: int, threshold: int
) -> None:
    plan = plan_group(shapes, degree, itemsize, threshold)
    for slot in plan.slots:
        assert slot.full_offset * itemsize % ALIGNMENT == 0
        if slot.direct and degree > 1:
            assert slot.shard_numel * itemsize % ALIGNMENT == 0
            assert slot.shard_numel * itemsize >= threshold


def test_the_threshold_counts_the_bytes_of_one_rank() -> None:
    rows = 64 * 1024 // 4
    assert plan_group([(2 * rows,)], 2, 4).slots[0].direct
    assert not plan_group([(2 * rows - 8,)], 2, 4).slots[0].direct


@relaxed
@given(shapes, degrees)
def test_held_rows_are_those_of_torch_chunk(shapes: Shapes, degree: int) -> None:
    for slot in plan_group(shapes, degree, 4).slots:
        held = [slot.held_rows(rank) for rank in range(degree)]
        assert sum(held) == slot.shape[0]
        step = math.ceil(slot.shape[0] / degree)
        chunks = [min(step, slot.shape[0] - i) for i in range(0, slot.shape[0], max(step, 1))]
        assert held == chunks + [0] * (degree - len(chunks))


@relaxed
@given(shapes, degrees, itemsizes)
def test_gradient_rows_are_dense_and_end_aligned(
    shapes: Shapes, degree: int, itemsize: int
) -> None:
    slots = plan_group(shapes, degree, itemsize).slots
    plan = plan_gradients(slots, itemsize)
    end = sum(slot.shard_numel for slot in slots)
    assert plan.shard_numel == end + plan.padding
    assert plan.shard_numel * itemsize % ALIGNMENT == 0
    assert plan.padding * itemsize < ALIGNMENT


@relaxed
@given(shapes, itemsizes)
def test_one_rank_needs_no_place_besides_its_shard(shapes: Shapes, itemsize: int) -> None:
    plan = plan_group(shapes, 1, itemsize)
    assert all(slot.direct and slot.full_offset == slot.shard_offset for slot in plan.slots)
    assert plan.full_numel == plan.shard_numel
