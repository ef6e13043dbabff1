"""Gradients written into packed rows one after another."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hp_fsdp._gradients import GradientBucket, why_not_fused
from hp_fsdp._offsets import ShardSpec, rows_by_rank
from hp_fsdp._tags import tag_flags

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
def test_rows_are_the_sums_of_what_came_and_zero_elsewhere(
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
    specs = [
        ShardSpec(shape=(3,), dim=0, degree=degree),
        ShardSpec(shape=(out, inner), dim=0, degree=degree),
    ]
    bucket = bucket_of(specs)
    other = bucket_of(specs)
    for _ in range(times):
        left = torch.randint(-9, 9, (tokens, out)).double()
        right = torch.randint(-9, 9, (tokens, inner)).double()
        assert bucket.takes_products(1, torch.float64)
        bucket.add_product(1, left, right)
        other.add(1, left.t() @ right)
    assert torch.equal(bucket.finish(TAG), other.finish(TAG))


def test_products_need_the_dtype_of_the_rows_and_two_dimensions() -> None:
    bucket = bucket_of([ShardSpec(shape=(4, 2), dim=dim, degree=2) for dim in (0, 1)])
    assert not bucket.takes_products(0, torch.float32)
    assert not bucket.takes_products(1, torch.float64)


F32, BF16 = torch.float32, torch.bfloat16
LINEAR, TABLE = nn.Linear(8, 1024), nn.Embedding(1024, 8)
# Which module's weight, its rows, over how many ranks in one row each, dtypes, device; the reason.
FUSED: dict[str, tuple[nn.Module, int, int, torch.dtype, str, str]] = {
    "128 rows": (LINEAR, 1024, 8, F32, "cuda", ""),
    "127 rows": (LINEAR, 1016, 8, F32, "cuda", "127 rows per rank, fewer than 128"),
    "few rows on a CPU": (LINEAR, 16, 8, F32, "cpu", ""),
    "few rows of the ragged layout": (LINEAR, 16, 1, F32, "cuda", ""),
    "few rows of a table": (TABLE, 16, 8, F32, "cuda", ""),
    "two dtypes": (LINEAR, 1024, 8, BF16, "cuda", "computed in bfloat16, reduced in float32"),
    "two dtypes on a CPU": (
        LINEAR,
        1024,
        8,
        BF16,
        "cpu",
        "computed in bfloat16, reduced in float32",
    ),
    "two dtypes of a table": (TABLE, 1024, 8, BF16, "cuda", ""),
    "another module": (
        nn.Bilinear(8, 8, 1024),
        1024,
        8,
        F32,
        "cuda",
        "not the weight of a plain nn.Linear or nn.Embedding",
    ),
}


@pytest.mark.parametrize("case", list(FUSED))
def test_a_product_is_fused_where_its_shape_and_dtypes_allow_it(case: str) -> None:
    module, rows, degree, computed, device, reason = FUSED[case]
    spec = ShardSpec(shape=(rows, 8), dim=0, degree=degree)
    assert why_not_fused(module, "weight", spec, computed, F32, device) == reason


def test_a_bias_and_what_is_cut_along_another_dim_are_not_fused() -> None:
    across = ShardSpec(shape=(1024, 8), dim=1, degree=8)
    assert why_not_fused(LINEAR, "weight", across, F32, F32, "cpu") == "cut along dim 1"
    bias = ShardSpec(shape=(1024,), dim=0, degree=8)
    assert why_not_fused(LINEAR, "bias", bias, F32, F32, "cpu").startswith("not the weight")
