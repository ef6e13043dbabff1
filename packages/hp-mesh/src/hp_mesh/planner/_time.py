"""Seconds of one step: computation, exposed communication of each axis, bubble, optimizer."""

from collections.abc import Mapping
from math import log2
from typing import NamedTuple

from .._layout import AxisGroup
from ._calibration import Calibration
from ._cluster import Cluster, Links
from ._configuration import Degrees, Point
from ._memory import Rank
from ._schedules import SCHEDULES
from ._shape import ModelShape
from ._train import TrainSpec

# Axes with an entry in `TimeSplit.communication`.
COMMUNICATING = ("tp", "cp", "fsdp", "dp_replicate", "ep", "pp")


class LayerCompute(NamedTuple):
    """Seconds of computing one layer for one microbatch.

    Attributes:
        forward: Forward pass.
        backward: Backward pass, with recomputation.
        attention: Attention core of one forward pass, which ring communication overlaps.
        weights: Weight gradients, as part of the backward pass.
        launch: Host time of the forward pass.
        relaunch: Host time of the backward pass.
    """

    forward: float
    backward: float
    attention: float
    weights: float
    launch: float
    relaunch: float


class LayerTime(NamedTuple):
    """Seconds of one layer for one microbatch, with communication.

    Attributes:
        compute: Forward and backward pass, with the time that the device waits for the host.
        forward: The forward part of ``compute``.
        free_forward: Forward time that can overlap communication of parameters.
        free_backward: Backward time that can overlap communication of parameters.
        weights: Computation of weight gradients.
        tp: Exposed communication over ``tp``.
        cp: Exposed communication over ``cp``.
        ep: Exposed communication over ``ep``.
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
    """Seconds of the collectives on some parameters.

    Attributes:
        gather: All-gather of the parameters.
        reduce: Reduce-scatter of their gradients.
        replicas: All-reduce of their sharded gradients over the replicas.
    """

    gather: float
    reduce: float
    replicas: float


class Traffic(NamedTuple):
    """Collectives on the parameters of an average layer and of one end.

    The ends are the embedding and the output matrix.

    Attributes:
        hops: Latency of one all-gather, in seconds.
        layer: Collectives of an average layer.
        end: Collectives of one end.
    """

    hops: float
    layer: Collectives
    end: Collectives


class ComputeModel:
    """Time of a model's layers on one accelerator, as a roofline per kind of kernel.

    The time of a kernel is the larger of its operations over the reachable rate and its bytes over
    the reachable bandwidth (Williams et al., Roofline, 2009).
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

    def tokens(self, point: Point) -> float:
        """Return the number of tokens of one microbatch on each context-parallel rank."""
        return point.micro_batch * self._train.seq_len / point.degrees.cp

    def layer(self, point: Point, *, experts: bool) -> LayerCompute:
        """Return the time of one layer, with experts or without."""
        model, constants, degrees = self._model, self._constants, point.degrees
        hidden, query, tp = model.hidden, model.query_width, degrees.tp
        tokens, recompute = self.tokens(point), point.recompute
        width = model.shared_ffn if experts else model.ffn
        # `selective-op` saves the outputs of the first product of each pair.
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
        # Launching the forward pass, input gradients and weight gradients takes equally long.
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
        """Return the time of the output matrix and the loss in bf16, both passes."""
        tokens, vocab = self.tokens(point), self._model.vocab / point.degrees.tp
        side = self._constants.gemm_half_side
        product = self._product(tokens, vocab, self._model.hidden, self._half_rate, side)
        moved = self._constants.loss_bytes * tokens * vocab / self._bandwidth
        if self._train.fused_loss:
            moved /= 2  # read and written once, in place
        return 3 * product + self._passes * moved

    def _projections(self, degrees: Degrees, tokens: float) -> tuple[float, float]:
        """Return the time of the query, key and value projections as two numbers.

        They are (queries and keys, values), or with multi-head latent attention (arXiv 2405.04434,
        section 2.1) (projections to the latents, projections from the latents).
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
        side: float,
        *,
        grouped: bool = False,
    ) -> float:
        """Return the time of one matrix product.

        A side of length ``side`` reaches half of ``rate``. For a ``grouped`` product that holds at
        1 PFLOP/s, because starting and ending a tile takes a fixed time.
        """
        half = self._constants.half_bytes
        lost = (1 + side / rows) * (1 + side / columns) * (1 + side / inner) - 1
        moved = half * (rows * inner + inner * columns + rows * columns)
        seconds = 2 * rows * columns * inner * (1 / rate + lost / (1e15 if grouped else rate))
        return max(seconds, moved / self._bandwidth)

    def _routed(self, degrees: Degrees, tokens: float) -> float:
        """Return the time of a rank's experts. All experts get equally many rows."""
        model, constants = self._model, self._constants
        rows = tokens * model.top_k / (degrees.tp if degrees.etp == 1 else 1)
        each = rows * degrees.ep / model.experts
        width, rate = model.expert_width / degrees.etp, self._linear_rate
        # A single expert on a rank is an ordinary layer.
        grouped = degrees.ep < model.experts
        side = constants.expert_half_side if grouped else constants.gemm_half_side

        def product(columns: float, inner: float) -> float:
            return self._product(each, columns, inner, rate, side, grouped=grouped)

        one = (model.matrices - 1) * product(width, model.hidden) + product(model.hidden, width)
        return model.experts / degrees.ep * one

    def _attention(self, degrees: Degrees, tokens: float) -> tuple[float, float]:
        """Return the forward time of the attention core, and of merging the parts of a ring."""
        constants, seq_len = self._constants, self._train.seq_len
        query = self._model.query_width / degrees.tp
        # Only with latents do the products with keys and with values have different widths.
        wide = (self._model.score_width + self._model.query_width) / 2 / degrees.tp
        if not self._train.fused:
            # Whole score matrices, although a causal mask needs half of them.
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
        """Return the memory traffic of norms, residuals, rotary positions and activations."""
        model = self._model
        stream = 10 * model.hidden + 2 * (model.query_width + model.kv_width)
        moved: float = stream + model.matrices * width
        if experts:
            # Rows are permuted before and after the exchange, and weighted.
            moved += model.top_k * (model.matrices * model.expert_width + 6 * model.hidden)
        if self._train.fused == "attention":
            moved *= self._passes
        if self._train.float8:
            # Inputs of products are read to compute their scale, and cast.
            moved += 2 * (2 * model.hidden + model.query_width + width)
        return self._constants.half_bytes * moved * tokens / degrees.tp


