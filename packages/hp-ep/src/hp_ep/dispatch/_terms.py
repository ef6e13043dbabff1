"""What all dispatchers over ranks are told when they are made, and do first in every call."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hp_dtensor import Collectives, TorchCollectives

from .._errors import ExpertConfigError
from .._sizes import check_sizes
from ._faults import Fault, as_numbers, check_ids, check_routing, checks_data

_PAYLOADS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Arguments that are safe to go on with, and the report ``[3]`` on those that were given."""

    x: Tensor
    weights: Tensor
    expert_ids: Tensor
    report: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How many experts there are, how to communicate, what to check and what to narrow."""

    num_experts: int
    collectives: Collectives
    validate: bool | None
    payload: torch.dtype | None

    def prepare(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Prepared:
        """Return the arguments, or none in place of faulty ones: that rank takes part without.

        All ranks raise once they have seen each other's reports. Reads nothing on the host.
        """
        found = check_routing(x, weights, expert_ids, self.num_experts)
        if found[0] != Fault.NONE:
            weights = weights.new_empty(0, 1)
            x = weights.new_empty((0, 1), dtype=x.dtype)
            expert_ids = x.new_empty((0, 1), dtype=torch.int64)
        report = as_numbers(found, x.device)
        if checks_data(expert_ids, self.validate):
            expert_ids, report = check_ids(expert_ids, self.num_experts, report)
        return Prepared(x=x, weights=weights, expert_ids=expert_ids, report=report)

    def narrow(self, rows: Tensor) -> Tensor:
        """Return ``rows`` in the payload's dtype where that is narrower than theirs.

        The gradient travels in the payload's dtype too.
        """
        if self.payload is None or self.payload.itemsize >= rows.element_size():
            return rows
        return rows.to(self.payload)


def check_terms(
    num_experts: int,
    name: str,
    num_ranks: int,
    collectives: Collectives | None,
    validate: bool | None,
    payload: torch.dtype | None,
) -> Terms:
    """Return the terms; `ExpertConfigError` where ``num_ranks`` do not divide the experts.

    ``name`` is what the ranks are called. Also for a number of experts that is none, and for a
    ``payload`` that is not meant for rows.
    """
    check_sizes({"num_experts": num_experts})
    check_number_of_ranks(name, num_ranks, num_experts)
    if payload is not None and payload not in _PAYLOADS:
        raise ExpertConfigError(f"payload={payload} is not one of {list(_PAYLOADS)} or None")
    return Terms(
        num_experts=num_experts,
        collectives=or_torch(collectives),
        validate=validate,
        payload=payload,
    )


def check_number_of_ranks(name: str, size: int, num_experts: int) -> None:
    """Raise an `ExpertConfigError` if ``size`` ranks do not share the experts evenly."""
    if num_experts % size:
        legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ExpertConfigError(
            f"{name}={size} does not divide num_experts={num_experts}; use one of {legal} ranks, "
            "or a placement with replicas that fill the ranks evenly"
        )


def or_torch(collectives: Collectives | None) -> Collectives:
    """Return ``collectives``, or those of torch where none are given."""
    return TorchCollectives() if collectives is None else collectives
