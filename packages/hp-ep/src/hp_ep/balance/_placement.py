"""Which rank holds which experts, and how often."""

from collections.abc import Sequence
from dataclasses import dataclass

from .._errors import ExpertConfigError
from .._sizes import check_sizes, is_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Experts on the slots of ranks: ``experts[s]`` is the expert of slot ``s``, rank by rank.

    Every rank has as many slots. An expert may have several slots, its replicas, on different
    ranks; every expert has at least one. `ExpertConfigError` for anything else.
    """

    num_ranks: int
    num_experts: int
    experts: tuple[int, ...]

    def __post_init__(self) -> None:
        check_sizes({"num_experts": self.num_experts, "num_ranks": self.num_ranks})
        if not isinstance(self.experts, tuple):
            raise ExpertConfigError(
                f"experts={self.experts!r} must be a tuple of integers, so that placements compare"
            )
        if len(self.experts) % self.num_ranks:
            raise ExpertConfigError(
                f"{len(self.experts)} slots on {self.num_ranks} ranks; every rank must have as many"
            )
        if not all(is_count(expert, 0) for expert in self.experts):
            raise ExpertConfigError(
                f"experts {list(self.experts)} must be integers from 0 to {self.num_experts - 1}"
            )
        if set(self.experts) != set(range(self.num_experts)):
            wrong = sorted(set(self.experts) ^ set(range(self.num_experts)))
            raise ExpertConfigError(
                f"experts {wrong} are missing or unknown; place each of 0 .. "
                f"{self.num_experts - 1} at least once"
            )
        for rank in range(self.num_ranks):
            here = self.on_rank(rank)
            if len(set(here)) < len(here):
                raise ExpertConfigError(
                    f"rank {rank} holds experts {list(here)}; replicas must be on different ranks"
                )

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> "Placement":
        """Return equal blocks in order: what a weight cut along its first dimension gives."""
        check_sizes({"num_experts": num_experts, "num_ranks": num_ranks})
        return cls(num_ranks=num_ranks, num_experts=num_experts, experts=tuple(range(num_experts)))

    @property
    def slots_per_rank(self) -> int:
        """Return how many slots a rank has."""
        return len(self.experts) // self.num_ranks

    @property
    def slots_of(self) -> tuple[tuple[int, ...], ...]:
        """Return each expert's slots, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            found[expert].append(slot)
        return tuple(map(tuple, found))

    def on_rank(self, rank: int) -> tuple[int, ...]:
        """Return the experts on one rank, by slot; `ExpertConfigError` for a rank of none."""
        if not is_count(rank, 0, self.num_ranks - 1):
            raise ExpertConfigError(f"rank={rank!r} is not one of 0 .. {self.num_ranks - 1}")
        size = self.slots_per_rank
        return self.experts[rank * size : (rank + 1) * size]

    def rank_load(self, load: Sequence[float]) -> tuple[float, ...]:
        """Return each rank's load where ``load [num_experts]`` is shared among replicas."""
        if len(load) != self.num_experts:
            raise ExpertConfigError(
                f"a load of {len(load)} numbers for num_experts={self.num_experts}; give one each"
            )
        share = [x / len(slots) for x, slots in zip(load, self.slots_of, strict=True)]
        return tuple(sum(share[e] for e in self.on_rank(r)) for r in range(self.num_ranks))

    def imbalance(self, load: Sequence[float]) -> float:
        """Return the largest rank's load over the mean of all ranks, 1 where there is no load."""
        loads = self.rank_load(load)
        total = sum(loads)
        return max(loads) * len(loads) / total if total else 1.0
