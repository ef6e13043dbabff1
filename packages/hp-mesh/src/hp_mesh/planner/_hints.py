"""Options that a run leaves at their default and that would make its best plan faster."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from ._result import Plan, degrees_of
from ._search import Search, plan
from ._train import ANY, TrainSpec

# Smallest gain that is worth a hint, as a share of the step time.
GAIN = 0.01
MOST = 3
LIKELY = 100  # number of configurations of each class that are tried with each option
# Options that change neither hardware nor numerics, with the value to try. "any" tries all values
# in one search. The default of the other options is never slower than their other values, or
# already lets the planner choose.
TRIED: Mapping[str, Any] = {
    "fused_loss": True,
    "schedule": ANY,
    "zero": ANY,
    "context": "all-gather",
    "dispatch": "copies",
}
DEFAULTS = {option.name: option.default for option in fields(TrainSpec)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """One option of a run, with a value that makes the best plan faster.

    Args:
        field: Name of a field of `TrainSpec`.
        value: Value for this field.
        step_seconds: Estimated seconds of one step of the best plan with this value.

    Examples:
        >>> print(Hint(field="fused_loss", value=True, step_seconds=1.5))
        fused_loss=True: 1.500 s per step
    """

    field: str
    value: object
    step_seconds: float

    def __str__(self) -> str:
        return f"{self.field}={self.value!r}: {self.step_seconds:.3f} s per step"


def hints(plan: Plan) -> tuple[Hint, ...]:
    """Find the options of a run that would make its best plan fastest.

    Tries every option that the run leaves at its default, one at a time. Options that need other
    hardware or change numerics are not tried. Each hint costs one more search, so `plan` does not
    compute hints itself.

    Args:
        plan: Result of `hp_mesh.planner.plan`.

    Returns:
        At most three hints, the fastest first. With each of them, the best plan takes at least 1 %
        less time, or fits although nothing fits without it.

    Examples:
        >>> from hp_mesh.planner import MODELS
        >>> train = TrainSpec(seq_len=8192, global_batch=512)
        >>> found = plan(MODELS["llama3-70b"], Cluster(world_size=16, accelerator="H100"), train)
        >>> [hint.field for hint in hints(found)]
        ['zero', 'fused_loss']
    """
    best = plan.best if plan.fitting else None
    most = best.time.total * (1 - GAIN) if best else float("inf")
    found = (hint for hint in _promising(plan) if hint.step_seconds <= most)
    promising = sorted(found, key=lambda hint: hint.step_seconds)[:MOST]
    exact = (hint for hint in map(partial(_planned, plan), promising) if hint.step_seconds <= most)
    return tuple(sorted(exact, key=lambda hint: hint.step_seconds))


def _promising(given: Plan) -> Iterator[Hint]:
    """Yield each option with the step time of the best likely configuration that fits with it.

    Likely configurations are the first `LIKELY` of each class of the plan: fits, borderline and too
    large.
    """
    classes = given.fits, given.borderline, given.too_large
    likely = [degrees_of(one.dims) for candidates in classes for one in candidates[:LIKELY]]
    for name, value in TRIED.items():
        if getattr(given.train, name) == DEFAULTS[name] and not _idle(given, name):
            train = replace(given.train, **{name: value})
            search = Search(given.model, given.cluster, train, given.calibration)
            found = (search.best(degrees, degrees.layout)[0] for degrees in likely)
            fits = [one for one in found if one and one.fit == 0]
            if fits:
                best = min(fits, key=lambda one: one.cost)
                chosen = getattr(best.point.setting, name) if value == ANY else value
                yield Hint(field=name, value=chosen, step_seconds=best.cost)


def _planned(given: Plan, hint: Hint) -> Hint:
    """Return a hint with the step time of the best of all configurations."""
    changes: dict[str, Any] = {hint.field: hint.value}
    train = replace(given.train, **changes)
    options: dict[str, Any] = {"fix": given.fix, "calibration": given.calibration}
    found = plan(given.model, given.cluster, train, **options)
    return replace(hint, step_seconds=found.best.time.total if found.best else float("inf"))


def _idle(given: Plan, name: str) -> bool:
    """Return whether an option has no effect on any configuration of the run."""
    axis = {"schedule": "pp", "context": "cp", "dispatch": "ep"}.get(name)
    if name == "dispatch" and not given.model.experts:
        return True
    return axis is not None and given.fix.get(axis) == 1
