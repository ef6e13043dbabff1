"""From tensors and a plan to the attention: swap or exchange heads, run the schedule, and back."""

from torch import Tensor

from ._mesh import Seats
from ._plan import AttentionPlan
from ._schedules import attend, run_of
from ._ulysses import exchange_of, heads_to_rows, rows_to_heads, swap_halves
from .kernels._interface import AttentionBackend


def planned_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    seats: Seats,
    backend: AttentionBackend,
    scale: float | None,
) -> Tensor:
    """Return this rank's rows ``[batch, heads, rows, size]`` of the attention that is planned."""
    run = run_of(plan, seats.inside.index, seats.across, backend, scale)
    if plan.load_balance:
        return swap_halves(attend(swap_halves(q, run.peers), k, v, run), run.peers, back=True)
    if plan.ulysses_degree == 1:
        return attend(q, k, v, run)
    exchange = exchange_of(plan, seats)
    q, k, v = rows_to_heads(q, k, v, exchange)
    return heads_to_rows(attend(q, k, v, run), exchange)
