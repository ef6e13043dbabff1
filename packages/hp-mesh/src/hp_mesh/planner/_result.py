"""Parts of a plan: configurations with their memory and time, comparisons and hints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile
from operator import eq
from typing import Any, Literal, TypeAlias, overload

from .._dims import ParallelDims
from .._errors import Level, Violation, broken
from ._calibration import UNKNOWN, Calibration, Trust
from ._cluster import Cluster
from ._configuration import USUAL_SETTING, Rejection, Setting
from ._schedules import ScheduleName
from ._shape import ModelShape
from ._train import Recompute, TrainSpec, Zero

GIB = 2**30
# Estimates up to this factor above the limit are borderline: it is the error of estimates.
BORDER = 1.15
# A fastest candidate above this share of the limit leaves little room for errors. Then a candidate
# is preferred that takes at most CLOSE times as long and saves at least CLEARLY of the limit.
TIGHT = 0.95
CLOSE = 1.01
CLEARLY = 0.05

Fit: TypeAlias = Literal["fits", "borderline", "does not fit"]
CLASSES: tuple[Fit, ...] = ("fits", "borderline", "does not fit")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """Bytes on the rank that needs most memory, by content.

    Args:
        parameters: Bytes of parameters.
        gradients: Bytes of gradients.
        optimizer: Bytes of optimizer state.
        activations: Bytes of activations that are saved for backward, with those that one layer
            recomputes.
        logits: Bytes of logits and their gradients.
        buffers: Bytes of unsharded parameters, gradients during reduction, and dispatched tokens.

    Examples:
        >>> train = TrainSpec(seq_len=4096, global_batch=64)
        >>> cluster = Cluster(world_size=8, accelerator="H100")
        >>> memory = plan(MODELS["llama3-8b"], cluster, train).best.memory
        >>> memory.states + memory.activations + memory.logits + memory.buffers == memory.total
        True
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def parts(self) -> dict[str, float]:
        """Bytes of each part by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def states(self) -> float:
        """Bytes that stay from step to step: parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Sum of all parts, in bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Seconds of one step, by activity.

    Args:
        compute: Seconds of computation.
        communication: Seconds of communication that does not overlap with computation, by axis:
            ``tp``, ``cp``, ``fsdp``, ``dp_replicate``, ``ep`` and ``pp``. Axes of size 1 are
            absent.
        bubble: Seconds that a pipeline rank waits for other stages.
        optimizer: Seconds of the optimizer step.

    Examples:
        >>> TimeSplit(compute=2.0, communication={"fsdp": 0.5}, bubble=0.0, optimizer=0.1).total
        2.6
    """

    compute: float
    communication: Mapping[str, float] = field(hash=False)
    bubble: float
    optimizer: float

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part by name, with one entry for each axis that communicates."""
        ends = {"bubble": self.bubble, "optimizer": self.optimizer}
        return {"compute": self.compute, **self.communication, **ends}

    @property
    def total(self) -> float:
        """Sum of all parts, in seconds."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One valid configuration, with its estimated memory and time.

    Args:
        dims: Degrees.
        micro_batch: Number of sequences per microbatch on each data-parallel rank.
        microbatches: Number of microbatches per step.
        recompute: Activations that backward recomputes.
        memory: Bytes on the rank that needs most.
        time: Seconds of one step.
        limit: Memory limit of a device, in bytes.
        tokens: Number of tokens of one step.
        flops: Floating-point operations of the model in one step. Recomputation is not counted;
            causal attention counts half.
        peak_tflops: Dense bf16 peak of a device, in TFLOP/s.
        setting: Pipeline schedule and ZeRO stage.
        trust: Published runs that resemble the configuration.

    Examples:
        >>> cluster = Cluster(world_size=8, accelerator="H100")
        >>> best = plan(MODELS["llama3-8b"], cluster, TrainSpec(seq_len=4096, global_batch=64)).best
        >>> best.fit, best.dims.world_size
        ('fits', 8)
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
    setting: Setting = USUAL_SETTING
    trust: Trust = UNKNOWN

    @property
    def schedule(self) -> ScheduleName:
        """Pipeline schedule."""
        return self.setting.schedule

    @property
    def virtual_stages(self) -> int:
        """Number of stages of each pipeline rank."""
        return self.setting.virtual_stages

    @property
    def zero(self) -> Zero:
        """ZeRO stage; None is stage 3 as in FSDP."""
        return self.setting.zero

    @property
    def fit(self) -> Fit:
        """``"fits"``, ``"borderline"`` or ``"does not fit"``.

        Memory of a borderline candidate is above the limit by at most 15 %.
        """
        return classify(self.memory.total, self.limit)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dims.dp_size * self.dims.non_dp_size

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Estimated training tokens per second on each device."""
        return self.tokens / self.time.total / self.world_size

    @property
    def tflops(self) -> float:
        """Model TFLOP/s on each device."""
        return self.flops / self.time.total / self.world_size / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: `tflops` as a share of the device's dense bf16 peak."""
        return self.tflops / self.peak_tflops

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The memory limit that the configuration exceeds, or nothing if it fits.

        It is advice if the configuration is borderline, else an error.
        """
        if self.fit == "fits":
            return ()
        need, limit = self.memory.total / GIB, self.limit / GIB
        values = {"memory_gib": round(need, 1), "limit_gib": round(limit, 1)}
        reason = f"needs {need:.1f} GiB of {limit:.1f} GiB"
        level: Level = "advice" if self.fit == "borderline" else "error"
        return (broken("memory", reason, values, level=level),)

    def explain(self) -> str:
        """Describe memory, time and trust.

        Returns:
            Five lines: degrees, microbatches, memory by part, time by part, and trust.
        """
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


def classify(need: float, limit: float) -> Fit:
    """Return the class of a configuration that needs ``need`` bytes of memory."""
    if need <= limit:
        return "fits"
    return "borderline" if need <= BORDER * limit else "does not fit"


def _more(own: Mapping[str, float], best: Mapping[str, float]) -> dict[str, float]:
    """Return the difference of each part to the best, largest first."""
    parts = {name: own.get(name, 0.0) - best.get(name, 0.0) for name in {**own, **best}}
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


class Ranking(Sequence[Candidate]):
    """Candidates in a fixed order. Each is built when it is read."""

    __slots__ = ("_build", "_sources")

    def __init__(self, sources: Sequence[Any], build: Callable[[Any], Candidate]) -> None:
        self._sources, self._build = sources, build

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> "Ranking": ...
    def __getitem__(self, index: int | slice) -> "Candidate | Ranking":
        if isinstance(index, slice):
            return Ranking(self._sources[index], self._build)
        return self._build(self._sources[index])

    def __len__(self) -> int:
        return len(self._sources)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ranking):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    def __repr__(self) -> str:
        return f"Ranking of {len(self)} candidates"


def index_of_best(fits: Sequence[Candidate]) -> int:
    """Return the index of the recommended candidate among those that fit, fastest first."""
    fastest = fits[0] if fits else None
    if fastest is None or fastest.memory.total <= TIGHT * fastest.limit:
        return 0
    enough = fastest.memory.total - CLEARLY * fastest.limit
    close = takewhile(lambda one: one.time.total <= CLOSE * fastest.time.total, fits)
    return next((index for index, one in enumerate(close) if one.memory.total <= enough), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One configuration, compared with the best of its plan.

    Args:
        own: The configuration.
        best: The best candidate of the plan.

    Examples:
        >>> cluster = Cluster(world_size=8, accelerator="H100")
        >>> train = TrainSpec(seq_len=4096, global_batch=64)
        >>> compare(MODELS["llama3-8b"], cluster, train, ParallelDims(tp=8)).slowdown > 1
        True
    """

    own: Candidate
    best: Candidate

    @property
    def slowdown(self) -> float:
        """Step time, relative to the best."""
        return self.own.time.total / self.best.time.total

    @property
    def time(self) -> Mapping[str, float]:
        """Difference of each part of the step time to the best, in seconds, largest first."""
        return _more(self.own.time.parts, self.best.time.parts)

    @property
    def memory(self) -> Mapping[str, float]:
        """Difference of each part of memory to the best, in bytes, largest first."""
        return _more(self.own.memory.parts, self.best.memory.parts)

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The memory limit that the configuration exceeds, or nothing if it fits."""
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
    """All valid configurations of a run in ranked order, and all rejections.

    Args:
        model: Shape of the model.
        cluster: Devices and links.
        train: Batch, precision, recomputation and schedule.
        candidates: Valid configurations. `best` is the first. The order of the others: those that
            fit, the fastest first; borderline ones, the fastest first; too large ones, the smallest
            first. Each is built when it is read.
        rejected: Degrees without a valid configuration.
        fitting: Number of candidates that fit.
        bordering: Number of borderline candidates.
        fix: Degrees to which the search was restricted.
        calibration: Constants of the cost model.

    Examples:
        >>> cluster = Cluster(world_size=8, accelerator="H100")
        >>> found = plan(MODELS["llama3-8b"], cluster, TrainSpec(seq_len=4096, global_batch=64))
        >>> found.best is not None, len(found.fits) == found.fitting
        (True, True)
    """

    model: ModelShape
    cluster: Cluster
    train: TrainSpec
    candidates: Sequence[Candidate] = field(repr=False, hash=False)
    rejected: Sequence[Rejection] = field(repr=False)
    fitting: int
    bordering: int
    fix: Mapping[str, int] = field(default_factory=dict, hash=False)
    calibration: Calibration = field(default_factory=Calibration, repr=False)

    @property
    def fits(self) -> Sequence[Candidate]:
        """Candidates with memory within the limit."""
        return self.candidates[: self.fitting]

    @property
    def borderline(self) -> Sequence[Candidate]:
        """Candidates with memory above the limit by at most 15 %."""
        return self.candidates[self.fitting : self.fitting + self.bordering]

    @property
    def too_large(self) -> Sequence[Candidate]:
        """Candidates with memory above the limit by more than 15 %."""
        return self.candidates[self.fitting + self.bordering :]

    @property
    def best(self) -> Candidate | None:
        """The recommended candidate, the nearest miss if nothing fits, or None without candidates.

        It is the fastest candidate that fits, with one exception. If that one needs more than 95 %
        of the memory limit, a candidate is preferred that is slower by at most 1 % and needs less
        memory by at least 5 % of the limit.
        """
        return self.candidates[0] if self.candidates else None

    @property
    def fastest(self) -> Candidate | None:
        """The fastest candidate that fits; `best` if nothing fits."""
        # Only the first candidate can be out of order.
        return min(self.fits[:2], key=lambda one: one.time.total, default=self.best)

    @property
    def considered(self) -> int:
        """Number of candidates and rejections."""
        return len(self.candidates) + len(self.rejected)

    def compare(self, own: Candidate) -> "Comparison":
        """Compare a configuration with the best of this plan.

        Args:
            own: A configuration of the same run, such as a result of `estimate`.

        Returns:
            Both configurations and the differences of their parts.
        """
        return Comparison(own=own, best=self.best or own)

    def __str__(self) -> str:
        counts = counts_of(self)
        best = self.best
        if best is None:
            return f"no valid configuration; {counts}"
        if self.fitting:
            return f"best: {best}; {counts}"
        limit = best.limit / GIB
        return f"nothing fits in {limit:.1f} GiB, the nearest is {best}; {counts}"


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


def counts_of(plan: Plan) -> str:
    """Write how many configurations were considered, how many fit, and how many were rejected."""
    return (
        f"{plan.considered} considered: {plan.fitting} fit, {plan.bordering} borderline, "
        f"{len(plan.too_large)} do not fit, {len(plan.rejected)} rejected"
    )
