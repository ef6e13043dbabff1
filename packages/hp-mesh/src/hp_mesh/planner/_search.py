"""Searches: rank all configurations, estimate one, find the smallest world, and give hints.

A configuration has degrees, a microbatch size, a kind of recomputation and a setting (pipeline
schedule and ZeRO stage).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from .._degrees import BASE_AXES
from .._dims import ParallelDims
from .._errors import (
    ParallelDimsError,
    Violation,
    as_integer,
    broken,
    divisors,
    integer_violations,
    kind_violations,
    number_violation,
    raise_errors,
)
from .._layout import AxisGroup
from ._calibration import DEFAULT_CALIBRATION, Calibration, trust_of
from ._cluster import Cluster, expert_groups_of, groups_of
from ._configuration import (
    AXES,
    Degrees,
    Legality,
    Point,
    Setting,
    batch_violations,
    check_fixed,
    degrees_of,
    settings_of,
)
from ._memory import MemoryModel
from ._result import (
    BORDER,
    CLASSES,
    GIB,
    Candidate,
    Comparison,
    Hint,
    MemorySplit,
    Plan,
    Ranking,
    TimeSplit,
    classify,
    index_of_best,
)
from ._schedules import SCHEDULES
from ._shape import ModelShape
from ._time import COMMUNICATING, TimeModel, Traffic
from ._train import ANY, RECOMPUTE, Recompute, TrainSpec

# `progress` is called once for this number of estimated sets of degrees.
REPORTED = 256
# Options of `TrainSpec` that `hints` tries, with the value to try. "any" tries all values in one
# search. An option is missing here if it changes hardware or numerics, if no value is faster than
# the default, or if the planner already chooses the value.
HINTED: Mapping[str, Any] = {
    "fused_loss": True,
    "schedule": ANY,
    "zero": ANY,
    "context": "all-gather",
    "dispatch": "copies",
}
# An option has no effect if the degree of its axis is 1.
HINTED_AXES = {"schedule": "pp", "context": "cp", "dispatch": "ep"}
DEFAULTS = {option.name: option.default for option in fields(TrainSpec)}
# Smallest reduction of the step time that makes a hint, as a share of the step time.
GAIN = 0.01
MOST_HINTS = 3
LIKELY = 100  # number of configurations of each class with which `hints` tries an option


class Found(NamedTuple):
    """An estimated configuration. Sorting such tuples gives the order of a plan.

    Attributes:
        fit: Index in `CLASSES`: 0 if the configuration fits, 1 if it is borderline, else 2.
        cost: Seconds of one step, or bytes of memory if ``fit`` is 2.
        point: The configuration.
    """

    fit: int
    cost: float
    point: Point


def plan(
    model: ModelShape,
    cluster: Cluster,
    train: TrainSpec,
    *,
    fix: Mapping[str, int] | None = None,
    calibration: Calibration = DEFAULT_CALIBRATION,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Rank all valid configurations of a run, and list why the others are rejected.

    Tries every set of degrees for the world size. If ``train`` leaves the microbatch size, the
    recomputation, the schedule or the ZeRO stage open, each set of degrees gets the fastest values
    that fit. All configurations have ``ep_mode="folded"`` and the default order of axes. `estimate`
    also accepts other modes and orders. The result is deterministic. The function does not need
    torch and does not communicate.

    Args:
        model: Shape of the model.
        cluster: Devices and links.
        train: Batch, precision, recomputation and schedule.
        fix: Degrees by name, such as ``{"tp": 8}``. Only configurations with these degrees are
            tried. Names are ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``, ``ep`` and
            ``etp``. By default no degree is fixed.
        calibration: Constants of the cost model.
        progress: Called repeatedly with two numbers: how many sets of degrees are estimated, and
            how many there are.

    Returns:
        The plan. ``best`` is the recommended configuration, and ``candidates`` has all of them.

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
        best, violations = search.best(degrees)
        if best:
            found.append(best)
        else:
            legality.reject(degrees, AXES if model.experts else BASE_AXES, violations)
    if progress:
        progress(len(every), len(every))
    found.sort()
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
    calibration: Calibration = DEFAULT_CALIBRATION,
) -> Candidate:
    """Estimate memory and time of one configuration.

    If ``dims`` has a ``ulysses_degree``, both kinds of context parallelism are combined: ranks of
    the ``ulysses`` axis exchange heads, and ranks of ``cp_outer`` exchange keys and values.

    Args:
        model: Shape of the model.
        cluster: Devices and links.
        train: Batch, precision, recomputation and schedule. Open values are chosen as in `plan`.
        dims: Degrees. If they have no world size, they are resolved for ``cluster.world_size``.
        micro_batch: Number of sequences per microbatch. Defaults to ``train.micro_batch``.
        recompute: Kind of recomputation, as in `TrainSpec`. Defaults to ``train.recompute``.
        calibration: Constants of the cost model.

    Returns:
        The configuration with its estimated memory and time. ``violations`` is empty if the
        configuration fits into memory. ``trust`` says how reliable the estimate is.

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
    search = Search(model, cluster, train, calibration, dims)
    best, violations = search.best(degrees)
    if best is None:
        raise ParallelDimsError(violations)
    return search.candidate(best)


