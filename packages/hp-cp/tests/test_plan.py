"""Plans cover the mask, and their bytes and work are the formulas'."""

import subprocess
import sys
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hp_cp import (
    AttentionPlan,
    Auto,
    Block,
    Contiguous,
    DoubleRing,
    Greedy,
    Layout,
    MaskSpec,
    Zigzag,
    plan_attention,
)
from hp_cp._plan import part_of

from .strategies import all_layouts, masked, masks, seq_lens, visible, worlds

CAUSAL = MaskSpec(causal=True)
SCHEDULES = st.sampled_from(["gather", "direct", "ring", "double_ring"])


def rows_of(plan: AttentionPlan, rank: int) -> list[int]:
    """Return the positions that a rank of the schedule attends, in local order."""
    return [i for chunk in plan.queries[rank] for i in chunk]


def pairs_seen(plan: AttentionPlan) -> list[tuple[int, int]]:
    """Return every query-key pair of every block, one share of heads."""
    held = [[i for chunk in group for i in chunk] for group in plan.groups]
    return [
        (rows_of(plan, rank // plan.ulysses_degree)[row], held[block.source][key])
        for rank in range(0, plan.n, plan.ulysses_degree)
        for block in plan.blocks(rank)
        for i, row in enumerate(block.queries)
        for j, key in enumerate(block.keys)
        if shows(block, i, j)
    ]


def shows(block: Block, i: int, j: int) -> bool:
    side = len(block.queries) // block.tiles
    same_tile = block.kind == "full" or i // side == j // side
    order = {"full": True, "causal": j <= i, "anticausal": j >= i}[block.kind]
    return same_tile and order


@settings(deadline=None, max_examples=150)
@given(masked(40), all_layouts, st.sampled_from([(1, 1), (2, 1), (3, 1), (5, 1), (4, 2), (6, 3)]))
def test_blocks_cover_the_mask_exactly_once(
    case: tuple[MaskSpec, int], layout: Layout, world: tuple[int, int]
) -> None:
    (mask, seq_len), (n, degree) = case, world
    plan = plan_attention(mask, layout, n, seq_len, ulysses_degree=degree)
    seen = [(i, j) for i, j in visible(mask, seq_len).nonzero().tolist()]
    assert sorted(pairs_seen(plan)) == seen


@settings(deadline=None, max_examples=20)
@given(masked(60), st.integers(1, 5), st.integers(1, 6))
def test_blocks_of_swapped_halves_cover_the_mask_exactly_once(
    case: tuple[MaskSpec, int], n: int, half: int
) -> None:
    seq_len = 2 * n * half
    given = (*case[0].ends, (0, case[1]))[0]
    ends = [end * seq_len // max(1, case[1]) for end in given]
    mask = MaskSpec(
        causal=case[0].causal, window=case[0].window, cu_seqlens=(0, *ends[1:-1], seq_len)
    )
    plan = plan_attention(mask, None, n, seq_len, schedule="gather", load_balance=True)
    seen = [(i, j) for i, j in visible(mask, seq_len).nonzero().tolist()]
    assert sorted(pairs_seen(plan)) == seen
    for rank in range(n):
        first, second = 2 * rank * half, (2 * (n - 1 - rank) + 1) * half
        held = [*range(first, first + half), *range(second, second + half)]
        assert rows_of(plan, rank) == sorted(held)


@settings(deadline=None)
@given(masked(200), all_layouts, worlds, SCHEDULES)
def test_no_row_of_a_block_is_empty_and_triangles_are_square(
    case: tuple[MaskSpec, int], layout: Layout, n: int, schedule: Any
) -> None:
    plan = plan_attention(case[0], layout, n, case[1], schedule=schedule)
    for rank in range(n):
        blocks = plan.blocks(rank)
        assert bool(blocks) == bool(plan.lengths[rank])
        for block in blocks:
            assert len(block.queries) > 0
            assert len(block.keys) > 0
            if block.kind != "full":
                assert len(block.queries) == len(block.keys)
                assert len(block.queries) % block.tiles == 0


@settings(deadline=None)
@given(masked(200), all_layouts, worlds, SCHEDULES)
def test_pairs_imbalance_and_fetches_agree_with_the_blocks(
    case: tuple[MaskSpec, int], layout: Layout, n: int, schedule: Any
) -> None:
    mask, seq_len = case
    plan = plan_attention(mask, layout, n, seq_len, schedule=schedule)
    work = [sum(block.pairs for block in plan.blocks(rank)) for rank in range(n)]
    assert sum(work) == int(visible(mask, seq_len).sum())
    assert plan.imbalance() == (max(work) * n / sum(work) if sum(work) else 1.0)
    shown = visible(mask, seq_len)
    held = [[i for chunk in chunks for i in chunk] for chunks in plan.chunks]
    for rank in range(n):
        needed = {s: set(range(rows)) for s, rows in enumerate(plan.lengths) if s != rank}
        if schedule == "direct":
            seen = shown[held[rank]].any(0).tolist()
            needed = {s: {i for i in rows if seen[held[s][i]]} for s, rows in needed.items()}
        fetched = {s: {i for rows in f for i in rows} for s, f in plan.fetches(rank).items()}
        assert fetched == {s: rows for s, rows in needed.items() if rows}


@settings(deadline=None, max_examples=300)
@given(masked(100, 8), all_layouts, st.sampled_from([(3, 1), (5, 1), (4, 2), (6, 3)]))
def test_a_rank_gives_each_other_rank_the_rows_that_it_wants(
    case: tuple[MaskSpec, int], layout: Layout, world: tuple[int, int]
) -> None:
    (mask, seq_len), (n, degree) = case, world
    schedules: list[Any] = ["gather", "direct", "ring"]
    for schedule in schedules:
        plan = plan_attention(mask, layout, n, seq_len, schedule=schedule, ulysses_degree=degree)
        parts = [part_of(plan, rank) for rank in range(n // degree)]
        for rank, part in enumerate(parts):
            assert {s for s in range(len(parts)) if s != rank} == part.receive_rows.keys()
            assert part.send_rows == {
                peer: parts[peer].receive_rows[rank] for peer in part.receive_rows
            }


@settings(deadline=None)
@given(masked(60), st.integers(1, 4), st.integers(2, 4))
def test_chunks_of_ulysses_neighbours_that_touch_make_no_more_blocks_than_one(
    case: tuple[MaskSpec, int], groups: int, degree: int
) -> None:
    mask = MaskSpec(causal=case[0].causal, window=case[0].window)
    n, seq_len = groups * degree, groups * degree * 6
    plan = plan_attention(mask, Contiguous(), n, seq_len, ulysses_degree=degree)
    whole = plan_attention(mask, Contiguous(), groups, seq_len)
    for rank in range(n):
        assert plan.blocks(rank) == whole.blocks(rank // degree)


@settings(deadline=None)
@given(worlds, seq_lens)
def test_a_causal_zigzag_rank_has_one_block_per_source(n: int, seq_len: int) -> None:
    plan = plan_attention(CAUSAL, Zigzag(), n, seq_len)
    for rank in range(n):
        sources = [block.source for block in plan.blocks(rank)]
        assert len(sources) == len(set(sources)) <= n


def test_a_window_is_a_handful_of_tiled_blocks() -> None:
    plan = plan_attention(MaskSpec(causal=True, window=9), Contiguous(), 4, 4096)
    assert max(len(plan.blocks(rank)) for rank in range(4)) <= 4
    assert {block.tiles for block in plan.blocks(1)} >= {128}


@settings(deadline=None)
@given(masks, worlds, st.integers(1, 30))
def test_zigzag_work_is_equal_where_twice_the_ranks_divide_the_sequence(
    mask: MaskSpec, n: int, length: int
) -> None:
    assert plan_attention(mask, Zigzag(), n, 2 * n * length).imbalance() == 1.0


@settings(deadline=None)
@given(worlds, st.integers(1, 20))
def test_swapped_halves_have_equal_causal_work(n: int, half: int) -> None:
    plan = plan_attention(CAUSAL, None, n, 2 * n * half, schedule="gather", load_balance=True)
    work = [sum(block.pairs for block in plan.blocks(rank)) for rank in range(n)]
    # chunk 2r and chunk 2p + 1 have 2r + 2p + 1 = 2n - 1 whole chunks before them, and themselves
    assert work == [(2 * n - 1) * half**2 + half * (half + 1)] * n
    assert plan.imbalance() == 1.0


def test_contiguous_causal_work_is_unequal() -> None:
    # of 16 + 6 pairs for 4 positions each, rank 1 has 4 * 4 + 10 = 26, rank 0 has 10
    assert plan_attention(CAUSAL, Contiguous(), 2, 8).imbalance() == 26 / 18


# Heads.


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_shares_of_heads_keep_every_query_head_with_its_kv_head(
    kv_heads: int, group: int, data: st.DataObject
) -> None:
    q_heads = kv_heads * group
    degree = data.draw(st.integers(1, q_heads))
    shares = plan_attention(
        CAUSAL, None, degree, 8, ulysses_degree=degree, q_heads=q_heads, kv_heads=kv_heads
    ).heads
    assert [head for share in shares for head in share.q] == list(range(q_heads))
    sizes = [len(share.q) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    for share in shares:
        repeats = share.repeats or [len(share.q) // len(share.kv)] * len(share.kv)
        reads = [head for head, times in zip(share.kv, repeats, strict=True) for _ in range(times)]
        assert reads == [head // group for head in share.q]
        assert min(repeats) > 0


# Rings.


@settings(deadline=None)
@given(st.sampled_from([(1, 1), (2, 1), (6, 2), (6, 3), (8, 4), (9, 3), (5, 5)]))
def test_a_double_ring_meets_every_source_once_and_crosses_rings_once_per_round(
    world: tuple[int, int],
) -> None:
    n, inner = world
    ring = plan_attention(CAUSAL, None, n, n, schedule=DoubleRing(inner)).ring
    assert ring is not None
    for rank in range(n):
        met = [ring.source(rank, step) for step in range(n)]
        assert met[0] == rank
        assert sorted(met) == list(range(n))
        rounds = [{s // inner for s in met[i : i + inner]} for i in range(0, n, inner)]
        assert all(len(rings) == 1 for rings in rounds)
        for step in range(n - 1):
            after = ring.next_gradient(rank, step)
            assert ring.source(after, step + 1) == ring.source(rank, step)
            assert ring.next_gradient(after, step, -1) == rank
        assert ring.next_gradient(rank, n - 1) == ring.source(rank, n - 1)


# Words.


def test_explain_names_every_rank_with_its_work_bytes_fetches_and_blocks() -> None:
    lines = plan_attention(CAUSAL, Zigzag(), 2, 8, itemsize=4).explain().splitlines()
    assert "imbalance 1.000" in lines[0]
    assert [line.partition(":")[0] for line in lines[1:]] == ["rank 0", "rank 1"]
    # rank 0 fetches 4 rows of k and v twice, and receives the gradients of 2: 2 * 4 * (4 + 4 + 2)
    assert "18 pairs, 80 bytes received, key rows fetched: 4 of 1" in lines[1]
    assert "causal 4x4 from 1, full 4x2 from 0" in lines[2]


def test_explain_shortens_long_lists_and_names_the_layout_that_auto_takes() -> None:
    mask = MaskSpec(causal=True, cu_seqlens=tuple(range(0, 101, 5)))
    assert "Auto(pairs_per_row=256.0) -> " in plan_attention(mask, Auto(), 2, 100).explain()
    mask = MaskSpec(causal=True, cu_seqlens=(0, *(i * i for i in range(1, 20)), 400))
    assert "more" in plan_attention(mask, Greedy(8), 2, 400).explain()


def test_no_layout_means_contiguous() -> None:
    assert plan_attention(CAUSAL, None, 2, 8).layout == Contiguous()


def test_masks_layouts_and_plans_need_no_torch_and_all_names_are_listed() -> None:
    root = plan_attention.__module__.rpartition(".")[0]
    code = (
        "import sys, importlib; p = importlib.import_module(sys.argv[1]); "
        "m = p.MaskSpec(causal=True, cu_seqlens=(0, 3, 8)); "
        "p.plan_attention(m, p.Auto(), 2, 8, schedule='ring').explain(); "
        "assert set(p.__all__) <= set(dir(p)); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, root], check=True, timeout=300)


def test_equal_plans_have_equal_hashes() -> None:
    plans = [plan_attention(CAUSAL, Zigzag(), 2, 8, itemsize=i) for i in (2, 2, 4)]
    assert plans[0] == plans[1]
    assert hash(plans[0]) == hash(plans[1])
    assert plans[0] != plans[2]
