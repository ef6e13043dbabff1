"""Every valid configuration of a world, estimated and ranked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .._degrees import DEFAULT_ORDER
from .._dims import ParallelDims
from .._errors import Violation, divisors, raise_errors
from ._cluster import Cluster
from ._legal import DENSE_AXES, Legality, batch_violations
from ._memory import MemoryModel, Rank
from ._numbers import choice_violations, integer_violations, kind_violations
from ._plan import Plan
from ._point import Group, Point, groups_of, point_of
from ._ranking import Ranking
from ._result import GIB, Candidate, Fit, MemorySplit, Rejection, TimeSplit, classify
from ._shape import ModelShape
from ._time import TimeModel, Traffic
from ._train import RECOMPUTE, Recompute, TrainSpec

CLASSES: tuple[Fit, ...] = ("fits", "borderline", "does not fit")


class Found(NamedTuple):
    """One configuration in a plan's order: its class, then seconds, or bytes if too large."""

    place: int
    cost: float
    point: Point
    micro_batch: int
    recompute: Recompute


class Site(NamedTuple):
    """A point with all that its settings share."""

    point: Point
    groups: Mapping[str, Group]
    ranks: tuple[Rank, ...]
    traffic: Traffic


def plan(model: ModelShape, cluster: Cluster, train: TrainSpec) -> Plan:
    """Return every valid configuration of a run, ranked, and why the others are rejected.

    All degrees of the world, and the micro batches and kinds of recomputation where ``train``
    leaves them open. Where a setting is already too large, those that only need more are left out.
    Experts are folded into the dense ranks, axes are in the default order, sequences go round a
    ring without Ulysses, and a model without experts has ``ep`` and ``etp`` 1; `estimate` takes
    other configurations too. Deterministic; nothing is communicated and torch is not needed. Raises
    `ParallelDimsError` for arguments of other types and an accelerator without a rate for fp8.
    """
    raise_errors(_kind_violations(model, cluster, train))
    search = Search(model, cluster, train)
    legal = Legality(model, train)
    found: list[Found] = []
    for point in legal.points(cluster.world_size):
        settings, violations = search.settings(search.site(point, DEFAULT_ORDER))
        found += settings
        if violations:
            axes = DENSE_AXES if not model.experts else (*DENSE_AXES, "ep", "etp")
            degrees = {axis: getattr(point, axis) for axis in axes}
            legal.rejected.append(Rejection(degrees=degrees, violations=violations))
    found.sort()
    places = [entry.place for entry in found]
    return Plan(
        model=model,
        cluster=cluster,
        train=train,
        candidates=Ranking(found, search.candidate),
        rejected=tuple(legal.rejected),
        fitting=places.count(0),
        bordering=places.count(1),
    )


def estimate(
    model: ModelShape,
    cluster: Cluster,
    train: TrainSpec,
    dims: ParallelDims,
    micro_batch: int | None = None,
    recompute: Recompute | None = None,
) -> Candidate:
    """Return the memory and time of one configuration.

    ``dims`` without a world take the cluster's. ``micro_batch`` and ``recompute`` are ``train``'s
    where None, and where that leaves them open too, the best ones. With a ``ulysses_degree`` its
    ranks exchange heads, equally many each, and keys and values go round the rest of ``cp``. Raises
    `ParallelDimsError` with every rule that the configuration breaks.
    """
    wrong = list(_kind_violations(model, cluster, train))
    wrong += kind_violations("dims", dims, ParallelDims)
    raise_errors(wrong)
    micro_batch = train.micro_batch if micro_batch is None else micro_batch
    recompute = train.recompute if recompute is None else recompute
    if micro_batch is not None:
        wrong += integer_violations({"micro_batch": micro_batch})
    if recompute is not None:
        wrong += choice_violations("recompute", recompute, RECOMPUTE)
    raise_errors(wrong)
    if dims.world_size is None:
        dims = dims.resolve(cluster.world_size)
    point = point_of(dims)
    if point.world != cluster.world_size:
        wrong += [_other_world(point.world, cluster.world_size)]
    if not dims.fsdp_folds_cp and dims.cp > 1:
        wrong += [_unfolded(dims.cp)]
    wrong += Legality(model, train).violations(dims, point)
    raise_errors(wrong)
    search = Search(model, cluster, train)
    site = search.site(point, dims.order, dims.ep_mode)
    found, violations = search.settings(site, micro_batch, recompute)
    raise_errors(violations)
    return search.candidate(min(found), dims)


