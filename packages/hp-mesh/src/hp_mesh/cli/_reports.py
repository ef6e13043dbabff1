"""What the command line tells, before anyone decides how it looks: ranks, plans, documents."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .._dims import ParallelDims
from .._errors import Violation
from .._layout import RankLayout
from ..planner import Candidate, Comparison, ModelShape, Plan, Rejection
from ..planner._result import CLOSE

GIB = 2**30
WITHOUT_AXIS = ("compute", "bubble", "optimizer")
SPLIT = ("dp_replicate", "dp_shard")


def ends(count: int, most: int) -> tuple[range, range]:
    """Return which of ``count`` things to show at the start and at the end, at most ``most``.

    All are at the start where they fit; otherwise three of four are.
    """
    if count <= most:
        return range(count), range(count, count)
    last = most // 4
    return range(most - last), range(count - last, count)


def rank_list(ranks: Sequence[int], most: int = 12) -> str:
    """Return ranks in their order, as ``0-7`` where they are neighbours, the middle left out."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    head, tail = ends(len(ranks), most)
    texts = [str(ranks[i]) for i in head]
    texts += ["..."] if tail else []
    return " ".join([*texts, *(str(ranks[i]) for i in tail)])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMap:
    """Nodes, ranks and their coordinates, with the groups of one ``axis`` numbered.

    ``nesting`` are the axes with several ranks, outermost first; ``axes`` has a folded ep too,
    which has no place of its own among them. ``group_of`` gives the number of each rank's group,
    ``groups`` the ranks of each number. Without ``ranks_per_node`` all ranks share one box.
    """

    dims: ParallelDims
    layout: RankLayout
    ranks_per_node: int | None
    axis: str
    nesting: tuple[str, ...]
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    group_of: Mapping[int, int]

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.layout.world_size

    @property
    def width(self) -> int:
        """Return the ranks of one box: a node, or all where the nodes are not known."""
        return self.ranks_per_node or self.world

    @property
    def nodes(self) -> int:
        """Return the number of boxes, the last one perhaps not full."""
        return -(-self.world // self.width)

    @property
    def place(self) -> str:
        """Return in one line where the ranks are and which axes nest how."""
        ranks = f"{self.world} rank{'s' * (self.world != 1)}"
        nodes = f" on {self.nodes} node{'s' * (self.nodes != 1)} of {self.ranks_per_node}"
        if self.ranks_per_node is None:
            nodes = ", nodes not known: give --ranks-per-node"
        nesting = f"; outermost first: {' > '.join(self.nesting)}" if self.nesting else ""
        return f"{ranks}{nodes}{nesting}"

    def families(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of axes and aliases with several ranks, equal groups together.

        Groups of one name are shifted copies of each other, so that rank 0's tells them apart.
        """
        found: dict[tuple[int, ...], list[str]] = {}
        for name in (*self.axes, *self.layout.names):
            group = self.layout.group(name, 0)
            if len(group) > 1 and name not in found.setdefault(group, []):
                found[group].append(name)
        return tuple(map(tuple, found.values()))

    def ranks_of(self, node: int) -> range:
        """Return the ranks of one node."""
        first = node * self.width
        return range(first, min(first + self.width, self.world))

    def crosses_nodes(self, name: str) -> bool | None:
        """Return whether an axis or alias leaves a node, None where the nodes are not known."""
        node = self.ranks_per_node
        return None if node is None else self.layout.crosses_nodes(name, node)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on each of ``axes``."""
        return {axis: self.layout.coordinate(axis, rank) for axis in self.axes}


def map_ranks(dims: ParallelDims, ranks_per_node: int | None, axis: str | None) -> RankMap:
    """Return the map of resolved degrees; ``axis`` is by default the innermost one.

    Raises `LayoutError` for an axis that the layout does not have.
    """
    layout = dims.layout()
    folded = dims.ep_mode == "folded"
    names = [name for name in dims.order if not (folded and name == "ep")]
    nesting = tuple(name for name in names if layout.size(name) > 1)
    chosen = axis or (nesting or names)[-1]
    groups = tuple(layout.groups(chosen))
    return RankMap(
        dims=dims,
        layout=layout,
        ranks_per_node=ranks_per_node,
        axis=chosen,
        nesting=nesting,
        axes=(*nesting, "ep") if folded and layout.size("ep") > 1 else nesting,
        groups=groups,
        group_of={rank: number for number, group in enumerate(groups) for rank in group},
    )


def word_line(dims: ParallelDims) -> str:
    """Return the words that the command line takes for these degrees, without the world."""
    words = [
        f"{name}={','.join(value) if name == 'order' else value}"
        for name, value in _choices(dims).items()
    ]
    return " ".join(words) or "dp_shard=1"


def constructor_line(dims: ParallelDims) -> str:
    """Return the Python expression for these degrees, with the world."""
    arguments = {**_choices(dims), "world_size": dims.layout().world_size}
    return f"ParallelDims({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _choices(dims: ParallelDims) -> dict[str, Any]:
    """Return the fields that differ from their defaults; ``dp_shard=1`` goes without saying."""
    values = {field.name: (field.default, getattr(dims, field.name)) for field in fields(dims)}
    del values["world_size"]
    return {
        name: value
        for name, (default, value) in values.items()
        if value != default and (name, value) != ("dp_shard", 1)
    }


def parameters_line(model: ModelShape) -> str:
    """Return how many parameters a model has, and how many of them one token uses."""
    total = f"{model.parameters / 1e9:.3g}B parameters"
    active = f"{model.active_parameters / 1e9:.3g}B of them active in one token"
    return f"{total}, {active}" if model.experts else total


def why_chosen(chosen: Candidate, fastest: Candidate) -> str:
    """Return what a candidate costs and saves against the fastest."""
    slower = percent(chosen.time.total / fastest.time.total - 1)
    less = (fastest.memory.total - chosen.memory.total) / GIB
    free = (fastest.limit - fastest.memory.total) / GIB
    return (
        f"{slower} slower than the fastest, {less:.1f} GiB less: "
        f"the fastest would leave {free:.1f} GiB"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A candidate, its place among all from 1 on, and how many ``splits`` it stands for too."""

    place: int
    candidate: Candidate
    splits: int = 0


def plan_rows(found: Plan, most: int) -> tuple[Row, ...]:
    """Return the first rows, at most ``most``, by place.

    Candidates that differ only in how dp is split into dp_replicate and dp_shard share the row of
    the first of them, as far as they are within 1% of its time and not faster.
    Those that do not fit are not folded, for a split decides how far they are from fitting.
    """
    rows: list[Row] = []
    leaders: dict[object, int] = {}
    for place, one in enumerate(found.candidates, start=1):
        key = (place,) if one.fit == "does not fit" else _all_but_split(one)
        leader = leaders.get(key)
        if leader is not None and _close(one, rows[leader].candidate):
            rows[leader] = replace(rows[leader], splits=rows[leader].splits + 1)
        elif len(rows) < most or any(_near(one, row.candidate) for row in rows[:most]):
            # Also rows that are not told keep those of theirs from the rows that are.
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
    """Return what candidates have in common that differ in the split of dp alone."""
    degrees = (getattr(one.dims, f.name) for f in fields(one.dims) if f.name not in SPLIT)
    return one.fit, one.micro_batch, one.recompute, one.setting, *degrees


def largest_exposed(candidate: Candidate) -> tuple[str, float]:
    """Return the axis whose exposed communication takes longest, and its share of the step."""
    axis, seconds = max(
        candidate.time.communication.items(), key=lambda item: item[1], default=("", 0.0)
    )
    return axis, seconds / candidate.time.total


def why_it_loses(candidate: Candidate, best: Candidate, ranks_per_node: int) -> str:
    """Return what holds a candidate back most against the best one."""
    if candidate.memory.total > candidate.limit:
        # Where the best one fits, what it has less of is to blame; else simply the largest part.
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
    inside = not _leaves_node(best, part, ranks_per_node)
    if inside and _leaves_node(candidate, part, ranks_per_node):
        return f"{part} crosses nodes, {percent(share)} exposed"
    return f"exposed {part} {percent(share)}"


def percent(share: float) -> str:
    """Return a share as text, with a decimal where it would otherwise say little."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _leaves_node(candidate: Candidate, axis: str, ranks_per_node: int) -> bool:
    return candidate.dims.layout().crosses_nodes(axis, ranks_per_node)


def _most_extra(parts: Mapping[str, float], others: Mapping[str, float]) -> str:
    return max(parts, key=lambda name: parts[name] - others.get(name, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionGroup:
    """One rule, how many rejections it is a reason of, and the first of them."""

    rule: str
    count: int
    example: Rejection

    @property
    def violation(self) -> Violation:
        """Return what the rule said of the example."""
        return next(v for v in self.example.violations if v.rule == self.rule)


def group_rejections(rejected: Iterable[Rejection]) -> tuple[RejectionGroup, ...]:
    """Return the rules that rejected something, the most frequent first.

    A rejection that breaks several rules counts for each of them.
    """
    counts: Counter[str] = Counter()
    examples: dict[str, Rejection] = {}
    for rejection in rejected:
        for rule in {violation.rule: None for violation in rejection.violations}:
            counts[rule] += 1
            examples.setdefault(rule, rejection)
    return tuple(
        RejectionGroup(rule=rule, count=count, example=examples[rule])
        for rule, count in counts.most_common()
    )


def dims_document(dims: ParallelDims) -> Mapping[str, object]:
    """Return resolved degrees as a mapping that `ParallelDims.from_dict` takes back."""
    return dims.to_dict()


def violation_document(violation: Violation) -> Mapping[str, object]:
    """Return a violation with its text."""
    return {
        "rule": violation.rule,
        "level": violation.level,
        "reason": violation.reason,
        "values": dict(violation.values),
        "legal": {name: list(numbers) for name, numbers in violation.legal.items()},
        "text": str(violation),
    }


def plan_document(
    found: Plan,
    top: Iterable[Candidate],
    rejections: Iterable[RejectionGroup],
    smallest: int | None = None,
) -> Mapping[str, object]:
    """Return the counts, what to run, the best candidates and the rejections by rule.

    Memory is in bytes, time in seconds. ``smallest`` is the number of devices that would do where
    nothing fits.
    """
    return {
        **model_document(found.model),
        "world_size": found.cluster.world_size,
        "accelerator": found.cluster.device.name,
        "counts": {
            "considered": found.considered,
            "fits": len(found.fits),
            "borderline": len(found.borderline),
            "does not fit": len(found.too_large),
            "rejected": len(found.rejected),
        },
        "smallest_world": smallest,
        "recommended": None if found.best is None else candidate_document(found.best),
        "candidates": [candidate_document(candidate) for candidate in top],
        "rejected": [
            {
                "rule": group.rule,
                "count": group.count,
                "example": {"degrees": dict(group.example.degrees), "text": str(group.violation)},
            }
            for group in rejections
        ],
    }


def candidate_document(candidate: Candidate) -> Mapping[str, object]:
    """Return a candidate with its splits and rates."""
    return {
        "dims": dims_document(candidate.dims),
        "micro_batch": candidate.micro_batch,
        "microbatches": candidate.microbatches,
        "recompute": candidate.recompute,
        "schedule": candidate.schedule,
        "virtual_stages": candidate.virtual_stages,
        "zero": candidate.zero,
        "fit": candidate.fit,
        "memory": {**candidate.memory.parts, "total": candidate.memory.total},
        "limit": candidate.limit,
        "time": {**candidate.time.parts, "total": candidate.time.total},
        "tokens_per_second_per_gpu": candidate.tokens_per_second_per_gpu,
        "mfu": candidate.mfu,
        "trust": str(candidate.trust),
    }


def model_document(model: ModelShape) -> Mapping[str, object]:
    """Return a model's name, its parameters, and those that one token uses."""
    return {
        "model": model.name,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
    }


def estimate_document(found: Plan, comparison: Comparison) -> Mapping[str, object]:
    """Return a configuration, the best of its run, and by what their parts differ."""
    return {
        **model_document(found.model),
        "configuration": candidate_document(comparison.own),
        "best": candidate_document(comparison.best),
        "slowdown": comparison.slowdown,
        "more_time": dict(comparison.time),
        "more_memory": dict(comparison.memory),
        "violations": [violation_document(violation) for violation in comparison.violations],
    }


def show_document(found: RankMap) -> Mapping[str, object]:
    """Return the size of every axis, whether it leaves its node, and the place of every rank."""
    layout = found.layout
    return {
        "dims": dims_document(found.dims),
        "ranks_per_node": found.ranks_per_node,
        "axes": {
            name: {"size": layout.size(name), "crosses_nodes": found.crosses_nodes(name)}
            for name in layout.names
        },
        "ranks": [
            {
                "rank": rank,
                "node": found.ranks_per_node and rank // found.ranks_per_node,
                "coordinates": layout.coordinates(rank) | {"ep": layout.coordinate("ep", rank)},
            }
            for rank in range(found.world)
        ],
    }
