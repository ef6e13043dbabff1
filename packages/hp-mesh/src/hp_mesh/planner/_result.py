"""What an estimate consists of: memory, time, and the configuration that has them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .._dims import ParallelDims
from .._errors import Violation
from ._train import Recompute

GIB = 2**30
# How far above the limit an estimate may be and still be worth a try: the estimate's own error.
BORDER = 1.15

Fit: TypeAlias = Literal["fits", "borderline", "does not fit"]


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
    def states(self) -> float:
        """Return the bytes that stay from step to step: parameters, gradients, optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Return all bytes."""
        return self.states + self.activations + self.logits + self.buffers


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
    def total(self) -> float:
        """Return all seconds."""
        return self.compute + sum(self.communication.values()) + self.bubble + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One valid configuration and what it is estimated to need.

    ``limit`` are the bytes that may be used on a device. ``tokens`` are those of one step,
    ``flops`` the model's operations on them (recomputation not counted, causal attention counted
    half), ``peak_tflops`` a device's dense bf16 rate.
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
