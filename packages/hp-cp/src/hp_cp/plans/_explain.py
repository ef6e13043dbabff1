"""A plan in words."""

from typing import TYPE_CHECKING

from .._layouts import Auto
from .._ranges import size
from ._blocks import Block

if TYPE_CHECKING:
    from ._plan import AttentionPlan

_SHOWN = 8


def explain(plan: "AttentionPlan") -> str:
    """Return what the plan is, then each rank's rows, work, bytes, fetched rows and blocks."""
    layout = repr(plan.layout)
    if isinstance(plan.layout, Auto):
        layout += f" -> {plan.layout.choice(plan.n, plan.seq_len, plan.mask)!r}"
    title = (
        f"{layout}, {plan.mask!r}, n={plan.n}, seq_len={plan.seq_len}, "
        f"schedule={plan.schedule!r}, ulysses_degree={plan.ulysses_degree}: "
        f"imbalance {plan.imbalance():.3f}"
    )
    return "\n".join([title, *(_line(plan, rank) for rank in range(plan.n))])


def _line(plan: "AttentionPlan", rank: int) -> str:
    blocks = plan.blocks(rank)
    shown = ", ".join(map(_named, blocks[:_SHOWN]))
    if len(blocks) > _SHOWN:
        shown += f" and {len(blocks) - _SHOWN} more"
    fetched = ", ".join(f"{size(rows)} of {s}" for s, rows in plan.fetches(rank).items())
    return (
        f"rank {rank}: {plan.lengths[rank]} rows, {sum(b.pairs for b in blocks)} pairs, "
        f"{plan.bytes_received(rank)} bytes received, key rows fetched: {fetched or 'none'}; "
        f"computes {shown or 'nothing'}"
    )


def _named(block: Block) -> str:
    side = f"{len(block.queries) // block.tiles}x{len(block.keys) // block.tiles}"
    times = f"{block.tiles} times " if block.tiles > 1 else ""
    return f"{times}{block.kind} {side} from {block.source}"
