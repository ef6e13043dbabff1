"""Offsets of packed gradients, and the rows that one rank receives."""

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_fsdp._gradients import GradientBucket
from hp_fsdp._tags import TAG_FLAGS, tag_flags
from hp_fsdp._torch import pack_rank_major
from hp_fsdp.layout._offsets import ALIGNMENT, GradientRows, ShardSpec, rows_by_rank
from hp_fsdp.layout._ragged import plan_ragged

TAG = torch.tensor(tag_flags(5), dtype=torch.float64)

SHAPES = st.lists(
    st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5
)


def numbered(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Return gradients in which no value is there twice."""
    total = sum(map(math.prod, shapes))
    flat = torch.arange(1.0, total + 1, dtype=torch.float64)
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def written(rows: GradientRows, gradients: list[Tensor]) -> Tensor:
    """Return the packed gradients, written one by one over NaN values."""
    flat = torch.full((rows.numel,), torch.nan, dtype=torch.float64)
    bucket = GradientBucket(rows, flat)
    for i, gradient in enumerate(gradients):
        bucket.add(i, gradient)
    return bucket.finish(TAG)


def packed(rows: GradientRows, gradients: list[Tensor]) -> Tensor:
    """Return the packed gradients as one call packs them, with the flags of all."""
    pieces = [
        columns.spec.by_rank(gradient).contiguous()
        for columns, gradient in zip(rows.columns, gradients, strict=True)
    ]
    for i, start, end in reversed(rows.gaps):
        gap = torch.zeros(rows.degree, end - start, dtype=torch.float64)
        if not rows.separate_flags and start <= rows.flags < end:
            first = rows.flags - start
            gap[:, first : first + len(gradients)] = 1
            gap[:, first + len(gradients) : first + len(gradients) + TAG_FLAGS] = TAG
        pieces.insert(i, gap)
    flat = torch.full((rows.numel,), torch.nan, dtype=torch.float64)
    pieces = [piece for piece in pieces if piece.numel()]
    if pieces:
        packed = flat.view(rows.degree, rows.width)
        pack_rank_major(pieces, dim=0, num_chunks=rows.degree, out=packed)
    return flat


@settings(deadline=None, max_examples=80)
@given(SHAPES, st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_rank_receives_its_rows_of_packed_gradients(
    shapes: list[tuple[int, ...]], degree: int, random: Any
) -> None:
    specs = []
    for shape in shapes:
        dim = random.randrange(len(shape))
        if dim:
            shape = (*shape[:dim], shape[dim] * degree, *shape[dim + 1 :])
        specs.append(ShardSpec(shape=shape, dim=dim, degree=degree))
    gradients = numbered([spec.shape for spec in specs])
    found = []
    for index in range(degree):
        rows = rows_by_rank(specs, index, 8)
        flat = written(rows, gradients)
        found.append(flat)
        assert torch.equal(flat, packed(rows, gradients))
        own = flat.view(degree, -1)[index]
        for spec, gradient, part in zip(specs, gradients, rows.views(own), strict=True):
            assert torch.equal(part, spec.part(gradient, index))
        assert own[rows.flags : rows.flags + len(specs)].eq(1).all()
        assert len(own) == rows.reduced_numel
    assert all(torch.equal(each, found[0]) for each in found)


@settings(deadline=None, max_examples=80)
@given(SHAPES, st.integers(2, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_rank_gets_its_run_of_a_buffer_in_which_some_are_frozen(
    shapes: list[tuple[int, ...]], degree: int, atom: int, random: Any
) -> None:
    specs = [
        ShardSpec(
            shape=shape, dim=0, degree=degree, atom=atom if math.prod(shape) % atom == 0 else 1
        )
        for shape in shapes
    ]
    plan = plan_ragged(specs, degree, 8)
    chosen = [i for i in range(len(shapes)) if random.random() < 0.7]
    gradients = [gradient for i, gradient in enumerate(numbered(shapes)) if i in chosen]
    for index in range(degree):
        rows = plan.gradient_rows(chosen, index, 8)
        flat = written(rows, gradients)
        assert torch.equal(flat, packed(rows, gradients)) or not chosen
        share = flat.view(degree, -1)[index]
        assert len(share) == rows.flags == plan.shard_numel
        parts = rows.views(share)
        for i, gradient, part in zip(chosen, gradients, parts, strict=True):
            first, end = plan.elements(i, index)
            assert torch.equal(part.flatten(), gradient.flatten()[first:end])
            assert part.shape[1:] == gradient.shape[plan.leading(i) :]
        assert share.sum() == sum(part.sum() for part in parts)  # the rest is zero


@settings(deadline=None, max_examples=100)
@given(SHAPES, st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_rows_are_dense_and_end_aligned(
    shapes: list[tuple[int, ...]], degree: int, itemsize: int
) -> None:
    specs = [ShardSpec(shape=shape, dim=0, degree=degree) for shape in shapes]
    rows = rows_by_rank(specs, 0, itemsize)
    assert rows.flags == sum(spec.shard_numel for spec in specs)
    padding = rows.width - rows.flags - len(specs) - TAG_FLAGS
    assert 0 <= padding * itemsize < ALIGNMENT
    assert rows.width * itemsize % ALIGNMENT == 0
    assert sum(end - start for _, start, end in rows.gaps) == rows.width - rows.flags
