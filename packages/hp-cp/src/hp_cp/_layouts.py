"""Which rank holds which positions of the sequence: pure functions of integers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from ._errors import LayoutError, described

Chunks = tuple[tuple[range, ...], ...]


@runtime_checkable
class Layout(Protocol):
    """A way to cut a sequence over ranks.

    Subclass it, or provide both methods. ``chunks`` holds, per rank, non-empty ranges in ascending
    order which together partition ``range(seq_len)``; `plan_attention` checks it.
    """

    def chunks(self, n: int, seq_len: int) -> Chunks:
        """Return each rank's global positions as ranges, in the order of its local rows."""
        ...

    def indices(self, n: int, seq_len: int) -> tuple[tuple[int, ...], ...]:
        """Return each rank's global positions, in the order of its local rows."""
        return tuple(tuple(i for chunk in rank for i in chunk) for rank in self.chunks(n, seq_len))


@dataclass(frozen=True, slots=True)
class Contiguous(Layout):
    """Rank ``r`` holds the ``r``-th stretch, cut as ``torch.chunk`` and ``Shard`` cut.

    Every stretch has ``ceil(seq_len / n)`` positions but the last ones, which may be shorter or
    empty. Under a causal mask the last rank has nearly twice the mean work.
    """

    def chunks(self, n: int, seq_len: int) -> Chunks:
        """Return one range per rank."""
        _check(n, seq_len)
        length = -(-seq_len // n)
        cuts = [min(rank * length, seq_len) for rank in range(n + 1)]
        return tuple(_joined([range(*cut)]) for cut in pairwise(cuts))


@dataclass(frozen=True, slots=True)
class Zigzag(Layout):
    """Of ``2n`` chunks rank ``r`` holds chunks ``r`` and ``2n - 1 - r``: equal causal work.

    Where ``2n`` does not divide ``seq_len`` the first chunks are one longer (``array_split``), and
    ranks differ by one position at most. The cut is that of Llama 3 (arXiv 2407.21783, 3.3.2).
    """

    def chunks(self, n: int, seq_len: int) -> Chunks:
        """Return up to two ranges per rank, ascending."""
        _check(n, seq_len)
        length, longer = divmod(seq_len, 2 * n)
        cuts = [i * length + min(i, longer) for i in range(2 * n + 1)]
        pieces = [range(*cut) for cut in pairwise(cuts)]
        return tuple(_joined([pieces[rank], pieces[2 * n - 1 - rank]]) for rank in range(n))


def lengths_of(chunks: Chunks) -> tuple[int, ...]:
    """Return each rank's number of positions."""
    return tuple(sum(map(len, rank)) for rank in chunks)


def in_global_order(chunks: Chunks) -> list[int]:
    """Return the order that sorts all chunks, listed rank by rank, by their global start."""
    starts = [chunk.start for rank in chunks for chunk in rank]
    return sorted(range(len(starts)), key=starts.__getitem__)


def check_layout(layout: object) -> None:
    """Raise `LayoutError` unless ``layout`` is a `Layout`, not a name or a class of one."""
    if isinstance(layout, type) or not isinstance(layout, Layout):
        raise LayoutError(
            f"layout must be a Layout, got {described(layout)}; use Contiguous(), Zigzag() or an "
            f"object with chunks and indices"
        )


def check_partition(chunks: Chunks, n: int, seq_len: int, layout: Layout) -> None:
    """Raise `LayoutError` unless the chunks keep the contract of `Layout.chunks`."""
    flat = sorted((chunk for rank in chunks for chunk in rank), key=lambda chunk: chunk.start)
    edges = [0, *(chunk.stop for chunk in flat)]
    whole = edges[-1] == seq_len and len(chunks) == n
    joined = all(c.step == 1 and len(c) > 0 and c.start == at for at, c in _zip(edges, flat))
    ascending = all(a.stop <= b.start for rank in chunks for a, b in pairwise(rank))
    if not (whole and joined and ascending):
        raise LayoutError(
            f"{layout!r}.chunks({n}, {seq_len}) must be {n} tuples of ascending, non-empty ranges "
            f"that partition range({seq_len})"
        )


def _zip(edges: list[int], flat: list[range]) -> Iterator[tuple[int, range]]:
    return zip(edges[:-1], flat, strict=True)


def _check(n: int, seq_len: int) -> None:
    if n < 1 or seq_len < 0:
        raise LayoutError(f"a layout needs n >= 1 and seq_len >= 0, got n={n}, seq_len={seq_len}")


def _joined(pieces: Iterable[range]) -> tuple[range, ...]:
    """Leave out empty ranges and join neighbours."""
    out: list[range] = []
    for piece in pieces:
        if out and len(piece) and out[-1].stop == piece.start:
            out[-1] = range(out[-1].start, piece.stop)
        elif len(piece):
            out.append(piece)
    return tuple(out)
