"""All experts on this rank: token assignments sorted by expert, and no communication."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .._permutation import TokenGroups, gather_tokens, invert, reorder, scatter_tokens
from .._sizes import check_sizes
from ._checks import as_tensor, check_ids, check_routing, checks_data, raise_faults
from ._exchange import read_tables
from ._interface import AsyncDispatcher, Dispatched, DispatchState, Done, Pending, consume


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedAssignments:
    """Token assignments, one per token and choice of ``expert_ids [tokens, k]``, by expert.

    ``order [tokens * k]`` lists them, ``places [tokens, k]`` is its inverse: the row of each;
    ``counts [num_experts]`` of them are each expert's.
    """

    order: Tensor
    places: Tensor
    counts: Tensor

    @property
    def groups(self) -> TokenGroups:
        """Return which of the rows are of which token."""
        return TokenGroups(tokens=self.order // self.places.shape[1], rows=self.places)

    def weights(self, weights: Tensor) -> Tensor:
        """Return ``weights [tokens, k]`` in the order of the rows."""
        return reorder(weights.reshape(-1), self.order, self.places.view(-1))


def sort_assignments(
    expert_ids: Tensor, num_experts: int, last: slice | None = None
) -> SortedAssignments:
    """Return the assignments by expert, stable in the token; reads nothing on the host.

    Those of the experts ``last`` come after all others.
    """
    keys, end = expert_ids.reshape(-1), num_experts
    if last is not None:
        end = 2 * num_experts
        every = torch.arange(num_experts, dtype=_key_dtype(end), device=keys.device)
        every[last] += num_experts
        keys = every.index_select(0, keys)
    order = sorting(keys, end)[1]
    places = invert(order).view(expert_ids.shape)
    return SortedAssignments(order=order, places=places, counts=count_ids(expert_ids, num_experts))


def sorting(keys: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Return ``keys [n]``, each from 0 to ``end - 1``, sorted, and their stable order."""
    ordered, order = keys.to(_key_dtype(end)).sort(stable=True)
    return ordered, order


def _key_dtype(end: int) -> torch.dtype:
    # Sorting two bytes per key costs a fraction of sorting eight.
    return torch.int16 if end <= torch.iinfo(torch.int16).max else torch.int64


def count_ids(ids: Tensor, number: int) -> Tensor:
    """Return how often each of ``number`` ids occurs ``[number]`` int64."""
    flat = ids.reshape(-1)
    # bincount would synchronise.
    return flat.new_zeros(number).scatter_add_(0, flat, torch.ones_like(flat))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LocalState(DispatchState):
    groups: TokenGroups
    weights: Tensor | None
    dtype: torch.dtype


class Local(AsyncDispatcher):
    """Dispatcher for experts that are all on this rank. Communicates nothing.

    Args:
        num_experts: Number of experts of all ranks.
        validate: Whether to check the values of expert ids, which costs a device-to-host
            synchronization. Defaults to None: True on the CPU, else False.

    Raises:
        ExpertConfigError: ``num_experts`` is not a positive int.

    Examples:
        >>> x = torch.randn(16, 64)
        >>> weights, expert_ids = TopKRouter(64, num_experts=8, top_k=2)(x)
        >>> dispatcher, experts = Local(num_experts=8), GroupedExperts(64, 128, num_experts=8)
        >>> rows, counts, state = dispatcher.dispatch(x, weights, expert_ids)
        >>> dispatcher.combine(experts(rows, counts), state).shape
        torch.Size([16, 64])
    """

    def __init__(self, num_experts: int, *, validate: bool | None = None) -> None:
        check_sizes({"num_experts": num_experts})
        self.num_experts: Final = num_experts
        self.ranks: Final[tuple[int, ...]] = ()
        self._validate = validate

    def start_dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, *, weigh_rows: bool = False
    ) -> Pending[Dispatched]:
        """Sort the rows by expert, and return a handle that is already complete.

        See `AsyncDispatcher.start_dispatch`.
        """
        return Done(self._dispatch(x, weights, expert_ids, weigh_rows))

    def start_combine(self, rows: Tensor, state: DispatchState) -> Pending[Tensor]:
        """Sum the weighted results of each token, and return a handle that is already complete.

        See `AsyncDispatcher.start_combine`.
        """
        own = consume(state, self, _LocalState, rows)
        return Done(scatter_tokens(rows.to(own.dtype), own.groups, own.weights))

    def _dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, weigh_rows: bool
    ) -> Dispatched:
        report = check_routing(x, weights, expert_ids, self.num_experts)
        raise_faults([report], None)
        if checks_data(expert_ids, self._validate):
            numbers = as_tensor(report, expert_ids.device)
            expert_ids, numbers = check_ids(expert_ids, weights, self.num_experts, numbers)
            raise_faults(read_tables(numbers[None])[0], None)
        by_expert = sort_assignments(expert_ids, self.num_experts)
        groups = by_expert.groups
        rows = gather_tokens(x, groups)
        state = _LocalState(
            owner=self,
            num_rows=rows.shape[0],
            dim=x.shape[1],
            row_weights=by_expert.weights(weights) if weigh_rows else None,
            groups=groups,
            weights=None if weigh_rows else weights,
            dtype=x.dtype,
        )
        return rows, by_expert.counts, state
