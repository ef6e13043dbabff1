"""Merging parts of the keys is attention over all of them."""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import BackendError, MaskSpec, Zigzag, context_parallel_attention
from hp_cp._blockwise import (
    _merge_at_once,
    fault_of_fused_merge,
    fused_merge,
    fuses_merges,
    merge,
)
from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import (
    MASKS,
    cp_mesh,
    dense_attention,
    inputs,
    leaves,
    single,
    with_gradients,
)

FULL = MASKS[1]
COMPILES = pytest.mark.filterwarnings("ignore")  # those of torch.compile about its own work


def part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    out, lse = (x.clone() for x in parts[0])
    for other in parts[1:]:
        merge(out, lse, *other)
    return out, lse


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 99))
def test_merging_parts_of_the_keys_in_any_order_is_attention_over_all(
    sizes: list[int], seed: int
) -> None:
    q, k, v, _ = inputs(2, 2, sum(sizes), seed=seed)
    pieces = list(zip(k.split(sizes, 2), v.split(sizes, 2), strict=True))
    parts = [part(q, *piece) for piece in pieces]
    expected = dense_attention(q, k, v, FULL)
    for order in permutations(parts):
        out, lse = merged(list(order))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
        torch.testing.assert_close(lse, part(q, k, v)[1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("first", [True, False])
def test_rows_without_keys_leave_the_other_side_bitwise(first: bool) -> None:
    q, k, v, _ = inputs(2, 2, 5)
    some = part(q, k, v)
    none = (torch.zeros_like(some[0]), torch.full_like(some[1], -torch.inf))
    out, lse = merged([none, some] if first else [some, none])
    assert torch.equal(out, some[0])
    assert torch.equal(lse, some[1])


def test_two_sides_without_keys_stay_without() -> None:
    out, lse = torch.zeros(1, 1, 3, 4), torch.full((1, 1, 3), -torch.inf)
    merge(out, lse, out.clone(), lse.clone())
    assert torch.equal(out, torch.zeros(1, 1, 3, 4))
    assert torch.equal(lse, torch.full((1, 1, 3), -torch.inf))


def test_a_nan_is_not_hidden() -> None:
    q, k, v, _ = inputs(1, 1, 4)
    out, lse = part(q, k, v)
    merge(out, lse, torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan))
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_heads_bits_do_not_depend_on_the_heads_beside_it(dtype: torch.dtype, rows: int) -> None:
    q, k, v, other = inputs(8, 8, rows, size=13, dtype=dtype)
    lse, other_lse = q.sum(-1), k.sum(-1)
    out, together = v.clone(), lse.clone()
    merge(out, together, other, other_lse)
    for heads in (slice(0, 2), slice(2, 3), slice(3, 8)):
        part_out, part_lse = v[:, heads].clone(), lse[:, heads].clone()
        merge(part_out, part_lse, other[:, heads], other_lse[:, heads])
        assert torch.equal(part_out, out[:, heads])
        assert torch.equal(part_lse, together[:, heads])


@pytest.mark.slow
@COMPILES
@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_a_fused_merge_gives_what_the_operations_give(
    dtype: torch.dtype, other: torch.dtype
) -> None:
    for rows, heads in ((7, 2), (33, 3)):
        q, k, v, grad = inputs(heads, heads, rows, size=13, dtype=dtype)
        lse, other_lse = q.sum(-1), k.sum(-1)
        lse[..., 0] = other_lse[..., 1] = other_lse[..., 0] = -torch.inf
        rows_first = v.transpose(1, 2).contiguous().transpose(1, 2)  # as sums are in memory
        given = grad.to(other), other_lse
        expected = v.clone(), lse.clone()
        merge(*expected, *given)
        found = rows_first.clone(memory_format=torch.preserve_format), lse.clone()
        fused_merge()(*found, *given)
        rounding = 4 * torch.finfo(dtype).eps
        for made, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(made, reference, rtol=rounding, atol=rounding)


@pytest.mark.slow
@COMPILES
def test_an_attention_with_fused_merges_is_that_of_the_operations() -> None:
    q, k, v, _ = inputs(2, 2, 40)
    mask = MaskSpec(causal=True, window=9)
    collectives = SimulatedCollectives(SimulatedWorld(1), 0)

    def attended(fuse: bool) -> Tensor:
        mesh = collectives.mesh((1,), ("cp",))
        return context_parallel_attention(
            q, k, v, mesh, mask=mask, fuse_merges=fuse, collectives=collectives
        )

    torch.testing.assert_close(attended(True), attended(False), rtol=0, atol=1e-14)


Fault = Callable[[torch.device, torch.dtype], str | None]


def triton_here(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Let every device be one for which merges are fused by default, and the try end as told."""
    monkeypatch.setattr("hp_cp._blockwise.find_spec", lambda name: object())
    monkeypatch.setattr("hp_cp._blockwise.fault_of_fused_merge", fault)


def test_merges_are_fused_where_triton_is_or_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda, dtype = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
    triton_here(monkeypatch, lambda device, dtype: None)
    for found in (None, object()):
        monkeypatch.setattr("hp_cp._blockwise.find_spec", lambda name, found=found: found)
        asked = None, True, False
        assert [fuses_merges(cpu, dtype, x) for x in asked] == [False, True, False]
        there = found is not None
        assert [fuses_merges(cuda, dtype, x) for x in asked] == [there, True, False]


def without_compiler(*args: Any) -> None:
    """Raise what torch.compile raises if Triton finds no C compiler."""
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\n")


def test_a_kernel_that_cannot_be_compiled_is_tried_once_and_falls_back_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = []

    def compiled(*args: Any) -> None:
        tries.append(args)
        without_compiler()

    monkeypatch.setattr("hp_cp._blockwise.fused_merge", lambda: compiled)
    monkeypatch.setattr("hp_cp._blockwise.find_spec", lambda name: object())
    fault_of_fused_merge.cache_clear()
    cpu = torch.device("cpu")  # where the try's tensors are; "cuda" decides only whether to try
    fault = fault_of_fused_merge(cpu, torch.float32)
    assert fault == (
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."
    )
    monkeypatch.setattr(
        "hp_cp._blockwise.fault_of_fused_merge", lambda _, dtype: fault_of_fused_merge(cpu, dtype)
    )
    cuda = torch.device("cuda")
    with pytest.warns(UserWarning, match=r"merges run as six operations.*find C compiler"):
        assert not fuses_merges(cuda, torch.float32, None)
    assert not fuses_merges(cuda, torch.float32, False)
    assert len(tries) == 1
    fault_of_fused_merge.cache_clear()


def test_a_kernel_that_was_asked_for_and_cannot_be_compiled_is_refused_before_communication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hp_cp._blockwise.fused_merge", lambda: without_compiler)
    fault_of_fused_merge.cache_clear()
    tensors = inputs(2, 2, 16)
    record = RecordingCollectives(SimulatedCollectives(SimulatedWorld(2), 0))
    mesh = SimulatedCollectives(SimulatedWorld(2), 0).mesh((2,), ("cp",))
    q, k, v = (x.chunk(2, 2)[0] for x in tensors[:3])
    with pytest.raises(BackendError, match=r"fuse_merges=True, but .*find C compiler.* leave"):
        context_parallel_attention(q, k, v, mesh, mask=FULL, fuse_merges=True, collectives=record)
    assert record.by_axis == {}  # not even lengths were compared
    fault_of_fused_merge.cache_clear()


def test_plain_attention_on_all_heads_merges_nothing_and_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hp_cp._blockwise.fused_merge", lambda: without_compiler)
    q, k, v, _ = inputs(2, 2, 16)
    collectives = SimulatedCollectives(SimulatedWorld(1), 0)
    mesh = collectives.mesh((1,), ("cp",))
    causal = MaskSpec(causal=True)
    given: dict[str, Any] = {"mask": causal, "collectives": collectives}
    fused = context_parallel_attention(q, k, v, mesh, fuse_merges=True, **given)
    assert torch.equal(fused, context_parallel_attention(q, k, v, mesh, **given))


def some_fused(rank: int, schedule: Any) -> tuple[list[Tensor], dict[Any, int]]:
    """Return the results and the calls of a rank; merges are one kernel on odd ranks alone."""
    tensors = inputs(2, 2, 32)
    mine = list(Zigzag().indices(4, 32)[rank])
    q, k, v, grad = (x[:, :, mine] for x in tensors)
    local, record = leaves(q, k, v), RecordingCollectives()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hp_cp._attention.fuses_merges", lambda *given: rank % 2 == 1)
        patch.setattr("hp_cp._blockwise.fused_merge", lambda: _merge_at_once)
        out = context_parallel_attention(
            *local,
            cp_mesh(4),
            mask=MaskSpec(causal=True, window=29),
            layout=Zigzag(),
            schedule=schedule,
            collectives=record,
        )
        results = with_gradients(out, local, grad)
    return results, {key: traffic.calls for key, traffic in record.by_call.items()}


@pytest.mark.parametrize("schedule", ["direct", "ring", "gather"])
def test_ranks_that_differ_in_whether_merges_are_fused_agree_on_communication(
    ranks: Any, schedule: str
) -> None:
    found = ranks(4).run(some_fused, schedule)
    assert all(calls == found[0][1] for _, calls in found)
    order = [i for held in Zigzag().indices(4, 32) for i in held]
    expected = single(inputs(2, 2, 32), MaskSpec(causal=True, window=29))
    for parts, whole in zip(zip(*(x for x, _ in found), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts, 2), whole[:, :, order], rtol=0, atol=1e-13)
