"""Blocks of the attention matrix through a kernel, and the sums of what they give.

Outputs merge by online softmax; gradients of queries, keys and values add up in the accumulator's
dtype. Kernels know full rectangles and causal squares, and heads in equal groups.

Tensors are ``[batch, rows, heads, size]`` and log-sum-exps ``[batch, rows, heads]``: of a batch of
one, a range of rows is one piece of memory, which travels without a copy and is what flash kernels
take. Backends get transposed views, with the dims of `AttentionBackend`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from ._blocks import Block
from ._errors import InputError
from ._mask_mod import positions
from ._masks import MaskMod
from ._mesh import Pair
from ._ranges import Ranges, Ranks, joined, members, overlaps, size, union, within
from .kernels._interface import (
    GRID,
    AttentionBackend,
    PackedBackend,
    Places,
    ScoreOptions,
    ints_on,
    packs,
)

Backward = Callable[..., Any]

_RUNS = 2  # stretches of rows from which on they are gathered and scattered by index
_SMALL = 1024  # rows of a block up to which a copy costs less than launches


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

    ``masked`` is the backend for blocks whose pairs a mask function tells, and ``mask_mod`` that
    function. ``repeats`` is that of `HeadShare`, ``positions`` where rows and keys are in the
    whole, if options ask for it.
    """

    backend: AttentionBackend
    repeats: tuple[int, ...] | None
    options: ScoreOptions
    masked: AttentionBackend | None = None
    mask_mod: MaskMod | None = None
    positions: "Positions | None" = None

    @property
    def packer(self) -> PackedBackend | None:
        """Return the backend if it computes many blocks in one call, which have no places."""
        return self.backend if packs(self.backend) and not self.options.placed else None

    def of(self, block: Block) -> tuple[AttentionBackend, ScoreOptions]:
        """Return what computes a block, and the options for it."""
        if block.kind == "masked":
            if self.masked is None:
                raise RuntimeError("a block of a mask function, for which there is no backend")
            return self.masked, replace(self.options, mask_mod=self.mask_mod)
        if block.kind == "window":
            return self.backend, replace(self.options, window=block.window)
        return self.backend, self.options


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
        held = members(self.queries, block.queries), members(self.keys[block.source], block.keys)
        rows, keys = (positions(x, like.device).view(-1, 1).expand(len(batch), -1, 1) for x in held)
        heads = torch.arange(self.heads.start, self.heads.stop, device=like.device)
        length = max(1, self.row_length)
        return batch + rows // length, rows % length, keys % length, heads


Group = list[list[Block]]  # computed together: layers of blocks that share no row


def forward_blocks(
    blocks: Sequence[Block],
    q: Tensor,
    held: KVShard,
    kernel: BlockKernel,
    take: Callable[[Ranges, Tensor, Tensor], None],
) -> None:
    """Hand rows to ``take`` with their outputs and log-sum-exps, new tensors, block by block.

    Blocks that are launched together, and small ones, come together where they share no row: as
    ascending ranges of rows. Nothing of them is kept here while the next ones are computed.
    """
    for group in _groups(blocks, kernel):
        _forward_group(group, q, held, kernel, take)


def _forward_group(
    group: Group,
    q: Tensor,
    held: KVShard,
    kernel: BlockKernel,
    take: Callable[[Ranges, Tensor, Tensor], None],
) -> None:
    blocks = [block for layer in group for block in layer]
    inputs = [_inputs(block, q, held, kernel) for block in blocks]
    if kernel.packer is not None and len(blocks) > 1:
        out, lse = forward_packed(blocks, inputs, kernel.packer, kernel.of(blocks[0])[1])
    else:
        done = [_forward_alone(*each, kernel) for each in zip(blocks, inputs, strict=True)]
        out, lse = map(_one_behind_the_other, zip(*done, strict=True))
    stop = 0
    for layer in group:
        start, stop = stop, stop + sum(len(block.queries) for block in layer)
        rows = slice(start, stop)
        take(tuple(block.queries for block in layer), out[:, rows], lse[:, rows])


def backward_blocks(
    blocks: Sequence[Block],
    grad: Tensor,
    q: Tensor,
    held: KVShard,
    out: Tensor,
    lse: Tensor,
    kernel: BlockKernel,
    take: Callable[[Ranges, Ranges, Tensor, Tensor, Tensor], None],
) -> None:
    """Hand rows and keys to ``take`` with their shares of dq, dk and dv, as in `forward_blocks`.

    ``out`` and ``lse`` are over all keys.
    """
    for group in _groups(blocks, kernel):
        each = [block for layer in group for block in layer]
        rows, keys = tuple(b.queries for b in each), tuple(b.keys for b in each)
        take(rows, keys, *_backward_group(each, grad, q, held, out, lse, kernel))


