"""Result objects of the commands. Each returns its JSON document and has its exit code."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeAlias

from .._dims import ParallelDims
from .._errors import Explanation, Report, Violation
from .._layout import RankLayout
from ..planner import Candidate, Comparison, Hint, ModelShape, Plan, Rejection
from ..planner._result import CLOSE

GIB = 2**30
WITHOUT_AXIS = ("compute", "bubble", "optimizer")
SPLIT = ("dp_replicate", "dp_shard")
NOTHING = "no configuration keeps all rules"
# Okabe and Ito's colours (see `_pictures`), mixed with white.
GROUP_COLOURS = (
    *("#a9d3ec", "#f7d58c", "#9fdcc6", "#ecc6da"),
    *("#d9d9d9", "#f2b48c", "#faf4a6", "#a79ccf"),
)
Document: TypeAlias = Mapping[str, object]


def ends(count: int, most: int) -> tuple[range, range]:
    """Choose at most ``most`` of ``count`` positions: from the start, and a quarter from the end.

    If ``count`` is at most ``most``, the first range has all positions and the second is empty.
    """
    if count <= most:
        return range(count), range(count, count)
    last = most // 4
    return range(most - last), range(count - last, count)


def rank_list(ranks: Sequence[int], most: int = 12) -> str:
    """Write ranks as ``0-7`` if they are consecutive, else one by one without the middle."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    head, tail = ends(len(ranks), most)
    texts = [str(ranks[i]) for i in head] + ["..."] * bool(tail)
    return " ".join([*texts, *(str(ranks[i]) for i in tail)])


def plural(count: int, noun: str) -> str:
    """Write a count and a noun, as in ``1 rank`` and ``2 ranks``."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Answer of ``check``."""

    dims: ParallelDims
    report: Report

    @property
    def exit_code(self) -> int:
        """2 if a rule is broken."""
        return 2 if self.report.errors else 0

    def document(self) -> Document:
        """Return the JSON content: the violations, and fields that the model does not have."""
        return {
            "dims": self.dims.to_dict(),
            "ok": not self.report.errors,
            "violations": [violation_document(violation) for violation in self.report],
            "skipped": list(self.report.skipped),
        }


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Answer of ``explain``."""

    dims: ParallelDims
    rules: Sequence[Explanation]

    @property
    def exit_code(self) -> int:
        """2 if a rule is broken."""
        return 2 if any(rule.verdict == "error" for rule in self.rules) else 0

    def document(self) -> Document:
        """Return the JSON content: every rule with its numbers and its verdict."""
        return {"dims": self.dims.to_dict(), "rules": [asdict(rule) for rule in self.rules]}


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Common part of the answers of ``show`` and ``groups``.

    If ``ranks_per_node`` is None, the nodes are unknown.
    """

    dims: ParallelDims
    ranks_per_node: int | None
    axis: str
    exit_code = 0

    @cached_property
    def layout(self) -> RankLayout:
        """Layout of the degrees."""
        return self.dims.layout()

    def crosses_nodes(self, name: str) -> bool | None:
        """Return True if groups of an axis or alias have several nodes, None if unknown."""
        node = self.ranks_per_node
        return None if node is None else self.layout.crosses_nodes(name, node)


@dataclass(frozen=True, kw_only=True)
class Groups(Ranks):
    """Answer of ``groups``: all groups of an axis or alias, or the group of one rank."""

    rank: int | None

    def document(self) -> Document:
        """Return the content of ``--json``: all groups, or only the group of ``rank``."""
        layout = self.layout
        found: dict[str, object] = {
            "dims": self.dims.to_dict(),
            "axis": self.axis,
            "size": layout.size(self.axis),
            "ranks_per_node": self.ranks_per_node,
            "crosses_nodes": self.crosses_nodes(self.axis),
        }
        if self.rank is None:
            return {**found, "groups": [*map(list, layout.groups(self.axis))]}
        return {**found, "rank": self.rank, "group": list(layout.group(self.axis, self.rank))}


