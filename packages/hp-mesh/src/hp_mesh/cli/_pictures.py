"""Pictures with matplotlib: the ranks of ``show`` and the best candidates of ``plan``.

The colours come from Okabe and Ito, "Color Universal Design" (2008), which people with any colour
vision can distinguish. Each drawn part has a ``gid``, which an SVG file stores as ``id``.
"""

from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch, Rectangle
from matplotlib.textpath import TextPath

from ..planner import Plan
from ._answers import (
    GIB,
    GROUP_COLOURS,
    NOTHING,
    RankMap,
    ends,
    format_seconds,
    plan_rows,
    plan_title,
    plural,
    rank_list,
    settings,
    word_line,
)

INK, FAINT, EDGE, GROUND, LIMIT = "#1a1a1a", "#5f6368", "#9aa0a6", "#f4f5f7", "#b00020"
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILION, YELLOW, BLACK, GREY = "#56b4e9", "#d55e00", "#f0e442", "#222222", "#cccccc"
# A part has the same colour in every picture.
TIME_COLOURS = {
    "compute": BLUE,
    "tp": ORANGE,
    "cp": GREEN,
    "fsdp": PURPLE,
    "dp_replicate": SKY,
    "ep": VERMILION,
    "pp": YELLOW,
    "bubble": GREY,
    "optimizer": BLACK,
}
MEMORY_COLOURS = {
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer": BLACK,
    "activations": ORANGE,
    "logits": VERMILION,
    "buffers": GREEN,
}
DPI = 100  # pixels of a layout per inch; text has 72 points per inch
SMALL = 9  # points of text in the picture of a plan
MARGIN, GAP, PAD, HEAD, LINE = 24, 14, 10, 26, 14
LEGEND_WIDTH = 230
MOST_NODES, FEWER_NODES = 64, 31  # the second one if some are left out
MOST_CELLS, FEWER_CELLS = 72, 63
MOST_ROWS = 8  # of a plan
COLUMNS = 4  # of a legend
MOST_OVER = 1.5  # a bar of memory ends at so many times the limit


def draw(subject: RankMap | Plan) -> Figure:
    """Draw the ranks of ``show`` or the candidates of ``plan``."""
    return draw_plan(subject) if isinstance(subject, Plan) else draw_ranks(subject)


def save(figure: Figure, path: str) -> None:
    """Write a picture in the format of the path's suffix."""
    metadata = {"Date": None} if path.lower().endswith(".svg") else {}
    with rc_context({"svg.hashsalt": "hp-mesh"}):
        figure.savefig(path, dpi=2 * DPI, metadata=metadata)


