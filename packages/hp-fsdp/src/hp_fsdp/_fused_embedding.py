"""Weight gradients of embeddings that are added row by row to the packed gradients."""

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ._torch import accumulates, inside_transform

AddRows = Callable[[Tensor, Tensor], None]


class _FusedEmbedding(torch.autograd.Function):
    """``functional.embedding`` whose weight gradient goes to ``add_rows``, not to autograd."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, add_rows: AddRows
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight_shape = weight.shape
        ctx.padding_idx = padding_idx
        ctx.add_rows = add_rows
        return functional.embedding(ids, weight, padding_idx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, None]:
        ids = ctx.saved_tensors[0].flatten()
        rows = gradients[0].reshape(-1, ctx.weight_shape[1])
        if ctx.padding_idx is not None:
            kept = ids != ctx.padding_idx
            ids, rows = ids[kept], rows[kept]
        if accumulates(ctx, 1):
            ctx.add_rows(ids, rows)
            return None, None, None, None
        # a backward for other tensors than parameters, or one that returns gradients
        return None, rows.new_zeros(ctx.weight_shape).index_add_(0, ids, rows), None, None


def can_fuse_embedding(module: nn.Module, name: str) -> bool:
    """Return whether ``module`` is a plain ``nn.Embedding`` and ``name`` its weight.

    One with dense gradients, that is, which neither renormalises nor weighs by frequency.
    """
    plain = type(module) is nn.Embedding and "forward" not in vars(module) and name == "weight"
    if not plain:
        return False
    table = cast(nn.Embedding, module)
    return table.max_norm is None and not table.scale_grad_by_freq and not table.sparse


def fuse_embedding(
    embedding: nn.Module, is_own: Callable[[Tensor], bool], add_rows: AddRows
) -> None:
    """Replace the forward of ``embedding``: ``add_rows`` gets ids and rows of weight gradients.

    Where the weight that stands there is not ``is_own`` or takes no gradient, in compiled
    modules and in transforms of ``torch.func``, the layer computes as it always did.
    """

    def forward(self: nn.Embedding, ids: Tensor) -> Tensor:
        weight = self.weight
        fused = not (torch.compiler.is_compiling() or inside_transform())
        fused &= torch.is_grad_enabled()
        if not fused or not weight.requires_grad or not is_own(weight):
            return functional.embedding(ids, weight, self.padding_idx)
        apply: Any = _FusedEmbedding.apply
        return cast(Tensor, apply(ids, weight, self.padding_idx, add_rows))

    vars(embedding)["forward"] = MethodType(forward, embedding)
