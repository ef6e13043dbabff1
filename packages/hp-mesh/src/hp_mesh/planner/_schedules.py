"""All pipeline schedules, one record each. To add a schedule, add its name and its record."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .._errors import Violation, broken, divisors

ScheduleName: TypeAlias = Literal["1f1b", "interleaved", "zero-bubble", "dualpipe"]


def _one_f_one_b_in_flight(pp: int, stages: int, *, last: bool) -> float:
    return 1 if last else pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One pipeline schedule. All functions are for a run with at least two pipeline ranks.

    Attributes:
        bubble: Seconds that a rank waits in one step. Arguments: ``pp``, stages per rank, and the
            seconds of one microbatch on a rank, of its forward pass, and of its weight gradients.
        source: Publication that describes the bubble and the memory.
        in_flight: Number of microbatches for which a rank holds activations. Arguments: ``pp``,
            stages per rank, and whether the rank is the last one.
        violations: Violations for ``pp`` and a number of microbatches, or None if every number is
            legal.
        weight_copies: Number of copies of its weights that a rank holds.
        overlaps_experts: Whether the forward pass of one microbatch overlaps the expert exchange of
            another one.
        adjustable: Whether a rank has 2 or more stages, at choice. Otherwise it has one.
    """

    bubble: Callable[[int, int, float, float, float], float]
    source: str
    in_flight: Callable[..., float] = _one_f_one_b_in_flight
    violations: Callable[[int, int], Iterator[Violation]] | None = None
    weight_copies: int = 1
    overlaps_experts: bool = False
    adjustable: bool = False


def _one_f_one_b_bubble(pp: int, stages: int, busy: float, forward: float, weights: float) -> float:
    return (pp - 1) / stages * busy


def _interleaved_in_flight(pp: int, stages: int, *, last: bool) -> float:
    more = (pp - 1) / stages
    return pp - more if last else pp + more


def _interleaved_violations(pp: int, microbatches: int) -> Iterator[Violation]:
    if microbatches % pp:
        reason = f"pp={pp} does not divide microbatches={microbatches}, as an "
        reason += "interleaved schedule needs"
        values = {"pp": pp, "microbatches": microbatches}
        yield broken("interleaved", reason, values, {"pp": divisors(microbatches)})


def _zero_bubble(pp: int, stages: int, busy: float, forward: float, weights: float) -> float:
    # The last backward passes fill the bubble with weight gradients.
    return (pp - 1) * max(0.0, busy - 2 * weights)


def _dualpipe_bubble(pp: int, stages: int, busy: float, forward: float, weights: float) -> float:
    # Microbatches enter from both ends, and weight gradients fill the rest of the bubble.
    both = busy + (busy - forward) - 3 * weights
    return max(0.0, pp / 2 - 1) * max(0.0, both)


def _dualpipe_violations(pp: int, microbatches: int) -> Iterator[Violation]:
    if pp % 2 or microbatches % 2:
        reason = f"pp={pp} and microbatches={microbatches} are not both even, as microbatches "
        reason += "enter a DualPipe schedule from both ends"
        yield broken("dualpipe", reason, {"pp": pp, "microbatches": microbatches})


SCHEDULES: Mapping[ScheduleName, Schedule] = {
    "1f1b": Schedule(
        bubble=_one_f_one_b_bubble,
        source="arXiv 2104.04473, section 2.2; memory: arXiv 2205.05198, section 4.3",
    ),
    "interleaved": Schedule(
        bubble=_one_f_one_b_bubble,
        source="arXiv 2104.04473, section 2.2; memory: arXiv 2205.05198, section 4.3",
        in_flight=_interleaved_in_flight,
        violations=_interleaved_violations,
        adjustable=True,
    ),
    "zero-bubble": Schedule(
        bubble=_zero_bubble,
        source="ZB-H1: arXiv 2401.10241, table 2; memory: section 2.1",
        in_flight=lambda pp, stages, *, last: pp,
    ),
    "dualpipe": Schedule(
        bubble=_dualpipe_bubble,
        source="arXiv 2412.19437, table 2",
        in_flight=lambda pp, stages, *, last: pp + 1,
        violations=_dualpipe_violations,
        weight_copies=2,
        overlaps_experts=True,
    ),
}
DEFAULT_SCHEDULE: ScheduleName = next(iter(SCHEDULES))
ADJUSTABLE: tuple[ScheduleName, ...] = tuple(
    name for name, schedule in SCHEDULES.items() if schedule.adjustable
)
