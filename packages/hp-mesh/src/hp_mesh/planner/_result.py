"""Results of the planner: plans, candidates with memory and time, comparisons and hints.

A candidate is a valid configuration with its estimated memory and time.
"""

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
# A configuration is borderline if its memory is above the limit by at most this factor. The factor
# is the largest expected error of an estimate.
BORDER = 1.15
# If the fastest candidate needs more than the share TIGHT of the memory limit, there is little room
# for errors. Then a candidate is recommended that takes at most CLOSE times as long and needs less
# memory, by at least the share CLEARLY of the limit.
TIGHT = 0.95
CLOSE = 1.01
CLEARLY = 0.05

Fit: TypeAlias = Literal["fits", "borderline", "does not fit"]
CLASSES: tuple[Fit, ...] = ("fits", "borderline", "does not fit")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """Memory of the rank that needs most, split by content, in bytes.

    Args:
        parameters: Bytes of parameters.
        gradients: Bytes of gradients.
        optimizer: Bytes of optimizer state.
        activations: Bytes of activations: those saved for backward, and those that exist while
            one layer is recomputed.
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
        """Sum of parameters, gradients and optimizer state, in bytes."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Sum of all parts, in bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Time of one optimizer step, split by activity, in seconds.

    Args:
        compute: Seconds of computation.
        communication: Seconds of communication that does not overlap with computation. Keys are
            names of axes: ``tp``, ``cp``, ``fsdp``, ``dp_replicate``, ``ep`` and ``pp``. Axes of
            size 1 are absent.
        bubble: Seconds that a pipeline rank waits for other ranks.
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
        """Seconds of each part by name. Each axis in ``communication`` is a separate part."""
        ends = {"bubble": self.bubble, "optimizer": self.optimizer}
        return {"compute": self.compute, **self.communication, **ends}

    @property
    def total(self) -> float:
        """Sum of all parts, in seconds."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A valid configuration with its estimated memory and time.

    Args:
        dims: Degrees.
        micro_batch: Number of sequences per microbatch on each data-parallel rank.
        microbatches: Number of microbatches per step.
        recompute: Kind of recomputation, as in `TrainSpec`.
        memory: Memory of the rank that needs most.
        time: Time of one step.
        limit: Memory that may be used on one device, in bytes.
        tokens: Number of tokens of one step.
        flops: Floating-point operations of the model in one step. Recomputation is not counted.
            Only the lower half of the attention scores is counted, because attention is causal.
        peak_tflops: Peak of dense bf16 matrix products on one device, in TFLOP/s.
        setting: Pipeline schedule and ZeRO stage.
        trust: Published runs that resemble the configuration, and the error of their estimates.

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
        """Name of the pipeline schedule."""
        return self.setting.schedule

    @property
    def virtual_stages(self) -> int:
        """Number of stages of each pipeline rank."""
        return self.setting.virtual_stages

    @property
    def zero(self) -> Zero:
        """ZeRO stage from 0 to 3, or None for FSDP. See ``zero`` of `TrainSpec`."""
        return self.setting.zero

    @property
    def fit(self) -> Fit:
        """Whether the memory is within the limit.

        ``"fits"``; ``"borderline"`` if the memory is above the limit by at most 15 %; or
        ``"does not fit"``.
        """
        return classify(self.memory.total, self.limit)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dims.dp_size * self.dims.non_dp_size

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Estimated number of tokens per second, divided by the number of devices."""
        return self.tokens / self.time.total / self.world_size

    @property
    def tflops(self) -> float:
        """Operations of the model in TFLOP/s per device. Recomputation is not counted."""
        return self.flops / self.time.total / self.world_size / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: `tflops` divided by the device's dense bf16 peak."""
        return self.tflops / self.peak_tflops

    @property
    def violations(self) -> tuple[Violation, ...]:
        """One violation if the memory is above the limit, else an empty tuple.

        The violation's level is ``"advice"`` for a borderline configuration, else ``"error"``.
        """
        if self.fit == "fits":
            return ()
        need, limit = self.memory.total / GIB, self.limit / GIB
        values = {"memory_gib": round(need, 1), "limit_gib": round(limit, 1)}
        reason = f"needs {need:.1f} GiB of {limit:.1f} GiB"
        level: Level = "advice" if self.fit == "borderline" else "error"
        return (broken("memory", reason, values, level=level),)

    def explain(self) -> str:
        """Describe the configuration, its memory, its time, and how reliable the estimate is.

        Returns:
            A text of five lines: degrees, microbatches, memory by part, time by part, and trust.
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
    """Return the class ("fits", ...) of a configuration that needs ``need`` bytes of memory.

    ``limit`` is the memory that may be used on one device, in bytes.
    """
    if need <= limit:
        return "fits"
    return "borderline" if need <= BORDER * limit else "does not fit"


def _differences(own: Mapping[str, float], best: Mapping[str, float]) -> dict[str, float]:
    """Return ``own`` minus ``best`` for each part by name, the largest difference first.

    A part that is missing in one of the arguments counts as 0 there.
    """
    parts = {name: own.get(name, 0.0) - best.get(name, 0.0) for name in {**own, **best}}
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


class Ranking(Sequence[Candidate]):
    """Sequence of candidates that builds a candidate when it is accessed.

    Args:
        sources: Descriptions of the candidates, in order.
        build: Builds a candidate from its description.
    """

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
    """Return the index of the recommended candidate.

    ``fits`` has all candidates that fit into memory, the fastest first. Returns 0 if ``fits`` is
    empty. `Plan.best` describes which candidate is recommended.
    """
    fastest = fits[0] if fits else None
    if fastest is None or fastest.memory.total <= TIGHT * fastest.limit:
        return 0
    enough = fastest.memory.total - CLEARLY * fastest.limit
    close = takewhile(lambda one: one.time.total <= CLOSE * fastest.time.total, fits)
    return next((index for index, one in enumerate(close) if one.memory.total <= enough), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences in memory and time between a configuration and the best one of its plan.

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
        """Step time of ``own`` divided by the step time of ``best``."""
        return self.own.time.total / self.best.time.total

    @property
    def time(self) -> Mapping[str, float]:
        """``own`` minus ``best`` for each part of the step time, in seconds, largest first."""
        return _differences(self.own.time.parts, self.best.time.parts)

    @property
    def memory(self) -> Mapping[str, float]:
        """``own`` minus ``best`` for each part of the memory, in bytes, largest first."""
        return _differences(self.own.memory.parts, self.best.memory.parts)

    @property
    def violations(self) -> tuple[Violation, ...]:
        """One violation if the memory of ``own`` is above the limit, else an empty tuple."""
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
    """All valid configurations of a run, ranked, and all rejected degrees.

    Args:
        model: Shape of the model.
        cluster: Devices and links.
        train: Batch, precision, recomputation and schedule.
        candidates: Valid configurations. The first one is `best`. It is followed by candidates that
            fit, the fastest first; borderline candidates, the fastest first; and too large
            candidates, the one with least memory first. A candidate is built when it is accessed.
        rejected: Degrees with which no configuration is valid.
        fitting: Number of candidates that fit into memory.
        bordering: Number of borderline candidates: above the memory limit by at most 15 %.
        fix: Degrees that all configurations were required to have, by axis name.
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
        """Candidates whose memory is within the limit."""
        return self.candidates[: self.fitting]

    @property
    def borderline(self) -> Sequence[Candidate]:
        """Candidates whose memory is above the limit by at most 15 %."""
        return self.candidates[self.fitting : self.fitting + self.bordering]

    @property
    def too_large(self) -> Sequence[Candidate]:
        """Candidates whose memory is above the limit by more than 15 %."""
        return self.candidates[self.fitting + self.bordering :]

    @property
    def best(self) -> Candidate | None:
        """The recommended candidate, or None without candidates.

        The recommended candidate is usually `fastest`. If `fastest` needs more than 95 % of the
        memory limit, another candidate is preferred that is slower by at most 1 % and saves at
        least 5 % of the limit. If nothing fits, the recommended candidate is the fastest borderline
        one, or else the one that needs least memory.
        """
        return self.candidates[0] if self.candidates else None

    @property
    def fastest(self) -> Candidate | None:
        """The fastest candidate that fits; `best` if nothing fits."""
        # `best` is first. The other candidates that fit are sorted by time.
        return min(self.fits[:2], key=lambda one: one.time.total, default=self.best)

    @property
    def considered(self) -> int:
        """Number of candidates plus number of rejections."""
        return len(self.candidates) + len(self.rejected)

    def compare(self, own: Candidate) -> "Comparison":
        """Compare a configuration with the best one of this plan.

        Args:
            own: A candidate of the same run, such as the result of `estimate`.

        Returns:
            Both candidates, and their differences in each part of memory and time.
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
    """A change of one option of `TrainSpec` that makes the best configuration faster.

    Args:
        field: Name of the option, which is a field of `TrainSpec`.
        value: Value of the option to set.
        step_seconds: Estimated seconds per step of the best configuration with this value.

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
    """Return a text with the number of candidates of each class and the number of rejections."""
    return (
        f"{plan.considered} considered: {plan.fitting} fit, {plan.bordering} borderline, "
        f"{len(plan.too_large)} do not fit, {len(plan.rejected)} rejected"
    )
