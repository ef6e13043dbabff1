"""Equal shares of one buffer that cut no atom."""

import itertools
import math
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_fsdp.layout import ShardSpec, plan_uneven
from hp_fsdp.layout._ragged import RaggedPlan, plan_ragged


def planned(
    shapes: Sequence[tuple[int, ...]], atoms: Sequence[int], degree: int, itemsize: int
) -> RaggedPlan:
    specs = [
        ShardSpec(shape=shape, dim=0, degree=degree, atom=atom)
        for shape, atom in zip(shapes, atoms, strict=True)
    ]
    return plan_ragged(specs, degree, itemsize)


@st.composite
def plans(draw: st.DrawFn) -> RaggedPlan:
    """Draw parameters with atoms of some of their trailing dims, or of a few elements."""
    shapes = draw(
        st.lists(
            st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
        )
    )
    atoms = []
    for shape in shapes:
        kept = draw(st.integers(0, len(shape)))
        atoms.append(max(1, draw(st.sampled_from([1, 2, 3])) * math.prod(shape[kept:])))
    return planned(shapes, atoms, draw(st.integers(1, 9)), draw(st.sampled_from([2, 4, 8])))


@settings(deadline=None, max_examples=150)
@given(plans())
def test_parameters_do_not_overlap_and_the_shares_cover_them(plan: RaggedPlan) -> None:
    shapes = [spec.shape for spec in plan.specs]
    end = 0
    for position, (start, shape) in enumerate(zip(plan.output_starts, shapes, strict=True)):
        assert start >= end
        end = start + math.prod(shape)
        spans = [plan.elements(position, index) for index in range(plan.degree)]
        assert spans[0][0] == 0
        assert spans[-1][1] == math.prod(shape)
        assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))
        row = math.prod(shape[plan.leading(position) :]) or 1
        assert sum(plan.rows(position)) * row == math.prod(shape)
    assert end <= plan.degree * plan.shard_numel


@settings(deadline=None, max_examples=150)
@given(plans())
def test_no_share_cuts_an_atom(plan: RaggedPlan) -> None:
    assert plan.shard_numel * plan.itemsize % 16 == 0
    for position, spec in enumerate(plan.specs):
        numel, atom = spec.numel, spec.atom
        for index in range(plan.degree):
            first, end = plan.elements(position, index)
            assert first in (0, numel) or first % atom == 0
            assert end in (0, numel) or end % atom == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(1, 9))
def test_single_elements_need_no_padding_beyond_alignment(numels: list[int], degree: int) -> None:
    plan = planned([(n,) for n in numels], [1] * len(numels), degree, 4)
    assert plan.padding_bytes < 16 * degree


def test_whole_experts_pad_little_where_rows_over_ranks_pad_much() -> None:
    expert = (1024, 512)
    plan = planned([(32, *expert)], [math.prod(expert)], 32, 2)
    assert plan.padding_bytes == 0
    assert plan.rows(0) == (1,) * 32
    assert plan.leading(0) == 1
    by_row = planned([(32, *expert)], [512], 512, 2)
    assert by_row.padding_bytes == 0  # cut along dim 0 of 32, 512 ranks would hold 16 times as much


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(1, 9))
def test_an_atom_longer_than_its_parameter_is_the_parameter(numels: list[int], degree: int) -> None:
    longer = planned([(n,) for n in numels], [1000] * len(numels), degree, 4)
    assert longer == planned([(n,) for n in numels], numels, degree, 4)
    assert planned([(500, 1000)], [1_000_000], 8, 4).shard_numel == 500_000


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5).flatmap(
        lambda degree: st.lists(
            st.tuples(*[st.integers(0, 20)] * degree), min_size=1, max_size=4
        ).filter(lambda sizes: any(map(any, sizes)))
    )
)
def test_parts_of_unequal_sizes_are_joined_in_the_order_of_ranks(
    sizes: list[tuple[int, ...]],
) -> None:
    plan = plan_uneven(sizes)
    memory = torch.full((plan.output_numel,), -1)
    numbers = [torch.arange(sum(each)) + 1000 * i for i, each in enumerate(sizes)]
    for rank in range(plan.degree):
        piece = memory[rank * plan.shard_numel : (rank + 1) * plan.shard_numel]
        for (start, end), number, each in zip(plan.shard_ranges(rank), numbers, sizes, strict=True):
            piece[start:end] = number.split(each)[rank]
    plan.copy_out(memory)()
    for found, number in zip(plan.unsharded(memory), numbers, strict=True):
        assert found.tolist() == number.tolist()
        assert found.storage_offset() % 16 == 0
