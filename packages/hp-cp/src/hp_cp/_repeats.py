"""Kv heads that unequal numbers of query heads read, as kernels take them and back."""

from collections.abc import Sequence

import torch
from torch import Tensor


def repeat_heads(x: Tensor, repeats: Sequence[int] | None) -> Tensor:
    """Return kv heads, dim 1, each ``repeats`` times: once for each query head that reads it.

    None leaves them alone. Made of views and one copy: a device waits for an index from a list.
    """
    if repeats is None:
        return x
    heads = zip(x.split(1, 1), repeats, strict=True)
    return torch.cat([head.expand(-1, times, -1, -1) for head, times in heads], 1)


def sum_heads(x: Tensor, repeats: Sequence[int] | None) -> Tensor:
    """Return the gradient of what was repeated."""
    if repeats is None:
        return x
    return torch.cat([part.sum(1, keepdim=True) for part in x.split(list(repeats), 1)], 1)
