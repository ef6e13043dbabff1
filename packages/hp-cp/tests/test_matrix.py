"""Every mode, mask, layout and ratio of heads on real ranks equals one process."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_cp import (
    Contiguous,
    Greedy,
    Layout,
    MaskSpec,
    PerDocument,
    Zigzag,
    context_parallel_attention,
)

from .strategies import (
    cp_mesh,
    dense_attention,
    errors,
    inputs,
    leaves,
    single,
    with_gradients,
)

SEQ_LEN = 37
DOCUMENTS = (0, 5, 6, 19, 30, 37)
EVERY_MASK = tuple(
    MaskSpec(causal=causal, window=window, cu_seqlens=documents)
    for causal in (True, False)
    for window in (None, 7)
    for documents in (None, DOCUMENTS)
)
EVERY_LAYOUT = (Contiguous(), Zigzag(), PerDocument(), Greedy(3))
HEADS = ((4, 4), (4, 2), (6, 1))
Case = tuple[Any, int, MaskSpec, Layout, tuple[int, int]]


def every_case(n: int) -> list[Case]:
    """Return schedule, Ulysses degree, mask, layout and heads of every combination."""
    modes: list[tuple[Any, int]] = [(s, 1) for s in ("gather", "direct", "ring")]
    modes += [("direct", n)]
    if n == 4:
        modes += [("double_ring", 1), ("direct", 2)]
    product = itertools.product(modes, EVERY_MASK, EVERY_LAYOUT, HEADS)
    return [(schedule, degree, *rest) for (schedule, degree), *rest in product]


def attend_all(rank: int, n: int, cases: list[Case], dtype: torch.dtype) -> list[list[Tensor]]:
    """Return the output and gradients of this rank's rows, of every case."""
    answers = []
    for schedule, degree, mask, layout, heads in cases:
        q, k, v, grad = inputs(*heads, SEQ_LEN, dtype=dtype)
        mine = list(layout.indices(n, SEQ_LEN, mask)[rank])
        local = leaves(*(x[:, :, mine] for x in (q, k, v)))
        out = context_parallel_attention(
            *local,
            cp_mesh(n),
            mask=mask,
            layout=layout,
            ulysses_degree=degree,
            schedule=schedule,
            seq_len=SEQ_LEN,
        )
        answers.append(with_gradients(out, local, grad[:, :, mine]))
    return answers


def in_order(parts: tuple[list[Tensor], ...], layout: Layout, mask: MaskSpec) -> list[Tensor]:
    """Return all ranks' rows in global order."""
    indices = layout.indices(len(parts), SEQ_LEN, mask)
    order = torch.tensor([i for held in indices for i in held]).argsort()
    return [torch.cat(part, 2)[:, :, order] for part in zip(*parts, strict=True)]


@pytest.mark.parametrize("n", [2, 4])
def test_every_mode_mask_layout_and_ratio_of_heads_is_dense_attention_in_fp64(
    ranks: Any, n: int
) -> None:
    cases = every_case(n)
    exact = {
        (mask, heads): single(inputs(*heads, SEQ_LEN), mask, dense_attention)
        for mask in EVERY_MASK
        for heads in HEADS
    }
    per_rank = ranks(n).run(attend_all, n, cases, torch.float64, timeout=120)
    for case, parts in zip(cases, zip(*per_rank, strict=True), strict=True):
        _, _, mask, layout, heads = case
        worst = max(errors(in_order(parts, layout, mask), exact[mask, heads]))
        assert worst <= 1e-13, case


@pytest.mark.parametrize("n", [2, 4])
def test_every_mode_mask_and_layout_is_as_exact_as_one_process_in_fp32(ranks: Any, n: int) -> None:
    heads = (4, 2)
    cases = [case for case in every_case(n) if case[-1] == heads]
    tensors = inputs(*heads, SEQ_LEN, dtype=torch.float32)
    exact, theirs = {}, {}
    for mask in EVERY_MASK:
        exact[mask] = single(tuple(x.double() for x in tensors), mask, dense_attention)
        theirs[mask] = spread(single(tensors, mask), exact[mask])
    per_rank = ranks(n).run(attend_all, n, cases, torch.float32, timeout=120)
    for case, parts in zip(cases, zip(*per_rank, strict=True), strict=True):
        _, _, mask, layout, _ = case
        ours = spread(in_order(parts, layout, mask), exact[mask])
        for mine, allowed in zip(ours, theirs[mask], strict=True):
            assert mine <= 1.5 * allowed, case


def spread(results: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Return each result's root mean square error; the largest of so few scatters by chance."""
    return [
        (a.double() - b).square().mean().sqrt().item() for a, b in zip(results, exact, strict=True)
    ]
