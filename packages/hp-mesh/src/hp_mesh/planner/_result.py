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
# A configuration is borderline if it needs more than the memory limit, but at most BORDER times the
# limit. An estimate is expected to be wrong by at most this factor.
BORDER = 1.15
# If the fastest candidate needs more than the share TIGHT of the memory limit, an error of the
# estimate may exceed the limit. Then the planner recommends a candidate that takes at most CLOSE
# times as long, if it saves at least the share CLEARLY of the limit.
TIGHT = 0.95
CLOSE = 1.01
CLEARLY = 0.05

Fit: TypeAlias = Literal["fits", "borderline", "does not fit"]
CLASSES: tuple[Fit, ...] = ("fits", "borderline", "does not fit")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """Memory of the rank that needs the most memory, split by content, in bytes.

    Args:
        parameters: Bytes of parameters.
        gradients: Bytes of gradients.
        optimizer: Bytes of optimizer state.
        activations: Bytes of activations. Includes the activations saved for backward, and the
            temporary activations while backward recomputes one layer.
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
        """Dictionary from the name of each field, such as ``"gradients"``, to its bytes."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def states(self) -> float:
        """Sum of parameters, gradients and optimizer state, in bytes."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Sum of all fields, in bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Time of one training step, split by activity, in seconds.

    A training step processes one global batch and then updates the parameters.

    Args:
        compute: Seconds of the forward and backward passes of all microbatches.
        communication: Dictionary from the name of an axis to the seconds of its communication that
            does not overlap with computation. The names are ``tp``, ``cp``, ``fsdp``,
            ``dp_replicate``, ``ep`` and ``pp``. Axes of size 1 are absent.
        bubble: Seconds that a pipeline rank waits for other ranks.
        optimizer: Seconds in which the optimizer updates the parameters.

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
        """Dictionary from the name of each part to its seconds.

        The names are ``"compute"``, the axes in ``communication``, ``"bubble"`` and
        ``"optimizer"``.
        """
        ends = {"bubble": self.bubble, "optimizer": self.optimizer}
        return {"compute": self.compute, **self.communication, **ends}

    @property
    def total(self) -> float:
        """Sum of `parts`, in seconds."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A valid configuration with its estimated memory and time.

    Args:
        dims: Degrees of all axes.
        micro_batch: Number of sequences per microbatch on each data-parallel rank.
        microbatches: Number of microbatches per step.
        recompute: Kind of recomputation. `TrainSpec` explains the kinds.
        memory: Memory of the rank that needs the most memory.
        time: Time of one training step.
        limit: Memory that may be used on one device, in bytes.
        tokens: Number of tokens of one step, over all ranks.
        flops: Number of floating-point operations of the model in one step, over all ranks.
            Recomputation is not counted. Only the lower half of the attention scores is counted,
            because attention is causal.
        peak_tflops: Peak of dense bf16 matrix products on one device, in TFLOP/s.
        setting: Pipeline schedule, number of stages per pipeline rank, and ZeRO stage.
        trust: Reliability of the estimate: how well the planner estimates published runs that are
            similar to the configuration.

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
        """Number of pipeline stages of each pipeline rank."""
        return self.setting.virtual_stages

    @property
    def zero(self) -> Zero:
        """ZeRO stage from 0 to 3, or None for FSDP. See ``zero`` of `TrainSpec`."""
        return self.setting.zero

    @property
    def fit(self) -> Fit:
        """Result of comparing the memory with the limit, as one of three texts.

        - ``"fits"``: the memory is within the limit.
        - ``"borderline"``: the memory is above the limit by at most 15 %.
        - ``"does not fit"``: the memory is above the limit by more than 15 %.
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
        """Estimated speed of one device in TFLOP/s. Recomputation is not counted as work."""
        return self.flops / self.time.total / self.world_size / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: `tflops` divided by the device's dense bf16 peak."""
        return self.tflops / self.peak_tflops

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Tuple with one violation if the memory is above the limit, else an empty tuple.

        The violation's level is ``"advice"`` if `fit` is ``"borderline"``, and ``"error"`` if
        `fit` is ``"does not fit"``.
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
        lines = [self.dims.summary()]
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
    """Return ``"fits"``, ``"borderline"`` or ``"does not fit"``, as in `Candidate.fit`.

    Args:
        need: Memory that a configuration needs on one device, in bytes.
        limit: Memory that may be used on one device, in bytes.
    """
    if need <= limit:
        return "fits"
    return "borderline" if need <= BORDER * limit else "does not fit"


