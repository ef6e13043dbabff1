"""Every mode, mask, layout and ratio of heads on real ranks equals one process."""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_cp import (
    Auto,
    ContextParallel,
    Contiguous,
    DoubleRing,
    Greedy,
    Layout,
    MaskSpec,
    PerDocument,
    Zigzag,
    context_parallel_attention,
)

from .strategies import cp_mesh, dense_attention, inputs, leaves, single, with_gradients

UNEVEN, EVEN = 37, 40
HEADS = ((4, 4), (4, 1), (6, 3))  # one kv head each, one for all, and shares that differ by rank
LAYOUTS = (Contiguous(), Zigzag(), PerDocument(), Greedy(3), Auto(2.0))


class Mode(NamedTuple):
    """How keys come, how many ranks exchange heads, and whether halves of queries are swapped."""

    schedule: Any
    degree: int = 1
    swapped: bool = False


class Case(NamedTuple):
    """One attention."""

    mode: Mode
    mask: MaskSpec
    layout: Layout
    heads: tuple[int, int]


SCHEDULES = ("gather", "direct", "ring", "double_ring")
MODES = {
    2: [*map(Mode, SCHEDULES), Mode(DoubleRing(2)), Mode("direct", 2)],
    4: [*map(Mode, SCHEDULES), *(Mode(s, 2) for s in SCHEDULES), Mode("direct", 4)],
}
SWAPPED = Mode("gather", swapped=True)


def every_mask(seq_len: int) -> list[MaskSpec]:
    return [
        MaskSpec(causal=causal, window=window, cu_seqlens=documents)
        for causal in (True, False)
        for window in (None, 7)
        for documents in (None, (0, 5, 6, 19, 30, seq_len))
    ]


def every_case(n: int, seq_len: int) -> list[Case]:
    """Return all combinations; swapped halves are for even rows that lie `Contiguous`."""
    masks = every_mask(seq_len)
    cases = [Case(*each) for each in itertools.product(MODES[n], masks, LAYOUTS, HEADS)]
    if seq_len == EVEN:
        cases += [Case(SWAPPED, *each) for each in itertools.product(masks, LAYOUTS[:1], HEADS)]
    return cases


class Core(nn.Module):
    """Attention as a model has it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Return the attention of ``[batch, heads, rows, size]``."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def attend(n: int, case: Case, seq_len: int, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of this rank's rows."""
    q, k, v, grad = tensors
    mode, local = case.mode, leaves(q, k, v)
    if mode.swapped:
        style = ContextParallel(
            seq_dim=2,
            head_dim=1,
            ulysses_degree=1,
            load_balance=True,
            mask=case.mask,
            seq_len=seq_len,
        )
        return with_gradients(style.apply(Core(), cp_mesh(n))(*local), local, grad)
    out = context_parallel_attention(
        *local,
        cp_mesh(n),
        mask=case.mask,
        layout=case.layout,
        ulysses_degree=mode.degree,
        schedule=mode.schedule,
        seq_len=seq_len,
    )
    return with_gradients(out, local, grad)


class Errors(NamedTuple):
    """The largest error of one result, and the sum of squares of all."""

    largest: float
    squares: float


def errors_between(results: list[Tensor], exact: list[Tensor]) -> list[Errors]:
    """Return the errors of output and gradients; what is no number is infinitely wrong."""
    away = [(a.double() - b).abs() for a, b in zip(results, exact, strict=True)]
    away = [x.nan_to_num(nan=torch.inf, posinf=torch.inf) for x in away]
    return [Errors(x.max().item() if x.numel() else 0.0, x.square().sum().item()) for x in away]


def exact_attention(tensors: tuple[Tensor, ...], mask: MaskSpec) -> list[Tensor]:
    """Return output and gradients of the definition, in float64."""
    return single(tuple(x.double() for x in tensors), mask, dense_attention)


def attend_all(
    rank: int, n: int, seq_len: int, dtype: torch.dtype, cases: list[Case]
) -> list[list[Errors]]:
    """Return the errors of this rank's rows, of every case."""
    tensors = {heads: inputs(*heads, seq_len, dtype=dtype) for heads in HEADS}
    exact = {
        (mask, heads): exact_attention(tensors[heads], mask)
        for mask in every_mask(seq_len)
        for heads in HEADS
    }
    answers = []
    for case in cases:
        mine = list(case.layout.indices(n, seq_len, case.mask)[rank])
        local = [x[:, :, mine] for x in tensors[case.heads]]
        reference = [x[:, :, mine] for x in exact[case.mask, case.heads]]
        answers.append(errors_between(attend(n, case, seq_len, local), reference))
    return answers


