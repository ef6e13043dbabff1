"""Sums of what blocks contribute to rows: outputs, and gradients of queries and of keys."""

import torch
from torch import Tensor

from .._blocks import Block
from .._merge import accumulator, merge
from .._mesh import Pair
from .._ranges import Ranges, Ranks, size


class RowsOut:
    """The output and log-sum-exp of all rows, over the keys so far."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._wide = accumulator(q.dtype)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def merge(self, block: Block, out: Tensor, lse: Tensor) -> None:
        """Take the attention of a block's rows over its keys."""
        queries = block.queries
        if self._out is None or self._lse is None:
            if len(queries) == self._q.shape[2]:  # kept as it is while no other part comes
                self._out, self._lse = out, lse
                return
            self._out = self._q.new_zeros(self._q.shape, dtype=self._wide)
            self._lse = self._q.new_full(self._q.shape[:3], -torch.inf, dtype=self._wide)
        rows = as_slice(queries)
        self._out, self._lse = self._out.to(self._wide), self._lse.to(self._wide)
        merge(self._out[:, :, rows], self._lse[:, :, rows], out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return both; without any row both are empty."""
        if self._out is None or self._lse is None:
            lse = self._q.new_empty(self._q.shape[:3], dtype=self._wide)
            return self._q.new_empty(self._q.shape), lse
        return self._out.to(self._q.dtype), self._lse


class RowSum:
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
        self.total[:, :, as_slice(rows)] += part

    @property
    def total(self) -> Tensor:
        """Return the sum so far."""
        if self._total is None:
            batch, heads, _, width = self._like.shape
            shape = (batch, heads, self._rows, width)
            self._total = self._like.new_zeros(shape, dtype=accumulator(self._like.dtype))
        return self._total


class KeySum:
    """Gradients of the keys and values that were held."""

    def __init__(self, like: Tensor, rows: Ranges) -> None:
        self._places = Ranks(rows)
        self._k, self._v = RowSum(like, size(rows)), RowSum(like, size(rows))

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
