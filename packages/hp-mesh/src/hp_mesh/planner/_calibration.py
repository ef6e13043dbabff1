"""All constants of the estimates, with their sources.

Constants whose source is `FIT` are fitted by ``benchmarks/calibrate.py`` to the published runs in
``benchmarks/``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from .._errors import amount_violations, raise_errors

FIT = "fit: benchmarks/calibrate.py"


def _constant(value: float, source: str) -> Any:
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants of the cost model. Replace those that your own runs contradict.

    The metadata of each field names the source of its default. One set of constants holds for
    every device, model and configuration. Unless stated otherwise, an efficiency is a share of the
    dense peak in the data sheet.

    Args:
        master_bytes: Bytes of the float32 copy of one weight.
        half_bytes: Bytes of one bf16 weight or activation.
        logit_bytes: Bytes of one logit in bf16, with its float32 copy, softmax and gradient.
        eager_logit_bytes: The same if the loss is computed with eager kernels.
        shared_loss_bytes: Additional bytes of one logit if the loss is split over ``tp``.
        fused_loss_tokens: Number of tokens per chunk of a fused loss.
        mask_bytes: Bytes of the masks of two dropouts for one element.
        score_bytes: Bytes of one attention score, with softmax and dropout.
        fragmentation: Factor on memory for blocks that the caching allocator cannot use.
        eager_fragmentation: The same factor with eager kernels.
        gemm_efficiency: Efficiency of large bf16 matrix products.
        fp8_efficiency: Efficiency of large fp8 matrix products.
        gemm_half_side: Side of square matrices whose product reaches half of the efficiency of
            large products.
        expert_half_side: The same for grouped products of experts, on a device with a peak of 1
            PFLOP/s. It is proportional to the peak, because starting and ending a tile takes a
            fixed time.
        attention_efficiency: Efficiency of native fused attention, forward and backward.
        flash2_tflops: Peak of FlashAttention-2 on devices newer than A100, in TFLOP/s.
        attention_half_chunk: Number of tokens per chunk for which attention reaches half of its
            efficiency.
        ring_efficiency: Factor on the speed of attention if ``cp`` splits the sequence.
        attention_backward: Operations of attention's backward, relative to its forward.
        score_passes: Passes over the bf16 scores of attention that is not fused.
        hbm_efficiency: Share of the memory bandwidth that elementwise kernels reach.
        eager_passes: Memory traffic of eager elementwise kernels, relative to fused ones.
        elementwise_backward: Traffic of elementwise backward kernels, relative to the forward.
        cast_bytes: Traffic in bytes of casting one weight to fp8.
        gather_copy_bytes: Traffic in bytes of copying one weight out of a gathered buffer.
        reduce_copy_bytes: Traffic in bytes of copying one gradient into the buffer to reduce.
        optimizer_bytes: Traffic in bytes of one AdamW step on one weight.
        loss_bytes: Traffic in bytes of the loss for one logit.
        merge_bytes: Traffic in bytes of merging two partial results of one attention output
            element.
        link_efficiency: Share of the link's bandwidth that collectives reach.
        overlap_cost: Share of the time of overlapped communication that is added to the time of the
            computation.
        tp_hidden: Share of tensor-parallel communication that overlaps with computation.
        ep_hidden: Share of expert-parallel communication that overlaps, without DualPipe.
        stage3_collectives: Number of collectives with which ZeRO stage 3 gathers, or reduces, one
            layer: one for each weight.
        layer_seconds: Host time of one layer with eager kernels, forward and backward, in seconds.
        eager_hop_seconds: Seconds per hop of a tensor-parallel collective of eager kernels if the
            pipeline stages are on several nodes. Measured, but not explained.
        fused_launches: Host time of one layer with fused kernels, as a share of ``layer_seconds``.
        retry_share: Share of the memory limit above which the caching allocator frees its cache and
            retries, with eager kernels.
        retry_slowdown: Factor on the time of a microbatch with such retries.
        expert_layer_seconds: Host time of routing in one layer with experts, in seconds.

    Raises:
        ParallelDimsError: A constant is not a finite number of at least 0.

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
        values = {constant.name: getattr(self, constant.name) for constant in fields(self)}
        raise_errors(amount_violations(values, zero=True))


CONSTANTS: Mapping[str, float] = MappingProxyType(
    {
        constant.name.upper(): getattr(Calibration(), constant.name)
        for constant in fields(Calibration)
    }
)
"""Values of all fields of the default `Calibration` by name, in capitals."""
