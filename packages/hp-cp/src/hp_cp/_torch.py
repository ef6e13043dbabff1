"""Names of torch that are not public, in one place."""

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

# Tensors of shapes alone (2.11 to 2.13), with which memory is estimated. No public module yet.
from torch._subclasses.fake_tensor import FakeTensor

# The flash kernels of scaled_dot_product_attention on CPU (2.11 to 2.13), forward and backward.
# The public function returns no log-sum-exp, without which partial results cannot be merged.
_forward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the classes of all errors of torch.compile itself (2.11 to 2.13); no public names."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def reason_of(error: Exception) -> str:
    """Return in one line why torch.compile failed."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    if isinstance(error, FailOnRecompileLimitHit):
        return (
            "it has made as many programs as it keeps for one function; raise "
            "torch._dynamo.config.recompile_limit"
        )
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


PROGRAMS = 64  # masks x dtypes x head sizes x (forward, backward) of one process


def limited_recompiles() -> AbstractContextManager[Any]:
    """Make torch.compile keep `PROGRAMS` variants of a function, and raise if more are needed.

    By default it keeps 8, then runs the function uncompiled and only logs that (2.11 to 2.13).
    """
    import torch._dynamo

    config = torch._dynamo.config
    patch: AbstractContextManager[Any] = config.patch(
        fail_on_recompile_limit_hit=True, recompile_limit=max(PROGRAMS, config.recompile_limit)
    )
    return patch


F = TypeVar("F", bound=Callable[..., Any])
Window = tuple[int | None, int | None]
Gradients = tuple[Tensor, Tensor, Tensor]


class BackwardInputs(NamedTuple):
    """A forward whose gradient came: what kernels of the backward are given."""

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    causal: bool
    scale: float | None
    window: "Window | None" = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors, in the order in which kernels take them."""
        return self[:6]


