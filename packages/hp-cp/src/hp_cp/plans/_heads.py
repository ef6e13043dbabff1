"""Which heads a Ulysses rank attends."""

from dataclasses import dataclass

from .._layouts import cut, even_edges
from .._ranges import within


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """One rank's query heads, and the kv heads that these read.

    ``repeats`` says of each kv head how many query heads, one behind the other, read it, where
    these are no equal groups; else it is None.
    """

    q: range
    kv: range
    repeats: tuple[int, ...] | None


def split_heads(q_heads: int, kv_heads: int, ranks: int) -> tuple[HeadShare, ...]:
    """Return each rank's share: consecutive query heads, at most one more on the first ranks.

    A kv head that query heads of several ranks read is in the share of each.
    """
    group = q_heads // kv_heads
    return tuple(_share(q, group) for q in cut(even_edges(0, q_heads, ranks)))


def _share(q: range, group: int) -> HeadShare:
    kv = range(q.start // group, (q.stop - 1) // group + 1)
    repeats = tuple(len(within(q, range(h * group, (h + 1) * group))) for h in kv)
    return HeadShare(q=q, kv=kv, repeats=None if len(set(repeats)) == 1 else repeats)
