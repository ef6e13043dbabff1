"""The experts' matrix products: one for each on its own block of rows, forward and backward.

A compiled graph holds each product as one operator, whatever kernel computes it: torch's own
grouped product has no shapes for other dtypes than bfloat16, and a loop over the experts needs
their numbers of rows on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._torch import (
    can_group,
    can_group_float8,
    dense,
    first_order,
    graph_op,
    grouped_mm,
    run_function,
    scaled_grouped_mm,
    unscaled_mm,
)

_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """How many rows each expert has, where the products of a layer need it."""

    counts: Tensor
    """Rows per expert ``[experts]``."""
    sizes: tuple[int, ...] | None
    """The same on the host; None for kernels that read ``counts`` on the device."""
    float8: bool = False
    """Whether rows and weights are rounded to float8, each with a scale of its own."""


def blocks_of(
    counts: Tensor, rows: Tensor, weights: Sequence[Tensor], *, float8: bool = False
) -> Blocks:
    """Return the blocks for products of ``rows`` with ``weights [experts, out, in]``.

    Reads ``counts`` on the host, once, where no kernel takes them from the device; in a compiled
    graph each product does.
    """
    if torch.compiler.is_compiling():
        return Blocks(counts=counts, sizes=None, float8=float8)
    if not rows.shape[0]:
        # Kernels need not write what is a sum of no rows: gradients of weights, for one.
        return Blocks(counts=counts, sizes=(0,) * counts.shape[0], float8=float8)
    grouped = can_group_float8(rows) if float8 else can_group(rows, *weights)
    return Blocks(counts=counts, sizes=None if grouped else tuple(counts.tolist()), float8=float8)


def grouped_linear(rows: Tensor, weight: Tensor, blocks: Blocks) -> Tensor:
    """Return ``rows[i] @ weight[expert of i].T`` as ``[rows, out]``.

    ``rows [rows, in]`` lie by expert, ``weight [experts, out, in]``. With ``blocks.float8`` both
    are rounded, per row and per row of the weight, and so is the gradient for that of the rows;
    the gradient of the weight is that of the numbers before rounding.
    """
    if torch.compiler.is_compiling():
        return _linear_op(rows, weight, blocks.counts, blocks.float8, False)
    return run_function(_GroupedLinear, rows, weight, blocks)


def gather_bias(bias: Tensor, blocks: Blocks, num_rows: int) -> Tensor:
    """Return the ``bias [experts, out]`` of each row's expert ``[rows, out]``.

    The gradient is summed in the order of the rows, in float32 at least.
    """
    if torch.compiler.is_compiling():
        return _gather_op(bias, blocks.counts, num_rows)
    return run_function(_GatherBias, bias, blocks, num_rows)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, blocks: Blocks) -> Tensor:
        rows_need, weight_needs, _ = ctx.needs_input_grad
        ctx.save_for_backward(
            rows if weight_needs else None, weight if rows_need else None, blocks.counts
        )
        ctx.sizes, ctx.float8 = blocks.sizes, blocks.float8
        return products(rows, weight, blocks)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, counts = ctx.saved_tensors
        blocks = Blocks(counts=counts, sizes=ctx.sizes, float8=ctx.float8)
        return (
            None if weight is None else products(grads[0], weight.transpose(1, 2), blocks),
            None if rows is None else outer_products(grads[0], rows, blocks),
            None,
        )


class _GatherBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, blocks: Blocks, num_rows: int) -> Tensor:
        ctx.save_for_backward(blocks.counts)
        return _gather(bias, blocks.counts, num_rows)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (counts,) = ctx.saved_tensors
        return _block_sums(grads[0], counts), None, None


def _gather(bias: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    experts = torch.arange(counts.shape[0], device=counts.device)
    owners = experts.repeat_interleave(counts, output_size=num_rows)
    return bias.index_select(0, owners)


def _block_sums(rows: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of each block of ``rows [rows, dim]``: ``[blocks, dim]``."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    sums = torch.segment_reduce(rows.to(wide), "sum", lengths=counts, axis=0, unsafe=True)
    return sums.to(rows.dtype)


def products(rows: Tensor, weight: Tensor, blocks: Blocks) -> Tensor:
    """Return what `grouped_linear` does, without a graph."""
    if blocks.float8:
        return _float8_products(rows, weight, blocks)
    if blocks.sizes is None:
        ends = blocks.counts.cumsum(0, dtype=torch.int32)
        return grouped_mm(dense(rows), weight.transpose(-2, -1), ends)
    result = rows.new_empty(rows.shape[0], weight.shape[1])
    # unbind makes all views at once; indexing weight[i] costs a call for each.
    parts = zip(rows.split(blocks.sizes), weight.unbind(), result.split(blocks.sizes), strict=True)
    for x, matrix, part in parts:
        torch.mm(x, matrix.t(), out=part)
    return result


def outer_products(grad: Tensor, rows: Tensor, blocks: Blocks) -> Tensor:
    """Return ``grad[block].T @ rows[block]`` of each expert: ``[experts, out, in]``."""
    if blocks.sizes is None:
        ends = blocks.counts.cumsum(0, dtype=torch.int32)
        return grouped_mm(dense(grad).t(), dense(rows), ends)
    result = rows.new_empty(len(blocks.sizes), grad.shape[1], rows.shape[1])
    parts = zip(grad.split(blocks.sizes), rows.split(blocks.sizes), result.unbind(), strict=True)
    for g, x, part in parts:
        torch.mm(g.t(), x, out=part)
    return result


def _float8_products(rows: Tensor, weight: Tensor, blocks: Blocks) -> Tensor:
    narrow, scales = to_float8(rows)
    narrow_weight, weight_scales = to_float8(weight)
    if blocks.sizes is None:
        ends = blocks.counts.cumsum(0, dtype=torch.int32)
        return scaled_grouped_mm(
            narrow, narrow_weight, scales[:, 0], weight_scales[..., 0], ends, rows.dtype
        )
    each = zip(
        narrow.split(blocks.sizes),
        scales.split(blocks.sizes),
        narrow_weight.unbind(),
        weight_scales.unbind(),
        strict=True,
    )
    products = [unscaled_mm(x, w.t()) * (s * t.t()) for x, s, w, t in each]
    return torch.cat(products).to(rows.dtype)


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x [..., n]`` in float8 and the scale of each row ``[..., 1]``, float32.

    The largest number of a row becomes the largest of float8; rows of zeros have the scale 1.
    """
    most = x.detach().abs().amax(-1, keepdim=True).to(torch.float32)
    scales = torch.where(most == 0, 1.0, most / _LARGEST)
    narrow = (x.to(torch.float32) / scales).clamp(-_LARGEST, _LARGEST).to(_FLOAT8)
    return narrow.contiguous(), scales


