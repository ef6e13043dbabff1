"""Seconds of one step: layers, exposed communication of every axis, bubble, optimizer."""

from collections.abc import Mapping
from math import log2
from typing import NamedTuple

from .._layout import AxisGroup
from ._calibration import Calibration
from ._cluster import Cluster, Links
from ._memory import Rank
from ._model import ModelShape
from ._result import Degrees, Setting
from ._schedules import SCHEDULES
from ._train import Recompute, TrainSpec

# Over which communication is told apart.
AXES = ("tp", "cp", "fsdp", "dp_replicate", "ep", "pp")


class Work(NamedTuple):
    """Seconds of a layer's forward and of the backward after it, recomputation included.

    ``attention`` is the part of the attention core in one forward, behind which parts of the
    sequence travel, and ``weights`` that of the weights' gradients in the backward. ``launch`` is
    what the host takes for the forward, and ``relaunch`` for the backward.
    """

    forward: float
    backward: float
    attention: float
    weights: float
    launch: float
    relaunch: float


class Microbatch(NamedTuple):
    """Seconds of one microbatch in an average layer: computing, and what communication adds to it.

    ``head`` is the output matrix with the loss, on the last pipeline rank. ``compute`` has what the
    device waits for the host. ``free_forward`` and ``free_backward`` have nothing beside them yet.
    """

    head: float
    compute: float
    forward: float
    free_forward: float
    free_backward: float
    weights: float
    tp: float
    cp: float
    ep: float


class Stage(NamedTuple):
    """Seconds of one microbatch on a pipeline rank, and of its wait for the others.

    ``ends`` is its share of the embedding and the output matrix, and ``layers`` how many layers the
    rank has, each with ``free_forward`` and ``free_backward``
    seconds that have nothing beside them yet.
    """

    compute: float
    tp: float
    cp: float
    ep: float
    send: float
    busy: float
    bubble: float
    layers: int
    ends: float
    free_forward: float
    free_backward: float


class Traffic(NamedTuple):
    """Seconds of the collectives on the parameters of an average layer, and of an end.

    The ends are the embedding and the output matrix. ``gather`` collects parameters, ``reduce``
    leaves each rank its shard of their gradients, ``replicas`` sums shards over replicas.
    ``hops`` is the latency of one collective, which ``gather`` and ``reduce`` include once.
    """

    hops: float
    gather: float
    reduce: float
    replicas: float
    end_gather: float
    end_reduce: float
    end_replicas: float


