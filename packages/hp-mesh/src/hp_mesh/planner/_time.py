"""Seconds of one step: layers, exposed communication of every axis, bubble, optimizer."""

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from ._cluster import Cluster
from ._compute import ComputeModel, Work
from ._constants import (
    GATHER_COPY_BYTES,
    GRADIENT_BYTES,
    HALF_BYTES,
    HBM_EFFICIENCY,
    MASTER_BYTES,
    OPTIMIZER_BYTES,
    OVERLAP_COST,
    REDUCE_COPY_BYTES,
    TP_HIDDEN,
)
from ._links import Links
from ._point import Group, Point
from ._result import MemorySplit, TimeSplit
from ._shape import ModelShape
from ._train import Recompute, TrainSpec


class Exposed(NamedTuple):
    """Seconds of one microbatch in all layers: computing, and what communication adds to it.

    ``compute`` leaves out ``head``, the output matrix. Of it ``forward`` and ``backward`` have
    nothing beside them yet.
    """

    compute: float
    forward: float
    backward: float
    head: float
    tp: float
    cp: float
    ep: float


class Traffic(NamedTuple):
    """Seconds of the collectives on one layer's parameters and gradients."""

    gather: float
    reduce: float
    replicas: float


class TimeModel:
    """The time of a model's step on a cluster, for any degrees and groups."""

    def __init__(self, model: ModelShape, cluster: Cluster, train: TrainSpec) -> None:
        self._model, self._train = model, train
        self._compute = ComputeModel(model, cluster.device, train)
        self._links = Links(cluster)
        self._bandwidth = cluster.device.hbm_gbs * 1e9 * HBM_EFFICIENCY
        self._layers: dict[tuple[object, ...], Exposed] = {}
        self._counts = (model.layers - model.expert_layers, model.expert_layers)
        self._dense = model.dense_parameters / model.layers
        self._experts = model.expert_parameters / model.layers

    def traffic(self, point: Point, groups: Mapping[str, Group]) -> Traffic:
        """Return the collectives on an average layer's parameters, dense and experts."""
        dense, experts = self._dense / point.tp, self._experts / (point.ep * point.etp)
        owned = dense / point.fsdp + experts / point.efsdp
        gather = reduce = 0.0
        half = 1 if self._train.float8 else HALF_BYTES
        for size, group in ((dense, groups["fsdp"]), (experts, groups["efsdp"])):
            if size and group.size > 1:
                gather += self._links.gather(group, half * size)
                gather += GATHER_COPY_BYTES * size / self._bandwidth
                reduce += self._links.gather(group, GRADIENT_BYTES * size)
                reduce += REDUCE_COPY_BYTES * size / self._bandwidth
        replicas = self._links.all_reduce(groups["dp_replicate"], GRADIENT_BYTES * owned)
        return Traffic(gather, reduce, replicas)

    def split(
        self,
        point: Point,
        groups: Mapping[str, Group],
        traffic: Traffic,
        micro_batch: int,
        microbatches: int,
        recompute: Recompute,
        memory: MemorySplit,
    ) -> TimeSplit:
        """Return the seconds of one step on the pipeline rank that takes longest.

        ``traffic`` is the point's own, ``memory`` that of the configuration.
        """
        one = self._microbatch(point, groups, micro_batch, recompute)
        pp, stages = point.pp, self._train.virtual_stages if point.pp > 1 else 1
        layers = self._model.layers
        share = ceil(layers / (pp * stages)) * stages / layers
        # The rank with the output matrix gets fewer layers where that is possible.
        compute = max(share * one.compute, (one.compute + one.head) / pp)
        send = 0.0
        if pp > 1:
            tokens = micro_batch * self._train.seq_len / point.cp
            size = HALF_BYTES * tokens * self._model.hidden / point.tp
            send = 2 * stages * self._links.send(groups["pp"], size)
        fsdp, replicate = self._sharding(point, traffic, one, share, microbatches)
        waiting = share * (one.tp + one.cp + one.ep)
        found = {
            "tp": microbatches * share * one.tp,
            "cp": microbatches * share * one.cp,
            "fsdp": fsdp,
            "dp_replicate": replicate,
            "ep": microbatches * share * one.ep,
            "pp": microbatches * send + self._tied_ends(point, groups),
        }
        return TimeSplit(
            compute=microbatches * compute,
            communication={name: found[name] for name in found if groups[name].size > 1},
            bubble=(pp - 1) / stages * (compute + waiting + send),
            optimizer=OPTIMIZER_BYTES * memory.parameters / MASTER_BYTES / self._bandwidth,
        )

    def _tied_ends(self, point: Point, groups: Mapping[str, Group]) -> float:
        """Return the seconds in which the two stages of a tied embedding sum its gradients.

        Each of the two sends its shard to the other, once in a step.
        """
        if not self._model.tied:
            return 0.0
        shard = self._model.embedding_parameters / (point.tp * point.fsdp)
        return self._links.send(groups["pp"], GRADIENT_BYTES * shard)

    def _microbatch(
        self, point: Point, groups: Mapping[str, Group], micro_batch: int, recompute: Recompute
    ) -> Exposed:
        inside = (groups["tp"], groups["ring"], groups["ulysses"], groups["ep"])
        key = (micro_batch, recompute, point.etp, *inside)
        if key not in self._layers:
            total = [0.0] * 6
            for count, experts in zip(self._counts, (False, True), strict=True):
                if count:
                    work = self._compute.layer(point, micro_batch, recompute, experts=experts)
                    # Where keys and values go round, attention has company.
                    busy = work.attention if point.ring > 1 else 0.0
                    rounds = 3 if recompute == "full" else 2
                    parts = (
                        work.forward + work.backward,
                        work.forward - busy,
                        work.backward - rounds * busy,
                        self._tensor(point, groups, micro_batch, recompute, experts=experts),
                        self._context(point, groups, micro_batch, recompute, work),
                        self._exchange(point, groups, micro_batch, recompute) if experts else 0.0,
                    )
                    total = [sum_ + count * part for sum_, part in zip(total, parts, strict=True)]
            compute, forward, backward, tp, cp, ep = total
            head = self._compute.head(point, micro_batch)
            self._layers[key] = Exposed(compute, forward, backward, head, tp, cp, ep)
        return self._layers[key]

    def _tensor(
        self,
        point: Point,
        groups: Mapping[str, Group],
        micro_batch: int,
        recompute: Recompute,
        *,
        experts: bool,
    ) -> float:
        """Return the exposed seconds of tensor parallelism in one layer.

        Attention and the feed-forward part gather their input and reduce-scatter their output; the
        backward does the same and gathers the inputs once more for the weights' gradients
        (arXiv 2205.05198, section 4.2.2).
        """
        tokens = micro_batch * self._train.seq_len / point.cp
        size = HALF_BYTES * tokens * self._model.hidden
        whole = not experts or point.etp > 1 or self._model.shared_ffn > 0
        again = {"full": 2, "selective-op": 1}.get(recompute, 0)
        calls = (5 + again) * (2 if whole else 1)
        return (1 - TP_HIDDEN) * calls * self._links.gather(groups["tp"], size)

    def _context(
        self,
        point: Point,
        groups: Mapping[str, Group],
        micro_batch: int,
        recompute: Recompute,
        work: Work,
    ) -> float:
        """Return the exposed seconds in which a sequence's parts meet in one layer.

        Keys and values go round beside attention. Before it Ulysses exchanges their heads and those
        of queries, after it those of the output (arXiv 2309.14509, section 3.2).
        """
        tokens = micro_batch * self._train.seq_len
        model, forwards = self._model, 2 if recompute == "full" else 1
        keys = HALF_BYTES * tokens * model.kv_width / point.tp
        # Where there are fewer kv heads than ranks, several ranks get the same one.
        heads = min(point.ulysses_degree, max(1, (model.kv_heads or 1) // point.tp))
        ring = self._links.gather(groups["ring"], 2 * keys / heads)
        forward = _exposed(ring, work.attention) * forwards
        queries = HALF_BYTES * tokens * model.query_width / point.tp
        rows = 2 * (queries + keys * point.ulysses_degree / heads) / point.cp
        exchange = (forwards + 1) * self._links.all_to_all(groups["ulysses"], rows)
        # Their gradients go round in float32 beside them.
        return forward + _exposed(3 * ring, 2 * work.attention) + exchange

    def _exchange(
        self, point: Point, groups: Mapping[str, Group], micro_batch: int, recompute: Recompute
    ) -> float:
        """Return the seconds of dispatch and combine in one layer, forward and backward."""
        tokens = micro_batch * self._train.seq_len / point.cp
        rows = tokens * self._model.top_k / (point.tp if point.etp == 1 else 1)
        calls = 6 if recompute == "full" else 4
        return calls * self._links.all_to_all(groups["ep"], HALF_BYTES * rows * self._model.hidden)

    def _sharding(
        self, point: Point, traffic: Traffic, one: Exposed, share: float, microbatches: int
    ) -> tuple[float, float]:
        """Return the exposed seconds of sharded parameters and of replicas in one step."""
        layers = self._model.layers
        forward, backward = one.forward / layers, one.backward / layers
        gather, reduce = traffic.gather, traffic.reduce
        # With stages parameters stay gathered for the step: these run beside the first forward and
        # the last backward. Without, every backward gathers a second time.
        rounds = 1 if point.pp > 1 else microbatches
        returned = reduce if point.pp > 1 else gather + reduce
        sharding = _exposed(gather, forward) + _exposed(returned, backward)
        calls = share * layers
        replicas = _exposed(traffic.replicas, max(0.0, backward - returned))
        # Nothing runs beside the first gather.
        return calls * rounds * sharding + gather, calls * replicas


def _exposed(communication: float, beside: float) -> float:
    """Return what communication adds to the computation that it runs beside."""
    hidden = min(communication, beside)
    return communication - hidden + OVERLAP_COST * hidden
