"""Blocks of the attention matrix through a kernel, and the sums of what they give.

Outputs merge by online softmax; gradients of queries, keys and values add up in the accumulator's
dtype. Kernels know full rectangles and causal squares, and heads in equal groups.

Tensors are ``[batch, rows, heads, size]`` and log-sum-exps ``[batch, heads, rows]``: of a batch of
one, a range of rows is one piece of memory, which travels without a copy and is what flash kernels
take. Backends get transposed views, with the dims of `AttentionBackend`; those of queries and of
their sums are made once for all launches over the same rows.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from hp_dtensor import torch_compat

from ._blocks import Block
from ._errors import BackendError, InputError
from ._mask_mod import positions
from ._masks import MaskMod
from ._mesh import Pair
from ._ranges import Ranges, Ranks, joined, members, overlaps, size, union
from ._torch import has_values
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKernel:
    """What computes the blocks of one attention, and with which options.

    ``masked`` is the backend for blocks whose pairs a mask function tells, and ``mask_mod`` that
    function. ``repeats`` is that of `HeadShare`, ``positions`` where rows and keys are in the
    whole, if options ask for it. ``fused``: merges are one kernel each.
    """

    backend: AttentionBackend
    repeats: tuple[int, ...] | None
    options: ScoreOptions
    masked: AttentionBackend | None = None
    mask_mod: MaskMod | None = None
    positions: "Positions | None" = None
    fused: bool = False

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

    def of(self, block: Block, like: Tensor) -> Places:
        """Return where the weights of a block are, of the batch of ``like``."""
        batch = torch.arange(like.shape[0], device=like.device).view(-1, 1, 1)
        held = members(self.queries, block.queries), members(self.keys[block.source], block.keys)
        rows, keys = (positions(x, like.device).expand(len(batch), 1, -1) for x in held)
        heads = torch.arange(self.heads.start, self.heads.stop, device=like.device)
        length = max(1, self.row_length)
        return Places(batch + rows // length, rows % length, keys % length, heads)


Span = tuple[int, int]  # the first of some rows, and how many they are


@dataclass(frozen=True, slots=True)
class Launch:
    """One block through its backend: which rows it takes of the queries, and of the keys held.

    Spans are None for all rows. ``plain`` blocks go to the backend as they are.
    """

    block: Block
    rows: Span | None
    keys: Span | None
    backend: AttentionBackend
    options: ScoreOptions
    causal: bool
    plain: bool


@dataclass(frozen=True, slots=True)
class Layer:
    """Query rows, ascending, whose partial results are merged together.

    ``source``: the rank whose keys they are for. ``whole``: covers every query row. ``fresh``: no
    earlier layer of the same ``source`` covers one of these rows. Neither flag depends on the order
    in which sources arrive.
    """

    source: int
    runs: Ranges
    spans: tuple[Span, ...]
    lengths: list[int]
    size: int
    whole: bool
    fresh: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks that are computed together, in layers that share no row.

    In one launch if ``packed``. ``queries`` and ``keys`` are their rows, of those that are held.
    """

    launches: tuple[Launch, ...]
    layers: tuple[Layer, ...]
    queries: Ranges
    keys: Ranges
    packed: bool


def batches_of(
    blocks: Mapping[int, Sequence[Block]],
    held: Mapping[int, Ranges],
    rows: int,
    kernel: BlockKernel,
) -> dict[int, tuple[Batch, ...]]:
    """Return the batches of each source's blocks, in the order in which they are computed.

    ``held`` are the rows of its keys that are here, ``rows`` the number of queries.
    """
    found: dict[int, tuple[Batch, ...]] = {}
    for source, own in blocks.items():
        begun: Ranges = ()
        places, batches, length = Ranks(held[source]), [], size(held[source])
        for group in _groups(own, kernel):
            launches, layers = [], []
            for layer in group:
                for block in layer:
                    launches.append(_launch_of(block, places.of(block.keys), rows, length, kernel))
                runs = joined(block.queries for block in layer)
                layers.append(_layer_of(source, runs, begun, rows))
                begun = union((*begun, *runs))
            together = [block for layer in group for block in layer]
            batch = Batch(
                launches=tuple(launches),
                layers=tuple(layers),
                queries=tuple(block.queries for block in together),
                keys=tuple(places.of(block.keys) for block in together),
                packed=kernel.packer is not None and len(together) > 1,
            )
            batches.append(batch)
        found[source] = tuple(batches)
    return found


