"""The layout that is likely to be fastest for a mask."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from .._errors import LayoutError
from .._masks import MaskSpec, keys_of, pairs_of
from .._ranges import Ranges, overlaps, size
from ._documents import Greedy, PerDocument, held_per_document
from ._fixed import Contiguous, Zigzag
from ._interface import Chunks, Layout, check_given, check_size

# Plain ones first: fewer chunks make fewer and larger blocks, which the cost does not see.
_CANDIDATES: tuple[Layout, ...] = (Contiguous(), Zigzag(), Greedy(4), Greedy(8), PerDocument())
_TIE = 1.02


@dataclass(frozen=True, slots=True)
class Auto(Layout):
    """The plainest layout within 2 % of the least cost: the slowest rank's pairs and fetched rows.

    ``pairs_per_row`` says how many query-key pairs take the time in which one row of keys and
    values comes from another rank, forward and backward. On accelerators that is about the ratio of
    arithmetic per second to bytes per second, over twice the number of query heads per kv head.
    Raises `LayoutError` for what is no finite number of at least 0.
    """

    pairs_per_row: float = 256.0

    def __post_init__(self) -> None:
        price = self.pairs_per_row
        if type(price) not in (int, float) or not 0 <= price < math.inf:
            raise LayoutError(
                f"pairs_per_row={price!r} is no price of a row; use a finite number of at least 0"
            )

    def choice(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Layout:
        """Return the layout that is taken."""
        check_size(n, seq_len)
        return _cheapest(n, seq_len, check_given(mask, self), self.pairs_per_row)

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return the chunks of the layout that is taken."""
        return self.choice(n, seq_len, mask).chunks(n, seq_len, mask)


@lru_cache(maxsize=16)
def _cheapest(n: int, seq_len: int, mask: MaskSpec, pairs_per_row: float) -> Layout:
    costs: dict[Layout, float] = {}
    for layout in _CANDIDATES:
        cost, limit = 0.0, min(costs.values(), default=math.inf)
        for held in _held(layout, n, seq_len, mask):
            pairs = pairs_of(held, mask, seq_len)
            cost = max(cost, pairs + pairs_per_row * rows_fetched(held, mask, seq_len))
            if cost >= limit:  # a plainer one costs no more: the other ranks do not matter
                break
        else:
            costs[layout] = cost
    enough = _TIE * min(costs.values())
    return next(layout for layout, needed in costs.items() if needed <= enough)


def _held(layout: Layout, n: int, seq_len: int, mask: MaskSpec) -> Iterable[Ranges]:
    """Return each rank's chunks, one rank at a time where they are many."""
    if isinstance(layout, PerDocument):
        return held_per_document(n, mask.documents(seq_len))
    return layout.chunks(n, seq_len, mask)


def rows_fetched(held: tuple[range, ...], mask: MaskSpec, seq_len: int) -> int:
    """Return how many rows of other ranks the positions ``held`` see."""
    seen = keys_of(held, mask, seq_len)
    return size(seen) - sum(len(both) for _, _, both in overlaps(seen, held))
