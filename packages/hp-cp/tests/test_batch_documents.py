"""Documents of each row of the batch: the attention of every row with its own mask."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import (
    Auto,
    ContextParallel,
    Contiguous,
    Greedy,
    InputError,
    Layout,
    MaskSpec,
    PerDocument,
    Pinned,
    Zigzag,
    context_parallel_attention,
    plan_attention,
    position_ids,
    shard_sequence,
    shift_labels,
    unshard_sequence,
)
from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import cp_mesh, dense_attention, inputs, leaves, with_gradients
from .test_style import Core, rows

LAYOUTS: tuple[Layout, ...] = (Contiguous(), Zigzag(), Greedy(2), Auto())
SCHEDULES = ("direct", "gather", "ring", "double_ring")


@st.composite
def batches(draw: st.DrawFn) -> tuple[MaskSpec, int]:
    """Draw a mask with the documents of two or three rows, and their length; some are empty."""
    seq_len = draw(st.integers(1, 40))
    ends = st.lists(st.integers(0, seq_len), max_size=4).map(sorted)
    documents = tuple((0, *draw(ends), seq_len) for _ in range(draw(st.integers(2, 3))))
    window = draw(st.none() | st.integers(1, seq_len + 1))
    return MaskSpec(causal=draw(st.booleans()), window=window, cu_seqlens=documents), seq_len


def row_by_row(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> Tensor:
    """Return the attention of each row of the batch by the definition of its mask."""
    each = zip(q.split(1), k.split(1), v.split(1), mask.rows, strict=True)
    return torch.cat([dense_attention(*row) for row in each])


def attend(
    tensors: tuple[Tensor, ...], mesh: Any, mask: MaskSpec, layout: Layout, **options: Any
) -> list[Tensor]:
    """Return this rank's rows of the attention and of all gradients."""
    seq_len, record = tensors[0].shape[2], RecordingCollectives(options.pop("collectives", None))
    q, k, v, grad = shard_sequence(tensors, mesh, layout, seq_dim=2, mask=mask)
    local = leaves(q, k, v)
    rows_first = options.pop("rows_first", False)
    q, k, v = (x.transpose(1, 2) if rows_first else x for x in local)
    out = context_parallel_attention(
        q,
        k,
        v,
        mesh,
        mask=mask,
        layout=layout,
        seq_len=seq_len,
        collectives=record,
        seq_dim=1 if rows_first else 2,
        head_dim=2 if rows_first else 1,
        **options,
    )
    out = out.transpose(1, 2) if rows_first else out
    found = with_gradients(out, local, grad)
    received = sum(stats.bytes for stats in record.by_axis.values())
    return [*found, torch.tensor(received)]


def compare(
    answers: list[list[Tensor]],
    tensors: tuple[Tensor, ...],
    mask: MaskSpec,
    layout: Layout,
    **options: Any,
) -> None:
    """Compare ranks' rows with attention row by row, and what they received with the plan."""
    n, (batch, q_heads, seq_len, size) = len(answers), tensors[0].shape
    whole = leaves(*tensors[:3])
    expected = with_gradients(row_by_row(*whole, mask), whole, tensors[3])
    plan = plan_attention(
        mask,
        layout,
        n,
        seq_len,
        batch=batch,
        q_heads=q_heads,
        kv_heads=tensors[1].shape[1],
        head_size=size,
        itemsize=8,
        **options,
    )
    assert plan.lengths == tuple(map(len, layout.indices(n, seq_len, mask)))
    for rank, (*found, received) in enumerate(answers):
        mine = list(layout.indices(n, seq_len, mask)[rank])
        for result, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(result, reference[:, :, mine], rtol=0, atol=1e-13)
        assert received == plan.bytes_received(rank)


