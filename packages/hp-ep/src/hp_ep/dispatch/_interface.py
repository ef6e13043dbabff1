"""The interface of dispatchers, which send tokens to their experts and the results back."""

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
    """The state of one call: the result of ``dispatch`` that ``combine`` consumes.

    Dispatchers keep no other state of a call. Several calls can be in flight and be combined in any
    order. Dispatchers add fields in a subclass.

    Attributes:
        owner: Dispatcher that created the state.
        num_rows: Number of rows for this rank's experts.
        dim: Length of a row.
        row_weights: Routing weight of each row ``[rows]``, if the experts multiply by it. None if
            ``combine`` does.

    Examples:
        >>> x = torch.randn(16, 64)
        >>> weights, expert_ids = TopKRouter(64, num_experts=8, top_k=2)(x)
        >>> rows, counts, state = Local(num_experts=8).dispatch(x, weights, expert_ids)
        >>> state.num_rows  # 16 tokens, two experts each
        32
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
    """Protocol: sends tokens to their experts and sums the results by routing weight.

    All ranks of the dispatcher make the same calls in the same order, also ranks without tokens.
    The same holds for the backward: if tokens or weights of any rank need a gradient, rows and
    results need one on all ranks.

    Who raises an error:

    - Invalid arguments of ``dispatch`` (shapes, dtypes, expert ids) are reported to all ranks in an
      exchange that happens anyway. All ranks raise the same `RoutingError`.
    - Other errors raise on their rank only, and the others wait until their timeout: errors of
      ``combine`` and of the experts, and arguments that are no tensors on the device of the group.

    Attributes:
        dispatch: Sends tokens to the ranks of their experts.
        combine: Sends the results of the experts back and sums them for each token.

    Examples:
        >>> isinstance(Local(num_experts=8), TokenDispatcher)
        True
    """

    def dispatch(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Dispatched:
        """Send tokens to the ranks of their experts.

        ``dim`` and the dtypes must be the same on all ranks.

        Args:
            x: This rank's tokens, ``[tokens, dim]``.
            weights: Routing weights, ``[tokens, k]``.
            expert_ids: Experts of each token, ``[tokens, k]``, int64. The ids of a token are
                distinct, except ids with weight 0.

        Returns:
            ``(rows, counts, state)``: rows ``[rows, dim]`` for this rank's experts, sorted by
            expert; int64 number of rows of each local expert, ``[local experts]``; and the state
            for ``combine``.

        Raises:
            RoutingError: A rank has invalid arguments. All ranks raise together.
        """
        ...

    def combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        """Send results back and sum the results of each token, times the routing weights.

        Args:
            rows: Results of the experts ``[rows, dim]``, in the order of ``dispatch``.
            state: State from ``dispatch``. It can be used once.

        Returns:
            Weighted sums ``[tokens, dim]`` in the dtype of ``x``.

        Raises:
            DispatchStateError: ``state`` was combined before or belongs to another dispatcher.
                Raised on this rank only, before communication.
            ExpertConfigError: ``rows`` has another shape. Raised on this rank only, before
                communication.
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
    """Protocol of a `TokenDispatcher` with separate start and wait, so that work can overlap.

    Code between start and wait overlaps with communication, also in the backward. All ranks start
    and wait in the same order. A subclass implements ``start_dispatch`` and ``start_combine`` and
    inherits ``dispatch`` and ``combine``.

    Attributes:
        start_dispatch: Starts to send tokens to the ranks of their experts.
        start_combine: Starts to send the results of the experts back.
        dispatch: Sends tokens and waits for the rows.
        combine: Sends results back and waits for the sums.

    Examples:
        >>> x = torch.randn(16, 64)
        >>> weights, expert_ids = TopKRouter(64, num_experts=8, top_k=2)(x)
        >>> pending = Local(num_experts=8).start_dispatch(x, weights, expert_ids)
        >>> rows, counts, state = pending.wait()  # after other work
    """

    def dispatch(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Dispatched:
        """Send tokens to the ranks of their experts. See `TokenDispatcher.dispatch`.

        Args:
            x: This rank's tokens, ``[tokens, dim]``.
            weights: Routing weights, ``[tokens, k]``.
            expert_ids: Experts of each token, ``[tokens, k]``, int64.

        Returns:
            ``(rows, counts, state)``.
        """
        return self.start_dispatch(x, weights, expert_ids).wait()

    def combine(self, rows: Tensor, state: DispatchState) -> Tensor:
        """Send results back and sum them for each token. See `TokenDispatcher.combine`.

        Args:
            rows: Results of the experts ``[rows, dim]``, in the order of ``dispatch``.
            state: State from ``dispatch``.

        Returns:
            Weighted sums ``[tokens, dim]`` in the dtype of ``x``.
        """
        return self.start_combine(rows, state).wait()

    def start_dispatch(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, *, weigh_rows: bool = False
    ) -> Pending[Dispatched]:
        """Start to send tokens to the ranks of their experts. Raises as ``dispatch`` does.

        Args:
            x: This rank's tokens, ``[tokens, dim]``.
            weights: Routing weights, ``[tokens, k]``.
            expert_ids: Experts of each token, ``[tokens, k]``, int64.
            weigh_rows: If True, the state has ``row_weights [rows]``: the experts multiply their
                rows by them, and ``combine`` only sums. The same on all ranks. Defaults to False.

        Returns:
            A handle. Its ``wait()`` returns ``(rows, counts, state)``, once.
        """
        ...

    def start_combine(self, rows: Tensor, state: DispatchState) -> Pending[Tensor]:
        """Start to send results back. Raises as ``combine`` does.

        Args:
            rows: Results of the experts ``[rows, dim]``, in the order of ``dispatch``.
            state: State from ``dispatch``. It can be used once.

        Returns:
            A handle. Its ``wait()`` returns the weighted sums ``[tokens, dim]``, once.
        """
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
