"""Gradients written into packed rows one after another."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_fsdp._gradients import GradientBucket
from hp_fsdp._tags import tag_flags
from hp_fsdp.layout._offsets import ShardSpec, rows_by_rank

TAG = torch.tensor(tag_flags(5), dtype=torch.float64)

Case = tuple[list[ShardSpec], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw parameters, some cut along another dim than the first."""
    degree = draw(st.integers(1, 4))
    specs = []
    for shape in draw(
        st.lists(
            st.lists(st.integers(0, 7), min_size=1, max_size=3).map(list), min_size=1, max_size=4
        )
    ):
        dim = draw(st.integers(0, len(shape) - 1))
        if dim:
            shape[dim] *= degree
        specs.append(ShardSpec(shape=tuple(shape), dim=dim, degree=degree))
    return specs, degree


def dirty(numel: int) -> torch.Tensor:
    return torch.full((numel,), torch.nan, dtype=torch.float64)


def bucket_of(specs: list[ShardSpec]) -> GradientBucket:
    rows = rows_by_rank(specs, 0, 8)
    return GradientBucket(rows, dirty(rows.numel))


def expected(spec: ShardSpec, gradient: torch.Tensor, rows: int) -> torch.Tensor:
    """Return each rank's part, padded with zeros to equal lengths."""
    out = torch.zeros(spec.degree, rows, dtype=torch.float64)
    for index in range(spec.degree):
        part = spec.part(gradient, index).flatten()
        out[index, : len(part)] = part
    return out


@settings(deadline=None, max_examples=80)
@given(cases(), st.lists(st.integers(0, 3), max_size=6), st.randoms(use_true_random=False))
def test_rows_are_the_sums_of_the_added_gradients(
    case: Case, order: list[int], random: Any
) -> None:
    specs, degree = case
    bucket = bucket_of(specs)
    sums = [torch.zeros(spec.shape, dtype=torch.float64) for spec in specs]
    for index in order:
        index %= len(specs)
        gradient = torch.randint(-9, 9, specs[index].shape).double()
        sums[index] += gradient
        bucket.add(index, gradient)
    rows = bucket.finish(TAG).view(degree, -1)
    offset = 0
    for spec, total in zip(specs, sums, strict=True):
        width = spec.shard_numel
        assert torch.equal(rows[:, offset : offset + width], expected(spec, total, width))
        offset += width
    flags = [float(i in {index % len(specs) for index in order}) for i in range(len(specs))]
    assert rows[:, offset : offset + len(specs)].tolist() == [flags] * degree
    offset += len(specs)
    assert torch.equal(rows[:, offset : offset + len(TAG)], TAG.expand(degree, -1))
    assert not rows[:, offset + len(TAG) :].any()
