"""Pipeline schedules, with formulas for their waiting time and memory.

To add a schedule, add its name to `ScheduleName` and a `Schedule` to `SCHEDULES`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .._errors import Violation, broken, divisors

ScheduleName: TypeAlias = Literal["1f1b", "interleaved", "zero-bubble", "dualpipe"]


def _one_f_one_b_in_flight(pp: int, stages: int, *, last: bool) -> float:
    return 1 if last else pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A pipeline schedule: functions that compute its waiting time and memory.

    The functions are valid for two or more pipeline ranks.

    Attributes:
        bubble: Function ``bubble(pp, stages, busy, forward, weights)``. Returns the seconds that a
            pipeline rank waits for other ranks in one step. ``pp`` is the number of pipeline ranks,
            and ``stages`` is the number of stages per rank. The other arguments are seconds that
            one rank works on one microbatch: ``busy`` for all computation and communication,
            ``forward`` for the forward pass, and ``weights`` for the weight gradients.
        source: Publication that describes the schedule's waiting time and memory.
        in_flight: Function ``in_flight(pp, stages, last=...)``. Returns the number of microbatches
            whose activations a rank saves at the same time. ``last`` is True for the last pipeline
            rank, and False for the first one.
        violations: Function ``violations(pp, microbatches)``. Yields a violation if the schedule
            cannot run with this number of microbatches. If ``violations`` is None, the schedule can
            run with every number.
        weight_copies: Number of copies of the weights on each rank.
        overlaps_experts: True if the computation of one microbatch overlaps with the expert
            communication of another microbatch.
        adjustable: True if the number of stages per rank can be chosen, and is at least 2. False if
            each rank has exactly one stage.
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


def _zero_bubble_bubble(pp: int, stages: int, busy: float, forward: float, weights: float) -> float:
    # Weight gradients are computed while a rank would wait, so the wait is shorter than with 1F1B.
    return (pp - 1) * max(0.0, busy - 2 * weights)


def _dualpipe_bubble(pp: int, stages: int, busy: float, forward: float, weights: float) -> float:
    # Microbatches enter at both ends of the pipeline. A rank computes weight gradients while it
    # would wait.
    both = busy + (busy - forward) - 3 * weights
    return max(0.0, pp / 2 - 1) * max(0.0, both)


def _dualpipe_violations(pp: int, microbatches: int) -> Iterator[Violation]:
    if pp % 2 or microbatches % 2:
        reason = f"pp={pp} and microbatches={microbatches} are not both even, as microbatches "
        reason += "enter a DualPipe schedule from both ends"
        yield broken("dualpipe", reason, {"pp": pp, "microbatches": microbatches})


# Dictionary from the name of each schedule to its formulas. The first schedule is the default.
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
        bubble=_zero_bubble_bubble,
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
