"""Which slot gets its expert from where when a placement changes."""

from dataclasses import dataclass

from .._errors import ExpertConfigError
from ._placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """From one placement to another: ``sources[s]`` is the old slot whose values slot ``s`` takes.

    Communicates nothing; `migrate_experts` carries it out.
    """

    old: Placement
    new: Placement
    sources: tuple[int, ...]

    @property
    def moved(self) -> int:
        """Return how many experts' values go to another rank."""
        return len(self._travels())

    def bytes(self, expert_bytes: int) -> int:
        """Return the bytes that go to other ranks where one expert, all states, has so many."""
        return self.moved * expert_bytes

    def sent(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the slots, counted on ``rank``, whose values go to each rank, in its order."""
        parts: list[list[int]] = [[] for _ in range(self.new.num_ranks)]
        for (to, _), (source, row) in self._travels():
            if source == rank:
                parts[to].append(row)
        return tuple(map(tuple, parts))

    def received(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the slots, counted on ``rank``, whose values come from each rank, in its order."""
        parts: list[list[int]] = [[] for _ in range(self.new.num_ranks)]
        for (to, row), (source, _) in self._travels():
            if to == rank:
                parts[source].append(row)
        return tuple(map(tuple, parts))

    def kept(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return ``(slot, old slot)`` pairs, counted on ``rank``, of values that stay there."""
        return tuple(
            (row, from_row)
            for (to, row), (source, from_row) in self._pairs()
            if to == source == rank
        )

    def _travels(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        return [(target, source) for target, source in self._pairs() if target[0] != source[0]]

    def _pairs(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return each new slot and the old one it takes from, as rank and slot on that rank."""
        new, old = self.new.slots_per_rank, self.old.slots_per_rank
        return [
            (divmod(slot, new), divmod(source, old)) for slot, source in enumerate(self.sources)
        ]


def plan_migration(old: Placement, new: Placement) -> Migration:
    """Return how experts get from ``old`` to ``new``; values stay on their rank where they can.

    Of several replicas elsewhere the rank that has sent the least so far sends.
    `ExpertConfigError` where the two have different numbers of ranks or experts.
    """
    a, b = (dict(num_ranks=p.num_ranks, num_experts=p.num_experts) for p in (old, new))
    if a != b:
        raise ExpertConfigError(
            f"experts cannot move from a placement with {a} to one with {b}; they must agree"
        )
    size, new_size = old.slots_per_rank, new.slots_per_rank
    slots_of = old.slots_of
    sent = [0] * old.num_ranks
    sources = []
    for slot, expert in enumerate(new.experts):
        held = slots_of[expert]
        here = [t for t in held if t // size == slot // new_size]
        source = here[0] if here else min(held, key=lambda t: (sent[t // size], t))
        if not here:
            sent[source // size] += 1
        sources.append(source)
    return Migration(old=old, new=new, sources=tuple(sources))