class ComputeModel:
    """The time of a model's layers on an accelerator: a roofline for each kind of kernel.

    Williams et al., Roofline, 2009: the larger of operations over reachable rate and bytes over
    reachable bandwidth. The device never works faster than the host launches.
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
        self._layers: dict[tuple[object, ...], Work] = {}
        self._passes = 1.0 if train.fused is True else calibration.eager_passes
        launches = calibration.fused_launches if train.fused is True else 1.0
        self._host = calibration.layer_seconds * launches

    def layer(
        self, degrees: Degrees, micro_batch: int, recompute: Recompute, *, experts: bool
    ) -> Work:
        """Return the seconds of one microbatch in one layer, with experts or without."""
        _, _, _, *inner = degrees
        stages = degrees.pp if self._train.recompute_layers else 0
        key = *inner, stages, micro_batch, recompute, experts
        if key not in self._layers:
            self._layers[key] = self._layer(degrees, micro_batch, recompute, experts=experts)
        return self._layers[key]

    def _layer(
        self, degrees: Degrees, micro_batch: int, recompute: Recompute, *, experts: bool
    ) -> Work:
        model, constants = self._model, self._constants
        hidden, query, tp = model.hidden, model.query_width, degrees.tp
        tokens = micro_batch * self._train.seq_len / degrees.cp
        width = model.shared_ffn if experts else model.ffn
        # The products whose outputs `selective-op` keeps are the first of each of these pairs.
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
        # The forward, the gradients of inputs and those of weights are launched in equal times.
        launch, relaunch = self._host / 3, self._host * 2 / 3
        if experts:
            # The host reads how many tokens every expert gets, forward and backward.
            forward += constants.expert_layer_seconds / 3
            backward += constants.expert_layer_seconds * 2 / 3
        # Of a forward, what the backward computes again, on the layers that recompute.
        layers = self._train.recompute_layers
        share = 1.0 if layers is None else min(1.0, layers * degrees.pp / model.layers)
        if recompute == "full":
            backward += share * forward
            relaunch += share * launch
        elif recompute == "selective-op":
            backward += share * (again + moved + (0.0 if self._train.fused else core))
        elif recompute == "selective" and not self._train.fused:
            backward += share * core
        return Work(forward, backward, core, linear, launch, relaunch)

    def head(self, degrees: Degrees, micro_batch: int) -> float:
        """Return the seconds of the output matrix and the loss, forward and backward, in bf16."""
        tokens = micro_batch * self._train.seq_len / degrees.cp
        vocab = self._model.vocab / degrees.tp
        side = self._constants.gemm_half_side
        product = self._product(tokens, vocab, self._model.hidden, self._half_rate, side)
        moved = self._constants.loss_bytes * tokens * vocab / self._bandwidth
        if self._train.fused_loss:
            moved /= 2  # read and written once, in place
        return 3 * product + self._passes * moved

    def _projections(self, degrees: Degrees, tokens: float) -> tuple[float, float]:
        """Return the seconds of the products that give queries, keys and values.

        The first figure is that of queries and keys; from latents (arXiv 2405.04434, section 2.1)
        that of the latents.
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
        """Return the seconds of one matrix product; a side as long as ``side`` reaches half.

        Of a ``grouped`` one it does so at 1 PFLOP/s: its tiles start and end in a fixed time.
        """
        half = self._constants.half_bytes
        lost = (1 + side / rows) * (1 + side / columns) * (1 + side / inner) - 1
        moved = half * (rows * inner + inner * columns + rows * columns)
        seconds = 2 * rows * columns * inner * (1 / rate + lost / (1e15 if grouped else rate))
        return max(seconds, moved / self._bandwidth)

    def _routed(self, degrees: Degrees, tokens: float) -> float:
        """Return the seconds of a rank's experts, which get equally many rows each."""
        model = self._model
        rows = tokens * model.top_k / (degrees.tp if degrees.etp == 1 else 1)
        each = rows * degrees.ep / model.experts
        width, rate = model.expert_width / degrees.etp, self._linear_rate
        # An expert alone on its rank is a layer as any other.
        grouped = degrees.ep < model.experts
        constants = self._constants
        side = constants.expert_half_side if grouped else constants.gemm_half_side

        def product(columns: float, inner: float) -> float:
            return self._product(each, columns, inner, rate, side, grouped=grouped)

        one = (model.matrices - 1) * product(width, model.hidden) + product(model.hidden, width)
        return model.experts / degrees.ep * one

    def _attention(self, degrees: Degrees, tokens: float) -> tuple[float, float]:
        """Return the seconds of a forward of the attention core, and of merging its parts."""
        constants, seq_len = self._constants, self._train.seq_len
        query = self._model.query_width / degrees.tp
        # Products with keys and with values are as wide as each other but for latent attention.
        wide = (self._model.score_width + self._model.query_width) / 2 / degrees.tp
        if not self._train.fused:
            # Whole score matrices, of which a causal mask uses half.
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
        """Return the bytes that norms, residuals, rotary positions and activations move."""
        model = self._model
        stream = 10 * model.hidden + 2 * (model.query_width + model.kv_width)
        moved: float = stream + model.matrices * width
        if experts:
            # Rows are permuted for the exchange, and back, and weighted.
            moved += model.top_k * (model.matrices * model.expert_width + 6 * model.hidden)
        if self._train.fused == "attention":
            moved *= self._passes
        if self._train.float8:
            # The inputs of the products are read for their scale and cast.
            moved += 2 * (2 * model.hidden + model.query_width + width)
        return self._constants.half_bytes * moved * tokens / degrees.tp


