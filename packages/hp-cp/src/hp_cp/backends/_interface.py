"""What a plan asks of a kernel."""

from typing import Protocol

import torch
from torch import Tensor

from .._plan import Kind


class AttentionBackend(Protocol):
    """One block of attention, forward and backward.

    Shapes: q ``[batch, q_heads, rows, head_size]``, k and v ``[batch, kv_heads, keys, head_size]``
    with ``q_heads`` a multiple of ``kv_heads``, lse ``[batch, q_heads, rows]`` in natural
    logarithms and in the accumulator's dtype. Tensors may be views; the last dim is dense.
    ``causal`` blocks are square. ``scale=None`` means ``head_size ** -0.5``.
    """

    name: str

    def supports(self, kind: Kind, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why such a block cannot be computed, or None where it can."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output, shaped like q, and the log-sum-exp; both new tensors."""
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's share of dq, dk, dv.

        ``out`` and ``lse`` are those of the rows over *all* their keys, not of this block alone.
        """
        ...