def compare(
    model: ModelShape,
    cluster: Cluster,
    train: TrainSpec,
    dims: ParallelDims,
    *,
    calibration: Calibration = DEFAULT_CALIBRATION,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Estimate one configuration and compare it with the best configuration of the same run.

    Args:
        model: Shape of the model.
        cluster: Devices and links.
        train: Batch, precision, recomputation and schedule. Open values are chosen separately for
            each of the two configurations.
        dims: Degrees of the configuration.
        calibration: Constants of the cost model.
        progress: Called repeatedly with two numbers: how many sets of degrees are estimated, and
            how many there are.

    Returns:
        Both configurations, and their differences in each part of memory and step time.

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
    calibration: Calibration = DEFAULT_CALIBRATION,
    progress: Callable[[int, int], None] | None = None,
) -> int | None:
    """Find the smallest number of devices, in whole nodes, on which a run fits into memory.

    The search tries 1, 2, 4, 8, ... nodes until the run fits. Then it tries at most seven numbers
    of devices between the last two, so the run may also fit on slightly fewer devices.

    Args:
        model: Shape of the model.
        cluster: Devices and links. Its ``world_size`` is ignored.
        train: Batch, precision, recomputation and schedule.
        largest: Largest number of devices to try.
        calibration: Constants of the cost model.
        progress: Called repeatedly with two numbers: how many world sizes were tried, and an upper
            bound on how many will be tried.

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
        every = (search.best(degrees)[0] for degrees in Legality(model, train).legal(world))
        return any(found is not None and found.fit == 0 for found in every)

    enough = next((world for world in worlds if fits(world)), None)
    if enough is None:
        return None
    step = max(node, enough // 16 // node * node)
    between = range(enough // 2 // node * node + step, enough, step)
    return next((world for world in between if fits(world)), enough)


def hints(plan: Plan) -> tuple[Hint, ...]:
    """Find options of `TrainSpec` that would make the best configuration of a run faster.

    Changes one option at a time, if it has its default value in the run. Options that need other
    hardware or change numerics are not tried. `plan` does not compute hints, because each hint
    needs one more search.

    Args:
        plan: Result of `hp_mesh.planner.plan`.

    Returns:
        At most three hints, in order of step time. With a hint's option, the best configuration
        takes at least 1 % less time. If nothing fits in ``plan``, the hints are options with which
        a configuration fits.

    Raises:
        ParallelDimsError: ``plan`` is not a `Plan`.

    Examples:
        >>> from hp_mesh.planner import MODELS
        >>> train = TrainSpec(seq_len=8192, global_batch=512)
        >>> found = plan(MODELS["llama3-70b"], Cluster(world_size=16, accelerator="H100"), train)
        >>> [hint.field for hint in hints(found)]
        ['zero', 'fused_loss']
    """
    raise_errors(kind_violations("plan", plan, Plan))
    best = plan.best if plan.fitting else None
    most = best.time.total * (1 - GAIN) if best else float("inf")
    likely = (hint for hint in _likely_hints(plan) if hint.step_seconds <= most)
    promising = sorted(likely, key=lambda hint: hint.step_seconds)[:MOST_HINTS]
    exact = [replace(hint, step_seconds=_planned_seconds(plan, hint)) for hint in promising]
    exact = [hint for hint in exact if hint.step_seconds <= most]
    return tuple(sorted(exact, key=lambda hint: hint.step_seconds))


def _likely_hints(given: Plan) -> Iterator[Hint]:
    """Yield a hint with a first estimate of the step time for each option of `HINTED`.

    An option is left out if no configuration fits with it. Only the first `LIKELY` configurations
    of each class of the plan (fits, borderline, too large) are tried. So a search over all
    configurations may find a faster one.
    """
    classes = given.fits, given.borderline, given.too_large
    likely = [degrees_of(one.dims) for candidates in classes for one in candidates[:LIKELY]]
    for name, value in HINTED.items():
        set_by_user = getattr(given.train, name) != DEFAULTS[name]
        if set_by_user or given.fix.get(HINTED_AXES.get(name, "")) == 1:
            continue
        if name == "dispatch" and not given.model.experts:
            continue
        train = replace(given.train, **{name: value})
        search = Search(given.model, given.cluster, train, given.calibration)
        found = (search.best(degrees)[0] for degrees in likely)
        fits = [one for one in found if one and one.fit == 0]
        if fits:
            best = min(fits, key=lambda one: one.cost)
            chosen = getattr(best.point.setting, name) if value == ANY else value
            yield Hint(field=name, value=chosen, step_seconds=best.cost)


def _planned_seconds(given: Plan, hint: Hint) -> float:
    """Return the step time of the best configuration with a hint's option, in seconds.

    Tries all configurations. Returns infinity if none is valid.
    """
    changes: dict[str, Any] = {hint.field: hint.value}
    train = replace(given.train, **changes)
    found = plan(given.model, given.cluster, train, fix=given.fix, calibration=given.calibration)
    return found.best.time.total if found.best else float("inf")


class Search:
    """Estimates memory and time of any configuration of one run.

    Intermediate results that several configurations have in common are memoized.

    Args:
        model: Shape of the model.
        cluster: Devices and links.
        train: Batch, precision, recomputation and schedule.
        calibration: Constants of the cost model.
        dims: Degrees to estimate, if only one configuration is estimated. By default, all degrees
            are estimated with ``ep_mode="folded"`` and the default order of axes.
    """

    def __init__(
        self,
        model: ModelShape,
        cluster: Cluster,
        train: TrainSpec,
        calibration: Calibration,
        dims: ParallelDims | None = None,
    ) -> None:
        raise_errors(_run_violations(model, cluster, train))
        self._model, self._cluster, self._train, self._dims = model, cluster, train, dims
        self._memory = MemoryModel(model, train, calibration)
        share = cluster.memory_fraction
        share = train.memory_fraction if share is None else share
        self._limit = cluster.device.memory_gib * GIB * share
        self._time = TimeModel(model, cluster, train, calibration, self._limit)
        # The kinds of recomputation to try, the fastest first. "selective" is left out with fused
        # kernels, because it is the same as "none" then.
        kinds = [kind for kind in RECOMPUTE if kind != "selective" or not train.fused]
        self._kinds = [train.recompute] if train.recompute else kinds
        self._settings: dict[int, list[Setting]] = {}
        self._groups: dict[tuple[int, ...], dict[str, AxisGroup]] = {}
        self._communications: dict[Degrees, tuple[Mapping[str, AxisGroup], Traffic]] = {}

    def best(self, degrees: Degrees) -> tuple[Found | None, tuple[Violation, ...]]:
        """Choose the best microbatch size, recomputation and setting for a set of degrees.

        Returns:
            The best configuration and an empty tuple. If no microbatch size is legal, returns None
            and the broken rules.
        """
        train, given = self._train, self._train.micro_batch
        sizes = divisors(train.global_batch // degrees.dp) if given is None else (given,)
        if degrees.pp not in self._settings:
            self._settings[degrees.pp] = settings_of(self._model, train, degrees.pp)
        best: Found | None = None
        wrong: tuple[Violation, ...] = ()
        for setting in self._settings[degrees.pp]:
            legal = sizes
            if given is not None or SCHEDULES[setting.schedule].violations:
                reasons = {
                    size: tuple(batch_violations(degrees, train, setting, size)) for size in sizes
                }
                legal = tuple(size for size in sizes if not reasons[size])
                wrong = wrong or reasons[sizes[0]]
            if legal:
                found = self._best_of(degrees, setting, legal)
                best = found if best is None or found[:2] < best[:2] else best
        return best, () if best else wrong

    def _best_of(self, degrees: Degrees, setting: Setting, sizes: Sequence[int]) -> Found:
        """Choose the fastest microbatch size and recomputation that fit, for one setting.

        If nothing fits, returns the fastest borderline configuration. If nothing is borderline,
        returns the configuration that needs least memory. ``sizes`` has the microbatch sizes to
        try, the smallest first. Memory grows with the size and shrinks with recomputation.
        """
        ranks = self._memory.ranks(degrees, setting)
        batch = self._train.global_batch // degrees.dp

        def point(size: int, kind: Recompute) -> Point:
            return Point(degrees, size, kind, setting, batch // size)

        smallest = point(sizes[0], self._kinds[-1])
        least = sum(self._memory.need(smallest, ranks))
        fit = CLASSES.index(classify(least, self._limit))
        if fit == len(CLASSES) - 1:
            return Found(fit, least, smallest)
        best = Found(fit, float("inf"), smallest)
        limit = self._limit * (BORDER if fit else 1)
        kinds = self._kinds
        for size in sizes:
            for kind in kinds:
                tried = point(size, kind)
                need = sum(self._memory.need(tried, ranks))
                if need > limit:
                    # A larger microbatch needs even more memory with this kind.
                    kinds = kinds[1:]
                    continue
                seconds = sum(self._time.parts(tried, *self._communication(degrees), ranks, need))
                if seconds < best.cost:
                    best = Found(fit, seconds, tried)
                if not self._time.retries(need):
                    break  # the other kinds recompute more and so take longer
        return best

    def _communication(self, degrees: Degrees) -> tuple[Mapping[str, AxisGroup], Traffic]:
        """Return the groups of all axes by name, and the time of the collectives on parameters."""
        if degrees not in self._communications:
            layout = self._dims.layout() if self._dims else degrees.layout()
            replicated, dense = self._train.zero == 0, degrees[:5]  # without the degrees of experts
            if dense not in self._groups:
                self._groups[dense] = groups_of(layout, replicated=replicated)
            groups = self._groups[dense] | expert_groups_of(layout, replicated=replicated)
            self._communications[degrees] = groups, self._time.traffic(degrees, groups)
        return self._communications[degrees]

    def candidate(self, found: Found) -> Candidate:
        """Return a `Candidate`: a configuration with all parts of its memory and time."""
        point, degrees = found.point, found.point.degrees
        groups, traffic = self._communication(degrees)
        ranks = self._memory.ranks(degrees, point.setting)
        memory = self._memory.need(point, ranks)
        parts = self._time.parts(point, groups, traffic, ranks, sum(memory))
        compute, *exposed, bubble, optimizer = parts
        axes = zip(COMMUNICATING, exposed, strict=True)
        communication = {axis: seconds for axis, seconds in axes if groups[axis].size > 1}
        time = TimeSplit(
            compute=compute, communication=communication, bubble=bubble, optimizer=optimizer
        )
        return Candidate(
            dims=self._dims or degrees.dims(),
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
            trust=trust_of(
                self._model, self._cluster, self._train, point, time.compute / time.total
            ),
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
    chip = cluster.device.name
    if train.float8 and not cluster.device.tflops_fp8:
        reason = f"float8=True, but accelerator {chip} has no fp8 rate (tflops_fp8=0)"
        yield broken("float8", reason, {"float8": True, "accelerator": chip})


def _dims_violations(dims: ParallelDims, world: int, cluster: int) -> Iterator[Violation]:
    if world != cluster:
        reason = f"world_size={world} is not the world_size={cluster} of the cluster"
        yield broken("world", reason, {"world_size": world, "cluster": cluster})
    if not dims.fsdp_folds_cp and dims.cp > 1:
        reason = "estimates are for parameters sharded over dp_shard and cp; "
        reason += "give fsdp_folds_cp=True or cp=1"
        yield broken("fsdp-folds-cp", reason, {"fsdp_folds_cp": False, "cp": dims.cp})
    if dims.etp not in (1, dims.tp):
        reason = f"etp={dims.etp} is neither 1 nor tp={dims.tp}, and estimates need one of them"
        yield broken("etp", reason, {"etp": dims.etp, "tp": dims.tp})
