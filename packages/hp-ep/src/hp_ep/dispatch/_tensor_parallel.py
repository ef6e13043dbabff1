"""Tokens that several ranks hold alike, each of which computes a part of every expert."""

from dataclasses import dataclass

from torch import Tensor

from hp_dtensor import AutogradCollectives, Axis, Collectives

from ._begin import begin_combine, begin_dispatch
from ._protocol import (
    DispatchState,
    OverlappingDispatcher,
    PendingCombine,
    PendingDispatch,
    SpreadDispatcher,
    TokenDispatcher,
)
from ._terms import or_torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Combining:
    inner: PendingCombine
    axis: Axis
    collectives: Collectives

    def finish(self) -> Tensor:
        """Return each token's sum over the ranks' parts."""
        return AutogradCollectives(self.collectives).all_reduce(self.inner.finish(), self.axis)


class Summed(OverlappingDispatcher):
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
        return self.inner.num_experts if isinstance(self.inner, SpreadDispatcher) else None

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """Return the ranks of ``inner``, not those whose parts are summed; None if not told."""
        return self.inner.ranks if isinstance(self.inner, SpreadDispatcher) else None

    def around(self, inner: TokenDispatcher) -> "Summed":
        """Return the same around another dispatcher."""
        return Summed(inner, self.axis, self._collectives)

    def begin_dispatch(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> PendingDispatch:
        """Return while the rows travel; see `OverlappingDispatcher.begin_dispatch`."""
        x, weights = (
            AutogradCollectives(self._collectives).replicate(tensor, self.axis)
            for tensor in (x, weights)
        )
        return begin_dispatch(self.inner, x, weights, expert_ids)

    def begin_combine(self, rows: Tensor, state: DispatchState) -> PendingCombine:
        """Return while the results travel; see `OverlappingDispatcher.begin_combine`."""
        pending = begin_combine(self.inner, rows, state)
        return _Combining(inner=pending, axis=self.axis, collectives=self._collectives)
