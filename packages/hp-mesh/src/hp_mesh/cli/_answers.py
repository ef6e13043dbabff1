"""Answers of the commands check, explain, show and groups, and the classes of all answers.

An answer has lines and tables to print, or a dictionary to print with ``--json``.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

from .._dims import ParallelDims
from .._errors import Report, Violation, plural, refusal
from .._layout import RankLayout
from ..planner import Plan
from ._inputs import Reader, read_check, read_count, read_ranks

MOST_CELLS = 8  # largest number of ranks in one row of a table
MOST_ROWS = 24  # largest number of rows in a table of ranks or groups
# Background colours of groups: the colours of Okabe and Ito (see `_pictures`), mixed with white.
GROUP_COLOURS = (
    *("#a9d3ec", "#f7d58c", "#9fdcc6", "#ecc6da"),
    *("#d9d9d9", "#f2b48c", "#faf4a6", "#a79ccf"),
)
# Dictionary from values of `Line.style` to styles of the package rich.
STYLES = {
    **{"good": "bold green", "warn": "yellow", "bad": "red"},
    **{"fits": "bold green", "borderline": "yellow", "does not fit": "red"},
    **{"holds": "bold green", "advice": "yellow", "error": "red"},
    **{"skipped": "dim", "idle": "dim"},
}
Json: TypeAlias = Mapping[str, object]


class Line(NamedTuple):
    """A line of an answer, or a cell of a table.

    ``text`` is printed in the style ``style``: a style of the package rich such as ``"bold"``, or a
    key of `STYLES` such as ``"fits"``.
    """

    text: str = ""
    style: str = ""


class Table(NamedTuple):
    """A table of an answer, printed below an empty line.

    Attributes:
        columns: Names of the columns.
        rows: Cells of each row. A cell is a `Line`, or an object that is printed as ``str(cell)``
            without a style.
        numbers: Names of the columns that have numbers. These columns are right-aligned.
        title: Line above the table; ``""`` without one.
    """

    columns: Sequence[str]
    rows: Iterable[Iterable[object]]
    numbers: Sequence[str] = ()
    title: str = ""


Block: TypeAlias = Line | Table


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of a command, before it is printed.

    Args:
        json: Function that returns the dictionary to print with ``--json``.
        blocks: Lines and tables to print without ``--json``. They are computed lazily.
        exit_code: Exit code of the command.
        data: A `RankMap` or `Plan` that ``--picture`` draws. ``--as-code`` prints the best
            configuration of the `Plan`. None if the command has neither option.
    """

    json: Callable[[], Json]
    blocks: Iterator[Block]
    exit_code: int = 0
    data: "RankMap | Plan | None" = None


def answer_check(args: Namespace, reader: Reader) -> Answer:
    """Answer the command ``check``: all broken rules, with the level ``error`` or ``advice``.

    The exit code is 2 if at least one broken rule has the level ``error``, else 0.
    """
    dims, question = read_check(args, reader)
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
    yield Line(dims.summary(), "bold")
    yield Line(verdict, "bad" if errors else "good")
    if report:
        rows = [(Line(each.level, each.level), each.rule, each) for each in report]
        yield Table(("level", "rule", "problem"), rows)
    if report.skipped:
        yield Line()
        yield Line(f"not checked, because not given: {', '.join(report.skipped)}", "dim")


def answer_explain(args: Namespace, reader: Reader) -> Answer:
    """Answer the command ``explain``: a table of all rules.

    For each rule, the verdict is ``holds``, ``error``, ``advice``, ``skipped`` (a number that the
    rule needs is not known) or ``idle`` (the rule does not apply to these degrees). The exit code
    is 2 if at least one verdict is ``error``, else 0.
    """
    dims, question = read_check(args, reader)
    rules = dims.explain(**question)
    rows = [(Line(r.verdict, r.verdict), r.rule, r.text) for r in rules]
    blocks = Line(dims.summary(), "bold"), Table(("verdict", "rule", "numbers"), rows)
    return Answer(
        json=lambda: {"dims": dims.to_dict(), "rules": [asdict(rule) for rule in rules]},
        blocks=iter(blocks),
        exit_code=2 if any(rule.verdict == "error" for rule in rules) else 0,
    )


