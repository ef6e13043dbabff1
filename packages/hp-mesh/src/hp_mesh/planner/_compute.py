"""Seconds of one layer on one device: matrix products, attention, elementwise kernels."""

from typing import NamedTuple

from ._cluster import Accelerator
from ._constants import (
    ATTENTION_BACKWARD,
    ATTENTION_EFFICIENCY,
    ATTENTION_HALF_CHUNK,
    CAST_BYTES,
    ELEMENTWISE_BACKWARD,
    FP8_EFFICIENCY,
    GEMM_EFFICIENCY,
    GEMM_HALF_SIDE,
    HALF_BYTES,
    HBM_EFFICIENCY,
    LOSS_BYTES,
    MERGE_BYTES,
    RING_EFFICIENCY,
    SCORE_PASSES,
)
from ._point import Point
from ._shape import ModelShape
from ._train import Recompute, TrainSpec


class Work(NamedTuple):
    """Seconds of a forward and of the backward after it, recomputation included.

    ``attention`` is the part of the attention core in one forward, behind which parts of the
    sequence travel.
    """

    forward: float
    backward: float
    attention: float


class ComputeModel:
    """The time of a model's layers on an accelerator: a roofline for each kind of kernel.

    Williams et al., Roofline, 2009: the larger of operations over reachable rate and bytes over
    reachable bandwidth.
    """

    def __init__(self, model: ModelShape, chip: Accelerator, train: TrainSpec) -> None:
        self._model, self._train = model, train
        self._bandwidth = chip.hbm_gbs * 1e9 * HBM_EFFICIENCY
        self._half_rate = chip.tflops * 1e12 * GEMM_EFFICIENCY
        self._attention_rate = chip.tflops * 1e12 * ATTENTION_EFFICIENCY
        self._linear_rate = self._half_rate
        if train.float8:
            self._linear_rate = chip.tflops_fp8 * 1e12 * FP8_EFFICIENCY

    def layer(self, point: Point, micro_batch: int, recompute: Recompute, *, experts: bool) -> Work:
        """Return the seconds of one microbatch in one layer, with experts or without."""
        model = self._model
        hidden, query, kv, tp = model.hidden, model.query_width, model.kv_width, point.tp
        tokens = micro_batch * self._train.seq_len / point.cp
        width = model.shared_ffn if experts else model.ffn
        inputs = model.matrices - 1
        # The products whose outputs `selective-op` keeps are the first of each of these pairs.
        saved = self._linear(tokens, query / tp, hidden) + self._linear(tokens, kv / tp, hidden)
        again = self._linear(tokens, kv / tp, hidden) + self._linear(tokens, hidden, query / tp)
        if width:
            up = self._linear(tokens, width / tp, hidden)
            down = self._linear(tokens, hidden, width / tp)
            saved += up + (down if model.glu else 0.0)
            again += up if model.glu else down
        if experts:
            again += self._routed(point, tokens, inputs)
        core, merge = self._attention(point, micro_batch, tokens)
        moved = self._elementwise(point, tokens, width, experts=experts) / self._bandwidth
        if self._train.float8:
            weights = model.shared_layer_parameters if experts else model.dense_layer_parameters
            moved += CAST_BYTES * weights / tp / self._bandwidth
        linear = saved + again
        forward = linear + core + merge + moved
        backward = 2 * linear + ATTENTION_BACKWARD * core + merge + ELEMENTWISE_BACKWARD * moved
        if recompute == "full":
            backward += forward
        elif recompute == "selective-op":
            backward += again + moved
        elif recompute == "selective" and not self._train.fused:
            backward += core
        return Work(forward, backward, core)

    def head(self, point: Point, micro_batch: int) -> float:
        """Return the seconds of the output matrix and the loss, forward and backward, in bf16."""
        tokens = micro_batch * self._train.seq_len / point.cp
        vocab = self._model.vocab / point.tp
        product = self._product(tokens, vocab, self._model.hidden, self._half_rate)
        return 3 * product + LOSS_BYTES * tokens * vocab / self._bandwidth

    def _linear(self, rows: float, columns: float, inner: float) -> float:
        return self._product(rows, columns, inner, self._linear_rate)

    def _product(self, rows: float, columns: float, inner: float, rate: float) -> float:
        """Return the seconds of one matrix product; short sides reach less of the rate."""
        efficiency = rows / (rows + GEMM_HALF_SIDE)
        efficiency *= columns / (columns + GEMM_HALF_SIDE)
        efficiency *= inner / (inner + GEMM_HALF_SIDE)
        moved = HALF_BYTES * (rows * inner + inner * columns + rows * columns)
        return max(2 * rows * columns * inner / (rate * efficiency), moved / self._bandwidth)

    def _routed(self, point: Point, tokens: float, inputs: int) -> float:
        """Return the seconds of a rank's experts, which get equally many rows each."""
        model = self._model
        rows = tokens * model.top_k / (point.tp if point.etp == 1 else 1)
        each = rows * point.ep / model.experts
        width = model.expert_width / point.etp
        one = inputs * self._linear(each, width, model.hidden)
        one += self._linear(each, model.hidden, width)
        return model.experts / point.ep * one

    def _attention(self, point: Point, micro_batch: int, tokens: float) -> tuple[float, float]:
        """Return the seconds of a forward of the attention core, and of merging its parts."""
        query, seq_len = self._model.query_width / point.tp, self._train.seq_len
        if not self._train.fused:
            # Whole score matrices, of which a causal mask uses half.
            core = 4 * tokens * seq_len * query / self._half_rate
            scores = self._model.heads / point.tp * seq_len * tokens
            return core + SCORE_PASSES * HALF_BYTES * scores / self._bandwidth, 0.0
        ring = point.ring
        chunk = seq_len / (2 * ring) if ring > 1 else seq_len
        efficiency = chunk / (chunk + ATTENTION_HALF_CHUNK)
        efficiency *= RING_EFFICIENCY if ring > 1 else 1.0
        core = 2 * tokens * seq_len * query / (self._attention_rate * efficiency)
        parts = ring if ring > 1 else 0
        return core, parts * MERGE_BYTES * tokens * query / self._bandwidth

    def _elementwise(self, point: Point, tokens: float, width: int, *, experts: bool) -> float:
        """Return the bytes that norms, residuals, rotary positions and activations move."""
        model = self._model
        stream = 10 * model.hidden + 2 * (model.query_width + model.kv_width)
        moved = stream + model.matrices * width
        if experts:
            # Rows are permuted for the exchange, and back, and weighted.
            moved += model.top_k * (model.matrices * model.expert_width + 6 * model.hidden)
        if self._train.float8:
            # The inputs of the products are read for their scale and cast.
            moved += 2 * (2 * model.hidden + model.query_width + width)
        return HALF_BYTES * moved * tokens / point.tp
