"""Exchanges around the attention: rows for heads (Ulysses), or halves of queries.

Ulysses goes from a part of the sequence with all heads to all of it with some heads: Jacobs et al.,
DeepSpeed Ulysses, arXiv 2309.14509, section 3. Rows travel sequence-major, so that received rows
are already in rank order and only layouts that interleave ranks need another copy. Tensors of
several head sizes travel in one buffer, in units of a size that all of them are multiples of. Where
all ranks have equally many heads of each tensor, those of all ranks are packed at once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from typing import Any

import torch
from torch import Tensor

from ._blockwise import accumulator, first_order
from ._layouts import Chunks, lengths_of, out_of_order
from ._mesh import Peers, RankGroups
from ._plan import AttentionPlan, HeadShare, rank_plan_of

HeadRanges = Sequence[Sequence[range]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Who trades rows for heads: ``chunks`` and ``shares`` of each of ``peers``, in their order."""

    peers: Peers
    chunks: Chunks
    shares: tuple[HeadShare, ...]


Move = Callable[[Sequence[Tensor], HeadRanges, Exchange], list[Tensor]]


def exchange_of(plan: AttentionPlan, groups: RankGroups) -> Exchange:
    """Return the Ulysses exchange of this rank and its neighbours."""
    mine = rank_plan_of(plan, groups.rank)
    return Exchange(peers=groups.ulysses, chunks=mine.chunks, shares=mine.shares)


def rows_to_heads(q: Tensor, k: Tensor, v: Tensor, exchange: Exchange) -> tuple[Tensor, ...]:
    """Return ``[batch, rows, heads, size]`` as this rank's heads of the rows of all peers.

    The head size of v may be another. Rows are in global order of positions. A kv head goes to
    every rank that reads it. One all-to-all; backward one more, in which the copies of a head sum
    in rank order.
    """
    heads = [[h.q for h in exchange.shares], *[[h.kv for h in exchange.shares]] * 2]
    out: tuple[Tensor, ...] = _Exchanged.apply(_to_heads, _to_rows, exchange, heads, q, k, v)  # type: ignore[no-untyped-call]
    return out


def heads_to_rows(x: Tensor, exchange: Exchange) -> Tensor:
    """Return this rank's query heads of all peers' rows as all heads of its own rows.

    The inverse of `rows_to_heads` for q. One all-to-all; backward one more.
    """
    heads = [[h.q for h in exchange.shares]]
    (out,) = _Exchanged.apply(_to_rows, _to_heads, exchange, heads, x)  # type: ignore[no-untyped-call]
    result: Tensor = out
    return result


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, there: Move, back: Move, exchange: Exchange, heads: HeadRanges, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.saved = back, exchange, heads
        return tuple(there(tensors, heads, exchange))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        back, exchange, heads = ctx.saved
        return None, None, None, None, *back(grads, heads, exchange)


def _to_heads(tensors: Sequence[Tensor], heads: HeadRanges, exchange: Exchange) -> list[Tensor]:
    """Send every peer its heads of this rank's rows; return this rank's heads of all rows."""
    batch, rows = tensors[0].shape[:2]
    step, units = _units(tensors)
    counts = _counts(heads, units)
    send = tensors[0].new_empty(rows * batch * sum(counts) * step)
    blocks = _blocks(send, counts, heads, rows, batch, step)
    for block, of_block in zip(blocks, zip(*_by_block(heads), strict=True), strict=True):
        at = 0
        for x, held, unit in zip(tensors, of_block, units, strict=True):
            ranks = block.shape[0]
            count = len(held) // ranks
            stop = at + count * unit
            part = x[:, :, held.start : held.stop].unflatten(2, (ranks, -1))
            _heads(block[:, :, :, at:stop], count, unit).copy_(part.permute(2, 1, 0, 3, 4))
            at = stop
    mine, lengths = counts[exchange.peers.index], lengths_of(exchange.chunks)
    per_row = batch * step
    received = exchange.peers.all_to_all(
        send,
        [rows * per_row * count for count in counts],
        [length * per_row * mine for length in lengths],
    ).view(sum(lengths), batch, mine, step)
    whole = sort_rows(received, exchange.chunks, 0)
    held_here = [len(of_ranks[exchange.peers.index]) for of_ranks in heads]
    sizes = [count * unit for count, unit in zip(held_here, units, strict=True)]
    # Parts that autograd takes for tensors of their own: a caller may change one in place.
    parts = whole.transpose(0, 1).unsafe_split_with_sizes(sizes, dim=2)
    return [
        x if unit == 1 else _heads(x, count, unit).data
        for x, count, unit in zip(parts, held_here, units, strict=True)
    ]


def _to_rows(tensors: Sequence[Tensor], heads: HeadRanges, exchange: Exchange) -> list[Tensor]:
    """Send every peer its rows of this rank's heads; return all heads of this rank's rows.

    Heads that come from several ranks are summed, in rank order.
    """
    batch = tensors[0].shape[0]
    step, units = _units(tensors)
    index, lengths = exchange.peers.index, lengths_of(exchange.chunks)
    counts = _counts(heads, units)
    rows, per_row = lengths[index], batch * step
    received = exchange.peers.all_to_all(
        _by_rank(tensors, step, units, exchange.chunks).flatten(),
        [length * per_row * counts[index] for length in lengths],
        [rows * per_row * count for count in counts],
    )
    blocks = _blocks(received, counts, heads, rows, batch, step)
    return [_assemble(blocks, heads, units, i) for i in range(len(tensors))]


