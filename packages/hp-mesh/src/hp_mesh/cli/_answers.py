"""Answers of the commands: their JSON, the lines and tables that they print, their exit codes."""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from .._dims import ParallelDims
from .._errors import Report, Violation
from .._layout import RankLayout
from ..planner import (
    Candidate,
    Comparison,
    Hint,
    ModelShape,
    Plan,
    Rejection,
    estimate,
    hints,
    plan,
    smallest_world,
)
from ..planner._result import CLOSE, counts_of
from ._inputs import (
    MOST_RANKS,
    Reader,
    read_count,
    read_dims,
    read_question,
    read_ranks,
    read_run,
    read_words,
)

GIB = 2**30
WITHOUT_AXIS = ("compute", "bubble", "optimizer")
SPLIT = ("dp_replicate", "dp_shard")
NOTHING = "no configuration keeps all rules"
SILENT = 1.0  # seconds of a search before it shows its progress
BAR_WIDTH = 30  # characters
MOST_CELLS = 8  # ranks in one row of a table
MOST_ROWS = 24
TITLE, GOOD, WARN, BAD, DIM = "bold", "bold green", "yellow", "red", "dim"
STYLES = {
    **{"fits": GOOD, "borderline": WARN, "does not fit": BAD},
    **{"holds": GOOD, "advice": WARN, "error": BAD},
}
# Okabe and Ito's colours (see `_pictures`), mixed with white.
GROUP_COLOURS = (
    *("#a9d3ec", "#f7d58c", "#9fdcc6", "#ecc6da"),
    *("#d9d9d9", "#f2b48c", "#faf4a6", "#a79ccf"),
)
Json: TypeAlias = Mapping[str, object]


class Line(NamedTuple):
    """A line of an answer, or a cell of a table. ``style`` is a style of rich."""

    text: str = ""
    style: str = ""


class Table(NamedTuple):
    """A table of an answer, with an empty line above it.

    ``numbers`` names the columns that are aligned to the right. Cells that are not a `Line` are
    printed without a style.
    """

    columns: Sequence[str]
    rows: Iterable[Iterable[object]]
    numbers: Sequence[str] = ()
    title: str = ""


