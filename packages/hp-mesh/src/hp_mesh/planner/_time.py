"""Estimated time of one optimizer step: computation, communication, bubble and optimizer.

All times are in seconds. Exposed communication is communication that does not overlap with
computation, so it makes the step longer. The bubble is the time that a pipeline rank waits for
other ranks. Collectives on parameters are the all-gathers of parameters, the reduce-scatters of
gradients, and the all-reduces of gradients over replicas.
"""

from collections.abc import Mapping
from math import log2
from typing import NamedTuple

from .._layout import AxisGroup
from ._calibration import Calibration
from ._cluster import Cluster, Links
from ._configuration import Degrees, Point
from ._memory import RankMemory
from ._schedules import SCHEDULES
from ._shape import ModelShape
from ._train import TrainSpec

# Mesh axes whose communication time `TimeModel.parts` returns, in its order.
COMMUNICATING = ("tp", "cp", "fsdp", "dp_replicate", "ep", "pp")


class LayerCompute(NamedTuple):
    """Time of computing one layer for one microbatch, without communication, in seconds.

    Attributes:
        forward: Time that the device computes the forward pass.
        backward: Time that the device computes the backward pass, including recomputation.
        attention: Time of the attention core (scores, softmax, product with the values) in the
            forward pass. It is a part of ``forward``. Ring communication overlaps with it.
        weights: Time of the weight gradients. It is a part of ``backward``.
        launch: Time that the host needs to launch the kernels of the forward pass.
        relaunch: Time that the host needs to launch the kernels of the backward pass.
    """

    forward: float
    backward: float
    attention: float
    weights: float
    launch: float
    relaunch: float


class LayerTime(NamedTuple):
    """Time of one layer for one microbatch, with communication, in seconds.

    Attributes:
        compute: Time of the forward and the backward pass on the device. Includes the time that the
            device waits for the host to launch kernels.
        forward: Time of the forward pass, which is a part of ``compute``.
        free_forward: Time in the forward pass that can overlap with collectives on parameters.
        free_backward: Time in the backward pass that can overlap with collectives on parameters.
        weights: Time of the weight gradients, which is a part of ``compute``.
        tp: Time of the exposed communication over ``tp``.
        cp: Time of the exposed communication over ``cp``.
        ep: Time of the exposed communication over ``ep``.
    """

    compute: float
    forward: float
    free_forward: float
    free_backward: float
    weights: float
    tp: float
    cp: float
    ep: float


class Collectives(NamedTuple):
    """Time of the three collectives on a set of parameters, in seconds.

    Attributes:
        gather: Time of the all-gather of the parameters.
        reduce: Time of the reduce-scatter of the gradients.
        replicas: Time of the all-reduce of the sharded gradients over ``dp_replicate``.
    """

    gather: float
    reduce: float
    replicas: float


class Traffic(NamedTuple):
    """Time of the collectives on parameters, separately for a layer and for the embedding.

    Attributes:
        latency: Latency of one all-gather, in seconds. The transfer of data is not included.
        layer: Times of the collectives on the parameters of one layer. Layers with and without
            experts are averaged.
        end: Times of the collectives on the embedding. They also hold for the output matrix, which
            has the same size.
    """

    latency: float
    layer: Collectives
    end: Collectives


