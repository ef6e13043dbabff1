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
from functools import lru_cache
from itertools import pairwise
from operator import mul
from typing import Any

import torch
from torch import Tensor

from ._blockwise import accumulator, first_order
from ._layouts import Chunks, lengths_of, out_of_order
from ._mesh import Peers, RankGroups
from ._plan import AttentionPlan, HeadShare, rank_plan_of

HeadRanges = tuple[tuple[range, ...], ...]  # of each tensor, the heads of each rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Who trades rows for heads: ``chunks``, query and kv heads of each of ``peers``, in order."""

    peers: Peers
    chunks: Chunks
    q: tuple[range, ...]
    kv: tuple[range, ...]

    @staticmethod
    def of(peers: Peers, chunks: Chunks, shares: Sequence[HeadShare]) -> "Exchange":
        """Return the exchange of peers with these shares of the heads."""
        q, kv = heads_of(shares)
        return Exchange(peers=peers, chunks=chunks, q=q, kv=kv)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor's heads in a block of some ranks' units: where they are in either, and how many.

    ``count`` are the heads of each of ``ranks``, of ``unit`` steps each.
    """

    ranks: int
    held: range
    count: int
    unit: int
    at: int
    stop: int


@dataclass(frozen=True, slots=True)
class Packing:
    """How some tensors' heads are packed for each rank: in units of ``step`` elements.

    ``units`` are those of a head of each tensor, ``counts`` those of each rank. Ranks are one block
    if all have as many heads of each tensor, else a block each; ``blocks`` has the part of each
    tensor in each. Of each tensor ``heads`` are all, and ``disjoint`` says whether each head is one
    rank's alone.
    """

    step: int
    units: tuple[int, ...]
    counts: tuple[int, ...]
    blocks: tuple[tuple[Part, ...], ...]
    heads: tuple[int, ...]
    disjoint: tuple[bool, ...]


Move = Callable[[Sequence[Tensor], HeadRanges, Exchange], list[Tensor]]


def exchange_of(plan: AttentionPlan, groups: RankGroups) -> Exchange:
    """Return the Ulysses exchange of this rank and its neighbours."""
    mine = rank_plan_of(plan, groups.rank)
    return Exchange.of(groups.ulysses, mine.chunks, mine.shares)


def heads_of(shares: Sequence[HeadShare]) -> tuple[tuple[range, ...], tuple[range, ...]]:
    """Return the query and the kv heads of each rank."""
    return tuple(share.q for share in shares), tuple(share.kv for share in shares)


def rows_to_heads(q: Tensor, k: Tensor, v: Tensor, exchange: Exchange) -> tuple[Tensor, ...]:
    """Return ``[batch, rows, heads, size]`` as this rank's heads of the rows of all peers.

    The head size of v may be another. Rows are in global order of positions. A kv head goes to
    every rank that reads it. One all-to-all; backward one more, in which the copies of a head sum
    in rank order.
    """
    heads = exchange.q, exchange.kv, exchange.kv
    out: tuple[Tensor, ...] = _Exchanged.apply(_to_heads, _to_rows, exchange, heads, q, k, v)  # type: ignore[no-untyped-call]
    return out


def heads_to_rows(x: Tensor, exchange: Exchange) -> Tensor:
    """Return this rank's query heads of all peers' rows as all heads of its own rows.

    The inverse of `rows_to_heads` for q. One all-to-all; backward one more.
    """
    heads = (exchange.q,)
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
    packing = packing_of(heads, tuple([x.shape[3] for x in tensors]))
    step, index = packing.step, exchange.peers.index
    send = tensors[0].new_empty(rows * batch * sum(packing.counts) * step)
    for block, parts in zip(_blocks(send, packing, rows, batch), packing.blocks, strict=True):
        for x, part in zip(tensors, parts, strict=True):
            held = x[:, :, part.held.start : part.held.stop].unflatten(2, (part.ranks, part.count))
            _heads(block[:, :, :, part.at : part.stop], part.count, part.unit).copy_(
                held.permute(2, 1, 0, 3, 4)
            )
    mine, lengths = packing.counts[index], lengths_of(exchange.chunks)
    per_row = batch * step
    (received,) = exchange.peers.all_to_all(
        send,
        [rows * per_row * count for count in packing.counts],
        [length * per_row * mine for length in lengths],
    ).wait()
    whole = sort_rows(received.view(sum(lengths), batch, mine, step), exchange.chunks, 0)
    held_here = [len(of_ranks[index]) for of_ranks in heads]
    sizes = [count * unit for count, unit in zip(held_here, packing.units, strict=True)]
    # Parts that autograd takes for tensors of their own: a caller may change one in place.
    made = whole.transpose(0, 1).unsafe_split_with_sizes(sizes, dim=2)
    return [
        x if unit == 1 else _heads(x, count, unit).data
        for x, count, unit in zip(made, held_here, packing.units, strict=True)
    ]


def _to_rows(tensors: Sequence[Tensor], heads: HeadRanges, exchange: Exchange) -> list[Tensor]:
    """Send every peer its rows of this rank's heads; return all heads of this rank's rows.

    Heads that come from several ranks are summed, in rank order.
    """
    batch = tensors[0].shape[0]
    packing = packing_of(heads, tuple([x.shape[3] for x in tensors]))
    index, lengths = exchange.peers.index, lengths_of(exchange.chunks)
    rows, per_row = lengths[index], batch * packing.step
    mine = packing.counts[index]
    (received,) = exchange.peers.all_to_all(
        _by_rank(tensors, packing, exchange.chunks).flatten(),
        [length * per_row * mine for length in lengths],
        [rows * per_row * count for count in packing.counts],
    ).wait()
    blocks = _blocks(received, packing, rows, batch)
    return [_assemble(blocks, packing, i) for i in range(len(tensors))]


def _by_rank(tensors: Sequence[Tensor], packing: Packing, chunks: Chunks) -> Tensor:
    """Return ``[rows, batch, units, step]`` of all tensors, the rows of each rank in turn."""
    order = out_of_order(chunks)
    if len(tensors) == 1 and not order:  # dense for a batch of one
        return tensors[0].transpose(0, 1)
    batch, length = tensors[0].shape[:2]
    count = sum(x.shape[2] * unit for x, unit in zip(tensors, packing.units, strict=True))
    send = tensors[0].new_empty((length, batch, count, packing.step))
    places = send.split([len(chunk) for held in chunks for chunk in held]) if order else [send]
    start = 0
    for i in order or [0]:
        stop = start + len(places[i])
        at = 0
        for x, unit in zip(tensors, packing.units, strict=True):
            end = at + x.shape[2] * unit
            _heads(places[i][:, :, at:end], x.shape[2], unit).copy_(
                x[:, start:stop].transpose(0, 1)
            )
            at = end
        start = stop
    return send


@lru_cache(maxsize=256)
def packing_of(heads: HeadRanges, sizes: tuple[int, ...]) -> Packing:
    """Return how tensors of these head sizes are packed.

    Their greatest common divisor is the step.
    """
    step = math.gcd(*sizes)
    units = tuple(size // step if step else 1 for size in sizes)
    alike = all(len(held[0]) * len(held) == held[-1].stop for held in heads)
    by_block = [[range(held[-1].stop)] for held in heads] if alike else heads
    blocks = []
    for of_block in zip(*by_block, strict=True):
        parts, at = [], 0
        for tensor, held in enumerate(of_block):
            ranks, unit = (len(heads[tensor]) if alike else 1), units[tensor]
            count = len(held) // ranks
            parts.append(Part(ranks, held, count, unit, at, at + count * unit))
            at += count * unit
        blocks.append(tuple(parts))
    return Packing(
        step=step,
        units=units,
        counts=tuple(sum(map(mul, map(len, held), units)) for held in zip(*heads, strict=True)),
        blocks=tuple(blocks),
        heads=tuple(max(part.stop for part in held) for held in heads),
        disjoint=tuple(all(a.stop <= b.start for a, b in pairwise(held)) for held in by_block),
    )


def _heads(x: Tensor, heads: int, unit: int) -> Tensor:
    """Return a view of ``[..., heads * unit, step]`` as heads of ``unit`` steps, or of none."""
    return x if unit == 1 else x.unflatten(-2, (heads, unit)).flatten(-2)


def _assemble(blocks: Sequence[Tensor], packing: Packing, i: int) -> Tensor:
    """Return all heads of tensor ``i`` out of what each rank sent."""
    _, rows, batch, _, step = blocks[0].shape
    shape = batch, rows, packing.heads[i], step * packing.units[i]
    disjoint, dtype = packing.disjoint[i], blocks[0].dtype
    if disjoint:
        out = blocks[0].new_empty(shape)
    else:
        out = blocks[0].new_zeros(shape, dtype=accumulator(dtype))
    for block, parts in zip(blocks, packing.blocks, strict=True):
        part = parts[i]
        came = _heads(block[:, :, :, part.at : part.stop], part.count, part.unit)
        came = came.permute(2, 1, 0, 3, 4)
        place = out[:, :, part.held.start : part.held.stop].unflatten(2, (part.ranks, part.count))
        if disjoint:
            place.copy_(came)
        else:
            place.add_(came)
    return out if disjoint else out.to(dtype)


def _blocks(flat: Tensor, packing: Packing, rows: int, batch: int) -> Sequence[Tensor]:
    """Return views of a flat buffer, ``[ranks, rows, batch, count, step]`` of each block."""
    counts, step = packing.counts, packing.step
    if len(packing.blocks) == 1:
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