Block: TypeAlias = Line | Table


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of a command.

    Args:
        json: Returns the content of ``--json``.
        blocks: Lines and tables. They are computed when they are printed.
        exit_code: Exit code of the command.
        subject: Ranks or plan that ``--picture`` draws.
    """

    json: Callable[[], Json]
    blocks: Iterator[Block]
    exit_code: int = 0
    subject: "RankMap | Plan | None" = None


def answer_check(args: Namespace, reader: Reader) -> Answer:
    """List the broken rules. The exit code is 2 if one of them is an error."""
    dims, question = read_question(args, reader)
    report = dims.check(**question)
    content = {
        "dims": dims.to_dict(),
        "ok": not report.errors,
        "violations": [violation_json(violation) for violation in report],
        "skipped": list(report.skipped),
    }
    code = 2 if report.errors else 0
    return Answer(json=lambda: content, blocks=_check_blocks(dims, report), exit_code=code)


def _check_blocks(dims: ParallelDims, report: Report) -> Iterator[Block]:
    errors, advice = len(report.errors), len(report) - len(report.errors)
    verdict = plural(errors, "error") if errors else "no error"
    verdict += f", {plural(advice, 'piece')} of advice" if advice else ""
    yield Line(dims.summary(), TITLE)
    yield Line(verdict, BAD if errors else GOOD)
    if report:
        rows = [(Line(each.level, STYLES[each.level]), each.rule, each) for each in report]
        yield Table(("level", "rule", "problem"), rows)
    if report.skipped:
        yield Line()
        yield Line(f"not checked, because not given: {', '.join(report.skipped)}", DIM)


def answer_explain(args: Namespace, reader: Reader) -> Answer:
    """List all rules with their verdicts. The exit code is 2 if one verdict is an error."""
    dims, question = read_question(args, reader)
    rules = dims.explain(**question)
    rows = [(Line(r.verdict, STYLES.get(r.verdict, DIM)), r.rule, r.text) for r in rules]
    blocks = Line(dims.summary(), TITLE), Table(("verdict", "rule", "numbers"), rows)
    return Answer(
        json=lambda: {"dims": dims.to_dict(), "rules": [asdict(rule) for rule in rules]},
        blocks=iter(blocks),
        exit_code=2 if any(rule.verdict == "error" for rule in rules) else 0,
    )


@dataclass(frozen=True, kw_only=True)
class RankMap:
    """All ranks with their coordinates, and the groups of one axis or alias.

    Ranks are shown in boxes: one per node, or one for all ranks if ``ranks_per_node`` is None.
    """

    dims: ParallelDims
    ranks_per_node: int | None
    axis: str

    @cached_property
    def layout(self) -> RankLayout:
        """Layout of the degrees."""
        return self.dims.layout()

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
        """Number of ranks in a full box."""
        return self.ranks_per_node or self.world

    @property
    def nodes(self) -> int:
        """Number of boxes. The last one may be partly full."""
        return -(-self.world // self.width)

    @property
    def description(self) -> str:
        """One line with the number of ranks and nodes and the nesting of the axes."""
        nodes = f" on {plural(self.nodes, 'node')} of {self.ranks_per_node}"
        if self.ranks_per_node is None:
            nodes = ", nodes not known: give --ranks-per-node"
        nesting = f"; outermost first: {' > '.join(self.nesting)}" if self.nesting else ""
        return f"{plural(self.world, 'rank')}{nodes}{nesting}"

    def crosses_nodes(self, name: str) -> bool | None:
        """Return True if groups of an axis or alias have several nodes, None if unknown."""
        node = self.ranks_per_node
        return None if node is None else self.layout.crosses_nodes(name, node)

    def links(self, name: str) -> str:
        """Write whether groups of an axis or alias are inside one node."""
        crosses = self.crosses_nodes(name)
        return "not known" if crosses is None else "between nodes" if crosses else "inside a node"

    def families(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of axes and aliases with several ranks, in sets with equal groups.

        All groups of a name have the same pattern, so the group of rank 0 identifies it.
        """
        found: dict[tuple[int, ...], list[str]] = {}
        for name in dict.fromkeys((*self.axes, *self.layout.names)):
            if self.layout.size(name) > 1:
                found.setdefault(self.layout.group(name, 0), []).append(name)
        return tuple(map(tuple, found.values()))

    def ranks_of(self, node: int) -> range:
        """Return the global ranks in one box."""
        first = node * self.width
        return range(first, min(first + self.width, self.world))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on each of `axes`."""
        return {axis: self.layout.coordinate(axis, rank) for axis in self.axes}


def map_ranks(dims: ParallelDims, ranks_per_node: int | None, axis: str | None) -> RankMap:
    """Return all ranks with their coordinates, and the groups of ``axis``.

    ``axis`` defaults to the innermost axis. All degrees of ``dims`` must be known.

    Raises:
        LayoutError: The layout has no such axis.
    """
    dims.layout().size(axis or "tp")
    nesting = RankMap(dims=dims, ranks_per_node=ranks_per_node, axis="tp").nesting
    return RankMap(dims=dims, ranks_per_node=ranks_per_node, axis=axis or (*("tp",), *nesting)[-1])


def answer_show(args: Namespace, reader: Reader) -> Answer:
    """Show the coordinates of every rank, and its group of ``--axis``."""
    dims, node = read_ranks(args, reader)
    found = reader.checked(reader(map_ranks, dims, node, args.axis))
    return Answer(json=partial(_show_json, found), blocks=_show_blocks(found), subject=found)


def _show_json(found: RankMap) -> Json:
    layout, node = found.layout, found.ranks_per_node
    axes = {
        name: {"size": layout.size(name), "crosses_nodes": found.crosses_nodes(name)}
        for name in layout.names
    }
    ranks = [
        {
            "rank": rank,
            "node": node and rank // node,
            "coordinates": layout.coordinates(rank) | {"ep": layout.coordinate("ep", rank)},
        }
        for rank in range(found.world)
    ]
    return {"dims": found.dims.to_dict(), "ranks_per_node": node, "axes": axes, "ranks": ranks}


def _show_blocks(found: RankMap) -> Iterator[Block]:
    yield Line(found.dims.summary(), TITLE)
    yield Line(found.description)
    rows = []
    for names in found.families():
        group, links = found.layout.group(names[0], 0), found.links(names[0])
        count = found.world // len(group)
        rows.append((" ".join(names), len(group), count, links, rank_list(group)))
    columns = ("axes", "size", "groups", "links", "first group")
    only = [("all", 1, 1, "inside a node", "0")]
    yield Table(columns, rows or only, ("size", "groups"))
    yield from _rank_blocks(found)


def _rank_blocks(found: RankMap) -> Iterator[Block]:
    """Yield a table with a row for each node, or several rows for a wide node."""
    width = min(found.width, MOST_CELLS, found.world)
    starts = [(node, at) for node in range(found.nodes) for at in found.ranks_of(node)[::width]]
    head, tail = ends(len(starts), MOST_ROWS)
    rows: list[Iterable[object]] = [_rank_cells(found, *starts[i], width) for i in head]
    rows += [["...", *[""] * width]] if tail else []
    rows += [_rank_cells(found, *starts[i], width) for i in tail]
    parts = ["rank", *filter(None, [".".join(found.axes)]), f"#{found.axis} group"]
    columns = ("node", *(f"+{i}" for i in range(width)))
    yield Table(columns, rows, title=f"each cell: {', '.join(parts)}")
    if tail:
        yield Line()
        first, last = starts[len(head)][1], starts[tail[0]][1] - 1
        yield Line(f"ranks {first}-{last} are left out here; --json has all", WARN)


def _rank_cells(found: RankMap, node: int, start: int, width: int) -> Iterator[object]:
    yield "-" if found.ranks_per_node is None else node
    for rank in range(start, start + width):
        if rank in found.ranks_of(node):
            group = found.group_of[rank]
            place = ".".join(map(str, found.coordinates(rank).values()))
            text = " ".join(filter(None, (str(rank), place, f"#{group}")))
            yield Line(text, f"black on {GROUP_COLOURS[group % len(GROUP_COLOURS)]}")
        else:
            yield ""


def answer_groups(args: Namespace, reader: Reader) -> Answer:
    """List all groups of an axis or alias, or show only the group of ``--rank``."""
    dims, node = read_ranks(args, reader)
    rank = reader(read_count, "--rank", args.rank, least=0)
    reader(dims.layout().size, args.name)
    reader(dims.layout().coordinates, rank or 0)
    reader.finish()
    found = RankMap(dims=dims, ranks_per_node=node, axis=args.name)
    return Answer(json=partial(_groups_json, found, rank), blocks=_groups_blocks(found, rank))


def _groups_json(found: RankMap, rank: int | None) -> Json:
    common = {
        "dims": found.dims.to_dict(),
        "axis": found.axis,
        "size": found.layout.size(found.axis),
        "ranks_per_node": found.ranks_per_node,
        "crosses_nodes": found.crosses_nodes(found.axis),
    }
    if rank is None:
        return {**common, "groups": [*map(list, found.groups)]}
    return {**common, "rank": rank, "group": list(found.layout.group(found.axis, rank))}


def _groups_blocks(found: RankMap, rank: int | None) -> Iterator[Block]:
    layout, name = found.layout, found.axis
    yield Line(found.dims.summary(), TITLE)
    if rank is not None:
        at = " ".join(f"{axis}={index}" for axis, index in layout.coordinates(rank).items())
        yield Line(f"rank {rank} is at {at}")
        ranks = rank_list(layout.group(name, rank), 64)
        yield Line(f"its {name} group of {layout.size(name)}: {ranks}")
        return
    shown = with_gap(len(found.groups), MOST_ROWS)
    left_out = f"{len(found.groups) - len(shown) + 1} groups left out; --json has all"
    rows = [("...", left_out) if i is None else (i, rank_list(found.groups[i])) for i in shown]
    title = f"{plural(len(found.groups), f'{name} group')} of {len(found.groups[0])}"
    title += "" if found.ranks_per_node is None else f", {found.links(name)}"
    yield Table(("group", "ranks"), rows, ("group",), title)


def answer_plan(args: Namespace, reader: Reader) -> Answer:
    """Find the best configurations. The exit code is 1 if none fits."""
    world = reader(read_count, "--gpus/--world", args.world, most=MOST_RANKS)
    top = reader(read_count, "--top", args.top)
    run = read_run(args, reader, world)
    fix = reader(read_words, args.fix)
    reader.finish()
    hint = smallest = None
    with _progress("planning") as progress:
        found = plan(*run, fix=fix, progress=progress)
        if not (
            args.json or args.as_code
        ):  # hints take several searches, and only tables show them
            hint = next(iter(hints(found)), None)
    if not (found.fits or fix):
        with _progress("looking for the smallest world that fits") as progress:
            smallest = smallest_world(*run, largest=MOST_RANKS, progress=progress)
    return Answer(
        json=partial(_plan_json, found, top or 0, smallest),
        blocks=_plan_blocks(found, top or 0, smallest, hint),
        exit_code=0 if found.fits else 1,
        subject=found,
    )


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows progress on a terminal's standard error after a second."""
    begin = monotonic()

    def is_shown() -> bool:
        return sys.stderr.isatty() and monotonic() - begin > SILENT

    def show(done: int, total: int) -> None:
        if is_shown():
            print(f"\r{title}: {done} of {total}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if is_shown():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _plan_json(found: Plan, top: int, smallest: int | None) -> Json:
    """Return counts, the best candidates and rejections. Memory is in bytes, time in seconds."""
    counts = {
        "considered": found.considered,
        "fits": len(found.fits),
        "borderline": len(found.borderline),
        "does not fit": len(found.too_large),
        "rejected": len(found.rejected),
    }
    rejected = [
        {
            "rule": each.rule,
            "count": each.count,
            "example": {"degrees": dict(each.degrees), "text": str(each.violation)},
        }
        for each in group_rejections(found.rejected)
    ]
    return {
        **_model_json(found.model),
        "world_size": found.cluster.world_size,
        "accelerator": found.cluster.device.name,
        "counts": counts,
        "smallest_world": smallest,
        "recommended": found.best and _candidate_json(found.best),
        "candidates": [*map(_candidate_json, found.candidates[:top])],
        "rejected": rejected,
    }


def _plan_blocks(found: Plan, top: int, smallest: int | None, hint: Hint | None) -> Iterator[Block]:
    best, world, node = found.best, found.cluster.world_size, found.cluster.ranks_per_node
    yield from _plan_title_blocks(found)
    if world > node and world % node:
        yield Line(f"{world} ranks do not fill nodes of {node}; give --ranks-per-node N", WARN)
    if best is None:
        yield Line(NOTHING, BAD)
    else:
        yield from _best_blocks(best, found.fastest or best)
        yield from _part_blocks(best)
        yield _candidates_table(found, best, plan_rows(found, top))
    yield Line()
    if hint is not None:
        yield Line(hint_line(hint, best), GOOD)
    if smallest is not None:
        text = "the smallest number of GPUs on which a configuration fits"
        yield Line(f"{text}: {smallest}", WARN)
    yield Line(counts_of(found))
    if rejections := group_rejections(found.rejected):
        rows = [(group.rule, group.count, group.violation.reason) for group in rejections]
        yield Table(("rule", "count", "example"), rows, ("count",), "rejected by rule")


def _plan_title_blocks(found: Plan) -> Iterator[Block]:
    yield Line(plan_title(found), TITLE)
    model = found.model
    total = f"{model.parameters / 1e9:.3g}B parameters"
    active = f", {model.active_parameters / 1e9:.3g}B of them active in one token"
    yield Line(total + (active if model.experts else ""))


def _best_blocks(best: Candidate, fastest: Candidate) -> Iterator[Block]:
    headings = {
        "fits": "RUN THIS",
        "borderline": "NOTHING FITS; this is up to 15% above the memory limit",
        "does not fit": "NOTHING FITS; this comes nearest",
    }
    yield Line()
    yield Line(headings[best.fit], STYLES[best.fit])
    yield Line(f"  {constructor_line(best.dims)}", TITLE)
    yield Line(f"  {word_line(best.dims)}")
    yield from _cost_blocks(best)
    if best != fastest:
        yield Line(f"  {why_chosen(best, fastest)}")


def _cost_blocks(one: Candidate) -> Iterator[Block]:
    yield Line(f"  {settings(one)}")
    yield Line(
        f"  estimated {format_seconds(one.time.total)} s per step, "
        f"{one.tokens_per_second_per_gpu:.0f} tokens/s per GPU, {one.mfu:.0%} MFU; "
        f"{one.memory.total / GIB:.1f} of {one.limit / GIB:.1f} GiB ({one.fit})"
    )
    yield Line(f"  {one.trust}", DIM)


def _part_blocks(best: Candidate) -> Iterator[Block]:
    """Yield a table of the parts of memory, and a table of the parts of the step time."""
    memory = {name: part / GIB for name, part in best.memory.parts.items()}
    whole = max(best.limit, best.memory.total) / GIB
    title = f"memory of one GPU; shares of {whole:.1f} GiB"
    yield _bar_table(title, memory, whole, "GiB", ".1f")
    times = {
        name if name in WITHOUT_AXIS else f"exposed {name}": part
        for name, part in best.time.parts.items()
    }
    title = f"time of one step; shares of {format_seconds(best.time.total)} s"
    yield _bar_table(title, times, best.time.total, "s", ".3f")


def _bar_table(
    title: str, parts: Mapping[str, float], whole: float, unit: str, digits: str
) -> Table:
    """Return a table with a bar for each part. A part above 0 has at least one mark."""
    rows = []
    for name, part in parts.items():
        marks = max(1, round(BAR_WIDTH * part / whole)) if part > 0 else 0
        rows.append((name, f"{part:{digits}}", percent(part / whole), Line("#" * marks, "cyan")))
    return Table(("part", unit, "share", ""), rows, (unit, "share"), title)


def _candidates_table(found: Plan, best: Candidate, rows: Sequence["Row"]) -> Table:
    title = f"the best of {len(found.candidates)} candidates; # is the place among all"
    if any(row.splits for row in rows):
        title += "; splits of dp within 1% in time share a row"
    cells = []
    for row in rows:
        one, splits = row.candidate, plural(row.splits, "split")
        cells.append(
            (
                row.place,
                word_line(one.dims) + (f" (+{splits} of dp)" if row.splits else ""),
                one.micro_batch,
                one.recompute + variant(one),
                f"{one.time.total / best.time.total:.3f}x",
                f"{one.memory.total / GIB:.1f}",
                Line(one.fit, STYLES[one.fit]),
                "" if one == best else why_it_loses(one, best, found.cluster.ranks_per_node),
            )
        )
    columns = ("#", "degrees", "micro", "recompute", "time", "GiB", "fit", "why not first")
    return Table(columns, cells, ("#", "micro", "time", "GiB"), title)


@dataclass(kw_only=True)
class RejectionGroup:
    """The rejections that one rule caused: their number, and the first one as an example."""

    rule: str
    degrees: Mapping[str, int]
    violation: Violation
    count: int = 0


def group_rejections(rejected: Iterable[Rejection]) -> tuple[RejectionGroup, ...]:
    """Group rejections by rule, most frequent first. One with several rules is in each group."""
    groups: dict[str, RejectionGroup] = {}
    for each in rejected:
        # A rule that is broken several times counts once.
        for rule, violation in {v.rule: v for v in reversed(each.violations)}.items():
            first = RejectionGroup(rule=rule, degrees=each.degrees, violation=violation)
            groups.setdefault(rule, first).count += 1
    return tuple(sorted(groups.values(), key=lambda group: -group.count))


def answer_estimate(args: Namespace, reader: Reader) -> Answer:
    """Compare a configuration with the best one. The exit code is 1 if it does not fit."""
    _, dims = read_dims(args, reader)
    run = read_run(args, reader, dims.layout().world_size if dims else None)
    own = estimate(*run, reader.checked(dims))
    with _progress("planning") as progress:
        found = plan(*run, progress=progress)
    comparison = found.compare(own)
    return Answer(
        json=partial(_estimate_json, found, comparison),
        blocks=_estimate_blocks(found, comparison),
        exit_code=1 if own.fit == "does not fit" else 0,
    )


def _estimate_json(found: Plan, comparison: Comparison) -> Json:
    return {
        **_model_json(found.model),
        "configuration": _candidate_json(comparison.own),
        "best": _candidate_json(comparison.best),
        "slowdown": comparison.slowdown,
        "more_time": dict(comparison.time),
        "more_memory": dict(comparison.memory),
        "violations": [violation_json(violation) for violation in comparison.violations],
    }


def _estimate_blocks(found: Plan, comparison: Comparison) -> Iterator[Block]:
    own, best, node = comparison.own, comparison.best, found.cluster.ranks_per_node
    yield from _plan_title_blocks(found)
    yield Line()
    yield Line(f"{word_line(own.dims)}: {own.fit}", STYLES[own.fit])
    yield from _cost_blocks(own)
    if own.fit != "fits":
        yield Line(f"  {why_it_loses(own, best, node)}", STYLES[own.fit])
    if own == best:
        yield Line("this is the best configuration", GOOD)
        yield from _part_blocks(own)
        return
    yield Line()
    yield Line(f"the best: {word_line(best.dims)} ({best.fit})", TITLE)
    yield from _cost_blocks(best)
    place = next((i for i, one in enumerate(found.candidates, 1) if one == own), None)
    of = f"; it is number {place} of {len(found.candidates)}" if place else ""
    yield Line(f"yours takes {comparison.slowdown:.2f}x the time of the best{of}")
    if own.fit == "fits" and own.time.total > best.time.total:
        yield Line(f"main loss: {why_it_loses(own, best, node)}", WARN)
    yield _difference_table("seconds of one step", own.time.parts, best.time.parts, 1, ".3f")
    yield _difference_table("GiB of one GPU", own.memory.parts, best.memory.parts, GIB, ".1f")


def _difference_table(
    title: str, own: Mapping[str, float], best: Mapping[str, float], unit: float, digits: str
) -> Table:
    parts = {name: (own.get(name, 0.0), best.get(name, 0.0)) for name in (*own, *best)}
    parts["total"] = (sum(own.values()), sum(best.values()))
    columns = ("part", "yours", "best", "more")
    rows = []
    for name, (mine, its) in parts.items():
        more = f"{(mine - its) / unit:+{digits}}"
        rows.append((name, f"{mine / unit:{digits}}", f"{its / unit:{digits}}", more))
    return Table(columns, rows, columns[1:], title)


def violation_json(violation: Violation) -> Json:
    """Return a violation and its text."""
    return {**asdict(violation), "text": str(violation)}


def _candidate_json(candidate: Candidate) -> Json:
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


def _model_json(model: ModelShape) -> Json:
    sizes = {"parameters": model.parameters, "active_parameters": model.active_parameters}
    return {"model": model.name, **sizes}


@dataclass(kw_only=True)
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
    leaders: dict[object, Row] = {}
    for place, one in enumerate(found.candidates, start=1):
        key = (place,) if one.fit == "does not fit" else _all_but_split(one)
        leader = leaders.get(key)
        if (
            leader is not None
            and _is_near(one, leader.candidate)
            and leader.candidate.time.total <= one.time.total
        ):
            leader.splits += 1
        elif len(rows) < most or any(_is_near(one, row.candidate) for row in rows[:most]):
            # Rows past ``most`` are collected too: candidates fold into them, not into shown rows.
            leaders[key] = Row(place=place, candidate=one)
            rows.append(leaders[key])
        else:
            break
    return tuple(rows[:most])


def _is_near(one: Candidate, first: Candidate) -> bool:
    return one.fit == first.fit and one.time.total <= CLOSE * first.time.total


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


def _given_fields(dims: ParallelDims) -> dict[str, Any]:
    """Return the fields that differ from their defaults, without the world and ``dp_shard=1``."""
    found = {each.name: getattr(dims, each.name) for each in fields(dims)}
    usual: dict[str, tuple[object, ...]] = {each.name: (each.default,) for each in fields(dims)}
    usual |= {"dp_shard": (None, 1), "world_size": (dims.world_size,)}
    return {name: value for name, value in found.items() if value not in usual[name]}


def word_line(dims: ParallelDims) -> str:
    """Write degrees as arguments of the command line, without the world."""
    words = [
        f"{name}={','.join(value) if name == 'order' else value}"
        for name, value in _given_fields(dims).items()
    ]
    return " ".join(words) or "dp_shard=1"


def constructor_line(dims: ParallelDims) -> str:
    """Write resolved degrees as a Python expression."""
    arguments = {**_given_fields(dims), "world_size": dims.layout().world_size}
    return f"ParallelDims({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def ends(count: int, most: int) -> tuple[range, range]:
    """Choose at most ``most`` of ``count`` positions: from the start, and a quarter from the end.

    If ``count`` is at most ``most``, the first range has all positions and the second is empty.
    """
    if count <= most:
        return range(count), range(count, count)
    last = most // 4
    return range(most - last), range(count - last, count)


def with_gap(count: int, most: int, fewer: int | None = None) -> list[int | None]:
    """Return the positions from 0 to ``count``, or some of them if there are more than ``most``.

    Then the list has the first and the last positions, ``fewer`` in total (default: ``most``), and
    one None between them.
    """
    head, tail = ends(count, most if fewer is None or count <= most else fewer)
    return [*head, *([None] if tail else []), *tail]


def rank_list(ranks: Sequence[int], most: int = 12) -> str:
    """Write ranks as ``0-7`` if they are consecutive, else one by one without the middle."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = with_gap(len(ranks), most)
    return " ".join("..." if i is None else str(ranks[i]) for i in shown)


def plural(count: int, noun: str) -> str:
    """Write a count and a noun, as in ``1 rank`` and ``2 ranks``."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"


def percent(share: float) -> str:
    """Write a share in percent, with one decimal below 10 %."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def format_seconds(seconds: float) -> str:
    """Write seconds with about three digits."""
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.3g}"
