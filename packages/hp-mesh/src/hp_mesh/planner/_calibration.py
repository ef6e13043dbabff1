"""Constants of the cost model, and the expected error of an estimate.

A published run is a training run with a configuration and a step time in a paper or a report. The
folder ``benchmarks/`` lists the published runs. They have two uses:

- The program ``benchmarks/calibrate.py`` fits constants to the step times of the published runs.
- The function `trust_of` finds published runs that resemble a configuration. The mean error of
  their estimates is the expected error for the configuration.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from .._errors import amount_violations, raise_errors
from ._cluster import Cluster, name_of
from ._configuration import Point
from ._shape import ModelShape
from ._train import TrainSpec

# Source of constants that are fitted to published runs.
FIT = "fit: benchmarks/calibrate.py"


def _constant(value: float, source: str) -> Any:
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants of the cost model that estimates memory and time.

    The same constants are used for every device, model and configuration. To change a constant,
    pass its new value to the constructor, for example after measurements of your own runs. In the
    metadata of a dataclass field, the key ``"source"`` has the source of the default value.

    - The efficiency of matrix products and of attention is the reached speed, as a share of the
      dense peak in the accelerator's data sheet.
    - An eager kernel computes one operation. A fused kernel computes several operations.

    Args:
        master_bytes: Bytes of the float32 copy of one weight.
        half_bytes: Bytes of one bf16 weight or activation.
        logit_bytes: Bytes per logit: the bf16 value, its float32 copy, softmax and gradient.
        eager_logit_bytes: Bytes per logit if the loss is computed with eager kernels. Replaces
            ``logit_bytes``.
        shared_loss_bytes: Additional bytes per logit if the loss is split over ``tp``.
        fused_loss_tokens: Number of tokens in one chunk of a fused loss.
        mask_bytes: Bytes of the two dropout masks of a layer, per element of the residual stream.
        score_bytes: Bytes that backward needs per attention score: score, softmax and dropout mask.
        fragmentation: Factor on the memory of activations, logits and buffers. It counts blocks
            that the caching allocator cannot use.
        eager_fragmentation: Replaces ``fragmentation`` with eager kernels.
        gemm_efficiency: Efficiency of large bf16 matrix products.
        fp8_efficiency: Efficiency of large fp8 matrix products.
        gemm_half_side: Size of a matrix dimension, in elements, at which a product reaches half of
            its efficiency if the other dimensions are large.
        expert_half_side: Replaces ``gemm_half_side`` for grouped products of experts, on a device
            with a peak of 1 PFLOP/s. On other devices the size is proportional to the peak, because
            starting and ending a tile takes a fixed time.
        attention_efficiency: Efficiency of fused attention, forward and backward.
        flash2_tflops: Upper bound on the peak for FlashAttention-2, in TFLOP/s. It applies to
            devices newer than A100.
        attention_half_chunk: Number of consecutive tokens of a sequence on one rank at which
            attention reaches half of its efficiency.
        ring_efficiency: Factor on the speed of ring attention, for each doubling of the number of
            ranks in the ring.
        attention_backward: Time of the backward pass of attention, divided by the time of the
            forward pass.
        score_passes: Number of times that unfused attention reads or writes its bf16 scores.
        hbm_efficiency: Share of the memory bandwidth that elementwise kernels reach.
        eager_passes: Memory traffic of eager elementwise kernels, divided by the memory traffic of
            fused kernels.
        elementwise_backward: Memory traffic of elementwise kernels in backward, divided by their
            memory traffic in forward.
        cast_bytes: Bytes read and written to cast one weight to fp8.
        gather_copy_bytes: Bytes read and written to copy one weight out of an all-gather's buffer.
        reduce_copy_bytes: Bytes read and written to copy one gradient into a reduce-scatter's
            buffer.
        optimizer_bytes: Bytes read and written by one AdamW step for one weight.
        loss_bytes: Bytes read and written by the loss for one logit.
        merge_bytes: Bytes read and written to merge two partial results of ring attention, for one
            output element.
        link_efficiency: Share of the link's bandwidth that collectives reach.
        overlap_cost: Share of overlapped communication time that is added to the step time, because
            communication slows the computation.
        tp_hidden: Share of tensor-parallel communication that overlaps with computation.
        ep_hidden: Share of expert-parallel communication that overlaps with computation. DualPipe
            overlaps more, and does not use this constant.
        stage3_collectives: Number of all-gathers per layer in ZeRO stage 3, one for each weight.
            The number of reduce-scatters is the same.
        layer_seconds: Host time to launch the eager kernels of one layer, forward and backward, in
            seconds.
        eager_hop_seconds: Additional host time per hop of a tensor-parallel collective, in seconds,
            with eager kernels and pipeline stages on several nodes. The value was measured. The
            cause of the additional time is unknown.
        fused_launches: Host time to launch fused kernels, as a share of ``layer_seconds``.
        retry_share: Share of the memory limit. If a configuration with eager kernels needs more,
            the caching allocator frees its cache and retries allocations.
        retry_slowdown: Factor on the time of a microbatch if the caching allocator retries
            allocations.
        expert_layer_seconds: Time in seconds in which the host reads how many tokens each expert of
            one layer receives, forward and backward.

    Raises:
        ParallelDimsError: A constant is negative, infinite, NaN or not a number, or an efficiency
            or ``flash2_tflops`` is 0.

    Examples:
        >>> from hp_mesh.planner import CONSTANTS, Calibration
        >>> Calibration(gemm_efficiency=0.7).gemm_efficiency, CONSTANTS["GEMM_EFFICIENCY"]
        (0.7, 0.727)
    """

    master_bytes: float = _constant(4, "arXiv 1910.02054, section 3.1")
    half_bytes: float = _constant(2, "arXiv 1910.02054, section 3.1")
    logit_bytes: float = _constant(16, "torchtitan, long contexts")
    eager_logit_bytes: float = _constant(14, "nanotron, tp=1")
    shared_loss_bytes: float = _constant(4, "torchtitan, tables 4 and 5")
    fused_loss_tokens: float = _constant(1024, "arXiv 2410.10989, section 3.2")
    mask_bytes: float = _constant(2, "arXiv 2205.05198, equation 1")
    score_bytes: float = _constant(5, "arXiv 2205.05198, equation 1")
    fragmentation: float = _constant(1.02, "torchtitan, tables 1 to 5")
    eager_fragmentation: float = _constant(1.15, "nanotron runs")
    gemm_efficiency: float = _constant(0.727, FIT)
    fp8_efficiency: float = _constant(0.738, FIT)
    gemm_half_side: float = _constant(128, "tile sizes of cuBLAS")
    expert_half_side: float = _constant(400, FIT)
    attention_efficiency: float = _constant(0.46, FIT)
    flash2_tflops: float = _constant(455, "torchtitan, table 2; arXiv 2407.08608, section 1")
    attention_half_chunk: float = _constant(256, "tile sizes of FlashAttention")
    ring_efficiency: float = _constant(0.90, FIT)
    attention_backward: float = _constant(2.5, "arXiv 2307.08691, section 3.1")
    score_passes: float = _constant(6, "arXiv 2205.05198, table 5")
    hbm_efficiency: float = _constant(0.80, "data sheets, STREAM")
    eager_passes: float = _constant(3.0, "nanotron runs")
    elementwise_backward: float = _constant(1.5, "count of operands")
    cast_bytes: float = _constant(4, "count of operands")
    gather_copy_bytes: float = _constant(4, "count of operands")
    reduce_copy_bytes: float = _constant(6, "count of operands")
    optimizer_bytes: float = _constant(32, "count of operands")
    loss_bytes: float = _constant(24, "count of operands")
    merge_bytes: float = _constant(12, "count of operands")
    link_efficiency: float = _constant(0.80, "protocol overhead of NCCL")
    overlap_cost: float = _constant(0.20, FIT)
    tp_hidden: float = _constant(0.46, FIT)
    ep_hidden: float = _constant(0.18, FIT)
    stage3_collectives: float = _constant(4, "count of weights of a GPT layer")
    layer_seconds: float = _constant(4.2e-3, "nanotron runs, tp=8")
    eager_hop_seconds: float = _constant(0.3e-3, "nanotron runs, pp>1 on 2 to 8 nodes")
    fused_launches: float = _constant(0.25, "count of kernels")
    retry_share: float = _constant(
        0.97, "nanotron: every run that measured more than 75 GiB is 3 to 8 times slower"
    )
    retry_slowdown: float = _constant(4.0, "nanotron: the same runs")
    expert_layer_seconds: float = _constant(1.1e-3, FIT)

    def __post_init__(self) -> None:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        # The cost model divides by the efficiencies and by the bounds of the peak.
        divisors = {n: v for n, v in values.items() if n.endswith(("_efficiency", "_tflops"))}
        others = {n: v for n, v in values.items() if n not in divisors}
        raise_errors([*amount_violations(divisors), *amount_violations(others, zero=True)])