def _launch_of(block: Block, keys: range, rows: int, held: int, kernel: BlockKernel) -> Launch:
    backend, options = kernel.of(block)
    return Launch(
        block=block,
        rows=None if len(block.queries) == rows else _span(block.queries),
        keys=None if len(keys) == held else _span(keys),
        backend=backend,
        options=options,
        causal=_is_square(block),
        plain=block.tiles == 1 and block.kind != "anticausal" and not options.placed,
    )


def _layer_of(source: int, runs: Ranges, begun: Ranges, rows: int) -> Layer:
    return Layer(
        source=source,
        runs=runs,
        spans=tuple(map(_span, runs)),
        lengths=[*map(len, runs)],
        size=size(runs),
        whole=size(runs) == rows,
        fresh=not any(overlaps(runs, begun)),
    )


Group = list[list[Block]]  # computed together: layers of blocks that share no row


class RowViews:
    """Rows of the same tensors as backends take them, in dim 2: views, made once for each span."""

    def __init__(self, *tensors: Tensor) -> None:
        """Take tensors ``[batch, rows, heads, size]`` and sums ``[batch, heads, rows]``."""
        turned = tuple([x.transpose(1, 2) if x.ndim == 4 else x for x in tensors])
        self._found: dict[Span | None, tuple[Tensor, ...]] = {None: turned}

    def of(self, span: Span | None) -> tuple[Tensor, ...]:
        """Return the rows of a span, or all, of each tensor."""
        found = self._found.get(span)
        if found is None and span is not None:
            found = tuple([x.narrow(2, *span) for x in self._found[None]])
            self._found[span] = found
        return found or ()


def forward_batch(
    batch: Batch,
    queries: RowViews,
    k: Tensor,
    v: Tensor,
    kernel: BlockKernel,
    rows: "OnlineSoftmax",
) -> None:
    """Merge the attention of some blocks over the keys that are held into ``rows``.

    ``queries`` are of q.
    """
    launches = batch.launches
    inputs = [(*queries.of(x.rows), *_keys_of(x, k, v, kernel)) for x in launches]
    if batch.packed and (packer := kernel.packer) is not None:
        out, lse = forward_packed(batch, inputs, packer)
    elif len(launches) == 1:
        out, lse = _launched("forward", launches[0], inputs[0], kernel)
    else:
        done = [_launched("forward", *x, kernel) for x in zip(launches, inputs, strict=True)]
        out, lse = map(_behind, zip(*done, strict=True))
    if len(batch.layers) == 1:
        rows.merge(batch.layers[0], out, lse)
        return
    sizes = [layer.size for layer in batch.layers]
    for layer, *part in zip(batch.layers, out.split(sizes, 2), lse.split(sizes, 2), strict=True):
        rows.merge(layer, *part)


