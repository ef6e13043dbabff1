"""What a plan consists of: configurations with their memory, time and trust, and rejections."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar, overload

from .._degrees import DEFAULT_ORDER
from .._dims import ParallelDims
from .._errors import Violation
from .._layout import RankLayout, ViewConfig
from ._cluster import Cluster
from ._model import ModelShape
from ._train import Recompute, Schedule, TrainSpec, Zero

GIB = 2**30
# How far above the limit an estimate may be and still be worth a try: the estimate's own error.
BORDER = 1.15
TIGHT = 0.95  # of the limit; an estimate above it leaves little room for its own error
CLOSE = 1.01  # times as long counts as equally fast
CLEARLY = 0.05  # of the limit; a smaller saving is not worth any time

PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")

Fit: TypeAlias = Literal["fits", "borderline", "does not fit"]


CLASSES: tuple[Fit, ...] = ("fits", "borderline", "does not fit")


class Degrees(NamedTuple):
    """Resolved degrees; where experts have ranks of their own, ``dp_shard`` has those too."""

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
        """Return over how many ranks keys and values go round: those of cp that keep heads."""
        return self.cp // self.ulysses_degree

    @property
    def dp(self) -> int:
        """Return how many ranks see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Return over how many ranks dense parameters are sharded."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Return over how many ranks the parameters of experts are sharded."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    def dims(self) -> ParallelDims:
        """Return the degrees as a plan has them: folded and without Ulysses."""
        degrees = {name: n for name, n in self._asdict().items() if name != "ulysses_degree"}
        return ParallelDims(**degrees, world_size=self.world)

    def layout(self) -> RankLayout:
        """Return the layout of `dims`, without asking the rules again."""
        return RankLayout(ViewConfig(degrees=self._asdict()), DEFAULT_ORDER)


