"""Configurations of a run, and the search for configurations that keep all rules.

A configuration has degrees, a microbatch size, a kind of recomputation, a pipeline schedule and a
ZeRO stage. It is legal if it keeps the rules of `ParallelDims.check` and a few rules of the
planner.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from operator import itemgetter
from typing import NamedTuple

from .._degrees import BASE_AXES, DEFAULT_ORDER, infer_degrees
from .._dims import ParallelDims
from .._errors import (
    Violation,
    as_integer,
    broken,
    divisors,
    integer_violations,
    join_words,
    number_violation,
    raise_errors,
    show,
)
from .._layout import Folds, RankLayout, axis_sizes
from .._model import read_numbers
from .._rules import RULES, Rule, Subject, degree_violations, expand_sharding, judge
from ._schedules import ADJUSTABLE, DEFAULT_SCHEDULE, SCHEDULES, ScheduleName
from ._shape import ModelShape
from ._train import ANY, Recompute, TrainSpec, Zero

AXES = (*BASE_AXES, "ep", "etp")
RULES_OF_EXPERTS = tuple(rule for rule in RULES if {"ep", "etp"} & {*rule.degrees})
# Keys: axes in the order in which `Legality.legal` chooses their degrees. Values: axes with a known
# degree after the choice. `dp_replicate` follows from the world size and the other degrees.
CHOICES = {"tp": ("tp",), "cp": ("tp", "cp"), "pp": ("tp", "cp", "pp"), "dp_shard": BASE_AXES}


class Degrees(NamedTuple):
    """Degrees of one configuration, and the sizes of the axes that follow from them.

    Every degree is a positive integer. Experts use the same ranks as dense layers
    (``ep_mode="folded"``).
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    ulysses_degree: int = 1

    @property
    def ring(self) -> int:
        """Number of context-parallel ranks that exchange keys and values in a ring."""
        return _sizes(self)["cp_outer"]

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, which process different sequences."""
        return _sizes(self)["dp"]

    @property
    def fsdp(self) -> int:
        """Number of ranks over which dense parameters are sharded."""
        return _sizes(self)["fsdp"]

    @property
    def efsdp(self) -> int:
        """Number of ranks over which the parameters of one expert are sharded."""
        return _sizes(self)["efsdp"]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def fills_block(self) -> bool:
        """Whether ``ep * etp`` divides ``dp_shard * cp * tp``."""
        return self.dp_shard * self.cp * self.tp % (self.ep * self.etp) == 0

    def dims(self) -> ParallelDims:
        """Return these degrees as `ParallelDims` with ``ep_mode="folded"``, without Ulysses."""
        degrees = {name: n for name, n in self._asdict().items() if name != "ulysses_degree"}
        return ParallelDims(**degrees, world_size=self.world)

    def layout(self) -> RankLayout:
        """Return the rank layout of these degrees in the default order of axes. Checks no rule."""
        return RankLayout(self._asdict(), Folds(over_tp=self.etp == self.tp > 1), DEFAULT_ORDER)


@lru_cache(maxsize=4096)
def _sizes(degrees: Degrees) -> dict[str, int]:
    """Return the size of every axis and alias, by name."""
    named = degrees._asdict()
    return axis_sizes(Folds(ulysses=True), {**named, "ulysses": named["ulysses_degree"]})


def degrees_of(dims: ParallelDims) -> Degrees:
    """Convert resolved `ParallelDims` to `Degrees`.

    With ``ep_mode="peer"``, the returned ``dp_shard`` is multiplied by ``ep``. All groups then have
    the same sizes as with ``ep_mode="folded"``, but other ranks.
    """
    layout = dims.layout()
    own = dims.ep if dims.ep_mode == "peer" else 1
    return Degrees(
        pp=dims.pp,
        dp_replicate=dims.dp_replicate,
        dp_shard=layout.size("dp_shard") * own,
        cp=dims.cp,
        tp=dims.tp,
        ep=dims.ep,
        etp=dims.etp,
        ulysses_degree=dims.ulysses_degree or 1,
    )


class Setting(NamedTuple):
    """Pipeline schedule and ZeRO stage of a candidate.

    Attributes:
        schedule: Pipeline schedule.
        virtual_stages: Number of stages of each pipeline rank.
        zero: ZeRO stage from 0 to 3, or None for FSDP. See ``zero`` of `TrainSpec`.

    Examples:
        >>> cluster = Cluster(world_size=8, accelerator="H100")
        >>> train = TrainSpec(seq_len=4096, global_batch=64)
        >>> plan(MODELS["llama3-8b"], cluster, train).best.setting
        Setting(schedule='1f1b', virtual_stages=1, zero=None)
    """

    schedule: ScheduleName
    virtual_stages: int
    zero: Zero


USUAL_SETTING = Setting(DEFAULT_SCHEDULE, 1, None)


class Point(NamedTuple):
    """One configuration of a run, with resolved degrees.

    Attributes:
        degrees: Degrees.
        micro_batch: Number of sequences per microbatch on each data-parallel rank.
        recompute: Kind of recomputation, as in `TrainSpec`.
        setting: Pipeline schedule and ZeRO stage.
        microbatches: Number of microbatches per step.
    """

    degrees: Degrees
    micro_batch: int
    recompute: Recompute
    setting: Setting
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Degrees with which no configuration is valid, and the rules that they break.

    If the broken rules read only some axes, ``degrees`` has only these axes. The rejection then
    covers every configuration with these degrees.

    Args:
        degrees: Rejected degrees, by axis name.
        violations: Broken rules.

    Examples:
        >>> cluster = Cluster(world_size=64, accelerator="H100")
        >>> found = plan(MODELS["llama3-8b"], cluster, TrainSpec(seq_len=4096, global_batch=64))
        >>> found.rejected[0].violations[0].level
        'error'
    """

    degrees: Mapping[str, int] = field(hash=False)
    violations: tuple[Violation, ...]

    def __str__(self) -> str:
        degrees = " ".join(f"{name}={degree}" for name, degree in self.degrees.items())
        return f"{degrees}: {'; '.join(map(str, self.violations))}"