class Search:
    """The estimates of one run, with what many configurations share computed once."""

    def __init__(self, model: ModelShape, cluster: Cluster, train: TrainSpec) -> None:
        raise_errors(_precision_violations(cluster, train))
        self._model, self._cluster, self._train = model, cluster, train
        self._memory = MemoryModel(model, train)
        self._time = TimeModel(model, cluster, train)
        self._limit = cluster.device.memory_gib * GIB * train.memory_fraction

    def site(self, point: Point, order: Sequence[str], ep_mode: str = "folded") -> Site:
        """Return a point with what its settings share, for an order of the axes."""
        groups = groups_of(point, order, peer=ep_mode == "peer")
        return Site(point, groups, self._memory.ranks(point), self._time.traffic(point, groups))

    def settings(
        self,
        site: Site,
        micro_batch: int | None = None,
        recompute: Recompute | None = None,
    ) -> tuple[list[Found], tuple[Violation, ...]]:
        """Return the settings to run a point with, or what is wrong with the one that is fixed."""
        given = self._train.micro_batch if micro_batch is None else micro_batch
        point, local = site.point, self._train.global_batch // site.point.dp
        sizes = divisors(local) if given is None else (given,)
        broken = {size: tuple(batch_violations(point, self._train, size)) for size in sizes}
        legal = [size for size in sizes if not broken[size]]
        if not legal:
            return [], broken[sizes[0]]
        kinds = self._kinds(self._train.recompute if recompute is None else recompute)
        return list(self._sweep(site, legal, kinds)), ()

    def _kinds(self, fixed: Recompute | None) -> tuple[Recompute, ...]:
        """Return the kinds of recomputation to try, the one that needs least memory first."""
        if fixed is not None:
            return (fixed,)
        return tuple(
            kind
            for kind in reversed(RECOMPUTE)
            # With fused kernels this is the same as recomputing nothing.
            if kind != "selective" or not self._train.fused
        )

    def _sweep(self, site: Site, sizes: list[int], kinds: tuple[Recompute, ...]) -> Iterator[Found]:
        for kind in kinds:
            for size in sizes:
                memory, time = self._splits(site, size, kind)
                fit = classify(memory.total, self._limit)
                cost = time().total if fit != "does not fit" else memory.total
                yield Found(CLASSES.index(fit), cost, site.point, size, kind)
                if fit == "does not fit":
                    if size == sizes[0] and kind == kinds[0]:
                        return
                    break

    def _splits(
        self, site: Site, micro_batch: int, recompute: Recompute
    ) -> tuple[MemorySplit, Callable[[], TimeSplit]]:
        """Return the memory of a setting, and what gives its time."""
        point = site.point
        microbatches = self._train.global_batch // (point.dp * micro_batch)
        memory = self._memory.split(point, site.ranks, micro_batch, microbatches, recompute)
        return memory, lambda: self._time.split(
            point, site.groups, site.traffic, micro_batch, microbatches, recompute, memory
        )

    def candidate(self, found: Found, dims: ParallelDims | None = None) -> Candidate:
        """Return all that is estimated of a configuration."""
        point = found.point
        dims = point.dims() if dims is None else dims
        site = self.site(point, dims.order, dims.ep_mode)
        memory, time = self._splits(site, found.micro_batch, found.recompute)
        return Candidate(
            dims=dims,
            micro_batch=found.micro_batch,
            microbatches=self._train.global_batch // (point.dp * found.micro_batch),
            recompute=found.recompute,
            memory=memory,
            time=time(),
            limit=self._limit,
            tokens=self._train.tokens,
            flops=self._train.tokens * self._model.flops_per_token(self._train.seq_len),
            peak_tflops=self._cluster.device.tflops,
        )


def _kind_violations(model: object, cluster: object, train: object) -> Iterator[Violation]:
    yield from kind_violations("model", model, ModelShape)
    yield from kind_violations("cluster", cluster, Cluster)
    yield from kind_violations("train", train, TrainSpec)


def _precision_violations(cluster: Cluster, train: TrainSpec) -> Iterator[Violation]:
    chip = cluster.device
    if train.float8 and not chip.tflops_fp8:
        yield Violation(
            rule="float8",
            values={"float8": True, "accelerator": chip.name},
            reason=f"float8=True, but accelerator {chip.name} has no fp8 rate (tflops_fp8=0)",
        )


def _unfolded(cp: int) -> Violation:
    return Violation(
        rule="fsdp-folds-cp",
        values={"fsdp_folds_cp": False, "cp": cp},
        reason="estimates are for parameters sharded over dp_shard and cp; "
        "give fsdp_folds_cp=True or cp=1",
    )


def _other_world(world: int, cluster: int) -> Violation:
    return Violation(
        rule="world",
        values={"world_size": world, "cluster": cluster},
        reason=f"world_size={world} is not the world_size={cluster} of the cluster",
    )
