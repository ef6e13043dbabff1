"""Slots in the order of their experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._permutation import invert


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedSlots:
    """The slots of ``[tokens, k]`` expert ids by expert: order, its inverse, slots per expert."""

    order: Tensor
    places: Tensor
    counts: Tensor


def sort_slots(expert_ids: Tensor, num_experts: int) -> SortedSlots:
    """Return the slots sorted by expert, stable in the token; reads nothing on the host."""
    flat = expert_ids.reshape(-1)
    # Sorting two bytes per key costs a fraction of sorting eight.
    keys = flat.to(torch.int16) if num_experts <= torch.iinfo(torch.int16).max else flat
    order = keys.argsort(stable=True)
    counts = count_ids(flat, num_experts)
    return SortedSlots(order=order, places=invert(order).view(expert_ids.shape), counts=counts)


def count_ids(expert_ids: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert occurs, ``[num_experts]`` int64 (bincount would synchronise)."""
    flat = expert_ids.reshape(-1)
    zeros = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return zeros.scatter_add_(0, flat, torch.ones_like(flat))
