"""The facts of torch's own tests of context parallelism, on CPU ranks; see ``torch_cases.md``.

In float32 with torch's tolerances; bfloat16 is measured against float64.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_cp import (
    Contiguous,
    Greedy,
    Layout,
    MaskSpec,
    Zigzag,
    context_parallel_attention,
)
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import leaves, with_gradients

ATOL, RTOL = 2e-6, 1e-5  # torch's, for its float32 kernel
N = 2
CAUSAL = MaskSpec(causal=True)
Given = tuple[Tensor, ...]


def uniform(batch: int, seq_len: int, dtype: torch.dtype = torch.float32) -> Given:
    """Return q, k, v as torch's tests draw them, and the gradient of a sum."""
    generator = torch.Generator().manual_seed(10)
    shape = batch, 4, seq_len, 32
    q, k, v = (torch.rand(shape, generator=generator).to(dtype) for _ in range(3))
    return q, k, v, torch.ones_like(q)


def sharded(given: Given, mask: MaskSpec, layout: Layout, **options: Any) -> list[Tensor]:
    """Return the output and gradients, or what ``return_lse`` adds, of all ranks' rows."""
    seq_len = given[0].shape[2]
    indices = layout.indices(N, seq_len, mask)

    def rank(rank: int, simulated: SimulatedCollectives) -> list[Tensor]:
        mine = list(indices[rank])
        local = leaves(*(x[:, :, mine] for x in given[:3]))
        mesh, called = simulated.mesh((N,), ("cp",)), {"mask": mask, "layout": layout, **options}
        out, lse = context_parallel_attention(
            *local, mesh, seq_len=seq_len, collectives=simulated, return_lse=True, **called
        )
        return [*with_gradients(out, local, given[3][:, :, mine]), lse]

    order = torch.tensor([i for held in indices for i in held]).argsort()
    parts = zip(*SimulatedWorld(N).run(rank), strict=True)
    return [torch.cat(part, 2)[:, :, order] for part in parts]


def alone(given: Given, seen: Tensor | None) -> list[Tensor]:
    """Return the output, gradients and log-sum-exp of one process."""
    local = leaves(*given[:3])
    out = F.scaled_dot_product_attention(*local, attn_mask=seen)
    scores = given[0].double() @ given[1].double().mT * 32**-0.5
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    return [*with_gradients(out, local, given[3]), scores.logsumexp(-1).to(out.dtype)]


@pytest.mark.parametrize("schedule", ["ring", "gather"])
@pytest.mark.parametrize(
    ("causal", "layout"), [(True, Zigzag()), (True, Contiguous()), (False, Contiguous())]
)
def test_attention_over_ranks_is_that_of_one_process_within_torchs_tolerances(
    causal: bool, layout: Layout, schedule: str
) -> None:
    given = uniform(2, 512)
    seen = torch.ones(512, 512, dtype=torch.bool).tril() if causal else None
    found = sharded(given, MaskSpec(causal=causal), layout, schedule=schedule)
    for mine, right in zip(found, alone(given, seen), strict=True):
        torch.testing.assert_close(mine, right, atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("layout", [Zigzag(), Contiguous()], ids=repr)
def test_bfloat16_is_about_as_exact_as_one_process(layout: Layout) -> None:
    given = uniform(2, 512, torch.bfloat16)
    seen = torch.ones(512, 512, dtype=torch.bool).tril()
    exact = alone(tuple(x.double() for x in given), seen)[:4]
    sides = sharded(given, CAUSAL, layout, schedule="ring")[:4], alone(given, seen)[:4]
    ours, theirs = (
        [float((x - y).square().mean().sqrt()) for x, y in zip(side, exact, strict=True)]
        for side in sides
    )
    for mine, single in zip(ours, theirs, strict=True):
        assert mine <= 2 * single


def causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


@pytest.mark.parametrize("seq_len", [512, 128])  # torch refuses the latter, of half a tile per rank
@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Greedy(4)], ids=repr)
def test_a_causal_mask_function_gives_output_log_sum_exp_and_gradients(
    layout: Layout, seq_len: int
) -> None:
    given = uniform(2, seq_len)
    seen = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    found = sharded(given, MaskSpec(causal=False, mask_mod=causal_mask), layout)
    for mine, right in zip(found, alone(given, seen), strict=True):
        torch.testing.assert_close(mine, right, atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Greedy(4)], ids=repr)
def test_a_document_mask_function_of_each_row_gives_output_log_sum_exp_and_gradients(
    layout: Layout,
) -> None:
    given, generator = uniform(2, 512), torch.Generator().manual_seed(10)
    starts = torch.zeros(2, 512, dtype=torch.int64)
    for row in starts:
        row[torch.randperm(511, generator=generator)[:27] + 1] = 1
    document = starts.cumsum(1)

    def documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (document[b][q_idx] == document[b][kv_idx]) & (q_idx >= kv_idx)

    seen = (document[:, :, None] == document[:, None]).unsqueeze(1)
    seen = seen & torch.ones(512, 512, dtype=torch.bool).tril()
    found = sharded(given, MaskSpec(causal=False, mask_mod=documents), layout)
    ends = tuple((0, *row.nonzero()[:, 0].tolist(), 512) for row in starts)
    same = sharded(given, MaskSpec(causal=True, cu_seqlens=ends), layout)
    for mine, packed, right in zip(found, same, alone(given, seen), strict=True):
        torch.testing.assert_close(mine, right, atol=ATOL, rtol=RTOL)
        torch.testing.assert_close(packed, right, atol=ATOL, rtol=RTOL)
