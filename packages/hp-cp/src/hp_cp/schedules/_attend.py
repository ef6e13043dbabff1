"""The executor: a plan's blocks, forward and backward, in the order in which keys come."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._blocks import Block
from .._lineage import Origin
from ._calls import Calls
from ._fetch import Arrivals, fetch
from ._kernels import backward_blocks, forward_blocks
from ._returns import returns_of
from ._run import Held, Run
from ._sums import KeySum, RowsOut, RowSum


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
                forward_blocks(run.blocks[source], q, held, run, rows.merge)
        out, lse = rows.result()
        ctx.save_for_backward(q, k, v, out, lse, *kept)
        ctx.run, ctx.origin = run, Origin(run.plan)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *kept = ctx.saved_tensors
        run: Run = ctx.run
        grad = grad.contiguous()
        dq = RowSum(q)
        own = KeySum(k, run.own_rows)

        with Calls(run.peers) as calls:
            returns = returns_of(run, own, k, calls)
            for source, held in _kept_or_fetched(k, v, kept, run, calls):
                share = own if source == run.rank else KeySum(k, held.rows)
                blocks = run.blocks[source]

                def add(
                    block: Block, part: Tensor, dk: Tensor, dv: Tensor, share: KeySum = share
                ) -> None:
                    dq.add(block.queries, part)
                    share.add(block.keys, dk, dv)

                backward_blocks(blocks, grad, q, held, out, lse, run, add)
                if source != run.rank:
                    returns.add(source, share.pair if blocks else None)
            returns.finish()
        own_k, own_v = own.pair
        return dq.total.to(q.dtype), own_k.to(k.dtype), own_v.to(v.dtype), None


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
