"""Which degrees a run may have: the rules of `ParallelDims.check`, asked early and cheaply."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from .._dims import ParallelDims
from .._errors import Violation, divisors
from .._model import read_numbers
from .._rules import RULES, Rule, Subject, judge, names_of
from ._model import ModelShape
from ._result import Degrees, Rejection, Setting
from ._train import Schedule, TrainSpec, Zero

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Legality:
    """The rules for one model and one run, and the degrees of a world that keep them.

    Degrees are chosen axis after axis. What the axes so far break, no choice of the others mends:
    one rejection then stands for all of them.
    """

    def __init__(self, model: ModelShape, train: TrainSpec) -> None:
        self._model, self._train = model, train
        numbers, wrong = read_numbers(model.to_config(), train.seq_len, train.global_batch)
        self._subject = Subject(
            degrees={},
            sharding=("dp_shard",),
            numbers=numbers,
            wrong=wrong,
            causal_balance=True,
        )
        self._rules = [(rule, names_of(rule.degrees, self._subject)) for rule in RULES]
        # Those that dense degrees which keep all rules may break when experts are folded into them.
        self._of_experts = [one for one in self._rules if {"ep", "etp"} & {*one[1]}]
        self._found: dict[tuple[object, ...], tuple[Violation, ...]] = {}
        self.rejected: list[Rejection] = []

    def violations(self, dims: ParallelDims, degrees: Degrees) -> tuple[Violation, ...]:
        """Return the errors of a configuration, whose degrees are given too."""
        train = self._train
        report = dims.check(
            self._model.to_config(), train.seq_len, train.global_batch, causal_balance=True
        )
        return (*report.errors, *self._own(degrees))

    def _asked(self, degrees: Degrees) -> tuple[Violation, ...]:
        """Return the errors that the model and the run see in degrees."""
        wrong = self._subject.wrong.values()
        return (*wrong, *self._broken(self._rules, degrees), *self._own(degrees))

    def _broken(
        self, rules: Sequence[tuple[Rule, Sequence[str]]], degrees: Degrees
    ) -> list[Violation]:
        """Return the errors of some rules.

        A rule is asked once for all degrees that are equal in those that it reads.
        """
        errors: list[Violation] = []
        for rule, names in rules:
            key = rule.code, *(getattr(degrees, name) for name in names)
            if key not in self._found:
                found = judge(rule, replace(self._subject, degrees=degrees._asdict()))
                errors_of_it = (v for v in found.violations if v.level == "error")
                self._found[key] = () if found.missing else (*errors_of_it,)
            errors += self._found[key]
        return errors

    def legal(self, world: int) -> Iterator[Degrees]:
        """Yield all legal degrees of a world; what is rejected on the way goes to ``rejected``.

        Experts are folded only where they can be, as degrees multiply to the world only.
        """
        choices = divisors(world) if self._model.experts else ()
        experts = [ep for ep in choices if self._keeps(Degrees(ep=ep), "ep")]
        for tp in divisors(world):
            if not self._keeps(Degrees(tp=tp), "tp"):
                continue
            for cp in divisors(world // tp):
                if not self._keeps(Degrees(tp=tp, cp=cp), "tp", "cp"):
                    continue
                for pp in divisors(world // (tp * cp)):
                    dense = Degrees(tp=tp, cp=cp, pp=pp)
                    if self._keeps(dense, "tp", "cp", "pp"):
                        yield from self._replicas(dense, world, experts)

    def _replicas(self, dense: Degrees, world: int, experts: list[int]) -> Iterator[Degrees]:
        dp = world // (dense.tp * dense.cp * dense.pp)
        for shard in divisors(dp):
            degrees = dense._replace(dp_shard=shard, dp_replicate=dp // shard)
            if not self._keeps(degrees, *DENSE_AXES):
                continue
            yield degrees
            if self._model.experts:
                yield from self._folded(degrees, experts)

    def _folded(self, degrees: Degrees, experts: list[int]) -> Iterator[Degrees]:
        block = degrees.dp_shard * degrees.cp * degrees.tp
        for etp in sorted({1, degrees.tp}):
            for ep in experts:
                if ep * etp > 1 and block % (ep * etp) == 0:
                    folded = degrees._replace(ep=ep, etp=etp)
                    if errors := self._broken(self._of_experts, folded):
                        self._reject(folded, (*DENSE_AXES, "ep", "etp"), errors)
                    else:
                        yield folded

    def _keeps(self, degrees: Degrees, *axes: str) -> bool:
        if errors := self._asked(degrees):
            self._reject(degrees, axes, errors)
        return not errors

    def _reject(self, degrees: Degrees, axes: Sequence[str], errors: Sequence[Violation]) -> None:
        named = {axis: getattr(degrees, axis) for axis in axes}
        self.rejected.append(Rejection(degrees=named, violations=(*errors,)))

    def _own(self, degrees: Degrees) -> Iterator[Violation]:
        """Yield what the estimates need beyond the rules of a mesh."""
        # An interleaved schedule has at least two, also where their number is open.
        stages, layers = max(2, self._train.virtual_stages), self._model.layers
        interleaved = self._train.schedule == "interleaved" and degrees.pp > 1
        if interleaved and degrees.pp * stages > layers + 2:
            # The embedding and the output matrix may be stages of their own.
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


def batch_violations(
    degrees: Degrees, train: TrainSpec, setting: Setting, micro_batch: int
) -> Iterator[Violation]:
    """Yield what is wrong with sequences per microbatch, and with the schedule for so many."""
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
    if setting.virtual_stages > 1 and microbatches % pp:
        yield Violation(
            rule="interleaved",
            values={"pp": pp, "microbatches": microbatches},
            reason=f"pp={pp} does not divide microbatches={microbatches}, as an "
            "interleaved schedule needs",
            legal={"pp": divisors(microbatches)},
        )
    if setting.schedule == "dualpipe" and pp > 1 and (pp % 2 or microbatches % 2):
        yield Violation(
            rule="dualpipe",
            values={"pp": pp, "microbatches": microbatches},
            reason=f"pp={pp} and microbatches={microbatches} are not both even, as microbatches "
            "enter a DualPipe schedule from both ends",
        )


def settings_of(model: ModelShape, train: TrainSpec, pp: int) -> list[Setting]:
    """Return the settings to try at a number of stages, those of the run where it fixes them."""
    schedules: list[tuple[Schedule, int]]
    most = (model.layers + 2) // pp
    stages = [n for n in (train.virtual_stages,) if 1 < n <= most]
    if train.virtual_stages == 1 and pp > 1:
        # Of numbers with equally many layers in each stage the smallest, which fills them best.
        fewest: dict[int, int] = {}
        for n in range(2, most + 1):
            fewest.setdefault(ceil(model.layers / (pp * n)), n)
        stages = [*fewest.values()]
    if train.schedule != "any" and train.schedule != "interleaved":
        schedules = [(train.schedule, 1)]
    elif pp == 1:
        one: tuple[Schedule, int] = ("interleaved", train.virtual_stages)
        schedules = [("1f1b", 1) if train.schedule == "any" else one]
    elif train.schedule == "interleaved":
        schedules = [("interleaved", n) for n in stages or [2]]
    else:
        schedules = [("1f1b", 1), ("zero-bubble", 1), ("dualpipe", 1)]
        schedules += [("interleaved", n) for n in stages]
    zeros: tuple[Zero, ...] = (None, 1, 2, 3) if train.zero == "any" else (train.zero,)
    return [Setting(name, stages, zero) for name, stages in schedules for zero in zeros]
