"""Schedules by name: in which order a rank meets the other ranks' keys, and how they travel."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ._errors import InputError

ScheduleName = Literal["gather", "direct", "ring", "double_ring"]


@dataclass(frozen=True, slots=True)
class DoubleRing:
    """A schedule of two levels: rings of ``inner`` neighbouring ranks, and a ring of these rings.

    While keys and values travel once around an inner ring, the next transfer between rings is in
    flight. It can therefore take as long as one round of the inner ring (LoongTrain, arXiv
    2406.18485, section 4.3). If ``inner`` is the number of ranks per node, only one of ``inner``
    transfers crosses nodes.

    Args:
        inner: Number of ranks per inner ring. It must divide the number of ranks of the schedule,
            ``n / ulysses_degree``. Defaults to None: the largest divisor up to the square root.

    Raises:
        InputError: ``inner`` is not an int of at least 1. If ``inner`` does not divide the number
            of ranks, `plan_attention` and `context_parallel_attention` raise the error.

    Examples:
        >>> schedule = DoubleRing(inner=4)
        >>> plan_attention(MaskSpec(causal=True), Zigzag(), n=8, seq_len=64, schedule=schedule).ring
        Ring(n=8, inner=4)
    """

    inner: int | None = None

    def __post_init__(self) -> None:
        if self.inner is not None and (type(self.inner) is not int or self.inner < 1):
            raise InputError(
                f"inner={self.inner!r} is no number of ranks; use a divisor of the ranks of the "
                f"schedule, or None"
            )


Schedule = ScheduleName | DoubleRing


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """``n`` ranks in rings of ``inner``, which pass on what they hold.

    Ranks count ring by ring. At step ``t`` of ``n`` a rank works on the keys of ``source(rank, t)``
    and then passes on what it adds to their gradients, which reach their owner after the last step.
    """

    n: int
    inner: int

    def source(self, rank: int, step: int) -> int:
        """Return whose keys ``rank`` holds at ``step``."""
        return self._moved(rank, -(step // self.inner), -(step % self.inner))

    def next_inner(self, rank: int, by: int = 1) -> int:
        """Return the neighbour inside the ring, to which keys go in most steps."""
        return self._moved(rank, 0, by)

    def next_outer(self, rank: int, by: int = 1) -> int:
        """Return the neighbour in the next ring, to which keys go once per round."""
        return self._moved(rank, by, 0)

    def next_gradient(self, rank: int, step: int, by: int = 1) -> int:
        """Return who adds to the gradients after ``rank`` did at ``step``."""
        crosses = (step + 1) % self.inner == 0
        return self._moved(rank, by if crosses else 0, by)

    def _moved(self, rank: int, rings: int, places: int) -> int:
        ring, place = divmod(rank, self.inner)
        ring = (ring + rings) % (self.n // self.inner)
        return ring * self.inner + (place + places) % self.inner


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """How keys and values travel under the schedules of one name.

    ``all_keys``: all keys of all ranks travel, and not only what the mask shows. ``keeps_kv``: by
    default others' keys and values stay for the backward. ``gathers``: all keys come at once, and
    are attended together. ``ring`` makes the way around so many
    ranks; None where keys come straight from their owner.
    """

    all_keys: bool
    keeps_kv: bool = False
    gathers: bool = False
    ring: Callable[[Schedule, int], Ring] | None = None


def _single_ring(schedule: Schedule, n: int) -> Ring:
    return Ring(n=n, inner=n)


def _double_ring(schedule: Schedule, n: int) -> Ring:
    inner = schedule.inner if isinstance(schedule, DoubleRing) else None
    divisors = [i for i in range(1, n + 1) if n % i == 0]
    if inner is None:
        inner = max(i for i in divisors if i <= math.isqrt(n))
    if inner not in divisors:
        raise InputError(
            f"rings of inner={inner} ranks do not divide the {n} ranks of the schedule; use one "
            f"of {divisors}"
        )
    return Ring(n=n, inner=inner)


SCHEDULES: dict[ScheduleName, ScheduleSpec] = {
    "gather": ScheduleSpec(all_keys=True, keeps_kv=True, gathers=True),
    "direct": ScheduleSpec(all_keys=False),
    "ring": ScheduleSpec(all_keys=True, ring=_single_ring),
    "double_ring": ScheduleSpec(all_keys=True, ring=_double_ring),
}


def check_schedule(schedule: object) -> None:
    """Raise `InputError` for what is no schedule."""
    names = list(SCHEDULES)
    if not isinstance(schedule, DoubleRing) and schedule not in names:
        raise InputError(f"no schedule {schedule!r}; use one of {names}, or a DoubleRing")


def name_of(schedule: Schedule) -> ScheduleName:
    """Return the name by which tables know a schedule."""
    return "double_ring" if isinstance(schedule, DoubleRing) else schedule


def ring_of(schedule: Schedule, n: int) -> Ring | None:
    """Return the way around ``n`` ranks, or None where keys come straight from their owner.

    Raises `InputError` for inner rings that do not divide the ranks.
    """
    make = SCHEDULES[name_of(schedule)].ring
    return None if make is None else make(schedule, n)
