"""Configurations of a training run, and the search for legal configurations.

A configuration has degrees, a microbatch size, a kind of recomputation, a pipeline schedule and a
ZeRO stage. A configuration is legal if it breaks no rule. The rules are in three places:

- `ParallelDims.check`,
- the class `Legality`, with the rules ``virtual-stages`` and ``shared-ffn-tp``,
- the function `batch_violations`, with the rules for microbatches.
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
    plural,
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
    """Degrees of one configuration, and axis sizes that are computed from the degrees.

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
        """Convert to `ParallelDims` with ``ep_mode="folded"``. Leaves out ``ulysses_degree``."""
        degrees = {name: n for name, n in self._asdict().items() if name != "ulysses_degree"}
        return ParallelDims(**degrees, world_size=self.world)

    def layout(self) -> RankLayout:
        """Return the `RankLayout` for the default order of axes. The degrees may break rules."""
        return RankLayout(self._asdict(), Folds(over_tp=self.etp == self.tp > 1), DEFAULT_ORDER)


@lru_cache(maxsize=4096)
def _sizes(degrees: Degrees) -> dict[str, int]:
    """Return the number of ranks along every mesh axis.

    The keys are the axis names and their aliases, such as ``"fsdp"`` and ``"dp"``.
    """
    named = degrees._asdict()
    return axis_sizes(Folds(ulysses=True), {**named, "ulysses": named["ulysses_degree"]})


