"""Faults that one rank alone can see, as numbers that travel to the whole group.

A report is three integers: the fault's kind, what was given, what was expected. That of a rank
without a fault says what it gives instead, so that ranks can compare: see `Given`.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .._torch import autocast_dtype

REPORT_SIZE = 3
Report = tuple[int, int, int]

# Ranks run one torch, so a dtype's place in its list means the same everywhere.
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


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
    ROW_DTYPE = 17
    WEIGHT_DTYPE = 18
    ROW_DEVICE = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a rank without a fault gives: its rows' length, dtypes, and who needs a gradient.

    ``computed`` is what experts make of the rows' dtype: another one under autocast.
    """

    length: int
    dtype: torch.dtype
    computed: torch.dtype
    weights: torch.dtype
    rows_need_grad: bool
    weights_need_grad: bool

    def report(self) -> Report:
        """Return it as a report, all but the length in one number."""
        dtypes = 0
        for dtype in (self.dtype, self.computed, self.weights):
            dtypes = dtypes * len(DTYPES) + DTYPES.index(dtype)
        return (
            Fault.NONE,
            self.length,
            dtypes * 4 + self.rows_need_grad * 2 + self.weights_need_grad,
        )

    @classmethod
    def read(cls, length: int, packed: int) -> "Given":
        """Return what the last two numbers of such a report say."""
        dtypes, weights = divmod(packed // 4, len(DTYPES))
        dtype, computed = divmod(dtypes, len(DTYPES))
        return cls(
            length=length,
            dtype=DTYPES[dtype],
            computed=DTYPES[computed],
            weights=DTYPES[weights],
            rows_need_grad=packed & 2 > 0,
            weights_need_grad=packed & 1 > 0,
        )


def checks_data(data: Tensor, validate: bool | None) -> bool:
    """Return whether to look into ``data``: as told, or by default where reading it is free."""
    return data.is_cpu if validate is None else validate


def as_numbers(report: Report, device: torch.device) -> Tensor:
    """Return ``report`` as a tensor ``[3]`` on ``device``, filled there: nothing synchronises."""
    return torch.stack([_filled(number, device) for number in report])


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
        return Fault.ID_DTYPE, DTYPES.index(expert_ids.dtype), 0
    if not x.is_floating_point():
        return Fault.ROW_DTYPE, DTYPES.index(x.dtype), 0
    if x.device != weights.device:
        return Fault.ROW_DEVICE, 0, 0
    if not weights.is_floating_point():
        return Fault.WEIGHT_DTYPE, DTYPES.index(weights.dtype), 0
    return _given(x, weights)


def check_rows(rows: Tensor, counts: Tensor, num_experts: int, dim: int) -> Report:
    """Return whether shapes and dtypes are those of sorted rows; looks into no tensor."""
    if rows.dim() != 2:
        return Fault.ROW_DIMS, rows.dim(), 2
    if rows.shape[1] != dim:
        return Fault.ROW_LENGTH, rows.shape[1], dim
    if counts.shape != (num_experts,):
        return Fault.COUNT_SHAPE, counts.numel(), num_experts
    if counts.dtype not in (torch.int64, torch.int32):
        return Fault.COUNT_DTYPE, DTYPES.index(counts.dtype), 0
    if not rows.is_floating_point():
        return Fault.ROW_DTYPE, DTYPES.index(rows.dtype), 0
    return _given(rows, rows)


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


def _given(rows: Tensor, weights: Tensor) -> Report:
    grad = torch.is_grad_enabled()
    return Given(
        length=rows.shape[1],
        dtype=rows.dtype,
        computed=autocast_dtype(rows),
        weights=weights.dtype,
        rows_need_grad=grad and rows.requires_grad,
        weights_need_grad=grad and weights.requires_grad,
    ).report()


def _where(
    condition: Tensor, kind: Fault, given: Tensor, otherwise: Tensor, expected: int = 0
) -> Tensor:
    device = otherwise.device
    numbers = torch.stack([_filled(kind, device), given, _filled(expected, device)])
    return torch.where(condition, numbers, otherwise)


def _filled(number: int, device: torch.device) -> Tensor:
    # torch.tensor would copy it from the host, and wait for that.
    return torch.full((), number, dtype=torch.int64, device=device)
