"""The executor: a plan's blocks, forward and backward, in the order in which keys come."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._intervals import Ranges, Ranks, size
from .._merge import accumulator, merge
from ..plans._blocks import Block
from ._calls import Calls
from ._fetch import Arrivals, fetch
from ._kernels import block_backward, block_forward
from ._returns import Pair, returns_of
from ._run import Held, Run


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
        rows = _Rows(q)
        kept: list[Tensor] = []
        keep = run.keep_kv and any(ctx.needs_input_grad)
        with Calls(run.peers) as calls:
            for source, held in fetch(k, v, run, calls):
                if keep and source != run.rank:
                    kept += (held.k, held.v)
                for block in run.blocks[source]:
                    part = q[:, :, _slice(block.queries)]
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
        dq = _Sum(q)
        own = _KeySum(k, run.own_rows)

        def add(block: Block, held: Held, share: _KeySum) -> None:
            rows = _slice(block.queries)
            around = grad[:, :, rows], q[:, :, rows], *_keys(held, block)
            over_all = out[:, :, rows], lse[:, :, rows]
            part_q, part_k, part_v = block_backward(block, *around, *over_all, run)
            dq.add(block.queries, part_q)
            share.add(block.keys, part_k, part_v)

        with Calls(run.peers) as calls:
            returns = returns_of(run, k, calls)
            for source, held in _kept_or_fetched(k, v, kept, run, calls):
                share = own if source == run.rank else _KeySum(k, held.rows)
                for block in run.blocks[source]:
                    add(block, held, share)
                if source != run.rank:
                    returns.add(source, share.pair if run.blocks[source] else None)
            returns.finish(own.pair)
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


class _Rows:
    """The output and log-sum-exp of all rows, over the keys so far."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._wide = accumulator(q.dtype)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def merge(self, queries: range, out: Tensor, lse: Tensor) -> None:
        """Take the attention of some rows over further keys."""
        if self._out is None or self._lse is None:
            if len(queries) == self._q.shape[2]:  # kept as it is while no other part comes
                self._out, self._lse = out, lse
                return
            self._out = self._q.new_zeros(self._q.shape, dtype=self._wide)
            self._lse = self._q.new_full(self._q.shape[:3], -torch.inf, dtype=self._wide)
        rows = _slice(queries)
        self._out, self._lse = self._out.to(self._wide), self._lse.to(self._wide)
        merge(self._out[:, :, rows], self._lse[:, :, rows], out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return both; without any row both are empty."""
        if self._out is None or self._lse is None:
            lse = self._q.new_empty(self._q.shape[:3], dtype=self._wide)
            return self._q.new_empty(self._q.shape), lse
        return self._out.to(self._q.dtype), self._lse


class _Sum:
    """A sum of parts of rows, in the accumulator's dtype."""

    def __init__(self, like: Tensor, rows: int | None = None) -> None:
        self._like = like
        self._rows = like.shape[2] if rows is None else rows
        self._total: Tensor | None = None

    def add(self, rows: range, part: Tensor) -> None:
        """Add a new tensor to some rows."""
        wide = accumulator(self._like.dtype)
        if self._total is None and len(rows) == self._rows:
            self._total = part.to(wide)
            return
        self.total[:, :, _slice(rows)] += part

    @property
    def total(self) -> Tensor:
        """Return the sum so far."""
        if self._total is None:
            batch, heads, _, width = self._like.shape
            shape = (batch, heads, self._rows, width)
            self._total = self._like.new_zeros(shape, dtype=accumulator(self._like.dtype))
        return self._total


class _KeySum:
    """Gradients of the keys and values that were held."""

    def __init__(self, like: Tensor, rows: Ranges) -> None:
        self._places = Ranks(rows)
        self._k, self._v = _Sum(like, size(rows)), _Sum(like, size(rows))

    def add(self, keys: range, dk: Tensor, dv: Tensor) -> None:
        """Add a block's share."""
        rows = self._places.of(keys)
        self._k.add(rows, dk)
        self._v.add(rows, dv)

    @property
    def pair(self) -> Pair:
        """Return both sums."""
        return self._k.total, self._v.total


def _keys(held: Held, block: Block) -> tuple[Tensor, Tensor]:
    rows = _slice(Ranks(held.rows).of(block.keys))
    return held.k[:, :, rows], held.v[:, :, rows]


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)
