"""What every dispatcher does first: look at its arguments, without raising on one rank alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._faults import Fault, as_numbers, check_ids, check_routing, checks_data


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Arguments that are safe to go on with, and the report ``[3]`` on those that were given."""

    x: Tensor
    weights: Tensor
    expert_ids: Tensor
    report: Tensor


def prepare(
    x: Tensor, weights: Tensor, expert_ids: Tensor, num_experts: int, validate: bool | None
) -> Prepared:
    """Return the arguments, or none in their place: a rank with a fault takes part without tokens.

    All ranks raise once they have seen each other's reports. Reads nothing on the host.
    """
    found = check_routing(x, weights, expert_ids, num_experts)
    if found[0] != Fault.NONE:
        x, weights = x.new_empty(0, 1), weights.new_empty(0, 1)
        expert_ids = x.new_empty((0, 1), dtype=torch.int64)
    report = as_numbers(found, x.device)
    if checks_data(expert_ids, validate):
        expert_ids, report = check_ids(expert_ids, num_experts, report)
    return Prepared(x=x, weights=weights, expert_ids=expert_ids, report=report)