class Legality:
    """Finds the degrees that keep all rules, for one model and one run.

    The rules are those of `ParallelDims.check`, and two more rules of the planner. Degrees are
    chosen axis by axis. If the degrees chosen so far break a rule, no choice for the remaining axes
    can repair it. One `Rejection` then covers all of these choices.

    Args:
        model: Shape of the model.
        train: Training run.
        fix: Degrees that every configuration must have, by axis name.
    """

    def __init__(
        self, model: ModelShape, train: TrainSpec, fix: Mapping[str, int] | None = None
    ) -> None:
        self._model, self._train, self._fix = model, train, fix or {}
        numbers, _ = read_numbers(model.to_config(), train.seq_len, train.global_batch)
        self._subject = Subject(degrees={}, numbers=numbers, causal_balance=True)
        # By the code of a rule: a function that returns the degrees which the rule reads.
        self._read = {
            rule.code: itemgetter(
                *map(Degrees._fields.index, expand_sharding(rule.degrees, self._subject))
            )
            for rule in RULES
        }
        self._judged: dict[tuple[str, object], list[Violation]] = {}
        self.rejected: list[Rejection] = []

    def violations(self, dims: ParallelDims, degrees: Degrees) -> tuple[Violation, ...]:
        """Return the rules that a configuration breaks. Advice is left out.

        ``dims`` and ``degrees`` are the same configuration: ``degrees`` is ``degrees_of(dims)``.
        """
        train = self._train
        report = dims.check(
            self._model.to_config(), train.seq_len, train.global_batch, causal_balance=True
        )
        return (*report.errors, *self._estimate_violations(degrees))

    def legal(self, world: int) -> Iterator[Degrees]:
        """Yield all legal degrees for a world size. Append the others to ``rejected``.

        If ``ep * etp`` does not divide ``dp_shard * cp * tp``, degrees are rejected only if ``ep``
        is fixed. Otherwise they are skipped, and not listed in ``rejected``.
        """
        choices = self._choices("ep", world) if self._model.experts else ()
        experts = [ep for ep in choices if self._keeps(Degrees(ep=ep), ("ep",))]
        dense: Iterable[Degrees] = (Degrees(),)
        for axis in CHOICES:
            dense = self._choose(axis, dense, world)
        for degrees in dense:
            if self._fix.get("ep", 1) == self._fix.get("etp", 1) == 1:
                yield degrees
            if self._model.experts:
                yield from self._with_experts(degrees, experts)

    def _choose(self, axis: str, chosen: Iterable[Degrees], world: int) -> Iterator[Degrees]:
        """Extend each of the chosen degrees by every legal degree of one more axis."""
        for degrees in chosen:
            for degree in self._choices(axis, world // degrees.world):
                more = degrees._replace(**{axis: degree})
                if axis == "dp_shard":
                    more = more._replace(dp_replicate=world // more.world)
                    if self._fix.get("dp_replicate", more.dp_replicate) != more.dp_replicate:
                        continue
                if self._keeps(more, CHOICES[axis]):
                    yield more

    def _choices(self, axis: str, ranks: int) -> tuple[int, ...]:
        """Return the degrees to try for an axis: the fixed degree, or all divisors of ``ranks``.

        Returns an empty tuple if the fixed degree does not divide ``ranks``.
        """
        fixed = self._fix.get(axis)
        if fixed is None:
            return divisors(ranks)
        return (fixed,) if ranks % fixed == 0 else ()

    def _with_experts(self, dense: Degrees, experts: Sequence[int]) -> Iterator[Degrees]:
        """Extend dense degrees by every legal ``ep`` and ``etp`` with ``ep * etp > 1``.

        ``experts`` has the values of ``ep`` to try.
        """
        for etp in sorted({1, dense.tp}):
            if self._fix.get("etp", etp) != etp:
                continue
            for ep in experts:
                degrees = dense._replace(ep=ep, etp=etp)
                if ep * etp == 1 or not (degrees.fills_block or "ep" in self._fix):
                    continue
                errors = self._errors(degrees, RULES_OF_EXPERTS)
                if not degrees.fills_block:
                    errors += degree_violations(Subject(degrees=degrees._asdict()))
                if errors:
                    self.reject(degrees, AXES, errors)
                else:
                    yield degrees

    def _keeps(self, degrees: Degrees, axes: Sequence[str]) -> bool:
        errors = [*self._errors(degrees, RULES), *self._estimate_violations(degrees)]
        if errors:
            self.reject(degrees, axes, errors)
        return not errors

    def reject(self, degrees: Degrees, axes: Sequence[str], errors: Sequence[Violation]) -> None:
        """Append a rejection to ``rejected``, with the degrees of ``axes`` only."""
        named = {axis: getattr(degrees, axis) for axis in axes}
        self.rejected.append(Rejection(degrees=named, violations=(*errors,)))

    def _errors(self, degrees: Degrees, rules: Sequence[Rule]) -> list[Violation]:
        """Return the violations of some rules. Advice is left out.

        The result of each rule is memoized by the degrees that the rule reads. No rule is skipped
        for a missing field, because `ModelShape` has the fields of all rules.
        """
        errors: list[Violation] = []
        for rule in rules:
            key = rule.code, self._read[rule.code](degrees)
            if key not in self._judged:
                found = judge(rule, replace(self._subject, degrees=degrees._asdict()))
                self._judged[key] = [v for v in found.violations if v.level == "error"]
            errors += self._judged[key]
        return errors

    def _estimate_violations(self, degrees: Degrees) -> Iterator[Violation]:
        """Yield violations of the two rules that only the planner has."""
        # With an adjustable schedule, each rank has at least two stages.
        stages, layers = max(2, self._train.virtual_stages), self._model.layers
        adjustable = self._train.schedule in ADJUSTABLE and degrees.pp > 1
        # The embedding and the output matrix can be two more stages, without layers.
        if adjustable and degrees.pp * stages > layers + 2:
            reason = f"pp*virtual_stages={degrees.pp}*{stages} is more than layers={layers} "
            reason += "and both ends"
            values = {"pp": degrees.pp, "virtual_stages": stages, "layers": layers}
            legal = tuple(n for n in divisors(layers) if n * stages <= layers + 2)
            yield broken("virtual-stages", reason, values, {"pp": legal})
        tp, shared = degrees.tp, self._model.shared_ffn
        if shared % tp:
            reason = f"tp={tp} does not divide shared_ffn={shared}"
            values = {"tp": tp, "shared_ffn": shared}
            yield broken("shared-ffn-tp", reason, values, {"tp": divisors(shared)})


def check_fixed(fix: object, model: ModelShape, world: int) -> dict[str, int]:
    """Check the argument ``fix`` of `plan`, and return it with integers as values.

    If ``etp`` is fixed to more than 1, ``tp`` is fixed to the same degree.

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
            reason = f"no degree {show(name)}; use {join_words(AXES)}"
            yield broken("name", reason, {axis: degree})
            continue
        positive = not list(integer_violations({axis: degree}))
        if not positive or degree not in legal:
            wrong = (
                f"does not divide world_size={world}" if positive else "is not a positive integer"
            )
            values = {axis: degree, "world_size": world}
            yield broken("fixed", f"{axis}={show(degree)} {wrong}", values, {axis: legal})
        elif axis not in BASE_AXES and degree != 1 and not model.experts:
            yield number_violation(axis, degree, "1, or give a model with experts")


def batch_violations(
    degrees: Degrees, train: TrainSpec, setting: Setting, micro_batch: int
) -> Iterator[Violation]:
    """Yield a violation if a microbatch size is illegal for the batch or for the schedule."""
    dp, violations = degrees.dp, SCHEDULES[setting.schedule].violations
    local = train.global_batch // dp
    if local % micro_batch:
        reason = f"micro_batch={micro_batch} does not divide the {local} sequences of each "
        reason += "data-parallel rank"
        values = {"micro_batch": micro_batch, "global_batch": train.global_batch, "dp": dp}
        yield broken("micro-batch", reason, values, {"micro_batch": divisors(local)})
    elif violations and degrees.pp > 1:
        yield from violations(degrees.pp, local // micro_batch)


def settings_of(model: ModelShape, train: TrainSpec, pp: int) -> list[Setting]:
    """Return the schedules, virtual stages and ZeRO stages to try with ``pp`` pipeline ranks."""
    zeros: tuple[Zero, ...] = (None, 1, 2, 3) if train.zero == ANY else (train.zero,)
    if pp == 1:
        return [Setting(DEFAULT_SCHEDULE, 1, zero) for zero in zeros]
    adjusted = _virtual_stages(model, train, pp)
    return [
        Setting(name, stages, zero)
        for name in (SCHEDULES if train.schedule == ANY else (train.schedule,))
        for stages in (adjusted if name in ADJUSTABLE else [1])
        for zero in zeros
    ]


def _virtual_stages(model: ModelShape, train: TrainSpec, pp: int) -> list[int]:
    """Return the numbers of stages per pipeline rank to try with an adjustable schedule."""
    given, most = train.virtual_stages, (model.layers + 2) // pp
    if given > 1:
        return [given] if given <= most else []
    # Several numbers of stages can give the same number of layers per stage. Try only the smallest.
    fewest: dict[int, int] = {}
    for stages in range(2, most + 1):
        fewest.setdefault(ceil(model.layers / (pp * stages)), stages)
    return [*fewest.values()]
