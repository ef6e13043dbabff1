"""What a rank spends on its part of a plan grows with ranks and documents, not with pairs of them.

Counted in lines of Python, which no other load on the machine changes.
"""

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from hp_cp import Auto, Contiguous, Greedy, Layout, MaskSpec, PerDocument, Zigzag, plan_attention
from hp_cp._plan import part_of


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of Python run."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def part_costs(
    layout: Layout, n: int, documents: int, window: int | None, schedule: Any = "direct"
) -> tuple[int, int]:
    """Return the lines of one rank's part for a mask that is new, and for the same again."""
    seq_len = 1 << 16
    ends = sorted(
        random.Random(f"{layout}{n}{schedule}{window}").sample(range(1, seq_len), documents - 1)
    )
    mask = MaskSpec(causal=True, window=window, cu_seqlens=(0, *ends, seq_len))

    def part() -> None:
        plan = plan_attention(mask, layout, n, seq_len, schedule=schedule)
        assert plan.lengths[n // 3] == part_of(plan, n // 3).lengths[n // 3]

    return lines_run(part), lines_run(part)


LAYOUTS = [Contiguous(), Zigzag(), PerDocument(), Greedy(8), Auto()]


@pytest.mark.parametrize("window", [None, 500])
@pytest.mark.parametrize("schedule", ["direct", "gather", "ring"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_twice_the_ranks_or_the_documents_cost_a_rank_about_twice_the_work(
    layout: Layout, schedule: Any, window: int | None
) -> None:
    once, _ = part_costs(layout, 16, 40, window, schedule)
    twice_ranks, _ = part_costs(layout, 32, 40, window, schedule)
    twice_documents, _ = part_costs(layout, 16, 80, window, schedule)
    assert twice_ranks <= 2.5 * once
    assert twice_documents <= 2.5 * once


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_a_known_part_costs_next_to_nothing_for_any_world(layout: Layout) -> None:
    costs = {part_costs(layout, n, documents, None)[1] for n in (16, 64) for documents in (1, 40)}
    assert max(costs) < 300