def _linear_in_graph(
    rows: Tensor, weight: Tensor, counts: Tensor, float8: bool, transposed: bool
) -> Tensor:
    blocks = blocks_of(counts, rows, [weight], float8=float8)
    return products(rows, weight.transpose(1, 2) if transposed else weight, blocks)


def _outer_in_graph(grad: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    grad, rows = dense(grad), dense(rows)
    return outer_products(grad, rows, blocks_of(counts, rows, [grad[None], rows[None]]))


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, counts = ctx.saved_tensors
    return (
        None if weight is None else _linear_op(grad, weight, counts, ctx.float8, True),
        None if rows is None else _outer_op(grad, rows, counts),
        None,
        None,
        None,
    )


def _save_linear(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool, bool], output: Tensor
) -> None:
    rows, weight, counts, ctx.float8, _ = inputs
    rows_need, weight_needs, *_ = ctx.needs_input_grad
    ctx.save_for_backward(rows if weight_needs else None, weight if rows_need else None, counts)


def _save_counts(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


_outer_op = graph_op(
    f"{__name__}.outer",
    _outer_in_graph,
    lambda grad, rows, counts: rows.new_empty(counts.shape[0], grad.shape[1], rows.shape[1]),
)
_linear_op = graph_op(
    f"{__name__}.linear",
    _linear_in_graph,
    lambda rows, weight, counts, float8, transposed: rows.new_empty(
        rows.shape[0], weight.shape[2 if transposed else 1]
    ),
    backward=_linear_backward,
    save=_save_linear,
)
_sums_op = graph_op(
    f"{__name__}.block_sums",
    _block_sums,
    lambda rows, counts: rows.new_empty(counts.shape[0], rows.shape[1]),
)
_gather_op = graph_op(
    f"{__name__}.gather",
    _gather,
    lambda bias, counts, num_rows: bias.new_empty(num_rows, bias.shape[1]),
    backward=lambda ctx, grad: (_sums_op(grad, *ctx.saved_tensors), None, None),
    save=_save_counts,
)
