"""How to leave out the middle of what is too long to show."""

from collections.abc import Sequence


def ends(count: int, most: int) -> tuple[range, range]:
    """Return which of ``count`` things to show at the start and at the end, at most ``most``.

    All are at the start where they fit; otherwise three of four are.
    """
    if count <= most:
        return range(count), range(count, count)
    last = most // 4
    return range(most - last), range(count - last, count)


def rank_list(ranks: Sequence[int], most: int = 12) -> str:
    """Return ranks in their order, as ``0-7`` where they are neighbours, the middle left out."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    head, tail = ends(len(ranks), most)
    texts = [str(ranks[i]) for i in head]
    texts += ["..."] if tail else []
    return " ".join([*texts, *(str(ranks[i]) for i in tail)])
