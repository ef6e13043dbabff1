"""Many blocks of one kind in one call of a backend that can."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._blocks import Block
from ..kernels._interface import PackedBackend


def forward_packed(
    blocks: Sequence[Block],
    inputs: Sequence[tuple[Tensor, Tensor, Tensor]],
    backend: PackedBackend,
    causal: bool,
    scale: float | None,
) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """Yield each block with its output and log-sum-exp; ``inputs`` are its rows of q, k and v."""
    q, k, v = _packed(blocks, inputs)
    out, lse = backend.forward_packed(q, k, v, *_stretches(blocks), causal=causal, scale=scale)
    rows = [len(block.queries) for block in blocks]
    for block, *mine in zip(blocks, out.split(rows, 2), lse.split(rows, 2), strict=True):
        part, part_lse = (_turned(x, block) for x in mine)
        yield block, part, part_lse


def backward_packed(
    blocks: Sequence[Block],
    inputs: Sequence[tuple[Tensor, ...]],
    backend: PackedBackend,
    causal: bool,
    scale: float | None,
) -> Iterator[tuple[Block, Tensor, Tensor, Tensor]]:
    """Yield each block with its share of dq, dk and dv; ``inputs`` are grad, q, k, v, out, lse."""
    grad, q, k, v, out, lse = _packed(blocks, inputs)
    given = grad, q, k, v, out, lse, *_stretches(blocks)
    dq, dk, dv = backend.backward_packed(*given, causal=causal, scale=scale)
    rows = [len(block.queries) for block in blocks]
    keys = [len(block.keys) for block in blocks]
    shares = zip(dq.split(rows, 2), dk.split(keys, 2), dv.split(keys, 2), strict=True)
    for block, share in zip(blocks, shares, strict=True):
        part_q, part_k, part_v = (_turned(x, block) for x in share)
        yield block, part_q, part_k, part_v


def _stretches(blocks: Sequence[Block]) -> tuple[list[int], list[int]]:
    """Return the rows and the keys of every square or rectangle."""
    rows = [len(block.queries) // block.tiles for block in blocks for _ in range(block.tiles)]
    keys = [len(block.keys) // block.tiles for block in blocks for _ in range(block.tiles)]
    return rows, keys


def _packed(blocks: Sequence[Block], inputs: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    turned = [[_turned(x, b) for x in mine] for b, mine in zip(blocks, inputs, strict=True)]
    return [torch.cat(column, 2) for column in zip(*turned, strict=True)]


def _turned(x: Tensor, block: Block) -> Tensor:
    """Return anticausal squares from their end, as causal ones, and back."""
    if block.kind != "anticausal":
        return x
    turned: Tensor = x.unflatten(2, (block.tiles, -1)).flip(3).flatten(2, 3)
    return turned
