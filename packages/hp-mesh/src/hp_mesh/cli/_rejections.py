"""What a plan rejected, by rule."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .._errors import Violation
from ..planner import Rejection


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionGroup:
    """One rule, how many rejections it is a reason of, and the first of them."""

    rule: str
    count: int
    example: Rejection

    @property
    def violation(self) -> Violation:
        """Return what the rule said of the example."""
        return next(v for v in self.example.violations if v.rule == self.rule)


def group_rejections(rejected: Iterable[Rejection]) -> tuple[RejectionGroup, ...]:
    """Return the rules that rejected something, the most frequent first.

    A rejection that breaks several rules counts for each of them.
    """
    counts: Counter[str] = Counter()
    examples: dict[str, Rejection] = {}
    for rejection in rejected:
        for rule in {violation.rule: None for violation in rejection.violations}:
            counts[rule] += 1
            examples.setdefault(rule, rejection)
    return tuple(
        RejectionGroup(rule=rule, count=count, example=examples[rule])
        for rule, count in counts.most_common()
    )
