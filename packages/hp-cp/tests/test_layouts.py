"""Layouts partition the sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_cp import Contiguous, Layout, LayoutError, Zigzag

from .strategies import LAYOUTS, layouts, seq_lens, worlds


@settings(deadline=None)
@given(layouts, worlds, seq_lens)
def test_ranks_hold_every_position_exactly_once(layout: Layout, n: int, seq_len: int) -> None:
    indices = layout.indices(n, seq_len)
    assert len(indices) == n
    assert sorted(i for rank in indices for i in rank) == list(range(seq_len))


@settings(deadline=None)
@given(layouts, worlds, seq_lens)
def test_local_positions_ascend(layout: Layout, n: int, seq_len: int) -> None:
    for rank in layout.indices(n, seq_len):
        assert list(rank) == sorted(rank)


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


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize(("n", "seq_len"), [(0, 8), (2, -1)])
def test_impossible_sizes_are_refused(layout: Layout, n: int, seq_len: int) -> None:
    with pytest.raises(LayoutError, match=f"n={n}, seq_len={seq_len}"):
        layout.indices(n, seq_len)
