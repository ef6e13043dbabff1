"""Blocks of the attention matrix through a kernel, and the sums of what they give.

Outputs merge by online softmax; gradients of queries, keys and values add up in the accumulator's
dtype. Kernels know full rectangles and causal squares, and heads in equal groups.

Tensors are ``[batch, rows, heads, size]`` and log-sum-exps ``[batch, rows, heads]``: of a batch of
one, a range of rows is one piece of memory, which travels without a copy and is what flash kernels
take. Backends get transposed views, with the dims of `AttentionBackend`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._blocks import Block
from ._mesh import Pair
from ._ranges import Ranges, Ranks, size
from .kernels._interface import GRID, AttentionBackend, PackedBackend, Places, ScoreOptions, packs


@dataclass(frozen=True, slots=True)
class KVShard:
    """Keys and values of some local rows of their owner, ``[batch, rows, kv_heads, size]``.

    The head size of values may be another.
    """

    k: Tensor
    v: Tensor
    rows: Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKernel:
    """What computes the blocks of one attention, and with which options.

    ``repeats`` is that of `HeadShare`, ``packer`` the backend where it computes many blocks in one
    call, ``positions`` where rows and keys are in the whole, if the options ask for it.
    """

    backend: AttentionBackend
    packer: PackedBackend | None
    repeats: tuple[int, ...] | None
    options: ScoreOptions
    positions: "Positions | None" = None

    @staticmethod
    def of(
        backend: AttentionBackend,
        repeats: tuple[int, ...] | None,
        options: ScoreOptions,
        positions: "Positions | None" = None,
    ) -> "BlockKernel":
        """Return a backend with its options."""
        packer = backend if packs(backend) and positions is None else None
        return BlockKernel(
            backend=backend,
            packer=packer,
            repeats=repeats,
            options=options,
            positions=positions,
        )


@dataclass(frozen=True, slots=True)
class Positions:
    """Where the rows of a rank and the keys of each source are, and which query heads it has.

    Rows of the batch that are one sequence here have ``row_length`` positions each.
    """

    queries: Ranges
    keys: Sequence[Ranges]
    heads: range
    row_length: int

    def of(self, block: Block, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the `Places` of a block of the batch of ``like``, with rows in dim 1."""
        batch = torch.arange(like.shape[0], device=like.device).view(-1, 1, 1)
        rows = _positions(self.queries, block.queries, like).expand(len(batch), -1, 1)
        keys = _positions(self.keys[block.source], block.keys, like).expand(len(batch), -1, 1)
        heads = torch.arange(self.heads.start, self.heads.stop, device=like.device)
        length = max(1, self.row_length)
        return batch + rows // length, rows % length, keys % length, heads


def _positions(held: Ranges, rows: range, like: Tensor) -> Tensor:
    """Return the positions ``[rows, 1]`` of some local rows of what is held."""
    parts = [torch.arange(part.start, part.stop, device=like.device) for part in held]
    return torch.cat(parts)[as_slice(rows)].unsqueeze(1)


def forward_blocks(
    blocks: Sequence[Block],
    q: Tensor,
    held: KVShard,
    kernel: BlockKernel,
    take: Callable[[Block, Tensor, Tensor], None],
) -> None:
    """Hand each block to ``take`` with the output and log-sum-exp of its rows, new tensors.

    Nothing of a block is kept here while the next one is computed.
    """
    for group in _groups(blocks, kernel):
        inputs = [_inputs(block, q, held, kernel) for block in group]
        causal = group[0].kind != "full"
        if kernel.packer is not None and len(group) > 1:
            for block, out, lse in forward_packed(
                group, inputs, kernel.packer, causal, kernel.options
            ):
                take(block, out, lse)
        else:
            take(group[0], *_forward_alone(group[0], inputs[0], kernel))