def backward_batch(
    batch: Batch, finished: RowViews, k: Tensor, v: Tensor, kernel: BlockKernel
) -> tuple[Tensor, ...]:
    """Return the shares of dq, dk and dv of some blocks, one behind the other.

    ``finished`` are of grad, q, out and the log-sum-exp, both over all keys.
    """
    inputs = []
    for launch in batch.launches:
        grad, q, out, lse = finished.of(launch.rows)
        inputs.append((grad, q, *_keys_of(launch, k, v, kernel), out, lse))
    if batch.packed and (packer := kernel.packer) is not None:
        done = [backward_packed(batch, inputs, packer)]
    else:
        pairs = zip(batch.launches, inputs, strict=True)
        done = [_launched("backward", *x, kernel) for x in pairs]
    grads = tuple([_joined(parts) for parts in zip(*done, strict=True)])
    if kernel.repeats is None:
        return grads
    dq, dk, dv = grads
    return dq, sum_heads(dk, kernel.repeats), sum_heads(dv, kernel.repeats)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return what launches returned one behind the other, ``[batch, rows, heads, size]``."""
    turned = [x.transpose(1, 2) for x in parts]
    return turned[0] if len(turned) == 1 else torch.cat(turned, 1)


def _launched(
    direction: Literal["forward", "backward"],
    launch: Launch,
    inputs: Sequence[Tensor],
    kernel: BlockKernel,
) -> tuple[Tensor, ...]:
    """Return what the backend makes of a block, whose tiles are further rows of the batch.

    Of all these rows at once, or of as many as a grid has places.
    """
    block, causal, options = launch.block, launch.causal, launch.options
    backend = launch.backend
    call: Callable[..., tuple[Tensor, ...]] = (
        backend.forward if direction == "forward" else backend.backward
    )
    if launch.plain and inputs[0].shape[0] <= GRID:
        return call(*inputs, causal=causal, options=options)
    run: Callable[..., tuple[Tensor, ...]] = partial(call, causal=causal, options=options)
    tiled = [_tiled(x, block) for x in inputs]
    if options.placed and kernel.positions is not None:
        run, places = _placed(call, launch, kernel.positions, inputs[0])
        tiled += places
    if tiled[0].shape[0] <= GRID:
        made = run(*tiled)
    else:
        parts = [run(*part) for part in zip(*(x.split(GRID) for x in tiled), strict=True)]
        made = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    return tuple(_untiled(x, block) for x in made)


def _placed(
    call: Callable[..., tuple[Tensor, ...]], launch: Launch, positions: Positions, like: Tensor
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """Return ``call`` of further tensors, which say where weights are, and these tensors."""
    *places, heads = positions.of(launch.block, like)

    def placed(*part: Tensor) -> tuple[Tensor, ...]:
        *tensors, batch, rows, keys = part
        options = launch.options.at(Places(batch, rows, keys, heads))
        return call(*tensors, causal=launch.causal, options=options)

    return placed, [_tiled(x, launch.block) for x in places]


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


def _keys_of(launch: Launch, k: Tensor, v: Tensor, kernel: BlockKernel) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a launch as backends take them."""
    if (keys := launch.keys) is not None:
        k, v = k.narrow(1, *keys), v.narrow(1, *keys)
    if kernel.repeats is not None:
        k, v = repeat_heads(k, kernel.repeats), repeat_heads(v, kernel.repeats)
    return k.transpose(1, 2), v.transpose(1, 2)


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


def forward_packed(
    batch: Batch, inputs: Sequence[tuple[Tensor, ...]], backend: PackedBackend
) -> tuple[Tensor, ...]:
    """Return output and log-sum-exp, block by block; ``inputs`` are their rows of q, k and v."""
    blocks, first = [launch.block for launch in batch.launches], batch.launches[0]
    rows, keys = _stretches(blocks)
    q, k, v = _packed(blocks, inputs)
    done = backend.forward_packed(q, k, v, rows, keys, causal=first.causal, options=first.options)
    return _unpacked(done, blocks, ("queries", "queries"))


def backward_packed(
    batch: Batch, inputs: Sequence[tuple[Tensor, ...]], backend: PackedBackend
) -> tuple[Tensor, ...]:
    """Return dq, dk and dv, block by block; ``inputs`` are grad, q, k, v, out and lse of each."""
    blocks, first = [launch.block for launch in batch.launches], batch.launches[0]
    grad, q, k, v, out, lse = _packed(blocks, inputs)
    given = grad, q, k, v, out, lse, *_stretches(blocks)
    done = backend.backward_packed(*given, causal=first.causal, options=first.options)
    return _unpacked(done, blocks, ("queries", "keys", "keys"))


