"""All experts on this rank: no communication."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .._permutation import reorder, sum_slots, take_slots
from .._sizes import check_sizes
from ._faults import as_numbers, check_ids, check_routing, checks_data
from ._host import read_tables
from ._protocol import DispatchState, consume
from ._sorting import SortedSlots, sort_slots
from ._verdict import raise_faults


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LocalState(DispatchState):
    slots: SortedSlots
    weights: Tensor | None
    dtype: torch.dtype


class Local:
    """A `TokenDispatcher` for experts that all live here; communicates nothing.

    ``validate`` says whether to check the expert ids, which costs a device-to-host
    synchronisation: by default only where there is none, on the CPU.
    """

    def __init__(self, num_experts: int, *, validate: bool | None = None) -> None:
        check_sizes({"num_experts": num_experts})
        self.num_experts: Final = num_experts
        self.ranks: Final[tuple[int, ...]] = ()
        self._validate = validate

    def dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, *, weigh_rows: bool = False
    ) -> tuple[Tensor, Tensor, DispatchState]:
        """Return the rows sorted by expert; see `TokenDispatcher.dispatch`.

        With ``weigh_rows`` the state has ``row_weights [rows]``, and ``combine`` only sums.
        `RoutingError` for shapes and dtypes that do not fit together, and for an expert id out of
        range or named twice by one token.
        """
        report = check_routing(x, weights, expert_ids, self.num_experts)
        raise_faults([report], None)
        if checks_data(expert_ids, self._validate):
            numbers = as_numbers(report, expert_ids.device)
            expert_ids, numbers = check_ids(expert_ids, self.num_experts, numbers)
            raise_faults(read_tables(numbers[None])[0], None)
        slots = sort_slots(expert_ids, self.num_experts)
        rows = take_slots(x, slots.order, slots.places)
        state = _LocalState(
            owner=self,
            num_rows=rows.shape[0],
            dim=x.shape[1],
            slots=slots,
            weights=None if weigh_rows else weights,
            dtype=x.dtype,
            row_weights=reorder(weights.reshape(-1), slots.order, slots.places.view(-1))
            if weigh_rows
            else None,
        )
        return rows, slots.counts, state

    def combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        """Return each token's weighted sum; see `TokenDispatcher.combine`."""
        own = consume(state, self, _LocalState, rows)
        return sum_slots(rows.to(own.dtype), own.slots.order, own.slots.places, own.weights)
