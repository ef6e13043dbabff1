"""The blocks of one rank's rows against another rank's keys, in local rows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .._bands import Kind, Piece, cut_band
from .._intervals import Ranges, Ranks, joined, overlaps, union
from .._masks import Band, MaskSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of the attention matrix: local query rows of a rank, local key rows of ``source``.

    In ``full`` blocks every row sees every key. ``causal`` and ``anticausal`` blocks are squares,
    or ``tiles`` equal squares of consecutive rows and keys, in which row ``i`` sees the keys up to
    the ``i``-th, or from it on. ``source`` counts the ranks of the schedule.
    """

    source: int
    queries: range
    keys: range
    kind: Kind
    tiles: int = 1

    @property
    def pairs(self) -> int:
        """Return the number of query-key pairs that are computed."""
        rows = len(self.queries)
        if self.kind == "full":
            return rows * len(self.keys)
        return rows * (rows // self.tiles + 1) // 2


def blocks_between(
    queries: Ranges, keys: Ranges, source: int, mask: MaskSpec, seq_len: int
) -> tuple[Block, ...]:
    """Return the blocks that are what ``mask`` shows of positions ``queries`` x ``keys``.

    Both are ascending; their order is that of local rows. Blocks are disjoint, and no row of a
    block is without keys.
    """
    documents = mask.documents(seq_len)
    ours, theirs = _by_document(queries, documents), _by_document(keys, documents)
    places = Ranks(queries), Ranks(keys)
    pieces: list[Piece] = []
    for document in sorted(ours.keys() & theirs.keys()):
        pieces += _within_document(ours[document], theirs[document], mask.band, *places)
    return tuple(_joined_blocks(pieces, source))


def _by_document(chunks: Ranges, documents: Ranges) -> dict[int, list[range]]:
    found: dict[int, list[range]] = {}
    for _, document, both in overlaps(chunks, documents):
        found.setdefault(document, []).append(both)
    return found


def _within_document(
    queries: Sequence[range], keys: Sequence[range], band: Band, rows_at: Ranks, keys_at: Ranks
) -> Iterator[Piece]:
    """Yield the pieces of one document, in local rows."""
    first_row, first_key = rows_at.of(queries[0]).start, keys_at.of(keys[0]).start
    if band == (None, None):
        rows = range(first_row, first_row + sum(map(len, queries)))
        yield Piece(rows, range(first_key, first_key + sum(map(len, keys))), "full")
        return
    if band == (None, 0):
        # Only order counts: leave out positions that neither side holds, which joins chunks.
        order = Ranks(union([*queries, *keys]))
        queries, keys = joined(map(order.of, queries)), joined(map(order.of, keys))
        rows_at, keys_at = Ranks(queries), Ranks(keys)
    else:
        first_row = first_key = 0
    for rows in queries:
        for columns in keys:
            for piece in cut_band(rows, columns, band):
                yield Piece(
                    _shifted(rows_at.of(piece.rows), first_row),
                    _shifted(keys_at.of(piece.keys), first_key),
                    piece.kind,
                )


def _shifted(piece: range, by: int) -> range:
    return range(piece.start + by, piece.stop + by)


def _joined_blocks(pieces: Iterable[Piece], source: int) -> Iterator[Block]:
    """Yield the pieces as blocks, rectangles side by side and rows of equal squares joined."""
    last: Block | None = None
    for piece in sorted(pieces, key=lambda p: (p.kind, p.rows.start, p.rows.stop, p.keys.start)):
        block = Block(source=source, queries=piece.rows, keys=piece.keys, kind=piece.kind)
        both = None if last is None else _both(last, block)
        if last is not None and both is None:
            yield last
        last = block if both is None else both
    if last is not None:
        yield last


def _both(a: Block, b: Block) -> Block | None:
    """Return one block that is ``a`` and then ``b``, where there is one."""
    if a.kind != b.kind or a.keys.stop != b.keys.start:
        return None
    if a.kind == "full":
        return _grown(a, a.queries, b.keys, 1) if a.queries == b.queries else None
    side = len(a.queries) // a.tiles
    if len(b.queries) != side or a.queries.stop != b.queries.start:
        return None
    return _grown(a, range(a.queries.start, b.queries.stop), b.keys, a.tiles + 1)


def _grown(a: Block, queries: range, last_keys: range, tiles: int) -> Block:
    keys = range(a.keys.start, last_keys.stop)
    return Block(source=a.source, queries=queries, keys=keys, kind=a.kind, tiles=tiles)
