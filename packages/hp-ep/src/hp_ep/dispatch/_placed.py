"""Experts wherever a placement puts them, hot ones more than once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .._errors import ExpertConfigError, RoutingError
from ..balance._placement import Placement
from ._begin import begin_combine, begin_dispatch, start_dispatch
from ._faults import Fault, Report
from ._protocol import (
    DispatchState,
    OverlappingDispatcher,
    PendingCombine,
    PendingDispatch,
    SpreadDispatcher,
    TokenDispatcher,
)
from ._verdict import describe_faults


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Dispatching:
    pending: PendingDispatch
    owner: "Placed"

    def start(self) -> None:
        """Let the tokens leave if they wait for that."""
        with self.owner.translating():
            start_dispatch(self.pending)

    def finish(self) -> tuple[Tensor, Tensor, DispatchState]:
        """Return the rows for this rank's experts, once they are here."""
        with self.owner.translating():
            return self.pending.finish()


class Placed(OverlappingDispatcher):
    """A `TokenDispatcher` that sends tokens to the slots of a placement.

    ``inner`` dispatches to slots: it was made for ``len(placement.experts)`` experts. Tokens take
    turns at an expert's replicas, by their own index plus ``rank``, so that ranks do not all start
    with the same one; the tables for that live on ``device``, and follow the ids to another one.
    Communicates nothing itself.
    """

    def __init__(
        self,
        inner: TokenDispatcher,
        placement: Placement,
        rank: int = 0,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.inner = inner
        self.placement = placement
        self.rank = rank
        copies = [len(slots) for slots in placement.slots_of]
        table = [slots + slots[:1] * (max(copies) - len(slots)) for slots in placement.slots_of]
        self._tables = torch.tensor(copies, device="cpu"), torch.tensor(table, device="cpu")
        # Copied to the device here: once, not in every call.
        self._copies, self._table = (t.to(device) for t in self._tables)

    @property
    def num_experts(self) -> int:
        """Return how many experts ids may name: those of the placement."""
        return self.placement.num_experts

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """Return the ranks of ``inner``, in the placement's order; None where it does not tell."""
        return self.inner.ranks if isinstance(self.inner, SpreadDispatcher) else None

    def moved_to(self, placement: Placement) -> "Placed":
        """Return a dispatcher for another placement of the same experts on the same slots."""
        if len(placement.experts) != len(self.placement.experts):
            raise ExpertConfigError(
                f"a placement on {len(placement.experts)} slots cannot take the place of one on "
                f"{len(self.placement.experts)}; use as many replicas"
            )
        return Placed(self.inner, placement, self.rank, device=self._table.device)

    def begin_dispatch(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> PendingDispatch:
        """Return while the rows travel; see `OverlappingDispatcher.begin_dispatch`."""
        with self.translating():
            pending = begin_dispatch(self.inner, x, weights, self.slots(expert_ids))
        return _Dispatching(pending=pending, owner=self)

    def begin_combine(self, rows: Tensor, state: DispatchState) -> PendingCombine:
        """Return while the results travel; see `OverlappingDispatcher.begin_combine`."""
        return begin_combine(self.inner, rows, state)

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Raise errors of ``inner`` in numbers of experts: of slots the caller knows nothing."""
        try:
            yield
        except RoutingError as error:
            if not error.reports:
                raise
            reports = [self._in_experts(*report) for report in error.reports]
            raise describe_faults(reports, error.ranks) from None

    def _in_experts(self, kind: int, given: int, expected: int) -> Report:
        """Return a report of ``inner`` with numbers of experts for those of slots."""
        experts, slots = self.placement.num_experts, len(self.placement.experts)
        if kind == Fault.ID_OUT_OF_RANGE:
            return kind, given if given < 0 else given - slots + experts, experts - 1
        if kind == Fault.DUPLICATE_ID:
            return kind, self.placement.experts[given], expected
        if kind == Fault.CHOICES:
            return kind, given, experts
        return kind, given, expected

    def slots(self, expert_ids: Tensor) -> Tensor:
        """Return the slot that each choice ``[tokens, k]`` goes to; other shapes come as given."""
        if expert_ids.dim() != 2 or expert_ids.dtype != torch.int64:
            return expert_ids  # a fault, which inner tells to all ranks
        if self._table.device != expert_ids.device:  # the layer got its memory elsewhere
            self._copies, self._table = (t.to(expert_ids.device) for t in self._tables)
        known = expert_ids.clamp(0, self.placement.num_experts - 1)
        turns = torch.arange(expert_ids.shape[0], device=expert_ids.device)[:, None] + self.rank
        chosen = self._table[known, turns % self._copies[known]]
        beyond = expert_ids - self.placement.num_experts + len(self.placement.experts)
        strange = torch.where(expert_ids < 0, expert_ids, beyond)
        return torch.where(known == expert_ids, chosen, strange)
