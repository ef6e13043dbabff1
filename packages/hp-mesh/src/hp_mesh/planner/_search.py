"""Searches for configurations of a training run, and estimates of one configuration.

A configuration has degrees, a microbatch size, a kind of recomputation and a `Setting`: a pipeline
schedule with its number of virtual stages, and a ZeRO stage.

A configuration fits if its memory is at most the memory limit of a device. It is borderline if its
memory is above the limit by a factor of at most `BORDER`. Otherwise it does not fit.
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
# Keys: options of `TrainSpec` that the function `hints` tries. Values: the value to try. "any"
# tries all values in one search. An option is absent if it needs other hardware or changes
# numerics, if no value is faster than the default, or if the planner already chooses the value.
HINTED: Mapping[str, Any] = {
    "fused_loss": True,
    "schedule": ANY,
    "zero": ANY,
    "context": "all-gather",
    "dispatch": "copies",
}
# Keys: options of `TrainSpec`. Values: axes. An option has no effect if the degree of the axis
# is 1.
HINTED_AXES = {"schedule": "pp", "context": "cp", "dispatch": "ep"}
DEFAULTS = {option.name: option.default for option in fields(TrainSpec)}
# Smallest reduction of the step time for which `hints` returns an option, as a share of the time.
GAIN = 0.01
MOST_HINTS = 3
# Number of configurations of each class in `CLASSES` with which `hints` first tries an option.
LIKELY = 100


class Found(NamedTuple):
    """A configuration with its class and cost. A sorted list has the best configuration first.

    Attributes:
        fit: 0 if the configuration fits, 1 if it is borderline, 2 if it does not fit. The number is
            an index in `CLASSES`.
        cost: Estimated time of one step in seconds if ``fit`` is 0 or 1. Needed bytes of memory if
            ``fit`` is 2.
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
    """Rank all valid configurations of a training run, and list the rejected degrees.

    The function tries every set of degrees for the world size. For each set of degrees it chooses
    the microbatch size, the recomputation, the schedule and the ZeRO stage, unless ``train`` fixes
    them. It chooses the values with the shortest step time among the values that fit into memory.
    If no values fit, the configuration is at the end of the plan, as borderline or too large.

    All configurations have ``ep_mode="folded"`` and the default order of axes. `estimate` also
    accepts other modes and orders. The result is deterministic. The function does not need torch
    and does not communicate.

    Args:
        model: Shape of the model.
        cluster: Devices and links.
        train: Batch, precision, recomputation and schedule.
        fix: Degrees that every configuration must have, such as ``{"tp": 8}``. The keys may be
            ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``, ``ep`` and ``etp``. By default
            no degree is fixed.
        calibration: Constants of the cost model.
        progress: Called repeatedly with two integers: the number of sets of degrees that are
            estimated so far, and the number of all sets.

    Returns:
        A `Plan`. Its attribute ``best`` is the recommended configuration, or None if no
        configuration is valid. ``candidates`` has all valid configurations, and ``rejected`` has
        the rejected degrees with the rules that they break.

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
        train: Batch, precision, recomputation and schedule. The function chooses values that
            ``train`` does not fix, in the same way as `plan`.
        dims: Degrees. If they have no world size, they are resolved for ``cluster.world_size``.
        micro_batch: Number of sequences per microbatch on each data-parallel rank. Defaults to
            ``train.micro_batch``.
        recompute: Kind of recomputation, as in `TrainSpec`. Defaults to ``train.recompute``.
        calibration: Constants of the cost model.

    Returns:
        A `Candidate`: the configuration with its estimated memory and time. Its attribute
        ``violations`` is empty if the configuration fits into memory. ``trust`` has the expected
        error of the estimate.

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
        train: Batch, precision, recomputation and schedule. Values that ``train`` does not fix are
            chosen separately for each of the two configurations.
        dims: Degrees of the configuration.
        calibration: Constants of the cost model.
        progress: Called repeatedly with two integers: the number of sets of degrees that are
            estimated so far, and the number of all sets.

    Returns:
        A `Comparison`: both configurations, and the difference in each part of memory and step
        time.

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
    """Find a small number of devices, in whole nodes, on which a run fits into memory.

    The search tries 1, 2, 4, 8, ... nodes until the run fits. Then it tries at most seven numbers
    of nodes between the last one that failed and the one that fits. The result is not always the
    smallest number, because not every number is tried.

    Args:
        model: Shape of the model.
        cluster: Devices and links. Its ``world_size`` is ignored.
        train: Batch, precision, recomputation and schedule.
        largest: Largest number of devices to try.
        calibration: Constants of the cost model.
        progress: Called repeatedly with two integers: the number of world sizes that were tried so
            far, and an upper bound on the number of world sizes that the search tries.

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


