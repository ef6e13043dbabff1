"""Pictures with matplotlib: the ranks of ``show`` and the best candidates of ``plan``.

The colours are from Okabe and Ito, "Color Universal Design" (2008). Colour-blind people can
distinguish these colours. Each cell, bar and legend entry has a ``gid``, which an SVG file stores
as ``id``.
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

from .._errors import plural
from ..planner import Plan
from ..planner._result import GIB
from ._answers import GROUP_COLOURS, RankMap, rank_list, with_gap
from ._plans import NOTHING, format_seconds, plan_rows, plan_title, settings, word_line

INK, FAINT, EDGE, GROUND, LIMIT = "#1a1a1a", "#5f6368", "#9aa0a6", "#f4f5f7", "#b00020"
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILION, YELLOW, BLACK, GREY = "#56b4e9", "#d55e00", "#f0e442", "#222222", "#cccccc"
# Each part of the time or the memory has the same colour in every picture.
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
POINTS = 72  # number of points per inch
TITLE, PLAIN, SMALL = 10, 9, 7.5  # font sizes in points
LINE = 1.3  # height of a line of text, relative to the font size
GAP = 12  # distance between nodes in points
ASPECT = 2.7  # preferred width of a picture of ranks, relative to its height
LEGEND: dict[str, Any] = {
    "alignment": "left",
    "columnspacing": 1.2,
    "fontsize": PLAIN,
    "frameon": False,
    "handlelength": 1.2,
    "title_fontproperties": {"weight": "bold", "size": TITLE},
}
# If there are more than MOST_NODES nodes, only FEWER_NODES are drawn. If a node has more than
# MOST_CELLS ranks, only FEWER_CELLS are drawn.
MOST_NODES, FEWER_NODES = 64, 31
MOST_CELLS, FEWER_CELLS = 72, 63
MOST_ROWS = 8  # largest number of candidates in a picture of a plan
COLUMNS = 4  # number of columns of each legend in a picture of a plan
MOST_OVER = 1.5  # longest drawn bar of memory, relative to the memory limit


def draw(data: RankMap | Plan) -> Figure:
    """Return a figure of the ranks of a `RankMap`, or of the best candidates of a `Plan`."""
    return draw_plan(data) if isinstance(data, Plan) else draw_ranks(data)


def save(figure: Figure, path: str) -> None:
    """Write a figure to a file. The suffix of ``path`` selects the format, such as ``.svg``."""
    metadata = {"Date": None} if path.lower().endswith(".svg") else {}
    with rc_context({"svg.hashsalt": "hp-mesh"}):
        figure.savefig(path, dpi=200, metadata=metadata)


def draw_ranks(found: RankMap) -> Figure:
    """Draw the ranks of a `RankMap`: a box for each node, and in it a cell for each rank.

    Ranks in the same group of the axis ``found.axis`` have the same colour and the same group
    number. If there are more than `MOST_NODES` nodes, nodes in the middle are left out.
    """
    nodes = with_gap(len(found.boxes), MOST_NODES, FEWER_NODES)
    cells = len(with_gap(len(found.boxes[0]), MOST_CELLS, FEWER_CELLS))
    across = min(cells, 4 if cells <= 8 else 8)
    # Sizes are in points. The texts with the largest numbers are the widest ones.
    texts = [f"{axis} {found.layout.size(axis) - 1}" for axis in found.axes]
    texts.append(f"{found.layout.world_size - 1}  #{len(found.groups) - 1}")
    width = max(across * (max(_width(text, SMALL) for text in texts) + 10), 120) + GAP
    height = ceil(cells / across) * SMALL * LINE * (len(texts) + 0.8) + PLAIN * LINE + GAP
    columns = _columns(len(nodes), sqrt(len(nodes) * height / width * ASPECT))
    rows = ceil(len(nodes) / columns)
    title = (found.dims.summary(), found.description, _grouping(found))
    widest = max(columns * width, *(_width(line, TITLE) for line in title)) + GAP
    colours = GROUP_COLOURS[: len(found.groups)]
    labels = [f"#{i} {found.axis}: {rank_list(found.groups[i], 5)}" for i in range(len(colours))]
    legend_columns = max(1, int(widest // (max(_width(text, PLAIN) for text in labels) + 30)))
    head = LINE * (TITLE * len(title) + PLAIN * ceil(len(colours) / legend_columns)) + 2 * GAP
    figure = Figure(figsize=(widest / POINTS, (rows * height + head) / POINTS))
    pad = GAP / 2 / POINTS
    figure.set_layout_engine("constrained", w_pad=pad, h_pad=pad, wspace=0, hspace=0)
    legend = figure.legend(
        [Patch(facecolor=colour, edgecolor=EDGE) for colour in colours],
        labels,
        title="\n".join(title),
        loc="outside upper left",
        ncols=legend_columns,
        **LEGEND,
    )
    for i, patch in enumerate(legend.get_patches()):
        patch.set_gid(f"legend {i}")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for i, axes in enumerate(grid):
        axes.set(xlim=(0, across), ylim=(ceil(cells / across), 0), xticks=(), yticks=())
        axes.spines[:].set_color(EDGE)
        if i >= len(nodes):
            axes.remove()
        elif (node := nodes[i]) is None:
            _draw_gap(axes, found, range(i, len(found.boxes) - (len(nodes) - i) + 1))
        else:
            _draw_node(axes, found, node, across)
    return figure


def _grouping(found: RankMap) -> str:
    count, size = len(found.groups), len(found.groups[0])
    line = f"colour and #: {plural(count, f'{found.axis} group')} of {plural(size, 'rank')}"
    line += " each" if count > 1 else ""
    if count > len(GROUP_COLOURS):
        line += f"; colours repeat after {len(GROUP_COLOURS)} groups"
    return line


def _draw_gap(axes: Axes, found: RankMap, nodes: range) -> None:
    axes.patch.set_gid("gap")
    axes.spines[:].set_linestyle("--")
    axes.set_title(f"{len(nodes)} nodes left out", size=PLAIN)
    ranks = f"ranks {found.boxes[nodes[0]][0]} to {found.boxes[nodes[-1]][-1]}"
    text = f"{nodes[0]} to {nodes[-1]}\n{ranks}"
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", size=PLAIN)


def _draw_node(axes: Axes, found: RankMap, node: int, across: int) -> None:
    """Draw one node in matplotlib's ``axes``: one cell for each rank, ``across`` cells in a row.

    A cell is 1 wide and 1 high in data coordinates.
    """
    name = "all ranks" if found.ranks_per_node is None else f"node {node}"
    axes.set_title(name, loc="left", weight="bold", size=PLAIN)
    axes.patch.set(gid=f"node {node}", facecolor=GROUND)
    ranks = found.boxes[node]
    drawn = with_gap(len(ranks), MOST_CELLS, FEWER_CELLS)
    for i, index in enumerate(drawn):
        x, y = i % across, i // across
        if index is None:
            axes.text(x + 0.1, y + 0.5, f"{len(ranks) - len(drawn) + 1} more", size=SMALL)
            continue
        rank, group = ranks[index], found.group_of[ranks[index]]
        colour = GROUP_COLOURS[group % len(GROUP_COLOURS)]
        place = "\n".join(f"{axis} {number}" for axis, number in found.coordinates(rank).items())
        cell = Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, gid=f"rank {rank}", linewidth=0.7)
        cell.set(facecolor=colour, edgecolor=EDGE)
        axes.add_patch(cell)
        axes.text(x + 0.08, y + 0.07, str(rank), va="top", weight="bold", size=PLAIN)
        axes.text(x + 0.92, y + 0.07, f"#{group}", va="top", ha="right", size=SMALL)
        axes.text(x + 0.08, y + 0.93, place, va="bottom", size=SMALL)


def draw_plan(found: Plan) -> Figure:
    """Draw the step time and the memory of the best candidates of a plan as two bar charts."""
    rows = [row.candidate for row in plan_rows(found, MOST_ROWS)]
    figure = Figure(figsize=(15, 2 + 0.46 * len(rows)))
    figure.set_layout_engine("constrained", w_pad=0.2, h_pad=0.15)
    figure.suptitle(plan_title(found), x=0.01, ha="left", weight="bold", size=13, color=INK)
    if not rows:
        figure.supxlabel(NOTHING, x=0.01, ha="left")
        return figure
    nothing = rows[0].fit == "does not fit"
    limit, best = rows[0].limit / GIB, rows[0].time.total
    times = [row.time.parts for row in rows]
    memories = [{name: part / GIB for name, part in row.memory.parts.items()} for row in rows]
    needs = [row.memory.total / GIB for row in rows]
    most = max(needs) if nothing else min(max(*needs, limit), MOST_OVER * limit)
    paces = [
        f"{format_seconds(row.time.total)} s"
        + ("" if nothing else f"  {row.time.total / best:.2f}x")
        for row in rows
    ]
    sizes = [
        f"{row.memory.total / GIB:.1f} GiB" + ("" if row.fit == "fits" else f" {row.fit}")
        for row in rows
    ]
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_bars(left, "time of one step", "s", times, paces, TIME_COLOURS)
    _draw_bars(right, "memory of one GPU", "GiB", memories, sizes, MEMORY_COLOURS)
    left.set(xlim=(0, max(row.time.total for row in rows)), xticks=())
    left.set_yticks(range(len(rows)), [f"{word_line(r.dims)}\n{settings(r)}" for r in rows])
    right.set(xlim=(0, most))
    right.axvline(limit, color=LIMIT, gid="limit")
    right.set_xticks([limit], [f"limit {limit:.1f} GiB"], color=LIMIT)
    note = "nothing fits; the nearest misses" if nothing else "the best"
    note += f" of {len(found.candidates)} candidates, estimated; the name of an axis stands for "
    note += "communication that does not overlap with computation"
    note += "" if nothing else "; splits of dp share a row"
    note += f"; bars end at {MOST_OVER} times the memory limit" if max(needs) > most else ""
    figure.supxlabel(note, x=0.01, ha="left", size=PLAIN, color=FAINT)
    return figure


def _draw_bars(
    axes: Axes,
    heading: str,
    unit: str,
    rows: Sequence[Mapping[str, float]],
    texts: Sequence[str],
    colours: Mapping[str, str],
) -> None:
    """Draw a bar chart: a stacked bar and a text for each candidate, and a legend.

    Args:
        axes: Matplotlib axes to draw in.
        heading: Title of the legend.
        unit: Unit of the values in ``rows``.
        rows: For each candidate, a dictionary from the name of each part of its bar to the length.
        texts: For each candidate, the text next to its bar.
        colours: Dictionary from the name of each part to its colour.
    """
    axes.set(ylim=(len(rows) - 0.4, -0.6))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=PLAIN)
    drawn = []
    starts = [0.0] * len(rows)
    for name in colours:
        lengths = [row.get(name, 0.0) for row in rows]
        if any(lengths):
            bars = axes.barh(range(len(rows)), lengths, 0.6, starts, color=colours[name])
            bars.set_label(name)
            drawn.append(bars)
            for bar, length in zip(bars, lengths, strict=True):
                bar.set_gid(f"{name}: {length:.3g} {unit}")
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    for i, text in enumerate(texts):
        place: Any = axes.get_yaxis_transform()
        axes.text(1.01, i, text, transform=place, va="center", size=PLAIN, color=INK)
    axes.legend(
        # Matplotlib fills a legend column by column. In this order it can be read row by row.
        handles=[bars for column in range(COLUMNS) for bars in drawn[column::COLUMNS]],
        title=heading,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=COLUMNS,
        borderaxespad=0,
        **LEGEND,
    )


def _width(text: str, size: float) -> float:
    """Return an upper bound on the width of a bold text, in points.

    ``size`` is the font size in points. Font hinting can make letters up to 10 % wider, so the
    bound is 10 % more than the width without hinting.
    """
    path = TextPath((0, 0), text, size=size, prop=FontProperties(weight="bold"))
    return 1.1 * float(path.get_extents().width)


def _columns(count: int, wanted: float) -> int:
    """Choose the number of columns for a grid of ``count`` items.

    The number differs from ``wanted`` by at most a factor of 1.6. Numbers that fill the last row of
    the grid are preferred. Of these, the closest one to ``wanted`` is returned. If no number is
    within the factor, returns 1.
    """
    near = [n for n in range(1, count + 1) if wanted / 1.6 <= n <= wanted * 1.6]
    return min(near or [1], key=lambda n: (count % n > 0, max(n / wanted, wanted / n)))
