"""The executor: a plan's blocks, forward and backward, in the order in which keys come."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._intervals import Ranks
from ..plans._blocks import Block
from ._calls import Calls
from ._fetch import Arrivals, fetch
from ._kernels import block_backward, block_forward
from ._returns import returns_of
from ._run import Held, Run
from ._sums import KeySum, RowsOut, RowSum, as_slice


def attend(q: Tensor, k: Tensor, v: Tensor, run: Run) -> Tensor:
    """Return the attention of this rank's rows ``[batch, q_heads, rows, head_size]``.

    Communicates what the schedule does, in the forward and again in the backward, whose kernels get
    the output and log-sum-exp over all keys.
    """
    out: Tensor = _Attend.apply(q, k, v, run)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: Run) -> Tensor:
        rows = RowsOut(q)
        kept: list[Tensor] = []
        keep = run.keep_kv and any(ctx.needs_input_grad)
        with Calls(run.peers) as calls:
            for source, held in fetch(k, v, run, calls):
                if keep and source != run.rank:
                    kept += (held.k, held.v)
                for block in run.blocks[source]:
                    part = q[:, :, as_slice(block.queries)]
                    rows.merge(block.queries, *block_forward(block, part, *_keys(held, block), run))
        out, lse = rows.result()
        ctx.save_for_backward(q, k, v, out, lse, *kept)
        ctx.run = run
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *kept = ctx.saved_tensors
        run: Run = ctx.run
        grad = grad.contiguous()
        dq = RowSum(q)
        own = KeySum(k, run.own_rows)

        def add(block: Block, held: Held, share: KeySum) -> None:
            rows = as_slice(block.queries)
            around = grad[:, :, rows], q[:, :, rows], *_keys(held, block)
            over_all = out[:, :, rows], lse[:, :, rows]
            part_q, part_k, part_v = block_backward(block, *around, *over_all, run)
            dq.add(block.queries, part_q)
            share.add(block.keys, part_k, part_v)

        with Calls(run.peers) as calls:
            returns = returns_of(run, own, k, calls)
            for source, held in _kept_or_fetched(k, v, kept, run, calls):
                share = own if source == run.rank else KeySum(k, held.rows)
                for block in run.blocks[source]:
                    add(block, held, share)
                if source != run.rank:
                    returns.add(source, share.pair if run.blocks[source] else None)
            returns.finish()
        dk, dv = own.pair
        return dq.total.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _kept_or_fetched(
    k: Tensor, v: Tensor, kept: Sequence[Tensor], run: Run, calls: Calls
) -> Arrivals:
    """Return all parts of keys; own last where all are here, while the others' gradients travel."""
    if not kept:
        return fetch(k, v, run, calls)
    return _from_kept(Held(k, v, run.own_rows), kept, run)


def _from_kept(own: Held, kept: Sequence[Tensor], run: Run) -> Iterator[tuple[int, Held]]:
    pairs = zip(kept[::2], kept[1::2], strict=True)
    others = (source for source in run.blocks if source != run.rank)
    for source, (k, v) in zip(others, pairs, strict=True):
        yield source, Held(k, v, run.wanted[source])
    yield run.rank, own


def _keys(held: Held, block: Block) -> tuple[Tensor, Tensor]:
    rows = as_slice(Ranks(held.rows).of(block.keys))
    return held.k[:, :, rows], held.v[:, :, rows]
