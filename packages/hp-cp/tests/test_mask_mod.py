"""Masks by a function: attention by its definition, whatever the function hides."""

import gc
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import (
    BackendError,
    Block,
    ContextParallel,
    Contiguous,
    InputError,
    MaskSpec,
    Pinned,
    ScoreOptions,
    Zigzag,
    _blocks,
    _mask_mod,
    _plan,
    context_parallel_attention,
    plan_attention,
)
from hp_cp.kernels._choose import choose_backends
from hp_dtensor import RecordingCollectives, TorchCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import cp_mesh, inputs, leaves, visible, with_gradients
from .test_backends import PlainBackend
from .test_models import Case, cases, check, on_rank

PREFIX = torch.tensor([5, 9])
REACH = torch.tensor([1, 3, 7, 50] * 6)
DOCUMENT = torch.tensor([[0] * 7 + [1] * 93, [0] * 3 + [1] * 9 + [2] * 88])


def prefix(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx <= q_idx) | (kv_idx < PREFIX[b])


def every_third(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx) % 3 == 0


def head_windows(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < REACH[h]


def documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return DOCUMENT[b][q_idx] == DOCUMENT[b, kv_idx]


def rows_without_keys(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx % 4 != 0) & (kv_idx < 8) & (h != 1)


def nothing(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < 0


def everything(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx >= 0


FUNCTIONS = (
    prefix,
    every_third,
    head_windows,
    documents,
    rows_without_keys,
    nothing,
    everything,
)
CAUSAL = MaskSpec(causal=True)


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(case=cases(), function=st.sampled_from(FUNCTIONS), tile=st.sampled_from([3, 128]))
def test_simulated_ranks_equal_the_definition_with_the_planned_bytes(
    case: Case, function: Any, tile: int
) -> None:
    case = replace(case, mask=replace(case.mask, mask_mod=function))
    received = [0] * case.n

    def rank(rank: int, simulated: SimulatedCollectives) -> list[Tensor]:
        record = RecordingCollectives(simulated)
        results = on_rank(case, rank, simulated.mesh((case.n,), ("cp",)), record)
        received[rank] = sum(traffic.bytes for traffic in record.by_axis.values())
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_blocks, "_TILE", tile)
        patch.setattr(_mask_mod, "_PAIRS", 400)
        _plan._PARTS.clear()
        check(case, SimulatedWorld(case.n).run(rank))
        plan = plan_attention(
            case.mask,
            case.layout,
            case.n,
            case.seq_len,
            schedule=case.schedule,
            ulysses_degree=case.degree,
            keep_kv=case.keep_kv,
            batch=2,
            q_heads=case.heads[0],
            kv_heads=case.heads[1],
            head_size=case.sizes[0],
            value_size=case.sizes[1],
            itemsize=8,
        )
        if not case.return_lse:
            assert received == [plan.bytes_received(rank) for rank in range(case.n)]
    _plan._PARTS.clear()


REAL = [
    Case(2, degree, (4, 2), (8, 6), MaskSpec(causal=False, mask_mod=f), 31, Zigzag(), schedule)
    for f in (prefix, head_windows, rows_without_keys)
    for degree, schedule in ((1, "direct"), (2, "gather"), (1, "ring"))
]


def attend_all(rank: int) -> list[list[Tensor]]:
    return [on_rank(case, rank, cp_mesh(2), TorchCollectives()) for case in REAL]


def test_real_ranks_equal_the_definition(ranks: Any) -> None:
    for case, *per_rank in zip(REAL, *ranks(2).run(attend_all), strict=True):
        check(case, per_rank)


def blocks(mask: MaskSpec, seq_len: int, n: int = 1, **options: Any) -> list[list[Block]]:
    plan = plan_attention(mask, Contiguous(), n, seq_len, **options)
    return [list(plan.blocks(rank)) for rank in range(n)]


def test_what_a_function_does_not_restrict_stays_as_it_is() -> None:
    for rest in (CAUSAL, MaskSpec(causal=False), MaskSpec(causal=True, window=9)):
        mask = replace(rest, mask_mod=everything)
        assert blocks(mask, 600, 2) == blocks(rest, 600, 2)


def test_tiles_that_are_empty_are_neither_computed_nor_fetched() -> None:
    cut = torch.tensor(512)
    mask = MaskSpec(causal=False, mask_mod=lambda b, h, q, k: (q < cut) == (k < cut))
    plan = plan_attention(mask, Contiguous(), 2, 1024)
    for rank in range(2):
        whole = Block(source=rank, queries=range(512), keys=range(512), kind="full")
        assert plan.blocks(rank) == (whole,)
        assert plan.bytes_received(rank) == 0
    assert blocks(MaskSpec(causal=True, mask_mod=nothing), 1024, 2) == [[], []]


def test_whole_tiles_are_rectangles_and_a_diagonal_stays_causal() -> None:
    near = torch.tensor(128)
    (found,) = blocks(MaskSpec(causal=True, mask_mod=lambda b, h, q, k: k >= q - near), 512)
    assert Counter((b.kind, len(b.queries), len(b.keys), b.tiles) for b in found) == {
        ("causal", 512, 512, 4): 1,
        ("masked", 128, 128, 1): 3,
    }
    (found,) = blocks(MaskSpec(causal=False, mask_mod=lambda b, h, q, k: k <= q), 2**12)
    assert {(b.kind, len(b.queries)) for b in found} == {("full", 256), ("masked", 256)}
    assert len(found) == 16 + 15  # tiles grow, so that launches do not


class Asked(PlainBackend):
    """The plain backend, which says which kinds of blocks it computes."""

    name = "asked"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: ScoreOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        self.rows.append(q.shape[2])
        return super().forward(q, k, v, causal=causal, options=options)


def alone(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, **options: Any) -> Any:
    simulated = SimulatedCollectives(SimulatedWorld(1), 0)
    mesh = simulated.mesh((1,), ("cp",))
    given: Any = {"mask": mask, "collectives": simulated, **options}
    return context_parallel_attention(q, k, v, mesh, **given)


def test_blocks_that_a_function_shows_whole_go_to_the_backend_that_was_named() -> None:
    q, k, v, _ = inputs(2, 2, 512, batch=1)
    backend, near = Asked(), torch.tensor(256)
    mask = MaskSpec(causal=True, mask_mod=lambda b, h, i, j: (j >= near) | (j % 2 == 0))
    out = alone(q, k, v, mask, backend=backend)
    assert backend.rows == [128, 128]  # the two last causal tiles, as rows of the batch, and below
    seen = visible(CAUSAL, 512) & ((torch.arange(512) >= 256) | (torch.arange(512) % 2 == 0))
    scores = (q @ k.mT * 8**-0.5).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ v, rtol=0, atol=1e-13)


def test_a_function_is_asked_once_for_all_calls_with_a_mask() -> None:
    asked: list[int] = []

    def noted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        asked.append(1)
        return kv_idx >= 0

    q, k, v, _ = inputs(2, 2, 40)
    mask = MaskSpec(causal=True, mask_mod=noted)
    for _ in range(3):
        alone(q, k, v, mask)
    assert len(asked) == 1


def used(pinned: bool, attended: MaskSpec | None = None) -> "weakref.ref[Any]":
    """Plan and attend by a function that holds a tensor, and return what tells of that one.

    With another mask for the attention the layout alone is that of the function.
    """
    tokens = torch.arange(24)

    def shown(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (tokens[kv_idx] >= 0)

    tensors = inputs(2, 2, 24)
    mask = MaskSpec(causal=False, cu_seqlens=((0, 9, 24), (0, 24)), mask_mod=shown)
    layout = Pinned(Zigzag(), mask) if pinned else Zigzag()
    plan_attention(mask, layout, 2, 24, batch=2).explain()

    def rank(rank: int, collectives: SimulatedCollectives) -> None:
        mine = list(Zigzag().indices(2, 24)[rank])
        local = leaves(*(x[:, :, mine] for x in tensors[:3]))
        mesh = collectives.mesh((2,), ("cp",))
        for schedule in ("direct", "gather"):
            out = context_parallel_attention(
                *local,
                mesh,
                mask=attended or mask,
                layout=layout,
                schedule=schedule,
                seq_len=24,
                collectives=collectives,
            )
            out.sum().backward()

    SimulatedWorld(2).run(rank)
    return weakref.ref(tokens)


@pytest.mark.parametrize("attended", [None, MaskSpec(causal=True)], ids=["same", "other"])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_function_and_what_it_holds_are_let_go_with_the_mask(
    pinned: bool, attended: MaskSpec | None
) -> None:
    held = used(pinned, attended)
    gc.collect()
    assert held() is None


class Core(torch.nn.Module):
    """A core-attention module."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False
    ) -> Tensor:
        """Not run."""
        raise AssertionError


def test_the_style_takes_a_function() -> None:
    q, k, v, grad = inputs(2, 2, 24)
    module = Core()
    simulated = SimulatedCollectives(SimulatedWorld(1), 0)
    mask = MaskSpec(causal=False, mask_mod=prefix)
    style = ContextParallel(seq_dim=2, head_dim=1, mask=mask, collectives=simulated)
    local = leaves(q, k, v)
    out = style.apply(module, simulated.mesh((1,), ("cp",)))(*local)
    whole = leaves(q, k, v)
    right = torch.nn.functional.scaled_dot_product_attention(
        *whole, attn_mask=visible(mask, 24, 2, 2)
    )
    torch.testing.assert_close(out, right, rtol=0, atol=1e-13)
    pairs = (torch.autograd.grad(x, y, grad) for x, y in ((out, local), (right, whole)))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (torch.ones(4, 4, dtype=torch.bool), "object of type Tensor, no mask function; give a fun"),
        (lambda q, k: q >= k, "no mask function: too many positional arguments; give a function"),
        (Contiguous, "mask_mod is the class Contiguous, no mask function"),
    ],
)
def test_what_is_no_mask_function_is_refused(function: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        MaskSpec(causal=False, mask_mod=function)


def test_a_dense_mask_is_refused_with_the_advice_of_a_function() -> None:
    q, k, v, _ = inputs(2, 2, 12)
    dense: Any = torch.ones(12, 12, dtype=torch.bool)
    with pytest.raises(InputError, match=r"Tensor; use .* with mask_mod= a function of positions"):
        alone(q, k, v, dense)
    module = Core()
    simulated = SimulatedCollectives(SimulatedWorld(1), 0)
    style = ContextParallel(seq_dim=2, head_dim=1, mask=CAUSAL, collectives=simulated)
    forward = style.apply(module, simulated.mesh((1,), ("cp",)))
    with pytest.raises(InputError, match="give the style a MaskSpec, with mask_mod= a function"):
        forward(q, k, v, attn_mask=dense)


@pytest.mark.parametrize(
    ("function", "said"),
    [(lambda b, h, i, j: i - j, r"torch\.int64"), (lambda b, h, i, j: True, "True")],
    ids=["ints", "no tensor"],
)
def test_a_function_without_bools_is_refused_before_communication(function: Any, said: str) -> None:
    q, k, v, _ = inputs(2, 2, 12)
    mask = MaskSpec(causal=True, mask_mod=function)
    for rank in range(2):
        record = RecordingCollectives(SimulatedCollectives(SimulatedWorld(2), rank))
        mesh = SimulatedCollectives(SimulatedWorld(2), rank).mesh((2,), ("cp",))
        with pytest.raises(InputError, match=rf"returned {said}; return a tensor of bool"):
            context_parallel_attention(q, k, v, mesh, mask=mask, seq_len=24, collectives=record)
        assert record.by_axis == {}


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "found"),
    [
        ("auto", "cpu", torch.float32, ("sdpa", "eager")),
        ("eager", "cpu", torch.float32, ("eager", "eager")),
        ("auto", "cuda", torch.bfloat16, ("sdpa", "eager")),
        ("flex", "cuda", torch.bfloat16, ("flex", "flex")),
    ],
)
def test_masked_blocks_go_to_a_backend_that_takes_functions(
    backend: str, device: str, dtype: torch.dtype, found: tuple[str, str]
) -> None:
    plan = plan_attention(MaskSpec(causal=True, mask_mod=prefix), None, 2, 64, head_size=64)
    chosen = choose_backends(backend, plan, torch.device(device), dtype, ScoreOptions())
    assert chosen.masked is not None
    assert (chosen.blocks.name, chosen.masked.name) == found


def test_a_mask_that_no_backend_takes_is_refused() -> None:
    plan = plan_attention(MaskSpec(causal=True, mask_mod=prefix), None, 2, 64)
    where = torch.device("meta")
    with pytest.raises(BackendError, match=r"cannot compute full attention .* on meta"):
        choose_backends(PlainBackend(), plan, where, torch.float32, ScoreOptions())


def test_a_backend_of_squares_alone_is_refused_where_a_function_leaves_rectangles() -> None:
    plan = plan_attention(
        MaskSpec(causal=True, mask_mod=lambda b, h, q_idx, kv_idx: q_idx != 3), None, 1, 256
    )
    assert {block.kind for block in plan.blocks(0)} == {"causal", "full", "masked"}
    backend, cpu = PlainBackend(("causal",)), torch.device("cpu")
    with pytest.raises(BackendError, match="'plain' cannot compute full attention"):
        choose_backends(backend, plan, cpu, torch.float32, ScoreOptions())


@pytest.mark.parametrize("function", [rows_without_keys, prefix])
def test_documents_of_each_row_and_a_function_are_that_of_both(function: Any) -> None:
    def both(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen: Tensor = documents(b, h, q_idx, kv_idx) & function(b, h, q_idx, kv_idx)
        return seen

    q, k, v, grad = inputs(4, 2, 26)
    ends = ((0, 7, 26), (0, 3, 12, 26))
    packed = MaskSpec(causal=True, cu_seqlens=ends, mask_mod=function)
    found = []
    for mask in (packed, MaskSpec(causal=True, mask_mod=both)):

        def rank(rank: int, simulated: SimulatedCollectives, mask: MaskSpec = mask) -> list[Tensor]:
            mine = list(Zigzag().indices(2, 26)[rank])
            local = leaves(*(x[:, :, mine] for x in (q, k, v)))
            mesh = simulated.mesh((2,), ("cp",))
            out = context_parallel_attention(
                *local, mesh, mask=mask, layout=Zigzag(), seq_len=26, collectives=simulated
            )
            return with_gradients(out, local, grad[:, :, mine])

        found.append(SimulatedWorld(2).run(rank))
    for mine, theirs in zip(*found, strict=True):
        for x, right in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, right, rtol=0, atol=1e-13)


class Reach:
    """A mask function whose reach may be set."""

    def __init__(self, reach: int) -> None:
        self.reach = reach

    def seen(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether a key is near."""
        return q_idx - kv_idx < self.reach


def test_a_method_of_a_changed_object_is_another_function() -> None:
    q, k, v = torch.randn(3, 1, 1, 16, 4, dtype=torch.float64)
    rule = Reach(3)

    def attended() -> Tensor:
        mask = MaskSpec(causal=True, mask_mod=rule.seen)

        def rank(rank: int, collectives: SimulatedCollectives) -> Tensor:
            a, b, c = (x.chunk(2, 2)[rank] for x in (q, k, v))
            return context_parallel_attention(
                a, b, c, collectives.mesh((2,), ("cp",)), mask=mask, collectives=collectives
            )

        return torch.cat(SimulatedWorld(2).run(rank), 2)

    first = attended()
    rule.reach = 9
    second = attended()
    rule = Reach(9)
    assert not torch.equal(first, second)
    assert torch.equal(attended(), second)


@pytest.mark.parametrize("schedule", ["direct", "gather", "ring"])
@pytest.mark.parametrize(
    "function",
    [lambda b, h, i, j: torch.ones(40, dtype=torch.bool)[j], lambda b, h, i, j: j.float()],
    ids=["short table", "floats"],
)
def test_a_function_that_fails_on_one_rank_fails_on_every_one(function: Any, schedule: Any) -> None:
    mask = MaskSpec(causal=True, mask_mod=function)

    def rank(rank: int, collectives: SimulatedCollectives) -> type[Exception]:
        x = torch.randn(1, 2, [64, 0][rank], 4)
        with pytest.raises((IndexError, InputError)) as info:
            context_parallel_attention(
                x,
                x,
                x,
                collectives.mesh((2,), ("cp",)),
                mask=mask,
                schedule=schedule,
                layout=First(),
                seq_len=64,
                collectives=collectives,
            )
        return info.type

    assert len({*SimulatedWorld(2, timeout=10).run(rank)}) == 1


class First(Contiguous):
    """All rows on the first rank."""

    __slots__ = ()

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Any:
        """Return all positions, and nothing for the other ranks."""
        return ((range(seq_len),), *[()] * (n - 1))


def test_unequal_lengths_are_compared_before_a_function_is_asked() -> None:
    table = torch.ones(16, dtype=torch.bool)
    mask = MaskSpec(causal=True, mask_mod=lambda b, h, i, j: table[j])

    def rank(rank: int, collectives: SimulatedCollectives) -> str:
        x = torch.randn(1, 2, [8, 9][rank], 4)
        with pytest.raises(InputError) as info:
            context_parallel_attention(
                x, x, x, collectives.mesh((2,), ("cp",)), mask=mask, collectives=collectives
            )
        return str(info.value)

    (said,) = {*SimulatedWorld(2, timeout=10).run(rank)}
    assert "unequal local lengths" in said


def test_a_batch_of_none_asks_no_function() -> None:
    def rank(rank: int, collectives: SimulatedCollectives) -> Any:
        x = torch.randn(0, 2, 8, 4)
        mesh = collectives.mesh((2,), ("cp",))
        mask = MaskSpec(causal=True, mask_mod=prefix)
        return context_parallel_attention(x, x, x, mesh, mask=mask, collectives=collectives).shape

    assert SimulatedWorld(2).run(rank) == [(0, 2, 8, 4)] * 2
