"""What a plan asks of a kernel."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .._ranges import Kernel

GRID = 65_535  # places of a CUDA grid's later dims, over one of which kernels lay the batch


@runtime_checkable
class AttentionBackend(Protocol):
    """One block of attention, forward and backward: ``full``, or a ``causal`` square.

    Shapes: q ``[batch, q_heads, rows, head_size]``, k and v ``[batch, kv_heads, keys, head_size]``
    with ``q_heads`` a multiple of ``kv_heads``, lse ``[batch, q_heads, rows]`` in natural
    logarithms and in the accumulator's dtype. Tensors may be views; the last dim is dense.
    ``causal`` blocks are square. No batch has more than 65,535 rows. ``scale=None`` means
    ``head_size ** -0.5``.
    """

    @property
    def name(self) -> str:
        """Return what configurations call it."""
        ...

    def supports(
        self, kernel: Kernel, device: torch.device, dtype: torch.dtype, head_size: int
    ) -> str | None:
        """Return why blocks of this kind cannot be computed, or None where they can.

        The answer must not depend on the rank: a plan is refused on all of them or on none.
        """
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


@runtime_checkable
class PackedBackend(AttentionBackend, Protocol):
    """A backend that also computes many blocks of one kind in one call.

    Block ``i`` is the ``i``-th stretch of ``rows[i]`` queries against the ``i``-th stretch of
    ``keys[i]`` keys; stretches follow each other, so that tensors have the shapes that
    `AttentionBackend` says with the sums of rows and of keys. Its rows see no other stretch.
    """

    def forward_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Sequence[int],
        keys: Sequence[int],
        *,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output, shaped like q, and the log-sum-exp; both new tensors."""
        ...

    def backward_packed(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        rows: Sequence[int],
        keys: Sequence[int],
        *,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the blocks' shares of dq, dk, dv; ``out`` and ``lse`` are over all keys."""
        ...
