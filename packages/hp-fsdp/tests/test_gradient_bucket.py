"""Gradients written into packed rows one after another."""

import itertools
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_fsdp._cut import Cut
from hp_fsdp._plan import plan_gradients, plan_group
from hp_fsdp._sink import Sink, SinkPlan

Case = tuple[list[Cut], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw parameters, some cut along another dim than the first."""
    degree = draw(st.integers(1, 4))
    cuts = []
    for shape in draw(
        st.lists(
            st.lists(st.integers(0, 7), min_size=1, max_size=3).map(list), min_size=1, max_size=4
        )
    ):
        dim = draw(st.integers(0, len(shape) - 1))
        if dim:
            shape[dim] *= degree
        cuts.append(Cut(shape=tuple(shape), dim=dim, degree=degree))
    return cuts, degree


def dirty(numel: int) -> torch.Tensor:
    return torch.full((numel,), torch.nan, dtype=torch.float64)


def sink_of(cuts: list[Cut], degree: int) -> tuple[Sink, Any]:
    plan = plan_group([cut.planned_shape for cut in cuts], degree, 8)
    width = plan_gradients(plan.slots, 8).shard_numel
    ends = list(itertools.accumulate((slot.shard_numel for slot in plan.slots), initial=0))
    laid = SinkPlan.of(plan.slots, cuts, ends[:-1], degree, width)
    return Sink(laid, dirty(degree * width)), plan


def expected(cut: Cut, gradient: torch.Tensor, rows: int) -> torch.Tensor:
    """Return each rank's part, padded with zeros to equal lengths."""
    out = torch.zeros(cut.degree, rows, dtype=torch.float64)
    for index in range(cut.degree):
        part = cut.part(gradient, index).flatten()
        out[index, : len(part)] = part
    return out


@settings(deadline=None, max_examples=80)
@given(cases(), st.lists(st.integers(0, 3), max_size=6), st.randoms(use_true_random=False))
def test_rows_are_the_sums_of_what_came_and_zero_elsewhere(
    case: Case, order: list[int], random: Any
) -> None:
    cuts, degree = case
    sink, plan = sink_of(cuts, degree)
    sums = [torch.zeros(cut.shape, dtype=torch.float64) for cut in cuts]
    for index in order:
        index %= len(cuts)
        gradient = torch.randint(-9, 9, cuts[index].shape).double()
        sums[index] += gradient
        sink.add(index, gradient)
    rows = sink.finish().view(degree, -1)
    offset = 0
    for cut, slot, total in zip(cuts, plan.slots, sums, strict=True):
        width = slot.shard_numel
        assert torch.equal(rows[:, offset : offset + width], expected(cut, total, width))
        offset += width
    assert not rows[:, offset:].any()


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_products_are_added_as_their_results_would_be(
    out: int, inner: int, tokens: int, degree: int, times: int
) -> None:
    cuts = [
        Cut(shape=(3,), dim=0, degree=degree),
        Cut(shape=(out, inner), dim=0, degree=degree),
    ]
    sink, _ = sink_of(cuts, degree)
    other, _ = sink_of(cuts, degree)
    for _ in range(times):
        left = torch.randint(-9, 9, (tokens, out)).double()
        right = torch.randint(-9, 9, (tokens, inner)).double()
        assert sink.takes_products(1, torch.float64)
        sink.add_product(1, left, right)
        other.add(1, left.t() @ right)
    assert torch.equal(sink.finish(), other.finish())


def test_products_need_the_dtype_of_the_rows_and_two_dimensions() -> None:
    sink, _ = sink_of([Cut(shape=(4, 2), dim=0, degree=2), Cut(shape=(4, 2), dim=1, degree=2)], 2)
    assert not sink.takes_products(0, torch.float32)
    assert not sink.takes_products(1, torch.float64)
