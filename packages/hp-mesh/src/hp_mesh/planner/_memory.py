"""Bytes on the rank that needs most: states, activations, logits and buffers."""

from math import ceil
from typing import NamedTuple

from ._calibration import Calibration
from ._model import ModelShape
from ._result import Degrees, Setting
from ._schedules import SCHEDULES
from ._train import Recompute, TrainSpec, Zero


class Rank(NamedTuple):
    """What the first or the last pipeline rank holds, by what it grows with.

    ``layers`` and ``expert_layers`` count its layers. ``parameters``, ``gradients`` and
    ``optimizer`` are bytes of states, ``gathered`` those of buffers and ``passing`` those that come
    and go beside them. ``rows`` are the bytes of buffers for each token of a microbatch,
    ``outputs`` those for each microbatch in flight too, ``received`` those for every microbatch of
    a step, and ``logits`` the logits of each token.
    """

    layers: int
    expert_layers: int
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
    """Return the layers of the pipeline rank that has most, and of the last one.

    The last also has the output matrix. Virtual stages have equally many layers; where those do not
    divide them, the first and the last have fewer, as Megatron-LM counts embedding and loss as
    layers. Without virtual stages the last rank has as many layers fewer as make the slowest rank
    fastest.
    """
    layers = model.layers
    if pp == 1:
        return layers, layers
    if virtual_stages > 1:
        each = ceil(layers / (pp * virtual_stages))
        missing = each * pp * virtual_stages - layers
        return each * virtual_stages, max(0, each * virtual_stages - ceil(missing / 2))
    head = model.embedding_parameters / model.layer_work
    fewest = ceil(layers / pp)
    last = layers - fewest * (pp - 1)
    best, slowest = (fewest, last), max(fewest, last + head)
    while slowest > fewest + 1 and last > 0:
        fewest += 1
        last = max(0, layers - fewest * (pp - 1))
        if max(fewest, last + head) < slowest:
            best, slowest = (fewest, last), max(fewest, last + head)
    return best[0], max(0, best[1])


