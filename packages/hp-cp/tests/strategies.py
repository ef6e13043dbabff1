"""What the tests draw, and the dense attention that they compare with."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from hp_cp import Contiguous, Layout, MaskSpec, Zigzag

LAYOUTS: tuple[Layout, ...] = (Contiguous(), Zigzag())
MASKS = (MaskSpec(causal=True), MaskSpec(causal=False))

Three = tuple[Tensor, Tensor, Tensor]

worlds = st.integers(1, 9)
seq_lens = st.integers(0, 200)
layouts = st.sampled_from(LAYOUTS)
masks = st.sampled_from(MASKS)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> Tensor:
    """Return attention by its definition, of ``[batch, heads, seq, size]``."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    out: Tensor = scores.softmax(-1) @ v
    return out


def inputs(
    q_heads: int,
    kv_heads: int,
    seq_len: int,
    *,
    batch: int = 2,
    size: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and a gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        torch.randn(batch, heads, seq_len, size, generator=generator, dtype=torch.float64)
        for heads in (q_heads, kv_heads, kv_heads, q_heads)
    )
    return q.to(dtype), k.to(dtype), v.to(dtype), grad.to(dtype)


def with_gradients(out: Tensor, leaves: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the leaves."""
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def leaves(*tensors: Tensor) -> Three:
    """Return copies of q, k and v that require gradients."""
    q, k, v = (x.detach().clone().requires_grad_() for x in tensors)
    return q, k, v