def draw_ranks(found: RankMap) -> Figure:
    """Draw a box for each node with a cell for each rank.

    The cells of one group of the chosen axis have the same colour and number. If there are many
    nodes, those in the middle are left out.
    """
    boxes = _with_gap(found.nodes, MOST_NODES, FEWER_NODES)
    drawn = len(_with_gap(min(found.width, found.world), MOST_CELLS, FEWER_CELLS))
    across = drawn if drawn < 4 else 4 if drawn <= 8 else 8
    texts = [f"{axis} {found.layout.size(axis) - 1}" for axis in found.axes]
    head = _width(f"{found.world - 1} ", 13) + _width(f"#{len(found.groups) - 1}", 10)
    cell = ceil(max(head, *(_width(text, 10.5) for text in texts), 0)) + 14
    cells = (cell, 28 + LINE * len(texts))
    node = (
        max(across * (cell + 4) - 4 + 2 * PAD, 150 if None in boxes else 90),
        HEAD + ceil(drawn / across) * (cells[1] + 4) - 4 + PAD,
    )
    columns = _columns(len(boxes), sqrt(len(boxes) * node[1] / node[0] * 2.2))
    lines = (found.dims.summary(), found.description, _grouping(found))
    widest = max(columns * (node[0] + GAP) - GAP, _width(lines[0], 17), _width(lines[2], 13), 420)
    legend = found.groups[: len(GROUP_COLOURS)]
    per_row = max(1, int(widest // LEGEND_WIDTH))
    top = MARGIN + 74 + ceil(len(legend) / per_row) * 22
    height = top + ceil(len(boxes) / columns) * (node[1] + GAP) - GAP + MARGIN
    figure = Figure(figsize=((widest + 2 * MARGIN) / DPI, height / DPI), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, widest + 2 * MARGIN), ylim=(height, 0))
    axes.axis("off")
    _text(axes, MARGIN, MARGIN + 16, lines[0], 17, weight="bold")
    _text(axes, MARGIN, MARGIN + 38, lines[1], 12.5, color=FAINT)
    _text(axes, MARGIN, MARGIN + 57, lines[2], 12.5, color=FAINT)
    for i, group in enumerate(legend):
        x, y = MARGIN + i % per_row * LEGEND_WIDTH, MARGIN + 68 + i // per_row * 22
        _box(axes, (x, y), (16, 14), f"legend {i}", facecolor=GROUP_COLOURS[i])
        _text(axes, x + 22, y + 12, f"#{i} {found.axis}: {rank_list(group, 5)}", 12)
    for i, number in enumerate(boxes):
        place = (MARGIN + i % columns * (node[0] + GAP), top + i // columns * (node[1] + GAP))
        if number is None:
            _draw_gap(axes, found, place, node, boxes)
        else:
            _draw_node(axes, found, number, place, node, cells, across)
    return figure


def _grouping(found: RankMap) -> str:
    count, size = len(found.groups), len(found.groups[0])
    line = f"colour and #: {plural(count, f'{found.axis} group')} of {plural(size, 'rank')}"
    line += " each" if count > 1 else ""
    if count > len(GROUP_COLOURS):
        line += f"; colours repeat after {len(GROUP_COLOURS)} groups"
    return line


def _draw_gap(
    axes: Axes,
    found: RankMap,
    place: tuple[float, float],
    size: tuple[float, float],
    boxes: Sequence[int | None],
) -> None:
    first = boxes.index(None)
    last = found.nodes - (len(boxes) - first)
    ranks = found.ranks_of(first)[0], found.ranks_of(last)[-1]
    _box(axes, place, size, "gap", facecolor="white", linestyle="--")
    lines = f"{last - first + 1} nodes left out", f"{first} to {last}"
    for i, text in enumerate((*lines, f"ranks {ranks[0]} to {ranks[1]}")):
        x, y = place[0] + size[0] / 2, place[1] + size[1] / 2 - 14 + 18 * i
        _text(axes, x, y, text, 12, ha="center")


def _draw_node(
    axes: Axes,
    found: RankMap,
    number: int,
    place: tuple[float, float],
    size: tuple[float, float],
    cell: tuple[float, float],
    across: int,
) -> None:
    _box(axes, place, size, f"node {number}", facecolor=GROUND)
    name = "all ranks" if found.ranks_per_node is None else f"node {number}"
    _text(axes, place[0] + PAD, place[1] + 17, name, 12, weight="bold")
    ranks = found.ranks_of(number)
    drawn = _with_gap(len(ranks), MOST_CELLS, FEWER_CELLS)
    for i, index in enumerate(drawn):
        x = place[0] + PAD + i % across * (cell[0] + 4)
        y = place[1] + HEAD + i // across * (cell[1] + 4)
        if index is None:
            _text(axes, x + 6, y + 16, f"{len(ranks) - len(drawn) + 1} more", 11)
            continue
        rank, group = ranks[index], found.group_of[ranks[index]]
        colour = GROUP_COLOURS[group % len(GROUP_COLOURS)]
        _box(axes, (x, y), cell, f"rank {rank}", facecolor=colour)
        _text(axes, x + 6, y + 16, str(rank), 13, weight="bold")
        _text(axes, x + cell[0] - 6, y + 16, f"#{group}", 10, ha="right")
        for line, (axis, coordinate) in enumerate(found.coordinates(rank).items()):
            _text(axes, x + 6, y + 32 + LINE * line, f"{axis} {coordinate}", 10.5)


def draw_plan(found: Plan) -> Figure:
    """Draw the best candidates, each with a bar of time and a bar of memory."""
    rows = [row.candidate for row in plan_rows(found, MOST_ROWS)]
    figure = Figure(figsize=(15, 2 + 0.46 * len(rows)), dpi=DPI)
    figure.set_layout_engine("constrained", w_pad=0.2, h_pad=0.15)
    figure.suptitle(plan_title(found), x=0.01, ha="left", weight="bold", size=13, color=INK)
    if not rows:
        figure.supxlabel(NOTHING, x=0.01, ha="left")
        return figure
    nothing = rows[0].fit == "does not fit"
    note = "nothing fits; the nearest misses" if nothing else "the best"
    note += f" of {len(found.candidates)} candidates, estimated; the name of an axis stands for "
    note += "communication that does not overlap with computation"
    note += "" if nothing else "; splits of dp share a row"
    limit, best = rows[0].limit / GIB, rows[0].time.total
    gibibytes = [{name: part / GIB for name, part in row.memory.parts.items()} for row in rows]
    needs = [sum(parts.values()) for parts in gibibytes]
    most = max(needs) if nothing else min(max(*needs, limit), MOST_OVER * limit)
    note += f"; bars end at {MOST_OVER} times the memory limit" if max(needs) > most else ""
    figure.supxlabel(note, x=0.01, ha="left", size=SMALL, color=FAINT)
    left, right = figure.subplots(1, 2, sharey=True)
    ratios = [""] * len(rows) if nothing else [f"  {row.time.total / best:.2f}x" for row in rows]
    paces = [f"{format_seconds(r.time.total)} s{x}" for r, x in zip(rows, ratios, strict=True)]
    longest = max(row.time.total for row in rows)
    times = [row.time.parts for row in rows]
    _bars(left, "time of one step", "s", times, longest, paces, TIME_COLOURS)
    fits = [f"{x:.1f} GiB{_unless_fits(r.fit)}" for r, x in zip(rows, needs, strict=True)]
    _bars(right, "memory of one GPU", "GiB", gibibytes, most, fits, MEMORY_COLOURS)
    left.set_yticks(range(len(rows)), [f"{word_line(r.dims)}\n{settings(r)}" for r in rows])
    right.axvline(limit, color=LIMIT, gid="limit")
    right.text(
        limit,
        len(rows) - 0.45,
        f"limit {limit:.1f} GiB",
        color=LIMIT,
        size=SMALL,
        ha="center",
        va="top",
    )
    return figure


def _unless_fits(fit: str) -> str:
    return "" if fit == "fits" else f" {fit}"


def _bars(
    axes: Axes,
    heading: str,
    unit: str,
    rows: Sequence[Mapping[str, float]],
    longest: float,
    texts: Sequence[str],
    colours: Mapping[str, str],
) -> None:
    """Draw a stacked bar and its text for each row, and a legend."""
    axes.set(xlim=(0, longest), ylim=(len(rows) - 0.4, -0.6), xticks=())
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=SMALL)
    names = [name for name in colours if any(row.get(name, 0) > 0 for row in rows)]
    starts = [0.0] * len(rows)
    for name in names:
        lengths = [row.get(name, 0.0) for row in rows]
        drawn = axes.barh(range(len(rows)), lengths, 0.6, starts, color=colours[name])
        for bar, length in zip(drawn, lengths, strict=True):
            bar.set_gid(f"{name}: {length:.3g} {unit}")
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    for i, text in enumerate(texts):
        place: Any = axes.get_yaxis_transform()
        axes.text(1.01, i, text, transform=place, va="center", size=SMALL, color=INK)
    # Matplotlib fills a legend by columns. This order makes it readable by rows.
    listed = [name for column in range(COLUMNS) for name in names[column::COLUMNS]]
    axes.legend(
        handles=[Patch(facecolor=colours[name], label=name) for name in listed],
        title=heading,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=COLUMNS,
        fontsize=SMALL,
        title_fontproperties={"weight": "bold"},
        alignment="left",
        frameon=False,
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1.2,
    )


def _box(
    axes: Axes, place: tuple[float, float], size: tuple[float, float], gid: str, **style: Any
) -> None:
    axes.add_patch(Rectangle(place, *size, gid=gid, edgecolor=EDGE, linewidth=0.7, **style))


def _text(axes: Axes, x: float, y: float, text: str, size: float, **style: Any) -> None:
    style = {"color": INK, "va": "baseline", "parse_math": False, **style}
    axes.text(x, y, text, fontsize=size * 72 / DPI, **style)


def _width(text: str, size: float) -> float:
    """Return the width of a bold text in pixels."""
    font = FontProperties(weight="bold")
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().width) if text else 0.0


def _with_gap(count: int, most: int, fewer: int) -> list[int | None]:
    """Return the indices of the boxes to draw.

    If there are too many, the middle ones are left out, and one None marks the gap.
    """
    head, tail = ends(count, most if count <= most else fewer)
    return [*head, *([None] if tail else []), *tail]


def _columns(count: int, wanted: float) -> int:
    """Return a number of columns near ``wanted``. Prefers one that fills the last row."""
    near = [n for n in range(1, count + 1) if wanted / 1.6 <= n <= wanted * 1.6]
    return min(near or [1], key=lambda n: (count % n > 0, max(n / wanted, wanted / n)))
