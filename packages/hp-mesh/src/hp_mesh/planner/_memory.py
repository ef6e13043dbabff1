"""Bytes on the rank that needs most: states, activations, logits and buffers."""

from math import ceil
from typing import NamedTuple

from ._constants import (
    FRAGMENTATION,
    GRADIENT_BYTES,
    HALF_BYTES,
    LOGIT_BYTES,
    MASK_BYTES,
    MASTER_BYTES,
    MOMENT_BYTES,
    SCORE_BYTES,
    SHARED_LOSS_BYTES,
)
from ._point import Point
from ._result import MemorySplit
from ._shape import ModelShape
from ._train import Recompute, TrainSpec


class Rank(NamedTuple):
    """What the first or the last pipeline rank holds, by what it grows with.

    ``layers`` and ``expert_layers`` count its layers, ``owned`` its own parameters. ``gathered``
    are bytes of buffers and ``passing`` those that come and go beside them. ``rows`` are the bytes
    of buffers for each token of a microbatch, ``outputs`` those for each microbatch in flight too,
    and ``logits`` the logits of each token.
    """

    layers: int
    expert_layers: int
    owned: float
    gathered: float
    passing: float
    rows: float
    outputs: float
    logits: float


class MemoryModel:
    """The memory of a model's training, for any degrees.

    States follow ZeRO stage 3 (arXiv 1910.02054, section 5): float32 weights, gradients and AdamW
    moments over ``fsdp`` for dense parameters and ``efsdp`` for experts. Activations follow arXiv
    2205.05198, sections 4 and 5, with sequence parallelism, for gated layers and grouped queries
    too; ``fused`` kernels keep less, and there are no masks of dropout then.
    """

    def __init__(self, model: ModelShape, train: TrainSpec) -> None:
        self._model, self._train = model, train
        self._kept: dict[tuple[object, ...], tuple[float, float]] = {}
        self._dense_layer = model.dense_layer_parameters
        self._shared_layer = model.shared_layer_parameters
        self._experts = model.experts * model.one_expert_parameters if model.expert_layers else 0

    def ranks(self, point: Point) -> tuple[Rank, ...]:
        """Return the first and the last pipeline rank of a point, which may be one."""
        if point.pp == 1:
            return (self._rank(point, first=True, last=True),)
        return (
            self._rank(point, first=True, last=False),
            self._rank(point, first=False, last=True),
        )

    def split(
        self,
        point: Point,
        ranks: tuple[Rank, ...],
        micro_batch: int,
        microbatches: int,
        recompute: Recompute,
    ) -> MemorySplit:
        """Return the bytes on the rank, of a point's ``ranks``, that needs most."""
        splits = [self._split(point, rank, micro_batch, microbatches, recompute) for rank in ranks]
        return max(splits, key=lambda split: split.total)

    def _split(
        self, point: Point, rank: Rank, micro_batch: int, microbatches: int, recompute: Recompute
    ) -> MemorySplit:
        tokens = micro_batch * self._train.seq_len / point.cp
        in_flight = min(self._in_flight(point.pp, last=rank.logits > 0), microbatches)
        kept, working = self._activations(point, rank, recompute)
        logits = tokens * rank.logits * LOGIT_BYTES
        # The logits are gone when the first layer is computed again, and leave their place.
        again = max(0.0, tokens * working + rank.passing - logits)
        buffers = rank.gathered + tokens * (rank.rows + rank.outputs * in_flight)
        return MemorySplit(
            parameters=MASTER_BYTES * rank.owned,
            gradients=GRADIENT_BYTES * rank.owned,
            optimizer=MOMENT_BYTES * rank.owned,
            activations=FRAGMENTATION * (tokens * kept * in_flight + again),
            logits=FRAGMENTATION * logits,
            buffers=FRAGMENTATION * buffers,
        )

    def _rank(self, point: Point, *, first: bool, last: bool) -> Rank:
        model, tp, pp = self._model, point.tp, point.pp
        layers = ceil(model.layers / pp)
        expert_layers = min(layers, model.expert_layers)
        blocks = (layers - expert_layers) * self._dense_layer + expert_layers * self._shared_layer
        ends = (first + (last and not (first and model.tied))) * model.embedding_parameters / tp
        dense = blocks / tp + ends
        layer_experts = self._experts / (point.ep * point.etp)
        experts = expert_layers * layer_experts
        if pp == 1:
            # The block in use and the next one, and the ends, which stay for the whole step.
            wide = self._dense_layer if expert_layers < layers else self._shared_layer
            block = wide / tp + layer_experts
            gathered = HALF_BYTES * (2 * block + ends)
            sharded = wide / tp * (point.fsdp > 1) + layer_experts * (point.efsdp > 1)
            passing = (HALF_BYTES + GRADIENT_BYTES) * sharded
            outputs = 0.0
        else:
            # Gathering for every microbatch would cost more than keeping, and gradients are added
            # up before they are reduced. Outputs are kept until their gradients come back.
            sharded = dense * (point.fsdp > 1) + experts * (point.efsdp > 1)
            gathered = HALF_BYTES * (dense + experts) + GRADIENT_BYTES * sharded
            passing = 0.0
            outputs = HALF_BYTES * model.hidden / tp * self._train.virtual_stages
        rows, logits = 0.0, model.vocab / tp if last else 0.0
        if tp > 1:
            # Rows that a tensor-parallel group gathers, and their gradient before it is reduced.
            rows += 2 * HALF_BYTES * model.hidden + SHARED_LOSS_BYTES * logits
        if expert_layers:
            routed = model.top_k / (tp if point.etp == 1 else 1)
            rows += 4 * HALF_BYTES * routed * model.hidden
        owned = dense / point.fsdp + experts / point.efsdp
        return Rank(layers, expert_layers, owned, gathered, passing, rows, outputs, logits)

    def _in_flight(self, pp: int, *, last: bool) -> float:
        """Return of how many microbatches a rank holds activations (section 4.3 of the paper)."""
        rest = (pp - 1) / self._train.virtual_stages
        if self._train.schedule == "1f1b":
            return 1 if last else pp
        return pp - rest if last else pp + rest

    def _activations(self, point: Point, rank: Rank, recompute: Recompute) -> tuple[float, float]:
        """Return the bytes per token that all layers of a rank keep, and one more needs at work."""
        key = (point.tp, point.etp, rank.layers, rank.expert_layers, recompute)
        if key not in self._kept:
            kinds = (False, rank.layers - rank.expert_layers), (True, rank.expert_layers)
            kept = working = 0.0
            for experts, count in kinds:
                if count:
                    one = self._layer(recompute, point.tp, point.etp, experts=experts)
                    whole = self._layer("none", point.tp, point.etp, experts=experts)
                    kept += count * one
                    working = max(working, whole - one)
            self._kept[key] = kept, working
        return self._kept[key]

    def _layer(self, recompute: Recompute, tp: int, etp: int, *, experts: bool) -> float:
        """Return the bytes per token that one layer keeps on each tensor-parallel rank."""
        model = self._model
        hidden, query, kv = model.hidden, model.query_width, model.kv_width
        width = model.shared_ffn if experts else model.ffn
        if recompute == "full":
            return HALF_BYTES * hidden / tp
        rows = model.top_k if experts else 0
        # Rows of the exchange are whole where every tensor-parallel rank has a part of the expert.
        routed = rows * 2 * hidden / (tp if etp == 1 else 1)
        if recompute == "selective-op":
            # The layer's input, attention's output, and of the products query, value and the first
            # input matrix; a down projection's output goes into the next layer's input alone.
            kept = hidden + 2 * query + kv + width
            return HALF_BYTES * (kept / tp + routed)
        # What norms give to the products, and activations to the down projection, is kept too where
        # it is not computed again inside fused kernels.
        fused = self._train.fused
        wide = model.matrices - 1 if fused else model.matrices
        kept = (2 if fused else 4) * hidden + 2 * query + 2 * kv + wide * width
        kept += rows * wide * model.expert_width
        others = 0 if fused else MASK_BYTES * hidden
        if recompute == "none" and not fused:
            others += SCORE_BYTES * model.heads * self._train.seq_len
        return HALF_BYTES * (kept / tp + routed) + others / tp