def _differences(own: Mapping[str, float], best: Mapping[str, float]) -> dict[str, float]:
    """Subtract the values of ``best`` from the values of ``own``.

    Returns a dictionary from each key of ``own`` or ``best`` to the difference. The largest
    difference is first. If a key is missing in one dictionary, its value there counts as 0.
    """
    parts = {name: own.get(name, 0.0) - best.get(name, 0.0) for name in {**own, **best}}
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


class Ranking(Sequence[Candidate]):
    """Lazy sequence of candidates: ``ranking[i]`` is ``build(sources[i])``.

    A search finds many configurations. Creating a `Candidate` for each of them would be slow.

    Args:
        sources: Results of the search, in order.
        build: Function that converts one result of the search to a `Candidate`.
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
    """Return the index in ``fits`` of the candidate that the planner recommends.

    ``fits`` has all candidates that fit into memory, the fastest first. `Plan.best` explains how
    the planner chooses. Returns 0 if ``fits`` is empty.
    """
    fastest = fits[0] if fits else None
    if fastest is None or fastest.memory.total <= TIGHT * fastest.limit:
        return 0
    enough = fastest.memory.total - CLEARLY * fastest.limit
    close = takewhile(lambda one: one.time.total <= CLOSE * fastest.time.total, fits)
    return next((index for index, one in enumerate(close) if one.memory.total <= enough), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences in memory and time between a candidate and the best candidate of its plan.

    Args:
        own: The candidate to compare.
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
        """Difference in step time between the user's and the best configuration, by part.

        Each value is ``own`` minus ``best``, in seconds.

        The largest difference is first. `TimeSplit.parts` has the names of the parts.
        """
        return _differences(self.own.time.parts, self.best.time.parts)

    @property
    def memory(self) -> Mapping[str, float]:
        """Difference in memory between the user's and the best configuration, by part.

        Each value is ``own`` minus ``best``, in bytes.

        The largest difference is first. `MemorySplit.parts` has the names of the parts.
        """
        return _differences(self.own.memory.parts, self.best.memory.parts)

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Tuple with one violation if ``own`` needs more memory than the limit, else empty."""
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
    """Result of `plan`: all valid configurations of a training run, the best one first.

    Args:
        model: Shape of the model.
        cluster: Devices and links.
        train: Batch, precision, recomputation and schedule.
        candidates: Valid configurations in this order:

            1. `best`.
            2. All other candidates that fit into memory, the fastest first.
            3. Borderline candidates, the fastest first.
            4. Candidates that do not fit, the one that needs the least memory first.

            Each `Candidate` is created when it is accessed.
        rejected: Sets of degrees for which no configuration is valid, each with the rules that it
            breaks.
        fitting: Number of candidates that fit into memory.
        bordering: Number of borderline candidates: above the memory limit by at most 15 %.
        fix: Argument ``fix`` of `plan`: degrees that every candidate has, by axis name.
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
        """Candidates that fit: their memory is within the limit."""
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
        """The candidate that the planner recommends, or None if the plan has no candidate.

        - Usually this is the fastest candidate that fits.
        - If the fastest candidate needs more than 95 % of the memory limit, the planner looks for a
          candidate that is slower by at most 1 % and saves at least 5 % of the limit. The fastest
          one with these properties is recommended.
        - If no candidate fits, the fastest borderline candidate is recommended.
        - If there is no borderline candidate either, the candidate that needs the least memory is
          recommended.
        """
        return self.candidates[0] if self.candidates else None

    @property
    def fastest(self) -> Candidate | None:
        """The fastest candidate that fits. If no candidate fits, this is `best`."""
        # `best` is first. The other candidates that fit are sorted by time.
        return min(self.fits[:2], key=lambda one: one.time.total, default=self.best)

    @property
    def considered(self) -> int:
        """Number of candidates plus number of rejections."""
        return len(self.candidates) + len(self.rejected)

    def compare(self, own: Candidate) -> "Comparison":
        """Compare a candidate with the best candidate of this plan.

        Args:
            own: A candidate of the same run, such as the result of `estimate`.

        Returns:
            Both candidates, and their differences in each part of memory and time. If the plan has
            no candidate, ``own`` is compared with itself.
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
    """A change of one field of `TrainSpec` that makes the best configuration faster.

    If no configuration fits into memory without the change, a configuration fits with it.

    Args:
        field: Name of the field of `TrainSpec`.
        value: New value of the field.
        step_seconds: Estimated seconds per step of the best configuration after the change.

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
    """Return one line of text that counts the candidates by `Candidate.fit`, and the rejections."""
    return (
        f"{plan.considered} considered: {plan.fitting} fit, {plan.bordering} borderline, "
        f"{len(plan.too_large)} do not fit, {len(plan.rejected)} rejected"
    )
