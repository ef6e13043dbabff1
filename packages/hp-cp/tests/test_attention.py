"""Attention over all ranks equals attention in one process, forward and backward."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import (
    Contiguous,
    DoubleRing,
    Layout,
    MaskSpec,
    Zigzag,
    context_parallel_attention,
    plan_attention,
)
from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import (
    LAYOUTS,
    MASKS,
    all_layouts,
    cp_mesh,
    dense_attention,
    inputs,
    leaves,
    masked,
    single,
    with_gradients,
)

CAUSAL = MaskSpec(causal=True)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Draw ranks, a Ulysses degree, and query and kv heads that it allows."""
    n = draw(st.sampled_from([1, 2, 3, 4, 6]))
    degree = draw(st.sampled_from([u for u in range(1, n + 1) if n % u == 0]))
    kv_heads = draw(st.integers(1, 5))
    fewest = -(-degree // kv_heads)
    return n, degree, kv_heads * draw(st.integers(fewest, fewest + 2)), kv_heads


@settings(deadline=None, max_examples=120)
@given(
    world=worlds(),
    two_axes=st.booleans(),
    case=masked(24, 1),
    layout=all_layouts,
    schedule=st.sampled_from(["gather", "direct", "ring", "double_ring", DoubleRing(1)]),
    keep_kv=st.sampled_from([None, True, False]),
)
@example((4, 2, 3, 3), False, (MaskSpec(causal=False), 8), Contiguous(), "gather", None)
def test_simulated_ranks_equal_dense_attention_with_the_planned_bytes(
    world: tuple[int, int, int, int],
    two_axes: bool,
    case: tuple[MaskSpec, int],
    layout: Layout,
    schedule: Any,
    keep_kv: bool | None,
) -> None:
    (n, degree, q_heads, kv_heads), (mask, seq_len) = world, case
    shape = (n // degree, degree) if two_axes else (n,)
    q, k, v, grad = inputs(q_heads, kv_heads, seq_len)
    indices = layout.indices(n, seq_len, mask)

    def rank(rank: int, door: SimulatedCollectives) -> tuple[list[Tensor], int]:
        record = RecordingCollectives(door)
        mine = list(indices[rank])
        local = leaves(*(x[:, :, mine] for x in (q, k, v)))
        out = context_parallel_attention(
            *local,
            door.mesh(shape, ("cp", "ulysses")[: len(shape)]),
            mask=mask,
            layout=layout,
            ulysses_degree=degree,
            schedule=schedule,
            keep_kv=keep_kv,
            seq_len=seq_len,
            collectives=record,
        )
        results = with_gradients(out, local, grad[:, :, mine])
        return results, sum(traffic.bytes for traffic in record.by_axis.values())

    whole = leaves(q, k, v)
    expected = with_gradients(dense_attention(*whole, mask), whole, grad)
    plan = plan_attention(
        mask,
        layout,
        n,
        seq_len,
        schedule=schedule,
        ulysses_degree=degree,
        keep_kv=keep_kv,
        batch=2,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_size=8,
        itemsize=8,
    )
    for i, (results, received) in enumerate(SimulatedWorld(n).run(rank)):
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(
                result, reference[:, :, list(indices[i])], rtol=0, atol=1e-13
            )
        assert received == plan.bytes_received(i)


def attend(
    rank: int,
    n: int,
    tensors: tuple[Tensor, ...],
    mask: MaskSpec,
    layout: Layout,
    degree: int,
    schedule: Any = "direct",
    repeats: int = 1,
) -> list[list[Tensor]]:
    """Run forward and backward on this rank's rows, and return both of each repeat."""
    seq_len = tensors[0].shape[2]
    mine = list(layout.indices(n, seq_len, mask)[rank])
    q, k, v, grad = (x[:, :, mine] for x in tensors)
    answers = []
    for _ in range(repeats):
        local = leaves(q, k, v)
        out = context_parallel_attention(
            *local,
            cp_mesh(n),
            mask=mask,
            layout=layout,
            ulysses_degree=degree,
            schedule=schedule,
            seq_len=seq_len,
        )
        answers.append(with_gradients(out, local, grad))
    return answers


def on_ranks(
    ranks: Any,
    n: int,
    tensors: tuple[Tensor, ...],
    mask: MaskSpec,
    layout: Layout,
    degree: int,
    schedule: Any = "direct",
) -> list[Tensor]:
    """Return output and gradients, put together in global order."""
    answers = ranks(n).run(attend, n, tensors, mask, layout, degree, schedule)
    indices = layout.indices(n, tensors[0].shape[2], mask)
    order = torch.tensor([i for held in indices for i in held]).argsort()
    parts = zip(*(results for (results,) in answers), strict=True)
    return [torch.cat(part, 2)[:, :, order] for part in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", ["gather", "direct", "ring", "double_ring"])
def test_longer_sequences_are_about_as_exact_as_one_process(
    ranks: Any, schedule: str, dtype: torch.dtype
) -> None:
    """By root mean square: which single element is worst depends on the processor's kernels."""
    allowed = 1.1 if dtype == torch.float32 else 1.3
    for mask in MASKS:
        tensors = inputs(8, 4, 256, size=32, dtype=dtype)
        exact = single(tuple(x.double() for x in tensors), mask, dense_attention)
        together = on_ranks(ranks, 4, tensors, mask, Zigzag(), 1, schedule)
        alone = single(tensors, mask)
        for ours, theirs, true in zip(together, alone, exact, strict=True):
            assert root_mean_square(ours - true) <= allowed * root_mean_square(theirs - true)


def root_mean_square(difference: Tensor) -> float:
    return difference.double().square().mean().sqrt().item()


@pytest.mark.nccl
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [2, 4])
def test_ulysses_is_bitwise_one_process(ranks: Any, n: int, dtype: torch.dtype) -> None:
    for mask, layout, seq_len in itertools.product(MASKS, LAYOUTS, (64, 37)):
        tensors = inputs(8, 4, seq_len, dtype=dtype)
        results = on_ranks(ranks, n, tensors, mask, layout, n)
        for result, reference in zip(results, single(tensors, mask), strict=True):
            assert torch.equal(result, reference), (mask, layout, seq_len)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 2), (6, 6), (7, 7), (12, 3), (10, 5)])
def test_ulysses_with_few_kv_heads_or_uneven_shares_is_one_process(
    ranks: Any, q_heads: int, kv_heads: int
) -> None:
    tensors = inputs(q_heads, kv_heads, 64)
    out, dq, dk, dv = on_ranks(ranks, 4, tensors, CAUSAL, Zigzag(), 4)
    expected = single(tensors, CAUSAL)
    assert torch.equal(out, expected[0])
    assert torch.equal(dq, expected[1])
    # partial sums over the query heads of a group add in another order
    torch.testing.assert_close(dk, expected[2], rtol=0, atol=1e-13)
    torch.testing.assert_close(dv, expected[3], rtol=0, atol=1e-13)