class ComputeModel:
    """Estimates how long one accelerator computes a layer or the loss.

    Each kernel follows the roofline model (Williams et al., Roofline, 2009): either arithmetic or
    memory bandwidth limits its speed. The two limits are the peaks of the data sheet, multiplied by
    the efficiencies of `Calibration`.
    """

    def __init__(
        self, model: ModelShape, cluster: Cluster, train: TrainSpec, calibration: Calibration
    ) -> None:
        self._model, self._train, self._constants = model, train, calibration
        chip = cluster.device
        self._bandwidth = chip.hbm_gbs * 1e9 * calibration.hbm_efficiency
        self._half_rate = chip.tflops * 1e12 * calibration.gemm_efficiency
        reached = chip.tflops
        if train.attention == "flash-2":
            reached = min(reached, calibration.flash2_tflops)
        self._attention_rate = reached * 1e12 * calibration.attention_efficiency
        self._linear_rate = self._half_rate
        if train.float8:
            self._linear_rate = chip.tflops_fp8 * 1e12 * calibration.fp8_efficiency
        self._passes = 1.0 if train.fused is True else calibration.eager_passes
        launches = calibration.fused_launches if train.fused is True else 1.0
        self._host = calibration.layer_seconds * launches

    def layer(self, point: Point, *, experts: bool) -> LayerCompute:
        """Return the forward and backward seconds that one layer computes for one microbatch.

        Args:
            point: Configuration.
            experts: True for a layer with experts, False for a dense layer.
        """
        model, constants, degrees = self._model, self._constants, point.degrees
        hidden, query, tp = model.hidden, model.query_width, degrees.tp
        tokens, recompute = point.tokens(self._train.seq_len), point.recompute
        width = model.shared_ffn if experts else model.ffn
        # Forward time of matrix products. `saved`: products whose outputs ``selective-op`` saves.
        # `again`: products that ``selective-op`` recomputes, which is every second one.
        saved, again = self._projections(degrees, tokens)
        again += self._linear(tokens, hidden, query / tp)
        if width:
            up = self._linear(tokens, width / tp, hidden)
            down = self._linear(tokens, hidden, width / tp)
            saved += up + (down if model.glu else 0.0)
            again += up if model.glu else down
        if experts:
            again += self._routed(degrees, tokens)
        core, merge = self._attention(degrees, tokens)
        moved = self._elementwise(degrees, tokens, width, experts=experts) / self._bandwidth
        if self._train.float8:
            weights = model.shared_layer_parameters if experts else model.dense_layer_parameters
            moved += constants.cast_bytes * weights / tp / self._bandwidth
        linear = saved + again
        forward = linear + core + merge + moved
        backward = 2 * linear + constants.attention_backward * core + merge
        backward += constants.elementwise_backward * moved
        # The kernels of the forward pass, the input gradients and the weight gradients take equally
        # long to launch.
        launch, relaunch = self._host / 3, self._host * 2 / 3
        if experts:
            # The host reads the number of tokens of each expert in both passes.
            forward += constants.expert_layer_seconds / 3
            backward += constants.expert_layer_seconds * 2 / 3
        layers = self._train.recompute_layers
        share = 1.0 if layers is None else min(1.0, layers * degrees.pp / model.layers)
        if recompute == "full":
            backward += share * forward
            relaunch += share * launch
        elif recompute == "selective-op":
            backward += share * (again + moved + (0.0 if self._train.fused else core))
        elif recompute == "selective" and not self._train.fused:
            backward += share * core
        return LayerCompute(forward, backward, core, linear, launch, relaunch)

    def head(self, point: Point) -> float:
        """Return the time of the output matrix and the loss for one microbatch, in seconds.

        Both are computed in bf16. The time covers the forward and the backward pass.
        """
        tokens, vocab = point.tokens(self._train.seq_len), self._model.vocab / point.degrees.tp
        side = self._constants.gemm_half_side
        product = self._product(tokens, vocab, self._model.hidden, self._half_rate, side)
        moved = self._constants.loss_bytes * tokens * vocab / self._bandwidth
        if self._train.fused_loss:
            moved /= 2  # read and written once, in place
        return 3 * product + self._passes * moved

    def _projections(self, degrees: Degrees, tokens: float) -> tuple[float, float]:
        """Return a pair ``(saved, recomputed)``: forward seconds of the attention's projections.

        ``saved`` is the time of the projections whose outputs ``selective-op`` recomputation saves.
        ``recomputed`` is the time of the projections that ``selective-op`` recomputes. The output
        projection is not included.

        | attention | saved projections | recomputed projections |
        |---|---|---|
        | multi-head or grouped-query | to queries, to values | to keys |
        | multi-head latent (arXiv 2405.04434, section 2.1) | to latents | from latents to heads |
        """
        model, tp = self._model, degrees.tp
        if not (model.latent and model.nope_dim):
            keys = self._linear(tokens, model.kv_width / tp, model.hidden)
            return self._linear(tokens, model.query_width / tp, model.hidden) + keys, keys
        down = self._linear(tokens, model.latent + model.rope_dim, model.hidden)
        keys = model.heads * model.nope_dim + model.query_width
        up = self._linear(tokens, keys / tp, model.latent)
        if model.query_latent:
            down += self._linear(tokens, model.query_latent, model.hidden)
        return down, up + self._linear(
            tokens, model.score_width / tp, model.query_latent or model.hidden
        )

    def _linear(self, rows: float, columns: float, inner: float) -> float:
        side = self._constants.gemm_half_side
        return self._product(rows, columns, inner, self._linear_rate, side)

    def _product(
        self,
        rows: float,
        columns: float,
        inner: float,
        rate: float,
        half_side: float,
        *,
        grouped: bool = False,
    ) -> float:
        """Return the seconds of multiplying a matrix by another one.

        The result is the time of the arithmetic or the time of the memory accesses, whichever is
        longer. The arithmetic of large matrices runs at ``rate`` operations per second. Small
        matrices take additional time, because tiles are started and ended more often.

        Args:
            rows: Number of rows of the first matrix.
            columns: Number of columns of the second matrix.
            inner: Number of columns of the first matrix, and of rows of the second matrix.
            rate: Operations per second with large matrices.
            half_side: If one of ``rows``, ``columns`` and ``inner`` has this value and the other
                two are large, the arithmetic runs at half of ``rate``.
            grouped: True for a grouped product of experts. The additional time then does not depend
                on ``rate``: it is the additional time of a device with 1 PFLOP/s.
        """
        half = self._constants.half_bytes
        lost = (1 + half_side / rows) * (1 + half_side / columns) * (1 + half_side / inner) - 1
        moved = half * (rows * inner + inner * columns + rows * columns)
        seconds = 2 * rows * columns * inner * (1 / rate + lost / (1e15 if grouped else rate))
        return max(seconds, moved / self._bandwidth)

    def _routed(self, degrees: Degrees, tokens: float) -> float:
        """Return the forward time of the routed experts of one layer on one rank, in seconds.

        ``tokens`` is the number of tokens of one microbatch on the rank. Assumes that all experts
        get equally many tokens.
        """
        model, constants = self._model, self._constants
        rows = tokens * model.top_k / (degrees.tp if degrees.etp == 1 else 1)
        each = rows * degrees.ep / model.experts
        width, rate = model.expert_width / degrees.etp, self._linear_rate
        # A rank with a single expert uses an ordinary matrix product, not a grouped one.
        grouped = degrees.ep < model.experts
        side = constants.expert_half_side if grouped else constants.gemm_half_side

        def product(columns: float, inner: float) -> float:
            return self._product(each, columns, inner, rate, side, grouped=grouped)

        one = (model.matrices - 1) * product(width, model.hidden) + product(model.hidden, width)
        return model.experts / degrees.ep * one

    def _attention(self, degrees: Degrees, tokens: float) -> tuple[float, float]:
        """Return a pair ``(core, merge)`` of forward times in seconds.

        ``core`` is the time of the attention core: scores, softmax, and product with the values.
        ``merge`` is the time of merging the partial results of ring attention. Ring attention has
        one partial result for each block of keys and values. Other attention has ``merge`` 0.
        """
        constants, seq_len = self._constants, self._train.seq_len
        query = self._model.query_width / degrees.tp
        # Mean of the key width and the value width. They differ only in latent attention.
        wide = (self._model.score_width + self._model.query_width) / 2 / degrees.tp
        if not self._train.fused:
            # These kernels compute all scores, although a causal mask uses only half of them.
            core = 4 * tokens * seq_len * wide / self._half_rate
            scores = self._model.heads / degrees.tp * seq_len * tokens
            moved = constants.score_passes * constants.half_bytes * scores
            return core + moved / self._bandwidth, 0.0
        ring = degrees.ring if self._train.context == "ring" else 1
        chunk = seq_len / (2 * degrees.ring) if degrees.ring > 1 else seq_len
        efficiency = chunk / (chunk + constants.attention_half_chunk)
        efficiency *= constants.ring_efficiency ** log2(ring)
        core = 2 * tokens * seq_len * wide / (self._attention_rate * efficiency)
        parts = ring if ring > 1 else 0
        return core, parts * constants.merge_bytes * tokens * query / self._bandwidth

    def _elementwise(self, degrees: Degrees, tokens: float, width: int, *, experts: bool) -> float:
        """Return the bytes that the elementwise kernels of one layer read and write in forward.

        The elementwise kernels are norms, residual additions, rotary embeddings and activations.
        With experts, permuting and weighting the tokens is included. ``width`` is the inner width
        of the dense feed-forward layer or of the shared experts.
        """
        model = self._model
        stream = 10 * model.hidden + 2 * (model.query_width + model.kv_width)
        moved: float = stream + model.matrices * width
        if experts:
            # Tokens are permuted before and after the all-to-all, and weighted by the router.
            moved += model.top_k * (model.matrices * model.expert_width + 6 * model.hidden)
        if self._train.fused == "attention":
            moved *= self._passes
        if self._train.float8:
            # The inputs of fp8 products are read to compute their scale, and cast.
            moved += 2 * (2 * model.hidden + model.query_width + width)
        return self._constants.half_bytes * moved * tokens / degrees.tp