@dataclass(frozen=True, kw_only=True)
class RankMap:
    """Content of the answer of ``show``: coordinates of all ranks, and the groups of one axis.

    The ranks of each node are shown in one box.

    Args:
        dims: Resolved degrees.
        ranks_per_node: Number of ranks in one node. If None, all ranks are in one box.
        axis: Name of the axis or alias whose groups are shown.
    """

    dims: ParallelDims
    ranks_per_node: int | None
    axis: str

    @cached_property
    def layout(self) -> RankLayout:
        """Coordinates and groups of all ranks."""
        return self.dims.layout()

    @cached_property
    def nesting(self) -> tuple[str, ...]:
        """Names of the axes with more than one rank, the outermost first.

        With ``ep_mode="folded"``, ``ep`` reuses the ranks of other axes, so it is left out.
        """
        folded = self.dims.ep_mode == "folded"
        names = [name for name in self.dims.order if not (folded and name == "ep")]
        return tuple(name for name in names if self.layout.size(name) > 1)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes whose coordinates are shown for each rank.

        These are the axes in `nesting`. ``ep`` is added if it has more than one rank.
        """
        ep = ("ep",) if "ep" not in self.nesting and self.layout.size("ep") > 1 else ()
        return (*self.nesting, *ep)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each group of the axis or alias ``axis``. A group's index is its number."""
        return tuple(self.layout.groups(self.axis))

    @cached_property
    def group_of(self) -> Mapping[int, int]:
        """Dictionary from a rank to the number of its group, which is an index in `groups`."""
        return {rank: number for number, group in enumerate(self.groups) for rank in group}

    @cached_property
    def boxes(self) -> Sequence[range]:
        """Range of global ranks of each box in the picture: of each node, or of all ranks.

        The last node may have fewer ranks than the others.
        """
        world = self.layout.world_size
        width = self.ranks_per_node or world
        return [range(at, min(at + width, world)) for at in range(0, world, width)]

    @property
    def description(self) -> str:
        """One line of text: number of ranks, number of nodes, and order of the axes."""
        nodes = f" on {plural(len(self.boxes), 'node')} of {self.ranks_per_node}"
        if self.ranks_per_node is None:
            nodes = ", nodes not known: give --ranks-per-node"
        nesting = f"; outermost first: {' > '.join(self.nesting)}" if self.nesting else ""
        return f"{plural(self.layout.world_size, 'rank')}{nodes}{nesting}"

    def crosses_nodes(self, name: str) -> bool | None:
        """Return True if a group of the axis or alias ``name`` has ranks in several nodes.

        Returns None if the number of ranks per node is unknown.
        """
        node = self.ranks_per_node
        return None if node is None else self.layout.crosses_nodes(name, node)

    def links(self, name: str) -> str:
        """Return where groups of an axis or alias communicate, as text.

        The text is ``"inside a node"``, ``"between nodes"`` or ``"not known"``.
        """
        crosses = self.crosses_nodes(name)
        return "not known" if crosses is None else "between nodes" if crosses else "inside a node"

    def families(self) -> tuple[tuple[str, ...], ...]:
        """Collect axes and aliases that have identical groups of ranks.

        Returns one tuple of names for each different set of groups. If ``fsdp`` and ``dp`` have the
        same groups, one of the tuples contains both names. Axes and aliases whose groups have one
        rank are left out.
        """
        # Two names have the same groups if the group of rank 0 is the same for both names. This is
        # also true with ``free_etp``, although the groups of one name may then differ in pattern.
        found: dict[tuple[int, ...], list[str]] = {}
        for name in dict.fromkeys((*self.axes, *self.layout.names)):
            if self.layout.size(name) > 1:
                found.setdefault(self.layout.group(name, 0), []).append(name)
        return tuple(map(tuple, found.values()))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis of `axes`, by axis name."""
        return {axis: self.layout.coordinate(axis, rank) for axis in self.axes}


def map_ranks(dims: ParallelDims, ranks_per_node: int | None, axis: str | None) -> RankMap:
    """Create the `RankMap` that ``show`` prints and draws.

    ``dims`` must be resolved. If ``axis`` is None, the innermost axis with more than one rank is
    used.

    Raises:
        LayoutError: No axis or alias has the name ``axis``.
    """
    dims.layout().size(axis or "tp")
    found = RankMap(dims=dims, ranks_per_node=ranks_per_node, axis=axis or "tp")
    return found if axis or not found.nesting else replace(found, axis=found.nesting[-1])


def answer_show(args: Namespace, reader: Reader) -> Answer:
    """Answer the command ``show``: the coordinates and the group of each rank.

    The groups are the groups of the axis or alias that ``--axis`` names.
    """
    dims, node = read_ranks(args, reader)
    found = reader.checked(reader(map_ranks, dims, node, args.axis))
    return Answer(json=partial(_show_json, found), blocks=_show_blocks(found), data=found)


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
        for rank in range(layout.world_size)
    ]
    return {"dims": found.dims.to_dict(), "ranks_per_node": node, "axes": axes, "ranks": ranks}


def _show_blocks(found: RankMap) -> Iterator[Block]:
    yield Line(found.dims.summary(), "bold")
    yield Line(found.description)
    rows = []
    for names in found.families():
        group, links = found.layout.group(names[0], 0), found.links(names[0])
        count = found.layout.world_size // len(group)
        rows.append((" ".join(names), len(group), count, links, rank_list(group)))
    columns = ("axes", "size", "groups", "links", "first group")
    only = [("all", 1, 1, "inside a node", "0")]
    yield Table(columns, rows or only, ("size", "groups"))
    yield from _rank_blocks(found)


def _rank_blocks(found: RankMap) -> Iterator[Block]:
    """Yield a table with the ranks of each node, in rows of at most `MOST_CELLS` ranks.

    If there are more than `MOST_ROWS` rows, rows in the middle are left out. A line after the table
    says which ranks are left out.
    """
    width = min(len(found.boxes[0]), MOST_CELLS)
    lines = [
        (node, box[at : at + width])
        for node, box in enumerate(found.boxes)
        for at in range(0, len(box), width)
    ]
    head, tail = ends(len(lines), MOST_ROWS)
    rows: list[Iterable[object]] = [_rank_cells(found, *lines[i]) for i in head]
    rows += [["..."]] if tail else []
    rows += [_rank_cells(found, *lines[i]) for i in tail]
    parts = ["rank", *filter(None, [".".join(found.axes)]), f"#{found.axis} group"]
    columns = ("node", *(f"+{i}" for i in range(width)))
    yield Table(columns, rows, title=f"each cell: {', '.join(parts)}")
    if tail:
        yield Line()
        first, last = lines[head.stop][1][0], lines[tail.start][1][0] - 1
        yield Line(f"ranks {first}-{last} are left out here; --json has all", "warn")


def _rank_cells(found: RankMap, node: int, ranks: range) -> Iterator[object]:
    yield "-" if found.ranks_per_node is None else node
    for rank in ranks:
        group = found.group_of[rank]
        place = ".".join(map(str, found.coordinates(rank).values()))
        text = " ".join(filter(None, (str(rank), place, f"#{group}")))
        yield Line(text, f"black on {GROUP_COLOURS[group % len(GROUP_COLOURS)]}")


def answer_groups(args: Namespace, reader: Reader) -> Answer:
    """Answer the command ``groups``: all groups of an axis or alias, or the group of one rank."""
    if "=" in args.name:
        reason = f"{args.name!r} is not an axis; AXIS comes first: hp-mesh groups tp tp=8"
        raise refusal("word", reason, {"axis": args.name})
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
    yield Line(found.dims.summary(), "bold")
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


def violation_json(violation: Violation) -> Json:
    """Return a dictionary of the fields of a violation. The key ``"text"`` has its message."""
    return {**asdict(violation), "text": str(violation)}


def ends(count: int, most: int) -> tuple[range, range]:
    """Choose indices at the start and at the end of a list that is too long to be printed.

    Returns a pair ``(head, tail)`` of ranges of indices. Together they have ``most`` indices.
    ``tail`` has a quarter of these, at the end of the list. If ``count <= most``, ``head`` has all
    indices of the list and ``tail`` is empty.

    Args:
        count: Length of the list.
        most: Largest number of indices to choose.
    """
    if count <= most:
        return range(count), range(count, count)
    last = most // 4
    return range(most - last), range(count - last, count)


def with_gap(count: int, most: int, fewer: int | None = None) -> list[int | None]:
    """Choose indices of a list to print, with one None for the items that are left out.

    If ``count <= most``, returns all indices of the list. Otherwise returns ``fewer`` indices: the
    first ones, then None, then the last ones.

    Args:
        count: Length of the list.
        most: Largest length of a list that is printed completely.
        fewer: Number of indices to choose if the list is longer than ``most``. Defaults to
            ``most``.
    """
    head, tail = ends(count, most if fewer is None or count <= most else fewer)
    return [*head, *([None] if tail else []), *tail]


def rank_list(ranks: Sequence[int], most: int = 12) -> str:
    """Return ranks as text.

    Three or more consecutive ranks are written as ``"0-7"``. Other ranks are written one by one. If
    there are more than ``most`` ranks, ranks in the middle are replaced: ``"0 2 4 ... 30"``.
    """
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = with_gap(len(ranks), most)
    return " ".join("..." if i is None else str(ranks[i]) for i in shown)