def hints(
    plan: Plan,
    *,
    most: int = MOST_HINTS,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Hint, ...]:
    """Find options of `TrainSpec` that shorten the step time of the best configuration of a run.

    The function changes one option at a time, and only options that have their default value in the
    run. It does not try options that need other hardware or change numerics. `plan` does not
    compute hints, because each hint needs one more search.

    Args:
        plan: Result of `hp_mesh.planner.plan`.
        most: Largest number of hints, for each of which one search takes place. The options are
            chosen by the step times of some good configurations, before the searches.
        progress: Called repeatedly in each search with two integers: the number of sets of degrees
            that are estimated so far, and the number of all sets.

    Returns:
        At most ``most`` hints, the shortest step time first. A hint has an option, a value, and the
        step time of the best configuration with this value, in seconds. The step time is at least
        1 % shorter than without the option. If no configuration of ``plan`` fits into memory, at
        least one configuration fits with the option of each hint.

    Raises:
        ParallelDimsError: ``plan`` is not a `Plan`, or ``most`` is not a positive integer.

    Examples:
        >>> from hp_mesh.planner import MODELS
        >>> train = TrainSpec(seq_len=8192, global_batch=512)
        >>> found = plan(MODELS["llama3-70b"], Cluster(world_size=16, accelerator="H100"), train)
        >>> [hint.field for hint in hints(found)]
        ['zero', 'fused_loss']
    """
    most = as_integer(most)
    raise_errors([*kind_violations("plan", plan, Plan), *integer_violations({"most": most})])
    best = plan.best if plan.fitting else None
    longest = best.time.total * (1 - GAIN) if best else float("inf")
    likely = (hint for hint in _likely_hints(plan) if hint.step_seconds <= longest)
    promising = sorted(likely, key=lambda hint: hint.step_seconds)[:most]
    exact = [
        replace(hint, step_seconds=_planned_seconds(plan, hint, progress)) for hint in promising
    ]
    exact = [hint for hint in exact if hint.step_seconds <= longest]
    return tuple(sorted(exact, key=lambda hint: hint.step_seconds))


def _likely_hints(given: Plan) -> Iterator[Hint]:
    """Yield one hint for each option of `HINTED` with which a configuration fits into memory.

    The step time of the hint is an upper bound. The function tries only the first `LIKELY`
    configurations that fit, the first `LIKELY` borderline configurations, and the first `LIKELY`
    configurations that are too large. A search over all configurations may find a shorter time.
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


def _planned_seconds(given: Plan, hint: Hint, progress: Callable[[int, int], None] | None) -> float:
    """Search all configurations with the option of a hint, and return the best step time.

    The time is the step time of the recommended configuration, in seconds. It is infinity if no
    configuration is valid.
    """
    changes: dict[str, Any] = {hint.field: hint.value}
    train = replace(given.train, **changes)
    found = plan(
        given.model,
        given.cluster,
        train,
        fix=given.fix,
        calibration=given.calibration,
        progress=progress,
    )
    return found.best.time.total if found.best else float("inf")


class Search:
    """Estimates memory and time of the configurations of one training run.

    Results that several configurations use, such as groups of ranks, are memoized.

    Args:
        model: Shape of the model.
        cluster: Devices and links.
        train: Batch, precision, recomputation and schedule.
        calibration: Constants of the cost model.
        dims: The only configuration to estimate, with its ``ep_mode`` and order of axes. If None,
            all degrees can be estimated, with ``ep_mode="folded"`` and the default order of axes.
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
        # The kinds of recomputation to try, the fastest first. With fused kernels, "selective" is
        # left out, because it equals "none".
        kinds = [kind for kind in RECOMPUTE if kind != "selective" or not train.fused]
        self._kinds = [train.recompute] if train.recompute else kinds
        self._settings: dict[int, list[Setting]] = {}
        self._groups: dict[tuple[int, ...], dict[str, AxisGroup]] = {}
        self._communications: dict[Degrees, tuple[Mapping[str, AxisGroup], Traffic]] = {}

    def best(self, degrees: Degrees) -> tuple[Found | None, tuple[Violation, ...]]:
        """Choose the best microbatch size, recomputation and `Setting` for a set of degrees.

        Returns:
            - The best configuration, or None if no microbatch size is legal.
            - The violations that make the microbatch sizes illegal. Empty if the first element is
              not None.
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
        """Choose the best microbatch size and recomputation for one set of degrees and one setting.

        - If a configuration fits, the method returns the fastest configuration that fits.
        - Otherwise, if a configuration is borderline, it returns the fastest borderline one.
        - Otherwise it returns the configuration that needs the least memory.

        Args:
            degrees: Degrees.
            setting: Pipeline schedule and ZeRO stage.
            sizes: Microbatch sizes to try, in increasing order. A larger size needs more memory.
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
                seconds = sum(self._time.parts(tried, *self._traffic(degrees), ranks, need))
                if seconds < best.cost:
                    best = Found(fit, seconds, tried)
                if not self._time.retries(need):
                    break  # the other kinds recompute more and so take longer
        return best

    def _traffic(self, degrees: Degrees) -> tuple[Mapping[str, AxisGroup], Traffic]:
        """Return the groups of ranks, and the time of collectives on parameters and gradients.

        The second element has the time for one layer and for the embedding, not for one step.

        Returns:
            - Groups by name: the keys and values of `groups_of` and `expert_groups_of`.
            - Result of `TimeModel.traffic` with these groups, in seconds.
        """
        if degrees not in self._communications:
            layout = self._dims.layout() if self._dims else degrees.layout()
            replicated, dense = self._train.zero == 0, degrees[:5]  # without the degrees of experts
            if dense not in self._groups:
                self._groups[dense] = groups_of(layout, replicated=replicated)
            groups = self._groups[dense] | expert_groups_of(layout, replicated=replicated)
            self._communications[degrees] = groups, self._time.traffic(degrees, groups)
        return self._communications[degrees]

    def candidate(self, found: Found) -> Candidate:
        """Convert a result of the method `best` to a `Candidate`.

        The `Candidate` has the memory and the step time of the configuration, split into parts.
        """
        point, degrees = found.point, found.point.degrees
        groups, traffic = self._traffic(degrees)
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
