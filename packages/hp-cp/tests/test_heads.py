"""The Ulysses exchange moves every element to one place, and back."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import Layout
from hp_cp._heads import heads_to_rows, rows_to_heads
from hp_dtensor import SimulatedCollectives, SimulatedWorld

from .strategies import inputs, layouts

SHARES = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), SHARES, st.integers(1, 13), layouts)
def test_each_rank_gets_its_heads_of_the_whole_sequence_and_gives_them_back(
    n: int, shares: list[int], seq_len: int, layout: Layout
) -> None:
    whole = [inputs(n * s, 1, seq_len, seed=i)[0] for i, s in enumerate(shares)]

    def rank(rank: int, door: SimulatedCollectives) -> tuple[list[Tensor], list[Tensor]]:
        axis, chunks = door.axis(), layout.chunks(n, seq_len)
        mine = [x[:, :, list(layout.indices(n, seq_len)[rank])] for x in whole]
        heads = rows_to_heads(mine, axis, chunks, door)
        return heads, [heads_to_rows(x, axis, chunks, door) for x in heads]

    for i, (heads, rows) in enumerate(SimulatedWorld(n).run(rank)):
        mine = list(layout.indices(n, seq_len)[i])
        for share, x, held, back in zip(shares, whole, heads, rows, strict=True):
            assert torch.equal(held, x[:, i * share : (i + 1) * share])
            assert torch.equal(back, x[:, :, mine])


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([(2, 1), (4, 1), (4, 2), (3, 1)]), st.integers(1, 9), layouts)
def test_a_kv_head_goes_to_every_rank_whose_queries_share_it(
    world: tuple[int, int], seq_len: int, layout: Layout
) -> None:
    n, kv_heads = world
    _, k, _, _ = inputs(n, kv_heads, seq_len)

    def rank(rank: int, door: SimulatedCollectives) -> tuple[Tensor, Tensor]:
        mine = k[:, :, list(layout.indices(n, seq_len)[rank])].requires_grad_()
        (held,) = rows_to_heads([mine], door.axis(), layout.chunks(n, seq_len), door)
        (grad,) = torch.autograd.grad(held, mine, torch.full_like(held, rank + 1.0))
        return held.detach(), grad

    results = SimulatedWorld(n).run(rank)
    sharers = n // kv_heads
    for i, (held, grad) in enumerate(results):
        assert torch.equal(held, k[:, i // sharers : i // sharers + 1])
        for head in range(kv_heads):
            ranks = range(head * sharers, (head + 1) * sharers)
            assert (grad[:, head] == sum(r + 1.0 for r in ranks)).all()
