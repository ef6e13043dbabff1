"""Searches: all valid configurations of a world, one configuration, the smallest world."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple, TypeAlias

from .._degrees import BASE_AXES
from .._dims import ParallelDims
from .._errors import (
    ParallelDimsError,
    Violation,
    as_integer,
    divisors,
    integer_violations,
    kind_violations,
    number_violation,
    raise_errors,
)
from .._layout import AxisGroup, RankLayout
from ._calibration import Calibration
from ._cluster import Cluster, expert_groups_of, groups_of
from ._legal import AXES as DEGREES
from ._legal import Legality, batch_violations, check_fixed, settings_of
from ._memory import MemoryModel, Rank
from ._result import (
    BORDER,
    CLASSES,
    GIB,
    Candidate,
    Comparison,
    Degrees,
    MemorySplit,
    Plan,
    Point,
    Ranking,
    Setting,
    TimeSplit,
    classify,
    degrees_of,
    index_of_best,
)
from ._schedules import SCHEDULES
from ._shape import ModelShape
from ._time import AXES, TimeModel, Traffic
from ._train import RECOMPUTE, Recompute, TrainSpec
from ._trust import trust_of

DEFAULT = Calibration()
# Number of sets of degrees between two reports of progress.
REPORTED = 256


class Found(NamedTuple):
    """One configuration in the order of a plan.

    Attributes:
        fit: Index of its class in `CLASSES`.
        cost: Seconds of one step, or bytes if it does not fit.
        point: The configuration.
        ranks: Memory of its first and last pipeline rank.
    """

    fit: int
    cost: float
    point: Point
    ranks: tuple[Rank, ...]


Communication: TypeAlias = tuple[Mapping[str, AxisGroup], Traffic]


def plan(
    model: ModelShape,
    cluster: Cluster,
    train: TrainSpec,
    *,
    fix: Mapping[str, int] | None = None,
    calibration: Calibration = DEFAULT,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Rank all valid configurations of a run, and list the reasons against the others.

    Tries every set of degrees for the world size. If ``train`` leaves the micro batch, the
    recomputation, the schedule or the ZeRO stage open, each set gets the fastest values that fit.
    Experts are folded into the ranks of the dense layers, and the axes are in the default order;
    `estimate` also accepts other configurations. The result is deterministic. It needs no torch and
    communicates nothing.

    Args:
        model: Shape of the model.
        cluster: Devices and links.
        train: Batch, precision, recomputation and schedule.
        fix: Degrees by name, such as ``{"tp": 8}``: ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``,
            ``tp``, ``ep`` or ``etp``. Only configurations with these degrees are tried. None tries
            all.
        calibration: Constants of the cost model.
        progress: Called from time to time with the number of estimated sets of degrees and their
            total.

    Returns:
        The plan. Its candidates are built when they are read. ``plan.best`` is the recommended one.

    Raises:
        ParallelDimsError: An argument has a wrong type, the accelerator has no fp8 peak for
            ``float8=True``, an option needs experts and the model has none, or ``fix`` has an
            unknown name or a degree that no configuration of the world can have.

    Examples:
        >>> from hp_mesh.planner import MODELS
        >>> train = TrainSpec(seq_len=8192, global_batch=64)
        >>> found = plan(MODELS["llama3-8b"], Cluster(world_size=8, accelerator="H100"), train)
        >>> found.best.dims.dp_shard * found.best.dims.tp
        8
        >>> plan(found.model, found.cluster, train, fix={"tp": 8}).best.dims.tp
        8
    """
    raise_errors(_kind_violations(model, cluster, train, calibration))
    fixed = {} if fix is None else check_fixed(fix, model, cluster.world_size)
    search = Search(model, cluster, train, calibration)
    legality = Legality(model, train, fixed)
    every = list(legality.legal(cluster.world_size))
    found: list[Found] = []
    for done, degrees in enumerate(every):
        if progress and done % REPORTED == 0:
            progress(done, len(every))
        best, violations = search.best(degrees, degrees.layout)
        if best:
            found.append(best)
        else:
            legality.reject(degrees, DEGREES if model.experts else BASE_AXES, violations)
    if progress:
        progress(len(every), len(every))
    found.sort(key=lambda entry: entry[:3])
    classes = [entry.fit for entry in found]
    fits = Ranking(found[: classes.count(0)], search.candidate)
    first = index_of_best(fits)
    found[: first + 1] = [*found[first : first + 1], *found[:first]]
    return Plan(
        model=model,
        cluster=cluster,
        train=train,
        candidates=Ranking(found, search.candidate),
        rejected=tuple(legality.rejected),
        fitting=classes.count(0),
        bordering=classes.count(1),
        fix=fixed,
        calibration=calibration,
    )