def degrees_of(dims: ParallelDims) -> Degrees:
    """Convert resolved `ParallelDims` to `Degrees`.

    With ``ep_mode="peer"``, `Degrees.dp_shard` is ``dims.dp_shard * dims.ep``. With this value, the
    number of ranks of every group, such as ``fsdp`` or ``ep``, is the same in `Degrees` and in
    ``dims``. But `Degrees.layout` assumes ``ep_mode="folded"``, so it assigns other ranks to the
    groups. Only ``dims.layout()`` returns the ranks of the groups for ``ep_mode="peer"``.
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
        schedule: Name of the pipeline schedule, such as ``"1f1b"``. `TrainSpec` lists the names.
        virtual_stages: Number of pipeline stages on each pipeline rank.
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
        degrees: Degrees of all axes.
        micro_batch: Number of sequences per microbatch on each data-parallel rank.
        recompute: Kind of recomputation, as in `TrainSpec`.
        setting: Pipeline schedule and ZeRO stage.
        microbatches: Number of microbatches of each data-parallel rank in one step.
    """

    degrees: Degrees
    micro_batch: int
    recompute: Recompute
    setting: Setting
    microbatches: int

    def tokens(self, seq_len: int) -> float:
        """Return the number of tokens of one microbatch on one rank of ``cp``."""
        return self.micro_batch * seq_len / self.degrees.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Degrees that break at least one rule, and the violations.

    ``degrees`` may lack some axes. For example, if ``degrees`` is ``{"tp": 8, "cp": 3}``, every
    configuration with ``tp=8`` and ``cp=3`` is rejected, for any degrees of the other axes.

    Args:
        degrees: Rejected degrees. A key is an axis name, such as ``"tp"``.
        violations: One `Violation` for each broken rule.

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
    """Finds the legal degrees for one model and one training run.

    Degrees are legal if they break no rule of `ParallelDims.check` and neither of two rules of the
    planner:

    - ``virtual-stages``: with ``schedule="interleaved"``, the model must have enough layers for all
      pipeline stages.
    - ``shared-ffn-tp``: ``tp`` must divide the width of the shared feed-forward part.

    The search chooses the degree of one axis after another. If the degrees of the first axes break
    a rule, the search does not try degrees of the remaining axes. It adds one `Rejection` with the
    degrees of the first axes.

    Args:
        model: Shape of the model.
        train: Settings of the training run.
        fix: Degrees that every configuration must have. A key is an axis name. If None, no degree
            is fixed.

    Attributes:
        rejected: One `Rejection` for each set of degrees that the search rejected.
    """

    def __init__(
        self, model: ModelShape, train: TrainSpec, fix: Mapping[str, int] | None = None
    ) -> None:
        self._model, self._train, self._fix = model, train, fix or {}
        numbers, _ = read_numbers(model.to_config(), train.seq_len, train.global_batch)
        self._subject = Subject(degrees={}, numbers=numbers, causal_balance=True)
        # Keys: codes of rules. Values: functions that return the degrees that the rule reads.
        self._read = {
            rule.code: itemgetter(
                *map(Degrees._fields.index, expand_sharding(rule.degrees, self._subject))
            )
            for rule in RULES
        }
        self._judged: dict[tuple[str, object], list[Violation]] = {}
        self.rejected: list[Rejection] = []

    def violations(self, dims: ParallelDims, degrees: Degrees) -> tuple[Violation, ...]:
        """Return the violations of one configuration that have the level ``"error"``.

        Violations with the level ``"advice"`` are left out, because they do not make a
        configuration illegal. The result is empty if the configuration is legal.

        Args:
            dims: Resolved configuration.
            degrees: Result of ``degrees_of(dims)``.
        """
        train = self._train
        report = dims.check(
            self._model.to_config(), train.seq_len, train.global_batch, causal_balance=True
        )
        return (*report.errors, *self._planner_violations(degrees))

    def legal(self, world: int) -> Iterator[Degrees]:
        """Yield one `Degrees` for each legal set of degrees with ``world`` ranks.

        The method appends illegal degrees to the attribute `rejected`. There is one exception:
        degrees are skipped without a rejection if ``ep`` is not fixed and ``ep * etp`` does not
        divide ``dp_shard * cp * tp``.
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
        """Yield degrees with every legal degree of ``axis``, for each element of ``chosen``.

        Illegal degrees of ``axis`` are appended to `rejected`. In ``chosen``, the degree of
        ``axis`` is 1. If ``axis`` is ``"dp_shard"``, the method also sets ``dp_replicate``, so that
        the configuration has ``world`` ranks. It skips degrees if another ``dp_replicate`` is
        fixed.
        """
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

        Returns an empty tuple if the degree is fixed and does not divide ``ranks``.
        """
        fixed = self._fix.get(axis)
        if fixed is None:
            return divisors(ranks)
        return (fixed,) if ranks % fixed == 0 else ()

    def _with_experts(self, dense: Degrees, experts: Sequence[int]) -> Iterator[Degrees]:
        """Yield ``dense`` with every legal pair of ``ep`` and ``etp``, except ``ep = etp = 1``.

        Tries every ``ep`` in ``experts``. Tries 1 and ``dense.tp`` for ``etp``, or only the value
        to which the user fixed ``etp``. Illegal degrees are appended to `rejected`.
        """
        for etp in sorted({1, dense.tp}):
            if self._fix.get("etp", etp) != etp:
                continue
            for ep in experts:
                degrees = dense._replace(ep=ep, etp=etp)
                if ep * etp == 1 or not (degrees.fills_block or "ep" in self._fix):
                    continue
                errors = self._rule_violations(degrees, RULES_OF_EXPERTS)
                if not degrees.fills_block:
                    errors += degree_violations(Subject(degrees=degrees._asdict()))
                if errors:
                    self.reject(degrees, AXES, errors)
                else:
                    yield degrees

    def _keeps(self, degrees: Degrees, axes: Sequence[str]) -> bool:
        errors = [*self._rule_violations(degrees, RULES), *self._planner_violations(degrees)]
        if errors:
            self.reject(degrees, axes, errors)
        return not errors

    def reject(self, degrees: Degrees, axes: Sequence[str], errors: Sequence[Violation]) -> None:
        """Append a `Rejection` to the attribute `rejected`.

        Args:
            degrees: Rejected degrees.
            axes: Names of the axes that the rejection lists. Other axes are left out, so the
                rejection covers all of their degrees.
            errors: Violations of the degrees.
        """
        named = {axis: getattr(degrees, axis) for axis in axes}
        self.rejected.append(Rejection(degrees=named, violations=(*errors,)))

    def _rule_violations(self, degrees: Degrees, rules: Sequence[Rule]) -> list[Violation]:
        """Return the violations of ``rules`` that have the level ``"error"``.

        Violations with the level ``"advice"`` are left out. Every rule is evaluated, because
        `ModelShape` has all fields that rules read. The violations of a rule are memoized by the
        degrees that the rule reads.
        """
        errors: list[Violation] = []
        for rule in rules:
            key = rule.code, self._read[rule.code](degrees)
            if key not in self._judged:
                found = judge(rule, replace(self._subject, degrees=degrees._asdict()))
                self._judged[key] = [v for v in found.violations if v.level == "error"]
            errors += self._judged[key]
        return errors

    def _planner_violations(self, degrees: Degrees) -> Iterator[Violation]:
        """Yield a violation for each broken rule that `ParallelDims.check` does not have.

        - ``virtual-stages``: with ``schedule="interleaved"``, ``pp * virtual_stages`` must be at
          most the number of layers plus 2. The 2 counts the embedding and the output matrix. If the
          planner chooses ``virtual_stages``, the rule uses its smallest value, 2.
        - ``shared-ffn-tp``: ``tp`` must divide `ModelShape.shared_ffn`.
        """
        # With a schedule in ADJUSTABLE, each rank has at least two stages.
        stages, layers = max(2, self._train.virtual_stages), self._model.layers
        adjustable = self._train.schedule in ADJUSTABLE and degrees.pp > 1
        # The embedding and the output matrix can be two additional stages without layers.
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
    """Check the argument ``fix`` of `plan`, and return the fixed degrees.

    Args:
        fix: Degrees by axis name. A degree may be an integer of another type, such as
            ``numpy.int64``.
        model: Shape of the model.
        world: Number of ranks.

    Returns:
        The fixed degrees as int, by axis name. If ``fix`` has ``etp`` above 1 and no ``tp``, the
        result also has ``tp``, with the value of ``etp``.

    Raises:
        ParallelDimsError: ``fix`` is not a mapping, an axis name is unknown, or no configuration
            with ``world`` ranks can have the fixed degrees.
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
    """Yield at most one violation of the rules for microbatches.

    - ``micro_batch`` must divide the number of sequences of each data-parallel rank in one step.
    - With pipeline stages, the schedule of ``setting`` must allow the number of microbatches. For
      example, ``"interleaved"`` needs a multiple of ``pp``.
    """
    dp, violations = degrees.dp, SCHEDULES[setting.schedule].violations
    local = train.global_batch // dp
    if local % micro_batch:
        reason = f"micro_batch={micro_batch} does not divide the {plural(local, 'sequence')} of "
        reason += "each data-parallel rank"
        values = {"micro_batch": micro_batch, "global_batch": train.global_batch, "dp": dp}
        yield broken("micro-batch", reason, values, {"micro_batch": divisors(local)})
    elif violations and degrees.pp > 1:
        yield from violations(degrees.pp, local // micro_batch)


def settings_of(model: ModelShape, train: TrainSpec, pp: int) -> list[Setting]:
    """Return one `Setting` for each combination that the planner tries with ``pp`` pipeline ranks.

    A combination has a schedule, a number of virtual stages and a ZeRO stage. If ``train`` fixes
    one of the three, all combinations have its value. The result is empty if ``train`` fixes an
    interleaved schedule and the model has too few layers for its stages.
    """
    zeros: tuple[Zero, ...] = (None, 1, 2, 3) if train.zero == ANY else (train.zero,)
    if pp == 1:
        return [Setting(DEFAULT_SCHEDULE, 1, zero) for zero in zeros]
    interleaved = _virtual_stage_counts(model, train, pp)
    return [
        Setting(name, stages, zero)
        for name in (SCHEDULES if train.schedule == ANY else (train.schedule,))
        for stages in (interleaved if name in ADJUSTABLE else [1])
        for zero in zeros
    ]


def _virtual_stage_counts(model: ModelShape, train: TrainSpec, pp: int) -> list[int]:
    """Return the values of `Setting.virtual_stages` to try with an interleaved schedule.

    If ``train.virtual_stages`` is above 1, it is the only value. Otherwise the values are at least
    2. The result is empty if every number of stages is too large: the stages of ``pp`` ranks are
    at most as many as the layers, the embedding and the output matrix.
    """
    fixed, most = train.virtual_stages, (model.layers + 2) // pp
    if fixed > 1:
        return [fixed] if fixed <= most else []
    # Several numbers of stages can give the same number of layers per stage. The smallest of these
    # numbers is enough.
    fewest: dict[int, int] = {}
    for stages in range(2, most + 1):
        fewest.setdefault(ceil(model.layers / (pp * stages)), stages)
    return [*fewest.values()]
