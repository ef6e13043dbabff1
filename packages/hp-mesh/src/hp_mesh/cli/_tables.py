"""Blocks of text as rich's tables on a terminal, and as plain ASCII everywhere else."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias, assert_never

from .._dims import ParallelDims
from .._errors import Explanation, Level, Report, Verdict
from ..planner import Candidate, Comparison, Plan
from ._reports import (
    GIB,
    RankMap,
    RejectionGroup,
    Row,
    constructor_line,
    ends,
    largest_exposed,
    parameters_line,
    percent,
    plan_rows,
    rank_list,
    why_chosen,
    why_it_loses,
    word_line,
)

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

BAR_WIDTH = 30
MOST_ROWS = 24
ROW = 8
NOTHING = "no configuration keeps all rules"
MOST_GROUPS = 24
GROUP_COLOURS = (
    "#a9d3ec",
    "#f7d58c",
    "#9fdcc6",
    "#ecc6da",
    "#d9d9d9",
    "#f2b48c",
    "#faf4a6",
    "#a79ccf",
)

Tone: TypeAlias = Literal["plain", "title", "good", "warn", "bad", "dim"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One text of a table; cells with the same ``group`` belong together and share a colour."""

    text: str
    tone: Tone = "plain"
    group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of text."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under column names; the columns in ``right`` hold numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    right: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One labelled part; ``share`` of the whole bar's length is filled, more than 1 counts as 1."""

    label: str
    share: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Parts of one whole, drawn to one scale."""

    title: str
    bars: tuple[Bar, ...]


Block: TypeAlias = Line | Table | Bars


def cells(*texts: object) -> tuple[Cell, ...]:
    """Return a row of plain cells; cells among the texts stay as they are."""
    return tuple(text if isinstance(text, Cell) else Cell(text=str(text)) for text in texts)


def plain_text(blocks: Iterable[Block]) -> str:
    """Return the blocks as lines of text that need no colour to be understood."""
    lines: list[str] = []
    for block in blocks:
        match block:
            case Line():
                lines.append(block.text)
            case Table():
                lines += ["", *_table_lines(block), ""]
            case Bars():
                lines += ["", *_bar_lines(block), ""]
            case _:
                assert_never(block)
    return "\n".join(_squeezed(lines)) + "\n"


def _squeezed(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines without empty ones at either end or next to each other."""
    gap = begun = False
    for line in lines:
        if not line:
            gap = begun
            continue
        if gap:
            yield ""
        yield line
        gap, begun = False, True


def _table_lines(table: Table) -> Iterator[str]:
    if table.title:
        yield table.title
    texts = [list(table.columns), *([cell.text for cell in row] for row in table.rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(table.columns))]
    for row in (texts[0], ["-" * width for width in widths], *texts[1:]):
        aligned = (
            text.rjust(width) if column in table.right else text.ljust(width)
            for text, width, column in zip(row, widths, table.columns, strict=True)
        )
        yield "  ".join(aligned).rstrip()


def _bar_lines(bars: Bars) -> Iterator[str]:
    if bars.title:
        yield bars.title
    label_width = max((len(bar.label) for bar in bars.bars), default=0)
    text_width = max((len(bar.text) for bar in bars.bars), default=0)
    for bar in bars.bars:
        filled = "#" * bar_length(bar.share, BAR_WIDTH)
        yield f"  {bar.label:<{label_width}}  {bar.text:>{text_width}}  {filled}".rstrip()


def bar_length(share: float, width: int) -> int:
    """Return how many of ``width`` characters a share fills; whatever is not nothing fills one."""
    return min(width, max(1, round(share * width))) if share > 0 else 0


STYLES: dict[Tone, str] = {
    "plain": "",
    "title": "bold",
    "good": "bold green",
    "warn": "yellow",
    "bad": "red",
    "dim": "dim",
}


