"""Which heads a Ulysses rank attends."""

from dataclasses import dataclass

from ..layouts._interface import cut, even_edges


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """One rank's query heads, and the kv heads that these read.

    ``repeats`` says for each query head which of the kv heads it reads, counted from the first,
    where query heads do not read the kv heads in equal groups; else it is None.
    """

    q: range
    kv: range
    repeats: tuple[int, ...] | None

    @property
    def kv_heads(self) -> int:
        """Return the number of kv heads that the kernel is given."""
        return len(self.kv) if self.repeats is None else len(self.repeats)


def split_heads(q_heads: int, kv_heads: int, ranks: int) -> tuple[HeadShare, ...]:
    """Return each rank's share: consecutive query heads, at most one more on the first ranks.

    A kv head that query heads of several ranks read is in the share of each.
    """
    group = q_heads // kv_heads
    return tuple(_share(q, group) for q in cut(even_edges(0, q_heads, ranks)))


def _share(q: range, group: int) -> HeadShare:
    kv = range(q.start // group, (q.stop - 1) // group + 1)
    reads = tuple(head // group - kv.start for head in q)
    even, left = divmod(len(q), len(kv))
    equal = not left and reads == tuple(i // even for i in range(len(q)))
    return HeadShare(q=q, kv=kv, repeats=None if equal else reads)