def backward_blocks(
    blocks: Sequence[Block],
    grad: Tensor,
    q: Tensor,
    held: KVShard,
    out: Tensor,
    lse: Tensor,
    kernel: BlockKernel,
    take: Callable[[Block, Tensor, Tensor, Tensor], None],
) -> None:
    """Hand each block to ``take`` with its share of dq, dk and dv.

    ``out`` and ``lse`` are over all keys. Nothing of a block is kept here while the next one is
    computed.
    """
    for group in _groups(blocks, kernel):
        inputs = [
            (_rows(grad, b), *_inputs(b, q, held, kernel), _rows(out, b), _rows(lse, b))
            for b in group
        ]
        causal = group[0].kind != "full"
        if kernel.packer is not None and len(group) > 1:
            shares = backward_packed(group, inputs, kernel.packer, causal, kernel.options)
            for block, dq, dk, dv in shares:
                take(block, dq, sum_heads(dk, kernel.repeats), sum_heads(dv, kernel.repeats))
        else:
            take(group[0], *_backward_alone(group[0], inputs[0], kernel))


def _forward_alone(
    block: Block, inputs: Sequence[Tensor], kernel: BlockKernel
) -> tuple[Tensor, Tensor]:
    def launch(*part: Tensor, options: ScoreOptions = kernel.options) -> tuple[Tensor, ...]:
        return kernel.backend.forward(*part, causal=block.kind != "full", options=options)

    out, lse = _launched(launch, inputs, block, kernel)
    return _untiled(out, block), _untiled(lse, block)


def _backward_alone(
    block: Block, inputs: Sequence[Tensor], kernel: BlockKernel
) -> tuple[Tensor, Tensor, Tensor]:
    def launch(*part: Tensor, options: ScoreOptions = kernel.options) -> tuple[Tensor, ...]:
        return kernel.backend.backward(*part, causal=block.kind != "full", options=options)

    grads = _launched(launch, inputs, block, kernel)
    dq, dk, dv = (_untiled(x, block) for x in grads)
    return dq, sum_heads(dk, kernel.repeats), sum_heads(dv, kernel.repeats)


def _launched(
    launch: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    block: Block,
    kernel: BlockKernel,
) -> tuple[Tensor, ...]:
    """Return what ``launch`` makes of a block, whose tiles are further rows of the batch.

    Of all these rows at once, or of as many as a grid has places.
    """
    tiled = [_tiled(x, block).transpose(1, 2) for x in inputs]
    if kernel.positions is not None:
        launch, places = _placed(launch, block, kernel, kernel.positions, inputs[0])
        tiled += places
    if tiled[0].shape[0] <= GRID:
        return tuple(x.transpose(1, 2) for x in launch(*tiled))
    parts = zip(*(x.split(GRID) for x in tiled), strict=True)
    done = [launch(*part) for part in parts]
    return tuple(torch.cat(column).transpose(1, 2) for column in zip(*done, strict=True))


