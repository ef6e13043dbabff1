"""Settings of a unit that its setters change, and fixed settings of a parameter group."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from ._errors import ArgumentTypeError, ShardingError, is_int, shown

GradientReduction = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionHook:
    """A hook of the user for reduced gradients; see `FSDPModule.set_all_reduce_hook`.

    Attributes:
        function: Called with each reduced gradient, a flat tensor of one parameter group.
        stream: Stream on which the function runs. Defaults to the current stream.
    """

    function: Callable[[Tensor], Any]
    stream: torch.Stream | None = None

    def __call__(self, reduced: Tensor) -> None:
        """Run ``function`` on ``stream``, and make the current stream wait for it.

        On a CPU, ``stream`` is ignored.
        """
        stream = None if reduced.device.type == "cpu" else self.stream
        with nullcontext() if stream is None else _waiting_for_current(stream):
            self.function(reduced)
        if stream is not None:
            torch.accelerator.current_stream().wait_stream(stream)


def _waiting_for_current(stream: torch.Stream) -> torch.Stream:
    stream.wait_stream(torch.accelerator.current_stream())
    return stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of a unit that its setters change.

    Attributes:
        reshard_after_forward: Whether to reshard after forward, or the number of ranks over which
            to shard the parameters between forward and backward. If None, only the units that
            backward needs first stay unsharded.
        reshard_after_backward: Whether to reshard after backward.
        unshard_in_backward: Whether to unshard in backward.
        gradient_sync: Whether backward reduces gradients.
        all_reduce: Whether a reduction includes the all-reduce over replicas.
        reduction: ``"mean"`` or ``"sum"`` of the gradients over ranks.
        divide: Divisor of the sum of gradients over ranks. If None, ``reduction`` determines it.
        force_sum: Whether to compute a mean as a sum and a division, even if the backend can
            compute averages.
        hook: Hook for reduced gradients, or None.
        in_flight: Upper bound on the number of buffers of packed gradients that exist at the same
            time. On accelerators, the buffer that a unit fills during its backward is not counted.
        is_last_backward: Whether the next backward is the last one of the step. Only the last one
            waits for reductions.
        precision: Dtypes of computation, reduction and outputs.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    gradient_sync: bool = True
    all_reduce: bool = True
    reduction: GradientReduction = "mean"
    divide: float | None = None
    force_sum: bool = False
    hook: ReductionHook | None = None
    in_flight: int = 1
    is_last_backward: bool = True
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)

    def __post_init__(self) -> None:
        """Raise `ShardingError` if a value is invalid."""
        for name, value in (
            ("reshard_after_backward", self.reshard_after_backward),
            ("unshard_in_backward", self.unshard_in_backward),
            ("requires_gradient_sync", self.gradient_sync),
            ("requires_all_reduce", self.all_reduce),
            ("force_sum_reduction_for_comms", self.force_sum),
            ("is_last_backward", self.is_last_backward),
        ):
            check_bool(name, value)
        legal = list(get_args(GradientReduction))
        if self.reduction not in legal:
            raise ShardingError(f"gradient_reduction is {shown(self.reduction)}; allowed: {legal}")
        divide = self.divide
        if divide is not None and not (math.isfinite(divide) and divide > 0):
            raise ShardingError(
                f"factor={divide} must be a positive finite number; 1.0 leaves the sum, None "
                "uses gradient_reduction"
            )
        alive: object = self.in_flight
        if not is_int(alive) or alive < 1:
            kind = ShardingError if is_int(alive) else ArgumentTypeError
            raise kind(f"max_input_buffers is {shown(alive)}; allowed: 1, 2, ...")
        check_precision(self.precision)

    @property
    def in_pipeline(self) -> bool:
        """Return whether a pipeline schedule has disabled reductions and resharding."""
        return not (self.is_last_backward or self.gradient_sync or self.reshard_after_backward)

    def divisor(self, size: int) -> float:
        """Return the divisor of the sum of gradients over ``size`` ranks."""
        if self.divide is not None:
            return self.divide
        return float(size) if self.reduction == "mean" else 1.0


def check_bool(name: str, value: object) -> None:
    """Raise `ShardingError` if ``value``, the argument ``name``, is not a bool."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} is {shown(value)}; allowed: True and False")


def check_reshard(choice: object, degree: int) -> bool | int | None:
    """Check and normalize ``reshard_after_forward``: 1 becomes False, ``degree`` becomes True.

    ``degree`` is the number of ranks over which parameters are sharded. Raises `ShardingError`
    unless ``choice`` is True, False, None or a divisor of ``degree``.
    """
    if isinstance(choice, bool | None):
        return choice
    if not isinstance(choice, int) or choice < 1 or degree % choice:
        divisors = [n for n in range(1, degree + 1) if degree % n == 0]
        raise ShardingError(
            f"reshard_after_forward is {shown(choice)}; allowed: True, False, None (the default) "
            f"and a divisor of the {degree} ranks that are sharded over: one of {divisors}"
        )
    if choice == 1:
        return False
    return True if choice == degree else choice


def check_precision(policy: object) -> None:
    """Raise `ShardingError` unless ``policy`` is a `MixedPrecisionPolicy` with floating dtypes."""
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ArgumentTypeError(f"mp_policy is {shown(policy)}; allowed: a MixedPrecisionPolicy")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype: object = getattr(policy, name)
        if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            continue
        said = dtype if isinstance(dtype, torch.dtype) else shown(dtype)
        raise ShardingError(f"{name} is {said}; allowed: floating-point dtypes and None")


GradientMode = Literal["copy", "accumulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Settings of a parameter group that cannot change after `fully_shard`.

    Attributes:
        precision: Dtypes of computation, reduction and outputs.
        device: Device of the unsharded parameters.
        shard_device: Device of the shards. It is the CPU with ``CPUOffloadPolicy``, otherwise
            ``device``.
        grads: When gradients are copied to the input of the reduce-scatter. ``"copy"``: at the end
            of the unit's backward. ``"accumulate"``: each large gradient as soon as autograd has
            computed it.
        pinned: Whether the shards are in pinned memory.
        direct_bytes: Minimum size in bytes per rank of parameters that are all-gathered without a
            copy.
    """

    precision: MixedPrecisionPolicy
    device: torch.device
    shard_device: torch.device
    grads: GradientMode = "copy"
    pinned: bool = False
    direct_bytes: float
