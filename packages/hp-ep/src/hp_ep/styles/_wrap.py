"""Experts that take the rows of all experts, wherever those live."""

from collections.abc import Callable
from types import MethodType

from torch import Tensor

from hp_dtensor import AutogradCollectives, Axis, Collectives

from .._experts import GroupedExperts
from ..dispatch._all_to_all import RowExchange
from ..dispatch._checks import Fault, as_tensor, check_counts, check_rows
from ._split import Split

Forward = Callable[[GroupedExperts, Tensor, Tensor], Tensor]


def wrap_forward(experts: GroupedExperts, split: Split, collectives: Collectives | None) -> None:
    """Replace ``forward`` of ``experts``, for this module alone."""
    compute: Forward = type(experts).forward
    if split.expert_axis is not None:
        exchange = RowExchange(split.expert_axis, experts.num_experts, collectives)
        compute = _over_ranks(compute, exchange)
    if split.summed_over is not None:
        compute = _summed(compute, split.summed_over, collectives)
    # Bound to the module it is called on, so that a deep copy computes with its own weights.
    experts.forward = MethodType(compute, experts)  # type: ignore[method-assign]


def _over_ranks(compute: Forward, exchange: RowExchange) -> Forward:
    """Return ``compute`` for rows and counts of all experts, where a rank computes its block."""

    def forward(self: GroupedExperts, rows: Tensor, counts: Tensor) -> Tensor:
        found = check_rows(rows, counts, exchange.num_experts, self.w1.shape[-1])
        report = as_tensor(found, rows.device)
        if found[0] == Fault.NONE:
            report = check_counts(counts.long(), rows.shape[0], report)
        else:  # take part without rows, so that all ranks raise
            rows, counts = rows.new_empty(0, 1), report.new_zeros(exchange.num_experts)
        plan = exchange.plan(exchange.start_counts(counts, report))
        here = exchange.wait(exchange.start(exchange.load(rows), plan), plan)
        return exchange.start_back(compute(self, here, plan.counts), plan).wait()

    return forward


def _summed(compute: Forward, axis: Axis, collectives: Collectives | None) -> Forward:
    """Return ``compute`` where every rank of ``axis`` has the rows and a part of the result."""

    def forward(self: GroupedExperts, rows: Tensor, counts: Tensor) -> Tensor:
        part = compute(self, AutogradCollectives(collectives).replicate(rows, axis), counts)
        return AutogradCollectives(collectives).all_reduce(part, axis)

    return forward