def estimate(
    model: ModelShape,
    cluster: Cluster,
    train: TrainSpec,
    dims: ParallelDims,
    micro_batch: int | None = None,
    recompute: Recompute | None = None,
    *,
    calibration: Calibration = DEFAULT,
) -> Candidate:
    """Estimate memory and time of one configuration.

    With a ``ulysses_degree``, the ranks of a Ulysses group exchange heads, and the other ranks of
    ``cp`` exchange keys and values.

    Args:
        model: Shape of the model.
        cluster: Devices and links.
        train: Batch, precision, recomputation and schedule. Values that it leaves open are chosen
            as in `plan`.
        dims: Degrees. Without a world size they are resolved for the cluster's.
        micro_batch: Number of sequences per microbatch. None takes the value of ``train``.
        recompute: Activations that backward recomputes. None takes the value of ``train``.
        calibration: Constants of the cost model.

    Returns:
        The candidate. ``violations`` is empty if it fits. ``trust`` rates the estimate.
        `Plan.compare` compares it with the best configuration.

    Raises:
        ParallelDimsError: The configuration breaks at least one rule. The error lists all of them.

    Examples:
        >>> train = TrainSpec(seq_len=8192, global_batch=64)
        >>> cluster = Cluster(world_size=64, accelerator="H100")
        >>> candidate = estimate(MODELS["llama3-70b"], cluster, train, ParallelDims(tp=8))
        >>> candidate.dims.dp_shard
        8
    """
    wrong = list(_kind_violations(model, cluster, train, calibration))
    wrong += kind_violations("dims", dims, ParallelDims)
    raise_errors(wrong)
    if micro_batch is not None:
        train = replace(train, micro_batch=micro_batch)
    if recompute is not None:
        layers = None if recompute == "none" else train.recompute_layers
        train = replace(train, recompute=recompute, recompute_layers=layers)
    if dims.world_size is None:
        dims = dims.resolve(cluster.world_size)
    degrees = degrees_of(dims)
    wrong += _dims_violations(dims, degrees.world, cluster.world_size)
    wrong += Legality(model, train).violations(dims, degrees)
    raise_errors(wrong)
    search = Search(model, cluster, train, calibration)
    best, violations = search.best(degrees, dims.layout)
    if best is None:
        raise ParallelDimsError(list(violations))
    return search.candidate(best, dims)


