"""Pictures with matplotlib: which rank sits where, and where the time and memory of plans go.

Colours are those of Okabe and Ito, "Color Universal Design" (2008), which people with any colour
vision can tell apart: the plain ones for bars, and the same mixed with white as grounds on which
dark text stays legible. What is drawn has its meaning as ``gid``, which an SVG keeps as ``id``.
"""

from collections.abc import Mapping, Sequence
from math import ceil, sqrt

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from matplotlib.textpath import TextPath

from ..planner import Plan
from ._reports import (
    GIB,
    RankMap,
    ends,
    plan_rows,
    rank_list,
    word_line,
)
from ._tables import GROUP_COLOURS, NOTHING, format_seconds, plan_title, settings

INK, FAINT, PAPER, EDGE, GROUND = "#1a1a1a", "#5f6368", "#ffffff", "#9aa0a6", "#f4f5f7"
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILION, YELLOW, BLACK, GREY = "#56b4e9", "#d55e00", "#f0e442", "#222222", "#cccccc"
LIMIT = "#b00020"
# By name and not by order of appearance, so that a colour means the same in every picture.
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
DPI = 100  # so that one pixel is 0.72 points of text
MARGIN = 24
GAP = 14
PAD = 10
HEAD = 26  # above the cells of a node
LINE = 14
LEGEND_WIDTH = 230
MOST_NODES, FEWER_NODES = 64, 31  # the latter where some are left out
MOST_CELLS, FEWER_CELLS = 72, 63  # of one node
MOST_ROWS = 8
ROW = 46
COLUMNS = 5  # of the legend of a plan
MOST_OVER = 1.5  # times the limit; longer bars of memory are cut there


def save(figure: Figure, path: str) -> None:
    """Write a picture in the format that the path's suffix names, such as SVG, PNG or PDF.

    Raises:
        ValueError: Matplotlib does not write this format.
        OSError: The file cannot be written.
    """
    with rc_context({"svg.hashsalt": "hp-mesh"}):
        metadata: dict[str, str | None] = {"Date": None} if path.lower().endswith(".svg") else {}
        figure.savefig(path, dpi=2 * DPI, facecolor=PAPER, metadata=metadata)


