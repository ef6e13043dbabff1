"""Estimated memory of the rank that needs most: states, activations, logits and buffers.

States are the parameters, the gradients and the optimizer state. All sizes are in bytes.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from ._calibration import Calibration
from ._configuration import Degrees, Point, Setting
from ._schedules import SCHEDULES
from ._shape import ModelShape
from ._train import RECOMPUTE, Recompute, TrainSpec


class RankMemory(NamedTuple):
    """Memory of a pipeline rank, the first or the last one, for any microbatch size.

    Bytes are of the whole rank, except the bytes per token. To get bytes of the rank, multiply
    these by the number of tokens of a microbatch on the rank, and by a number of microbatches:

    | attribute | number of microbatches |
    |---|---|
    | ``activations``, first number | microbatches in flight |
    | ``activations``, second number | 1 |
    | ``buffers`` | 1 |
    | ``outputs`` | microbatches in flight |
    | ``received`` | all microbatches of a step |

    Attributes:
        layers: Number of layers on the rank.
        in_flight: Largest number of microbatches in flight: microbatches with saved activations at
            the same time.
        activations: Two numbers of bytes per token for each kind of recomputation. The first number
            has the activations that all layers of the rank save in forward. The second number has
            the additional activations while backward recomputes one layer.
        parameters: Bytes of parameters.
        gradients: Bytes of gradients.
        optimizer: Bytes of optimizer state.
        gathered: Bytes of unsharded parameters and gradients that exist during the whole step.
        backward_layer: Bytes of unsharded parameters and gradients of the layer that backward
            computes. They are freed after the backward pass of the layer.
        buffers: Bytes per token of buffers for tensor-parallel and expert-parallel communication.
        outputs: Bytes per token of the outputs of pipeline stages, which are saved for backward.
        received: Bytes per token of the buffers in which a rank receives inputs and gradients from
            other pipeline ranks. 0 without pipeline stages, and with
            ``receive_buffers="in-flight"`` in `TrainSpec`.
        logits: Number of logits per token; 0 on a rank without the output matrix.
    """

    layers: int
    in_flight: float
    activations: Mapping[Recompute, tuple[float, float]]
    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    backward_layer: float
    buffers: float
    outputs: float
    received: float
    logits: float


@lru_cache(maxsize=4096)
def stage_layers(model: ModelShape, pp: int, virtual_stages: int) -> tuple[int, int]:
    """Return the largest number of layers on a pipeline rank, and the number on the last rank.

    The last rank also has the output matrix, so it may have fewer layers than the other ranks.

    - If ``virtual_stages`` is 1, the numbers minimize the time of the slowest rank.
    - If ``virtual_stages`` is above 1, all stages have the same number of layers if possible.
      Otherwise the first and the last stage have fewer layers. Megatron-LM does the same with its
      options to count the embedding and the loss as one layer each.
    - If ``pp`` is 1, both numbers are the number of layers of the model.
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
    """Estimates the memory of one rank for any configuration of a training run.

    | memory | source of the formula |
    |---|---|
    | parameters, gradients, optimizer state | ZeRO stages (arXiv 1910.02054, section 5) |
    | activations | arXiv 2205.05198, sections 4 and 5, with sequence parallelism |
    | activations of eager elementwise kernels | measurements with nanotron |

    - The class adds gated feed-forward layers and grouped-query attention to the formulas of the
      publication.
    - Fused kernels save fewer activations and have no dropout masks.
    - Eager elementwise kernels save all their outputs. Each layer also saves the all-gathered input
      of one tensor-parallel matrix product.

    Args:
        model: Shape of the model.
        train: Settings of the training run.
        calibration: Constants of the cost model.
    """

    def __init__(self, model: ModelShape, train: TrainSpec, calibration: Calibration) -> None:
        self._model, self._train, self._constants = model, train, calibration
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
        """Return one `RankMemory` for the first and one for the last pipeline rank.

        The tuple has only one `RankMemory` if ``pp`` is 1.
        """
        pp, tp, ep, etp = degrees.pp, degrees.tp, degrees.ep, degrees.etp
        key = setting, pp, tp, ep, etp, degrees.fsdp, degrees.dp > 1
        if key not in self._ranks:
            ends = ((True, False), (False, True)) if pp > 1 else ((True, True),)
            self._ranks[key] = tuple(
                self._rank(degrees, setting, first=first, last=last) for first, last in ends
            )
        return self._ranks[key]

    def need(self, point: Point, ranks: tuple[RankMemory, ...]) -> tuple[float, ...]:
        """Return the memory of the rank that needs most.

        Args:
            point: Configuration.
            ranks: Result of the method `ranks` for the configuration.

        Returns:
            Six numbers of bytes, in the order of the fields of `MemorySplit`: parameters,
            gradients, optimizer state, activations, logits and buffers.
        """
        tokens = point.tokens(self._train.seq_len)
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
        again = max(0.0, tokens * working + rank.backward_layer - logits)
        activations = factor * (tokens * saved * in_flight + again)
        per_token = rank.buffers + rank.outputs * in_flight + rank.received * point.microbatches
        buffers = factor * (rank.gathered + tokens * per_token)
        states = rank.parameters, rank.gradients, rank.optimizer
        return (*states, activations, factor * logits, buffers)

    def _rank(self, degrees: Degrees, setting: Setting, *, first: bool, last: bool) -> RankMemory:
        model, pp, tp, zero = self._model, degrees.pp, degrees.tp, setting.zero
        half, master = self._constants.half_bytes, self._constants.master_bytes
        gradient, moments = self._train.gradient_bytes, self._train.moment_bytes
        layers = stage_layers(self._model, pp, setting.virtual_stages)[last]
        expert_layers = min(layers, model.expert_layers)
        # Numbers of parameters. `ends`: embedding and output matrix. `whole`: all parameters of the
        # pipeline rank before sharding. `owned`: the parameters of one rank after sharding.
        # `layer`: the largest layer before sharding. `sharded`, `sharded_layer`: the parameters of
        # `whole` and of `layer` that are sharded over more than one rank.
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
        gathered = backward_layer = 0.0
        if zero is None and pp > 1:
            # FSDP all-gathers parameters and reduces gradients once per step. They are unsharded
            # from the start to the end of the step.
            gathered = half * whole + gradient * sharded
        elif zero in (None, 3):
            # Unsharded parameters of the current layer, the prefetched layer and the ends.
            gathered = half * (2 * layer + ends)
            backward_layer = (half + gradient) * sharded_layer
        elif zero == 2:
            parameters += half * whole
            backward_layer = gradient * sharded_layer
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
        buffers, logits = 0.0, model.vocab / tp if last else 0.0
        if tp > 1:
            # Inputs that are gathered over tp, and their gradients before the reduce-scatter.
            buffers += 2 * half * model.hidden
            if self._logit_tokens == float("inf"):
                buffers += self._shared_loss_bytes * logits
        if expert_layers:
            routed = model.top_k / (tp if degrees.etp == 1 else 1)
            buffers += 4 * half * routed * model.hidden
        return RankMemory(
            layers, in_flight, self._activations(degrees, layers, expert_layers), parameters,
            gradients, optimizer, gathered, backward_layer, buffers, outputs, received, logits,
        )  # fmt: skip

    def _pipeline_buffers(
        self, degrees: Degrees, setting: Setting, *, last: bool
    ) -> tuple[float, float, float]:
        """Return the fields ``in_flight``, ``outputs`` and ``received`` of `RankMemory`.

        They are the number of microbatches in flight, and the bytes per token of the saved outputs
        of stages and of the receive buffers. ``last`` is True for the last pipeline rank, and False
        for the first.
        """
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
        """Return `RankMemory.activations` for a pipeline rank with ``layers`` layers.

        ``expert_layers`` of the ``layers`` layers have experts.
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
        """Return the bytes per token that one layer saves on each rank in forward."""
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
