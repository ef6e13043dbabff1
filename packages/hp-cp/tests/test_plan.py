"""Plans cover the mask, and their bytes and work are the formulas'."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_cp import (
    Contiguous,
    DegreeError,
    Layout,
    LayoutError,
    MaskSpec,
    Zigzag,
    plan_attention,
)

from .strategies import layouts, masks, seq_lens, worlds

CAUSAL = MaskSpec(causal=True)


@settings(deadline=None, max_examples=60)
@given(masks, layouts, worlds, st.integers(0, 60))
def test_blocks_cover_the_mask_exactly_once(
    mask: MaskSpec, layout: Layout, n: int, seq_len: int
) -> None:
    plan = plan_attention(mask, layout, n, seq_len)
    indices = layout.indices(n, seq_len)
    seen = [
        (indices[rank][row], indices[block.source][key])
        for rank in range(n)
        for block in plan.blocks(rank)
        for i, row in enumerate(block.queries)
        for j, key in enumerate(block.keys)
        if block.kind == "full" or j <= i
    ]
    visible = [(i, j) for i in range(seq_len) for j in range(seq_len) if not mask.causal or j <= i]
    assert sorted(seen) == visible


@settings(deadline=None)
@given(masks, layouts, worlds, seq_lens)
def test_no_block_has_an_empty_row_and_the_first_covers_all_rows(
    mask: MaskSpec, layout: Layout, n: int, seq_len: int
) -> None:
    plan = plan_attention(mask, layout, n, seq_len)
    for rank in range(n):
        blocks = plan.blocks(rank)
        assert bool(blocks) == bool(plan.lengths[rank])
        for block in blocks:
            assert len(block.queries) > 0
            assert len(block.keys) > 0
            assert block.kind == "full" or block.queries == block.keys
        if blocks:
            assert blocks[0].source == rank
            assert blocks[0].queries == range(plan.lengths[rank])


@settings(deadline=None)
@given(masks, layouts, worlds, seq_lens)
def test_pairs_count_the_mask(mask: MaskSpec, layout: Layout, n: int, seq_len: int) -> None:
    plan = plan_attention(mask, layout, n, seq_len)
    pairs = sum(block.pairs for rank in range(n) for block in plan.blocks(rank))
    assert pairs == (seq_len * (seq_len + 1) // 2 if mask.causal else seq_len**2)


@settings(deadline=None)
@given(masks, worlds, st.integers(1, 30))
def test_zigzag_work_is_equal_where_twice_the_ranks_divide_the_sequence(
    mask: MaskSpec, n: int, length: int
) -> None:
    assert plan_attention(mask, Zigzag(), n, 2 * n * length).imbalance() == 1.0


def test_contiguous_causal_work_is_unequal() -> None:
    # of 16 + 6 pairs for 4 positions each, rank 1 has 4 * 4 + 10 = 26, rank 0 has 10
    assert plan_attention(CAUSAL, Contiguous(), 2, 8).imbalance() == 26 / 18


@settings(deadline=None)
@given(masks, layouts, worlds, st.integers(1, 9), st.integers(1, 3), st.sampled_from([2, 4, 8]))
def test_gather_bytes_follow_the_formula_where_lengths_are_equal(
    mask: MaskSpec, layout: Layout, n: int, local: int, kv_heads: int, itemsize: int
) -> None:
    plan = plan_attention(
        mask, layout, n, n * local, batch=2, q_heads=2 * kv_heads, kv_heads=kv_heads, head_size=8,
        itemsize=itemsize,
    )  # fmt: skip
    unit = 2 * 2 * local * kv_heads * 8 * itemsize
    assert [plan.bytes_received(rank) for rank in range(n)] == [2 * (n - 1) * unit] * n


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


def test_a_ulysses_rank_attends_the_whole_sequence() -> None:
    plan = plan_attention(CAUSAL, Zigzag(), 4, 16, ulysses_degree=4, q_heads=4, kv_heads=4)
    assert [[b.pairs for b in plan.blocks(rank)] for rank in range(4)] == [[16 * 17 // 2]] * 4
    assert plan.imbalance() == 1.0


def test_explain_names_every_rank_with_its_work_and_bytes() -> None:
    lines = plan_attention(CAUSAL, Zigzag(), 2, 8, itemsize=4).explain().splitlines()
    assert "imbalance 1.000" in lines[0]
    assert [line.partition(":")[0] for line in lines[1:]] == ["rank 0", "rank 1"]
    assert "18 pairs, 64 bytes received" in lines[1]
    assert "causal 4x4 from 1, full 4x2 from 0" in lines[2]


def test_no_layout_means_contiguous() -> None:
    assert plan_attention(CAUSAL, None, 2, 8).layout == Contiguous()


@pytest.mark.parametrize("degree", [2, 3, 0, 8])
def test_a_degree_between_or_beyond_names_the_legal_ones(degree: int) -> None:
    with pytest.raises(DegreeError, match=rf"ulysses_degree={degree} .* 1 \(.*\) or 4 "):
        plan_attention(CAUSAL, None, 4, 8, ulysses_degree=degree, q_heads=8, kv_heads=8)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "said"),
    [
        (2, 2, "2 query heads and 2 kv heads cannot give each of 4 Ulysses ranks a head"),
        (6, 6, "6 query heads and 6 kv heads do not split evenly over 4 Ulysses ranks"),
        (12, 3, "12 query heads and 3 kv heads do not split evenly over 4 Ulysses ranks"),
        (4, 3, "4 query heads do not form equal groups over 3 kv heads"),
    ],
)
def test_heads_that_do_not_split_are_named(q_heads: int, kv_heads: int, said: str) -> None:
    with pytest.raises(DegreeError, match=said):
        plan_attention(CAUSAL, None, 4, 8, ulysses_degree=4, q_heads=q_heads, kv_heads=kv_heads)


@pytest.mark.parametrize("degree", [0, 2])
def test_on_one_rank_one_degree_is_named(degree: int) -> None:
    with pytest.raises(DegreeError) as caught:
        plan_attention(CAUSAL, None, 1, 8, ulysses_degree=degree)
    said = f"ulysses_degree={degree} is not possible on one context parallel rank; use 1"
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("mask", "said"),
    [(True, "True"), (None, "None"), ("causal", "'causal'"), ([], "an object of type list")],
)
def test_a_mask_that_is_no_spec_is_refused(mask: Any, said: str) -> None:
    with pytest.raises(LayoutError, match=rf"got {said}; use MaskSpec\(causal=True\) or"):
        plan_attention(mask, None, 2, 8)


@pytest.mark.parametrize(
    ("layout", "said"), [("zigzag", "'zigzag'"), (Zigzag, "the class Zigzag"), (2, "2")]
)
def test_a_layout_that_is_none_is_refused(layout: Any, said: str) -> None:
    with pytest.raises(LayoutError, match=rf"got {said}; use Contiguous\(\), Zigzag\(\) or"):
        plan_attention(CAUSAL, layout, 2, 8)


def test_an_object_with_both_methods_is_a_layout() -> None:
    class Own:
        def chunks(self, n: int, seq_len: int) -> tuple[tuple[range, ...], ...]:
            return Contiguous().chunks(n, seq_len)

        def indices(self, n: int, seq_len: int) -> tuple[tuple[int, ...], ...]:
            return Contiguous().indices(n, seq_len)

    assert plan_attention(CAUSAL, Own(), 2, 8).lengths == (4, 4)


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(LayoutError, match=r"no schedule 'rong'; use one of \['gather'\]"):
        plan_attention(CAUSAL, None, 4, 8, schedule="rong")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "chunks",
    [
        ((range(0, 4),), (range(3, 8),)),
        ((range(0, 4),), (range(5, 8),)),
        ((range(0, 4),), (range(4, 7),)),
        ((range(4, 8), range(0, 2)), (range(2, 4),)),
        ((range(0, 8),),),
        ((range(0, 8, 2),), (range(1, 8, 2),)),
        ((range(0, 8), range(8, 8)), ()),
    ],
    ids=["overlap", "hole", "short", "descending", "ranks", "step", "empty"],
)
def test_a_layout_that_is_no_partition_is_refused(chunks: tuple[tuple[range, ...], ...]) -> None:
    class Wrong(Layout):
        def chunks(self, n: int, seq_len: int) -> tuple[tuple[range, ...], ...]:
            return chunks

    with pytest.raises(LayoutError, match=r"partition range\(8\)"):
        plan_attention(CAUSAL, Wrong(), 2, 8)