def compare(
    model: ModelShape,
    cluster: Cluster,
    train: TrainSpec,
    dims: ParallelDims,
    *,
    calibration: Calibration = DEFAULT,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Estimate one configuration and compare it with the best of the same run.

    Args:
        model: Shape of the model.
        cluster: Devices and links.
        train: Batch, precision, recomputation and schedule. Values that it leaves open are chosen
            separately for both configurations.
        dims: Degrees of the configuration.
        calibration: Constants of the cost model.
        progress: Called as by `plan`.

    Returns:
        Both configurations, and the difference of each part of their memory and step time.

    Raises:
        ParallelDimsError: The configuration breaks at least one rule. The error lists all of them.

    Examples:
        >>> train = TrainSpec(seq_len=8192, global_batch=64)
        >>> cluster = Cluster(world_size=64, accelerator="H100")
        >>> compare(MODELS["llama3-8b"], cluster, train, ParallelDims(tp=8)).slowdown > 1
        True
    """
    own = estimate(model, cluster, train, dims, calibration=calibration)
    found = plan(model, cluster, train, calibration=calibration, progress=progress)
    return found.compare(own)


def smallest_world(
    model: ModelShape,
    cluster: Cluster,
    train: TrainSpec,
    *,
    largest: int = 2**20,
    calibration: Calibration = DEFAULT,
    progress: Callable[[int, int], None] | None = None,
) -> int | None:
    """Find the smallest number of devices, in whole nodes, on which a run fits.

    Tries powers of two nodes first. Then it tries numbers of devices between the last two powers,
    in steps of at least a sixteenth of the larger one.

    Args:
        model: Shape of the model.
        cluster: Devices and links. Its ``world_size`` is ignored.
        train: Batch, precision, recomputation and schedule.
        largest: Largest number of devices to try.
        calibration: Constants of the cost model.
        progress: Called with the number of worlds tried and their largest possible number.

    Returns:
        The number of devices, or None if the run does not fit on ``largest`` devices.

    Raises:
        ParallelDimsError: An argument has a wrong type, ``largest`` is not positive, the
            accelerator has no fp8 peak for ``float8=True``, or an option needs experts and the
            model has none.

    Examples:
        >>> train = TrainSpec(seq_len=8192, global_batch=64, recompute="full")
        >>> smallest_world(MODELS["llama3-70b"], Cluster(world_size=8, accelerator="H100"), train)
        16
    """
    largest = as_integer(largest)
    wrong = [*_kind_violations(model, cluster, train, calibration)]
    raise_errors([*wrong, *integer_violations({"largest": largest})])
    node = cluster.ranks_per_node
    worlds = [node * 2**power for power in range(64) if node * 2**power <= largest]
    tried = 0

    def fits(world: int) -> bool:
        nonlocal tried
        if progress:
            progress(tried, len(worlds) + 7)
        tried += 1
        search = Search(model, replace(cluster, world_size=world), train, calibration)
        every = (search.best(d, d.layout)[0] for d in Legality(model, train).legal(world))
        return any(found is not None and found.fit == 0 for found in every)

    enough = next((world for world in worlds if fits(world)), None)
    if enough is None:
        return None
    step = max(node, enough // 16 // node * node)
    between = range(enough // 2 // node * node + step, enough, step)
    return next((world for world in between if fits(world)), enough)


class Search:
    """Estimates memory and time of the configurations of one run.

    Intermediate results that many configurations share are computed once.
    """

    def __init__(
        self, model: ModelShape, cluster: Cluster, train: TrainSpec, calibration: Calibration
    ) -> None:
        raise_errors(_run_violations(model, cluster, train))
        self._model, self._cluster, self._train = model, cluster, train
        self._memory = MemoryModel(model, train, calibration)
        share = cluster.memory_fraction
        share = train.memory_fraction if share is None else share
        self._limit = cluster.device.memory_gib * GIB * share
        self._time = TimeModel(model, cluster, train, calibration, self._limit)
        # Kinds of recomputation to try, the fastest first. With fused kernels, "selective" equals
        # "none".
        kinds = [kind for kind in RECOMPUTE if kind != "selective" or not train.fused]
        self._kinds = [train.recompute] if train.recompute else kinds
        self._settings: dict[int, list[Setting]] = {}
        self._groups: dict[tuple[int, ...], dict[str, AxisGroup]] = {}

    def _communication(
        self, degrees: Degrees, layout: Callable[[], RankLayout]
    ) -> Callable[[], Communication]:
        """Return a function that computes groups and traffic once, when first called."""

        @cache
        def communication() -> Communication:
            found, replicated = layout(), self._train.zero == 0
            key = degrees[:5]  # without the degrees of experts
            if key not in self._groups:
                self._groups[key] = groups_of(found, replicated=replicated)
            groups = self._groups[key] | expert_groups_of(found, replicated=replicated)
            return groups, self._time.traffic(degrees, groups)

        return communication

    def best(
        self, degrees: Degrees, layout: Callable[[], RankLayout]
    ) -> tuple[Found | None, tuple[Violation, ...]]:
        """Return the best configuration of some degrees, or the reasons why there is none.

        ``layout`` is called only if a configuration is small enough.
        """
        train, given = self._train, self._train.micro_batch
        sizes = divisors(train.global_batch // degrees.dp) if given is None else (given,)
        communication = self._communication(degrees, layout)
        if degrees.pp not in self._settings:
            self._settings[degrees.pp] = settings_of(self._model, train, degrees.pp)
        best: Found | None = None
        broken: tuple[Violation, ...] = ()
        for setting in self._settings[degrees.pp]:
            legal = sizes
            if given is not None or SCHEDULES[setting.schedule].violations:
                reasons = {
                    size: tuple(batch_violations(degrees, train, setting, size)) for size in sizes
                }
                legal = tuple(size for size in sizes if not reasons[size])
                broken = broken or reasons[sizes[0]]
            if legal:
                found = self._best_of(degrees, setting, legal, communication)
                best = found if best is None or found[:2] < best[:2] else best
        return best, () if best else broken

    def _best_of(
        self,
        degrees: Degrees,
        setting: Setting,
        sizes: Sequence[int],
        communication: Callable[[], Communication],
    ) -> Found:
        """Return the fastest microbatch size and recomputation that fit, for one setting.

        If nothing fits, returns the fastest borderline one, else the smallest one. Memory grows
        with the microbatch and shrinks with recomputation.
        """
        ranks = self._memory.ranks(degrees, setting)
        batch = self._train.global_batch // degrees.dp

        def point(size: int, kind: Recompute) -> Point:
            return Point(degrees, size, kind, setting, batch // size)

        smallest = point(sizes[0], self._kinds[-1])
        least = sum(self._memory.need(smallest, ranks))
        fit = CLASSES.index(classify(least, self._limit))
        best = Found(fit, least, smallest, ranks)
        if fit == len(CLASSES) - 1:
            return best
        best = best._replace(cost=float("inf"))
        limit = self._limit * (BORDER if fit else 1)
        kinds = self._kinds
        for size in sizes:
            for kind in kinds:
                tried = point(size, kind)
                need = sum(self._memory.need(tried, ranks))
                if need > limit:
                    kinds = kinds[1:]  # larger sizes need even more memory
                    continue
                seconds = sum(self._time.parts(tried, *communication(), ranks, need))
                if seconds < best.cost:
                    best = Found(fit, seconds, tried, ranks)
                if not self._time.retries(need):
                    break  # more recomputation only takes longer
        return best

    def candidate(self, found: Found, dims: ParallelDims | None = None) -> Candidate:
        """Return the complete estimate of a configuration."""
        point, degrees = found.point, found.point.degrees
        dims = degrees.dims() if dims is None else dims
        groups, traffic = self._communication(degrees, dims.layout)()
        memory = self._memory.need(point, found.ranks)
        parts = self._time.parts(point, groups, traffic, found.ranks, sum(memory))
        compute, *communication, bubble, optimizer = parts
        time = TimeSplit(
            compute=compute,
            communication={
                axis: seconds
                for axis, seconds in zip(AXES, communication, strict=True)
                if groups[axis].size > 1
            },
            bubble=bubble,
            optimizer=optimizer,
        )
        return Candidate(
            dims=dims,
            micro_batch=point.micro_batch,
            microbatches=point.microbatches,
            recompute=point.recompute,
            memory=MemorySplit(**dict(zip(MemorySplit.__dataclass_fields__, memory, strict=True))),
            time=time,
            limit=self._limit,
            tokens=self._train.tokens,
            flops=self._train.tokens * self._model.flops_per_token(self._train.seq_len),
            peak_tflops=self._cluster.device.tflops,
            setting=point.setting,
            trust=trust_of(self._model, self._cluster, self._train, point, time),
        )


def _kind_violations(
    model: object, cluster: object, train: object, calibration: object
) -> Iterator[Violation]:
    yield from kind_violations("model", model, ModelShape)
    yield from kind_violations("cluster", cluster, Cluster)
    yield from kind_violations("train", train, TrainSpec)
    yield from kind_violations("calibration", calibration, Calibration)


def _run_violations(model: ModelShape, cluster: Cluster, train: TrainSpec) -> Iterator[Violation]:
    if not model.experts and train.fp8_dispatch:
        yield number_violation("fp8_dispatch", True, "False, or give a model with experts")
    if not model.experts and train.max_nodes is not None:
        legal = "None, or give a model with experts"
        yield number_violation("max_nodes", train.max_nodes, legal)
    chip = cluster.device
    if train.float8 and not chip.tflops_fp8:
        yield Violation(
            rule="float8",
            values={"float8": True, "accelerator": chip.name},
            reason=f"float8=True, but accelerator {chip.name} has no fp8 rate (tflops_fp8=0)",
        )


def _dims_violations(dims: ParallelDims, world: int, cluster: int) -> Iterator[Violation]:
    if world != cluster:
        yield Violation(
            rule="world",
            values={"world_size": world, "cluster": cluster},
            reason=f"world_size={world} is not the world_size={cluster} of the cluster",
        )
    if not dims.fsdp_folds_cp and dims.cp > 1:
        yield Violation(
            rule="fsdp-folds-cp",
            values={"fsdp_folds_cp": False, "cp": dims.cp},
            reason="estimates are for parameters sharded over dp_shard and cp; "
            "give fsdp_folds_cp=True or cp=1",
        )
    if dims.etp not in (1, dims.tp):
        yield Violation(
            rule="etp",
            values={"etp": dims.etp, "tp": dims.tp},
            reason=f"etp={dims.etp} is neither 1 nor tp={dims.tp}, and estimates need one of them",
        )