def flash_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp; heads are dim 1, and may be grouped."""
    out, lse = _forward(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def flash_cpu_backward(x: BackwardInputs) -> Gradients:
    """Return the gradients of q, k and v."""
    dq, dk, dv = _backward(*x.tensors, 0.0, x.causal, scale=x.scale)
    return dq, dk, dv


# The kernels of scaled_dot_product_attention on CUDA (2.11 to 2.13), which torch's own context
# parallelism calls too. Their states of a random generator are for dropout, never asked for here.
_flash: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention
_flash_backward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_backward
_efficient: Callable[..., Any] = torch.ops.aten._scaled_dot_product_efficient_attention
_efficient_backward: Callable[..., Any] = (
    torch.ops.aten._scaled_dot_product_efficient_attention_backward
)
_cudnn: Callable[..., Any] = torch.ops.aten._scaled_dot_product_cudnn_attention
_cudnn_backward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_varlen: Callable[..., Any] = torch.ops.aten._flash_attention_forward
_varlen_backward: Callable[..., Any] = torch.ops.aten._flash_attention_backward

_EFFICIENT_ROWS = 32  # its log-sum-exp has a multiple of so many rows


def flash_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: Window | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp, of 16-bit dtypes; heads are dim 1.

    ``window`` counts from the diagonal that ends in the last row and key.
    """
    if window is not None:
        rows_first = (x.transpose(1, 2) for x in (q, k, v))
        state = None, None, q.shape[2], k.shape[2], 0.0, causal, False
        out, lse, *_ = _varlen(*rows_first, *state, scale=scale, **_bounds(window))
        return out.transpose(1, 2), lse
    out, lse, *_ = _flash(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def flash_cuda_backward(x: BackwardInputs) -> Gradients:
    """Return the gradients of q, k and v."""
    seed = torch.zeros(2, dtype=torch.uint64, device=x.q.device)
    state = None, None, x.q.shape[2], x.k.shape[2], 0.0, x.causal, seed, seed
    *tensors, lse = x.tensors
    if x.window is not None:
        rows_first = (y.transpose(1, 2) for y in tensors)
        given = *rows_first, lse.contiguous(), *state
        grads = _varlen_backward(*given, scale=x.scale, **_bounds(x.window))
        dq, dk, dv = (y.transpose(1, 2) for y in grads)
        return dq, dk, dv
    dq, dk, dv = _flash_backward(*tensors, lse.contiguous(), *state, scale=x.scale)
    return dq, dk, dv


def _bounds(window: Window | None) -> dict[str, int]:
    """Return the arguments for a window, of which -1 leaves a side open."""
    if window is None:
        return {}
    left, right = (-1 if side is None else side for side in window)
    return {"window_size_left": left, "window_size_right": right}


def efficient_cuda(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp; heads are dim 1, and are repeated where grouped."""
    k, v = (_repeated(x, q) for x in (k, v))
    out, lse, *_ = _efficient(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse.narrow(2, 0, q.shape[2])


def efficient_cuda_backward(x: BackwardInputs) -> Gradients:
    """Return the gradients of q, k and v."""
    rest = x.lse.new_full((*x.lse.shape[:2], -x.q.shape[2] % _EFFICIENT_ROWS), torch.inf)
    padded = torch.cat([x.lse, rest], 2)  # rows of infinity weigh nothing
    seed = torch.zeros((), dtype=torch.int64, device=x.q.device)
    around = x.grad, x.q, _repeated(x.k, x.q), _repeated(x.v, x.q), None, x.out, padded
    wanted = [True, True, True, False]
    dq, dk, dv, _ = _efficient_backward(*around, seed, seed, 0.0, wanted, x.causal, scale=x.scale)
    return dq, _summed(dk, x.k), _summed(dv, x.v)


def cudnn_cuda(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp, of 16-bit dtypes; heads are dim 1."""
    if k.shape[2] == 1:  # which cuDNN does not take (sdp_utils.cpp)
        return flash_cuda(q, k, v, causal, scale)
    out, lse, *_ = _cudnn(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.squeeze(-1)


def cudnn_cuda_backward(x: BackwardInputs) -> Gradients:
    """Return the gradients of q, k and v."""
    if x.k.shape[2] == 1:
        return flash_cuda_backward(x)
    seed = torch.zeros((), dtype=torch.int64, device=x.q.device)
    state = seed, seed, None, None, None, x.q.shape[2], x.k.shape[2], 0.0, x.causal
    grad, out = (_dense_like(y, x.q) for y in (x.grad, x.out))
    around = grad, x.q, x.k, x.v, out, x.lse.unsqueeze(-1).contiguous()
    dq, dk, dv = _cudnn_backward(*around, *state, scale=x.scale)
    return dq, dk, dv


def _dense_like(x: Tensor, q: Tensor) -> Tensor:
    """Return ``x`` dense in the order of dims of ``q``, which cuDNN may take for granted."""
    if q.stride(1) > q.stride(2):
        return x.contiguous()
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def varlen_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    causal: bool,
    scale: float | None,
    window: Window | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention of stretches of rows ``[rows, heads, size]``, and ``[heads, rows]``."""
    state = *edges, *longest, 0.0, causal, False
    out, lse, *_ = _varlen(q, k, v, *state, scale=scale, **_bounds(window))
    return out, lse


def varlen_cuda_backward(
    x: BackwardInputs, edges: tuple[Tensor, Tensor], longest: tuple[int, int]
) -> Gradients:
    """Return the gradients of q, k and v."""
    seed = torch.zeros(2, dtype=torch.uint64, device=x.q.device)
    state = *edges, *longest, 0.0, x.causal, seed, seed
    dq, dk, dv = _varlen_backward(*x.tensors, *state, scale=x.scale, **_bounds(x.window))
    return dq, dk, dv


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Return a head of keys or values once for each query head of its group."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, 1)


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of what `_repeated` got."""
    if grad.shape[1] == x.shape[1]:
        return grad
    total: Tensor = grad.unflatten(1, (x.shape[1], -1)).sum(2)
    return total


def largest_output(node: Any) -> int:
    """Return the number of elements of the largest tensor that a node of the graph returned.

    ``Node._input_metadata`` (2.11 to 2.13), which has no public name. Nested tensors, which do not
    say it there, count as large.
    """
    outputs = node._input_metadata
    if any(output.is_nested_tensor or output.is_cpp_nested_tensor for output in outputs):
        return sys.maxsize
    return max((math.prod(output.shape) for output in outputs), default=0)


# Whether two tensors are views of one storage (2.11 to 2.13), also if they have no values. There is
# no public name.
_is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


def as_one(a: Tensor, b: Tensor) -> Tensor | None:
    """Return the memory of two dense tensors as a flat one if ``b`` lies right behind ``a``.

    None if it does not.
    """
    if not _is_alias_of(a, b) or a.storage_offset() + a.numel() != b.storage_offset():
        return None
    return a.as_strided((a.numel() + b.numel(),), (1,), a.storage_offset())


def has_values(x: Tensor) -> bool:
    """Return whether a tensor has values that can be read."""
    return not (x.is_meta or isinstance(x, FakeTensor))