class TimeModel:
    """Estimates the time of one training step, for any configuration of a model on a cluster.

    ``limit`` is the memory that a configuration may use on one device, in bytes.
    """

    def __init__(
        self,
        model: ModelShape,
        cluster: Cluster,
        train: TrainSpec,
        calibration: Calibration,
        limit: float,
    ) -> None:
        self._model, self._train, self._constants = model, train, calibration
        self._limit = limit
        self._compute = ComputeModel(model, cluster, train, calibration)
        self._links = Links(cluster, calibration.link_efficiency)
        self._bandwidth = cluster.device.hbm_gbs * 1e9 * calibration.hbm_efficiency
        self._eager = train.fused == "attention"
        self._layers: dict[tuple[object, ...], LayerTime] = {}
        self._ends = model.embedding_parameters * (1 if model.tied else 2)
        self._dense = (model.dense_parameters - self._ends) / model.layers
        self._experts = model.expert_parameters / model.layers

    def traffic(self, degrees: Degrees, groups: Mapping[str, AxisGroup]) -> Traffic:
        """Return the seconds of each collective on parameters and gradients, as a `Traffic`.

        Its field ``layer`` has the collectives of one layer. ``end`` has the collectives of an
        embedding or output matrix. ``groups`` has the entries of `groups_of` and
        `expert_groups_of`.
        """
        dense, end = self._dense / degrees.tp, self._model.embedding_parameters / degrees.tp
        experts = self._experts / (degrees.ep * degrees.etp)
        gather, reduce = self._gather_and_reduce(groups["dense"], dense)
        expert_gather, expert_reduce = self._gather_and_reduce(groups["efsdp"], experts)
        owned = dense / degrees.fsdp + experts / degrees.efsdp
        replicas, end_replicas = (
            self._links.all_reduce(groups["dp_replicate"], self._train.gradient_bytes * size)
            for size in (owned, end / degrees.fsdp)
        )
        return Traffic(
            latency=self._links.latency(groups["dense"]),
            layer=Collectives(gather + expert_gather, reduce + expert_reduce, replicas),
            end=Collectives(*self._gather_and_reduce(groups["dense"], end), end_replicas),
        )

    def _gather_and_reduce(self, group: AxisGroup, size: float) -> tuple[float, float]:
        """Return a pair ``(gather, reduce)`` of times in seconds.

        ``gather`` is the time of an all-gather of ``size`` parameters. ``reduce`` is the time of a
        reduce-scatter of their gradients. Both times include the copies between the parameters and
        the communication buffers.
        """
        if not size or group.size == 1:
            return 0.0, 0.0
        constants, half = self._constants, self._constants.half_bytes
        gather = self._links.gather(group, (1 if self._train.float8 else half) * size)
        reduce = self._links.gather(group, self._train.gradient_bytes * size)
        gather += constants.gather_copy_bytes * size / self._bandwidth
        return gather, reduce + constants.reduce_copy_bytes * size / self._bandwidth

    def retries(self, need: float) -> bool:
        """Return True if the caching allocator has to free its cache and retry allocations.

        ``need`` is the memory of the configuration in bytes. Retries occur with eager kernels if
        ``need`` is close to the memory limit. Each retry synchronizes the device.
        """
        return self._eager and need > self._constants.retry_share * self._limit

    def parts(
        self,
        point: Point,
        groups: Mapping[str, AxisGroup],
        traffic: Traffic,
        ranks: tuple[RankMemory, ...],
        need: float,
    ) -> tuple[float, ...]:
        """Return the time of one training step on the slowest pipeline rank, split into parts.

        Args:
            point: Configuration.
            groups: Union of the results of `groups_of` and `expert_groups_of`.
            traffic: Result of the method `traffic` for the configuration.
            ranks: Result of `MemoryModel.ranks`: the first and the last pipeline rank. If ``pp`` is
                1, the only pipeline rank.
            need: Memory of the rank that needs the most memory, in bytes.

        Returns:
            Nine numbers in seconds: one for computation, six for the exposed communication over the
            axes in `COMMUNICATING`, one for the bubble, and one for the optimizer.
        """
        constants, microbatches, setting = self._constants, point.microbatches, point.setting
        pp, layer = point.degrees.pp, self._average_layer(point, groups, ranks[0].layers)
        # `ends`: number of embedding and output matrices per rank, which may be a fraction. The
        # first and the last rank have these matrices, but fewer layers. So the matrices are counted
        # as if they were spread evenly over the pipeline ranks.
        ends, send = (2 - self._model.tied) / pp, 0.0
        if pp > 1:
            size = constants.half_bytes * point.tokens(self._train.seq_len) * self._model.hidden
            size /= point.degrees.tp
            send = 2 * setting.virtual_stages * self._links.send(groups["pp"], size)
        sent = microbatches * send + self._tied_embedding(point.degrees, groups)
        every = []
        for rank in ranks:
            head = self._compute.head(point) if rank is ranks[-1] else 0.0
            layers = rank.layers
            compute = layers * layer.compute + head
            busy = layers * (layer.compute + layer.tp + layer.cp + layer.ep) + head + send
            bubble = 0.0
            if pp > 1:
                seconds = busy, layers * layer.forward, layers * layer.weights
                schedule = SCHEDULES[setting.schedule]
                bubble = schedule.bubble(pp, setting.virtual_stages, *seconds)
            if self.retries(need):
                compute += (constants.retry_slowdown - 1) * busy
            fsdp, replicate = self._sharding(point, traffic, layer, layers, ends)
            tp = microbatches * (layers * layer.tp)
            if point.degrees.fsdp == 1:
                # FSDP shards only the experts, and only over ranks of tp. So tp gets the time.
                tp, fsdp = tp + fsdp, 0.0
            cp, ep = microbatches * (layers * layer.cp), microbatches * (layers * layer.ep)
            updated = rank.optimizer / self._train.moment_bytes
            optimizer = constants.optimizer_bytes * updated / self._bandwidth
            exposed = tp, cp, fsdp, replicate, ep, sent
            every.append((microbatches * compute, *exposed, bubble, optimizer))
        return max(every, key=sum)

    def _tied_embedding(self, degrees: Degrees, groups: Mapping[str, AxisGroup]) -> float:
        """Return the seconds per step in which the gradients of a tied embedding are summed.

        The first and the last pipeline stage each have a copy of the embedding. Each of these two
        stages sends its gradient shard to the other one. Returns 0 if the embedding is not tied.
        """
        if not self._model.tied:
            return 0.0
        shard = self._model.embedding_parameters / (degrees.tp * degrees.fsdp)
        return self._links.send(groups["pp"], self._train.gradient_bytes * shard)

    def _average_layer(self, point: Point, groups: Mapping[str, AxisGroup], most: int) -> LayerTime:
        """Return the time of one layer for one microbatch, averaged over the layers of a rank.

        The rank is the slowest pipeline rank. ``most`` is the number of layers on the first
        pipeline rank, and no pipeline rank has more layers. If the first rank has all layers
        without experts, another rank is the slowest. It has only layers with experts.
        """
        with_experts = self._model.expert_layers / self._model.layers
        if with_experts and point.degrees.pp > 1 and self._model.dense_layers <= most:
            # The slowest rank has only layers with experts.
            with_experts = 1.0
        if with_experts in (0.0, 1.0):
            return self._layer(point, groups, experts=with_experts == 1.0)
        dense = self._layer(point, groups, experts=False)
        routed = self._layer(point, groups, experts=True)
        pairs = zip(dense, routed, strict=True)
        return LayerTime(*[(1 - with_experts) * a + with_experts * b for a, b in pairs])

    def _layer(self, point: Point, groups: Mapping[str, AxisGroup], *, experts: bool) -> LayerTime:
        """Return the time of one layer for one microbatch. Results are memoized."""
        # The memo key has all inputs that change the result. The pp group changes the result only
        # with ``recompute_layers`` or eager kernels.
        stages = groups["pp"] if self._eager or self._train.recompute_layers else None
        key: tuple[object, ...] = point.micro_batch, point.recompute, stages
        key += groups["tp"], groups["ring"], groups["ulysses"]
        paired = False
        if experts:
            # True if the computation of one microbatch overlaps with the expert communication of
            # another one.
            schedule = SCHEDULES[point.setting.schedule]
            paired = schedule.overlaps_experts and point.degrees.pp > 1
            key += groups["ep"], point.degrees.etp, paired
        if key not in self._layers:
            self._layers[key] = self._new_layer(point, groups, experts=experts, paired=paired)
        return self._layers[key]

    def _new_layer(
        self, point: Point, groups: Mapping[str, AxisGroup], *, experts: bool, paired: bool
    ) -> LayerTime:
        work = self._compute.layer(point, experts=experts)
        # Ring communication overlaps with attention, so collectives on parameters cannot.
        busy = work.attention if point.degrees.ring > 1 else 0.0
        tp = self._tensor(point, groups, experts=experts)
        cp = self._context(point, groups, work)
        ep = 0.0
        if experts:
            ep, parts_of_experts = self._exchange(point, groups)
            tp += parts_of_experts
        if paired:
            ep = _exposed(ep, work.forward + work.backward, self._constants.overlap_cost)
        launch, relaunch = work.launch, work.relaunch
        if self._eager and self._links.crosses(groups["pp"]):
            hops = 10 * (point.degrees.tp - 1) * self._constants.eager_hop_seconds
            launch, relaunch = launch + hops / 3, relaunch + hops * 2 / 3
        waits, rounds = tp + cp + ep, 3 if point.recompute == "full" else 2
        # The device is idle if the host launches kernels more slowly than the device runs them.
        idle = max(0.0, launch - work.forward - waits / 3)
        idle_backward = max(0.0, relaunch - work.backward - waits * 2 / 3)
        return LayerTime(
            compute=work.forward + work.backward + idle + idle_backward,
            forward=work.forward + idle,
            free_forward=max(work.forward, launch) - busy,
            free_backward=max(work.backward, relaunch) - rounds * busy,
            weights=max(work.weights, launch),
            tp=tp,
            cp=cp,
            ep=ep,
        )

    def _tensor(self, point: Point, groups: Mapping[str, AxisGroup], *, experts: bool) -> float:
        """Return the exposed communication over ``tp`` in one layer, in seconds per microbatch.

        Attention and the feed-forward part run these collectives (arXiv 2205.05198, section 4.2.2):

        - Forward: an all-gather of the input, and a reduce-scatter of the output.
        - Backward: an all-gather of the output gradient, a reduce-scatter of the input gradient,
          and another all-gather of the input, which the weight gradients need.

        Matrix products overlap with a part of the transfers, but not with the latencies.
        """
        if point.degrees.tp == 1:
            return 0.0
        size = self._constants.half_bytes * point.tokens(self._train.seq_len) * self._model.hidden
        whole = not experts or point.degrees.etp > 1 or self._model.shared_ffn > 0
        again = {"full": 2, "selective-op": 1}.get(point.recompute, 0)
        calls = (5 + again) * (2 if whole else 1)
        # Eager layers wait for every collective, so nothing overlaps.
        hidden = 0.0 if self._eager else self._constants.tp_hidden
        carried = (1 - hidden) * self._links.transfer(groups["tp"], size)
        return calls * (carried + self._links.latency(groups["tp"]))

    def _context(self, point: Point, groups: Mapping[str, AxisGroup], work: LayerCompute) -> float:
        """Return the exposed communication over ``cp`` in one layer, in seconds per microbatch.

        | method | communication |
        |---|---|
        | ring | sends keys and values to the next rank; overlaps with attention |
        | all-gather | gathers keys and values before attention; does not overlap |
        | Ulysses (arXiv 2309.14509, section 3.2) | exchanges heads before and after attention |

        Ulysses can be combined with one of the other two methods.
        """
        degrees = point.degrees
        if degrees.cp == 1:
            return 0.0
        half, cost = self._constants.half_bytes, self._constants.overlap_cost
        tokens = point.micro_batch * self._train.seq_len
        model, forwards = self._model, 2 if point.recompute == "full" else 1
        keys = half * tokens * model.kv_width / degrees.tp
        # If there are fewer key-value heads than ranks of Ulysses, several ranks get the same head.
        heads = min(degrees.ulysses_degree, max(1, (model.kv_heads or 1) // degrees.tp))
        ring = self._links.gather(groups["ring"], 2 * keys / heads)
        queries = half * tokens * model.query_width / degrees.tp
        rows = 2 * (queries + keys * degrees.ulysses_degree / heads) / degrees.cp
        exchange = (forwards + 1) * self._links.all_to_all(groups["ulysses"], rows)
        if self._train.context == "all-gather":
            # Backward gathers keys and values again, and reduce-scatters their bf16 gradients.
            return (forwards + 2) * ring + exchange
        forward = _exposed(ring, work.attention, cost) * forwards
        # The backward pass sends keys and values, and their gradients in float32.
        return forward + _exposed(3 * ring, 2 * work.attention, cost) + exchange

    def _exchange(self, point: Point, groups: Mapping[str, AxisGroup]) -> tuple[float, float]:
        """Return a pair ``(ep, tp)``: exposed communication of the experts of one layer.

        Both times are in seconds per microbatch. ``ep`` is the time in which ranks of ``ep``
        dispatch tokens to experts and combine the results. ``tp`` is 0 unless ``tp`` splits each
        expert. Then ranks of ``tp`` all-gather the dispatched tokens and reduce-scatter the
        results.
        """
        degrees = point.degrees
        if degrees.ep * degrees.etp == 1:
            return 0.0, 0.0
        model, train, half = self._model, self._train, self._constants.half_bytes
        tokens = point.tokens(self._train.seq_len) / degrees.tp
        inside, outside = self._copies(groups["ep"])
        size = half * tokens * model.hidden
        one = self._links.dispatch(groups["ep"], size, inside, outside)
        again = point.recompute == "full"
        total = (4 + 2 * again) * one
        if train.fp8_dispatch:
            small = self._links.dispatch(groups["ep"], size / 2, inside, outside)
            total -= (1 + again) * (one - small)
        gathered, exposed = 0.0, 1 - self._constants.ep_hidden
        if degrees.etp > 1:
            rows = half * tokens * degrees.tp * model.top_k * model.hidden
            gathered = exposed * (4 + 2 * again) * self._links.gather(groups["tp"], rows)
        return exposed * total, gathered

    def _copies(self, group: AxisGroup) -> tuple[float, float]:
        """Return a pair ``(inside, outside)``: mean numbers of transfers of one token.

        ``inside`` counts transfers to another rank of the same node. ``outside`` counts transfers
        to another node. `TrainSpec.dispatch` determines whether a token is sent once per expert or
        once per node. Assumes that the router chooses all experts equally often.
        `TrainSpec.max_nodes` and `ModelShape.top_groups` limit the number of nodes to which the
        router may send one token, which lowers ``outside``.
        """
        model, members = self._model, self._links.ranks_on_node(group)
        copies, nodes = model.top_k, group.size / members
        if self._train.dispatch == "copies":
            return copies * (members - 1) / group.size, copies * (1 - members / group.size)
        reach = nodes
        if self._train.max_nodes:
            reach = min(nodes, self._train.max_nodes)
        elif model.top_groups:
            reach = min(nodes, max(1.0, nodes / model.groups) * model.top_groups)
        on_nodes = reach * (1 - (1 - 1 / reach) ** copies)
        ranks = reach * members
        on_ranks = ranks * (1 - (1 - 1 / ranks) ** copies)
        return on_ranks * (members - 1) / members, on_nodes * (1 - 1 / nodes)

    def _sharding(
        self, point: Point, traffic: Traffic, layer: LayerTime, layers: int, ends: float
    ) -> tuple[float, float]:
        """Return a pair ``(fsdp, dp_replicate)``: exposed communication of data parallelism.

        Both times are in seconds per step. The second value is the time of one all-reduce over
        ``dp_replicate``, which sums the gradients of the replicas. The first value is the time of
        the collectives over ``fsdp`` in which one rank takes part:

        | ZeRO stage | all-gathers | reduce-scatters |
        |---|---|---|
        | 3, and FSDP without pipeline stages | both passes of each microbatch | each microbatch |
        | 2 | once | each microbatch |
        | 1, and FSDP with pipeline stages | once | once |
        | 0 | none | none, but one all-reduce over ``fsdp`` |

        Args:
            point: Configuration.
            traffic: Result of the method `traffic` for the configuration.
            layer: Time of one layer for one microbatch.
            layers: Number of layers on the pipeline rank.
            ends: Number of embedding and output matrices on the pipeline rank. It may be a
                fraction.
        """
        microbatches = point.microbatches
        forward, backward = layers * layer.free_forward, layers * layer.free_backward
        gather, reduce, replicas = (
            layers * one + ends * end for one, end in zip(traffic.layer, traffic.end, strict=True)
        )
        cost, zero = self._constants.overlap_cost, point.setting.zero
        if zero == 3:
            # DeepSpeed runs one collective per weight, and does not overlap it.
            hops = 3 * layers * (self._constants.stage3_collectives - 1) * traffic.latency
            summed = _exposed(replicas, backward, cost)
            return microbatches * (2 * gather + reduce + hops), summed
        if zero == 0:
            # An all-reduce counts as a reduce-scatter and an all-gather, which take equally long.
            summed = _exposed(2 * reduce, backward, cost)
            return (summed, 0.0) if point.degrees.fsdp > 1 else (0.0, summed)
        if zero is None and point.degrees.pp == 1:
            returned = gather + reduce
            sharding = microbatches * _exposed(gather, forward, cost)
            sharding += microbatches * _exposed(returned, backward, cost)
        else:
            returned, rounds = reduce, microbatches if zero == 2 else 1
            sharding = _exposed(gather, forward, cost) + rounds * _exposed(reduce, backward, cost)
        summed = _exposed(replicas, max(0.0, backward - returned), cost)
        # The first layer cannot be prefetched, so its all-gather does not overlap.
        return sharding + traffic.layer.gather, summed


def _exposed(communication: float, computation: float, cost: float) -> float:
    """Return the seconds by which communication makes a computation longer.

    The communication overlaps with the computation. Only communication after the end of the
    computation counts in full. The overlapped seconds are multiplied by ``cost``, because
    communication slows down the computation.
    """
    hidden = min(communication, max(0.0, computation))
    return communication - hidden + cost * hidden