def degrees_of(dims: ParallelDims) -> Degrees:
    """Return the degrees of a resolved configuration.

    Experts on ranks of their own are data-parallel ranks to the dense layers: the sizes of all
    groups are those of folding ``ep`` into more ``dp_shard``, though not their ranks.
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
    """How the states are sharded and the stages scheduled, where a run leaves that open."""

    schedule: Schedule
    virtual_stages: int
    zero: Zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """How far to trust an estimate of time: the published runs that it resembles.

    Attributes:
        resembles: The class of published runs, "" where none resembles the configuration.
        runs: How many there are.
        error: Mean absolute error of the step time of those runs, each estimated with constants
            that were fitted without its source; None where no run resembles the configuration.
        differs: What sets the configuration apart from every published run.
    """

    resembles: str
    runs: int
    error: float | None
    differs: tuple[str, ...] = ()

    def __str__(self) -> str:
        apart = f" ({'; '.join(self.differs)})" if self.differs else ""
        if self.error is None:
            return f"no published run resembles this{apart}"
        runs = f"{self.runs} published run{'s' * (self.runs != 1)}"
        return (
            f"resembles {runs}, {self.resembles}: "
            f"their step time is off by {self.error:.0%} on average{apart}"
        )


USUAL = Setting("1f1b", 1, None)
UNKNOWN = Trust(resembles="", runs=0, error=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """The bytes on the rank that needs most, by what they hold.

    ``activations`` are kept for the backward, with what a layer computes again; ``logits`` are
    those and their gradients; ``buffers`` are gathered parameters, gradients on their way and
    tokens sent to experts.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def parts(self) -> dict[str, float]:
        """Return the bytes of each part."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def states(self) -> float:
        """Return the bytes that stay from step to step: parameters, gradients, optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Return all bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """The seconds of one step; ``communication`` is what computing does not hide, by axis.

    Its keys are ``tp``, ``cp``, ``fsdp``, ``dp_replicate``, ``ep`` and ``pp``, those of size 1 left
    out. ``bubble`` is the time that a pipeline rank waits for others.
    """

    compute: float
    communication: Mapping[str, float] = field(hash=False)
    bubble: float
    optimizer: float

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds of each part, communication by its axes."""
        ends = {"bubble": self.bubble, "optimizer": self.optimizer}
        return {"compute": self.compute, **self.communication, **ends}

    @property
    def total(self) -> float:
        """Return all seconds."""
        return self.compute + sum(self.communication.values()) + self.bubble + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One valid configuration and what it is estimated to need.

    ``limit`` are the bytes that may be used on a device. ``tokens`` are those of one step,
    ``flops`` the model's operations on them (recomputation not counted, causal attention counted
    half), ``peak_tflops`` a device's dense bf16 rate. ``setting`` has the schedule and the
    ZeRO stage, ``trust`` the published runs that resemble the configuration.
    """

    dims: ParallelDims
    micro_batch: int
    microbatches: int
    recompute: Recompute
    memory: MemorySplit
    time: TimeSplit
    limit: float
    tokens: int
    flops: float
    peak_tflops: float
    setting: Setting = USUAL
    trust: Trust = UNKNOWN

    @property
    def schedule(self) -> Schedule:
        """Return the pipeline schedule."""
        return self.setting.schedule

    @property
    def virtual_stages(self) -> int:
        """Return the stages of each pipeline rank."""
        return self.setting.virtual_stages

    @property
    def zero(self) -> Zero:
        """Return the ZeRO stage; None is stage 3 as FSDP trains it."""
        return self.setting.zero

    @property
    def fit(self) -> Fit:
        """Return whether the memory is within the limit, above it by at most 15%, or by more."""
        return classify(self.memory.total, self.limit)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.dims.dp_size * self.dims.non_dp_size

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Return how many tokens one device is estimated to train on in a second."""
        return self.tokens / self.time.total / self.world_size

    @property
    def tflops(self) -> float:
        """Return the model's TFLOP/s on each device."""
        return self.flops / self.time.total / self.world_size / 1e12

    @property
    def mfu(self) -> float:
        """Return `tflops` as a share of the device's dense bf16 rate."""
        return self.tflops / self.peak_tflops

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Return the broken memory limit where the configuration does not fit, else nothing.

        A borderline one carries it as advice.
        """
        if self.fit == "fits":
            return ()
        need, limit = self.memory.total / GIB, self.limit / GIB
        return (
            Violation(
                rule="memory",
                values={"memory_gib": round(need, 1), "limit_gib": round(limit, 1)},
                reason=f"needs {need:.1f} GiB of {limit:.1f} GiB",
                level="advice" if self.fit == "borderline" else "error",
            ),
        )

    def explain(self) -> str:
        """Return memory and time by their parts, and how far to trust them, one line each."""
        zero = "3 (FSDP)" if self.zero is None else self.zero
        lines = [f"{self.dims.summary()}"]
        lines.append(
            f"{self.microbatches} microbatches of {self.micro_batch}, recompute {self.recompute}, "
            f"schedule {self.schedule} with {self.virtual_stages} stages a rank, ZeRO stage {zero}"
        )
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.memory.parts.items())
        total, limit = self.memory.total / GIB, self.limit / GIB
        lines.append(f"memory {total:.1f} of {limit:.1f} GiB ({self.fit}): {parts}")
        parts = ", ".join(f"{name} {part:.3f}" for name, part in self.time.parts.items())
        lines.append(f"time {self.time.total:.3f} s: {parts}")
        lines.append(f"trust: {self.trust}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return (
            f"{self.dims.summary()} micro_batch={self.micro_batch} "
            f"microbatches={self.microbatches} recompute={self.recompute}: "
            f"{self.memory.total / GIB:.1f} GiB ({self.fit}), {self.time.total:.3f} s per step, "
            f"{self.tokens_per_second_per_gpu:.0f} tokens/s/GPU, {self.tflops:.0f} TFLOP/s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Degrees that no valid configuration has, and why.

    ``degrees`` names the axes that the rules looked at: where some alone break a rule, one
    rejection stands for all configurations that have them.
    """

    degrees: Mapping[str, int] = field(hash=False)
    violations: tuple[Violation, ...]

    def __str__(self) -> str:
        degrees = " ".join(f"{name}={degree}" for name, degree in self.degrees.items())
        return f"{degrees}: {'; '.join(map(str, self.violations))}"


def classify(need: float, limit: float) -> Fit:
    """Return the class of a need for memory under a limit."""
    if need <= limit:
        return "fits"
    return "borderline" if need <= BORDER * limit else "does not fit"


