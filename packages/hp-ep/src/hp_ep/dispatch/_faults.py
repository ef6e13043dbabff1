"""Faults that one rank alone can see, as numbers that travel to the whole group.

A fault is three integers: its kind (0 for none), what was given, what was expected.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from .._errors import RoutingError

FAULT_SIZE = 3


class Fault(IntEnum):
    """What can be wrong with one rank's routing."""

    NONE = 0
    ID_OUT_OF_RANGE = 1
    DUPLICATE_ID = 2
    WRONG_SUM = 3
    NEGATIVE_COUNT = 4


def checks_data(data: Tensor, validate: bool | None) -> bool:
    """Return whether to look into ``data``: as told, or by default where reading it is free."""
    return data.is_cpu if validate is None else validate


def no_fault(device: torch.device) -> Tensor:
    """Return the fault ``[3]`` of a rank without one."""
    return torch.zeros(FAULT_SIZE, dtype=torch.int64, device=device)


def check_ids(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return ``expert_ids [tokens, k]`` made safe to count and sort, and the fault ``[3]``.

    Ids outside ``0 .. num_experts - 1`` come back clamped. Nothing is read by the host.
    """
    fault = no_fault(expert_ids.device)
    if expert_ids.numel() == 0:
        return expert_ids, fault
    safe = expert_ids.clamp(0, num_experts - 1)
    if expert_ids.shape[1] > 1:
        ordered = safe.sort(1).values
        twice = ordered[:, 1:] == ordered[:, :-1]
        duplicate = ordered[:, 1:].take(twice.reshape(-1).to(torch.uint8).argmax())
        fault = _where(twice.any(), Fault.DUPLICATE_ID, duplicate, fault)
    outside = safe != expert_ids
    stray = expert_ids.take(outside.reshape(-1).to(torch.uint8).argmax())
    return safe, _where(outside.any(), Fault.ID_OUT_OF_RANGE, stray, fault)


def check_counts(counts: Tensor, num_rows: int) -> Tensor:
    """Return the fault ``[3]`` of ``counts [experts]`` that should split ``num_rows`` rows."""
    total, least = counts.sum(), counts.min()
    fault = no_fault(counts.device)
    fault = _where(total != num_rows, Fault.WRONG_SUM, total, fault, expected=num_rows)
    return _where(least < 0, Fault.NEGATIVE_COUNT, least, fault)


def raise_faults(
    faults: Sequence[Sequence[int]], ranks: Sequence[int] | None, num_experts: int
) -> None:
    """Raise a `RoutingError` that names every rank with a fault; without ``ranks`` names none."""
    texts = [
        (f"rank {ranks[i]}: " if ranks is not None else "") + _text(fault, num_experts)
        for i, fault in enumerate(faults)
        if fault[0] != Fault.NONE
    ]
    if texts:
        raise RoutingError("; ".join(texts))


def _where(
    condition: Tensor, kind: Fault, given: Tensor, otherwise: Tensor, expected: int = 0
) -> Tensor:
    numbers = torch.tensor([kind, 0, expected], device=otherwise.device)
    numbers[1] = given
    return torch.where(condition, numbers, otherwise)


def _text(fault: Sequence[int], num_experts: int) -> str:
    kind, given, expected = fault
    match Fault(kind):
        case Fault.ID_OUT_OF_RANGE:
            return f"expert id {given} is not one of 0 .. {num_experts - 1}"
        case Fault.DUPLICATE_ID:
            return f"a token names expert {given} twice; its choices must be distinct"
        case Fault.WRONG_SUM:
            return f"counts sum to {given}, but {expected} rows were given; they must be equal"
        case Fault.NEGATIVE_COUNT:
            return f"a count is {given}; counts must be at least 0"
        case Fault.NONE:
            return "no fault"