@settings(deadline=None, max_examples=30)
@given(
    batches(),
    st.integers(1, 4),
    st.sampled_from(LAYOUTS),
    st.sampled_from(SCHEDULES),
    st.booleans(),
    st.booleans(),
)
@example(
    (MaskSpec(causal=True, cu_seqlens=((0, 5, 16), (0, 16))), 16),
    4,
    Zigzag(),
    "direct",
    True,
    False,
)
def test_each_row_is_attended_with_its_documents_and_fetches_what_is_planned(
    case: tuple[MaskSpec, int],
    n: int,
    layout: Layout,
    schedule: Any,
    ulysses: bool,
    rows_first: bool,
) -> None:
    mask, seq_len = case
    dims = {"rows_first": rows_first}
    degree = 2 if ulysses and n % 2 == 0 else 1
    tensors = inputs(4, 2, seq_len, batch=len(mask.rows))
    options: dict[str, Any] = {"schedule": schedule, "ulysses_degree": degree}

    def rank(rank: int, collectives: SimulatedCollectives) -> list[Tensor]:
        mesh = collectives.mesh((n,), ("cp",))
        return attend(tensors, mesh, mask, layout, collectives=collectives, **dims, **options)

    compare(SimulatedWorld(n).run(rank), tensors, mask, layout, **options)


TWO = MaskSpec(causal=True, cu_seqlens=((0, 7, 9, 24), (0, 20, 24)))


def on_ranks(rank: int, options: dict[str, Any]) -> list[Tensor]:
    return attend(inputs(4, 2, 24), cp_mesh(2), TWO, Zigzag(), **options)


@pytest.mark.parametrize("options", [{"schedule": "direct"}, {"ulysses_degree": 2}])
def test_real_ranks_attend_each_row_with_its_documents(ranks: Any, options: dict[str, Any]) -> None:
    compare(ranks(2).run(on_ranks, options), inputs(4, 2, 24), TWO, Zigzag(), **options)


@pytest.mark.parametrize("degree", [1, 2])
def test_rows_with_equal_documents_are_those_of_one_mask_with_dropout_too(degree: int) -> None:
    tensors = inputs(4, 2, 24)
    shared = (0, 7, 24)

    def rank(rank: int, collectives: SimulatedCollectives) -> list[tuple[Tensor, Tensor]]:
        q, k, v, _ = (x.chunk(4, 2)[rank] for x in tensors)
        return [
            context_parallel_attention(
                q,
                k,
                v,
                collectives.mesh((4,), ("cp",)),
                mask=MaskSpec(causal=True, cu_seqlens=documents),
                ulysses_degree=degree,
                dropout_p=0.4,
                dropout_seed=3,
                sinks=torch.ones(4, dtype=torch.float64),
                return_lse=True,
                collectives=collectives,
            )
            for documents in (shared, (shared, shared))
        ]

    for once, of_rows in SimulatedWorld(4).run(rank):
        torch.testing.assert_close(of_rows, once, rtol=0, atol=1e-14)