def _placed(
    launch: Callable[..., tuple[Tensor, ...]],
    block: Block,
    kernel: BlockKernel,
    positions: Positions,
    like: Tensor,
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """Return ``launch`` of further tensors, which say where weights are, and these tensors."""
    *places, heads = positions.of(block, like)

    def placed(*part: Tensor) -> tuple[Tensor, ...]:
        *tensors, batch, rows, keys = part
        return launch(*tensors, options=kernel.options.at(Places(batch, rows, keys, heads)))

    return placed, [_tiled(x, block).transpose(1, 2) for x in places]


def _groups(blocks: Sequence[Block], kernel: BlockKernel) -> list[list[Block]]:
    """Return the blocks that are computed together: by kernel where the backend can."""
    if kernel.packer is None:
        return [[block] for block in blocks]
    full = [block for block in blocks if block.kind == "full"]
    squares = [block for block in blocks if block.kind != "full"]
    return [group for group in (full, squares) if group]


def _inputs(
    block: Block, q: Tensor, held: KVShard, kernel: BlockKernel
) -> tuple[Tensor, Tensor, Tensor]:
    keys = as_slice(Ranks(held.rows).of(block.keys))
    k, v = (repeat_heads(x[:, keys], kernel.repeats) for x in (held.k, held.v))
    return _rows(q, block), k, v


def _rows(x: Tensor, block: Block) -> Tensor:
    return x[:, as_slice(block.queries)]


def _tiled(x: Tensor, block: Block) -> Tensor:
    """Return equal squares as further batch rows, anticausal ones from their end.

    With rows and keys reversed, row ``i`` of an anticausal square sees the keys up to the ``i``-th.
    """
    if block.tiles > 1:
        x = x.unflatten(1, (block.tiles, -1)).flatten(0, 1)
    return x.flip(1) if block.kind == "anticausal" else x


def _untiled(x: Tensor, block: Block) -> Tensor:
    if block.kind == "anticausal":
        x = x.flip(1)
    if block.tiles > 1:
        x = x.unflatten(0, (-1, block.tiles)).flatten(1, 2)
    return x


def forward_packed(
    blocks: Sequence[Block],
    inputs: Sequence[tuple[Tensor, Tensor, Tensor]],
    backend: PackedBackend,
    causal: bool,
    options: ScoreOptions,
) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """Yield each block with its output and log-sum-exp; ``inputs`` are its rows of q, k and v."""
    q, k, v = _packed(blocks, inputs)
    done = backend.forward_packed(q, k, v, *_stretches(blocks), causal=causal, options=options)
    rows = [len(block.queries) for block in blocks]
    for block, *mine in zip(blocks, *_split(done, (rows, rows)), strict=True):
        part, part_lse = (_turned(x, block) for x in mine)
        yield block, part, part_lse


def backward_packed(
    blocks: Sequence[Block],
    inputs: Sequence[tuple[Tensor, ...]],
    backend: PackedBackend,
    causal: bool,
    options: ScoreOptions,
) -> Iterator[tuple[Block, Tensor, Tensor, Tensor]]:
    """Yield each block with its share of dq, dk and dv; ``inputs`` are grad, q, k, v, out, lse."""
    grad, q, k, v, out, lse = _packed(blocks, inputs)
    given = grad, q, k, v, out, lse, *_stretches(blocks)
    done = backend.backward_packed(*given, causal=causal, options=options)
    rows = [len(block.queries) for block in blocks]
    keys = [len(block.keys) for block in blocks]
    for block, *share in zip(blocks, *_split(done, (rows, keys, keys)), strict=True):
        part_q, part_k, part_v = (_turned(x, block) for x in share)
        yield block, part_q, part_k, part_v


def _stretches(blocks: Sequence[Block]) -> tuple[list[int], list[int]]:
    """Return the rows and the keys of every square or rectangle."""
    rows = [len(block.queries) // block.tiles for block in blocks for _ in range(block.tiles)]
    keys = [len(block.keys) // block.tiles for block in blocks for _ in range(block.tiles)]
    return rows, keys


def _packed(blocks: Sequence[Block], inputs: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    turned = [[_turned(x, b) for x in mine] for b, mine in zip(blocks, inputs, strict=True)]
    return [torch.cat(column, 1).transpose(1, 2) for column in zip(*turned, strict=True)]


def _split(tensors: Sequence[Tensor], lengths: Sequence[list[int]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield what a backend returned in the blocks' order, cut to their rows or keys."""
    for x, of_blocks in zip(tensors, lengths, strict=True):
        yield x.transpose(1, 2).split(of_blocks, 1)


def _turned(x: Tensor, block: Block) -> Tensor:
    """Return anticausal squares from their end, as causal ones, and back."""
    if block.kind != "anticausal":
        return x
    turned: Tensor = x.unflatten(1, (block.tiles, -1)).flip(2).flatten(1, 2)
    return turned


class OnlineSoftmax:
    """The output and log-sum-exp of all rows, over the keys so far."""

    def __init__(self, q: Tensor, value_size: int) -> None:
        self._q = q
        self._value_size = value_size
        self._wide = accumulator(q.dtype)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def merge(self, block: Block, out: Tensor, lse: Tensor) -> None:
        """Take the attention of a block's rows over its keys."""
        queries = block.queries
        if self._out is None or self._lse is None:
            if len(queries) == self._q.shape[1]:  # kept as it is while no other part comes
                self._out, self._lse = out, lse
                return
            shape = (*self._q.shape[:3], self._value_size)
            self._out = self._q.new_zeros(shape, dtype=self._wide)
            self._lse = self._no_lse().fill_(-torch.inf)
        rows = as_slice(queries)
        self._out, self._lse = self._out.to(self._wide), self._lse.to(self._wide)
        sides = self._out[:, rows], self._lse[:, rows], out, lse
        merge(*(x.transpose(1, 2) for x in sides))

    def result(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return both; without any row both are empty.

        ``sinks`` ``[q_heads]`` are scores of no key: they are in the sum of weights alone.
        """
        if self._out is None or self._lse is None:
            lse = self._no_lse()
            return self._q.new_empty((*self._q.shape[:3], self._value_size)), lse
        if sinks is None:
            return self._out.to(self._q.dtype), self._lse
        lse = torch.logaddexp(self._lse, sinks.to(self._lse.dtype))
        out = self._out * (self._lse - lse).exp().unsqueeze(-1)
        return out.to(self._q.dtype), lse

    def _no_lse(self) -> Tensor:
        """Return an empty log-sum-exp, rows of a head one behind the other as kernels want it."""
        batch, rows, heads, _ = self._q.shape
        return self._q.new_empty((batch, heads, rows), dtype=self._wide).transpose(1, 2)


def gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of these rows in the gradient of ``sinks``; ``lse`` is with them."""
    weights = (sinks.to(lse.dtype) - lse).exp()
    total = weights * (grad.to(lse.dtype) * out).sum(-1)
    return -total.sum((0, 1)).to(sinks.dtype)


class RowSum:
    """A sum of parts of rows, in the accumulator's dtype."""

    def __init__(self, like: Tensor, rows: int | None = None) -> None:
        self._like = like
        self._rows = like.shape[1] if rows is None else rows
        self._total: Tensor | None = None

    def add(self, rows: range, part: Tensor) -> None:
        """Add a new tensor to some rows."""
        wide = accumulator(self._like.dtype)
        if self._total is None and len(rows) == self._rows:
            self._total = part.to(wide)
            return
        self.total[:, as_slice(rows)].add_(part)  # += on an item would also copy the sum

    @property
    def total(self) -> Tensor:
        """Return the sum so far."""
        if self._total is None:
            batch, _, heads, width = self._like.shape
            shape = (batch, self._rows, heads, width)
            self._total = self._like.new_zeros(shape, dtype=accumulator(self._like.dtype))
        return self._total


class KVGradient:
    """Gradients of the keys and values that were held, of heads ``like`` these."""

    def __init__(self, like: Pair, rows: Ranges) -> None:
        self._places = Ranks(rows)
        self._k, self._v = (RowSum(x, size(rows)) for x in like)

    def add(self, keys: range, dk: Tensor, dv: Tensor) -> None:
        """Add a block's share."""
        rows = self._places.of(keys)
        self._k.add(rows, dk)
        self._v.add(rows, dv)

    @property
    def pair(self) -> Pair:
        """Return both sums."""
        return self._k.total, self._v.total


def as_slice(rows: range) -> slice:
    """Return a range of rows as an index."""
    return slice(rows.start, rows.stop)


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Fold attention over further keys into ``out`` and ``lse``, in place.

    ``out`` is ``[..., rows, head_size]``, ``lse`` the log-sum-exp of the scores ``[..., rows]``.
    Rows without keys have ``lse = -inf`` and leave the other side as it is. The weight
    is that of online softmax (Milakov and Gimelshein, arXiv 1805.02867, section 3).
    """
    other_lse = other_lse.to(lse.dtype)
    # A gap after the rows of each head: kernels round the last few elements of a stretch in another
    # way than the others, so that a row's bits would depend on how many heads lie beside it.
    apart = lse.new_empty((*lse.shape[:-1], lse.shape[-1] + 1))[..., :-1]
    weight = torch.sub(other_lse, lse, out=apart).sigmoid_()
    weight.masked_fill_(other_lse == -torch.inf, 0.0)
    out.lerp_(other_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, other_lse, out=apart))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums of ``dtype`` are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def repeat_heads(x: Tensor, repeats: Sequence[int] | None) -> Tensor:
    """Return kv heads, dim 2, each ``repeats`` times: once for each query head that reads it.

    None leaves them alone. Made of views and one copy: a device waits for an index from a list.
    """
    if repeats is None:
        return x
    heads = zip(x.split(1, 2), repeats, strict=True)
    return torch.cat([head.expand(-1, -1, times, -1) for head, times in heads], 2)


def sum_heads(x: Tensor, repeats: Sequence[int] | None) -> Tensor:
    """Return the gradient of what was repeated."""
    if repeats is None:
        return x
    return torch.cat([part.sum(2, keepdim=True) for part in x.split(list(repeats), 2)], 2)
