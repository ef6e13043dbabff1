"""Which degrees a run may have: the rules of `ParallelDims.check`, asked early and cheaply."""

from collections.abc import Iterator
from dataclasses import replace

from .._dims import ParallelDims
from .._errors import Violation, divisors
from .._model import read_numbers
from .._rules import Subject, check_rules
from ._point import Point
from ._result import Rejection
from ._shape import ModelShape
from ._train import TrainSpec

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Legality:
    """The rules for one model and one run, and the points of a world that keep them.

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
        self.rejected: list[Rejection] = []

    def violations(self, dims: ParallelDims, point: Point) -> tuple[Violation, ...]:
        """Return the errors of a configuration, whose point is given too."""
        train = self._train
        report = dims.check(
            self._model.to_config(), train.seq_len, train.global_batch, causal_balance=True
        )
        return (*report.errors, *self._own(point))

    def _asked(self, point: Point) -> tuple[Violation, ...]:
        """Return the errors that the model and the run see in degrees."""
        report = check_rules(replace(self._subject, degrees=point._asdict()))
        return (*report.errors, *self._own(point))

    def points(self, world: int) -> Iterator[Point]:
        """Yield every legal point of a world; what is rejected on the way goes to ``rejected``.

        Experts are folded only where they can be, as degrees multiply to the world only.
        """
        choices = divisors(world) if self._model.experts else ()
        experts = [ep for ep in choices if self._keeps(Point(ep=ep), "ep")]
        for tp in divisors(world):
            if not self._keeps(Point(tp=tp), "tp"):
                continue
            for cp in divisors(world // tp):
                if not self._keeps(Point(tp=tp, cp=cp), "tp", "cp"):
                    continue
                for pp in divisors(world // (tp * cp)):
                    dense = Point(tp=tp, cp=cp, pp=pp)
                    if self._keeps(dense, "tp", "cp", "pp"):
                        yield from self._replicas(dense, world, experts)

    def _replicas(self, dense: Point, world: int, experts: list[int]) -> Iterator[Point]:
        dp = world // (dense.tp * dense.cp * dense.pp)
        for shard in divisors(dp):
            point = dense._replace(dp_shard=shard, dp_replicate=dp // shard)
            if not self._keeps(point, *DENSE_AXES):
                continue
            yield point
            if self._model.experts:
                yield from self._folded(point, experts)

    def _folded(self, point: Point, experts: list[int]) -> Iterator[Point]:
        block = point.dp_shard * point.cp * point.tp
        for etp in sorted({1, point.tp}):
            for ep in experts:
                if ep * etp > 1 and block % (ep * etp) == 0:
                    folded = point._replace(ep=ep, etp=etp)
                    if self._keeps(folded, *DENSE_AXES, "ep", "etp"):
                        yield folded

    def _keeps(self, point: Point, *axes: str) -> bool:
        violations = self._asked(point)
        if violations:
            degrees = {axis: getattr(point, axis) for axis in axes}
            self.rejected.append(Rejection(degrees=degrees, violations=violations))
        return not violations

    def _own(self, point: Point) -> Iterator[Violation]:
        """Yield what the estimates need beyond the rules of a mesh."""
        stages, layers = self._train.virtual_stages, self._model.layers
        if point.pp > 1 and stages > 1 and point.pp * stages > layers + 2:
            # The embedding and the output matrix may be stages of their own.
            yield Violation(
                rule="virtual-stages",
                values={"pp": point.pp, "virtual_stages": stages, "layers": layers},
                reason=f"pp*virtual_stages={point.pp}*{stages} is more than layers={layers} "
                "and both ends",
                legal={"pp": tuple(n for n in divisors(layers) if n * stages <= layers + 2)},
            )
        shared = self._model.shared_ffn
        if shared % point.tp:
            yield Violation(
                rule="shared-ffn-tp",
                values={"tp": point.tp, "shared_ffn": shared},
                reason=f"tp={point.tp} does not divide shared_ffn={shared}",
                legal={"tp": divisors(shared)},
            )


def batch_violations(point: Point, train: TrainSpec, micro_batch: int) -> Iterator[Violation]:
    """Yield what is wrong with sequences per microbatch."""
    local = train.global_batch // point.dp
    if local % micro_batch:
        yield Violation(
            rule="micro-batch",
            values={"micro_batch": micro_batch, "global_batch": train.global_batch, "dp": point.dp},
            reason=f"micro_batch={micro_batch} does not divide the {local} sequences of each "
            "data-parallel rank",
            legal={"micro_batch": divisors(local)},
        )
    elif train.virtual_stages > 1 and local // micro_batch % point.pp:
        yield Violation(
            rule="interleaved",
            values={"pp": point.pp, "microbatches": local // micro_batch},
            reason=f"pp={point.pp} does not divide microbatches={local // micro_batch}, as an "
            "interleaved schedule needs",
            legal={"pp": divisors(local // micro_batch)},
        )
