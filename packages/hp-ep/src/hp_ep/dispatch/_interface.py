"""What a dispatcher is: tokens to their experts and back, each half started and waited for."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from .._errors import DispatchStateError, ExpertConfigError

T = TypeVar("T")
Step = Literal["counts", "rows"]
"""What has been started: the exchange of counts, or the rows' own all-to-all."""


class _Once:
    """True the first time it is asked, False ever after."""

    __slots__ = ("_used",)

    def __init__(self) -> None:
        self._used = False

    def claim(self) -> bool:
        used, self._used = self._used, True
        return not used


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchState:
    """What one ``dispatch`` leaves for its ``combine``, which consumes it.

    Nothing of a call is kept anywhere else, so any number may be in flight and be combined in any
    order. Dispatchers add what they need in a subclass.
    """

    owner: object
    """The dispatcher that made this state."""
    num_rows: int
    """How many rows the experts got, and must give back."""
    dim: int
    """How many numbers each of them has."""
    row_weights: Tensor | None = None
    """Routing weights ``[rows]`` by which the experts multiply; None where ``combine`` does."""
    _once: _Once = field(default_factory=_Once, repr=False)


Dispatched = tuple[Tensor, Tensor, DispatchState]
"""Rows for this rank's experts, rows per expert, and the state of the call."""


@runtime_checkable
class TokenDispatcher(Protocol):
    """Brings tokens to their experts and the results back, summed by routing weight.

    Every rank of the dispatcher's group makes the same calls in the same order, also without
    tokens, and so does its backward: where the tokens or weights of any rank need a gradient, rows
    and results need one on all.

    What one rank alone can see to be wrong with the arguments of ``dispatch`` (shapes, dtypes,
    expert ids) travels to all in an exchange that is made anyway, and all raise one
    `RoutingError`. No such exchange follows elsewhere: an error of ``combine``, of the experts, of
    the layer around them, or of an argument that is no tensor on the group's device is raised by
    the rank that meets it, while its peers wait for it until their communication times out.
    """

    def dispatch(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Dispatched:
        """Return the rows for this rank's experts, rows per expert, and the state of this call.

        ``x [tokens, dim]``, ``weights [tokens, k]``, ``expert_ids [tokens, k]`` (int64, distinct
        within a token but for choices of weight 0); ``dim`` and the dtypes are the same on all
        ranks. The rows ``[rows, dim]`` lie by expert, ``counts [local experts]`` int64.
        `RoutingError` on every rank where one gives something else.
        """
        ...

    def combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        """Return the weighted sum of each token's results ``[tokens, dim]``.

        ``rows [rows, dim]`` are the experts' outputs in the order that ``dispatch`` gave. On this
        rank alone, before it communicates: `DispatchStateError` for a state of another dispatcher
        or one that was combined before, `ExpertConfigError` for rows of another shape. The result
        has the dtype of ``x``.
        """
        ...


@runtime_checkable
class ShardedDispatcher(Protocol):
    """A `TokenDispatcher` that tells where it takes the experts to be.

    A style that is given one can then compare it with its own split of the weights.
    """

    @property
    def num_experts(self) -> int | None:
        """Return how many experts ids may name; None where a wrapped dispatcher does not tell."""
        ...

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """Return the global ranks, in the order of their equal blocks of experts (or slots).

        None of them, ``()``, where all experts are here and nothing travels; None where a wrapped
        dispatcher does not tell.
        """
        ...


class Pending(Generic[T]):
    """A dispatch or a combine that has been started; `wait` returns its result, once.

    A dispatcher writes either half as one generator, in the order in which things happen: it
    yields ``"counts"`` while counts are on their way to the host, ``"rows"`` once rows are under
    way, and returns the result.
    """

    __slots__ = ("_step", "_steps", "_waited")

    def __init__(self, steps: Generator[Step, None, T]) -> None:
        self._steps = steps
        self._waited = False
        self._step: Step = next(steps)

    def send(self) -> None:
        """Let the rows leave if they wait for that, and the host for the counts."""
        while self._step != "rows":
            self._step = next(self._steps)

    def wait(self) -> T:
        """Return the result, once the rows are here; `DispatchStateError` the second time."""
        if self._waited:
            raise DispatchStateError("this was waited for before; keep what wait returned")
        self._waited = True
        while True:
            try:
                self._step = next(self._steps)
            except StopIteration as end:
                result: T = end.value
                return result


class Done(Pending[T]):
    """What was done when it was started: nothing is under way."""

    __slots__ = ("_result",)

    def __init__(self, result: T) -> None:
        self._result = result

    def send(self) -> None:
        """Do nothing: no rows wait."""

    def wait(self) -> T:
        """Return the result."""
        return self._result


@runtime_checkable
class AsyncDispatcher(Protocol):
    """A `TokenDispatcher` whose two halves can each be started and waited for apart.

    What runs between the two overlaps with the rows' travel, and in backward with that of their
    gradients. Ranks start and wait in the same order. A class that derives from this one is given
    ``dispatch`` and ``combine``.
    """

    def dispatch(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Dispatched:
        """Return the rows for this rank's experts; see `TokenDispatcher.dispatch`."""
        return self.start_dispatch(x, weights, expert_ids).wait()

    def combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        """Return each token's weighted sum; see `TokenDispatcher.combine`."""
        return self.start_combine(rows, state).wait()

    def start_dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, *, weigh_rows: bool = False
    ) -> Pending[Dispatched]:
        """Return while the rows travel; raises what ``dispatch`` does.

        With ``weigh_rows``, the same on all ranks, the state has ``row_weights [rows]``: the
        experts multiply their rows by them, where that is cheapest, and ``combine`` sums.
        """
        ...

    def start_combine(self, rows: Tensor, state: DispatchState) -> Pending[Tensor]:
        """Return while the results travel; raises what ``combine`` does."""
        ...


def start_dispatch(
    dispatcher: TokenDispatcher,
    x: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    *,
    weigh_rows: bool = False,
) -> Pending[Dispatched]:
    """Return a dispatch that is under way where ``dispatcher`` can do that, else done.

    Where it cannot, ``combine`` weighs the rows itself whatever was asked for.
    """
    if isinstance(dispatcher, AsyncDispatcher):
        return dispatcher.start_dispatch(x, weights, expert_ids, weigh_rows=weigh_rows)
    return Done(dispatcher.dispatch(x, weights, expert_ids))


def start_combine(
    dispatcher: TokenDispatcher, rows: Tensor, state: DispatchState
) -> Pending[Tensor]:
    """Return a combine that is under way where ``dispatcher`` can do that, else done."""
    if isinstance(dispatcher, AsyncDispatcher):
        return dispatcher.start_combine(rows, state)
    return Done(dispatcher.combine(rows, state))


S = TypeVar("S", bound=DispatchState)


def consume(state: DispatchState, owner: object, kind: type[S], rows: Tensor) -> S:
    """Return ``state`` as its dispatcher's own ``kind``, and mark it combined."""
    if not isinstance(state, kind) or state.owner is not owner:
        raise DispatchStateError(
            "combine got a state that another dispatcher made; give it the state that its own "
            "dispatch returned"
        )
    if rows.shape != (state.num_rows, state.dim):
        raise ExpertConfigError(
            f"combine got rows of shape {tuple(rows.shape)}, but its dispatch gave "
            f"{(state.num_rows, state.dim)}; experts return a row of the same length for each"
        )
    if not state._once.claim():
        raise DispatchStateError(
            "this state was combined before; a dispatch is combined once, so dispatch again"
        )
    return state