class TimeModel:
    """Time of one step of a model on a cluster, for any configuration and groups."""

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
        """Return the time of the collectives on parameters."""
        dense, end = self._dense / degrees.tp, self._model.embedding_parameters / degrees.tp
        experts = self._experts / (degrees.ep * degrees.etp)
        gather, reduce = self._shared(groups["dense"], dense)
        expert_gather, expert_reduce = self._shared(groups["efsdp"], experts)
        owned = dense / degrees.fsdp + experts / degrees.efsdp
        replicas, end_replicas = (
            self._links.all_reduce(groups["dp_replicate"], self._train.gradient_bytes * size)
            for size in (owned, end / degrees.fsdp)
        )
        return Traffic(
            hops=self._links.latency(groups["dense"]),
            layer=Collectives(gather + expert_gather, reduce + expert_reduce, replicas),
            end=Collectives(*self._shared(groups["dense"], end), end_replicas),
        )

    def _shared(self, group: AxisGroup, size: float) -> tuple[float, float]:
        """Return the time of an all-gather and a reduce-scatter of ``size`` parameters."""
        if not size or group.size == 1:
            return 0.0, 0.0
        constants, half = self._constants, self._constants.half_bytes
        gather = self._links.gather(group, (1 if self._train.float8 else half) * size)
        reduce = self._links.gather(group, self._train.gradient_bytes * size)
        gather += constants.gather_copy_bytes * size / self._bandwidth
        return gather, reduce + constants.reduce_copy_bytes * size / self._bandwidth

    def retries(self, need: float) -> bool:
        """Return whether the allocator frees cached blocks and retries, as it does near the limit.

        Each retry synchronizes the device.
        """
        return self._eager and need > self._constants.retry_share * self._limit

    def parts(
        self,
        point: Point,
        groups: Mapping[str, AxisGroup],
        traffic: Traffic,
        ranks: tuple[Rank, ...],
        need: float,
    ) -> tuple[float, ...]:
        """Return the time of one step on the slowest pipeline rank, by parts.

        Args:
            point: Configuration.
            groups: Groups of its axes.
            traffic: Result of `traffic` for its degrees.
            ranks: First and last pipeline rank, or the only one, as from `MemoryModel.ranks`.
            need: Bytes on the rank that needs most memory.

        Returns:
            Computation; exposed communication in the order of `COMMUNICATING`; bubble; optimizer.
        """
        constants, microbatches, setting = self._constants, point.microbatches, point.setting
        pp, layer = point.degrees.pp, self._average_layer(point, groups, ranks[0].layers)
        # The ranks with an end have fewer layers, so the ends count as shared by all ranks.
        ends, send = (2 - self._model.tied) / pp, 0.0
        if pp > 1:
            size = constants.half_bytes * self._compute.tokens(point) * self._model.hidden
            size /= point.degrees.tp
            send = 2 * setting.virtual_stages * self._links.send(groups["pp"], size)
        sent = microbatches * send + self._tied_ends(point.degrees, groups)
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
                # Only experts are sharded, over the ranks of tp.
                tp, fsdp = tp + fsdp, 0.0
            cp, ep = microbatches * (layers * layer.cp), microbatches * (layers * layer.ep)
            updated = rank.optimizer / self._train.moment_bytes
            optimizer = constants.optimizer_bytes * updated / self._bandwidth
            exposed = tp, cp, fsdp, replicate, ep, sent
            every.append((microbatches * compute, *exposed, bubble, optimizer))
        return max(every, key=sum)

    def _tied_ends(self, degrees: Degrees, groups: Mapping[str, AxisGroup]) -> float:
        """Return the time in which two stages with a tied embedding sum its gradients.

        Each of them sends its shard to the other one, once per step.
        """
        if not self._model.tied:
            return 0.0
        shard = self._model.embedding_parameters / (degrees.tp * degrees.fsdp)
        return self._links.send(groups["pp"], self._train.gradient_bytes * shard)

    def _average_layer(self, point: Point, groups: Mapping[str, AxisGroup], most: int) -> LayerTime:
        """Return the time of an average layer. ``most`` is the largest number on one rank."""
        with_experts = self._model.expert_layers / self._model.layers
        if with_experts and point.degrees.pp > 1 and self._model.dense_layers <= most:
            # Layers without experts are on the first rank. All others have experts.
            with_experts = 1.0
        if with_experts in (0.0, 1.0):
            return self._layer(point, groups, experts=with_experts == 1.0)
        dense = self._layer(point, groups, experts=False)
        routed = self._layer(point, groups, experts=True)
        pairs = zip(dense, routed, strict=True)
        return LayerTime(*[(1 - with_experts) * a + with_experts * b for a, b in pairs])

    def _layer(self, point: Point, groups: Mapping[str, AxisGroup], *, experts: bool) -> LayerTime:
        """Return the time of one layer. It is computed once for all equal groups."""
        # The number of stages matters only for recomputed layers and for eager collectives.
        stages = groups["pp"] if self._eager or self._train.recompute_layers else None
        key: tuple[object, ...] = point.micro_batch, point.recompute, stages
        key += groups["tp"], groups["ring"], groups["ulysses"]
        paired = False
        if experts:
            # The forward pass of a microbatch overlaps the exchange of another one.
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
        # Ring communication overlaps attention, so nothing else can.
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
        # The device is idle if the host launches more slowly.
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
        """Return the exposed time of tensor parallelism in one layer.

        Attention and the feed-forward part gather their input and reduce-scatter their output. The
        backward pass does the same and gathers the inputs again for the weight gradients (arXiv
        2205.05198, section 4.2.2). Matrix products overlap the transfers, but not the latencies.
        """
        if point.degrees.tp == 1:
            return 0.0
        size = self._constants.half_bytes * self._compute.tokens(point) * self._model.hidden
        whole = not experts or point.degrees.etp > 1 or self._model.shared_ffn > 0
        again = {"full": 2, "selective-op": 1}.get(point.recompute, 0)
        calls = (5 + again) * (2 if whole else 1)
        # Eager layers wait for every collective.
        hidden = 0.0 if self._eager else self._constants.tp_hidden
        carried = (1 - hidden) * self._links.transfer(groups["tp"], size)
        return calls * (carried + self._links.latency(groups["tp"]))

    def _context(self, point: Point, groups: Mapping[str, AxisGroup], work: LayerCompute) -> float:
        """Return the exposed time of context parallelism in one layer.

        In a ring, attention overlaps the transfers of keys and values. An all-gather of them is
        exposed. Ulysses exchanges the heads of queries, keys and values before attention, and of
        the output after it (arXiv 2309.14509, section 3.2).
        """
        degrees = point.degrees
        if degrees.cp == 1:
            return 0.0
        half, cost = self._constants.half_bytes, self._constants.overlap_cost
        tokens = point.micro_batch * self._train.seq_len
        model, forwards = self._model, 2 if point.recompute == "full" else 1
        keys = half * tokens * model.kv_width / degrees.tp
        # If there are fewer kv heads than ranks, several ranks get the same head.
        heads = min(degrees.ulysses_degree, max(1, (model.kv_heads or 1) // degrees.tp))
        ring = self._links.gather(groups["ring"], 2 * keys / heads)
        queries = half * tokens * model.query_width / degrees.tp
        rows = 2 * (queries + keys * degrees.ulysses_degree / heads) / degrees.cp
        exchange = (forwards + 1) * self._links.all_to_all(groups["ulysses"], rows)
        if self._train.context == "all-gather":
            # One more gather for the backward pass, and a reduce-scatter of bf16 gradients.
            return (forwards + 2) * ring + exchange
        forward = _exposed(ring, work.attention, cost) * forwards
        # The backward pass moves keys and values, and their float32 gradients.
        return forward + _exposed(3 * ring, 2 * work.attention, cost) + exchange

    def _exchange(self, point: Point, groups: Mapping[str, AxisGroup]) -> tuple[float, float]:
        """Return the exposed time of dispatch and combine in one layer, over ``ep`` and ``tp``.

        If ``tp`` splits the experts, its ranks gather the dispatched rows and reduce-scatter the
        results.
        """
        degrees = point.degrees
        if degrees.ep * degrees.etp == 1:
            return 0.0, 0.0
        model, train, half = self._model, self._train, self._constants.half_bytes
        tokens = self._compute.tokens(point) / degrees.tp
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
        """Return how often a token is sent inside a node and between nodes, on average.

        All experts are equally likely, but a token's experts are on at most ``max_nodes`` nodes.
        """
        model, members = self._model, self._links.members(group)
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
        """Return the exposed communication time of one step: for sharding, and over replicas.

        The rank has ``layers`` layers, and the share ``ends`` of the embedding and output matrix.

        Replicas sum their gradients in one all-reduce. Sharding runs these collectives:

        | ZeRO stage | all-gathers | reduce-scatters |
        |---|---|---|
        | 3, and FSDP without pipeline stages | both passes of each microbatch | each microbatch |
        | 2 | once | each microbatch |
        | 1, and FSDP with pipeline stages | once | once |
        | 0 | none | one all-reduce |
        """
        microbatches = point.microbatches
        forward, backward = layers * layer.free_forward, layers * layer.free_backward
        gather, reduce, replicas = (
            layers * one + ends * end for one, end in zip(traffic.layer, traffic.end, strict=True)
        )
        cost, zero = self._constants.overlap_cost, point.setting.zero
        if zero == 3:
            # DeepSpeed: one collective per weight, and nothing overlaps.
            hops = 3 * layers * (self._constants.stage3_collectives - 1) * traffic.hops
            summed = _exposed(replicas, backward, cost)
            return microbatches * (2 * gather + reduce + hops), summed
        if zero == 0:
            # An all-reduce is a reduce-scatter and an all-gather over all replicas.
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
        # Nothing overlaps the first all-gather.
        return sharding + traffic.layer.gather, summed


def _exposed(communication: float, beside: float, cost: float) -> float:
    """Return the time that communication adds to a computation that overlaps it."""
    hidden = min(communication, max(0.0, beside))
    return communication - hidden + cost * hidden
