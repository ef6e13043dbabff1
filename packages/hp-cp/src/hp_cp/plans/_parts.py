"""One rank's row and column of a plan: what it computes, what comes to it and what it gives."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .._ranges import Band, Ranges, joined, union
from ._blocks import Block, band_within, blocks_of
from ._stretches import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank of a schedule does; the others' parts are not needed for it.

    ``blocks`` and ``wanted``, the local key rows that come here, are by source: this rank, if at
    all, then the others in the order of their use. ``given`` are this rank's key rows that go to
    each of the others. ``lengths`` are all ranks' key rows.
    """

    blocks: Mapping[int, tuple[Block, ...]]
    wanted: Mapping[int, Ranges]
    given: Mapping[int, Ranges]
    lengths: tuple[int, ...]


def make_part(
    rank: int,
    sources: Sequence[int],
    documents: Sequence[Document],
    band: Band,
    lengths: tuple[int, ...],
    *,
    all_keys: bool,
) -> Part:
    """Return the part of ``rank``, which meets keys in the order of ``sources``, itself first.

    ``all_keys`` says that all keys of all ranks travel, and not only what the mask shows.
    """
    found = blocks_of(rank, documents, band)
    blocks = {source: found.get(source, ()) for source in sources}
    others = sources[1:]
    if all_keys:
        wanted = {source: joined([range(lengths[source])]) for source in others}
        given = dict.fromkeys(others, joined([range(lengths[rank])]))
    else:
        wanted = {source: union(block.keys for block in blocks[source]) for source in others}
        shown = rows_shown(rank, documents, band)
        given = {peer: shown.get(peer, ()) for peer in others}
    return Part(blocks=blocks, wanted=wanted, given=given, lengths=lengths)


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