class MemoryModel:
    """The memory of a model's training, for any degrees.

    States follow the stages of ZeRO (arXiv 1910.02054, section 5) over ``fsdp`` for dense
    parameters and ``efsdp`` for experts. Activations follow arXiv 2205.05198, sections 4 and 5,
    with sequence parallelism, for gated layers and grouped queries too; fused kernels keep less,
    and there are no masks of dropout then. Eager elementwise kernels keep what each of them gives,
    and one gathered input of tensor-parallel products in each layer (measured: nanotron).
    """

    def __init__(self, model: ModelShape, train: TrainSpec, calibration: Calibration) -> None:
        self._model, self._train, self._constants = model, train, calibration
        self._kept: dict[tuple[object, ...], tuple[float, float]] = {}
        self._stages: dict[tuple[int, int], tuple[int, int]] = {}
        self._ranks: dict[tuple[object, ...], tuple[Rank, ...]] = {}
        self._dense_layer = model.dense_layer_parameters
        self._shared_layer = model.shared_layer_parameters
        self._experts = model.experts * model.one_expert_parameters if model.expert_layers else 0
        self._eager = eager = train.fused == "attention"
        self._logit_bytes = calibration.eager_logit_bytes if eager else calibration.logit_bytes
        self._fragmentation = (
            calibration.eager_fragmentation if eager else calibration.fragmentation
        )
        self._shared_loss_bytes = 0.0 if eager else calibration.shared_loss_bytes
        self._logit_tokens = calibration.fused_loss_tokens if train.fused_loss else float("inf")

    def stage_layers(self, pp: int, virtual_stages: int) -> tuple[int, int]:
        """Return `stage_layers` of the model."""
        key = pp, virtual_stages
        if key not in self._stages:
            self._stages[key] = stage_layers(self._model, pp, virtual_stages)
        return self._stages[key]

    def ranks(self, degrees: Degrees, setting: Setting) -> tuple[Rank, ...]:
        """Return the first and the last pipeline rank of some degrees, which may be one."""
        pp, tp, ep, etp = degrees.pp, degrees.tp, degrees.ep, degrees.etp
        key = setting, pp, tp, ep, etp, degrees.fsdp, degrees.dp > 1
        if key not in self._ranks:
            ends = ((True, False), (False, True)) if pp > 1 else ((True, True),)
            self._ranks[key] = tuple(
                self._rank(degrees, setting, first=first, last=last) for first, last in ends
            )
        return self._ranks[key]

    def need(
        self,
        degrees: Degrees,
        ranks: tuple[Rank, ...],
        setting: Setting,
        micro_batch: int,
        microbatches: int,
        recompute: Recompute,
    ) -> tuple[float, ...]:
        """Return the bytes of every part on the rank, of the degrees' ``ranks``, that needs most.

        The parts are the fields of `MemorySplit`, in their order.
        """
        first = self._need(degrees, ranks[0], setting, micro_batch, microbatches, recompute)
        if len(ranks) == 1:
            return first
        last = self._need(degrees, ranks[1], setting, micro_batch, microbatches, recompute)
        return last if sum(last) > sum(first) else first

    def _need(
        self,
        degrees: Degrees,
        rank: Rank,
        setting: Setting,
        micro_batch: int,
        microbatches: int,
        recompute: Recompute,
    ) -> tuple[float, ...]:
        tokens, share = micro_batch * self._train.seq_len / degrees.cp, self._fragmentation
        in_flight = 1.0
        if degrees.pp > 1:
            schedule, stages = SCHEDULES[setting.schedule], setting.virtual_stages
            in_flight = schedule.in_flight(degrees.pp, stages, last=rank.logits > 0)
            in_flight = min(in_flight, microbatches)
        kept, working = self._activations(degrees, rank, recompute)
        logits = min(tokens, self._logit_tokens) * rank.logits * self._logit_bytes
        # The logits are gone when the first layer is computed again, and leave their place.
        again = max(0.0, tokens * working + rank.passing - logits)
        activations = share * (tokens * kept * in_flight + again)
        rows = rank.rows + rank.outputs * in_flight + rank.received * microbatches
        buffers = share * (rank.gathered + tokens * rows)
        states = rank.parameters, rank.gradients, rank.optimizer
        return (*states, activations, share * logits, buffers)

    def _rank(self, degrees: Degrees, setting: Setting, *, first: bool, last: bool) -> Rank:
        model, constants, tp, pp = self._model, self._constants, degrees.tp, degrees.pp
        half = constants.half_bytes
        most, fewest = self.stage_layers(pp, setting.virtual_stages)
        layers = fewest if last else most
        expert_layers = min(layers, model.expert_layers)
        blocks = (layers - expert_layers) * self._dense_layer + expert_layers * self._shared_layer
        ends = (first + (last and not (first and model.tied))) * model.embedding_parameters / tp
        dense = blocks / tp + ends
        layer_experts = self._experts / (degrees.ep * degrees.etp)
        experts = expert_layers * layer_experts
        # The block in use and the next one, and the ends, which stay for the whole step.
        wide = self._dense_layer if expert_layers < layers else self._shared_layer
        block = wide / tp + layer_experts
        sharded_block = wide / tp * (degrees.fsdp > 1) + layer_experts * (degrees.efsdp > 1)
        sharded = dense * (degrees.fsdp > 1) + experts * (degrees.efsdp > 1)
        owned, whole = dense / degrees.fsdp + experts / degrees.efsdp, dense + experts
        parameters, gradients, optimizer, gathered, passing = self._states(
            setting.zero, pp, owned, whole, sharded, block, sharded_block, ends
        )
        if self._eager and degrees.dp > 1:
            # bf16 gradients to reduce, beside the sums of the step.
            gathered += half * whole
        if pp > 1:
            parameters += (SCHEDULES[setting.schedule].weight_copies - 1) * half * whole
        outputs = received = 0.0
        if pp > 1:
            # Outputs are kept until their gradients come back.
            outputs = half * model.hidden / tp * setting.virtual_stages
            if self._train.receive_buffers == "all":
                # Forward and backward (`_RecvInfo` in the stage.py of torch's pipelining). Neither
                # end receives both, but the second rank does, which has little less than the first.
                received = outputs * (2 - (last or pp == 2) / setting.virtual_stages)
        rows, logits = 0.0, model.vocab / tp if last else 0.0
        if tp > 1:
            # Rows that a tensor-parallel group gathers, and their gradient before it is reduced.
            rows += 2 * half * model.hidden
            if self._logit_tokens == float("inf"):
                rows += self._shared_loss_bytes * logits
        if expert_layers:
            routed = model.top_k / (tp if degrees.etp == 1 else 1)
            rows += 4 * half * routed * model.hidden
        return Rank(
            layers, expert_layers, parameters, gradients, optimizer, gathered, passing, rows,
            outputs, received, logits,
        )  # fmt: skip

    def _states(
        self,
        zero: Zero,
        pp: int,
        owned: float,
        whole: float,
        sharded: float,
        block: float,
        sharded_block: float,
        ends: float,
    ) -> tuple[float, float, float, float, float]:
        """Return the bytes of parameters, gradients, optimizer, gathered and passing buffers.

        ``owned`` of the ``whole`` parameters of a rank are its shard; ``sharded`` are those of
        which other ranks have a part.
        """
        half, master = self._constants.half_bytes, self._constants.master_bytes
        gradient, moments = self._train.gradient_bytes, self._train.moment_bytes
        if zero is None and pp > 1:
            # Gathering for every microbatch would cost more than keeping, and gradients are added
            # up before they are reduced.
            kept = half * whole + gradient * sharded
            return master * owned, gradient * owned, moments * owned, kept, 0.0
        if zero in (None, 3):
            gathered = half * (2 * block + ends)
            passing = (half + gradient) * sharded_block
            return master * owned, gradient * owned, moments * owned, gathered, passing
        if zero == 2:
            parameters = half * whole + master * owned
            passing = gradient * sharded_block
            return parameters, gradient * owned, moments * owned, 0.0, passing
        share = owned if zero == 1 else whole
        parameters = half * whole + master * share
        return parameters, gradient * whole, moments * share, 0.0, 0.0

    def _activations(
        self, degrees: Degrees, rank: Rank, recompute: Recompute
    ) -> tuple[float, float]:
        """Return the bytes per token that all layers of a rank keep, and one more needs at work."""
        key = (degrees.tp, degrees.etp, rank.layers, rank.expert_layers, recompute)
        if key not in self._kept:
            kinds = (False, rank.layers - rank.expert_layers), (True, rank.expert_layers)
            again = self._train.recompute_layers
            share = 1.0 if again is None else min(1.0, again / max(1, rank.layers))
            kept = working = 0.0
            for experts, count in kinds:
                if count:
                    one = self._layer(recompute, degrees.tp, degrees.etp, experts=experts)
                    whole = self._layer("none", degrees.tp, degrees.etp, experts=experts)
                    kept += count * (share * one + (1 - share) * whole)
                    working = max(working, whole - one)
            self._kept[key] = kept, working
        return self._kept[key]

    def _layer(self, recompute: Recompute, tp: int, etp: int, *, experts: bool) -> float:
        """Return the bytes per token that one layer keeps on each tensor-parallel rank."""
        model, constants, fused = self._model, self._constants, self._train.fused
        hidden, attention = model.hidden, model.attention_width
        half = constants.half_bytes
        width = model.shared_ffn if experts else model.ffn
        if recompute == "full":
            return half * hidden / tp
        rows = model.top_k if experts else 0
        # Rows of the exchange are whole where every tensor-parallel rank has a part of the expert.
        routed = rows * 2 * hidden / (tp if etp == 1 else 1)
        if recompute == "selective-op":
            # The layer's input, attention's output, and of the products query, value and the first
            # input matrix; a down projection's output goes into the next layer's input alone.
            products = model.latents or attention / 2
            kept = hidden + model.query_width + products + width
            return half * (kept / tp + routed)
        if fused == "attention":
            # Inputs and outputs of norms, rotary embedding, activation and product.
            inputs = model.matrices - 1
            kept = 3 * hidden + 1.5 * attention + (inputs + 2) * width
            kept += rows * (inputs + 2) * model.expert_width
            return half * (kept / tp + hidden + routed)
        # What norms give to the products, and activations to the down projection, is kept too where
        # it is not computed again inside fused kernels.
        wide = model.matrices - 1 if fused else model.matrices
        kept = (2 if fused else 4) * hidden + attention + wide * width
        kept += rows * wide * model.expert_width
        others = 0.0 if fused else constants.mask_bytes * hidden
        if recompute == "none" and not fused:
            others += constants.score_bytes * model.heads * self._train.seq_len
        return half * (kept / tp + routed) + others / tp
