"""Which dtype a group computes and reduces in, and casts at the borders of a module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from ._nested import map_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """What one group gathers and computes in, and what its gradients are reduced in."""

    compute: torch.dtype
    reduce: torch.dtype


def choose_dtypes(policy: MixedPrecisionPolicy, stored: torch.dtype) -> Dtypes:
    """Return the dtypes of a group whose shards are of dtype ``stored``.

    Parameters of integers are left as they are; gradients are reduced in the dtype that they are
    computed in, unless the policy says otherwise.
    """
    floating = stored.is_floating_point
    compute = policy.param_dtype if floating and policy.param_dtype is not None else stored
    return Dtypes(compute=compute, reduce=policy.reduce_dtype or compute)


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """Return ``value`` with every floating-point tensor in it cast; None casts nothing."""
    if dtype is None:
        return value

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, value)


def move_tensors(value: Any, device: torch.device) -> Any:
    """Return ``value`` with every tensor in it on ``device``."""
    return map_tensors(lambda tensor: tensor.to(device), value)
