"""What a layout is: which rank holds which positions of the sequence."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Protocol, runtime_checkable

from .._errors import LayoutError, described
from .._masks import MaskSpec, check_mask
from .._ranges import Ranges, joined

Chunks = tuple[Ranges, ...]


@runtime_checkable
class Layout(Protocol):
    """A way to cut a sequence over ranks.

    Subclass it, or provide both methods; equal layouts have equal hashes and cut alike. ``chunks``
    holds, per rank, non-empty ranges in ascending order which together partition
    ``range(seq_len)``; `plan_attention` checks it.
    """

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Chunks:
        """Return each rank's global positions as ranges, in the order of its local rows.

        Layouts that follow the mask raise `LayoutError` without one.
        """
        ...

    def indices(
        self, n: int, seq_len: int, mask: MaskSpec | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Return each rank's global positions, in the order of its local rows."""
        chunks = self.chunks(n, seq_len, mask)
        return tuple(tuple(i for chunk in rank for i in chunk) for rank in chunks)


def lengths_of(chunks: Chunks) -> tuple[int, ...]:
    """Return each rank's number of positions."""
    return tuple(sum(map(len, rank)) for rank in chunks)


def in_global_order(chunks: Chunks) -> list[int]:
    """Return the order that sorts all chunks, listed rank by rank, by their global start."""
    starts = [chunk.start for rank in chunks for chunk in rank]
    return sorted(range(len(starts)), key=starts.__getitem__)


def cut(edges: Iterable[int]) -> list[range]:
    """Return the ranges between neighbouring edges; some may be empty."""
    return [range(*pair) for pair in pairwise(edges)]


def even_edges(start: int, stop: int, parts: int) -> list[int]:
    """Return the edges of ``parts`` ranges, of which the first ones are one longer."""
    length, longer = divmod(stop - start, parts)
    return [start + i * length + min(i, longer) for i in range(parts + 1)]


def gathered(owners: Iterable[tuple[int, range]], n: int) -> Chunks:
    """Return the pieces, given with their rank, as chunks."""
    held: list[list[range]] = [[] for _ in range(n)]
    for rank, piece in owners:
        held[rank].append(piece)
    return tuple(joined(sorted(pieces, key=lambda piece: piece.start)) for pieces in held)


def check_layout(layout: object) -> None:
    """Raise `LayoutError` unless ``layout`` is a `Layout`, no name or class of one, with a hash."""
    if isinstance(layout, type) or not isinstance(layout, Layout):
        raise LayoutError(
            f"layout must be a Layout, got {described(layout)}; use Contiguous(), Zigzag() or an "
            f"object with chunks and indices, and a hash"
        )
    try:
        hash(layout)
    except TypeError as error:
        raise LayoutError(
            f"{layout!r} has no hash, by which plans are kept: {error}; make it a frozen dataclass "
            f"of hashable fields"
        ) from error


def check_size(n: int, seq_len: int) -> None:
    """Raise `LayoutError` unless there are ranks and no negative length, both ints."""
    if type(n) is not int or type(seq_len) is not int or n < 1 or seq_len < 0:
        raise LayoutError(
            f"a layout needs ints n >= 1 and seq_len >= 0, got n={n!r}, seq_len={seq_len!r}"
        )


def check_partition(chunks: Chunks, n: int, seq_len: int, layout: Layout) -> None:
    """Raise `LayoutError` unless the chunks keep the contract of `Layout.chunks`."""
    flat = sorted((chunk for rank in chunks for chunk in rank), key=lambda chunk: chunk.start)
    edges = [0, *(chunk.stop for chunk in flat)]
    whole = edges[-1] == seq_len and len(chunks) == n
    touching = all(
        c.step == 1 and len(c) > 0 and c.start == at for at, c in zip(edges, flat, strict=False)
    )
    ascending = all(a.stop <= b.start for rank in chunks for a, b in pairwise(rank))
    if not (whole and touching and ascending):
        raise LayoutError(
            f"{layout!r}.chunks({n}, {seq_len}) must be {n} tuples of ascending, non-empty ranges "
            f"that partition range({seq_len})"
        )


def check_given(mask: MaskSpec | None, layout: Layout) -> MaskSpec:
    """Return the mask that a layout follows, or raise `LayoutError` for none or another object."""
    if mask is None:
        raise LayoutError(
            f"{layout!r} lies as the mask wants; give the mask, mask=MaskSpec(...), or use "
            f"Contiguous() or Zigzag()"
        )
    check_mask(mask)
    return mask
