"""Answers as tables of rich, on terminals and in pipes. Importing this module needs rich."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TextIO, TypeAlias

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..planner import Candidate, Plan
from ..planner._result import counts_of
from ._reports import (
    GIB,
    GROUP_COLOURS,
    NOTHING,
    WITHOUT_AXIS,
    Answer,
    Checked,
    Estimated,
    Explained,
    Groups,
    Planned,
    RankMap,
    Ranks,
    Row,
    constructor_line,
    ends,
    format_seconds,
    hint_line,
    percent,
    plan_rows,
    plan_title,
    plural,
    rank_list,
    settings,
    variant,
    why_chosen,
    why_it_loses,
    word_line,
)

Block: TypeAlias = Text | Table

BAR_WIDTH = 30
ROW = 8
MOST_ROWS = 24
WIDE = 10_000  # columns of an output that is no terminal, so that no line is wrapped
DASHES = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)
TITLE, GOOD, WARN, BAD, DIM = "bold", "bold green", "yellow", "red", "dim"
FITS = {"fits": GOOD, "borderline": WARN, "does not fit": BAD}
VERDICTS = {"holds": GOOD, "error": BAD, "advice": WARN}


def print_answer(answer: Answer, file: TextIO) -> None:
    """Print an answer.

    If ``file`` is not a terminal, the text is ASCII without colours. Long lines are not wrapped.
    """
    console = Console(file=file, highlight=False, width=None if file.isatty() else WIDE)
    with console.capture() as captured:
        for block in _blocks(answer):
            console.print(block, soft_wrap=isinstance(block, Text))
    for line in captured.get().splitlines():
        print(line.rstrip(), file=file)


def _blocks(answer: Answer) -> Iterator[Block]:
    match answer:
        case Planned():
            yield from _plan(answer)
        case Estimated():
            yield from _estimate(answer)
        case Checked():
            yield from _check(answer)
        case Explained():
            yield Text(answer.dims.summary(), TITLE)
            rows = [(_verdict(each.verdict), each.rule, each.text) for each in answer.rules]
            yield from _table("", ("verdict", "rule", "numbers"), rows)
        case RankMap():
            yield from _show(answer)
        case Groups():
            yield from _groups(answer)


def _table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Iterable[object]],
    numbers: Iterable[str] = (),
) -> Iterator[Block]:
    """Yield a title and a table. The columns in ``numbers`` are aligned to the right."""
    table = Table(box=DASHES, show_edge=False, pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left")
    for row in rows:
        table.add_row(*(each if isinstance(each, Text) else Text(str(each)) for each in row))
    yield Text()
    if title:
        yield Text(title, TITLE)
    yield table


def _check(answer: Checked) -> Iterator[Block]:
    report = answer.report
    errors, advice = len(report.errors), len(report) - len(report.errors)
    verdict = plural(errors, "error") if errors else "no error"
    verdict += f", {plural(advice, 'piece')} of advice" if advice else ""
    yield Text(answer.dims.summary(), TITLE)
    yield Text(verdict, BAD if errors else GOOD)
    if report:
        rows = [(_verdict(each.level), each.rule, each) for each in report]
        yield from _table("", ("level", "rule", "problem"), rows)
    if report.skipped:
        yield Text()
        yield Text(f"not checked, because not given: {', '.join(report.skipped)}", DIM)


def _verdict(verdict: str) -> Text:
    return Text(verdict, VERDICTS.get(verdict, DIM))


def _links(answer: Ranks, name: str) -> str:
    crosses = answer.crosses_nodes(name)
    return "not known" if crosses is None else "between nodes" if crosses else "inside a node"


def _show(found: RankMap) -> Iterator[Block]:
    yield Text(found.dims.summary(), TITLE)
    yield Text(found.place)
    rows = []
    for names in found.families():
        group = found.layout.group(names[0], 0)
        links = _links(found, names[0])
        count = found.world // len(group)
        rows.append((" ".join(names), len(group), count, links, rank_list(group)))
    columns = ("axes", "size", "groups", "links", "first group")
    only = [("all", 1, 1, "inside a node", "0")]
    yield from _table("", columns, rows or only, ("size", "groups"))
    yield from _ranks(found)


def _ranks(found: RankMap) -> Iterator[Block]:
    """Yield a table with a row for each node, or several rows for a wide node."""
    width = min(found.width, ROW, found.world)
    starts = [(node, at) for node in range(found.nodes) for at in found.ranks_of(node)[::width]]
    head, tail = ends(len(starts), MOST_ROWS)
    rows: list[list[str | Text]] = [_cells(found, *starts[i], width) for i in head]
    if tail:
        first, last = starts[len(head)][1], starts[tail[0]][1] - 1
        rows.append(["...", *[""] * width])
    rows += [_cells(found, *starts[i], width) for i in tail]
    parts = ["rank", *filter(None, [".".join(found.axes)]), f"#{found.axis} group"]
    columns = ("node", *(f"+{i}" for i in range(width)))
    yield from _table(f"each cell: {', '.join(parts)}", columns, rows)
    if tail:
        yield Text()
        yield Text(f"ranks {first}-{last} are left out here; --json has all", WARN)


def _cells(found: RankMap, node: int, start: int, width: int) -> list[str | Text]:
    cells: list[str | Text] = ["-" if found.ranks_per_node is None else str(node)]
    for rank in range(start, start + width):
        if rank in found.ranks_of(node):
            group = found.group_of[rank]
            place = ".".join(map(str, found.coordinates(rank).values()))
            text = " ".join(filter(None, (str(rank), place, f"#{group}")))
            cells.append(Text(text, f"black on {GROUP_COLOURS[group % len(GROUP_COLOURS)]}"))
        else:
            cells.append("")
    return cells


def _groups(found: Groups) -> Iterator[Block]:
    layout, name, rank = found.layout, found.axis, found.rank
    yield Text(found.dims.summary(), TITLE)
    if rank is not None:
        at = " ".join(f"{axis}={index}" for axis, index in layout.coordinates(rank).items())
        yield Text(f"rank {rank} is at {at}")
        ranks = rank_list(layout.group(name, rank), 64)
        yield Text(f"its {name} group of {layout.size(name)}: {ranks}")
        return
    groups = layout.groups(name)
    head, tail = ends(len(groups), MOST_ROWS)
    rows = [(str(i), rank_list(groups[i])) for i in head]
    if tail:
        rows.append(("...", f"{tail[0] - len(head)} groups left out; --json has all"))
    rows += [(str(i), rank_list(groups[i])) for i in tail]
    title = f"{plural(len(groups), f'{name} group')} of {len(groups[0])}"
    title += "" if found.ranks_per_node is None else f", {_links(found, name)}"
    yield from _table(title, ("group", "ranks"), rows, ("group",))


def _plan(answer: Planned) -> Iterator[Block]:
    found, best = answer.plan, answer.plan.best
    yield from _title(found)
    world, node = found.cluster.world_size, found.cluster.ranks_per_node
    if world > node and world % node:
        yield Text(f"{world} ranks do not fill nodes of {node}; give --ranks-per-node N", WARN)
    if best is None:
        yield Text(NOTHING, BAD)
    else:
        yield from _winner(best, found.fastest)
        yield from _splits(best)
        yield from _candidates(found, best, plan_rows(found, answer.top))
    yield Text()
    if answer.hint is not None:
        yield Text(hint_line(answer.hint, best), GOOD)
    if answer.smallest is not None:
        text = "the smallest number of GPUs on which a configuration fits"
        yield Text(f"{text}: {answer.smallest}", WARN)
    yield Text(counts_of(found))
    if answer.rejections:
        rows = [(group.rule, group.count, group.violation.reason) for group in answer.rejections]
        yield from _table("rejected by rule", ("rule", "count", "example"), rows, ("count",))


def _title(found: Plan) -> Iterator[Block]:
    yield Text(plan_title(found), TITLE)
    model = found.model
    total = f"{model.parameters / 1e9:.3g}B parameters"
    active = f", {model.active_parameters / 1e9:.3g}B of them active in one token"
    yield Text(total + (active if model.experts else ""))


def _winner(best: Candidate, fastest: Candidate | None) -> Iterator[Block]:
    headings = {
        "fits": "RUN THIS",
        "borderline": "NOTHING FITS; this is up to 15% above the memory limit",
        "does not fit": "NOTHING FITS; this comes nearest",
    }
    yield Text()
    yield Text(headings[best.fit], FITS[best.fit])
    yield Text(f"  {constructor_line(best.dims)}", TITLE)
    yield Text(f"  {word_line(best.dims)}")
    yield from _costs(best)
    if fastest is not None and best != fastest:
        yield Text(f"  {why_chosen(best, fastest)}")


def _costs(one: Candidate) -> Iterator[Block]:
    yield Text(f"  {settings(one)}")
    yield Text(
        f"  estimated {format_seconds(one.time.total)} s per step, "
        f"{one.tokens_per_second_per_gpu:.0f} tokens/s per GPU, {one.mfu:.0%} MFU; "
        f"{one.memory.total / GIB:.1f} of {one.limit / GIB:.1f} GiB ({one.fit})"
    )
    yield Text(f"  {one.trust}", DIM)


def _splits(best: Candidate) -> Iterator[Block]:
    memory = {name: part / GIB for name, part in best.memory.parts.items()}
    whole = max(best.limit, best.memory.total) / GIB
    yield from _parts(f"memory of one GPU; shares of {whole:.1f} GiB", memory, whole, "GiB", ".1f")
    whole = best.time.total
    title = f"time of one step; shares of {format_seconds(whole)} s"
    named = {_activity(name): part for name, part in best.time.parts.items()}
    yield from _parts(title, named, whole, "s", ".3f")


def _activity(name: str) -> str:
    return name if name in WITHOUT_AXIS else f"exposed {name}"


def _parts(
    title: str, parts: Mapping[str, float], whole: float, unit: str, digits: str
) -> Iterator[Block]:
    """Yield a table with a bar for each part. A part above 0 has at least one mark."""
    rows = []
    for name, part in parts.items():
        marks = max(1, round(BAR_WIDTH * part / whole)) if part > 0 else 0
        rows.append((name, f"{part:{digits}}", percent(part / whole), Text("#" * marks, "cyan")))
    yield from _table(title, ("part", unit, "share", ""), rows, (unit, "share"))


def _candidates(found: Plan, best: Candidate, rows: Sequence[Row]) -> Iterator[Block]:
    title = f"the best of {len(found.candidates)} candidates; # is the place among all"
    if any(row.splits for row in rows):
        title += "; splits of dp within 1% in time share a row"
    columns = ("#", "degrees", "micro", "recompute", "time", "GiB", "fit", "why not first")
    cells = [_candidate(row, best, found.cluster.ranks_per_node) for row in rows]
    yield from _table(title, columns, cells, ("#", "micro", "time", "GiB"))


def _candidate(row: Row, best: Candidate, ranks_per_node: int) -> tuple[object, ...]:
    one = row.candidate
    return (
        row.place,
        word_line(one.dims) + (f" (+{plural(row.splits, 'split')} of dp)" if row.splits else ""),
        one.micro_batch,
        one.recompute + variant(one),
        f"{one.time.total / best.time.total:.3f}x",
        f"{one.memory.total / GIB:.1f}",
        Text(one.fit, FITS[one.fit]),
        "" if one == best else why_it_loses(one, best, ranks_per_node),
    )


def _estimate(answer: Estimated) -> Iterator[Block]:
    found, own, best = answer.plan, answer.comparison.own, answer.comparison.best
    node = found.cluster.ranks_per_node
    yield from _title(found)
    yield Text()
    yield Text(f"{word_line(own.dims)}: {own.fit}", FITS[own.fit])
    yield from _costs(own)
    if own.fit != "fits":
        yield Text(f"  {why_it_loses(own, best, node)}", FITS[own.fit])
    if own == best:
        yield Text("this is the best configuration", GOOD)
        yield from _splits(own)
        return
    yield Text()
    yield Text(f"the best: {word_line(best.dims)} ({best.fit})", TITLE)
    yield from _costs(best)
    place = next((i for i, one in enumerate(found.candidates, 1) if one == own), None)
    of = f"; it is number {place} of {len(found.candidates)}" if place else ""
    yield Text(f"yours takes {answer.comparison.slowdown:.2f}x the time of the best{of}")
    if own.fit == "fits" and own.time.total > best.time.total:
        yield Text(f"main loss: {why_it_loses(own, best, node)}", WARN)
    times, memories = (own.time.parts, best.time.parts), (own.memory.parts, best.memory.parts)
    yield from _versus("seconds of one step", *times, 1, ".3f")
    yield from _versus("GiB of one GPU", *memories, GIB, ".1f")


def _versus(
    title: str, own: Mapping[str, float], best: Mapping[str, float], unit: float, digits: str
) -> Iterator[Block]:
    parts = {name: (own.get(name, 0.0), best.get(name, 0.0)) for name in (*own, *best)}
    parts["total"] = (sum(own.values()), sum(best.values()))
    columns = ("part", "yours", "best", "more")
    rows = [
        (
            name,
            f"{mine / unit:{digits}}",
            f"{its / unit:{digits}}",
            f"{(mine - its) / unit:+{digits}}",
        )
        for name, (mine, its) in parts.items()
    ]
    yield from _table(title, columns, rows, columns[1:])
