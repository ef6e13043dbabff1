"""Blocks through an attention that autograd knows, such as FlexAttention."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._mask_mod import in_band
from .._masks import MaskMod
from .._ranges import Band, Kernel
from ._interface import ScoreOptions

Attention = Callable[[Tensor, Tensor, Tensor, bool, ScoreOptions], tuple[Tensor, Tensor]]


def recomputed_gradients(
    attention: Attention,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    options: ScoreOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's share of dq, dk, dv by running ``attention`` again under autograd.

    Over all keys ``out`` is the sum of the blocks' outputs ``o`` with weights ``w = exp(l - lse)``
    of their log-sum-exps ``l``: the gradient of ``o`` is ``w grad``, and that of ``l`` is ``w``
    times the sum over the head size of ``grad (o - out)``.
    """
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        part, part_lse = attention(q, k, v, causal, options)
        weight = (part_lse.detach() - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
        wide = grad.to(weight.dtype)
        to_lse = weight * (wide * (part.detach() - out)).sum(-1)
        to_part = (wide * weight.unsqueeze(-1)).to(part.dtype)
        dq, dk, dv = torch.autograd.grad((part, part_lse), (q, k, v), (to_part, to_lse))
    return dq, dk, dv


class FlexBackend:
    """``torch.nn.attention.flex_attention`` on CUDA, whose backward runs the forward again."""

    name = "flex"

    def supports(
        self,
        kernel: Kernel,
        device: torch.device,
        dtype: torch.dtype,
        head_size: int,
        value_size: int,
        options: ScoreOptions,
    ) -> str | None:
        """Return None for floating dtypes on CUDA, else the reason."""
        if device.type != "cuda":
            return f"it has no backward on {device.type}"
        if not dtype.is_floating_point:
            return f"it takes floating dtypes, not {dtype}"
        return options.lack("scale", "softcap", "window", "mask_mod")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: ScoreOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        return _flex(q, k, v, causal, options)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's share of dq, dk, dv."""
        return recomputed_gradients(_flex, grad, q, k, v, out, lse, causal, options)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, options: ScoreOptions
) -> tuple[Tensor, Tensor]:
    # Imported where it is called: it loads much that nothing else here needs.
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    grouped, aux, cap = q.shape[1] != k.shape[1], AuxRequest(lse=True), options.softcap
    rows, keys = q.shape[2], k.shape[2]
    seen = _mask_of(options.band(causal, rows, keys), options)
    batch, heads = q.shape[:2] if options.mask_mod is not None else (None, None)
    out, extra = flex_attention(
        q,
        k,
        v,
        None if cap is None else lambda score, *at: cap * torch.tanh(score / cap),
        None if seen is None else create_block_mask(seen, batch, heads, rows, keys, q.device),
        scale=options.scale,
        enable_gqa=grouped,
        return_aux=aux,
    )
    if extra.lse is None:
        raise RuntimeError("flex_attention returned no log-sum-exp, for which it was asked")
    return out, extra.lse


def _mask_of(band: Band, options: ScoreOptions) -> MaskMod | None:
    """Return the mask function of a call's rows and keys, counted from its first ones."""
    function, places = options.mask_mod, options.places
    if function is not None and places is not None:
        batch, rows, keys, heads = places

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return function(batch[b, 0, 0], heads[h], rows[0, 0, i], keys[0, 0, j])

        return mask_mod
    if band == (None, None):
        return None
    return lambda b, h, i, j: in_band(band, i, j)