def _stretches(blocks: Sequence[Block]) -> tuple[list[int], list[int]]:
    """Return the rows and the keys of every square or rectangle."""
    rows = [len(block.queries) // block.tiles for block in blocks for _ in range(block.tiles)]
    keys = [len(block.keys) // block.tiles for block in blocks for _ in range(block.tiles)]
    return rows, keys


def _packed(blocks: Sequence[Block], inputs: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    turned = [[_turned(x, b) for x in mine] for b, mine in zip(blocks, inputs, strict=True)]
    return [_behind(column) for column in zip(*turned, strict=True)]


def _behind(parts: Sequence[Tensor]) -> Tensor:
    """Return parts of what backends take or return one behind the other."""
    return torch.cat([*parts], 2) if parts[0].ndim == 3 else _joined(parts).transpose(1, 2)


def _unpacked(
    done: Sequence[Tensor], blocks: Sequence[Block], sides: Sequence[Literal["queries", "keys"]]
) -> tuple[Tensor, ...]:
    """Return what a backend returned, with the rows of anticausal squares in their order."""
    if all(block.kind != "anticausal" for block in blocks):
        return tuple(done)
    turned = []
    for x, side in zip(done, sides, strict=True):
        parts = x.split([len(getattr(block, side)) for block in blocks], 2)
        turned.append(_behind([_turned(*each) for each in zip(parts, blocks, strict=True)]))
    return tuple(turned)


def _turned(x: Tensor, block: Block) -> Tensor:
    """Return anticausal squares from their end, as causal ones, and back."""
    if block.kind != "anticausal":
        return x
    turned: Tensor = x.unflatten(2, (block.tiles, -1)).flip(3).flatten(2, 3)
    return turned


class OnlineSoftmax:
    """The output and log-sum-exp of all rows, over the keys so far.

    ``hides``: rows of a part may have no keys, which then have a log-sum-exp of minus infinity.
    """

    def __init__(
        self, q: Tensor, value_size: int, *, fused: bool = False, hides: bool = True
    ) -> None:
        self._q = q
        self._fused = fused and has_values(q)
        self._merge = fused_merge() if self._fused else partial(merge, hides=hides)
        self._value_size = value_size
        self._wide = accumulator(q.dtype)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._first: int | None = None  # the source whose keys came first
        self._views: dict[Span, tuple[Tensor, Tensor, Weights | None]] = {}

    def merge(self, rows: Layer, out: Tensor, lse: Tensor) -> None:
        """Take what a backend returned for some rows over further keys: new tensors."""
        if self._out is None or self._lse is None:
            self._first = rows.source
            if rows.whole:  # kept as it is while no other part comes
                self._out, self._lse = out.transpose(1, 2), lse
                return
            self._out, self._lse = self._start()
        elif self._out.dtype != self._wide or self._lse.dtype != self._wide:
            self._out, self._lse = self._out.to(self._wide), self._lse.to(self._wide)
        if len(rows.runs) > _RUNS:
            self._merge_scattered(rows, self._out, self._lse, out, lse)
        elif len(rows.runs) == 1:
            self._merge_into(rows.spans[0], self._out, self._lse, out, lse)
        else:
            theirs_of = (x.split(rows.lengths, 2) for x in (out, lse))
            for span, *theirs in zip(rows.spans, *theirs_of, strict=True):
                self._merge_into(span, self._out, self._lse, *theirs)

    def _merge_into(
        self, span: Span, total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        found = self._views.get(span)
        if found is None:
            mine_lse = total_lse.narrow(2, *span)
            room = None if self._fused else weights_of(mine_lse)
            found = total.narrow(1, *span).transpose(1, 2), mine_lse, room
            self._views[span] = found
        mine, mine_lse, room = found
        self._merge(mine, mine_lse, out, lse, room)

    def _merge_scattered(
        self, rows: Layer, total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        places = ints_on(rows.runs, torch.int64, out)
        theirs = out.transpose(1, 2).to(self._wide), lse.to(self._wide)
        if not (rows.fresh and rows.source == self._first):
            mine = total.index_select(1, places), total_lse.index_select(2, places)
            self._merge(mine[0].transpose(1, 2), mine[1], out, theirs[1])
            theirs = mine
        total.index_copy_(1, places, theirs[0])
        total_lse.index_copy_(2, places, theirs[1])

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
        total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
        share = (lse - total).exp().masked_fill_(lse == -torch.inf, 0.0)
        return (out * share.transpose(1, 2).unsqueeze(-1)).to(self._q.dtype), total

    def _start(self) -> tuple[Tensor, Tensor]:
        """Return what rows without keys give."""
        batch, rows, heads, _ = self._q.shape
        out = self._q.new_zeros((batch, rows, heads, self._value_size), dtype=self._wide)
        lse = self._q.new_full((batch, heads, rows), -torch.inf, dtype=self._wide)
        return out, lse


def gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of these rows in the gradient of ``sinks``; ``lse`` is with them."""
    weights = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp().masked_fill_(lse == -torch.inf, 0.0)
    total = weights * (grad.to(lse.dtype) * out).sum(-1).transpose(1, 2)
    return -total.sum((0, 2)).to(sinks.dtype)


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
        runs = rows if len(rows) == 1 else _runs(rows)
        if self._sum is None and len(runs) == 1 and 2 * len(runs[0]) >= len(self._rows):
            self._held, self._sum = runs[0], part.to(self._wide)
        elif self._sum is not None and runs == (self._rows,) and self._held != self._rows:
            before, total = as_slice(self._held), part.to(self._wide)
            total[:, before].add_(self._sum)
            self._held, self._sum = self._rows, total
        elif len(runs) > _RUNS and all(a.stop <= b.start for a, b in pairwise(runs)):
            self.total.index_add_(1, ints_on(runs, torch.int64, part), part.to(self._wide))
        else:
            shares = (part,) if len(runs) == 1 else part.split([*map(len, runs)], 1)
            for run, share in zip(runs, shares, strict=True):
                held = self._find(run)
                # += on an item would also copy the sum
                (self.total[:, as_slice(run)] if held is None else held).add_(share)

    def take(self) -> tuple[range, Tensor]:
        """Return and release the sum: a range of rows, and their sum; all other rows are zero."""
        taken = self._held, self._zeros(0) if self._sum is None else self._sum
        self._held, self._sum = range(0), None
        return taken

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
    """Gradients of some rows of keys and values, of heads ``like`` these."""

    def __init__(self, like: Pair, rows: int) -> None:
        k, v = like
        self.k, self.v = RowSum(k, rows), RowSum(v, rows)

    def add(self, rows: Ranges, dk: Tensor, dv: Tensor) -> None:
        """Add the shares of some rows, which they have in this order; they may come again."""
        self.k.add(rows, dk)
        self.v.add(rows, dv)

    def take(self) -> tuple[range, Pair]:
        """Return and release both sums: a range of rows, and their sums; other rows are zero."""
        (rows, k), (_, v) = self.k.take(), self.v.take()
        return rows, (k, v)

    @property
    def pair(self) -> Pair:
        """Return both sums."""
        return self.k.total, self.v.total


def _runs(rows: Ranges) -> Ranges:
    """Return ranges in their order, those joined of which one begins where the last one ends."""
    runs = [rows[0]]
    for piece in rows[1:]:
        if piece.start == runs[-1].stop:
            runs[-1] = range(runs[-1].start, piece.stop)
        else:
            runs.append(piece)
    return tuple(runs)


def _span(rows: range) -> Span:
    return rows.start, len(rows)


def as_slice(rows: range) -> slice:
    """Return a range of rows as an index."""
    return slice(rows.start, rows.stop)


Weights = tuple[Tensor, Tensor]  # room for them, ``[..., rows]`` and ``[..., rows, 1]``


def weights_of(lse: Tensor) -> Weights:
    """Return room for the weights of a merge.

    With a gap after the rows of each head: kernels round the last few elements of a stretch in
    another way than the others, so that a row's bits would depend on how many heads lie beside it.
    """
    room = lse.new_empty((*lse.shape[:-1], lse.shape[-1] + 1))[..., :-1]
    return room, room.unsqueeze(-1)


def merge(
    out: Tensor,
    lse: Tensor,
    other_out: Tensor,
    other_lse: Tensor,
    room: Weights | None = None,
    *,
    hides: bool = True,
) -> None:
    """Fold attention over further keys into ``out`` and ``lse``, in place.

    ``out`` is ``[..., rows, head_size]``, ``lse`` the log-sum-exp of the scores ``[..., rows]``.
    Rows without keys have ``lse = -inf`` and leave the other side as it is; the other side has some
    only where it ``hides`` keys. The weight is that of online softmax (Milakov and Gimelshein,
    arXiv 1805.02867, section 3).
    """
    weight, of_rows = weights_of(lse) if room is None else room
    if other_lse.dtype != lse.dtype:
        other_lse = other_lse.to(lse.dtype)
    torch.sub(other_lse, lse, out=weight).sigmoid_()
    if hides:
        weight.masked_fill_(other_lse == -torch.inf, 0.0)
    out.lerp_(other_out if other_out.dtype == out.dtype else other_out.to(out.dtype), of_rows)
    lse.copy_(torch.logaddexp(lse, other_lse, out=weight))


@cache
def fused_merge() -> Callable[..., None]:
    """Return `merge` as one kernel that reads and writes each element once, made by the compiler.

    For sizes and strides of all kinds; where those of one program are more than the compiler keeps,
    it runs the operations as they are.
    """
    return torch.compile(_merge_at_once, dynamic=True)


def _merge_at_once(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, room: None = None
) -> None:
    other_lse = other_lse.to(lse.dtype)
    weight = torch.sigmoid(other_lse - lse).masked_fill(other_lse == -torch.inf, 0.0)
    out.lerp_(other_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, other_lse))


def fuses_merges(device: torch.device, dtype: torch.dtype, asked: bool | None) -> bool:
    """Return whether merges of ``dtype`` run as one compiled kernel.

    ``asked`` is the user's ``fuse_merges``; None means True on CUDA if Triton is installed. Since
    Triton also needs a C compiler, the kernel is compiled and run once per device and dtype, on
    small tensors. If that fails, warns and returns False, or raises `BackendError` if ``asked`` is
    True. Communicates nothing. Ranks may get different answers.
    """
    if not (device.type == "cuda" and find_spec("triton") if asked is None else asked):
        return False
    fault = fault_of_fused_merge(device, dtype)
    if fault is None:
        return True
    if asked:
        raise BackendError(
            f"fuse_merges=True, but torch.compile makes no kernel for merges here: {fault}; "
            f"install a C compiler, which Triton needs on CUDA, or leave fuse_merges out"
        )
    warnings.warn(
        f"merges run as six operations: torch.compile makes no kernel for them here: {fault}; "
        f"install a C compiler, which Triton needs, or set fuse_merges=False",
        stacklevel=2,
    )
    return False


@cache
def fault_of_fused_merge(device: torch.device, dtype: torch.dtype) -> str | None:
    """Run the fused merge of small tensors; return why it fails, or None."""
    # No size is 1 or equals another: a compiler makes special code for those.
    out = torch.zeros(2, 3, 4, 8, dtype=accumulator(dtype), device=device).transpose(1, 2)
    lse = out.new_zeros(2, 4, 3)
    try:
        with torch.no_grad(), torch_compat.without_autocast(device):  # as in a forward
            fused_merge()(out, lse, torch.zeros_like(out, dtype=dtype), lse.clone(), None)
    except Exception as error:  # noqa: BLE001 - what compilers raise has no common type
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return None


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


def first_order(backward: Backward) -> Backward:
    """Make the backward of an autograd function raise an error if ``create_graph`` is True."""
    return torch_compat.first_order(
        backward,
        InputError,
        "a backward with create_graph=True through context_parallel_attention is not "
        "supported: its gradients have no graph, and second derivatives would lack terms; "
        "leave create_graph out",
    )
