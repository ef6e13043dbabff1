"""Keys that are gathered are attended in as few launches as their order allows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hp_cp import Contiguous, Layout, MaskSpec, Zigzag, context_parallel_attention, plan_attention
from hp_cp._blocks import gathered_part, pieces_of, places_of
from hp_cp._plan import part_of, rank_plan_of
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .operations import Called
from .strategies import all_layouts, inputs, leaves, masked, visible, with_gradients


@settings(deadline=None, max_examples=50)
@given(masked(48), st.integers(2, 6), all_layouts)
@example((MaskSpec(causal=False, window=7), 37), 4, Zigzag())  # squares over both of its chunks
def test_blocks_over_gathered_keys_show_what_the_mask_shows(
    case: tuple[MaskSpec, int], n: int, layout: Layout
) -> None:
    mask, seq_len = case
    plan = plan_attention(mask, layout, n, seq_len, schedule="gather")
    seen = visible(mask, seq_len)
    pieces = pieces_of(plan.groups)
    order = [place for held in places_of(pieces) for place in held]
    parts = [[i for chunk in piece for i in chunk] for held in pieces for piece in held]
    placed = sorted(zip(order, parts, strict=True), key=lambda x: x[0].start)
    assert [i for place, _ in placed for i in place] == list(range(seq_len))
    assert all(len(place) == len(part) for place, part in placed)
    keys = [i for _, part in placed for i in part]
    for rank in range(n):
        part = part_of(plan, rank)
        mine = [i for chunk in plan.queries[rank] for i in chunk]
        gathered = gathered_part(part, rank, plan.queries, pieces)
        computed = torch.zeros(len(mine), seq_len, dtype=torch.int64)
        for source, blocks in gathered.blocks.items():
            held = keys if source == n else mine
            for block in blocks:
                rows, side = len(block.queries) // block.tiles, len(block.keys) // block.tiles
                for tile in range(block.tiles):
                    at = block.queries[tile * rows : (tile + 1) * rows]
                    columns = [held[i] for i in block.keys[tile * side : (tile + 1) * side]]
                    ones = torch.ones(rows, side, dtype=torch.int64)
                    shown = {"full": ones, "causal": ones.tril(), "anticausal": ones.triu()}
                    rows_of = torch.tensor(at, dtype=torch.int64).unsqueeze(1)
                    computed[rows_of, torch.tensor(columns, dtype=torch.int64)] += shown[block.kind]
        assert torch.equal(computed, seen[mine].long())


@pytest.mark.parametrize(
    ("layout", "causal", "launches"),
    [
        (Zigzag(), True, 3),  # the squares of its chunks, and for each chunk all keys before it
        (Contiguous(), True, 2),  # its square, and all keys before it
        (Zigzag(), False, 1),
        (Contiguous(), False, 1),
    ],
)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_launches_do_not_grow_with_the_ranks(
    n: int, layout: Layout, causal: bool, launches: int
) -> None:
    tensors = inputs(2, 2, 16 * n, batch=1)
    mask = MaskSpec(causal=causal)

    def rank(rank: int, collectives: SimulatedCollectives) -> list[int]:
        mine = list(layout.indices(n, 16 * n)[rank])
        q, k, v, grad = (x[:, :, mine] for x in tensors)
        local = leaves(q, k, v)
        counts: list[int] = []

        def counted(run: Callable[[], Any]) -> Any:
            with Called() as called:
                result = run()
            counts.append(sum(t for name, t in called.times.items() if "flash" in name))
            return result

        out = counted(
            lambda: context_parallel_attention(
                *local,
                collectives.mesh((n,), ("cp",)),
                mask=mask,
                layout=layout,
                schedule="gather",
                seq_len=16 * n,
                collectives=collectives,
            )
        )
        counted(lambda: with_gradients(out, local, grad))
        return counts

    found = SimulatedWorld(n).run(rank)
    assert max(found) == [min(launches, n), min(launches, n)]


def test_a_rank_with_joined_chunks_gathers_as_the_others() -> None:
    plan = plan_attention(MaskSpec(causal=True), Zigzag(), 4, 64, schedule="gather")
    assert len(plan.groups[3]) == 1  # the fourth and the fifth chunk
    places = rank_plan_of(plan, 0).places
    assert places == tuple(
        (range(32 + 8 * rank, 40 + 8 * rank), range(8 * rank, 8 + 8 * rank)) for rank in range(4)
    )