def _backward_group(
    blocks: Sequence[Block],
    grad: Tensor,
    q: Tensor,
    held: KVShard,
    out: Tensor,
    lse: Tensor,
    kernel: BlockKernel,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [
        (_rows(grad, b), *_inputs(b, q, held, kernel), _rows(out, b), _rows(lse, b)) for b in blocks
    ]
    if kernel.packer is not None and len(blocks) > 1:
        dq, dk, dv = backward_packed(blocks, inputs, kernel.packer, kernel.of(blocks[0])[1])
        return dq, sum_heads(dk, kernel.repeats), sum_heads(dv, kernel.repeats)
    done = [_backward_alone(*each, kernel) for each in zip(blocks, inputs, strict=True)]
    dq, dk, dv = map(_one_behind_the_other, zip(*done, strict=True))
    return dq, dk, dv


def _one_behind_the_other(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _forward_alone(
    block: Block, inputs: Sequence[Tensor], kernel: BlockKernel
) -> tuple[Tensor, Tensor]:
    backend, options = kernel.of(block)

    def launch(*part: Tensor, options: ScoreOptions = options) -> tuple[Tensor, ...]:
        return backend.forward(*part, causal=_is_square(block), options=options)

    out, lse = _launched(launch, inputs, block, kernel)
    return _untiled(out, block), _untiled(lse, block)


def _backward_alone(
    block: Block, inputs: Sequence[Tensor], kernel: BlockKernel
) -> tuple[Tensor, Tensor, Tensor]:
    backend, options = kernel.of(block)

    def launch(*part: Tensor, options: ScoreOptions = options) -> tuple[Tensor, ...]:
        return backend.backward(*part, causal=_is_square(block), options=options)

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
    _, options = kernel.of(block)
    if options.placed and kernel.positions is not None:
        launch, places = _placed(launch, block, options, kernel.positions, inputs[0])
        tiled += places
    if tiled[0].shape[0] <= GRID:
        return tuple(x.transpose(1, 2) for x in launch(*tiled))
    parts = zip(*(x.split(GRID) for x in tiled), strict=True)
    done = [launch(*part) for part in parts]
    return tuple(torch.cat(column).transpose(1, 2) for column in zip(*done, strict=True))


def _placed(
    launch: Callable[..., tuple[Tensor, ...]],
    block: Block,
    options: ScoreOptions,
    positions: Positions,
    like: Tensor,
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """Return ``launch`` of further tensors, which say where weights are, and these tensors."""
    *places, heads = positions.of(block, like)

    def placed(*part: Tensor) -> tuple[Tensor, ...]:
        *tensors, batch, rows, keys = part
        return launch(*tensors, options=options.at(Places(batch, rows, keys, heads)))

    return placed, [_tiled(x, block).transpose(1, 2) for x in places]


def _groups(blocks: Sequence[Block], kernel: BlockKernel) -> list[Group]:
    """Return the blocks that are computed together.

    By kernel where the backend packs them, in layers. Else they are computed one by one: large ones
    are added up at once, and so are a few; many small ones a layer at a time, as a copy of them
    costs less than the launches of a sum for each.
    """
    if kernel.packer is None:
        layers = _layers([block for block in blocks if len(block.queries) <= _SMALL])
        many = [[layer] for layer in layers if len(layer) > _RUNS]
        together = {block for (layer,) in many for block in layer}
        return many + [[[block]] for block in blocks if block not in together]
    groups: dict[tuple[object, ...], list[Block]] = {}
    for i, block in enumerate(blocks):
        alone = i if block.kind == "masked" else None
        groups.setdefault((_is_square(block), block.window, alone), []).append(block)
    return [_layers(group) for group in groups.values()]


def _layers(blocks: Iterable[Block]) -> list[list[Block]]:
    """Return the blocks in as few lists as may be of which each has every row once, ascending."""
    layers: list[list[Block]] = []
    for block in sorted(blocks, key=lambda b: (b.queries.start, b.keys.start)):
        for layer in layers:
            if layer[-1].queries.stop <= block.queries.start:
                layer.append(block)
                break
        else:
            layers.append([block])
    return layers


def _is_square(block: Block) -> bool:
    return block.kind in ("causal", "anticausal")


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
    options: ScoreOptions,
) -> list[Tensor]:
    """Return output and log-sum-exp, block by block; ``inputs`` are their rows of q, k and v."""
    q, k, v = _packed(blocks, inputs)
    causal = _is_square(blocks[0])
    done = backend.forward_packed(q, k, v, *_stretches(blocks), causal=causal, options=options)
    return _unpacked(done, blocks, ("queries", "queries"))


def backward_packed(
    blocks: Sequence[Block],
    inputs: Sequence[tuple[Tensor, ...]],
    backend: PackedBackend,
    options: ScoreOptions,
) -> list[Tensor]:
    """Return dq, dk and dv, block by block; ``inputs`` are grad, q, k, v, out and lse of each."""
    grad, q, k, v, out, lse = _packed(blocks, inputs)
    given = grad, q, k, v, out, lse, *_stretches(blocks)
    done = backend.backward_packed(*given, causal=_is_square(blocks[0]), options=options)
    return _unpacked(done, blocks, ("queries", "keys", "keys"))


def _stretches(blocks: Sequence[Block]) -> tuple[list[int], list[int]]:
    """Return the rows and the keys of every square or rectangle."""
    rows = [len(block.queries) // block.tiles for block in blocks for _ in range(block.tiles)]
    keys = [len(block.keys) // block.tiles for block in blocks for _ in range(block.tiles)]
    return rows, keys


def _packed(blocks: Sequence[Block], inputs: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    turned = [[_turned(x, b) for x in mine] for b, mine in zip(blocks, inputs, strict=True)]
    return [torch.cat(column, 1).transpose(1, 2) for column in zip(*turned, strict=True)]


def _unpacked(
    done: Sequence[Tensor], blocks: Sequence[Block], sides: Sequence[Literal["queries", "keys"]]
) -> list[Tensor]:
    """Return what a backend returned, with the rows of anticausal squares in their order."""
    whole = [x.transpose(1, 2) for x in done]
    if all(block.kind != "anticausal" for block in blocks):
        return whole
    turned = []
    for x, side in zip(whole, sides, strict=True):
        parts = x.split([len(getattr(block, side)) for block in blocks], 1)
        turned.append(torch.cat([_turned(*each) for each in zip(parts, blocks, strict=True)], 1))
    return turned


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
        self._begun: Ranges = ()  # rows that have had keys

    def merge(self, rows: Ranges, out: Tensor, lse: Tensor) -> None:
        """Take the attention of some rows, ascending, over further keys."""
        fresh = not any(overlaps(rows, self._begun))
        self._begun = union((*self._begun, *joined(rows)))
        if self._out is None or self._lse is None:
            if size(rows) == self._q.shape[1]:  # kept as it is while no other part comes
                self._out, self._lse = out, lse
                return
            self._out, self._lse = self._start()
        self._out, self._lse = self._out.to(self._wide), self._lse.to(self._wide)
        runs = joined(rows)
        if len(runs) > _RUNS:
            self._merge_scattered(ints_on(runs, torch.int64, out), out, lse, fresh)
            return
        sides = out, lse.to(self._wide)
        for run, *theirs in zip(runs, *(x.split([*map(len, runs)], 1) for x in sides), strict=True):
            mine = [x[:, as_slice(run)] for x in (self._out, self._lse)]
            merge(*(x.transpose(1, 2) for x in (*mine, *theirs)))

    def _merge_scattered(self, places: Tensor, out: Tensor, lse: Tensor, fresh: bool) -> None:
        total, total_lse = self._out, self._lse
        if total is None or total_lse is None:
            raise RuntimeError("rows are merged into a sum that was not begun")
        theirs = out.to(self._wide), lse.to(self._wide)
        if not fresh:
            mine = total.index_select(1, places), total_lse.index_select(1, places)
            merge(*(x.transpose(1, 2) for x in (*mine, *theirs)))
            theirs = mine
        total.index_copy_(1, places, theirs[0])
        total_lse.index_copy_(1, places, theirs[1])

    def result(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return both; rows without keys give 0 and minus infinity.

        ``sinks`` ``[q_heads]`` are scores of no key: they are in the sum of weights alone.
        """
        out, lse = (
            self._start() if self._out is None or self._lse is None else (self._out, self._lse)
        )
        if sinks is None:
            # No view of what was made here, without autograd, so that a caller may change it.
            return out.to(self._q.dtype).data, lse
        total = torch.logaddexp(lse, sinks.to(lse.dtype))
        share = (lse - total).exp().masked_fill_(lse == -torch.inf, 0.0)
        return (out * share.unsqueeze(-1)).to(self._q.dtype), total

    def _start(self) -> tuple[Tensor, Tensor]:
        """Return what rows without keys give, rows of a head of the log-sum-exp side by side."""
        batch, rows, heads, _ = self._q.shape
        out = self._q.new_zeros((batch, rows, heads, self._value_size), dtype=self._wide)
        lse = self._q.new_full((batch, heads, rows), -torch.inf, dtype=self._wide)
        return out, lse.transpose(1, 2)


def gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of these rows in the gradient of ``sinks``; ``lse`` is with them."""
    weights = (sinks.to(lse.dtype) - lse).exp().masked_fill_(lse == -torch.inf, 0.0)
    total = weights * (grad.to(lse.dtype) * out).sum(-1)
    return -total.sum((0, 1)).to(sinks.dtype)


class RowSum:
    """A sum of parts of rows, in the accumulator's dtype.

    A first part that has half of the rows or more is the sum until another one lies beside it:
    rows that no part has take no memory.
    """

    def __init__(self, like: Tensor, rows: int | None = None) -> None:
        self._like = like
        self._rows = range(like.shape[1] if rows is None else rows)
        self._wide = accumulator(like.dtype)
        self._held = range(0)  # the rows of the sum so far
        self._sum: Tensor | None = None

    def add(self, rows: Ranges, part: Tensor) -> None:
        """Add a new tensor to some rows, which it has in this order; they may come again."""
        runs = _runs(rows)
        if self._sum is None and len(runs) == 1 and 2 * len(runs[0]) >= len(self._rows):
            self._held, self._sum = runs[0], part.to(self._wide)
        elif len(runs) > _RUNS and all(a.stop <= b.start for a, b in pairwise(runs)):
            self.total.index_add_(1, ints_on(runs, torch.int64, part), part.to(self._wide))
        else:
            for run, share in zip(runs, part.split([*map(len, runs)], 1), strict=True):
                held = self._find(run)
                # += on an item would also copy the sum
                (self.total[:, as_slice(run)] if held is None else held).add_(share)

    def of(self, rows: range) -> Tensor:
        """Return the sum so far of some rows; a view where memory has it."""
        if (held := self._find(rows)) is not None:
            return held
        if self._sum is None or not within(rows, self._held):
            return self._zeros(len(rows))
        return self.total[:, as_slice(rows)]

    @property
    def total(self) -> Tensor:
        """Return the sum so far."""
        if self._sum is None or self._held != self._rows:
            total = self._zeros(len(self._rows))
            if self._sum is not None:
                total[:, as_slice(self._held)].add_(self._sum)
            self._held, self._sum = self._rows, total
        return self._sum

    def _find(self, rows: range) -> Tensor | None:
        """Return the sum so far of some rows, None where memory does not have all of them."""
        if self._sum is None or rows.start < self._held.start or self._held.stop < rows.stop:
            return None
        return self._sum[:, rows.start - self._held.start : rows.stop - self._held.start]

    def _zeros(self, rows: int) -> Tensor:
        batch, _, heads, width = self._like.shape
        return self._like.new_zeros((batch, rows, heads, width), dtype=self._wide)


class KVGradient:
    """Gradients of the keys and values that were held, of heads ``like`` these."""

    def __init__(self, like: Pair, rows: Ranges) -> None:
        self._places = Ranks(rows)
        self._k, self._v = (RowSum(x, size(rows)) for x in like)

    def add(self, keys: Ranges, dk: Tensor, dv: Tensor) -> None:
        """Add the shares of some keys, which they have in this order; they may come again."""
        rows = tuple(map(self._places.of, keys))
        self._k.add(rows, dk)
        self._v.add(rows, dv)

    def of(self, rows: range) -> Pair:
        """Return both sums of some of the rows that were held, counted from their first one."""
        return self._k.of(rows), self._v.of(rows)

    @property
    def pair(self) -> Pair:
        """Return both sums."""
        return self._k.total, self._v.total


def _runs(rows: Ranges) -> Ranges:
    """Return ranges in their order, those joined of which one begins where the last one ends."""
    runs = [rows[0]]
    for piece in rows[1:]:
        if piece.start == runs[-1].stop:
            runs[-1] = range(runs[-1].start, piece.stop)
        else:
            runs.append(piece)
    return tuple(runs)


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


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which operations keep the dtypes of their inputs."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def first_order(backward: Backward) -> Backward:
    """Return ``backward`` of an autograd function, made to refuse ``create_graph=True``.

    torch's ``once_differentiable`` puts an error into the graph of the gradients instead. A second
    backward does not meet it where the incoming gradient needs none, or where it asks for some
    inputs alone, and would lack terms without an error.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise InputError(
                "a backward with create_graph=True through context_parallel_attention is not "
                "supported: its gradients have no graph, and second derivatives would lack terms; "
                "leave create_graph out"
            )
        return backward(ctx, *grads)

    return checked
