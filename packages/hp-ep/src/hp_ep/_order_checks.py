"""Whether orders of rows are what they must be; values are looked at on the CPU only."""

import torch
from torch import Tensor

from ._errors import ExpertConfigError


def check_permutation(rows: Tensor, indices: Tensor) -> None:
    """Raise an `ExpertConfigError` unless ``indices`` name each of ``rows`` once."""
    if indices.shape != rows.shape[:1]:
        raise ExpertConfigError(
            f"a permutation of {rows.shape[0]} rows has shape ({rows.shape[0]},), "
            f"got indices {tuple(indices.shape)}"
        )
    if indices.dtype != torch.int64:
        raise ExpertConfigError(f"indices are {indices.dtype}; they must be torch.int64")
    if not indices.is_cpu:  # looking would synchronise
        return
    number = indices.shape[0]
    counts = torch.zeros(number, dtype=torch.uint8)
    # Where one index is out of range another is missing: count the others.
    known = indices[(indices >= 0) & (indices < number)]
    missing = counts.index_fill_(0, known, 1) == 0
    if missing.any():
        raise ExpertConfigError(
            f"indices are no permutation of {number} rows: {missing.nonzero()[0].item()} is not "
            f"among them; each of 0 .. {number - 1} must be there once"
        )


def check_slots(order: Tensor, places: Tensor, tokens: int) -> None:
    """Raise an `ExpertConfigError` unless ``order`` and ``places`` are inverses for ``tokens``."""
    if places.dim() != 2 or places.shape[0] != tokens or order.shape != (places.numel(),):
        raise ExpertConfigError(
            f"order {tuple(order.shape)} and places {tuple(places.shape)} must be [tokens * k] and "
            f"[tokens, k] for {tokens} tokens"
        )
    if order.dtype != torch.int64 or places.dtype != torch.int64:
        raise ExpertConfigError(
            f"order is {order.dtype} and places are {places.dtype}; they must be torch.int64"
        )
    if not (order.is_cpu and places.is_cpu):  # looking would synchronise
        return
    slots = places.reshape(-1)
    check_permutation(slots, slots)
    wrong = order.index_select(0, slots) != torch.arange(slots.shape[0])
    if wrong.any():
        slot = int(wrong.nonzero()[0].item())
        raise ExpertConfigError(
            f"places say that slot {slot} is row {slots[slot].item()}, but order has slot "
            f"{order[slots[slot]].item()} there; places must be the inverse of order"
        )


def check_counts(counts: Tensor, num_rows: int | None) -> None:
    """Raise an `ExpertConfigError` unless ``counts`` are those of ``num_rows`` rows, if given."""
    if counts.dtype not in (torch.int64, torch.int32):
        raise ExpertConfigError(f"counts are {counts.dtype}; they must be torch.int64 or int32")
    if not counts.is_cpu:  # looking would synchronise
        return
    numbers = counts.tolist()
    if min(numbers, default=0) < 0 or num_rows not in (None, sum(numbers)):
        what = "" if num_rows is None else f" and sum to num_rows={num_rows}"
        raise ExpertConfigError(f"counts {numbers} must be at least 0{what}")
