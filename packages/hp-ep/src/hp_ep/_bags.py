"""Rows that belong to tokens, any number to each: spread tokens to rows, sum rows to tokens."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._permutation import row_products
from ._torch import first_order, run_function


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bags:
    """Which rows belong to which token.

    ``tokens [rows]`` is each row's token; ``rows [rows]`` lists the rows token by token and
    ``starts [tokens]`` where each token's begin in that list.
    """

    tokens: Tensor
    rows: Tensor
    starts: Tensor


def bags_of(tokens: Tensor, num_tokens: int) -> Bags:
    """Return the bags of rows with these tokens ``[rows]``; reads nothing on the host."""
    counts = torch.zeros(num_tokens, dtype=torch.int64, device=tokens.device)
    counts.scatter_add_(0, tokens, torch.ones_like(tokens))
    # Sorting four bytes per key costs less than sorting eight.
    rows = tokens.to(torch.int32).argsort(stable=True)
    return Bags(tokens=tokens, rows=rows, starts=counts.cumsum(0) - counts)


def spread(x: Tensor, bags: Bags) -> Tensor:
    """Return each row's token ``[rows, dim]`` of ``x [tokens, dim]``; backward is `collect`."""
    return run_function(_Spread, x, bags)


def collect(rows: Tensor, bags: Bags, weights: Tensor | None = None) -> Tensor:
    """Return the sum of each token's rows ``[tokens, dim]``, times ``weights [rows]`` if given.

    The sum is deterministic. Gradients: of ``rows``, the token's gradient times the weight; of
    ``weights``, the inner product of row and gradient.
    """
    return run_function(_Collect, rows, weights, bags)


def _sums(rows: Tensor, bags: Bags, weights: Tensor | None) -> Tensor:
    if not rows.numel():  # torch's sums refuse to choose from nothing
        return rows.new_zeros(bags.starts.shape[0], rows.shape[1])
    scale = None if weights is None else weights.index_select(0, bags.rows)
    total: Tensor = F.embedding_bag(
        bags.rows, rows.contiguous(), bags.starts, mode="sum", per_sample_weights=scale
    )
    return total


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bags: Bags) -> Tensor:
        ctx.save_for_backward(bags.tokens, bags.rows, bags.starts)
        return x.index_select(0, bags.tokens)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, rows, starts = ctx.saved_tensors
        return _sums(grads[0], Bags(tokens=tokens, rows=rows, starts=starts), None), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, bags: Bags) -> Tensor:
        # Without a gradient of the weights the rows need not be kept.
        keep = weights is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(rows if keep else None, weights, bags.tokens)
        return _sums(rows, bags, None if weights is None else weights.to(rows.dtype))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, tokens = ctx.saved_tensors
        grad = grads[0].index_select(0, tokens)
        if weights is None:
            return grad, None, None
        grad_weights = None if rows is None else row_products(rows, grad).to(weights.dtype)
        grad *= weights.to(grad.dtype)[:, None]
        return grad, grad_weights, None