@dataclass(frozen=True, kw_only=True)
class RankMap(Ranks):
    """Answer of ``show``: every rank with its coordinates and its group on one axis.

    Ranks are drawn in boxes: one per node, or one for all ranks if the nodes are unknown.
    """

    @cached_property
    def nesting(self) -> tuple[str, ...]:
        """Axes with more than one rank, outermost first, without a folded ``ep``."""
        folded = self.dims.ep_mode == "folded"
        names = [name for name in self.dims.order if not (folded and name == "ep")]
        return tuple(name for name in names if self.layout.size(name) > 1)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes whose coordinates are shown: `nesting`, and ``ep`` if it has several ranks."""
        ep = ("ep",) if "ep" not in self.nesting and self.layout.size("ep") > 1 else ()
        return (*self.nesting, *ep)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of the chosen axis."""
        return tuple(self.layout.groups(self.axis))

    @cached_property
    def group_of(self) -> Mapping[int, int]:
        """Index in `groups` for each rank."""
        return {rank: number for number, group in enumerate(self.groups) for rank in group}

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.layout.world_size

    @property
    def width(self) -> int:
        """Number of ranks in a full box of the drawing."""
        return self.ranks_per_node or self.world

    @property
    def nodes(self) -> int:
        """Number of boxes in the drawing. The last one may be partly full."""
        return -(-self.world // self.width)

    @property
    def place(self) -> str:
        """One line with the number of ranks and nodes and the nesting of the axes."""
        nodes = f" on {plural(self.nodes, 'node')} of {self.ranks_per_node}"
        if self.ranks_per_node is None:
            nodes = ", nodes not known: give --ranks-per-node"
        nesting = f"; outermost first: {' > '.join(self.nesting)}" if self.nesting else ""
        return f"{plural(self.world, 'rank')}{nodes}{nesting}"

    def families(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of axes and aliases with several ranks, in sets with equal groups.

        All groups of a name have the same pattern, so the group of rank 0 identifies it.
        """
        layout = self.layout
        found: dict[tuple[int, ...], list[str]] = {}
        for name in (*self.axes, *layout.names):
            group = layout.group(name, 0)
            if len(group) > 1 and name not in found.setdefault(group, []):
                found[group].append(name)
        return tuple(map(tuple, found.values()))

    def ranks_of(self, node: int) -> range:
        """Return the global ranks in one box of the drawing."""
        first = node * self.width
        return range(first, min(first + self.width, self.world))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on each of `axes`."""
        return {axis: self.layout.coordinate(axis, rank) for axis in self.axes}

    def document(self) -> Document:
        """Return the size of every axis, whether it crosses nodes, and every rank's coordinates."""
        layout, node = self.layout, self.ranks_per_node
        return {
            "dims": self.dims.to_dict(),
            "ranks_per_node": node,
            "axes": {
                name: {"size": layout.size(name), "crosses_nodes": self.crosses_nodes(name)}
                for name in layout.names
            },
            "ranks": [
                {
                    "rank": rank,
                    "node": node and rank // node,
                    "coordinates": layout.coordinates(rank) | {"ep": layout.coordinate("ep", rank)},
                }
                for rank in range(self.world)
            ],
        }


def map_ranks(dims: ParallelDims, ranks_per_node: int | None, axis: str | None) -> RankMap:
    """Return the answer of ``show``: all ranks with their coordinates, and the groups of ``axis``.

    ``axis`` defaults to the innermost axis. All degrees of ``dims`` must be known.

    Raises:
        LayoutError: The layout has no such axis.
    """
    dims.layout().size(axis or "tp")
    found = RankMap(dims=dims, ranks_per_node=ranks_per_node, axis=axis or "")
    return found if axis else replace(found, axis=(found.nesting or ("tp",))[-1])


@dataclass(frozen=True, slots=True)
class RejectionGroup:
    """The rejections that one rule caused: their number, and the first one as an example."""

    rule: str
    count: int
    degrees: Mapping[str, int]
    violation: Violation


def group_rejections(rejected: Iterable[Rejection]) -> tuple[RejectionGroup, ...]:
    """Group rejections by rule, most frequent first. One with several rules is in each group."""
    counts: Counter[str] = Counter()
    first: dict[str, tuple[Mapping[str, int], Violation]] = {}
    for each in rejected:
        # A rule that is broken several times counts once.
        for rule, violation in {v.rule: v for v in reversed(each.violations)}.items():
            counts[rule] += 1
            first.setdefault(rule, (each.degrees, violation))
    return tuple(RejectionGroup(rule, n, *first[rule]) for rule, n in counts.most_common())


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Answer of ``plan``.

    If nothing fits, ``smallest`` is the smallest number of devices found on which the model fits.
    ``hint`` is the option that reduces the step time of the best plan most.
    """

    plan: Plan
    top: int
    smallest: int | None = None
    hint: Hint | None = None

    @property
    def exit_code(self) -> int:
        """1 if nothing fits."""
        return 0 if self.plan.fits else 1

    @cached_property
    def rejections(self) -> tuple[RejectionGroup, ...]:
        """Rejections by rule."""
        return group_rejections(self.plan.rejected)

    def document(self) -> Document:
        """Return counts, the best candidates and rejections. Memory is in bytes, time in s."""
        found = self.plan
        return {
            **_model_document(found.model),
            "world_size": found.cluster.world_size,
            "accelerator": found.cluster.device.name,
            "counts": {
                "considered": found.considered,
                "fits": len(found.fits),
                "borderline": len(found.borderline),
                "does not fit": len(found.too_large),
                "rejected": len(found.rejected),
            },
            "smallest_world": self.smallest,
            "recommended": found.best and _candidate_document(found.best),
            "candidates": [*map(_candidate_document, found.candidates[: self.top])],
            "rejected": [
                {
                    "rule": each.rule,
                    "count": each.count,
                    "example": {"degrees": dict(each.degrees), "text": str(each.violation)},
                }
                for each in self.rejections
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """Answer of ``estimate``: one configuration and the best one of the same run."""

    plan: Plan
    comparison: Comparison

    @property
    def exit_code(self) -> int:
        """1 if the configuration does not fit."""
        return 1 if self.comparison.own.fit == "does not fit" else 0

    def document(self) -> Document:
        """Return the JSON content: both configurations, and the difference of each part."""
        found = self.comparison
        return {
            **_model_document(self.plan.model),
            "configuration": _candidate_document(found.own),
            "best": _candidate_document(found.best),
            "slowdown": found.slowdown,
            "more_time": dict(found.time),
            "more_memory": dict(found.memory),
            "violations": [violation_document(violation) for violation in found.violations],
        }


Answer: TypeAlias = Checked | Explained | Groups | RankMap | Planned | Estimated


def violation_document(violation: Violation) -> Document:
    """Return a violation and its text."""
    return {**asdict(violation), "text": str(violation)}


def _candidate_document(candidate: Candidate) -> Document:
    names = (
        *("micro_batch", "microbatches", "recompute", "schedule", "virtual_stages", "zero"),
        *("fit", "limit", "tokens_per_second_per_gpu", "mfu"),
    )
    return {
        "dims": candidate.dims.to_dict(),
        **{name: getattr(candidate, name) for name in names},
        "memory": {**candidate.memory.parts, "total": candidate.memory.total},
        "time": {**candidate.time.parts, "total": candidate.time.total},
        "trust": str(candidate.trust),
    }


def _model_document(model: ModelShape) -> Document:
    sizes = {"parameters": model.parameters, "active_parameters": model.active_parameters}
    return {"model": model.name, **sizes}


def chosen(dims: ParallelDims) -> dict[str, Any]:
    """Return the fields that differ from their defaults, without the world and ``dp_shard=1``."""
    found = {each.name: getattr(dims, each.name) for each in fields(dims)}
    default = {each.name: each.default for each in fields(dims)} | {"world_size": dims.world_size}
    return {
        name: value
        for name, value in found.items()
        if value != default[name] and (name, value) != ("dp_shard", 1)
    }


def word_line(dims: ParallelDims) -> str:
    """Write degrees as arguments of the command line, without the world."""
    words = [
        f"{name}={','.join(value) if name == 'order' else value}"
        for name, value in chosen(dims).items()
    ]
    return " ".join(words) or "dp_shard=1"


def constructor_line(dims: ParallelDims) -> str:
    """Write resolved degrees as a Python expression."""
    arguments = {**chosen(dims), "world_size": dims.layout().world_size}
    return f"ParallelDims({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A candidate of a table, its place from 1 on, and the number of ``splits`` folded into it."""

    place: int
    candidate: Candidate
    splits: int = 0


def plan_rows(found: Plan, most: int) -> tuple[Row, ...]:
    """Return at most ``most`` rows, best first.

    Candidates that differ only in ``dp_replicate`` and ``dp_shard`` share the row of the fastest
    one if they take at most 1 % longer. Candidates that do not fit have a row each, because the
    split decides how much memory they need.
    """
    rows: list[Row] = []
    leaders: dict[object, int] = {}
    for place, one in enumerate(found.candidates, start=1):
        key = (place,) if one.fit == "does not fit" else _all_but_split(one)
        leader = leaders.get(key)
        if leader is not None and _close(one, rows[leader].candidate):
            rows[leader] = replace(rows[leader], splits=rows[leader].splits + 1)
        elif len(rows) < most or any(_near(one, row.candidate) for row in rows[:most]):
            # Rows past ``most`` are collected too: candidates fold into them, not into shown rows.
            leaders[key] = len(rows)
            rows.append(Row(place=place, candidate=one))
        else:
            break
    return tuple(rows[:most])


def _near(one: Candidate, first: Candidate) -> bool:
    return one.fit == first.fit and one.time.total <= CLOSE * first.time.total


def _close(one: Candidate, first: Candidate) -> bool:
    return _near(one, first) and first.time.total <= one.time.total


def _all_but_split(one: Candidate) -> tuple[object, ...]:
    degrees = (getattr(one.dims, f.name) for f in fields(one.dims) if f.name not in SPLIT)
    return one.fit, one.micro_batch, one.recompute, one.setting, *degrees


def hint_line(hint: Hint, best: Candidate | None) -> str:
    """Write which option makes the best plan faster, and by how much."""
    option = f"--{hint.field.replace('_', '-')}"
    option += "" if hint.value is True else f" {hint.value}"
    seconds = f"{format_seconds(hint.step_seconds)} s"
    if best is None or best.fit != "fits":
        return f"with {option} a configuration fits, and takes {seconds}"
    now = format_seconds(best.time.total)
    return f"with {option} the best plan takes {seconds} instead of {now} s"


def why_chosen(chosen: Candidate, fastest: Candidate) -> str:
    """Compare the recommended candidate with the fastest one."""
    slower = percent(chosen.time.total / fastest.time.total - 1)
    less = (fastest.memory.total - chosen.memory.total) / GIB
    free = (fastest.limit - fastest.memory.total) / GIB
    return (
        f"{slower} slower than the fastest, {less:.1f} GiB less: "
        f"the fastest would leave {free:.1f} GiB"
    )


def why_it_loses(candidate: Candidate, best: Candidate, ranks_per_node: int) -> str:
    """Return the main reason why a candidate ranks below the best one."""
    if candidate.memory.total > candidate.limit:
        # Compare with the best if it fits, else name the largest part.
        others = best.memory.parts if best.fit == "fits" else {}
        part = _most_extra(candidate.memory.parts, others)
        over = (candidate.memory.total - candidate.limit) / GIB
        return f"{part} {over:.1f} GiB over the limit"
    if candidate.time.total < best.time.total and candidate.fit == best.fit:
        return f"{(candidate.memory.total - best.memory.total) / GIB:.1f} GiB more memory"
    part = _most_extra(candidate.time.parts, best.time.parts)
    share = candidate.time.parts[part] / candidate.time.total
    if part == "compute" and candidate.recompute != best.recompute:
        return f"recomputes {candidate.recompute}"
    if part == "compute":
        return f"compute {percent(candidate.time.compute / best.time.compute - 1)} slower"
    if part in WITHOUT_AXIS:
        return f"{part} {percent(share)}"
    crosses, best_crosses = (
        one.dims.layout().crosses_nodes(part, ranks_per_node) for one in (candidate, best)
    )
    if crosses and not best_crosses:
        return f"{part} crosses nodes, {percent(share)} exposed"
    return f"exposed {part} {percent(share)}"


def percent(share: float) -> str:
    """Write a share in percent, with one decimal below 10 %."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _most_extra(parts: Mapping[str, float], others: Mapping[str, float]) -> str:
    return max(parts, key=lambda name: parts[name] - others.get(name, 0))


def plan_title(found: Plan) -> str:
    """Return one line with the model, the cluster, and the sequences and tokens of one step."""
    cluster, train = found.cluster, found.train
    return (
        f"{found.model.name or 'model'} on {cluster.world_size} x {cluster.device.name}, "
        f"{cluster.ranks_per_node} per node; {train.global_batch} sequences of {train.seq_len} "
        f"tokens per step{', float8' if train.float8 else ''}"
    )


def settings(candidate: Candidate) -> str:
    """Write microbatches, recomputation, schedule and ZeRO stage in one line."""
    batches = plural(candidate.microbatches, "microbatch")
    sequences = plural(candidate.micro_batch, "sequence")
    return f"{batches} of {sequences}, recompute {candidate.recompute}{variant(candidate)}"


def variant(candidate: Candidate) -> str:
    """Write schedule and ZeRO stage if they are not the defaults."""
    text = "" if candidate.schedule == "1f1b" else f", {candidate.schedule}"
    text += f" of {candidate.virtual_stages} stages" if candidate.virtual_stages > 1 else ""
    return text if candidate.zero is None else f"{text}, ZeRO {candidate.zero}"


def format_seconds(seconds: float) -> str:
    """Write seconds with about three digits."""
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.3g}"
