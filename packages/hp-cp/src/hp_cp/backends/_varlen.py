"""Many blocks in one call: the flash kernel for rows of stretches that follow each other."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .._torch import Finished, varlen_cuda, varlen_cuda_backward
from ._fused import SDPA, FusedBackend


class VarlenBackend(FusedBackend):
    """The flash kernels on CUDA; blocks of one kind in one launch, as packed documents have many.

    A block that is alone is computed as ``sdpa`` does.
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
        """Return the output and the log-sum-exp."""
        edges = _edges(rows, q), _edges(keys, k)
        longest = max(rows), max(keys)
        batch, q, k, v = q.shape[0], _flat(q), _flat(k), _flat(v)
        out, lse = varlen_cuda(q, k, v, edges, longest, causal, scale)
        return _unflat(out, batch), lse.view(lse.shape[0], batch, -1).transpose(0, 1)

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
        """Return the blocks' shares of dq, dk, dv."""
        edges = _edges(rows, q), _edges(keys, k)
        longest = max(rows), max(keys)
        batch, grad, q, k, v, out = q.shape[0], *map(_flat, (grad, q, k, v, out))
        lse = lse.transpose(0, 1).flatten(1).contiguous()
        finished = Finished(grad, q, k, v, out, lse, causal, scale)
        dq, dk, dv = varlen_cuda_backward(finished, edges, longest)
        return _unflat(dq, batch), _unflat(dk, batch), _unflat(dv, batch)


def _flat(x: Tensor) -> Tensor:
    """Return ``[batch, heads, rows, size]`` as dense ``[batch * rows, heads, size]``."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _unflat(x: Tensor, batch: int) -> Tensor:
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


def _edges(lengths: Sequence[int], x: Tensor) -> Tensor:
    """Return where stretches begin and end, those of each batch row after another."""
    edges = [0, *accumulate(list(lengths) * x.shape[0])]
    # Pinned, so that the host need not wait for the device to take them.
    made = torch.tensor(edges, dtype=torch.int32, pin_memory=x.is_cuda)
    return made.to(x.device, non_blocking=True)


VARLEN = VarlenBackend("varlen", {"cuda": SDPA.kernels["cuda"]})
