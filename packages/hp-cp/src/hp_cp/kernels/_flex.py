"""Blocks through an attention that autograd knows, such as FlexAttention."""

import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._mask_mod import in_band
from .._masks import MaskMod
from .._ranges import Band, Kernel
from .._torch import compiler_errors, limited_recompiles, reason_of
from ._interface import ScoreOptions

_TILE = 128  # rows and keys of a block from which on there are compiled kernels for any length

# What compiling failed for in this process: the id of the mask function, which is not kept alive,
# and the dtype. If another function gets the id, it runs uncompiled.
_FAILED: set[tuple[int, torch.dtype]] = set()

Result = TypeVar("Result")
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
    """``torch.nn.attention.flex_attention`` on CUDA, compiled if Triton is installed.

    The backward runs the forward again. Blocks with fewer than 128 rows or keys, and blocks for
    which compiling failed, run uncompiled: the memory then holds all scores of the block.
    """

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
        return _run(lambda attention: attention(q, k, v, causal, options), q, k, options)

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
        given = grad, q, k, v, out, lse, causal, options
        return _run(lambda attention: recomputed_gradients(attention, *given), q, k, options)


def _run(
    call: Callable[[Attention], Result], q: Tensor, k: Tensor, options: ScoreOptions
) -> Result:
    """Call with the compiled attention if there is one for these tensors, else the plain one."""
    task = id(options.mask_mod), q.dtype
    if _compiles_on(q.device) and min(q.shape[2], k.shape[2]) >= _TILE and task not in _FAILED:
        try:
            with limited_recompiles():
                return call(partial(_attended, *_compiled()))
        except compiler_errors() as error:
            _FAILED.add(task)
            _warn_of(error, options.mask_mod, q.dtype)
    return call(partial(_attended, *_plain()))


def _compiles_on(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def _attended(
    attention: Callable[..., Any],
    blocks: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    options: ScoreOptions,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of FlexAttention's two functions, compiled or not."""
    from torch.nn.attention.flex_attention import AuxRequest

    cap, rows, keys = options.softcap, q.shape[2], k.shape[2]
    seen = _mask_of(options.band(causal, rows, keys), options, q.device)
    batch, heads = q.shape[:2] if options.mask_mod is not None else (None, None)
    out, extra = attention(
        q,
        k,
        v,
        None if cap is None else lambda score, *at: cap * torch.tanh(score / cap),
        None if seen is None else blocks(seen, batch, heads, rows, keys, q.device),
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if extra.lse is None:
        raise RuntimeError("flex_attention returned no log-sum-exp, for which it was asked")
    return out, extra.lse


def _plain() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return FlexAttention's two functions, as functions of this module.

    The compiler keeps a limited number of programs for a function. Those that users compile from
    FlexAttention itself do not count here.
    """
    # Imported where it is called: it loads much that nothing else here needs.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attend(*given: Any, **options: Any) -> Any:
        return flex_attention(*given, **options)

    def make_blocks(*given: Any) -> Any:
        return create_block_mask(*given)

    return attend, make_blocks


@cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return FlexAttention's two functions, compiled once for blocks of all lengths."""
    attention, blocks = (torch.compile(function, dynamic=True) for function in _plain())
    return attention, blocks


def _warn_of(error: Exception, function: MaskMod | None, dtype: torch.dtype) -> None:
    """Warn that blocks with a mask function and a dtype run uncompiled from now on."""
    warnings.warn(
        f"FlexAttention runs uncompiled and holds all scores of a block: torch.compile makes no "
        f"kernel for mask_mod={function!r} and {dtype} here: {reason_of(error)}; "
        f"backend='eager' holds a few million scores at a time",
        stacklevel=2,
    )


def _mask_of(band: Band, options: ScoreOptions, device: torch.device) -> MaskMod | None:
    """Return the mask function of a call's rows and keys, counted from its first ones."""
    function, places = options.mask_mod, options.places
    if function is not None and places is not None:
        batch, rows, keys, heads = places

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return function(batch[b, 0, 0], heads[h], rows[0, 0, i], keys[0, 0, j])

        return mask_mod
    if band == (None, None):
        return None
    # As tensors, because numbers would be constants of a kernel for each block's own band.
    lowest, highest = (None if x is None else torch.full((), x, device=device) for x in band)

    def in_window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return in_band((lowest, highest), i, j)

    return in_window
