"""The layout that is likely to be fastest for a mask."""

from dataclasses import dataclass
from functools import lru_cache

from .._intervals import overlaps, size
from .._masks import MaskSpec
from .._work import keys_of, pairs_of
from ._documents import Greedy, PerDocument
from ._fixed import Contiguous, Zigzag
from ._interface import Chunks, Layout, check_given, check_size

_CANDIDATES: tuple[Layout, ...] = (Contiguous(), Zigzag(), PerDocument(), Greedy(4), Greedy(8))


@dataclass(frozen=True, slots=True)
class Auto(Layout):
    """The layout of least cost for the mask: of the slowest rank, its pairs and its fetched rows.

    ``pairs_per_row`` says how many query-key pairs take the time in which one row of keys and
    values comes from another rank, forward and backward. On accelerators that is about the ratio of
    arithmetic per second to bytes per second, over twice the number of query heads per kv head.
    """

    pairs_per_row: float = 256.0

    def choice(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Layout:
        """Return the layout that is taken; the first of equals, plain ones before others."""
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

    return min(_CANDIDATES, key=cost)


def rows_fetched(held: tuple[range, ...], mask: MaskSpec, seq_len: int) -> int:
    """Return how many rows of other ranks the positions ``held`` see."""
    seen = keys_of(held, mask, seq_len)
    return size(seen) - sum(len(both) for _, _, both in overlaps(seen, held))
