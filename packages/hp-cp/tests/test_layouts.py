"""Layouts partition the sequence."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hp_cp import (
    Auto,
    Contiguous,
    Greedy,
    InputError,
    Layout,
    MaskSpec,
    PerDocument,
    Zigzag,
    plan_attention,
)

from .strategies import ALL_LAYOUTS, all_layouts, masked, seq_lens, visible, worlds

CAUSAL = MaskSpec(causal=True)


@settings(deadline=None)
@given(all_layouts, worlds, masked(200))
def test_ranks_hold_every_position_exactly_once_in_ascending_order(
    layout: Layout, n: int, case: tuple[MaskSpec, int]
) -> None:
    mask, seq_len = case
    indices = layout.indices(n, seq_len, mask)
    assert len(indices) == n
    assert sorted(i for rank in indices for i in rank) == list(range(seq_len))
    assert all(list(rank) == sorted(rank) for rank in indices)


@settings(deadline=None)
@given(worlds, st.integers(1, 200))
def test_contiguous_cuts_as_torch_chunk(n: int, seq_len: int) -> None:
    chunks = [tuple(c.tolist()) for c in torch.arange(seq_len).chunk(n)]
    chunks += [()] * (n - len(chunks))
    assert list(Contiguous().indices(n, seq_len)) == chunks


@settings(deadline=None)
@given(worlds, st.integers(1, 20))
def test_zigzag_pairs_head_with_tail_chunks(n: int, length: int) -> None:
    chunks = torch.arange(2 * n * length).chunk(2 * n)
    for rank, held in enumerate(Zigzag().indices(n, 2 * n * length)):
        assert list(held) == torch.cat([chunks[rank], chunks[2 * n - 1 - rank]]).tolist()


@settings(deadline=None)
@given(worlds, seq_lens)
def test_zigzag_lengths_differ_by_one_at_most(n: int, seq_len: int) -> None:
    lengths = [len(rank) for rank in Zigzag().indices(n, seq_len)]
    assert max(lengths) - min(lengths) <= 1


@settings(deadline=None)
@given(worlds, st.integers(1, 20))
def test_one_document_of_equal_chunks_lies_in_zigzag(n: int, length: int) -> None:
    seq_len = 2 * n * length
    assert PerDocument().indices(n, seq_len, CAUSAL) == Zigzag().indices(n, seq_len)


@settings(deadline=None)
@given(worlds, st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_documents_of_equal_chunks_are_perfectly_balanced_one_by_one(
    n: int, lengths: list[int]
) -> None:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + 2 * n * length)
    mask = MaskSpec(causal=True, cu_seqlens=tuple(ends))
    assert plan_attention(mask, PerDocument(), n, ends[-1]).imbalance() == 1.0


def test_one_token_documents_go_around_the_ranks() -> None:
    mask = MaskSpec(causal=True, cu_seqlens=tuple(range(9)))
    assert PerDocument().indices(4, 8, mask) == ((0, 4), (1, 5), (2, 6), (3, 7))


@settings(deadline=None)
@given(masked(120), worlds, st.integers(1, 5))
def test_greedy_gives_the_chunk_of_most_work_to_the_rank_of_least(
    case: tuple[MaskSpec, int], n: int, per_rank: int
) -> None:
    mask, seq_len = case
    length = max(1, -(-seq_len // (n * per_rank)))
    chunks = [range(i, min(i + length, seq_len)) for i in range(0, seq_len, length)]
    seen = visible(mask, seq_len).sum(1)
    work = [int(seen[chunk.start : chunk.stop].sum()) for chunk in chunks]
    total, held = [0] * n, [list[range]() for _ in range(n)]
    for i in sorted(range(len(chunks)), key=lambda i: (-work[i], i)):
        with_room = [rank for rank in range(n) if len(held[rank]) < per_rank]
        rank = min(with_room, key=lambda rank: (total[rank], rank))
        total[rank] += work[i]
        held[rank].append(chunks[i])
    expected = tuple(tuple(sorted(i for chunk in rank for i in chunk)) for rank in held)
    assert Greedy(per_rank).indices(n, seq_len, mask) == expected


# one each of Greedy(4), Greedy(8) and PerDocument that is the best by more than 5 %
@example((MaskSpec(causal=True, cu_seqlens=(0, 31, 70)), 70), 3, 10.0)
@example((MaskSpec(causal=True, cu_seqlens=(0, 60, 120, 131)), 131), 4, 10.0)
@example((MaskSpec(causal=True, cu_seqlens=(0, 59, 95)), 95), 3, 10.0)
@settings(deadline=None, max_examples=40)
@given(masked(150, 8), st.integers(2, 6), st.sampled_from([0.0, 10.0, 256.0]))
def test_auto_costs_at_most_five_per_cent_more_than_the_best_layout(
    case: tuple[MaskSpec, int], n: int, pairs_per_row: float
) -> None:
    mask, seq_len = case

    def cost(layout: Layout) -> float:
        plan = plan_attention(mask, layout, n, seq_len, schedule="direct")
        fetched = [
            sum(len(rows) for part in plan.fetches(rank).values() for rows in part)
            for rank in range(n)
        ]
        work = [sum(block.pairs for block in plan.blocks(rank)) for rank in range(n)]
        return max(w + pairs_per_row * f for w, f in zip(work, fetched, strict=True))

    best = min(map(cost, [Contiguous(), Zigzag(), PerDocument(), Greedy(4), Greedy(8)]))
    assert cost(Auto(pairs_per_row)) <= 1.05 * best


@pytest.mark.parametrize(
    ("mask", "layout"),
    [
        (CAUSAL, Zigzag()),
        (MaskSpec(causal=False), Contiguous()),
        (MaskSpec(causal=True, window=64), Contiguous()),
        (MaskSpec(causal=True, cu_seqlens=(0, 2048, 4096, 6144, 8192)), Contiguous()),
    ],
)
def test_auto_takes_the_plain_layout_where_it_is_the_best(mask: MaskSpec, layout: Layout) -> None:
    assert Auto().choice(4, 8192, mask) == layout


@pytest.mark.parametrize("pairs_per_row", [float("nan"), float("inf"), -1.0, None, True])
def test_auto_wants_a_price_of_a_row(pairs_per_row: Any) -> None:
    with pytest.raises(InputError, match=r"pairs_per_row=.* is no price of a row; use a finite"):
        Auto(pairs_per_row)


@pytest.mark.parametrize("layout", ALL_LAYOUTS, ids=repr)
@pytest.mark.parametrize(("n", "seq_len"), [(0, 8), (2, -1)])
def test_impossible_sizes_are_refused(layout: Layout, n: int, seq_len: int) -> None:
    with pytest.raises(InputError, match=f"n={n}, seq_len={seq_len}"):
        layout.indices(n, seq_len, CAUSAL)
