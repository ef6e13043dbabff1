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
        size = self.old.slots_per_rank
        parts: list[list[int]] = [[] for _ in range(self.new.num_ranks)]
        for slot, source in self._travels():
            if source // size == rank:
                parts[slot // size].append(source % size)
        return tuple(map(tuple, parts))

    def received(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the slots, counted on ``rank``, whose values come from each rank, in its order."""
        size = self.old.slots_per_rank
        parts: list[list[int]] = [[] for _ in range(self.new.num_ranks)]
        for slot, source in self._travels():
            if slot // size == rank:
                parts[source // size].append(slot % size)
        return tuple(map(tuple, parts))

    def kept(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return ``(slot, old slot)`` pairs, counted on ``rank``, of values that stay there."""
        size = self.old.slots_per_rank
        return tuple(
            (slot % size, source % size)
            for slot, source in enumerate(self.sources)
            if slot // size == source // size == rank
        )

    def _travels(self) -> list[tuple[int, int]]:
        size = self.old.slots_per_rank
        return [(s, t) for s, t in enumerate(self.sources) if s // size != t // size]


def plan_migration(old: Placement, new: Placement) -> Migration:
    """Return how experts get from ``old`` to ``new``; values stay on their rank where they can.

    Of several replicas elsewhere the rank that has sent the least so far sends.
    `ExpertConfigError` where the two have different numbers of ranks, experts or slots.
    """
    a, b = (
        dict(num_ranks=p.num_ranks, num_experts=p.num_experts, slots_per_rank=p.slots_per_rank)
        for p in (old, new)
    )
    if a != b:
        raise ExpertConfigError(
            f"experts cannot move from a placement with {a} to one with {b}; they must agree"
        )
    size = old.slots_per_rank
    slots_of = old.slots_of
    sent = [0] * old.num_ranks
    sources = []
    for slot, expert in enumerate(new.experts):
        held = slots_of[expert]
        here = [t for t in held if t // size == slot // size]
        source = here[0] if here else min(held, key=lambda t: (sent[t // size], t))
        if not here:
            sent[source // size] += 1
        sources.append(source)
    return Migration(old=old, new=new, sources=tuple(sources))
