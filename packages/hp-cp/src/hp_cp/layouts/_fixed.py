"""Layouts that depend on nothing but the lengths."""

from dataclasses import dataclass

from .._masks import MaskSpec
from .._ranges import joined
from ._interface import Chunks, Layout, check_size, cut, even_edges, gathered


@dataclass(frozen=True, slots=True)
class Contiguous(Layout):
    """Rank ``r`` holds the ``r``-th stretch, cut as ``torch.chunk`` and ``Shard`` cut.

    Every stretch has ``ceil(seq_len / n)`` positions but the last ones, which may be shorter or
    empty. Under a causal mask the last rank has nearly twice the mean work.
    """

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return one range per rank."""
        check_size(n, seq_len)
        length = -(-seq_len // n)
        pieces = cut(min(rank * length, seq_len) for rank in range(n + 1))
        return tuple(joined([piece]) for piece in pieces)


@dataclass(frozen=True, slots=True)
class Zigzag(Layout):
    """Of ``2n`` chunks rank ``r`` holds chunks ``r`` and ``2n - 1 - r``: equal causal work.

    Where ``2n`` does not divide ``seq_len`` the first chunks are one longer (``array_split``), and
    ranks differ by one position at most. The cut is that of Llama 3 (arXiv 2407.21783, 3.3.2).
    """

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return up to two ranges per rank, ascending."""
        check_size(n, seq_len)
        pieces = cut(even_edges(0, seq_len, 2 * n))
        return gathered(
            ((min(i, 2 * n - 1 - i), piece) for i, piece in enumerate(pieces)),
            n,
        )
