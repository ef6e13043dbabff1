"""Faults that one rank alone can see, as numbers that travel to the whole group.

A report is three integers: the fault's kind, what was given, what was expected. That of a rank
without a fault says which rows it gives instead, their length and dtype, so that ranks can compare.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from .._errors import RoutingError

REPORT_SIZE = 3
Report = tuple[int, int, int]


class Fault(IntEnum):
    """What can be wrong with one rank's inputs."""

    NONE = 0
    ID_OUT_OF_RANGE = 1
    DUPLICATE_ID = 2
    WRONG_SUM = 3
    NEGATIVE_COUNT = 4
    ROW_DIMS = 5
    ROW_LENGTH = 6
    WEIGHT_DIMS = 7
    WEIGHT_TOKENS = 8
    ID_DIMS = 9
    ID_TOKENS = 10
    ID_CHOICES = 11
    CHOICES = 12
    ID_DTYPE = 13
    COUNT_SHAPE = 14
    COUNT_DTYPE = 15
    OVERFLOW = 16


_TEXTS: dict[int, str] = {
    Fault.ID_OUT_OF_RANGE: "expert id {given} is not one of 0 .. {expected}",
    Fault.DUPLICATE_ID: "a token names expert {given} twice; its choices must be distinct",
    Fault.WRONG_SUM: "counts sum to {given}, but {expected} rows were given; they must be equal",
    Fault.NEGATIVE_COUNT: "a count is {given}; counts must be at least 0",
    Fault.ROW_DIMS: "the tokens or rows have {given} dimensions; give a matrix [tokens, dim]",
    Fault.ROW_LENGTH: "rows have {given} numbers each; these experts take {expected}",
    Fault.WEIGHT_DIMS: "weights have {given} dimensions; give a matrix [tokens, k]",
    Fault.WEIGHT_TOKENS: "weights are for {given} tokens, but x has {expected}; they must be equal",
    Fault.ID_DIMS: "expert_ids have {given} dimensions; give a matrix [tokens, k]",
    Fault.ID_TOKENS: "expert_ids are for {given} tokens, but x has {expected}; they must be equal",
    Fault.ID_CHOICES: "expert_ids name {given} experts per token, but there are {expected} weights",
    Fault.CHOICES: "each token names {given} of {expected} experts; use 1 to {expected}",
    Fault.ID_DTYPE: "expert_ids are {dtype}; they must be torch.int64",
    Fault.COUNT_SHAPE: "counts are not a vector with one number for each of the {expected} experts "
    "of all ranks, but {given} numbers",
    Fault.OVERFLOW: "an expert was chosen {given} times by this rank's tokens, but has room for "
    "{expected}; raise the capacity or drop what does not fit",
    Fault.COUNT_DTYPE: "counts are {dtype}; they must be torch.int64 or torch.int32",
}

# Ranks run one torch, so a dtype's place in its list means the same everywhere.
_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def checks_data(data: Tensor, validate: bool | None) -> bool:
    """Return whether to look into ``data``: as told, or by default where reading it is free."""
    return data.is_cpu if validate is None else validate


def as_numbers(report: Report, device: torch.device) -> Tensor:
    """Return ``report`` as a tensor ``[3]`` on ``device``, filled there: nothing synchronises."""
    return torch.stack([torch.full((), n, dtype=torch.int64, device=device) for n in report])


def check_routing(x: Tensor, weights: Tensor, expert_ids: Tensor, num_experts: int) -> Report:
    """Return whether shapes and dtypes describe one routing; looks into no tensor."""
    if x.dim() != 2:
        return Fault.ROW_DIMS, x.dim(), 2
    if weights.dim() != 2:
        return Fault.WEIGHT_DIMS, weights.dim(), 2
    if expert_ids.dim() != 2:
        return Fault.ID_DIMS, expert_ids.dim(), 2
    if weights.shape[0] != x.shape[0]:
        return Fault.WEIGHT_TOKENS, weights.shape[0], x.shape[0]
    if expert_ids.shape[0] != x.shape[0]:
        return Fault.ID_TOKENS, expert_ids.shape[0], x.shape[0]
    if expert_ids.shape[1] != weights.shape[1]:
        return Fault.ID_CHOICES, expert_ids.shape[1], weights.shape[1]
    if not 1 <= weights.shape[1] <= num_experts:
        return Fault.CHOICES, weights.shape[1], num_experts
    if expert_ids.dtype != torch.int64:
        return Fault.ID_DTYPE, _DTYPES.index(expert_ids.dtype), 0
    return _rows_given(x)