DEFAULT_CALIBRATION = Calibration()
CONSTANTS: Mapping[str, float] = MappingProxyType(
    {each.name.upper(): getattr(DEFAULT_CALIBRATION, each.name) for each in fields(Calibration)}
)
"""Default values of `Calibration`. A key is the name of a field in upper case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """Published training runs that resemble a configuration, and the error of their estimates.

    Published runs form a class if they have the same precision, kind of device, kind of model and
    pipeline schedule.

    Args:
        resembles: Name of the class that the configuration resembles, or ``""`` if it resembles no
            class.
        runs: Number of published runs in the class, or 0 if the configuration resembles no class.
        error: Mean absolute error of the estimated step times in the class, as a share of the
            published step times: 0.1 means 10 %. None if the configuration resembles no class. For
            each estimate, the constants were fitted to published runs of other sources.
        differs: One short text for each feature of the configuration that is absent from all runs
            of the class.

    Examples:
        >>> print(Trust(resembles="dense", runs=2, error=0.1))
        resembles 2 published runs, dense: their step time is off by 10% on average
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


# For a configuration that resembles no class of published runs.
UNKNOWN = Trust(resembles="", runs=0, error=None)


class Published(NamedTuple):
    """A class of similar published runs. The keys of `CLASSES` list what the runs have in common.

    Attributes:
        name: Name of the class without its schedule, such as ``"dense bf16 on H100"``.
        runs: Number of runs in the class.
        error: Mean absolute error of the estimated step times, as a share of the published step
            times. ``benchmarks/calibrate.py`` computes it by cross-validation.
        largest: Number of devices of the largest run.
    """

    name: str
    runs: int
    error: float
    largest: int


