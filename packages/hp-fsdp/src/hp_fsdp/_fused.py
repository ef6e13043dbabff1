"""Weight gradients that a matrix product writes straight into the packed gradients."""

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ._torch import accumulates, inside_transform

AddProduct = Callable[[Tensor, Tensor], None]


class _FusedLinear(torch.autograd.Function):
    """``functional.linear`` whose weight gradient goes to ``add_product``, not to autograd."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, add_product: AddProduct
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.add_product = add_product
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        to_input = gradient @ weight if ctx.needs_input_grad[0] else None
        flat = gradient.reshape(-1, gradient.shape[-1])
        to_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        to_weight = None
        if ctx.needs_input_grad[1]:
            rows = x.reshape(-1, x.shape[-1])
            if accumulates(ctx, 1):
                ctx.add_product(flat, rows)
            else:  # a backward for other tensors than parameters, or one that returns gradients
                to_weight = flat.t() @ rows
        return to_input, to_weight, to_bias, None


def can_fuse(module: nn.Module, name: str) -> bool:
    """Return whether ``module`` is a plain ``nn.Linear`` and ``name`` its weight."""
    plain = type(module) is nn.Linear and "forward" not in vars(module)
    return plain and name == "weight"


def fuse(linear: nn.Module, is_own: Callable[[Tensor], bool], add_product: AddProduct) -> None:
    """Replace the forward of ``linear``: ``add_product`` gets the factors of weight gradients.

    Where the weight that stands there is not ``is_own``, takes no gradient, or autocast is on, in
    compiled modules and in transforms of ``torch.func``, the layer computes as it always did.
    """

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        weight = self.weight
        if torch.compiler.is_compiling() or inside_transform():
            return functional.linear(x, weight, self.bias)
        fused = torch.is_grad_enabled() and weight.requires_grad and is_own(weight)
        if not fused or torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype:
            return functional.linear(x, weight, self.bias)
        apply: Any = _FusedLinear.apply
        return cast(Tensor, apply(x, weight, self.bias, add_product))

    vars(linear)["forward"] = MethodType(forward, linear)
