"""Estimated memory of the rank that needs most: states, activations, logits and buffers.

States are the parameters, the gradients and the optimizer state. All sizes are in bytes.
"""

from collections.abc import Mapping
from functools import cache, partial
from math import ceil
from typing import NamedTuple

from ._calibration import Calibration
from ._configuration import Degrees, Point, Setting
from ._schedules import SCHEDULES
from ._shape import ModelShape
from ._train import RECOMPUTE, Recompute, TrainSpec


class RankMemory(NamedTuple):
    """Memory of the first or the last pipeline rank, for any microbatch size.

    Attributes:
        layers: Number of layers on the rank.
        in_flight: Largest number of microbatches whose activations are saved at the same time.
        activations: For each kind of recomputation, two numbers of bytes per token of a microbatch:
            activations that all layers save in forward, and additional activations while backward
            recomputes one layer.
        parameters: Bytes of parameters.
        gradients: Bytes of gradients.
        optimizer: Bytes of optimizer state.
        gathered: Bytes of unsharded parameters and gradients that exist during the whole step.
        passing: Bytes of unsharded parameters and gradients of the layer that is being computed.
        rows: Bytes of communication buffers, per token of a microbatch.
        outputs: Bytes of saved stage outputs, per token of each microbatch in flight.
        received: Bytes of receive buffers, per token of every microbatch of the step.
        logits: Number of logits per token; 0 on a rank without the output matrix.
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
    """Return two numbers of layers: of the largest pipeline rank, and of the last one.

    The last rank has fewer layers because it also has the output matrix.

    - With one stage per rank, the numbers are chosen so that the slowest rank takes the least time.
    - With several virtual stages per rank, all stages have the same number of layers if possible.
      Otherwise the first and the last stage have fewer. Megatron-LM does the same if it counts the
      embedding and the loss as layers.
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
    """Estimates the memory of training one model, for any configuration.

    | content | source |
    |---|---|
    | states | ZeRO stages (arXiv 1910.02054, section 5); ``fsdp`` or ``efsdp`` shards them |
    | activations | arXiv 2205.05198, sections 4 and 5, with sequence parallelism |
    | eager elementwise kernels | measured with nanotron |

    The formulas for activations are extended to gated feed-forward layers and grouped-query
    attention. Fused kernels save fewer activations and have no dropout masks. Eager elementwise
    kernels save all their outputs, and one gathered input of a tensor-parallel matrix product in
    each layer.
    """

    def __init__(self, model: ModelShape, train: TrainSpec, calibration: Calibration) -> None:
        self._model, self._train, self._constants = model, train, calibration
        self._stage_layers = cache(partial(stage_layers, model))
        self._saved: dict[tuple[int, ...], Mapping[Recompute, tuple[float, float]]] = {}
        self._ranks: dict[tuple[object, ...], tuple[RankMemory, ...]] = {}
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

    def ranks(self, degrees: Degrees, setting: Setting) -> tuple[RankMemory, ...]:
        """Return the memory of the first and the last pipeline rank; of one rank if ``pp`` is 1."""
        pp, tp, ep, etp = degrees.pp, degrees.tp, degrees.ep, degrees.etp
        key = setting, pp, tp, ep, etp, degrees.fsdp, degrees.dp > 1
        if key not in self._ranks:
            ends = ((True, False), (False, True)) if pp > 1 else ((True, True),)
            self._ranks[key] = tuple(
                self._rank(degrees, setting, first=first, last=last) for first, last in ends
            )
        return self._ranks[key]

    def need(self, point: Point, ranks: tuple[RankMemory, ...]) -> tuple[float, ...]:
        """Return the memory of the rank that needs most, in bytes, by content.

        Args:
            point: Configuration.
            ranks: Result of the method `ranks` for the configuration.

        Returns:
            One number for each field of `MemorySplit`, in the same order.
        """
        tokens = point.micro_batch * self._train.seq_len / point.degrees.cp
        first = self._need(point, ranks[0], tokens)
        if len(ranks) == 1:
            return first
        last = self._need(point, ranks[1], tokens)
        return last if sum(last) > sum(first) else first

    def _need(self, point: Point, rank: RankMemory, tokens: float) -> tuple[float, ...]:
        factor, in_flight = self._fragmentation, min(rank.in_flight, point.microbatches)
        saved, working = rank.activations[point.recompute]
        logits = min(tokens, self._logit_tokens) * rank.logits * self._logit_bytes
        # The logits are freed before backward recomputes a layer, so both can use the same memory.
        again = max(0.0, tokens * working + rank.passing - logits)
        activations = factor * (tokens * saved * in_flight + again)
        rows = rank.rows + rank.outputs * in_flight + rank.received * point.microbatches
        buffers = factor * (rank.gathered + tokens * rows)
        states = rank.parameters, rank.gradients, rank.optimizer
        return (*states, activations, factor * logits, buffers)

    def _rank(self, degrees: Degrees, setting: Setting, *, first: bool, last: bool) -> RankMemory:
        model, pp, tp, zero = self._model, degrees.pp, degrees.tp, setting.zero
        half, master = self._constants.half_bytes, self._constants.master_bytes
        gradient, moments = self._train.gradient_bytes, self._train.moment_bytes
        layers = self._stage_layers(pp, setting.virtual_stages)[last]
        expert_layers = min(layers, model.expert_layers)
        # Numbers of parameters. `ends`: embedding and output matrix. `whole`: all of the pipeline
        # rank before sharding. `owned`: after sharding. `layer`: the largest layer. `sharded`,
        # `sharded_layer`: the part that is sharded over more than one rank.
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
            # FSDP gathers and reduces once per step, so everything stays unsharded in between.
            gathered = half * whole + gradient * sharded
        elif zero in (None, 3):
            # Unsharded parameters of the current layer, the prefetched layer and the ends.
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
            # A bf16 copy of the gradients is reduced, in addition to the accumulated gradients.
            gathered += half * whole
        if pp > 1:
            parameters += (SCHEDULES[setting.schedule].weight_copies - 1) * half * whole
        in_flight, outputs, received = self._pipeline_buffers(degrees, setting, last=last)
        rows, logits = 0.0, model.vocab / tp if last else 0.0
        if tp > 1:
            # Inputs that are gathered over tp, and their gradients before the reduce-scatter.
            rows += 2 * half * model.hidden
            if self._logit_tokens == float("inf"):
                rows += self._shared_loss_bytes * logits
        if expert_layers:
            routed = model.top_k / (tp if degrees.etp == 1 else 1)
            rows += 4 * half * routed * model.hidden
        return RankMemory(
            layers, in_flight, self._activations(degrees, layers, expert_layers), parameters,
            gradients, optimizer, gathered, passing, rows, outputs, received, logits,
        )  # fmt: skip

    def _pipeline_buffers(
        self, degrees: Degrees, setting: Setting, *, last: bool
    ) -> tuple[float, float, float]:
        """Return `in_flight`, `outputs` and `received` of `RankMemory`, in this order."""
        pp, stages = degrees.pp, setting.virtual_stages
        if pp == 1:
            return 1.0, 0.0, 0.0
        in_flight = SCHEDULES[setting.schedule].in_flight(pp, stages, last=last)
        # Outputs are saved until their gradients arrive.
        outputs = self._constants.half_bytes * self._model.hidden / degrees.tp * stages
        if self._train.receive_buffers != "all":
            return in_flight, outputs, 0.0
        # Buffers for inputs and for output gradients (`_RecvInfo` in the stage.py of
        # torch.distributed.pipelining). The first rank counts like the second, which receives both
        # and needs almost as much other memory.
        return in_flight, outputs, outputs * (2 - (last or pp == 2) / stages)

    def _activations(
        self, degrees: Degrees, layers: int, expert_layers: int
    ) -> Mapping[Recompute, tuple[float, float]]:
        """Return the field `activations` of `RankMemory`, for a rank with ``layers`` layers.

        ``expert_layers`` is the number of layers with experts among them.
        """
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
        """Return the activations that one layer saves on each rank, in bytes per token."""
        model, constants, fused = self._model, self._constants, self._train.fused
        hidden, attention = model.hidden, model.attention_width
        half = constants.half_bytes
        width = model.shared_ffn if experts else model.ffn
        if recompute == "full":
            return half * hidden / tp
        rows = model.top_k if experts else 0
        # If tp splits the experts, every tensor-parallel rank has all dispatched tokens.
        routed = rows * 2 * hidden / (tp if etp == 1 else 1)
        if recompute == "selective-op":
            # Saved are the layer's input, the attention output, the queries and values, and the
            # output of the first feed-forward matrix. The output of the last feed-forward matrix is
            # not saved separately, because it is a part of the next layer's input.
            products = model.latents or attention / 2
            saved = hidden + model.query_width + products + width
            return half * (saved / tp + routed)
        if fused == "attention":
            # Inputs and outputs of norms, rotary embeddings, activations and the gate's product.
            inputs = model.matrices - 1
            saved = 3 * hidden + 1.5 * attention + (inputs + 2) * width
            saved += rows * (inputs + 2) * model.expert_width
            return half * (saved / tp + hidden + routed)
        # Unfused kernels also save the outputs of norms and activations.
        wide = model.matrices - 1 if fused else model.matrices
        saved = (2 if fused else 4) * hidden + attention + wide * width
        saved += rows * wide * model.expert_width
        others = 0.0 if fused else constants.mask_bytes * hidden
        if recompute == "none" and not fused:
            others += constants.score_bytes * model.heads * self._train.seq_len
        return half * (saved / tp + routed) + others / tp
