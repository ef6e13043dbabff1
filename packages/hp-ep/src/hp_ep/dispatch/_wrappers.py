"""Dispatchers around another one: to the places of a placement, and over experts that are cut."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hp_dtensor import AutogradCollectives, Axis, Collectives

from .._errors import ExpertConfigError, RoutingError
from ..placement._plan import Placement
from ._checks import Fault, Report, describe_faults, or_torch
from ._interface import (
    AsyncDispatcher,
    Dispatched,
    DispatchState,
    Pending,
    ShardedDispatcher,
    Step,
    TokenDispatcher,
    start_combine,
    start_dispatch,
)


class Placed(AsyncDispatcher):
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
        return self.inner.ranks if isinstance(self.inner, ShardedDispatcher) else None

    def moved_to(self, placement: Placement) -> "Placed":
        """Return a dispatcher for another placement of the same experts on the same slots."""
        if len(placement.experts) != len(self.placement.experts):
            raise ExpertConfigError(
                f"a placement on {len(placement.experts)} slots cannot take the place of one on "
                f"{len(self.placement.experts)}; use as many replicas"
            )
        return Placed(self.inner, placement, self.rank, device=self._table.device)

    def start_dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, *, weigh_rows: bool = False
    ) -> Pending[Dispatched]:
        """Start the dispatch and return its handle; see `AsyncDispatcher.start_dispatch`."""
        return Pending(self._dispatch(x, weights, expert_ids, weigh_rows))

    def start_combine(self, rows: Tensor, state: DispatchState) -> Pending[Tensor]:
        """Start the combine and return its handle; see `AsyncDispatcher.start_combine`."""
        return start_combine(self.inner, rows, state)

    def _dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, weigh_rows: bool
    ) -> Generator[Step, None, Dispatched]:
        with self._translating():
            ids = self._physical(expert_ids)
            pending = start_dispatch(self.inner, x, weights, ids, weigh_rows=weigh_rows)
        yield "counts"
        with self._translating():
            pending.send()
        yield "rows"
        with self._translating():
            return pending.wait()

    @contextmanager
    def _translating(self) -> Iterator[None]:
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

    def _physical(self, expert_ids: Tensor) -> Tensor:
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


class Summed(AsyncDispatcher):
    """A `TokenDispatcher` for experts that are cut inside: their outputs are parts of a sum.

    The ranks of ``axis`` hold the same tokens, weights and ids. Parts are added once per token,
    after ``inner`` has weighted and combined them: one all-reduce of ``[tokens, dim]`` over
    ``axis`` in forward, and in backward one each for the gradients of tokens and weights, which
    then are the same on all these ranks.
    """

    def __init__(
        self, inner: TokenDispatcher, axis: Axis, collectives: Collectives | None = None
    ) -> None:
        self.inner = inner
        self.axis = axis
        self._collectives = or_torch(collectives)

    @property
    def num_experts(self) -> int | None:
        """Return the number of experts of ``inner``; None where it does not tell."""
        return self.inner.num_experts if isinstance(self.inner, ShardedDispatcher) else None

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """Return the ranks of ``inner``, not those whose parts are summed; None if not told."""
        return self.inner.ranks if isinstance(self.inner, ShardedDispatcher) else None

    def around(self, inner: TokenDispatcher) -> "Summed":
        """Return the same around another dispatcher."""
        return Summed(inner, self.axis, self._collectives)

    def start_dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, *, weigh_rows: bool = False
    ) -> Pending[Dispatched]:
        """Start the dispatch and return its handle; see `AsyncDispatcher.start_dispatch`."""
        x, weights = (
            AutogradCollectives(self._collectives).replicate(tensor, self.axis)
            for tensor in (x, weights)
        )
        return start_dispatch(self.inner, x, weights, expert_ids, weigh_rows=weigh_rows)

    def start_combine(self, rows: Tensor, state: DispatchState) -> Pending[Tensor]:
        """Start the combine and return its handle; see `AsyncDispatcher.start_combine`."""
        return Pending(self._combine(rows, state))

    def _combine(self, rows: Tensor, state: DispatchState) -> Generator[Step, None, Tensor]:
        pending = start_combine(self.inner, rows, state)
        yield "rows"
        return AutogradCollectives(self._collectives).all_reduce(pending.wait(), self.axis)