def print_rich(blocks: Iterable[Block], file: TextIO) -> None:
    """Print the blocks to a terminal; rich itself honours ``NO_COLOR`` and the width."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=file, highlight=False)
    for block in blocks:
        match block:
            case Line():
                console.print(Text(block.text, style=STYLES[block.tone]))
            case Table():
                console.print(_rich_table(block))
            case Bars():
                console.print(_rich_bars(block))
            case _:
                assert_never(block)


def _rich_cell(cell: Cell) -> "Text":
    from rich.text import Text

    if cell.group is None:
        return Text(cell.text, style=STYLES[cell.tone])
    colour = GROUP_COLOURS[cell.group % len(GROUP_COLOURS)]
    return Text(cell.text, style=f"black on {colour}")


def _rich_table(table: Table) -> "RichTable":
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=Text(table.title, style="bold"), title_justify="left")
    for column in table.columns:
        drawn.add_column(column, justify="right" if column in table.right else "left")
    for row in table.rows:
        drawn.add_row(*map(_rich_cell, row))
    return drawn


def _rich_bars(bars: Bars) -> "RichTable":
    from rich.table import Table as RichTable
    from rich.text import Text

    title = Text(bars.title, style="bold")
    drawn = RichTable(title=title, title_justify="left", box=None, show_header=False)
    drawn.add_column()
    drawn.add_column(justify="right")
    drawn.add_column(style="cyan")
    for bar in bars.bars:
        drawn.add_row(Text(bar.label), Text(bar.text), "█" * bar_length(bar.share, BAR_WIDTH))
    return drawn


LINKS = {
    True: Cell(text="between nodes", tone="warn"),
    False: Cell(text="inside a node"),
    None: Cell(text="not known", tone="dim"),
}


def show_blocks(found: RankMap) -> tuple[Block, ...]:
    """Return the axes with their groups, and every rank with its coordinates."""
    title = Line(text=found.dims.summary(), tone="title")
    return title, Line(text=found.place), _axes_table(found), *_rank_blocks(found)


def _axes_table(found: RankMap) -> Table:
    rows = []
    for names in found.families():
        group = found.layout.group(names[0], 0)
        links = LINKS[found.crosses_nodes(names[0])]
        texts = (" ".join(names), len(group), found.world // len(group))
        rows.append(cells(*texts, links, rank_list(group)))
    return Table(
        title="",
        columns=("axes", "size", "groups", "links", "first group"),
        rows=tuple(rows or [cells("all", 1, 1, "inside a node", "0")]),
        right=frozenset({"size", "groups"}),
    )


def _rank_blocks(found: RankMap) -> tuple[Table | Line, ...]:
    """Return one row for each node, or several for a wide one, and what was left out."""
    width = min(found.width, ROW, found.world)
    starts = [
        (node, start) for node in range(found.nodes) for start in found.ranks_of(node)[::width]
    ]
    head, tail = ends(len(starts), MOST_ROWS)
    rows = [_row(found, *starts[i], width) for i in head]
    blocks: list[Table | Line] = []
    if tail:
        first, last = starts[len(head)][1], starts[tail[0]][1] - 1
        rows.append(cells("...", *[""] * width))
        blocks.append(
            Line(text=f"ranks {first}-{last} are left out here; --json has all", tone="warn")
        )
    rows += [_row(found, *starts[i], width) for i in tail]
    parts = ["rank", *([".".join(found.axes)] if found.axes else []), f"#{found.axis} group"]
    title = f"each cell: {', '.join(parts)}"
    table = Table(title=title, columns=("node", *(f"+{i}" for i in range(width))), rows=tuple(rows))
    return table, *blocks


def _row(found: RankMap, node: int, start: int, width: int) -> tuple[Cell, ...]:
    ranks = [rank for rank in range(start, start + width) if rank in found.ranks_of(node)]
    drawn = [Cell(text=_rank_text(found, r), group=found.group_of[r]) for r in ranks]
    label = "-" if found.ranks_per_node is None else node
    return cells(label, *drawn, *[""] * (width - len(drawn)))


def _rank_text(found: RankMap, rank: int) -> str:
    place = ".".join(map(str, found.coordinates(rank).values()))
    return " ".join(word for word in (str(rank), place, f"#{found.group_of[rank]}") if word)


FITS: dict[str, Tone] = {"fits": "good", "borderline": "warn", "does not fit": "bad"}


def group_blocks(dims: ParallelDims, name: str, crosses: bool | None) -> tuple[Block, ...]:
    """Return all groups of an axis or alias; ``crosses`` says whether they leave their node."""
    groups = dims.layout().groups(name)
    links = "" if crosses is None else ", between nodes" if crosses else ", inside a node"
    head, tail = ends(len(groups), MOST_GROUPS)
    rows = [cells(i, rank_list(groups[i])) for i in head]
    if tail:
        rows.append(cells("...", f"{tail[0] - len(head)} groups left out; --json has all"))
    rows += [cells(i, rank_list(groups[i])) for i in tail]
    plural = "s" * (len(groups) != 1)
    table = Table(
        title=f"{len(groups)} {name} group{plural} of {len(groups[0])}{links}",
        columns=("group", "ranks"),
        rows=tuple(rows),
        right=frozenset({"group"}),
    )
    return Line(text=dims.summary(), tone="title"), table


def rank_group_blocks(dims: ParallelDims, name: str, rank: int) -> tuple[Block, ...]:
    """Return the place of one rank and its group."""
    layout = dims.layout()
    at = " ".join(f"{axis}={index}" for axis, index in layout.coordinates(rank).items())
    ranks = rank_list(layout.group(name, rank), 64)
    return (
        Line(text=dims.summary(), tone="title"),
        Line(text=f"rank {rank} is at {at}"),
        Line(text=f"its {name} group of {layout.size(name)}: {ranks}"),
    )


def check_blocks(dims: ParallelDims, report: Report) -> tuple[Block, ...]:
    """Return every violation, and the fields that were absent."""
    errors, advice = len(report.errors), len(report) - len(report.errors)
    verdict = "no error" if not errors else f"{errors} error{'s' * (errors > 1)}"
    verdict += f", {advice} piece{'s' * (advice > 1)} of advice" if advice else ""
    blocks: list[Block] = [
        Line(text=dims.summary(), tone="title"),
        Line(text=verdict, tone="bad" if errors else "good"),
    ]
    if report:
        rows = (cells(_verdict(v.level), v.rule, v) for v in report)
        columns = ("level", "rule", "what and what to do")
        blocks.append(Table(title="", columns=columns, rows=tuple(rows)))
    if report.skipped:
        blocks.append(Line(text=f"not checked, not given: {', '.join(report.skipped)}", tone="dim"))
    return tuple(blocks)


def explain_blocks(dims: ParallelDims, found: Iterable[Explanation]) -> tuple[Block, ...]:
    """Return each rule with its numbers and its verdict."""
    rows = tuple(cells(_verdict(each.verdict), each.rule, each.text) for each in found)
    table = Table(title="", columns=("verdict", "rule", "with its numbers"), rows=rows)
    return Line(text=dims.summary(), tone="title"), table


def _verdict(verdict: Verdict | Level) -> Cell:
    tones: dict[str, Tone] = {"holds": "good", "error": "bad", "advice": "warn"}
    return Cell(text=verdict, tone=tones.get(verdict, "dim"))


def plan_blocks(
    found: Plan, rejections: Sequence[RejectionGroup], top: int, smallest: int | None = None
) -> tuple[Block, ...]:
    """Return the whole answer, with the ``top`` first candidates.

    ``smallest`` is the number of devices that would do where nothing fits.
    """
    blocks: list[Block] = [*_title(found)]
    world, node = found.cluster.world_size, found.cluster.ranks_per_node
    if world > node and world % node:
        text = f"{world} ranks do not fill nodes of {node}; --ranks-per-node N says what they are"
        blocks.append(Line(text=text, tone="warn"))
    if found.best is None:
        blocks.append(Line(text=NOTHING, tone="bad"))
    else:
        blocks += _winner(found.best, found.fastest)
        blocks += _splits(found.best)
        blocks.append(_candidates_table(found, found.best, top))
    if smallest is not None:
        text = f"the smallest number of GPUs on which a configuration fits: {smallest}"
        blocks.append(Line(text=text, tone="warn"))
    blocks.append(Line(text=_counts(found)))
    if rejections:
        blocks.append(_rejections_table(rejections))
    return tuple(blocks)


def _title(found: Plan) -> tuple[Line, Line]:
    return Line(text=plan_title(found), tone="title"), Line(text=parameters_line(found.model))


def plan_title(found: Plan) -> str:
    """Return in one line what is planned."""
    cluster, train = found.cluster, found.train
    return (
        f"{found.model.name or 'model'} on {cluster.world_size} x {cluster.device.name}, "
        f"{cluster.ranks_per_node} per node; {train.global_batch} sequences of {train.seq_len} "
        f"tokens per step{', float8' if train.float8 else ''}"
    )


def settings(candidate: Candidate) -> str:
    """Return in one line what a candidate has besides its degrees."""
    parts, each = candidate.microbatches, candidate.micro_batch
    return (
        f"{parts} microbatch{'es' * (parts != 1)} of {each} sequence{'s' * (each != 1)}, "
        f"recompute {candidate.recompute}{variant(candidate)}"
    )


def variant(candidate: Candidate) -> str:
    """Return schedule and ZeRO stage where they are not the usual ones."""
    text = "" if candidate.schedule == "1f1b" else f", {candidate.schedule}"
    text += f" of {candidate.virtual_stages} stages" if candidate.virtual_stages > 1 else ""
    return text if candidate.zero is None else f"{text}, ZeRO {candidate.zero}"


def format_seconds(seconds: float) -> str:
    """Return seconds with about three digits."""
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.3g}"


def _winner(best: Candidate, fastest: Candidate | None) -> Iterator[Block]:
    headings = {
        "fits": "RUN THIS",
        "borderline": "NOTHING FITS; this is up to 15% above the memory limit",
        "does not fit": "NOTHING FITS; this comes nearest",
    }
    yield Line(text="")
    yield Line(text=headings[best.fit], tone=FITS[best.fit])
    yield Line(text=f"  {constructor_line(best.dims)}", tone="title")
    yield Line(text=f"  {word_line(best.dims)}")
    yield Line(text=f"  {settings(best)}")
    yield Line(text=f"  {_costs(best)}")
    yield Line(text=f"  {best.trust}", tone="dim")
    if fastest is not None and best != fastest:
        yield Line(text=f"  {why_chosen(best, fastest)}")


def _costs(one: Candidate) -> str:
    return (
        f"estimated {format_seconds(one.time.total)} s per step, "
        f"{one.tokens_per_second_per_gpu:.0f} tokens/s per GPU, {one.mfu:.0%} MFU; "
        f"{one.memory.total / GIB:.1f} of {one.limit / GIB:.1f} GiB ({one.fit})"
    )


def estimate_blocks(found: Plan, comparison: Comparison) -> tuple[Block, ...]:
    """Return what a configuration costs, what it lacks to the best, and why it does not fit."""
    own, best = comparison.own, comparison.best
    blocks = [
        *_title(found),
        Line(text=""),
        Line(text=f"{word_line(own.dims)}: {own.fit}", tone=FITS[own.fit]),
        Line(text=f"  {settings(own)}"),
        Line(text=f"  {_costs(own)}"),
        Line(text=f"  {own.trust}", tone="dim"),
    ]
    node = found.cluster.ranks_per_node
    if own.fit != "fits":
        blocks.append(Line(text=f"  {why_it_loses(own, best, node)}", tone=FITS[own.fit]))
    if own.dims == best.dims and own == best:
        return (*blocks, Line(text="this is the best configuration", tone="good"), *_splits(own))
    place = next((i for i, one in enumerate(found.candidates, 1) if one == own), None)
    of = f"; number {place} of {len(found.candidates)}" if place else ""
    blocks += [
        Line(text=""),
        Line(text=f"the best: {word_line(best.dims)} ({best.fit})", tone="title"),
        Line(text=f"  {settings(best)}"),
        Line(text=f"  {_costs(best)}"),
        Line(text=f"yours takes {comparison.slowdown:.2f}x its time{of}"),
    ]
    if own.fit == "fits" and own.time.total > best.time.total:
        blocks.append(Line(text=f"what it loses by: {why_it_loses(own, best, node)}", tone="warn"))
    return (
        *blocks,
        _versus("seconds of one step", own.time.parts, best.time.parts, 1, ".3f"),
        _versus("GiB of one GPU", own.memory.parts, best.memory.parts, GIB, ".1f"),
    )


def _versus(
    title: str, own: Mapping[str, float], best: Mapping[str, float], unit: float, digits: str
) -> Table:
    rows = []
    totals = {"total": (sum(own.values()), sum(best.values()))}
    parts = {name: (own.get(name, 0.0), best.get(name, 0.0)) for name in (*own, *best)}
    for name, (mine, other) in {**parts, **totals}.items():
        ours, theirs = mine / unit, other / unit
        more = f"{ours - theirs:+{digits}}"
        rows.append(cells(name, f"{ours:{digits}}", f"{theirs:{digits}}", more))
    columns = ("part", "yours", "best", "more")
    return Table(title=title, columns=columns, rows=tuple(rows), right=frozenset(columns[1:]))


def _splits(best: Candidate) -> Iterator[Block]:
    memory, time = best.memory.parts, best.time.parts
    whole = max(best.limit, best.memory.total)
    yield Bars(
        title=f"memory of one GPU; a full bar is {whole / GIB:.1f} GiB",
        bars=tuple(
            Bar(label=name, share=part / whole, text=f"{part / GIB:.1f} GiB")
            for name, part in memory.items()
        ),
    )
    yield Bars(
        title=f"time of one step; a full bar is {format_seconds(best.time.total)} s",
        bars=tuple(
            Bar(
                label=name if name in ("compute", "bubble", "optimizer") else f"exposed {name}",
                share=part / best.time.total,
                text=f"{part:.3f} s {percent(part / best.time.total):>5}",
            )
            for name, part in time.items()
        ),
    )


def _candidates_table(found: Plan, best: Candidate, top: int) -> Table:
    columns = "# degrees micro recompute time GiB fit bubble exposed why-not-first"
    rows = plan_rows(found, top)
    title = f"the best of {len(found.candidates)} candidates; # is the place among all"
    if any(row.splits for row in rows):
        title += "; splits of dp within 1% in time share a row"
    return Table(
        title=title,
        columns=tuple(column.replace("-", " ") for column in columns.split()),
        rows=tuple(_candidate_row(found, best, row) for row in rows),
        right=frozenset({"#", "micro", "time", "GiB", "bubble"}),
    )


def _candidate_row(found: Plan, best: Candidate, row: Row) -> tuple[Cell, ...]:
    one, node = row.candidate, found.cluster.ranks_per_node
    folded = f" (+{row.splits} split{'s' * (row.splits != 1)} of dp)" if row.splits else ""
    axis, share = largest_exposed(one)
    return cells(
        row.place,
        word_line(one.dims) + folded,
        one.micro_batch,
        one.recompute + variant(one),
        f"{one.time.total / best.time.total:.3f}x",
        f"{one.memory.total / GIB:.1f}",
        Cell(text=one.fit, tone=FITS[one.fit]),
        percent(one.time.bubble / one.time.total),
        f"{axis} {percent(share)}" if axis else "-",
        "" if one == best else why_it_loses(one, best, node),
    )


def _counts(found: Plan) -> str:
    return (
        f"{found.considered} considered: {len(found.fits)} fit, {len(found.borderline)} "
        f"borderline, {len(found.too_large)} do not fit, {len(found.rejected)} rejected"
    )


def _rejections_table(rejections: Sequence[RejectionGroup]) -> Table:
    return Table(
        title="rejected by rule",
        columns=("rule", "count", "for example"),
        rows=tuple(cells(group.rule, group.count, group.violation.reason) for group in rejections),
        right=frozenset({"count"}),
    )
