"""What a load says: how far from even, per expert and per rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .._errors import ExpertConfigError
from .._sizes import Listed, as_loads, is_factor
from ._placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStats:
    """A step's load: how many tokens chose each expert, on all ranks together.

    A tensor of them is read once. `ExpertConfigError` for no experts, negative numbers, and a
    placement of other experts.
    """

    expert_load: tuple[float, ...]
    placement: Placement

    def __post_init__(self) -> None:
        object.__setattr__(self, "expert_load", as_loads(self.expert_load))
        self.placement.rank_load(self.expert_load)

    @property
    def rank_load(self) -> tuple[float, ...]:
        """Return the load of each rank, replicas sharing their expert's."""
        return self.placement.rank_load(self.expert_load)

    @property
    def rank_imbalance(self) -> float:
        """Return the largest rank load over the mean: how much longer a step takes than it must."""
        return self.placement.imbalance(self.expert_load)

    @property
    def expert_imbalance(self) -> float:
        """Return the largest expert load over the mean, 1 where there is no load."""
        total = sum(self.expert_load)
        return max(self.expert_load) * len(self.expert_load) / total if total else 1.0

    @property
    def idle_experts(self) -> int:
        """Return how many experts no token chose."""
        return sum(x == 0 for x in self.expert_load)

    @property
    def entropy(self) -> float:
        """Return the entropy of the choice of expert over its maximum: 1 even, 0 one expert."""
        total = sum(self.expert_load)
        if not total or len(self.expert_load) == 1:
            return 1.0
        shares = [x / total for x in self.expert_load if x]
        return -sum(p * math.log(p) for p in shares) / math.log(len(self.expert_load))


def smooth_load(
    before: Sequence[float] | None, load: Sequence[float] | Listed, decay: float
) -> tuple[float, ...]:
    """Return ``decay`` times the average so far plus the rest of the new load; a first load as is.

    `ExpertConfigError` for a decay outside 0 .. 1 and for loads of different lengths.
    """
    if not is_factor(decay) or decay >= 1:
        raise ExpertConfigError(f"decay={decay!r} must be at least 0 and below 1")
    load = as_loads(load)
    if before is None:
        return load
    if len(before) != len(load):
        raise ExpertConfigError(f"loads of {len(before)} and {len(load)} experts; give one length")
    return tuple(decay * a + (1 - decay) * b for a, b in zip(before, load, strict=True))
