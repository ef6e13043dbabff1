"""Keys that are gathered are attended in as few launches as their order allows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hp_cp import (
    Contiguous,
    Greedy,
    Layout,
    MaskSpec,
    Zigzag,
    context_parallel_attention,
    plan_attention,
)
from hp_cp._blocks import gathered_part, pieces_of, places_of
from hp_cp._plan import part_of, rank_plan_of
from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .operations import Called
from .strategies import all_layouts, inputs, leaves, masked, single, visible, with_gradients
from .test_copies import Carried, Copied


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


def backward_of(
    n: int, seq_len: int, layout: Layout, mask: MaskSpec, value_size: int = 8
) -> list[tuple[list[torch.Tensor], int, dict[str, int]]]:
    """Return each rank's results, and the operators and the calls of its backward."""
    q, k, v, grad = inputs(4, 2, seq_len)
    tensors = q, k, v[..., :value_size], grad[..., :value_size]

    def rank(
        rank: int, collectives: SimulatedCollectives
    ) -> tuple[list[torch.Tensor], int, dict[str, int]]:
        mine = list(layout.indices(n, seq_len, mask)[rank])
        *local, grad = (x[:, :, mine] for x in tensors)
        q, k, v = leaves(*local)
        record = RecordingCollectives(Carried(collectives, Copied()))
        out = context_parallel_attention(
            q,
            k,
            v,
            collectives.mesh((n,), ("cp",)),
            mask=mask,
            layout=layout,
            schedule="gather",
            seq_len=seq_len,
            collectives=record,
        )
        before = {name: traffic.calls for (_, name), traffic in record.by_call.items()}
        with Called() as called:
            results = with_gradients(out, (q, k, v), grad)
        after = {name: traffic.calls for (_, name), traffic in record.by_call.items()}
        calls = {name: number - before.get(name, 0) for name, number in after.items()}
        return results, sum(called.times.values()), {x: i for x, i in calls.items() if i}

    return SimulatedWorld(n).run(rank)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=repr)
def test_gradients_return_by_one_all_to_all_of_operators_that_do_not_grow_with_the_ranks(
    layout: Layout,
) -> None:
    mask, most = MaskSpec(causal=True), []
    for n in (4, 8):
        found = backward_of(n, 16 * n, layout, mask)
        assert [calls for _, _, calls in found] == [{"all_to_all": 1}] * n
        most.append(max(operators for _, operators, _ in found))
    assert most[1] <= most[0]


@pytest.mark.parametrize("seq_len", [64, 61, 5])
@pytest.mark.parametrize(
    ("layout", "mask"),
    [
        (Contiguous(), MaskSpec(causal=True)),
        (Zigzag(), MaskSpec(causal=True)),
        (Zigzag(), MaskSpec(causal=False, window=3)),
        (Greedy(3), MaskSpec(causal=True, cu_seqlens=(0, 2, 5))),
    ],
    ids=["contiguous", "zigzag", "window", "documents"],
)
def test_eight_ranks_have_the_gradients_of_one(
    seq_len: int, layout: Layout, mask: MaskSpec
) -> None:
    if mask.cu_seqlens is not None:
        mask = MaskSpec(causal=True, cu_seqlens=(0, 2, seq_len))
    found = backward_of(8, seq_len, layout, mask, value_size=5)
    q, k, v, grad = inputs(4, 2, seq_len)
    expected = single((q, k, v[..., :5], grad[..., :5]), mask)
    order = [i for held in layout.indices(8, seq_len, mask) for i in held]
    for parts, whole in zip(zip(*(x for x, _, _ in found), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts, 2), whole[:, :, order], rtol=0, atol=1e-12)


def test_gradients_of_a_low_precision_are_summed_in_float32() -> None:
    """The peers' gradients of each key cancel but for what float32 keeps of them."""
    n = 8
    tensors = [torch.zeros(1, 1, n, 8, dtype=torch.bfloat16) for _ in range(3)]
    grads = torch.tensor([1.0, 256, 1, 1, 1, 1, 1, -256]).to(torch.bfloat16)

    def rank(rank: int, collectives: SimulatedCollectives) -> torch.Tensor:
        local = leaves(*(x[:, :, rank : rank + 1] for x in tensors))
        out = context_parallel_attention(
            *local,
            collectives.mesh((n,), ("cp",)),
            mask=MaskSpec(causal=False),
            schedule="gather",
            seq_len=n,
            collectives=collectives,
        )
        grad = torch.full_like(out, 1.0) * grads[rank]
        return torch.autograd.grad(out, local[2], grad)[0]

    expected = torch.full((1, 1, 1, 8), float(grads.float().sum()) / n, dtype=torch.bfloat16)
    for found in SimulatedWorld(n).run(rank):
        assert torch.equal(found, expected)