def check_rows(rows: Tensor, counts: Tensor, num_experts: int, dim: int) -> Report:
    """Return whether shapes and dtypes are those of sorted rows; looks into no tensor."""
    if rows.dim() != 2:
        return Fault.ROW_DIMS, rows.dim(), 2
    if rows.shape[1] != dim:
        return Fault.ROW_LENGTH, rows.shape[1], dim
    if counts.shape != (num_experts,):
        return Fault.COUNT_SHAPE, counts.numel(), num_experts
    if counts.dtype not in (torch.int64, torch.int32):
        return Fault.COUNT_DTYPE, _DTYPES.index(counts.dtype), 0
    return _rows_given(rows)


def check_ids(expert_ids: Tensor, num_experts: int, report: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``expert_ids [tokens, k]`` made safe to count and sort, and the report ``[3]``.

    Ids outside ``0 .. num_experts - 1`` come back clamped; without a fault the report is the one
    given. Nothing is read by the host.
    """
    if expert_ids.numel() == 0:
        return expert_ids, report
    last = num_experts - 1
    safe = expert_ids.clamp(0, last)
    if expert_ids.shape[1] > 1:
        ordered = safe.sort(1).values
        twice = ordered[:, 1:] == ordered[:, :-1]
        duplicate = ordered[:, 1:].take(twice.reshape(-1).to(torch.uint8).argmax())
        report = _where(twice.any(), Fault.DUPLICATE_ID, duplicate, report)
    outside = safe != expert_ids
    stray = expert_ids.take(outside.reshape(-1).to(torch.uint8).argmax())
    return safe, _where(outside.any(), Fault.ID_OUT_OF_RANGE, stray, report, expected=last)


def check_counts(counts: Tensor, num_rows: int, report: Tensor) -> Tensor:
    """Return the report ``[3]`` on ``counts [experts]`` that should split ``num_rows`` rows."""
    total, least = counts.sum(), counts.min()
    report = _where(total != num_rows, Fault.WRONG_SUM, total, report, expected=num_rows)
    return _where(least < 0, Fault.NEGATIVE_COUNT, least, report)


def check_overflow(counts: Tensor, capacity: int, report: Tensor) -> Tensor:
    """Return the report ``[3]`` on ``counts [experts]`` of which none should exceed ``capacity``.

    A fault that was found before stays.
    """
    most = counts.max()
    crowded = (most > capacity) & (report[0] == Fault.NONE)
    return _where(crowded, Fault.OVERFLOW, most, report, expected=capacity)


def agree(reports: Sequence[Sequence[int]]) -> bool:
    """Return whether `raise_faults` would find nothing to complain about."""
    return len({tuple(r) for r in reports}) <= 1 and all(r[0] == Fault.NONE for r in reports)


def raise_faults(reports: Sequence[Sequence[int]], ranks: Sequence[int] | None) -> None:
    """Raise a `RoutingError` that names every rank with a fault; without ``ranks`` names none.

    Also where no rank has a fault of its own, but they give rows of different length or dtype.
    """
    names = [""] * len(reports) if ranks is None else [f"rank {rank}: " for rank in ranks]
    texts = [
        name + _TEXTS[Fault(kind)].format(given=given, expected=expected, dtype=_dtype(kind, given))
        for name, (kind, given, expected) in zip(names, reports, strict=True)
        if kind != Fault.NONE
    ]
    if texts:
        raise RoutingError("; ".join(texts))
    if len({tuple(report) for report in reports}) > 1:
        each = (
            f"{name}{length} of {_DTYPES[dtype]}"
            for name, (_, length, dtype) in zip(names, reports, strict=True)
        )
        raise RoutingError(
            "all ranks must give rows of one length and dtype, also without tokens; got "
            + "; ".join(each)
        )


def _rows_given(rows: Tensor) -> Report:
    return Fault.NONE, rows.shape[1], _DTYPES.index(rows.dtype)


def _dtype(kind: int, given: int) -> torch.dtype | None:
    return _DTYPES[given] if kind in (Fault.ID_DTYPE, Fault.COUNT_DTYPE) else None


def _where(
    condition: Tensor, kind: Fault, given: Tensor, otherwise: Tensor, expected: int = 0
) -> Tensor:
    numbers = torch.tensor([kind, 0, expected], device=otherwise.device)
    numbers[1] = given
    return torch.where(condition, numbers, otherwise)
