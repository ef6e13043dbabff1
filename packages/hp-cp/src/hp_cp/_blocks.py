"""What each rank computes, receives and sends, in local rows: the mask cut into blocks.

The sequence is first cut into stretches of positions that one rank holds, document by document.
The blocks of a rank's rows come from its row of the attention matrix, and the keys that it gives
from its column; the others' parts are not needed for them.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from ._layouts import Chunks
from ._ranges import (
    Band,
    Kind,
    Piece,
    Ranges,
    Window,
    banded,
    cut_window,
    joined,
    overlaps,
    union,
)

_TILE = 128  # rows and keys of the least tile of which is told whether a function shows it
_TILES = 16  # of a piece, one beside the other: its blocks are several launches
_stop = itemgetter(1)


class Stretch(NamedTuple):
    """Positions of one document whose keys ``holder`` has and whose rows ``reader`` attends.

    ``key`` and ``row`` are the first of their local rows there. Without swapped queries ``holder``
    and ``reader`` are one rank.
    """

    start: int
    stop: int
    holder: int
    key: int
    reader: int
    row: int


Document = tuple[Stretch, ...]


def cut_documents(
    chunks: Chunks, documents: Ranges, ulysses_degree: int, load_balance: bool
) -> tuple[Document, ...]:
    """Return the stretches of each document, ascending; ranks are those of the schedule.

    ``chunks`` partition the sequence. Local rows are in the order of positions, so that what a rank
    has of one document is one range of them.
    """
    pieces: list[range] = []
    ranks: list[tuple[int, int]] = []
    for start, stop, *both in sorted(_owned(chunks, ulysses_degree, load_balance)):
        if ranks and ranks[-1] == (both[0], both[1]):
            pieces[-1] = range(pieces[-1].start, stop)
        else:
            pieces.append(range(start, stop))
            ranks.append((both[0], both[1]))
    cut: list[list[Stretch]] = [[] for _ in documents]
    keys, rows = [0] * len(chunks), [0] * len(chunks)
    for i, j, part in overlaps(documents, pieces):
        holder, reader = ranks[j]
        cut[i].append(Stretch(part.start, part.stop, holder, keys[holder], reader, rows[reader]))
        keys[holder] += len(part)
        rows[reader] += len(part)
    return tuple(map(tuple, cut))


def _owned(
    chunks: Chunks, ulysses_degree: int, load_balance: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the start, the stop, the holder and the reader of every chunk, or of its halves."""
    for rank, held in enumerate(chunks):
        group = rank // ulysses_degree
        for chunk in held:
            if load_balance:
                half = chunk.start + len(chunk) // 2
                yield chunk.start, half, rank, rank
                yield half, chunk.stop, rank, len(chunks) - 1 - rank
            else:
                yield chunk.start, chunk.stop, group, group


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of the attention matrix: local query rows of a rank, local key rows of ``source``.

    In ``full`` blocks every row sees every key. ``causal`` and ``anticausal`` blocks are squares,
    or ``tiles`` equal squares of consecutive rows and keys, in which row ``i`` sees the keys up to
    the ``i``-th, or from it on. In ``masked`` blocks the mask's function is asked for each pair.
    ``window`` blocks, for kernels that take them, show what is up to ``window`` places left and
    right of the diagonal that ends in the last row and key. ``source`` counts the ranks of the
    schedule.
    """

    source: int
    queries: range
    keys: range
    kind: Kind
    tiles: int = 1
    window: Window = (None, None)

    @property
    def pairs(self) -> int:
        """Return the number of query-key pairs that are computed."""
        rows = len(self.queries)
        if self.kind in ("full", "masked"):
            return rows * len(self.keys)
        if self.kind == "window":
            cut = cut_window(Piece(self.queries, self.keys, self.kind, self.window))
            return sum(block.pairs for block in _joined_blocks(cut, self.source))
        return rows * (rows // self.tiles + 1) // 2


class Tiles(NamedTuple):
    """What a mask shows of the tiles of a piece, by row of tiles.

    ``seen``: whether it shows any pair of a tile; ``hidden``: whether its function hides a pair
    that the rest of the mask shows; ``whole``: whether it shows all pairs.
    """

    seen: list[list[bool]]
    hidden: list[list[bool]]
    whole: list[list[bool]]


# Of a piece of the rows of a rank and the keys of a source, in tiles of so many rows and keys.
Look = Callable[[int, int, Piece, int], Tiles]
Found = defaultdict[int, list[Piece]]


def blocks_of(
    rank: int,
    documents: Iterable[Document],
    band: Band,
    *,
    windows: bool = False,
    look: Look | None = None,
) -> dict[int, tuple[Block, ...]]:
    """Return, by source, the blocks that are what the mask shows to the rows of ``rank``.

    Blocks are disjoint, and no row of a block is without keys, but in ``masked`` ones. Looks at
    each stretch of the documents of which ``rank`` attends rows, in a window at those that a row
    sees. ``windows`` are left whole for kernels that take them. With a function in the mask
    ``look`` tells of tiles what it shows; what it does not restrict stays as it is.
    """
    found = _pieces_of(rank, documents, band)
    return {
        source: _blocks_from(pieces, rank, source, windows=windows, look=look)
        for source, pieces in found.items()
    }


def _blocks_from(
    pieces: Iterable[Piece], rank: int, source: int, *, windows: bool, look: Look | None
) -> tuple[Block, ...]:
    if look is not None:
        pieces = [x for piece in pieces for x in _restricted(piece, rank, source, look)]
    if not windows:
        pieces = [x for p in pieces for x in (cut_window(p) if p.kind == "window" else (p,))]
    return tuple(_joined_blocks(pieces, source))


def _restricted(piece: Piece, rank: int, source: int, look: Look) -> Iterator[Piece]:
    """Yield what the mask's function leaves of a piece: rectangles of tiles, or all of it."""
    side = -(-max(len(piece.rows), len(piece.keys)) // (_TILE * _TILES)) * _TILE
    tiles = look(rank, source, piece, side)
    if not any(map(any, tiles.hidden)):
        yield piece
        return
    above: dict[tuple[range, Kind], range] = {}
    for i, (seen, whole) in enumerate(zip(tiles.seen, tiles.whole, strict=True)):
        rows = piece.rows[i * side : (i + 1) * side]
        kinds: list[Kind | None] = []
        for j, (some, every) in enumerate(zip(seen, whole, strict=True)):
            kinds.append("full" if every else "masked" if some else None)
            if piece.kind == "causal" and i == j and not tiles.hidden[i][j]:
                kinds[-1] = "causal"
        now: dict[tuple[range, Kind], range] = {}
        for keys, kind in _runs(kinds, piece.keys, side):
            before = above.pop((keys, kind), None) if kind != "causal" else None
            now[keys, kind] = rows if before is None else range(before.start, rows.stop)
        yield from (Piece(rows, *what) for what, rows in above.items())
        above = now
    yield from (Piece(rows, *what) for what, rows in above.items())


def _runs(kinds: Sequence[Kind | None], keys: range, side: int) -> Iterator[tuple[range, Kind]]:
    """Yield the keys of neighbouring tiles of one kind, without those that show nothing."""
    for kind, run in groupby(range(len(kinds)), key=kinds.__getitem__):
        tiles = list(run)
        if kind is not None:
            yield keys[tiles[0] * side : (tiles[-1] + 1) * side], kind


def _pieces_of(rank: int, documents: Iterable[Document], band: Band) -> Found:
    found: Found = defaultdict(list)
    for document in documents:
        rows = [stretch for stretch in document if stretch.reader == rank]
        if rows:
            lowest, highest = band_within(band, document)
            if lowest is not None or highest not in (None, 0):
                _add_band(rows, document, (lowest, highest), found)
            elif highest is None:
                _add_all(rows, document, found)
            else:
                _add_causal(rank, document, found)
    return found


def band_within(band: Band, document: Document) -> Band:
    """Return the band without the edges that no pair of the document lies beyond."""
    lowest, highest = band
    farthest = document[-1].stop - 1 - document[0].start
    return (
        None if lowest is None or -lowest >= farthest else lowest,
        None if highest is None or highest >= max(farthest, 1) else highest,
    )


def _add_all(rows: Sequence[Stretch], document: Document, found: Found) -> None:
    """Add one rectangle per source: all rows, and all keys."""
    queries = range(rows[0].row, _last_row(rows[-1]))
    keys: dict[int, range] = {}
    for stretch in document:
        keys[stretch.holder] = _with_keys(keys.get(stretch.holder), stretch)
    for source, theirs in keys.items():
        found[source].append(Piece(queries, theirs, "full"))


def _add_causal(rank: int, document: Document, found: Found) -> None:
    """Add a staircase of rectangles per source: rows, and the keys before them; and own squares."""
    before: dict[int, range] = {}
    for stretch in document:
        holder = stretch.holder
        keys = before.get(holder)
        if stretch.reader == rank:
            rows = range(stretch.row, _last_row(stretch))
            square = Piece(rows, range(stretch.key, stretch.key + len(rows)), "causal")
            for source, theirs in before.items():
                if source != holder:
                    _add_below(found[source], Piece(rows, theirs, "full"))
            if keys is not None:
                last = found[holder][-1] if found[holder] else None
                if last == Piece(range(rows.start - len(keys), rows.start), keys, "causal"):
                    found[holder].pop()
                    square = Piece(
                        range(last.rows.start, rows.stop), _with_keys(keys, stretch), "causal"
                    )
                else:
                    _add_below(found[holder], Piece(rows, keys, "full"))
            found[holder].append(square)
        before[holder] = _with_keys(keys, stretch)


def _add_below(pieces: list[Piece], piece: Piece) -> None:
    """Add a rectangle, as part of the last one where it has the same keys and the next rows."""
    if pieces:
        last = pieces[-1]
        if last.kind == "full" and last.keys == piece.keys and last.rows.stop == piece.rows.start:
            piece = Piece(range(last.rows.start, piece.rows.stop), piece.keys, "full")
            pieces.pop()
    pieces.append(piece)


def _add_band(rows: Sequence[Stretch], document: Document, band: Band, found: Found) -> None:
    """Add what the band shows of each pair of a stretch of rows and a stretch of keys."""
    lowest, highest = band
    for ours in rows:
        first = 0
        if lowest is not None:
            first = bisect_right(document, ours.start + lowest, key=_stop)
        end = document[-1].stop if highest is None else ours.stop + highest
        for i in range(first, len(document)):
            theirs = document[i]
            if theirs.start >= end:
                break
            positions = range(ours.start, ours.stop), range(theirs.start, theirs.stop)
            if (piece := banded(*positions, band)) is not None:
                local_rows = _shifted(piece.rows, ours.row - ours.start)
                local_keys = _shifted(piece.keys, theirs.key - theirs.start)
                found[theirs.holder].append(Piece(local_rows, local_keys, piece.kind, piece.window))


def _with_keys(keys: range | None, stretch: Stretch) -> range:
    """Return a rank's keys of a document so far, and those of the next stretch."""
    start = stretch.key if keys is None else keys.start
    return range(start, stretch.key + stretch.stop - stretch.start)


def _last_row(stretch: Stretch) -> int:
    return stretch.row + stretch.stop - stretch.start


def _shifted(piece: range, by: int) -> range:
    return range(piece.start + by, piece.stop + by)


def _joined_blocks(pieces: Iterable[Piece], source: int) -> Iterator[Block]:
    """Yield the pieces as blocks, rectangles side by side and rows of equal squares joined."""
    last: Block | None = None
    for piece in sorted(pieces, key=lambda p: (p.kind, p.rows.start, p.rows.stop, p.keys.start)):
        block = Block(
            source=source,
            queries=piece.rows,
            keys=piece.keys,
            kind=piece.kind,
            window=piece.window,
        )
        both = None if last is None else _both(last, block)
        if last is not None and both is None:
            yield last
        last = block if both is None else both
    if last is not None:
        yield last


def _both(a: Block, b: Block) -> Block | None:
    """Return one block that is ``a`` and then ``b``, where there is one."""
    if a.kind != b.kind or a.keys.stop != b.keys.start or a.kind == "window":
        return None
    if a.kind in ("full", "masked"):
        return _grown(a, a.queries, b.keys, 1) if a.queries == b.queries else None
    side = len(a.queries) // a.tiles
    if len(b.queries) != side or a.queries.stop != b.queries.start:
        return None
    return _grown(a, range(a.queries.start, b.queries.stop), b.keys, a.tiles + 1)


def _grown(a: Block, queries: range, last_keys: range, tiles: int) -> Block:
    keys = range(a.keys.start, last_keys.stop)
    return Block(source=a.source, queries=queries, keys=keys, kind=a.kind, tiles=tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank of a schedule does; the others' parts are not needed for it.

    ``blocks`` and ``receive_rows``, the local key rows that come here, are by source: this rank, if
    at all, then the others in the order of their use. ``send_rows`` are this rank's key rows that
    go to each of the others. ``lengths`` are all ranks' key rows.
    """

    blocks: Mapping[int, tuple[Block, ...]]
    receive_rows: Mapping[int, Ranges]
    send_rows: Mapping[int, Ranges]
    lengths: tuple[int, ...]


def make_part(
    rank: int,
    sources: Sequence[int],
    documents: Sequence[Document],
    band: Band,
    lengths: tuple[int, ...],
    *,
    all_keys: bool,
    windows: bool = False,
    look: Look | None = None,
) -> Part:
    """Return the part of ``rank``, which meets keys in the order of ``sources``, itself first.

    ``all_keys`` says that all keys of all ranks travel, and not only what the mask shows.
    ``windows`` and ``look`` are those of `blocks_of`.
    """
    found = blocks_of(rank, documents, band, windows=windows, look=look)
    blocks = {source: found.get(source, ()) for source in sources}
    others = sources[1:]
    if all_keys:
        receive_rows = {source: joined([range(lengths[source])]) for source in others}
        send_rows = dict.fromkeys(others, joined([range(lengths[rank])]))
    else:
        receive_rows = {source: union(block.keys for block in blocks[source]) for source in others}
        shown = {} if look else rows_shown(rank, documents, band)
        for peer in others if look else ():
            pieces = _pieces_of(peer, documents, band).get(rank, ())
            theirs = _blocks_from(pieces, peer, rank, windows=True, look=look)
            shown[peer] = union(block.keys for block in theirs)
        send_rows = {peer: shown.get(peer, ()) for peer in others}
    return Part(blocks=blocks, receive_rows=receive_rows, send_rows=send_rows, lengths=lengths)


def rows_shown(rank: int, documents: Iterable[Document], band: Band) -> dict[int, Ranges]:
    """Return which local key rows of ``rank`` the mask shows to rows of each other rank.

    Looks at each stretch of the documents of which ``rank`` has keys.
    """
    shown: dict[int, list[range]] = {}
    for document in documents:
        keys = [stretch for stretch in document if stretch.holder == rank]
        if not keys:
            continue
        lowest, highest = band_within(band, document)
        start, stop = document[0].start, document[-1].stop
        for rows in document:
            if rows.reader == rank:
                continue
            first = start if lowest is None else rows.start + lowest
            last = stop if highest is None else rows.stop + highest
            for mine in keys:
                a, b = max(first, mine.start), min(last, mine.stop)
                if a < b:
                    by = mine.key - mine.start
                    shown.setdefault(rows.reader, []).append(range(a + by, b + by))
    return {peer: union(pieces) for peer, pieces in shown.items()}