AMPERE_RUNS = "dense bf16 on A100"
DEEPSPEED_RUNS = "ZeRO stage 3 of DeepSpeed on A100"
STAGE_3 = "ZeRO stage 3"
# Names of accelerators. The accelerators of one tuple run the same kernels.
AMPERE = ("A100-40", "A100-80")
HOPPER = ("H100", "H100-96", "H800", "H200")
# Classes of published runs. Outer key: device family, precision, and whether the model has experts.
# Inner key: the pipeline schedule, "" without pipeline stages, or `STAGE_3` for ZeRO stage 3 of
# DeepSpeed. Runs with FSDP and without pipeline stages have the inner key "". The error of the
# `STAGE_3` runs is not cross-validated: all of them have the same source, and the formula for ZeRO
# stage 3 was chosen with these runs.
CLASSES = {
    ("ampere", "bf16", False): {
        "": Published(AMPERE_RUNS, 6, 0.04, 128),
        STAGE_3: Published(DEEPSPEED_RUNS, 6, 0.18, 2240),
        "1f1b": Published(AMPERE_RUNS, 3, 0.04, 2520),
        "interleaved": Published(AMPERE_RUNS, 4, 0.06, 280),
    },
    ("hopper", "bf16", False): {
        "": Published("dense bf16 on H100", 9, 0.09, 1024),
        "interleaved": Published("dense bf16 on H100", 13, 0.05, 16384),
    },
    ("hopper", "fp8", False): {
        "": Published("dense fp8 on H100", 13, 0.10, 1024),
        "1f1b": Published("dense fp8 on H100", 5, 0.17, 512),
        "interleaved": Published("dense fp8 on H100", 13, 0.07, 1024),
    },
    ("hopper", "bf16", True): {
        "": Published("experts in bf16 on H100", 2, 0.11, 512),
        "1f1b": Published("experts in bf16 on H100", 1, 0.17, 1024),
        "interleaved": Published("experts in bf16 on H100", 2, 0.10, 1024),
    },
}


