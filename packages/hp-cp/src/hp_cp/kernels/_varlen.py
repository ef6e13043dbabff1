"""Many blocks in one call: the flash kernel for rows of stretches that follow each other."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from .._torch import BackwardInputs, varlen_cuda, varlen_cuda_backward
from ._interface import GRID, ScoreOptions, ints_on
from ._sdpa import SDPA, FusedBackend, cut_heads, pad_heads


class VarlenBackend(FusedBackend):
    """The flash kernels on CUDA; blocks of one kind in one launch, as packed documents have many.

    More stretches than a grid has places are several launches. A block that is alone is computed as
    ``sdpa`` does.
    """

    def forward_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Sequence[int],
        keys: Sequence[int],
        *,
        causal: bool,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        size, value_size = q.shape[3], v.shape[3]
        wide, scale = max(size, value_size), options.scale
        if size != value_size:
            scale = options.scale_of(size)
        batch, q, k, v = q.shape[0], *(_flat(pad_heads(x, wide)) for x in (q, k, v))
        done = []
        for stretches in _launches(rows, keys, batch):
            edges = _edges(stretches.rows, q), _edges(stretches.keys, k)
            part = stretches.of_rows(q), stretches.of_keys(k), stretches.of_keys(v)
            done.append(varlen_cuda(*part, edges, stretches.longest, causal, scale, options.window))
        out, lse = (
            _concatenated((part for part, _ in done), 0),
            _concatenated((part for _, part in done), 1),
        )
        return _unflat(cut_heads(out, value_size), batch), lse.view(
            lse.shape[0], batch, -1
        ).transpose(0, 1)

    def backward_packed(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        rows: Sequence[int],
        keys: Sequence[int],
        *,
        causal: bool,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the blocks' shares of dq, dk, dv."""
        size, value_size = q.shape[3], v.shape[3]
        wide, scale = max(size, value_size), options.scale
        if size != value_size:
            scale = options.scale_of(size)
        padded = (_flat(pad_heads(x, wide)) for x in (grad, q, k, v, out))
        batch, grad, q, k, v, out = q.shape[0], *padded
        lse = lse.transpose(0, 1).flatten(1).contiguous()
        done = []
        for stretches in _launches(rows, keys, batch):
            edges = _edges(stretches.rows, q), _edges(stretches.keys, k)
            mine, theirs = stretches.of_rows, stretches.of_keys
            part = mine(grad), mine(q), theirs(k), theirs(v), mine(out), mine(lse, 1)
            finished = BackwardInputs(*part, causal, scale, options.window)
            done.append(varlen_cuda_backward(finished, edges, stretches.longest))
        dq, dk, dv = (_concatenated(parts, 0) for parts in zip(*done, strict=True))
        dq, dk, dv = cut_heads(dq, size), cut_heads(dk, size), cut_heads(dv, value_size)
        return _unflat(dq, batch), _unflat(dk, batch), _unflat(dv, batch)


@dataclass(frozen=True, slots=True)
class _Stretches:
    """Stretches that follow each other, and where the first one begins."""

    rows: Sequence[int]
    keys: Sequence[int]
    first_row: int = 0
    first_key: int = 0

    @property
    def longest(self) -> tuple[int, int]:
        return max(self.rows, default=1), max(self.keys, default=1)

    def of_rows(self, x: Tensor, dim: int = 0) -> Tensor:
        return _narrowed(x, dim, self.first_row, sum(self.rows))

    def of_keys(self, x: Tensor) -> Tensor:
        return _narrowed(x, 0, self.first_key, sum(self.keys))


def _launches(rows: Sequence[int], keys: Sequence[int], batch: int) -> Iterator[_Stretches]:
    """Yield the stretches of all batch rows, as many at once as a grid has places."""
    rows, keys = list(rows) * batch, list(keys) * batch
    first_row = first_key = 0
    for i in range(0, max(1, len(rows)), GRID):
        stretches = _Stretches(rows[i : i + GRID], keys[i : i + GRID], first_row, first_key)
        yield stretches
        first_row += sum(stretches.rows)
        first_key += sum(stretches.keys)


def _narrowed(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    return x if length == x.shape[dim] else x.narrow(dim, start, length).contiguous()


def _concatenated(parts: Iterable[Tensor], dim: int) -> Tensor:
    first, *others = parts
    return torch.cat([first, *others], dim) if others else first


def _flat(x: Tensor) -> Tensor:
    """Return ``[batch, heads, rows, size]`` as dense ``[batch * rows, heads, size]``."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _unflat(x: Tensor, batch: int) -> Tensor:
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


def _edges(lengths: Sequence[int], x: Tensor) -> Tensor:
    """Return where stretches begin and end."""
    return ints_on((0, *accumulate(lengths)), torch.int32, x)


VARLEN = VarlenBackend("varlen", {"cuda": SDPA.kernels["cuda"]})