class TimeModel:
    """The time of a model's step on a cluster, for any degrees and groups."""

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
        self._stages: dict[tuple[object, ...], tuple[Stage, ...]] = {}
        self._microbatches: dict[tuple[object, ...], Microbatch] = {}
        self._layers: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._dense_sharding: dict[Degrees, tuple[tuple[float, float], ...]] = {}
        self._ends = model.embedding_parameters * (1 if model.tied else 2)
        self._dense = (model.dense_parameters - self._ends) / model.layers
        self._experts = model.expert_parameters / model.layers

    def traffic(self, degrees: Degrees, groups: Mapping[str, AxisGroup]) -> Traffic:
        """Return the seconds of the collectives on the parameters of a layer and of an end."""
        dense, end = self._dense / degrees.tp, self._model.embedding_parameters / degrees.tp
        experts = self._experts / (degrees.ep * degrees.etp)
        key = degrees._replace(ep=1, etp=1)
        if key not in self._dense_sharding:
            both = (self._shared(groups["dense"], size) for size in (dense, end))
            self._dense_sharding[key] = tuple(both)
        (gather, reduce), (end_gather, end_reduce) = self._dense_sharding[key]
        expert_gather, expert_reduce = self._shared(groups["efsdp"], experts)
        return Traffic(
            hops=self._links.latency(groups["dense"]),
            gather=gather + expert_gather,
            reduce=reduce + expert_reduce,
            replicas=self._summed(groups, dense / degrees.fsdp + experts / degrees.efsdp),
            end_gather=end_gather,
            end_reduce=end_reduce,
            end_replicas=self._summed(groups, end / degrees.fsdp),
        )

    def _shared(self, group: AxisGroup, size: float) -> tuple[float, float]:
        """Return the seconds of gathering and reducing parameters that a group has a part each."""
        if not size or group.size == 1:
            return 0.0, 0.0
        constants, half = self._constants, self._constants.half_bytes
        gather = self._links.gather(group, (1 if self._train.float8 else half) * size)
        reduce = self._links.gather(group, self._train.gradient_bytes * size)
        gather += constants.gather_copy_bytes * size / self._bandwidth
        return gather, reduce + constants.reduce_copy_bytes * size / self._bandwidth

    def _summed(self, groups: Mapping[str, AxisGroup], owned: float) -> float:
        return self._links.all_reduce(groups["dp_replicate"], self._train.gradient_bytes * owned)

    def parts(
        self,
        degrees: Degrees,
        groups: Mapping[str, AxisGroup],
        traffic: Traffic,
        setting: Setting,
        ranks: tuple[Rank, ...],
        micro_batch: int,
        microbatches: int,
        recompute: Recompute,
        need: float,
    ) -> tuple[float, ...]:
        """Return the seconds of one step on the pipeline rank that takes longest, by parts.

        Computing; communication over `AXES`, in their order; bubble; optimizer. ``traffic`` is the
        degrees' own, ``ranks`` are those of `MemoryModel.ranks`, and ``need`` are the bytes on the
        one that needs most.
        """
        layers = ranks[0].layers, ranks[-1].layers
        stages = self._ranks(degrees, groups, setting, layers, micro_batch, recompute)
        every = [
            self._rank_parts(degrees, groups, traffic, setting, one, microbatches, rank, need)
            for one, rank in zip(stages, ranks, strict=True)
        ]
        return max(every, key=sum)

    def _rank_parts(
        self,
        degrees: Degrees,
        groups: Mapping[str, AxisGroup],
        traffic: Traffic,
        setting: Setting,
        one: Stage,
        microbatches: int,
        rank: Rank,
        need: float,
    ) -> tuple[float, ...]:
        """Return what `parts` says of one pipeline rank."""
        fsdp, replicate = self._sharding(degrees, traffic, setting, one, microbatches)
        tp = microbatches * one.tp
        if degrees.fsdp == 1:
            # Whole experts that only the ranks of a tensor-parallel group share.
            tp, fsdp = tp + fsdp, 0.0
        constants, compute = self._constants, one.compute
        if self._eager and need > constants.retry_share * self._limit:
            # The allocator frees and asks the driver again, which waits for the device.
            compute += (constants.retry_slowdown - 1) * one.busy
        updated = rank.optimizer / self._train.moment_bytes
        return (
            microbatches * compute,
            tp,
            microbatches * one.cp,
            fsdp,
            replicate,
            microbatches * one.ep,
            microbatches * one.send + self._tied_ends(degrees, groups),
            one.bubble,
            constants.optimizer_bytes * updated / self._bandwidth,
        )

    def _ranks(
        self,
        degrees: Degrees,
        groups: Mapping[str, AxisGroup],
        setting: Setting,
        layers: tuple[int, int],
        micro_batch: int,
        recompute: Recompute,
    ) -> tuple[Stage, ...]:
        """Return one microbatch on the ranks that can be slowest, which splits of dp share.

        Those with most layers, and the last one, which has the output matrix too.
        """
        tp, ring, ulysses, ep, pp = (groups[n] for n in ("tp", "ring", "ulysses", "ep", "pp"))
        key = (micro_batch, recompute, setting, layers, degrees.etp, tp, ring, ulysses, ep, pp)
        found = self._stages.get(key)
        if found is None:
            (most, last), send = layers, 0.0
            with_experts = self._model.expert_layers / self._model.layers
            if with_experts and pp.size > 1 and self._model.dense_layers <= most:
                # Layers without experts are on the first rank; the others have nothing but experts.
                with_experts = 1.0
            one = self._microbatch(degrees, groups, setting, micro_batch, recompute, with_experts)
            if pp.size > 1:
                tokens = micro_batch * self._train.seq_len / degrees.cp
                size = self._constants.half_bytes * tokens * self._model.hidden / degrees.tp
                send = 2 * setting.virtual_stages * self._links.send(pp, size)
            # What the first and the last rank have of them, their fewer layers make up for.
            ends = (2 - self._model.tied) / pp.size
            found = (_stage(one, last, one.head, ends, send, pp.size, setting),)
            if pp.size > 1:
                found = _stage(one, most, 0.0, ends, send, pp.size, setting), *found
            self._stages[key] = found
        return found

    def _tied_ends(self, degrees: Degrees, groups: Mapping[str, AxisGroup]) -> float:
        """Return the seconds in which the two stages of a tied embedding sum its gradients.

        Each of the two sends its shard to the other, once in a step.
        """
        if not self._model.tied:
            return 0.0
        shard = self._model.embedding_parameters / (degrees.tp * degrees.fsdp)
        return self._links.send(groups["pp"], self._train.gradient_bytes * shard)

    def _microbatch(
        self,
        degrees: Degrees,
        groups: Mapping[str, AxisGroup],
        setting: Setting,
        micro_batch: int,
        recompute: Recompute,
        with_experts: float,
    ) -> Microbatch:
        """Return an average layer, of which the share ``with_experts`` has some."""
        # What depends on the stages too: which layers recompute, and eager collectives.
        stages = groups["pp"] if self._eager or self._train.recompute_layers else None
        # Forward of one microbatch and backward of another hide each other's exchange.
        paired = SCHEDULES[setting.schedule].overlaps_experts and degrees.pp > 1
        dense = (micro_batch, recompute, stages, groups["tp"], groups["ring"], groups["ulysses"])
        routed = (*dense, degrees.etp, paired, groups["ep"])
        key = with_experts, routed
        found = self._microbatches.get(key)
        if found is not None:
            return found
        total = [0.0] * 8
        for share, alike in ((1 - with_experts, dense), (with_experts, routed)):
            if share:
                if alike not in self._layers:
                    self._layers[alike] = self._layer(
                        degrees, groups, paired, micro_batch, recompute, experts=alike is routed
                    )
                parts = self._layers[alike]
                total = [sum_ + share * part for sum_, part in zip(total, parts, strict=True)]
        head = self._compute.head(degrees, micro_batch)
        found = self._microbatches[key] = Microbatch(head, *total)
        return found

    def _layer(
        self,
        degrees: Degrees,
        groups: Mapping[str, AxisGroup],
        paired: bool,
        micro_batch: int,
        recompute: Recompute,
        *,
        experts: bool,
    ) -> tuple[float, ...]:
        """Return the fields of `Microbatch` but the first for one layer."""
        work = self._compute.layer(degrees, micro_batch, recompute, experts=experts)
        # Where keys and values go round, attention has company.
        busy = work.attention if degrees.ring > 1 else 0.0
        tp = self._tensor(degrees, groups, micro_batch, recompute, experts=experts)
        cp = self._context(degrees, groups, micro_batch, recompute, work)
        ep = 0.0
        if experts:
            ep, parts_of_experts = self._exchange(degrees, groups, micro_batch, recompute)
            tp += parts_of_experts
        if paired:
            ep = _exposed(ep, work.forward + work.backward, self._constants.overlap_cost)
        launch, relaunch = work.launch, work.relaunch
        if self._eager and self._links.crosses(groups["pp"]):
            hops = 10 * (degrees.tp - 1) * self._constants.eager_hop_seconds
            launch, relaunch = launch + hops / 3, relaunch + hops * 2 / 3
        waits, rounds = tp + cp + ep, 3 if recompute == "full" else 2
        idle = max(0.0, launch - work.forward - waits / 3)
        idle_backward = max(0.0, relaunch - work.backward - waits * 2 / 3)
        return (
            work.forward + work.backward + idle + idle_backward,
            work.forward + idle,
            # Also while the device waits for the host.
            max(work.forward, launch) - busy,
            max(work.backward, relaunch) - rounds * busy,
            # Gradients of weights fill a bubble as fast as they are launched.
            *(max(work.weights, launch), tp, cp, ep),
        )

    def _tensor(
        self,
        degrees: Degrees,
        groups: Mapping[str, AxisGroup],
        micro_batch: int,
        recompute: Recompute,
        *,
        experts: bool,
    ) -> float:
        """Return the exposed seconds of tensor parallelism in one layer.

        Attention and the feed-forward part gather their input and reduce-scatter their output; the
        backward does the same and gathers the inputs once more for the weights' gradients
        (arXiv 2205.05198, section 4.2.2). Products hide bytes, but no hops.
        """
        if degrees.tp == 1:
            return 0.0
        tokens = micro_batch * self._train.seq_len / degrees.cp
        size = self._constants.half_bytes * tokens * self._model.hidden
        whole = not experts or degrees.etp > 1 or self._model.shared_ffn > 0
        again = {"full": 2, "selective-op": 1}.get(recompute, 0)
        calls = (5 + again) * (2 if whole else 1)
        # Eager layers wait for every collective.
        hidden = 0.0 if self._eager else self._constants.tp_hidden
        carried = (1 - hidden) * self._links.transfer(groups["tp"], size)
        return calls * (carried + self._links.latency(groups["tp"]))

    def _context(
        self,
        degrees: Degrees,
        groups: Mapping[str, AxisGroup],
        micro_batch: int,
        recompute: Recompute,
        work: Work,
    ) -> float:
        """Return the exposed seconds in which a sequence's parts meet in one layer.

        Keys and values go round beside attention, or are gathered before it with nothing beside
        them. Before attention Ulysses exchanges their heads and those of queries, after it those of
        the output (arXiv 2309.14509, section 3.2).
        """
        if degrees.cp == 1:
            return 0.0
        half, cost = self._constants.half_bytes, self._constants.overlap_cost
        tokens = micro_batch * self._train.seq_len
        model, forwards = self._model, 2 if recompute == "full" else 1
        keys = half * tokens * model.kv_width / degrees.tp
        # Where there are fewer kv heads than ranks, several ranks get the same one.
        heads = min(degrees.ulysses_degree, max(1, (model.kv_heads or 1) // degrees.tp))
        ring = self._links.gather(groups["ring"], 2 * keys / heads)
        queries = half * tokens * model.query_width / degrees.tp
        rows = 2 * (queries + keys * degrees.ulysses_degree / heads) / degrees.cp
        exchange = (forwards + 1) * self._links.all_to_all(groups["ulysses"], rows)
        if self._train.context == "all-gather":
            # Gathered once more for the backward, and their gradients reduced in bf16.
            return (forwards + 2) * ring + exchange
        forward = _exposed(ring, work.attention, cost) * forwards
        # Their gradients go round in float32 beside them.
        return forward + _exposed(3 * ring, 2 * work.attention, cost) + exchange

    def _exchange(
        self,
        degrees: Degrees,
        groups: Mapping[str, AxisGroup],
        micro_batch: int,
        recompute: Recompute,
    ) -> tuple[float, float]:
        """Return the exposed seconds of dispatch and combine in one layer, forward and backward.

        Without DualPipe a part of it has other kernels beside it. Where a tensor-parallel group has
        parts of every expert, it gathers the rows that came and reduces those that go back: the
        second figure.
        """
        if degrees.ep * degrees.etp == 1:
            return 0.0, 0.0
        model, train, half = self._model, self._train, self._constants.half_bytes
        tokens = micro_batch * train.seq_len / degrees.cp / degrees.tp
        inside, outside = self._copies(groups["ep"])
        size = half * tokens * model.hidden
        one = self._links.dispatch(groups["ep"], size, inside, outside)
        again = recompute == "full"
        total = (4 + 2 * again) * one
        if train.fp8_dispatch:
            small = self._links.dispatch(groups["ep"], size / 2, inside, outside)
            total -= (1 + again) * (one - small)
        gathered, shown = 0.0, 1 - self._constants.ep_hidden
        if degrees.etp > 1:
            rows = half * tokens * degrees.tp * model.top_k * model.hidden
            gathered = shown * (4 + 2 * again) * self._links.gather(groups["tp"], rows)
        return shown * total, gathered

    def _copies(self, group: AxisGroup) -> tuple[float, float]:
        """Return how often a token travels inside a node and between nodes, on average.

        A token's experts are anywhere with the same probability, on ``max_nodes`` nodes at most.
        Without deduplication every copy travels on its own.
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
        self,
        degrees: Degrees,
        traffic: Traffic,
        setting: Setting,
        one: Stage,
        microbatches: int,
    ) -> tuple[float, float]:
        """Return the exposed seconds of sharded parameters and of replicas in one step.

        Stage 3 and FSDP gather for both passes of every microbatch and reduce after each. FSDP with
        pipeline stages, and stages 1 and 2, gather once; stage 2 reduces for every microbatch.
        Stage 0 sums whole gradients, once. All layers of the rank hide what its ends need too.
        """
        layers = one.layers
        forward, backward = layers * one.free_forward, layers * one.free_backward
        gather = layers * traffic.gather + one.ends * traffic.end_gather
        reduce = layers * traffic.reduce + one.ends * traffic.end_reduce
        replicas = layers * traffic.replicas + one.ends * traffic.end_replicas
        cost, zero = self._constants.overlap_cost, setting.zero
        first = traffic.gather
        if zero == 3:
            # DeepSpeed: one collective for each weight, with nothing beside it.
            hops = 3 * layers * (self._constants.stage3_collectives - 1) * traffic.hops
            summed = _exposed(replicas, backward, cost)
            return microbatches * (2 * gather + reduce + hops), summed
        if zero is None and degrees.pp == 1:
            sharding = microbatches * _exposed(gather, forward, cost)
            returned = gather + reduce
            sharding += microbatches * _exposed(returned, backward, cost)
        elif zero == 0:
            # An all-reduce is a reduction to shards and a gathering of them, over all replicas.
            summed = _exposed(2 * reduce, backward, cost)
            return (summed, 0.0) if degrees.fsdp > 1 else (0.0, summed)
        else:
            returned = reduce
            rounds = microbatches if zero == 2 else 1
            sharding = _exposed(gather, forward, cost) + rounds * _exposed(reduce, backward, cost)
        summed = _exposed(replicas, max(0.0, backward - returned), cost)
        # Nothing runs beside the first gather.
        return sharding + first, summed


def _stage(
    one: Microbatch,
    layers: int,
    head: float,
    ends: float,
    send: float,
    pp: int,
    setting: Setting,
) -> Stage:
    """Return one microbatch on a rank with some layers, and perhaps the output matrix."""
    busy, bubble = layers * (one.compute + one.tp + one.cp + one.ep) + head + send, 0.0
    if pp > 1:
        seconds = busy, layers * one.forward, layers * one.weights
        bubble = SCHEDULES[setting.schedule].bubble(pp, setting.virtual_stages, *seconds)
    return Stage(
        compute=layers * one.compute + head,
        tp=layers * one.tp,
        cp=layers * one.cp,
        ep=layers * one.ep,
        send=send,
        busy=busy,
        bubble=bubble,
        layers=layers,
        ends=ends,
        free_forward=one.free_forward,
        free_backward=one.free_backward,
    )


def _exposed(communication: float, beside: float, cost: float) -> float:
    """Return what communication adds to the computation that it runs beside."""
    hidden = min(communication, max(0.0, beside))
    return communication - hidden + cost * hidden
