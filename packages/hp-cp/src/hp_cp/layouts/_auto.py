"""The layout that is likely to be fastest for a mask."""

from dataclasses import dataclass
from functools import lru_cache

from .._intervals import overlaps, size
from .._masks import MaskSpec
from .._work import keys_of, pairs_of
from ._documents import Greedy, PerDocument
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
    """

    pairs_per_row: float = 256.0

    def choice(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Layout:
        """Return the layout that is taken."""
        check_size(n, seq_len)
        return _cheapest(n, seq_len, check_given(mask, self), self.pairs_per_row)

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return the chunks of the layout that is taken."""
        return self.choice(n, seq_len, mask).chunks(n, seq_len, mask)


@lru_cache(maxsize=64)
def _cheapest(n: int, seq_len: int, mask: MaskSpec, pairs_per_row: float) -> Layout:
    def cost(layout: Layout) -> float:
        return max(
            pairs_of(held, mask, seq_len) + pairs_per_row * rows_fetched(held, mask, seq_len)
            for held in layout.chunks(n, seq_len, mask)
        )

    costs = {layout: cost(layout) for layout in _CANDIDATES}
    enough = _TIE * min(costs.values())
    return next(layout for layout, needed in costs.items() if needed <= enough)


def rows_fetched(held: tuple[range, ...], mask: MaskSpec, seq_len: int) -> int:
    """Return how many rows of other ranks the positions ``held`` see."""
    seen = keys_of(held, mask, seq_len)
    return size(seen) - sum(len(both) for _, _, both in overlaps(seen, held))
