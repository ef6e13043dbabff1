"""Blocks through a backend, which knows full rectangles and causal squares."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._blocks import Block
from .._ranges import Ranks
from .._repeats import repeat_heads, sum_heads
from ..kernels._interface import GRID
from ._packed import backward_packed, forward_packed
from ._run import Held, Run
from ._sums import as_slice


def forward_blocks(
    blocks: Sequence[Block],
    q: Tensor,
    held: Held,
    run: Run,
    take: Callable[[Block, Tensor, Tensor], None],
) -> None:
    """Hand each block to ``take`` with the output and log-sum-exp of its rows, new tensors.

    Nothing of a block is kept here while the next one is computed.
    """
    for group in _groups(blocks, run):
        inputs = [_inputs(block, q, held, run) for block in group]
        causal = group[0].kind != "full"
        if run.packer is not None and len(group) > 1:
            for block, out, lse in forward_packed(group, inputs, run.packer, causal, run.scale):
                take(block, out, lse)
        else:
            take(group[0], *_forward_alone(group[0], inputs[0], run))


def backward_blocks(
    blocks: Sequence[Block],
    grad: Tensor,
    q: Tensor,
    held: Held,
    out: Tensor,
    lse: Tensor,
    run: Run,
    take: Callable[[Block, Tensor, Tensor, Tensor], None],
) -> None:
    """Hand each block to ``take`` with its share of dq, dk and dv.

    ``out`` and ``lse`` are over all keys. Nothing of a block is kept here while the next one is
    computed.
    """
    for group in _groups(blocks, run):
        inputs = [
            (_rows(grad, b), *_inputs(b, q, held, run), _rows(out, b), _rows(lse, b)) for b in group
        ]
        causal = group[0].kind != "full"
        if run.packer is not None and len(group) > 1:
            shares = backward_packed(group, inputs, run.packer, causal, run.scale)
            for block, dq, dk, dv in shares:
                take(block, dq, sum_heads(dk, run.repeats), sum_heads(dv, run.repeats))
        else:
            take(group[0], *_backward_alone(group[0], inputs[0], run))


def _forward_alone(block: Block, inputs: Sequence[Tensor], run: Run) -> tuple[Tensor, Tensor]:
    def launch(*part: Tensor) -> tuple[Tensor, ...]:
        return run.backend.forward(*part, causal=block.kind != "full", scale=run.scale)

    out, lse = _launched(launch, [_tiled(x, block) for x in inputs])
    return _untiled(out, block), _untiled(lse, block)


def _backward_alone(
    block: Block, inputs: Sequence[Tensor], run: Run
) -> tuple[Tensor, Tensor, Tensor]:
    def launch(*part: Tensor) -> tuple[Tensor, ...]:
        return run.backend.backward(*part, causal=block.kind != "full", scale=run.scale)

    grads = _launched(launch, [_tiled(x, block) for x in inputs])
    dq, dk, dv = (_untiled(x, block) for x in grads)
    return dq, sum_heads(dk, run.repeats), sum_heads(dv, run.repeats)


def _launched(
    launch: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return what ``launch`` makes of all batch rows, of as many at once as a grid has places."""
    if inputs[0].shape[0] <= GRID:
        return launch(*inputs)
    parts = zip(*(x.split(GRID) for x in inputs), strict=True)
    done = [launch(*part) for part in parts]
    return tuple(torch.cat(column) for column in zip(*done, strict=True))


def _groups(blocks: Sequence[Block], run: Run) -> list[list[Block]]:
    """Return the blocks that are computed together: by kernel where the backend can."""
    if run.packer is None:
        return [[block] for block in blocks]
    full = [block for block in blocks if block.kind == "full"]
    squares = [block for block in blocks if block.kind != "full"]
    return [group for group in (full, squares) if group]


def _inputs(block: Block, q: Tensor, held: Held, run: Run) -> tuple[Tensor, Tensor, Tensor]:
    keys = as_slice(Ranks(held.rows).of(block.keys))
    k, v = (repeat_heads(x[:, :, keys], run.repeats) for x in (held.k, held.v))
    return _rows(q, block), k, v


def _rows(x: Tensor, block: Block) -> Tensor:
    return x[:, :, as_slice(block.queries)]


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