def test_layouts_that_follow_the_mask_balance_the_work_of_all_rows_together() -> None:
    mask = MaskSpec(causal=True, cu_seqlens=((0, 512, 576, 1024), (0, *range(64, 1025, 64))))
    for layout in (Greedy(4), Auto()):
        plan = plan_attention(mask, layout, 4, 1024, batch=2)
        assert plan.imbalance() < 1.1
        work = [sum(block.pairs for block in plan.blocks(rank)) for rank in range(4)]
        pairs = sum(sum(n * (n + 1) // 2 for n in map(len, m.documents(1024))) for m in mask.rows)
        assert sum(work) == pairs
        assert max(work) * 4 / pairs == plan.imbalance()
    assert "cu_seqlens=((0, 512, 576, 1024)" in plan.explain()


def test_positions_and_labels_are_those_of_each_rows_documents() -> None:
    mask, tokens = TWO, torch.arange(48).view(2, 24)
    labels = shift_labels(tokens, mask)
    for row, own in enumerate(mask.rows):
        assert torch.equal(labels[row], shift_labels(tokens[row], own))
    assert torch.equal(shift_labels(tokens.T, mask, seq_dim=0), labels.T)

    def rank(rank: int, collectives: SimulatedCollectives) -> tuple[Tensor, Tensor]:
        mesh, layout = collectives.mesh((2,), ("cp",)), Greedy(3)
        mine = shard_sequence(tokens, mesh, layout, seq_dim=1, mask=mask)
        whole = unshard_sequence(mine, mesh, layout, seq_dim=1, mask=mask, collectives=collectives)
        assert torch.equal(whole, tokens)
        return mine, position_ids(mesh, layout, 24, mask)

    for mine, positions in SimulatedWorld(2).run(rank):
        starts = [
            [max(e for e in ends if e <= t % 24) for t in row]
            for row, ends in zip(mine.tolist(), mask.ends, strict=True)
        ]
        assert torch.equal(positions, mine % 24 - torch.tensor(starts))


def test_the_style_takes_documents_of_each_row() -> None:
    tensors = inputs(4, 4, 24)
    expected = row_by_row(*tensors[:3], TWO)
    style = dict(seq_dim=1, head_dim=2, ulysses_degree=1, layout=Zigzag(), mask=TWO)

    def rank(rank: int, collectives: SimulatedCollectives) -> Tensor:
        mesh = collectives.mesh((2,), ("cp",))
        local = shard_sequence(tensors[:3], mesh, Zigzag(), seq_dim=2)
        module = ContextParallel(**style, collectives=collectives).apply(Core(), mesh)  # type: ignore[arg-type]
        out: Tensor = rows(module(*map(rows, local), is_causal=True))
        return out

    for i, out in enumerate(SimulatedWorld(2).run(rank)):
        mine = list(Zigzag().indices(2, 24)[i])
        torch.testing.assert_close(out, expected[:, :, mine], rtol=0, atol=1e-13)


def test_layers_with_another_cut_are_refused_where_one_has_documents_of_each_row() -> None:
    q, k, v, _ = inputs(4, 4, 24)
    causal = MaskSpec(causal=True)

    def rank(rank: int, collectives: SimulatedCollectives) -> None:
        mesh = collectives.mesh((2,), ("cp",))

        def attention(mask: MaskSpec, layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return context_parallel_attention(
                q, k, v, mesh, mask=mask, layout=layout, seq_len=24, collectives=collectives
            )

        local = leaves(*shard_sequence((q, k, v), mesh, Zigzag(), seq_dim=2))
        out = attention(TWO, Zigzag(), *local)
        again = attention(causal, Pinned(Zigzag(), TWO), out, out, out)
        attention(TWO, Zigzag(), again, again, again).sum().backward()
        with pytest.raises(InputError, match="cut by a mask of causal=True, 5 documents, but"):
            attention(causal, Contiguous(), out, out, out)
        plain = attention(causal, Zigzag(), *local)
        with pytest.raises(InputError, match=r"Contiguous\(\) cuts otherwise .* 5 documents here"):
            attention(TWO, Contiguous(), plain, plain, plain)

    SimulatedWorld(2).run(rank)


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        (((0, 3, 8), (0, 9)), r"rows of a batch end at \[8, 9\], but all rows are of one length"),
        (((0, 3, 8), (0, 9, 8)), "ascend from 0"),
        (((0, 3, 8), 8), "got 8; .* such a tuple for each row of the batch"),
        (((0, 3, 8), [0, 8]), "got an object of type list"),
        (((),), "ascend from 0"),
        ((), "ascend from 0"),
    ],
)
def test_rows_without_documents_or_of_several_lengths_are_refused(
    documents: Any, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        MaskSpec(causal=True, cu_seqlens=documents)


def test_another_number_of_rows_and_what_wants_shared_documents_are_refused() -> None:
    with pytest.raises(InputError, match="documents of 2 rows, but the batch has 3; give one"):
        plan_attention(TWO, None, 2, 24, batch=3)
    with pytest.raises(InputError, match="documents of 2 rows, but the batch has 1"):
        plan_attention(TWO, None, 2, 24)
    with pytest.raises(
        InputError, match=r"PerDocument.* others in each row of the batch; use Greedy"
    ):
        plan_attention(TWO, PerDocument(), 2, 24, batch=2)
    with pytest.raises(InputError, match=r"load_balance swaps .* use layout=Zigzag"):
        plan_attention(TWO, None, 2, 24, batch=2, schedule="gather", load_balance=True)
    with pytest.raises(InputError, match="end at 24 but the sequence has 16 positions"):
        plan_attention(TWO, None, 2, 16, batch=2)
    with pytest.raises(InputError, match="documents of 2 rows of the batch, where those that all"):
        TWO.documents(24)
    for labels in (torch.zeros(24), torch.zeros(3, 24), torch.zeros(2, 24, 1)):
        with pytest.raises(InputError, match="are not 2 rows, of which cu_seqlens"):
            shift_labels(labels, TWO, seq_dim=labels.shape.index(24))
    mesh = SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",))
    q = torch.zeros(3, 2, 24, 4)
    with pytest.raises(InputError, match="documents of 2 rows, but the batch has 3"):
        context_parallel_attention(q, q, q, mesh, mask=TWO)
