"""From tensors and a plan to the attention: swap or exchange heads, run the schedule, and back."""

from torch import Tensor

from ._mesh import Seats
from ._plan import AttentionPlan
from ._swap import swap_halves
from ._ulysses import Exchange, heads_to_rows, rows_to_heads
from .kernels._interface import AttentionBackend
from .schedules._attend import attend
from .schedules._run import run_of


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


def exchange_of(plan: AttentionPlan, seats: Seats) -> Exchange:
    """Return the Ulysses exchange of this rank and its neighbours."""
    first = seats.rank - seats.inside.index
    return Exchange(
        peers=seats.inside,
        chunks=plan.chunks[first : first + plan.ulysses_degree],
        shares=plan.heads,
    )
