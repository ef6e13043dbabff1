"""The Ulysses exchange moves every element to one place, and back."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import Contiguous, Layout, MaskSpec, context_parallel_attention
from hp_cp._mesh import Peers
from hp_cp._plan import HeadShare, split_heads
from hp_cp._ulysses import Exchange, heads_to_rows, rows_to_heads
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import LAYOUTS, inputs, layouts, leaves, with_gradients

worlds = st.integers(1, 4)
kv_heads_and_groups = st.tuples(st.integers(1, 4), st.integers(1, 4))


def exchange_of(
    door: SimulatedCollectives, layout: Layout, seq_len: int, shares: tuple[HeadShare, ...]
) -> Exchange:
    chunks = layout.chunks(len(shares), seq_len)
    return Exchange.of(Peers.on(door.axis(), door), chunks, shares)


@settings(deadline=None, max_examples=40)
@given(worlds, kv_heads_and_groups, st.integers(1, 13), layouts)
def test_each_rank_gets_its_heads_of_the_whole_sequence_and_gives_them_back(
    n: int, heads: tuple[int, int], seq_len: int, layout: Layout
) -> None:
    kv_heads, q_heads = heads[0], heads[0] * heads[1] * n
    q, k, v, _ = inputs(q_heads, kv_heads, seq_len)
    shares = split_heads(q_heads, kv_heads, n)
    indices = layout.indices(n, seq_len)

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        exchange = exchange_of(door, layout, seq_len, shares)
        mine = list(indices[rank])
        local = [x[:, :, mine].transpose(1, 2) for x in (q, k, v)]
        held = rows_to_heads(local[0], local[1], local[2], exchange)
        return [x.transpose(1, 2) for x in (*held, heads_to_rows(held[0], exchange))]

    results = SimulatedWorld(n).run(rank)
    for share, mine, (held_q, held_k, held_v, back) in zip(shares, indices, results, strict=True):
        assert torch.equal(held_q, q[:, list(share.q)])
        assert torch.equal(held_k, k[:, list(share.kv)])
        assert torch.equal(held_v, v[:, list(share.kv)])
        assert torch.equal(back, q[:, :, list(mine)])


@settings(deadline=None, max_examples=30)
@given(worlds, kv_heads_and_groups, st.integers(1, 9), layouts)
def test_the_gradient_of_a_head_sums_those_of_all_ranks_that_read_it(
    n: int, heads: tuple[int, int], seq_len: int, layout: Layout
) -> None:
    kv_heads, q_heads = heads[0], heads[0] * heads[1] * n
    tensors = [x.transpose(1, 2) for x in inputs(q_heads, kv_heads, seq_len)[:3]]
    shares = split_heads(q_heads, kv_heads, n)

    def rank(rank: int, door: SimulatedCollectives) -> tuple[Tensor, ...]:
        mine = list(layout.indices(n, seq_len)[rank])
        q, k, v = (x[:, mine].requires_grad_() for x in tensors)
        held = rows_to_heads(q, k, v, exchange_of(door, layout, seq_len, shares))
        grads = [torch.full_like(x, rank + 1.0) for x in held]
        return torch.autograd.grad(held, (q, k, v), grads)

    for dq, dk, dv in SimulatedWorld(n).run(rank):
        for head in range(q_heads):
            (owner,) = (rank for rank in range(n) if head in shares[rank].q)
            assert (dq[:, :, head] == owner + 1.0).all()
        for head in range(kv_heads):
            total = sum(rank + 1.0 for rank in range(n) if head in shares[rank].kv)
            assert (dk[:, :, head] == total).all()
            assert (dv[:, :, head] == total).all()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 9))
def test_some_ranks_of_an_axis_exchange_among_themselves(
    groups: int, degree: int, seq_len: int
) -> None:
    q = inputs(3, 1, seq_len)[0].transpose(1, 2)
    shares = split_heads(3, 3, degree)

    def rank(rank: int, door: SimulatedCollectives) -> Tensor:
        first = rank - rank % degree
        members = tuple(range(first, first + degree))
        place = members.index(door.axis().index)
        peers = Peers(door.axis(), members, place, door)
        chunks = tuple((range(i * seq_len, (i + 1) * seq_len),) for i in range(degree))
        exchange = Exchange.of(peers, chunks, shares)
        return rows_to_heads(q + rank, q + rank, q + rank, exchange)[0]

    for i, held in enumerate(SimulatedWorld(groups * degree).run(rank)):
        first = i - i % degree
        whole = torch.cat([q + r for r in range(first, first + degree)], 1)
        assert torch.equal(held, whole[:, :, list(shares[i % degree].q)])


MASKS = [
    MaskSpec(causal=causal, window=window, cu_seqlens=documents)
    for causal, window, documents in itertools.product(
        (True, False), (None, 9, 20, 32), (None, (0, 5, 6, 19, 37))
    )
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_windows_and_documents_are_bitwise_one_process(layout: Layout, dtype: torch.dtype) -> None:
    tensors = inputs(8, 8, 37, size=16, dtype=dtype)

    def attention(n: int, mask: MaskSpec) -> list[Tensor]:
        held = [list(indices) for indices in layout.indices(n, 37, mask)]

        def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
            q, k, v, grad = (x[:, :, held[rank]] for x in tensors)
            local = leaves(q, k, v)
            out = context_parallel_attention(
                *local,
                door.mesh((n,), ("cp",)),
                mask=mask,
                layout=layout,
                ulysses_degree=n,
                seq_len=37,
                collectives=door,
            )
            return with_gradients(out, local, grad)

        order = torch.tensor([i for indices in held for i in indices]).argsort()
        parts = zip(*SimulatedWorld(n).run(rank), strict=True)
        return [torch.cat(part, 2)[:, :, order] for part in parts]

    for mask in MASKS:
        assert all(map(torch.equal, attention(4, mask), attention(1, mask))), mask


@pytest.mark.parametrize("order", [("two axes", "one axis"), ("one axis", "two axes")])
def test_equal_calls_on_meshes_with_other_axes_are_planned_separately(
    order: tuple[str, str],
) -> None:
    meshes = {"two axes": ((2, 2), ("outer", "ulysses")), "one axis": ((4,), ("cp",))}
    q, k, v, _ = inputs(5, 5, 8)

    def rank(rank: int, door: SimulatedCollectives) -> list[Tensor]:
        my_q, my_k, my_v = (x.chunk(4, 2)[rank] for x in (q, k, v))
        return [
            context_parallel_attention(
                my_q,
                my_k,
                my_v,
                door.mesh(*meshes[name]),
                mask=MaskSpec(causal=True),
                layout=Contiguous(),
                schedule="gather",
                ulysses_degree=2,
                collectives=door,
            )
            for name in order
        ]

    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).chunk(4, 2)
    for results, rows in zip(SimulatedWorld(4).run(rank), expected, strict=True):
        for out in results:
            torch.testing.assert_close(out, rows, rtol=1e-12, atol=1e-12)
