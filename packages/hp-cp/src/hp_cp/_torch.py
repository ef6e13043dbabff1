"""Names of torch that are not public, in one place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# torch.utils._pytree (2.11 to 2.13): containers of tensors as trees. No public module yet; the
# optree package has the same functions.
from torch.utils._pytree import tree_map as _tree_map
from torch.utils._pytree import tree_structure as _tree_structure

# The flash kernels of scaled_dot_product_attention on CPU (2.11 to 2.13), forward and backward.
# The public function returns no log-sum-exp, without which partial results cannot be merged.
_forward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flash_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp; heads are dim 1, and may be grouped."""
    out, lse = _forward(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def flash_cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    dq, dk, dv = _backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    return dq, dk, dv


# The flash kernels on CUDA (2.11 to 2.13), which torch's own context parallelism calls too. Their
# numbers of the random state are for dropout, which is never asked for here.
_forward_cuda: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention
_backward_cuda: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_backward


def flash_cuda(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp, of 16-bit dtypes; heads are dim 1."""
    out, lse, *_ = _forward_cuda(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def flash_cuda_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    state = (None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed)
    dq, dk, dv = _backward_cuda(grad, q, k, v, out, lse.contiguous(), *state, scale=scale)
    return dq, dk, dv


def map_tensors(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return ``tree`` with ``function`` applied to every tensor and what ``others`` hold there."""
    return _tree_map(
        lambda leaf, *at: function(leaf, *at) if isinstance(leaf, Tensor) else leaf, tree, *others
    )


def share_structure(tree: Any, other: Any) -> bool:
    """Return whether two trees are built of the same containers."""
    return bool(_tree_structure(tree) == _tree_structure(other))
