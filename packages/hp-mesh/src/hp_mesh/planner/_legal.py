"""The legal degrees of a run, by the rules of `ParallelDims.check`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

from .._degrees import BASE_AXES, infer_degrees
from .._dims import ParallelDims
from .._errors import (
    Violation,
    as_integer,
    divisors,
    integer_violations,
    join_words,
    number_violation,
    raise_errors,
    show,
)
from .._model import read_numbers
from .._rules import RULES, Rule, Subject, degree_violations, judge, names_of
from ._result import Degrees, Rejection, Setting
from ._schedules import ADJUSTABLE, DEFAULT, SCHEDULES, ScheduleName
from ._shape import ModelShape
from ._train import ANY, TrainSpec, Zero

AXES = (*BASE_AXES, "ep", "etp")


class Legality:
    """The rules of `ParallelDims.check` for one model and one run.

    `legal` chooses degrees axis by axis. If the degrees chosen so far break a rule, no choice of
    the others can repair that, so one rejection covers all of them.
    """

    def __init__(
        self, model: ModelShape, train: TrainSpec, fix: Mapping[str, int] | None = None
    ) -> None:
        self._model, self._train, self._fix = model, train, fix or {}
        numbers, _ = read_numbers(model.to_config(), train.seq_len, train.global_batch)
        self._subject = Subject(degrees={}, numbers=numbers, causal_balance=True)
        # Each rule with the positions in `Degrees` of the degrees that it reads.
        self._rules = [
            (rule, [*map(Degrees._fields.index, names_of(rule.degrees, self._subject))])
            for rule in RULES
        ]
        self._of_experts = [one for one in self._rules if {"ep", "etp"} & {*one[0].degrees}]
        self._found: dict[tuple[object, ...], list[Violation]] = {}
        self.rejected: list[Rejection] = []

    def violations(self, dims: ParallelDims, degrees: Degrees) -> tuple[Violation, ...]:
        """Return the errors of one configuration."""
        train = self._train
        report = dims.check(
            self._model.to_config(), train.seq_len, train.global_batch, causal_balance=True
        )
        return (*report.errors, *self._own(degrees))

    def _errors(
        self, rules: Sequence[tuple[Rule, Sequence[int]]], degrees: Degrees
    ) -> list[Violation]:
        """Return the errors of some rules. The result of a rule is cached by the degrees it reads.

        `ModelShape` has the fields of all rules, so no rule is skipped.
        """
        errors: list[Violation] = []
        for rule, positions in rules:
            key = rule.code, *[degrees[position] for position in positions]
            if key not in self._found:
                found = judge(rule, replace(self._subject, degrees=degrees._asdict()))
                self._found[key] = [v for v in found.violations if v.level == "error"]
            errors += self._found[key]
        return errors

    def legal(self, world: int) -> Iterator[Degrees]:
        """Yield all legal degrees of a world. Rejected ones are appended to ``rejected``.

        If ``ep * etp`` does not divide ``dp_shard * cp * tp``, the degrees are skipped, or rejected
        if ``ep`` is fixed.
        """
        choices = self._choices("ep", world) if self._model.experts else ()
        experts = [ep for ep in choices if self._keeps(Degrees(ep=ep), "ep")]
        for tp in self._choices("tp", world):
            if not self._keeps(Degrees(tp=tp), "tp"):
                continue
            for cp in self._choices("cp", world // tp):
                if not self._keeps(Degrees(tp=tp, cp=cp), "tp", "cp"):
                    continue
                for pp in self._choices("pp", world // (tp * cp)):
                    dense = Degrees(tp=tp, cp=cp, pp=pp)
                    if self._keeps(dense, "tp", "cp", "pp"):
                        yield from self._replicas(dense, world, experts)

    def _choices(self, axis: str, ranks: int) -> tuple[int, ...]:
        """Return the degrees to try on an axis that divides a number of ranks."""
        fixed = self._fix.get(axis)
        if fixed is None:
            return divisors(ranks)
        return (fixed,) if ranks % fixed == 0 else ()

    def _replicas(self, dense: Degrees, world: int, experts: list[int]) -> Iterator[Degrees]:
        dp = world // (dense.tp * dense.cp * dense.pp)
        for shard in self._choices("dp_shard", dp):
            degrees = dense._replace(dp_shard=shard, dp_replicate=dp // shard)
            if self._fix.get("dp_replicate", degrees.dp_replicate) != degrees.dp_replicate:
                continue
            if not self._keeps(degrees, *BASE_AXES):
                continue
            if self._fix.get("ep", 1) == self._fix.get("etp", 1) == 1:
                yield degrees
            if self._model.experts:
                yield from self._folded(degrees, experts)

    def _folded(self, degrees: Degrees, experts: list[int]) -> Iterator[Degrees]:
        for etp in sorted({1, degrees.tp}):
            if self._fix.get("etp", etp) != etp:
                continue
            for ep in experts:
                folded = degrees._replace(ep=ep, etp=etp)
                if ep * etp == 1 or not (folded.fills_block or "ep" in self._fix):
                    continue
                errors = self._errors(self._of_experts, folded)
                if not folded.fills_block:
                    errors += degree_violations(Subject(degrees=folded._asdict()))
                if errors:
                    self.reject(folded, AXES, errors)
                else:
                    yield folded

    def _keeps(self, degrees: Degrees, *axes: str) -> bool:
        errors = [*self._errors(self._rules, degrees), *self._own(degrees)]
        if errors:
            self.reject(degrees, axes, errors)
        return not errors

    def reject(self, degrees: Degrees, axes: Sequence[str], errors: Sequence[Violation]) -> None:
        """Record that no configuration with these degrees of ``axes`` is legal."""
        named = {axis: getattr(degrees, axis) for axis in axes}
        self.rejected.append(Rejection(degrees=named, violations=(*errors,)))

    def _own(self, degrees: Degrees) -> Iterator[Violation]:
        """Yield the errors of rules that only estimates have."""
        # An adjustable schedule has at least two stages per rank.
        stages, layers = max(2, self._train.virtual_stages), self._model.layers
        adjustable = self._train.schedule in ADJUSTABLE and degrees.pp > 1
        if adjustable and degrees.pp * stages > layers + 2:
            # The embedding and the output matrix can be separate stages.
            yield Violation(
                rule="virtual-stages",
                values={"pp": degrees.pp, "virtual_stages": stages, "layers": layers},
                reason=f"pp*virtual_stages={degrees.pp}*{stages} is more than layers={layers} "
                "and both ends",
                legal={"pp": tuple(n for n in divisors(layers) if n * stages <= layers + 2)},
            )
        shared = self._model.shared_ffn
        if shared % degrees.tp:
            yield Violation(
                rule="shared-ffn-tp",
                values={"tp": degrees.tp, "shared_ffn": shared},
                reason=f"tp={degrees.tp} does not divide shared_ffn={shared}",
                legal={"tp": divisors(shared)},
            )


def check_fixed(fix: object, model: ModelShape, world: int) -> dict[str, int]:
    """Return the degrees to which a search is restricted.

    Fixing ``etp`` above 1 also fixes ``tp``, to the same degree.

    Raises:
        ParallelDimsError: A name is unknown, or no configuration of the world has these degrees.
    """
    if not isinstance(fix, Mapping):
        raise_errors([number_violation("fix", fix, "a mapping of degrees by name, or None")])
        return {}
    degrees = {name: as_integer(degree) for name, degree in fix.items()}
    raise_errors(_fixed_violations(degrees, model, world))
    if degrees.get("etp", 1) > 1:
        degrees.setdefault("tp", degrees["etp"])
    infer_degrees(degrees, BASE_AXES, world)
    raise_errors(degree_violations(Subject(degrees={**degrees, "world_size": world})))
    return degrees


def _fixed_violations(
    fix: Mapping[object, object], model: ModelShape, world: int
) -> Iterator[Violation]:
    for name, degree in fix.items():
        axis, legal = str(name), divisors(world)
        if name not in AXES:
            yield Violation(
                rule="name",
                values={axis: degree},
                reason=f"no degree {show(name)}; use {join_words(AXES)}",
            )
            continue
        positive = not list(integer_violations({axis: degree}))
        if positive and degree in legal:
            if axis not in BASE_AXES and degree != 1 and not model.experts:
                yield number_violation(axis, degree, "1, or give a model with experts")
            continue
        rule = f"does not divide world_size={world}" if positive else "is not a positive integer"
        yield Violation(
            rule="fixed",
            values={axis: degree, "world_size": world},
            reason=f"{axis}={show(degree)} {rule}",
            legal={axis: legal},
        )


def batch_violations(
    degrees: Degrees, train: TrainSpec, setting: Setting, micro_batch: int
) -> Iterator[Violation]:
    """Yield the errors of a microbatch size, and of the schedule with that many microbatches."""
    local = train.global_batch // degrees.dp
    if local % micro_batch:
        yield Violation(
            rule="micro-batch",
            values={
                "micro_batch": micro_batch,
                "global_batch": train.global_batch,
                "dp": degrees.dp,
            },
            reason=f"micro_batch={micro_batch} does not divide the {local} sequences of each "
            "data-parallel rank",
            legal={"micro_batch": divisors(local)},
        )
        return
    microbatches, pp = local // micro_batch, degrees.pp
    violations = SCHEDULES[setting.schedule].violations
    if violations and pp > 1:
        yield from violations(pp, microbatches)


def settings_of(model: ModelShape, train: TrainSpec, pp: int) -> list[Setting]:
    """Return the settings to try with ``pp`` pipeline ranks."""
    zeros: tuple[Zero, ...] = (None, 1, 2, 3) if train.zero == ANY else (train.zero,)
    schedules = _schedules_of(model, train, pp)
    return [Setting(name, stages, zero) for name, stages in schedules for zero in zeros]


def _schedules_of(
    model: ModelShape, train: TrainSpec, pp: int
) -> Iterator[tuple[ScheduleName, int]]:
    """Yield the schedules to try, with the number of stages per rank."""
    if pp == 1:
        yield DEFAULT, 1
        return
    stages, most = [train.virtual_stages], (model.layers + 2) // pp
    if train.virtual_stages == 1:
        # For each number of layers per stage, try the smallest number of stages that gives it.
        fewest: dict[int, int] = {}
        for n in range(2, most + 1):
            fewest.setdefault(ceil(model.layers / (pp * n)), n)
        stages = [*fewest.values()]
    for name in SCHEDULES if train.schedule == ANY else (train.schedule,):
        if name not in ADJUSTABLE:
            yield name, 1
        else:
            yield from ((name, n) for n in stages if n <= most)
