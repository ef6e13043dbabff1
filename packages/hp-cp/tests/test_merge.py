"""Merging parts of the keys is attention over all of them."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import MaskSpec, context_parallel_attention
from hp_cp._blockwise import fused_merge, fuses_merges, merge
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import MASKS, dense_attention, inputs

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


def test_merges_are_fused_where_triton_is_or_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for found in (None, object()):
        monkeypatch.setattr("hp_cp._blockwise.find_spec", lambda name, found=found: found)
        assert [fuses_merges(cpu, x) for x in (None, True, False)] == [False, True, False]
        there = found is not None
        assert [fuses_merges(cuda, x) for x in (None, True, False)] == [there, True, False]