def draw_ranks(found: RankMap) -> Figure:
    """Return the picture of which rank sits where: a box for each node, a cell for each rank.

    Ranks of one group of the chosen axis share a colour and a number. Of many nodes the middle is
    left out, and it says so.
    """
    boxes = _with_gap(found.nodes, MOST_NODES, FEWER_NODES)
    drawn = len(_with_gap(min(found.width, found.world), MOST_CELLS, FEWER_CELLS))
    across = drawn if drawn < 4 else 4 if drawn <= 8 else 8
    head = _width(str(found.world - 1), 13, bold=True) + 8 + _width(f"#{len(found.groups) - 1}", 10)
    lines = [_width(f"{axis} {found.layout.size(axis) - 1}", 10.5) for axis in found.axes]
    cell = (ceil(max([head, *lines])) + 12, 24 + LINE * len(found.axes) + 4 * bool(found.axes))
    node = (
        max(across * (cell[0] + 4) - 4 + 2 * PAD, 150 if None in boxes else 90),
        HEAD + ceil(drawn / across) * (cell[1] + 4) - 4 + PAD,
    )
    columns = _columns(len(boxes), sqrt(len(boxes) * node[1] / node[0] * 2.2))
    headings = _headings(found)
    widest = max(_width(text, size, bold=bold) for text, size, bold in headings)
    width = max(columns * (node[0] + GAP) - GAP, widest, 420) + 2 * MARGIN
    per_row = max(1, int((width - 2 * MARGIN) // LEGEND_WIDTH))
    legend = found.groups[: len(GROUP_COLOURS)]
    top = MARGIN + 74 + ceil(len(legend) / per_row) * 22
    height = top + ceil(len(boxes) / columns) * (node[1] + GAP) - GAP + MARGIN
    figure, axes = _canvas(width, height)
    for (text, size, bold), base in zip(headings, (16, 38, 57), strict=True):
        _text(axes, MARGIN, MARGIN + base, text, size, bold=bold, colour=INK if bold else FAINT)
    for i, group in enumerate(legend):
        x, y = MARGIN + i % per_row * LEGEND_WIDTH, MARGIN + 68 + i // per_row * 22
        _box(axes, (x, y), (16, 14), GROUP_COLOURS[i], gid=f"legend {i}")
        _text(axes, x + 22, y + 12, f"#{i} {found.axis}: {rank_list(group, 5)}", 12)
    for i, number in enumerate(boxes):
        place = (
            MARGIN + i % columns * (node[0] + GAP),
            top + i // columns * (node[1] + GAP),
        )
        if number is None:
            _draw_gap(axes, found, place, node, boxes)
        else:
            _draw_node(axes, found, number, place, node, cell, across)
    return figure


def _headings(found: RankMap) -> tuple[tuple[str, float, bool], ...]:
    size, count = len(found.groups[0]), len(found.groups)
    line = f"colour and #: {count} {found.axis} group{'s' * (count != 1)} "
    line += f"of {size} rank{'s' * (size != 1)}{' each' * (count != 1)}"
    if count > len(GROUP_COLOURS):
        line += f"; colours repeat after {len(GROUP_COLOURS)}, numbers do not"
    return (found.dims.summary(), 17, True), (found.place, 12.5, False), (line, 12.5, False)


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
    _box(axes, place, size, PAPER, corner=8, dashed=True, gid="gap")
    lines = f"{last - first + 1} nodes left out", f"{first} to {last}"
    for i, text in enumerate((*lines, f"ranks {ranks[0]} to {ranks[1]}")):
        x, y = place[0] + size[0] / 2, place[1] + size[1] / 2 - 14 + 18 * i
        _text(axes, x, y, text, 12, bold=i == 0, anchor="center")


def _draw_node(
    axes: Axes,
    found: RankMap,
    number: int,
    place: tuple[float, float],
    size: tuple[float, float],
    cell: tuple[float, float],
    across: int,
) -> None:
    _box(axes, place, size, GROUND, corner=8, gid=f"node {number}")
    name = "all ranks" if found.ranks_per_node is None else f"node {number}"
    _text(axes, place[0] + PAD, place[1] + 17, name, 12, bold=True)
    ranks = found.ranks_of(number)
    drawn = _with_gap(len(ranks), MOST_CELLS, FEWER_CELLS)
    for i, index in enumerate(drawn):
        x = place[0] + PAD + i % across * (cell[0] + 4)
        y = place[1] + HEAD + i // across * (cell[1] + 4)
        if index is None:
            more = f"{len(ranks) - len(drawn) + 1} more"
            _text(axes, x + cell[0] / 2, y + 16, more, 11, anchor="center")
            continue
        rank = ranks[index]
        group = found.group_of[rank]
        colour = GROUP_COLOURS[group % len(GROUP_COLOURS)]
        _box(axes, (x, y), cell, colour, corner=4, gid=f"rank {rank}")
        _text(axes, x + 6, y + 16, str(rank), 13, bold=True)
        _text(axes, x + cell[0] - 6, y + 16, f"#{group}", 10, anchor="right")
        for line, (axis, coordinate) in enumerate(found.coordinates(rank).items()):
            _text(axes, x + 6, y + 32 + LINE * line, f"{axis} {coordinate}", 10.5)


def draw_plan(found: Plan) -> Figure:
    """Return the picture of a plan: a bar of time and one of memory for the best candidates.

    The limit of the memory is a line.
    """
    rows = [row.candidate for row in plan_rows(found, MOST_ROWS)]
    names = [word_line(row.dims) for row in rows]
    details = [settings(row) for row in rows]
    widths = [_width(text, 12.5, bold=True) for text in names]
    label = ceil(max([*widths, *(_width(text, 10.5) for text in details)], default=300)) + 16
    panel, above = 490, 128
    width = max(2 * MARGIN + label + 2 * panel + 40, _width(plan_title(found), 17, bold=True) + 48)
    height = above + 30 + ROW * len(rows) + MARGIN
    figure, axes = _canvas(width, height)
    _text(axes, MARGIN, MARGIN + 14, plan_title(found), 17, bold=True)
    if not rows:
        _text(axes, MARGIN, MARGIN + 36, NOTHING, 12.5, colour=FAINT)
        return figure
    limit = rows[0].limit / GIB
    needs = [row.memory.total / GIB for row in rows]
    nothing = rows[0].fit == "does not fit"
    told = "nothing fits; the nearest misses" if nothing else "the best"
    told += f" of {len(found.candidates)} candidates, estimated; "
    told += "" if nothing else "splits of dp share a row; "
    told += "under an axis's name is communication that computing does not hide"
    most = float("inf") if nothing else MOST_OVER * limit
    told += f"; bars end at {MOST_OVER} times the memory limit" if max(needs) > most else ""
    _text(axes, MARGIN, MARGIN + 36, told, 12.5, colour=FAINT)
    for i, (name, detail) in enumerate(zip(names, details, strict=True)):
        y = above + 30 + i * ROW
        if i % 2 == 0:
            _box(axes, (MARGIN - 8, y - 6), (width - 2 * MARGIN + 16, ROW - 2), GROUND, edge="none")
        _text(axes, MARGIN, y + 12, name, 12.5, bold=True)
        _text(axes, MARGIN, y + 28, detail, 10.5, colour=FAINT)
    best = rows[0].time.total
    paces = [
        f"{format_seconds(row.time.total)} s"
        + ("" if nothing else f"  {row.time.total / best:.2f}x")
        for row in rows
    ]
    fits = [
        f"{need:.1f} GiB" + (f" {row.fit}" if row.fit != "fits" else "")
        for need, row in zip(needs, rows, strict=True)
    ]
    rectangle = (label + MARGIN, above + 24, 310, ROW * len(rows))
    _bars(
        figure,
        rectangle,
        "time of one step",
        "s",
        [row.time.parts for row in rows],
        paces,
        TIME_COLOURS,
    )
    gibibytes = [{name: part / GIB for name, part in row.memory.parts.items()} for row in rows]
    rectangle = (rectangle[0] + panel + 40, *rectangle[1:])
    memory = _bars(
        figure, rectangle, "memory of one GPU", "GiB", gibibytes, fits, MEMORY_COLOURS, limit, most
    )
    memory.axvline(limit, color=LIMIT, linewidth=1.5, gid="limit")
    memory.annotate(
        f"limit {limit:.1f} GiB",
        (limit, 1),
        (0, 4),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        fontsize=0.72 * 11,
        fontweight="bold",
        color=LIMIT,
    )
    return figure


def _bars(
    figure: Figure,
    rectangle: tuple[float, float, float, float],
    heading: str,
    unit: str,
    rows: Sequence[Mapping[str, float]],
    texts: Sequence[str],
    colours: Mapping[str, str],
    least: float = 0,
    most: float = float("inf"),
) -> Axes:
    """Draw one stacked bar for each row into a rectangle of pixels, with a legend above."""
    (width, height) = (size * DPI for size in figure.get_size_inches())
    x, y, across, down = rectangle
    axes = figure.add_axes((x / width, 1 - (y + down) / height, across / width, down / height))
    longest = min(max([least, *(sum(row.values()) for row in rows)]), most)
    axes.set(xlim=(0, longest), ylim=(len(rows), 0))
    axes.axis("off")
    names = [name for name in colours if any(row.get(name, 0) > 0 for row in rows)]
    starts = [0.0] * len(rows)
    for name in names:
        lengths = [row.get(name, 0.0) for row in rows]
        middles = [i + 0.4 for i in range(len(rows))]
        drawn = axes.barh(middles, lengths, 0.5, starts, color=colours[name], label=name)
        for bar, length in zip(drawn, lengths, strict=True):
            bar.set_gid(f"{name}: {length:.3g} {unit}")
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    for i, text in enumerate(texts):
        axes.annotate(
            text,
            (1, i + 0.4),
            (8, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=0.72 * 12,
            color=INK,
        )
    # Matplotlib fills a legend column by column; it is read row by row.
    listed = [name for column in range(COLUMNS) for name in names[column::COLUMNS]]
    legend = figure.legend(
        handles=[Patch(facecolor=colours[name], edgecolor=EDGE, label=name) for name in listed],
        title=heading,
        loc="upper left",
        bbox_to_anchor=(x / width, 1 - (y - 78) / height),
        ncols=COLUMNS,
        fontsize=0.72 * 11,
        title_fontproperties={"weight": "bold", "size": 0.72 * 13},
        alignment="left",
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1.2,
        labelspacing=0.35,
    )
    legend.set_gid(heading)
    return axes


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of this many pixels, measured from the top left corner."""
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def _box(
    axes: Axes,
    place: tuple[float, float],
    size: tuple[float, float],
    fill: str,
    *,
    edge: str = EDGE,
    corner: float = 0,
    dashed: bool = False,
    gid: str | None = None,
) -> None:
    box: Patch = Rectangle(place, *size)
    if corner:
        style = f"round,pad=0,rounding_size={corner}"
        box = FancyBboxPatch(place, *size, boxstyle=style)
    box.set(facecolor=fill, edgecolor=edge, linewidth=0.72, linestyle="--" if dashed else "-")
    box.set_gid(gid)
    axes.add_patch(box)


def _text(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    size: float,
    *,
    bold: bool = False,
    anchor: str = "left",
    colour: str = INK,
) -> None:
    """Write on the baseline ``y``; ``size`` is in pixels."""
    weight = "bold" if bold else "normal"
    axes.text(
        x,
        y,
        text,
        fontsize=0.72 * size,
        fontweight=weight,
        ha=anchor,
        va="baseline",
        color=colour,
        parse_math=False,
    )


def _width(text: str, size: float, *, bold: bool = False) -> float:
    """Return the width of a text in pixels."""
    font = FontProperties(weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().width) if text else 0.0


def _with_gap(count: int, most: int, fewer: int) -> list[int | None]:
    """Return which of ``count`` boxes to draw, None where the middle is left out."""
    head, tail = ends(count, most if count <= most else fewer)
    return [*head, *([None] if tail else []), *tail]


def _columns(count: int, wanted: float) -> int:
    """Return about as many columns as wanted, such that the last row is full if that can be."""
    near = [n for n in range(1, count + 1) if wanted / 1.6 <= n <= wanted * 1.6]
    return min(near or [1], key=lambda n: (count % n > 0, max(n / wanted, wanted / n)))
