"""Bytes on the rank that needs most memory: states, activations, logits and buffers."""

from collections.abc import Mapping
from functools import cache, partial
from math import ceil
from typing import NamedTuple

from ._calibration import Calibration
from ._configuration import Degrees, Point, Setting
from ._schedules import SCHEDULES
from ._shape import ModelShape
from ._train import RECOMPUTE, Recompute, TrainSpec


class Rank(NamedTuple):
    """Memory of the first or the last pipeline rank.

    Attributes:
        layers: Number of its layers.
        in_flight: Number of microbatches for which the rank holds activations.
        activations: For each kind of recomputation, bytes per token that all layers save, and that
            recomputing one layer needs in addition.
        parameters: Bytes of parameters.
        gradients: Bytes of gradients.
        optimizer: Bytes of optimizer state.
        gathered: Bytes of unsharded parameters and gradients that stay during the step.
        passing: Bytes of unsharded parameters and gradients of the layer in use.
        rows: Bytes of buffers per token of a microbatch.
        outputs: Bytes of stage outputs per token of each microbatch in flight.
        received: Bytes of receive buffers per token of each microbatch of a step.
        logits: Number of logits per token.
    """

    layers: int
    in_flight: float
    activations: Mapping[Recompute, tuple[float, float]]
    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    passing: float
    rows: float
    outputs: float
    received: float
    logits: float


def stage_layers(model: ModelShape, pp: int, virtual_stages: int) -> tuple[int, int]:
    """Return the number of layers of the largest and of the last pipeline rank.

    The last rank also has the output matrix. Virtual stages have equally many layers. If that is
    not possible, the first and the last stage have fewer, as in Megatron-LM, which counts embedding
    and loss as layers. Without virtual stages, the last rank has as many layers fewer as make the
    slowest rank fastest.
    """
    layers = model.layers
    if pp == 1:
        return layers, layers
    if virtual_stages > 1:
        each = ceil(layers / (pp * virtual_stages))
        missing = each * pp * virtual_stages - layers
        return each * virtual_stages, max(0, each * virtual_stages - ceil(missing / 2))
    head = model.embedding_parameters / model.layer_work
    most = ceil(layers / pp)
    last = layers - most * (pp - 1)
    best, slowest = (most, last), max(most, last + head)
    while slowest > most + 1 and last > 0:
        most += 1
        last = max(0, layers - most * (pp - 1))
        if max(most, last + head) < slowest:
            best, slowest = (most, last), max(most, last + head)
    return best[0], max(0, best[1])


