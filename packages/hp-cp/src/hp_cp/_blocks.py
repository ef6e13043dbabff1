"""What each rank computes, receives and sends, in local rows: the mask cut into blocks.

The sequence is first cut into stretches of positions that one rank holds, document by document.
The blocks of a rank's rows come from its row of the attention matrix, and the keys that it gives
from its column; the others' parts are not needed for them.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise, starmap
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
    size,
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
    """A rectangle of the attention matrix: queries of one rank and keys of one rank.

    Attributes:
        source: Rank that owns the keys. With ``ulysses_degree=u``, ranks are counted in groups of
            ``u``: ``source`` is ``rank // u``.
        queries: Rows of the rectangle, as indices into the local queries of the rank that computes
            the block.
        keys: Columns of the rectangle, as indices into the local keys of ``source``.
        kind: Query-key pairs of the rectangle that the mask shows. Row ``i`` and key ``j`` count
            from the first row and key of the block:

            - ``"full"``: all pairs;
            - ``"causal"``: pairs with ``j <= i``; the block is square;
            - ``"anticausal"``: pairs with ``j >= i``; the block is square;
            - ``"window"``: the pairs inside ``window``, for kernels that support windows;
            - ``"masked"``: the pairs for which ``mask_mod`` returns True.
        tiles: A causal or anticausal block consists of this many squares of equal size along its
            diagonal. Rows see only keys in their own square. Defaults to 1.
        window: ``(left, right)`` for the kind ``"window"``: number of keys that a row sees to the
            left and to the right of the diagonal. The diagonal ends at the last row and the last
            key. None means no bound.

    Examples:
        >>> plan = plan_attention(MaskSpec(causal=True), Zigzag(), n=2, seq_len=16)
        >>> block = plan.blocks(0)[0]
        >>> block.kind, block.source, block.queries, block.pairs
        ('causal', 0, range(0, 8), 36)
    """

    source: int
    queries: range
    keys: range
    kind: Kind
    tiles: int = 1
    window: Window = (None, None)

    @property
    def pairs(self) -> int:
        """Number of query-key pairs that a kernel computes for this block."""
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
        for keys, kind in _runs_of_tiles(kinds, piece.keys, side):
            before = above.pop((keys, kind), None) if kind != "causal" else None
            now[keys, kind] = rows if before is None else range(before.start, rows.stop)
        yield from (Piece(rows, *what) for what, rows in above.items())
        above = now
    yield from (Piece(rows, *what) for what, rows in above.items())


def _runs_of_tiles(
    kinds: Sequence[Kind | None], keys: range, side: int
) -> Iterator[tuple[range, Kind]]:
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


Pieces = tuple[tuple[Ranges, ...], ...]  # positions of each part of each rank's rows


def pieces_of(groups: Chunks) -> Pieces:
    """Return the parts of each rank's keys that are gathered side by side.

    The chunks where no rank has more than two, else all of a rank as one. Under `Zigzag` the last
    rank's chunks are side by side, one range, which is cut as those of the others.
    """
    firsts = {len(held[0]) for held in groups if len(held) == 2}
    if max(map(len, groups), default=0) > 2:
        return tuple((held,) for held in groups)
    if len(firsts) == 1 and all(groups):
        (first,) = firsts
        groups = tuple(
            held if len(held) == 2 else tuple(filter(None, (held[0][:first], held[0][first:])))
            for held in groups
        )
    return tuple(tuple((chunk,) for chunk in held) for held in groups)


def places_of(pieces: Pieces) -> tuple[Ranges, ...]:
    """Return where the pieces of each rank's keys are in memory after all are gathered.

    All second pieces and then all first ones: under `Zigzag` what the second chunk of a rank sees
    of all keys is then one range.
    """
    places: list[list[range]] = [[range(0)] * len(held) for held in pieces]
    start = 0
    for i in reversed(range(max(map(len, pieces), default=0))):
        for rank, held in enumerate(pieces):
            if i < len(held):
                places[rank][i] = range(start, start + size(held[i]))
                start += len(places[rank][i])
    return tuple(map(tuple, places))


def gathered_part(part: Part, rank: int, queries: Chunks, pieces: Pieces) -> Part:
    """Return a part whose keys of others are one source, the number ``n`` of ranks, of all keys.

    Its blocks count rows of memory as `places_of` has them, and are as few as that allows: own
    rectangles move there where that saves some.
    """
    n, places = len(pieces), places_of(pieces)
    found: list[tuple[list[Block], list[Block]]] = []
    for rows in ((), local_rows(map(len, queries[rank]))):
        own: list[Piece] = []
        every: list[Piece] = []
        for source, blocks_of_source in part.blocks.items():
            cuts = local_rows(map(size, pieces[source]))
            for piece in (x for block in blocks_of_source for x in _single(block)):
                if source == rank and not rows:
                    own.append(piece)
                    continue
                for cut in _cut_piece(piece, rows or (piece.rows,), cuts):
                    if source == rank and cut.kind != "full":
                        own.append(cut)
                        continue
                    i = next(i for i, held in enumerate(cuts) if cut.keys.start in held)
                    keys = _shifted(cut.keys, places[source][i].start - cuts[i].start)
                    every.append(Piece(cut.rows, keys, cut.kind))
        found.append((_stacked(_joined_blocks(own, rank)), _stacked(_joined_blocks(every, n))))
    own_blocks, blocks = min(found, key=lambda both: len(both[0]) + len(both[1]))
    return replace(
        part,
        blocks={rank: tuple(own_blocks), n: tuple(blocks)},
        receive_rows={n: joined([range(sum(part.lengths))])},
    )


def local_rows(lengths: Iterable[int]) -> Ranges:
    """Return the local rows of parts of these lengths."""
    edges = [0, *accumulate(lengths)]
    return tuple(starmap(range, pairwise(edges)))


def _single(block: Block) -> Iterator[Piece]:
    """Yield the squares of a block, or the block."""
    rows, keys = len(block.queries) // block.tiles, len(block.keys) // block.tiles
    for i in range(block.tiles):
        yield Piece(
            block.queries[i * rows : (i + 1) * rows],
            block.keys[i * keys : (i + 1) * keys],
            block.kind,
        )


def _cut_piece(piece: Piece, rows: Ranges, keys: Ranges) -> Iterator[Piece]:
    """Yield a piece cut to ranges of rows and of keys: a square to squares and rectangles."""
    if piece.kind in ("full", "masked"):
        for _, _, mine in overlaps([piece.rows], rows):
            for _, _, theirs in overlaps([piece.keys], keys):
                yield Piece(mine, theirs, piece.kind)
    elif piece.kind in ("causal", "anticausal"):
        by = piece.keys.start - piece.rows.start
        both = [x for _, _, x in overlaps([piece.rows], rows)]
        cuts = [x for _, _, x in overlaps(both, [_shifted(held, -by) for held in keys])]
        for i, square in enumerate(cuts):
            for other in cuts[:i] if piece.kind == "causal" else cuts[i + 1 :]:
                yield Piece(square, _shifted(other, by), "full")
            yield Piece(square, _shifted(square, by), piece.kind)
    else:
        raise RuntimeError(f"a block of kind {piece.kind!r} is not known over gathered keys")


def _stacked(blocks: Iterable[Block]) -> list[Block]:
    """Return blocks with rectangles joined that have the same keys and follow each other."""
    out: list[Block] = []
    for block in sorted(blocks, key=lambda b: (b.kind, b.keys.start, b.keys.stop, b.queries.start)):
        last = out[-1] if out else None
        if (
            last is not None
            and (last.kind, block.kind, last.keys) == ("full", "full", block.keys)
            and last.queries.stop == block.queries.start
        ):
            block = _grown(out.pop(), range(last.queries.start, block.queries.stop), block.keys, 1)
            block = replace(block, keys=last.keys)
        out.append(block)
    return out
