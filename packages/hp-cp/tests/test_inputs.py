"""Any order of dims, any scale, autocast, compiled callers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_cp import MaskSpec, context_parallel_attention

from .strategies import cp_mesh, inputs, leaves, with_gradients

CAUSAL = MaskSpec(causal=True)


def other_dims(
    rank: int, n: int, degree: int, seq_dim: int, head_dim: int, tensors: tuple[Tensor, ...]
) -> list[Tensor]:
    order = [3 - seq_dim - head_dim, head_dim, seq_dim, 3]
    back = [order.index(dim) for dim in range(4)]
    q, k, v, grad = (x.chunk(n, 2)[rank].permute(back) for x in tensors)
    local = leaves(q, k, v)
    out = context_parallel_attention(
        *local,
        cp_mesh(n),
        mask=CAUSAL,
        ulysses_degree=degree,
        scale=0.3,
        seq_dim=seq_dim,
        head_dim=head_dim,
    )
    return [x.permute(order) for x in with_gradients(out, local, grad)]


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(("seq_dim", "head_dim"), [(1, 2), (0, 2), (0, 1)])
def test_any_order_of_dims_and_any_scale(
    ranks: Any, degree: int, seq_dim: int, head_dim: int
) -> None:
    q, k, v, grad = inputs(4, 2, 16, batch=3)
    per_rank = ranks(2).run(other_dims, 2, degree, seq_dim, head_dim, (q, k, v, grad))
    whole = leaves(q, k, v)
    reference = F.scaled_dot_product_attention(*whole, is_causal=True, scale=0.3, enable_gqa=True)
    expected = with_gradients(reference, whole, grad)
    for parts, right in zip(zip(*per_rank, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts, 2), right, rtol=0, atol=1e-13)


def under_autocast(rank: int, degree: int, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    q, k, v, grad = (x.chunk(2, 2)[rank] for x in tensors)
    local = leaves(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        out = context_parallel_attention(*local, cp_mesh(2), mask=CAUSAL, ulysses_degree=degree)
    return with_gradients(out, local, grad.to(out.dtype))


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_autocast_casts_as_it_casts_sdpa(ranks: Any, dtype: torch.dtype, degree: int) -> None:
    tensors = inputs(2, 2, 8, dtype=dtype)
    whole = leaves(*tensors[:3])
    with torch.autocast("cpu", torch.bfloat16):
        reference = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected = with_gradients(reference, whole, tensors[3].to(reference.dtype))
    parts = zip(*ranks(2).run(under_autocast, degree, tensors), strict=True)
    # Values up to 4 have a last place of 2 eps; both sides round, to q, k, v's and to this dtype.
    atol = 1e-13 if dtype == torch.float64 else 4 * torch.finfo(torch.bfloat16).eps
    for part, right in zip(parts, expected, strict=True):
        torch.testing.assert_close(torch.cat(part, 2), right, rtol=0, atol=atol)


def compiled(rank: int, degree: int, tensors: tuple[Tensor, ...]) -> list[list[Tensor]]:
    """Return the results of a caller as it is and compiled."""
    q, k, v, grad = (x.chunk(2, 2)[rank] for x in tensors)
    mesh = cp_mesh(2)

    def caller(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = context_parallel_attention(2 * q, k, v, mesh, mask=CAUSAL, ulysses_degree=degree)
        return out * 3

    results = []
    for call in (caller, torch.compile(caller, backend="eager")):
        local = leaves(q, k, v)
        results.append(with_gradients(call(*local), local, grad))
    return results


@pytest.mark.parametrize("degree", [1, 2])
def test_a_compiled_caller_gets_the_same_bits(ranks: Any, degree: int) -> None:
    for plain, traced in ranks(2).run(compiled, degree, inputs(4, 2, 16)):
        assert all(map(torch.equal, plain, traced))
