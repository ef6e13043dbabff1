"""One block through a backend, which knows full rectangles and causal squares."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..plans._blocks import Block
from ._run import Run


def block_forward(block: Block, q: Tensor, k: Tensor, v: Tensor, run: Run) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of a block's rows; both are new tensors."""
    k, v = (_per_query(x, run.repeats) for x in (k, v))
    q, k, v = (_tiled(x, block) for x in (q, k, v))
    out, lse = run.backend.forward(q, k, v, causal=block.kind != "full", scale=run.scale)
    return _untiled(out, block), _untiled(lse, block)


def block_backward(
    block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, run: Run
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's share of dq, dk and dv; ``out`` and ``lse`` are over all keys."""
    k, v = (_per_query(x, run.repeats) for x in (k, v))
    tensors = [_tiled(x, block) for x in (grad, q, k, v, out, lse)]
    causal = block.kind != "full"
    dq, dk, dv = run.backend.backward(*tensors, causal=causal, scale=run.scale)
    dq, dk, dv = (_untiled(x, block) for x in (dq, dk, dv))
    return dq, _per_kv(dk, run.repeats), _per_kv(dv, run.repeats)


def _tiled(x: Tensor, block: Block) -> Tensor:
    """Return equal squares as further batch rows, anticausal ones from their end.

    With rows and keys reversed, row ``i`` of an anticausal square sees the keys up to the ``i``-th.
    """
    if block.tiles > 1:
        x = x.unflatten(2, (block.tiles, -1)).transpose(1, 2).flatten(0, 1)
    return x.flip(2) if block.kind == "anticausal" else x


def _untiled(x: Tensor, block: Block) -> Tensor:
    if block.kind == "anticausal":
        x = x.flip(2)
    if block.tiles > 1:
        x = x.unflatten(0, (-1, block.tiles)).transpose(1, 2).flatten(2, 3)
    return x


def _per_query(x: Tensor, repeats: Sequence[int] | None) -> Tensor:
    """Return kv heads once for each query head that reads them, where groups are unequal."""
    return x if repeats is None else x[:, list(repeats)]


def _per_kv(x: Tensor, repeats: Sequence[int] | None) -> Tensor:
    if repeats is None:
        return x
    counts = [repeats.count(head) for head in range(repeats[-1] + 1)]
    return torch.cat([part.sum(1, keepdim=True) for part in x.split(counts, 1)], 1)
