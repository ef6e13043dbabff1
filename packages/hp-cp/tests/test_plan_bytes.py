"""Bytes and balance of plans are the formulas'."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hp_cp import Contiguous, DoubleRing, Layout, MaskSpec, Zigzag, plan_attention

from .strategies import layouts, masks, worlds

CAUSAL = MaskSpec(causal=True)

# Bytes. U: keys and values of one rank; Q: its queries.


@settings(deadline=None)
@given(masks, layouts, worlds, st.integers(1, 9), st.integers(1, 3), st.sampled_from([2, 4, 8]))
def test_bytes_follow_the_formulas_where_lengths_are_equal(
    mask: MaskSpec, layout: Layout, n: int, local: int, kv_heads: int, itemsize: int
) -> None:
    def received(schedule: Any, **options: Any) -> set[int]:
        plan = plan_attention(
            mask, layout, n, n * local, schedule=schedule, batch=2, q_heads=2 * kv_heads,
            kv_heads=kv_heads, head_size=8, itemsize=itemsize, **options,
        )  # fmt: skip
        return {plan.bytes_received(rank) for rank in range(n)}

    unit = 2 * 2 * local * kv_heads * 8 * itemsize
    sums = unit * (8 if itemsize == 8 else 4) // itemsize
    others = n - 1
    assert received("gather") == {2 * others * unit}
    assert received("gather", keep_kv=False) == {3 * others * unit}
    for ring in ("ring", "double_ring", DoubleRing(1), DoubleRing(n)):
        assert received(ring) == {2 * others * unit + others * sums}
        assert received(ring, keep_kv=True) == {others * unit + others * sums}
    if not mask.causal:
        assert received("direct") == {3 * others * unit}


@settings(deadline=None)
@given(worlds, st.integers(1, 9), st.booleans())
def test_direct_receives_three_quarters_of_causal_zigzag(n: int, half: int, keep: bool) -> None:
    plan = plan_attention(CAUSAL, Zigzag(), n, 2 * n * half, kv_heads=3, q_heads=3, keep_kv=keep)
    unit = 2 * 2 * half * 3
    total = sum(plan.bytes_received(rank) for rank in range(n))
    assert total * 4 == n * (n - 1) * unit * 3 * (2 if keep else 3)


@settings(deadline=None)
@given(worlds, st.integers(1, 9), st.integers(1, 3))
def test_swapping_halves_adds_two_q(n: int, half: int, group: int) -> None:
    def received(load_balance: bool) -> list[int]:
        plan = plan_attention(
            CAUSAL, None, n, 2 * n * half, schedule="gather", load_balance=load_balance, batch=3,
            q_heads=2 * group, kv_heads=2, head_size=4, itemsize=2,
        )  # fmt: skip
        return [plan.bytes_received(rank) for rank in range(n)]

    twice_q = 2 * 3 * 2 * half * 2 * group * 4 * 2
    extra = [b - a for a, b in zip(received(False), received(True), strict=True)]
    assert extra == [0 if rank == n - 1 - rank else twice_q for rank in range(n)]


@settings(deadline=None)
@given(masks, layouts, worlds, st.integers(1, 9), st.integers(1, 3))
def test_ulysses_bytes_follow_the_formula_where_lengths_are_equal(
    mask: MaskSpec, layout: Layout, n: int, local: int, share: int
) -> None:
    plan = plan_attention(
        mask, layout, n, n * local, ulysses_degree=n, batch=2, q_heads=2 * n * share,
        kv_heads=n * share, head_size=8, itemsize=4,
    )  # fmt: skip
    kv, q = 2 * 2 * local * n * share * 8 * 4, 2 * local * 2 * n * share * 8 * 4
    expected = 2 * (n - 1) * (2 * q + kv) // n
    received = [plan.bytes_received(rank) for rank in range(n)]
    assert received == ([expected] * n if n > 1 else [0])


def test_one_windowed_document_fetches_the_halo_only() -> None:
    plan = plan_attention(MaskSpec(causal=True, window=10), Contiguous(), 4, 400)
    assert plan.fetches(0) == {}
    assert [plan.fetches(rank) for rank in (1, 2, 3)] == [
        {rank - 1: (range(91, 100),)} for rank in (1, 2, 3)
    ]
    # keys and values of 9 rows, twice, and the gradients of those that the next rank fetched
    assert [plan.bytes_received(rank) for rank in range(4)] == [18, 54, 54, 36]


def test_documents_that_end_at_the_cuts_fetch_nothing() -> None:
    mask = MaskSpec(causal=True, cu_seqlens=(0, 30, 100, 150, 200, 300, 400))
    plan = plan_attention(mask, Contiguous(), 4, 400)
    assert [plan.bytes_received(rank) for rank in range(4)] == [0] * 4


def test_a_ulysses_rank_attends_the_whole_sequence() -> None:
    plan = plan_attention(CAUSAL, Zigzag(), 4, 16, ulysses_degree=4, q_heads=4, kv_heads=4)
    assert [[b.pairs for b in plan.blocks(rank)] for rank in range(4)] == [[16 * 17 // 2]] * 4
    assert plan.imbalance() == 1.0


def test_unequal_shares_of_heads_count_as_imbalance() -> None:
    plan = plan_attention(MaskSpec(causal=False), None, 2, 8, ulysses_degree=2, q_heads=3)
    assert plan.imbalance() == 2 / 1.5
