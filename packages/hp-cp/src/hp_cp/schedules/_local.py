"""No schedule at all: this rank holds the whole sequence, of all heads or of its share."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backends._interface import AttentionBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """How to attend a whole sequence."""

    causal: bool
    backend: AttentionBackend
    scale: float | None


def local_attention(q: Tensor, k: Tensor, v: Tensor, run: LocalRun) -> Tensor:
    """Return the attention of ``[batch, heads, rows, head_size]``; communicates nothing."""
    out: Tensor = _LocalAttention.apply(q, k, v, run)  # type: ignore[no-untyped-call]
    return out


class _LocalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: LocalRun) -> Tensor:
        ctx.run = run
        out, lse = run.backend.forward(q, k, v, causal=run.causal, scale=run.scale)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run: LocalRun = ctx.run
        dq, dk, dv = run.backend.backward(
            grad.contiguous(), *ctx.saved_tensors, causal=run.causal, scale=run.scale
        )
        return dq, dk, dv, None