def _more(own: Mapping[str, float], best: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each part is more than in the best, most first."""
    parts = {name: own.get(name, 0.0) - best.get(name, 0.0) for name in {**own, **best}}
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


Source = TypeVar("Source")


class Ranking(Sequence[Candidate], Generic[Source]):
    """Candidates in a fixed order, of which only those that are looked at take time and space."""

    __slots__ = ("_build", "_sources")

    def __init__(self, sources: Sequence[Source], build: Callable[[Source], Candidate]) -> None:
        self._sources, self._build = sources, build

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> "Ranking[Source]": ...
    def __getitem__(self, index: int | slice) -> "Candidate | Ranking[Source]":
        if isinstance(index, slice):
            return Ranking(self._sources[index], self._build)
        return self._build(self._sources[index])

    def __len__(self) -> int:
        return len(self._sources)

    def __repr__(self) -> str:
        return f"Ranking of {len(self)} candidates"


def fastest_of(fits: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest of those that fit, of which only the first may be out of order."""
    return min(fits[:2], key=lambda one: one.time.total, default=None)


def place_of_best(fits: Sequence[Candidate]) -> int:
    """Return the place of what to run among the candidates that fit, the fastest of them first."""
    fastest = fits[0] if fits else None
    if fastest is None or fastest.memory.total <= TIGHT * fastest.limit:
        return 0
    enough = fastest.memory.total - CLEARLY * fastest.limit
    close = takewhile(lambda one: one.time.total <= CLOSE * fastest.time.total, fits)
    return next((place for place, one in enumerate(close) if one.memory.total <= enough), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One configuration against the best of its run.

    Attributes:
        own: The configuration.
        best: The first of the plan.
    """

    own: Candidate
    best: Candidate

    @property
    def slowdown(self) -> float:
        """Return the step time over that of the best."""
        return self.own.time.total / self.best.time.total

    @property
    def time(self) -> Mapping[str, float]:
        """Return the seconds that every part of a step takes more than in the best, most first."""
        return _more(self.own.time.parts, self.best.time.parts)

    @property
    def memory(self) -> Mapping[str, float]:
        """Return the bytes that every part needs more than in the best, most first."""
        return _more(self.own.memory.parts, self.best.memory.parts)

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Return why the configuration does not fit, else nothing."""
        return self.own.violations

    def __str__(self) -> str:
        lines = [self.own.explain()]
        lines += [str(violation) for violation in self.violations]
        if self.own == self.best:
            return "\n".join([*lines, "this is the best configuration"])
        parts = [f"{name} {part:+.3f} s" for name, part in self.time.items() if part > 0]
        lines.append(f"{self.slowdown:.2f}x the time of the best, {self.best}")
        return "\n".join([*lines, f"more than there: {', '.join(parts) or 'nothing'}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every valid configuration, ranked, and every rejection.

    ``candidates`` starts with the ``best``. Then come the others that fit and the borderline ones,
    both the fastest first; last come those that do not fit, the smallest first. Each is built when
    it is looked at.
    """

    model: ModelShape
    cluster: Cluster
    train: TrainSpec
    candidates: Sequence[Candidate] = field(repr=False)
    rejected: Sequence[Rejection] = field(repr=False)
    fitting: int
    bordering: int

    @property
    def fits(self) -> Sequence[Candidate]:
        """Return the candidates whose memory is within the limit."""
        return self.candidates[: self.fitting]

    @property
    def borderline(self) -> Sequence[Candidate]:
        """Return the candidates whose memory is above the limit by at most 15%."""
        return self.candidates[self.fitting : self.fitting + self.bordering]

    @property
    def too_large(self) -> Sequence[Candidate]:
        """Return the candidates that need more."""
        return self.candidates[self.fitting + self.bordering :]

    @property
    def best(self) -> Candidate | None:
        """Return the first candidate: what to run, or the nearest miss where nothing fits.

        It is the fastest that fits, unless that needs more than 95% of the memory limit and another
        that needs less by at least 5% of it is slower by at most 1%: then the fastest of those.
        """
        return self.candidates[0] if self.candidates else None

    @property
    def fastest(self) -> Candidate | None:
        """Return the fastest candidate of the first class: the best, or what that was taken for."""
        return fastest_of(self.fits) or self.best

    @property
    def considered(self) -> int:
        """Return how many configurations were looked at: candidates and rejections."""
        return len(self.candidates) + len(self.rejected)

    def compare(self, own: Candidate) -> "Comparison":
        """Return what a configuration of this run lacks to the best one."""
        return Comparison(own=own, best=self.best or own)

    def __str__(self) -> str:
        counts = (
            f"{self.considered} considered: {self.fitting} fit, {self.bordering} borderline, "
            f"{len(self.too_large)} do not fit, {len(self.rejected)} rejected"
        )
        best = self.best
        if best is None:
            return f"no valid configuration; {counts}"
        if self.fitting:
            return f"best: {best}; {counts}"
        limit = best.limit / GIB
        return f"nothing fits in {limit:.1f} GiB, the nearest is {best}; {counts}"