def over_ranks(per_rank: Iterable[list[Errors]]) -> list[Errors]:
    """Return the errors of all ranks' rows together."""
    return [
        Errors(max(part.largest for part in parts), sum(part.squares for part in parts))
        for parts in zip(*per_rank, strict=True)
    ]


def test_what_is_no_number_is_an_error_without_bound() -> None:
    exact = [torch.zeros(3, dtype=torch.double)]
    found = errors_between([torch.tensor([0.0, torch.nan, 1.0])], exact)
    assert over_ranks([errors_between(exact, exact), found]) == [Errors(torch.inf, torch.inf)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "seq_len", "step"),
    [
        (2, UNEVEN, 1),
        (2, EVEN, 1),
        (4, UNEVEN, 4),  # of each mode with each mask three cases or four
        (4, EVEN, 1),
        pytest.param(4, UNEVEN, 1, marks=pytest.mark.long),
    ],
)
def test_every_mode_mask_layout_and_ratio_of_heads_is_dense_attention_in_fp64(
    ranks: Any, n: int, seq_len: int, step: int
) -> None:
    cases = every_case(n, seq_len)[::step]
    if seq_len == EVEN:  # equal lengths are another matter for gather alone
        cases = [case for case in cases if case.mode.schedule == "gather"]
    per_rank = ranks(n).run(attend_all, n, seq_len, torch.float64, cases)
    answers = map(over_ranks, zip(*per_rank, strict=True))
    wrong = [
        (case, found)
        for case, found in zip(cases, answers, strict=True)
        if max(each.largest for each in found) > 1e-13
    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_mode_mask_layout_and_ratio_of_heads_is_as_exact_as_one_process_in_fp32(
    ranks: Any, n: int
) -> None:
    """By root mean square, as the next test says why."""
    allowed = {}
    for mask, heads in itertools.product(every_mask(EVEN), HEADS):
        tensors = inputs(*heads, EVEN, dtype=torch.float32)
        allowed[mask, heads] = errors_between(single(tensors, mask), exact_attention(tensors, mask))
    cases = every_case(n, EVEN)
    per_rank = ranks(n).run(attend_all, n, EVEN, torch.float32, cases)
    answers = map(over_ranks, zip(*per_rank, strict=True))
    wrong = [
        (case, found)
        for case, found in zip(cases, answers, strict=True)
        for ours, theirs in zip(found, allowed[case.mask, case.heads], strict=True)
        if ours.squares > 1.5**2 * theirs.squares
    ]
    assert wrong == []


def test_reversing_the_sequence_changes_the_largest_error_of_one_process_more_than_that() -> None:
    largest, mean = [], []
    for heads, seed, window in itertools.product(HEADS, range(4), (None, 7)):
        mask = MaskSpec(causal=False, window=window)
        tensors = inputs(*heads, EVEN, dtype=torch.float32, seed=seed)
        exact = exact_attention(tensors, mask)
        plain = errors_between(single(tensors, mask), exact)
        turned = [x.flip(2) for x in single(tuple(x.flip(2) for x in tensors), mask)]
        for ours, theirs in zip(errors_between(turned, exact), plain, strict=True):
            largest.append(ours.largest / theirs.largest)
            mean.append((ours.squares / theirs.squares) ** 0.5)
    assert max(largest) > 1.5
    assert max(mean) < 1.5


def repeat_all(rank: int, n: int, cases: list[Case]) -> list[bool]:
    """Return whether five calls give the same bits, for each case."""
    answers = []
    for case in cases:
        mine = list(case.layout.indices(n, EVEN, case.mask)[rank])
        local = [x[:, :, mine] for x in inputs(*case.heads, EVEN, dtype=torch.float32)]
        first, *rest = [attend(n, case, EVEN, local) for _ in range(5)]
        answers.append(all(all(map(torch.equal, first, again)) for again in rest))
    return answers


@pytest.mark.parametrize("n", [2, 4])
def test_five_repeats_of_every_mode_are_bitwise_equal(ranks: Any, n: int) -> None:
    packed = MaskSpec(causal=True, window=7, cu_seqlens=(0, 5, 6, 19, 30, EVEN))
    cases = [
        Case(mode, mask, layout, (6, 3))
        for mask in (packed, MaskSpec(causal=False))
        for mode, layout in [*((mode, Greedy(3)) for mode in MODES[n]), (SWAPPED, Contiguous())]
    ]
    assert ranks(n).run(repeat_all, n, cases) == [[True] * len(cases)] * n


def test_the_matrix_has_different_choices_of_auto() -> None:
    taken = {Auto(2.0).choice(4, UNEVEN, mask) for mask in every_mask(UNEVEN)}
    assert len(taken) >= 2