def trust_of(
    model: ModelShape,
    cluster: Cluster,
    train: TrainSpec,
    point: Point,
    computing: float,
) -> Trust:
    """Return a `Trust` with the class of published runs that a configuration resembles.

    The class has the same precision, kind of device, kind of model and pipeline schedule as the
    configuration. The configuration resembles the class if at most one of its other features is
    absent from all runs of the class. Otherwise `Trust.runs` is 0 and `Trust.differs` lists the
    reasons.

    Args:
        model: Shape of the model.
        cluster: Devices and links.
        train: Settings of the training run.
        point: Configuration.
        computing: Computation time divided by the step time, from 0 to 1.
    """
    degrees, setting, chip = point.degrees, point.setting, name_of(cluster.device)
    family = "ampere" if chip in AMPERE else "hopper" if chip in HOPPER else ""
    precision = "fp8" if train.float8 else "bf16"
    kinds = CLASSES.get((family, precision, model.experts > 0), {})
    schedule = setting.schedule if degrees.pp > 1 else ""
    stage_3 = setting.zero == 3 and degrees.fsdp > 1 and not schedule
    published = kinds.get(STAGE_3 if stage_3 else schedule)
    if setting.zero == 0 and schedule:
        feature = "ZeRO stage 0 with pipeline stages, which stalls in ways that are not explained"
        return Trust(resembles="", runs=0, error=None, differs=(feature,))
    if published is None:
        feature = f"{precision} {'with' if model.experts else 'without'} experts on {chip}"
        if kinds:
            feature += f" with {STAGE_3}" if stage_3 else f" with {schedule} pipelines"
        return Trust(resembles="", runs=0, error=None, differs=(feature,))
    differs = tuple(_absent_features(published, cluster, train, point, computing))
    error = published.error if len(differs) < 2 else None
    name = published.name if error is not None else ""
    name += f" with {schedule} pipelines" if name and schedule else ""
    return Trust(resembles=name, runs=published.runs if name else 0, error=error, differs=differs)


def _absent_features(
    published: Published, cluster: Cluster, train: TrainSpec, point: Point, computing: float
) -> Iterator[str]:
    """Yield a short text for each feature of a configuration that a class of runs does not have.

    Features are, for example, a large ``cp`` or eager elementwise kernels.

    Args:
        published: Class of published runs.
        cluster: Devices and links.
        train: Settings of the training run.
        point: Configuration.
        computing: Computation time divided by the step time, from 0 to 1.
    """
    degrees, setting = point.degrees, point.setting
    if setting.zero == 0 and degrees.fsdp > 1:
        yield "ZeRO stage 0"
    if setting.zero in (2, 3) and degrees.pp > 1:
        yield f"ZeRO stage {setting.zero} with pipeline stages"
    if cluster.world_size > 2 * published.largest:
        yield f"{cluster.world_size} devices; the largest published run has {published.largest}"
    if degrees.tp > cluster.ranks_per_node:
        yield f"tp={degrees.tp} leaves the node"
    if degrees.cp > 8:
        yield f"cp={degrees.cp}; the published runs have 8 at most"
    if degrees.ulysses_degree > 1 or (degrees.cp > 1 and train.context == "all-gather"):
        yield "Ulysses or an all-gather over cp; the published runs use a ring"
    if train.fused == "attention":
        yield "eager elementwise kernels"
    if train.fused is False and published.name not in (AMPERE_RUNS, DEEPSPEED_RUNS):
        yield "attention that stores its scores"
    if train.seq_len > 262144:
        yield f"seq_len={train.seq_len}; the published runs have 262144 at most"
    if computing < 0.5:
        yield "less than half of the step is computing"
