"""The gather schedule: every rank gets all keys and values once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_dtensor import Axis, Collectives, Work

from .._merge import accumulator, merge
from .._plan import Block
from ..backends._interface import AttentionBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One rank's part of a plan, and what carries it out.

    ``lengths`` are the key rows of each rank of ``axis``, ``rank`` this rank's place among them.
    """

    blocks: tuple[Block, ...]
    lengths: tuple[int, ...]
    rank: int
    axis: Axis
    backend: AttentionBackend
    scale: float | None
    collectives: Collectives


def gather_attention(q: Tensor, k: Tensor, v: Tensor, run: Run) -> Tensor:
    """Return the attention of this rank's rows ``[batch, q_heads, rows, head_size]``.

    Forward: one all-gather of keys and values (point to point where lengths differ), kept for the
    backward. Backward: one all-to-all that brings each rank the gradients of its keys and values,
    summed in rank order.
    """
    out: Tensor = _GatherAttention.apply(q, k, v, run)  # type: ignore[no-untyped-call]
    return out


class _GatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: Run) -> Tensor:
        kv = torch.stack([k, v])
        sources, work = _start_gather(kv, run)
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=accumulator(q.dtype))
        for i, block in enumerate(run.blocks):
            if i == 1:  # the first block needs nothing from the others
                work.wait()
            rows, keys = _slice(block.queries), _slice(block.keys)
            source = kv if block.source == run.rank else sources[block.source]
            part, part_lse = run.backend.forward(
                q[:, :, rows],
                source[0][:, :, keys],
                source[1][:, :, keys],
                causal=block.kind == "causal",
                scale=run.scale,
            )
            if i == 0:
                out, lse = part.to(accumulator(q.dtype)), part_lse
            else:
                merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        work.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, out, lse, *sources)
        ctx.run = run
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, *sources = ctx.saved_tensors
        run: Run = ctx.run
        grad = grad.contiguous()
        wide = accumulator(q.dtype)
        dq = q.new_zeros(q.shape, dtype=wide)
        wire, shares = _gradient_shares(sources, run, wide)
        own = [block for block in run.blocks if block.source == run.rank]
        others = [block for block in run.blocks if block.source != run.rank]

        def add(blocks: Sequence[Block]) -> None:
            for block in blocks:
                rows, keys = _slice(block.queries), _slice(block.keys)
                source, share = sources[block.source], shares[block.source]
                part_q, part_k, part_v = run.backend.backward(
                    grad[:, :, rows],
                    q[:, :, rows],
                    source[0][:, :, keys],
                    source[1][:, :, keys],
                    out[:, :, rows],
                    lse[:, :, rows],
                    causal=block.kind == "causal",
                    scale=run.scale,
                )
                dq[:, :, rows] += part_q
                share[0][:, :, keys] += part_k
                share[1][:, :, keys] += part_v

        add(others)
        work = _start_return(wire.to(q.dtype), sources, run)
        add(own)  # while the others' shares travel
        dk, dv = _in_rank_order(shares[run.rank], work, run)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None


def _start_gather(kv: Tensor, run: Run) -> tuple[list[Tensor], Work]:
    """Return every rank's ``[2, batch, kv_heads, rows, head_size]``, filled once the work is done.

    Where lengths differ, ranks send point to point, so that nobody receives padding.
    """
    n = len(run.lengths)
    if len(set(run.lengths)) == 1:
        whole = kv.new_empty((n * kv.shape[0], *kv.shape[1:]))
        work = run.collectives.all_gather(run.axis, [kv], [whole])
        return list(whole.view(n, *kv.shape).unbind(0)), work
    sources = [
        kv if rank == run.rank else kv.new_empty((*kv.shape[:3], rows, kv.shape[4]))
        for rank, rows in enumerate(run.lengths)
    ]
    peers = [rank for rank in range(n) if rank != run.rank]
    sends = {rank: kv for rank in peers if run.lengths[run.rank]}
    receives = {rank: sources[rank] for rank in peers if run.lengths[rank]}
    return sources, run.collectives.exchange(run.axis, sends, receives)


def _gradient_shares(
    sources: Sequence[Tensor], run: Run, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Return zeroed sums for every rank's keys and values; the others' lie in one flat buffer."""
    sizes = _sizes_without_own(sources, run)
    wire = sources[0].new_zeros(sum(sizes), dtype=dtype)
    shares = [
        torch.zeros_like(source, dtype=dtype) if i == run.rank else part.view(source.shape)
        for i, (source, part) in enumerate(zip(sources, wire.split(sizes), strict=True))
    ]
    return wire, shares


def _start_return(wire: Tensor, sources: Sequence[Tensor], run: Run) -> Work:
    """Send every other rank the gradient of its keys and values; receive as many of one's own."""
    mine = sources[run.rank].numel()
    receive = [0 if rank == run.rank else mine for rank in range(len(run.lengths))]
    return run.collectives.all_to_all(run.axis, wire, _sizes_without_own(sources, run), receive)


def _in_rank_order(own: Tensor, work: Work, run: Run) -> Tensor:
    """Return the sum of all ranks' shares, always added in rank order."""
    (received,) = work.wait()
    parts = list(received.view(len(run.lengths) - 1, *own.shape).unbind(0))
    parts.insert(run.rank, own)
    total = parts[0].to(own.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total


def _sizes_without_own(sources: Sequence[Tensor], run: Run) -> list[int]:
    return [0 if rank == run.rank else source.numel() for rank, source in enumerate(sources)]


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)