class MemoryModel:
    """Memory of training one model, for any configuration.

    States follow the stages of ZeRO (arXiv 1910.02054, section 5): dense parameters are sharded
    over ``fsdp``, experts over ``efsdp``. Activations follow arXiv 2205.05198, sections 4 and 5,
    with sequence parallelism, extended to gated layers and grouped queries. Fused kernels save
    fewer activations and have no dropout masks. Eager elementwise kernels save all their outputs,
    and one gathered input of tensor-parallel products per layer (measured: nanotron).
    """

    def __init__(self, model: ModelShape, train: TrainSpec, calibration: Calibration) -> None:
        self._model, self._train, self._constants = model, train, calibration
        self._stage_layers = cache(partial(stage_layers, model))
        self._saved: dict[tuple[int, ...], Mapping[Recompute, tuple[float, float]]] = {}
        self._ranks: dict[tuple[object, ...], tuple[Rank, ...]] = {}
        self._dense_layer = model.dense_layer_parameters
        self._shared_layer = model.shared_layer_parameters
        self._experts = model.experts * model.one_expert_parameters if model.expert_layers else 0
        self._eager = train.fused == "attention"
        self._logit_bytes, self._fragmentation, self._shared_loss_bytes = (
            (calibration.eager_logit_bytes, calibration.eager_fragmentation, 0.0)
            if self._eager
            else (calibration.logit_bytes, calibration.fragmentation, calibration.shared_loss_bytes)
        )
        self._logit_tokens = calibration.fused_loss_tokens if train.fused_loss else float("inf")

    def ranks(self, degrees: Degrees, setting: Setting) -> tuple[Rank, ...]:
        """Return the first and the last pipeline rank, or the only one."""
        pp, tp, ep, etp = degrees.pp, degrees.tp, degrees.ep, degrees.etp
        key = setting, pp, tp, ep, etp, degrees.fsdp, degrees.dp > 1
        if key not in self._ranks:
            ends = ((True, False), (False, True)) if pp > 1 else ((True, True),)
            self._ranks[key] = tuple(
                self._rank(degrees, setting, first=first, last=last) for first, last in ends
            )
        return self._ranks[key]

    def need(self, point: Point, ranks: tuple[Rank, ...]) -> tuple[float, ...]:
        """Return the bytes on the rank that needs most, in the order of `MemorySplit`'s fields."""
        tokens = point.micro_batch * self._train.seq_len / point.degrees.cp
        first = self._need(point, ranks[0], tokens)
        if len(ranks) == 1:
            return first
        last = self._need(point, ranks[1], tokens)
        return last if sum(last) > sum(first) else first

    def _need(self, point: Point, rank: Rank, tokens: float) -> tuple[float, ...]:
        factor, in_flight = self._fragmentation, min(rank.in_flight, point.microbatches)
        saved, working = rank.activations[point.recompute]
        logits = min(tokens, self._logit_tokens) * rank.logits * self._logit_bytes
        # Logits are freed before the first layer is recomputed, which can use their memory.
        again = max(0.0, tokens * working + rank.passing - logits)
        activations = factor * (tokens * saved * in_flight + again)
        rows = rank.rows + rank.outputs * in_flight + rank.received * point.microbatches
        buffers = factor * (rank.gathered + tokens * rows)
        states = rank.parameters, rank.gradients, rank.optimizer
        return (*states, activations, factor * logits, buffers)

    def _rank(self, degrees: Degrees, setting: Setting, *, first: bool, last: bool) -> Rank:
        model, pp, tp, zero = self._model, degrees.pp, degrees.tp, setting.zero
        half, master = self._constants.half_bytes, self._constants.master_bytes
        gradient, moments = self._train.gradient_bytes, self._train.moment_bytes
        layers = self._stage_layers(pp, setting.virtual_stages)[last]
        expert_layers = min(layers, model.expert_layers)
        # Numbers of parameters of the rank, of its widest layer, and of those that are sharded.
        blocks = (layers - expert_layers) * self._dense_layer + expert_layers * self._shared_layer
        ends = (first + (last and not (first and model.tied))) * model.embedding_parameters / tp
        dense = blocks / tp + ends
        layer_experts = self._experts / (degrees.ep * degrees.etp)
        experts = expert_layers * layer_experts
        whole, owned = dense + experts, dense / degrees.fsdp + experts / degrees.efsdp
        sharded = dense * (degrees.fsdp > 1) + experts * (degrees.efsdp > 1)
        layer = (self._dense_layer if expert_layers < layers else self._shared_layer) / tp
        sharded_layer = layer * (degrees.fsdp > 1) + layer_experts * (degrees.efsdp > 1)
        layer += layer_experts

        parameters, gradients, optimizer = master * owned, gradient * owned, moments * owned
        gathered = passing = 0.0
        if zero is None and pp > 1:
            # Parameters and gradients stay unsharded, to gather and reduce them once per step.
            gathered = half * whole + gradient * sharded
        elif zero in (None, 3):
            # The layer in use, the next one and the ends.
            gathered = half * (2 * layer + ends)
            passing = (half + gradient) * sharded_layer
        elif zero == 2:
            parameters += half * whole
            passing = gradient * sharded_layer
        else:
            share = owned if zero == 1 else whole
            parameters = half * whole + master * share
            gradients, optimizer = gradient * whole, moments * share
        if self._eager and degrees.dp > 1:
            # bf16 gradients to reduce, in addition to the accumulated ones.
            gathered += half * whole
        if pp > 1:
            parameters += (SCHEDULES[setting.schedule].weight_copies - 1) * half * whole
        in_flight, outputs, received = self._pipeline_buffers(degrees, setting, last=last)
        rows, logits = 0.0, model.vocab / tp if last else 0.0
        if tp > 1:
            # Gathered rows of a tensor-parallel group, and their gradient before its reduction.
            rows += 2 * half * model.hidden
            if self._logit_tokens == float("inf"):
                rows += self._shared_loss_bytes * logits
        if expert_layers:
            routed = model.top_k / (tp if degrees.etp == 1 else 1)
            rows += 4 * half * routed * model.hidden
        return Rank(
            layers, in_flight, self._activations(degrees, layers, expert_layers), parameters,
            gradients, optimizer, gathered, passing, rows, outputs, received, logits,
        )  # fmt: skip

    def _pipeline_buffers(
        self, degrees: Degrees, setting: Setting, *, last: bool
    ) -> tuple[float, float, float]:
        """Return `Rank.in_flight`, `Rank.outputs` and `Rank.received`."""
        pp, stages = degrees.pp, setting.virtual_stages
        if pp == 1:
            return 1.0, 0.0, 0.0
        in_flight = SCHEDULES[setting.schedule].in_flight(pp, stages, last=last)
        # Outputs are saved until their gradients arrive.
        outputs = self._constants.half_bytes * self._model.hidden / degrees.tp * stages
        if self._train.receive_buffers != "all":
            return in_flight, outputs, 0.0
        # Forward and backward (`_RecvInfo` in the stage.py of torch's pipelining). Neither end
        # receives both, but the second rank does, which has little less than the first.
        return in_flight, outputs, outputs * (2 - (last or pp == 2) / stages)

    def _activations(
        self, degrees: Degrees, layers: int, expert_layers: int
    ) -> Mapping[Recompute, tuple[float, float]]:
        """Return the saved and recomputed bytes per token of some layers: `Rank.activations`."""
        key = degrees.tp, degrees.etp, layers, expert_layers
        if key not in self._saved:
            again = self._train.recompute_layers
            share = 1.0 if again is None else min(1.0, again / max(1, layers))
            found: dict[Recompute, tuple[float, float]] = {}
            for recompute in RECOMPUTE:
                saved = working = 0.0
                for experts, count in (False, layers - expert_layers), (True, expert_layers):
                    if count:
                        one = self._layer(recompute, degrees.tp, degrees.etp, experts=experts)
                        whole = self._layer("none", degrees.tp, degrees.etp, experts=experts)
                        saved += count * (share * one + (1 - share) * whole)
                        working = max(working, whole - one)
                found[recompute] = saved, working
            self._saved[key] = found
        return self._saved[key]

    def _layer(self, recompute: Recompute, tp: int, etp: int, *, experts: bool) -> float:
        """Return the bytes per token that one layer saves on each tensor-parallel rank."""
        model, constants, fused = self._model, self._constants, self._train.fused
        hidden, attention = model.hidden, model.attention_width
        half = constants.half_bytes
        width = model.shared_ffn if experts else model.ffn
        if recompute == "full":
            return half * hidden / tp
        rows = model.top_k if experts else 0
        # If tp splits the experts, every tensor-parallel rank has all dispatched rows.
        routed = rows * 2 * hidden / (tp if etp == 1 else 1)
        if recompute == "selective-op":
            # The layer's input, the attention output, and the products for queries, values and the
            # first input matrix. The down projection's output is only part of the next input.
            products = model.latents or attention / 2
            saved = hidden + model.query_width + products + width
            return half * (saved / tp + routed)
        if fused == "attention":
            # Inputs and outputs of norms, rotary embedding, activation and product.
            inputs = model.matrices - 1
            saved = 3 * hidden + 1.5 * attention + (inputs + 2) * width
            saved += rows * (inputs + 2) * model.expert_width
            return half * (saved / tp + hidden + routed)
        # Kernels that are not fused also save the outputs of norms and activations.
        wide = model.matrices - 1 if fused else model.matrices
        saved = (2 if fused else 4) * hidden + attention + wide * width
        saved += rows * wide * model.expert_width
        others = 0.0 if fused else constants.mask_bytes * hidden
        if recompute == "none" and not fused:
            others += constants.score_bytes * model.heads * self._train.seq_len
        return half * (saved / tp + routed) + others / tp