def _by_rank(tensors: Sequence[Tensor], step: int, units: Sequence[int], chunks: Chunks) -> Tensor:
    """Return ``[rows, batch, units, step]`` of all tensors, the rows of each rank in turn."""
    order = out_of_order(chunks)
    if len(tensors) == 1 and not order:  # dense for a batch of one
        return tensors[0].transpose(0, 1)
    batch, length = tensors[0].shape[:2]
    count = sum(x.shape[2] * unit for x, unit in zip(tensors, units, strict=True))
    send = tensors[0].new_empty((length, batch, count, step))
    places = send.split([len(chunk) for held in chunks for chunk in held]) if order else [send]
    start = 0
    for i in order or [0]:
        stop = start + len(places[i])
        at = 0
        for x, unit in zip(tensors, units, strict=True):
            end = at + x.shape[2] * unit
            _heads(places[i][:, :, at:end], x.shape[2], unit).copy_(
                x[:, start:stop].transpose(0, 1)
            )
            at = end
        start = stop
    return send


def _units(tensors: Sequence[Tensor]) -> tuple[int, list[int]]:
    """Return the greatest size that all head sizes are multiples of, and how many times."""
    sizes = [x.shape[3] for x in tensors]
    step = math.gcd(*sizes)
    return step, [size // step if step else 1 for size in sizes]


def _counts(heads: HeadRanges, units: Sequence[int]) -> list[int]:
    """Return how many units of all tensors' heads each rank has."""
    return [sum(map(mul, map(len, of_rank), units)) for of_rank in zip(*heads, strict=True)]


def _heads(x: Tensor, heads: int, unit: int) -> Tensor:
    """Return a view of ``[..., heads * unit, step]`` as heads of ``unit`` steps, or of none."""
    return x if unit == 1 else x.unflatten(-2, (heads, unit)).flatten(-2)


def _assemble(blocks: Sequence[Tensor], heads: HeadRanges, units: Sequence[int], i: int) -> Tensor:
    """Return all heads of tensor ``i`` out of what each rank sent."""
    starts = _counts(heads[:i], units) if i else [0] * len(blocks)
    held_by, unit = _by_block(heads)[i], units[i]
    _, rows, batch, _, width = blocks[0].shape
    width *= unit
    disjoint = all(a.stop <= b.start for a, b in pairwise(held_by))
    shape = (batch, rows, max(held.stop for held in held_by), width)
    dtype = blocks[0].dtype
    out = blocks[0].new_empty(shape)
    if not disjoint:
        out = blocks[0].new_zeros(shape, dtype=accumulator(dtype))
    for block, start, held in zip(blocks, starts, held_by, strict=False):
        ranks = block.shape[0]
        count = len(held) // ranks
        part = block[:, :, :, start : start + count * unit]
        part = _heads(part, count, unit).permute(2, 1, 0, 3, 4)
        place = out[:, :, held.start : held.stop].unflatten(2, (ranks, -1))
        if disjoint:
            place.copy_(part)
        else:
            place.add_(part)
    return out.to(dtype)


def _by_block(heads: HeadRanges) -> HeadRanges:
    """Return the heads of each tensor in each block: of all ranks at once if all have as many."""
    if all(len(held[0]) * len(held) == held[-1].stop for held in heads):
        return [[range(held[-1].stop)] for held in heads]
    return heads


def _blocks(
    flat: Tensor, counts: Sequence[int], heads: HeadRanges, rows: int, batch: int, step: int
) -> list[Tensor]:
    """Return views of a flat buffer, ``[ranks, rows, batch, count, step]`` of each block."""
    if len(_by_block(heads)[0]) == 1:
        return [flat.view(len(counts), rows, batch, counts[0], step)]
    parts = flat.split([rows * batch * count * step for count in counts])
    return [part.view(1, rows, batch, n, step) for part, n in zip(parts, counts, strict=True)]


def sort_rows(rows: Tensor, chunks: Chunks, dim: int) -> Tensor:
    """Return rows that came rank by rank in the order of their positions."""
    if not (order := out_of_order(chunks)):
        return rows
    parts = rows.split([len(chunk) for held in chunks for chunk in held], dim)
    return torch.cat([parts[i] for i in order], dim)


def swap_halves(x: Tensor, peers: Peers, *, back: bool = False) -> Tensor:
    """Return ``[batch, rows, heads, size]`` with the second half of the rows of rank ``n - 1 - r``.

    Rows stay in global order: on later ranks what comes lies before what stays. ``back`` undoes it.
    One exchange of half the rows, and one in the backward; the middle rank of an odd number keeps
    both halves.
    """
    out: Tensor = _Swap.apply(x, peers, back)  # type: ignore[no-untyped-call]
    return out


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, back: bool) -> Tensor:
        ctx.peers, ctx.back = peers, back
        return _exchange_halves(x, peers, back)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchange_halves(grad, ctx.peers, not ctx.back), None, None


def _exchange_halves(x: Tensor, peers: Peers, back: bool) -> Tensor:
    partner = peers.size - 1 - peers.index
    if partner == peers.index:
        peers.exchange({}, {}).wait()  # every rank of an axis makes the same calls
        return x.clone()
    comes_first = partner < peers.index
    halves = x.chunk(2, 1)
    stays, goes = halves[::-1] if comes_first and back else halves
    comes = torch.empty_like(goes, memory_format=torch.contiguous_format)
    peers.exchange({partner: [goes.contiguous()]}, {partner: [comes]}).wait()
    return torch.cat([comes, stays] if comes_first and not back else [stays, comes], 1)
