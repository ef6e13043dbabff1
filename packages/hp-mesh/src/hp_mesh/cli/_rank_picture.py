"""The picture of which rank sits where: a box for each node, a cell for each rank."""

from math import ceil, sqrt

from ._elide import ends, rank_list
from ._palette import EDGE, FAINT, GROUND, GROUP_COLOURS, PAPER
from ._rank_map import RankMap
from ._svg import Canvas, text_width

MOST_NODES = 64
FEWER_NODES = 31  # where some are left out
MOST_CELLS = 72  # of one node
FEWER_CELLS = 63  # where some are left out
MARGIN = 24
GAP = 14
PAD = 10
HEAD = 24  # above the cells of a node
LINE = 14
GAP_WIDTH = 170  # for its words
LEGEND_WIDTH = 230
LEAST_WIDTH = 420
HEADING = 17


def draw_ranks(found: RankMap) -> str:
    """Return the picture as SVG text; of many nodes the middle is left out, and it says so."""
    return _Picture(found).draw()


class _Picture:
    """Sizes that follow from the map, and the drawing with them."""

    def __init__(self, found: RankMap) -> None:
        self.found = found
        self.boxes = _with_gap(found.nodes, MOST_NODES, FEWER_NODES)
        fullest = min(found.width, found.world)
        cells = len(_with_gap(fullest, MOST_CELLS, FEWER_CELLS))
        self.across = cells if cells < 4 else 4 if cells <= 8 else 8
        head = text_width(str(found.world - 1), 13, bold=True)
        head += 8 + text_width(f"#{len(found.groups) - 1}", 10)
        self.cell_width = ceil(max([head, *map(self._cell_need, found.axes)])) + 12
        self.cell_height = 22 + LINE * len(found.axes) + (5 if found.axes else 0)
        least = GAP_WIDTH if None in self.boxes else 0
        self.node_width = max(self.across * (self.cell_width + 4) - 4 + 2 * PAD, least)
        rows = ceil(cells / self.across)
        self.node_height = HEAD + rows * (self.cell_height + 4) - 4 + PAD
        shape = sqrt(len(self.boxes) * self.node_height / self.node_width * 2.2)
        self.columns = _columns(len(self.boxes), shape)
        inner = self.columns * (self.node_width + GAP) - GAP
        heading = text_width(found.dims.summary(), HEADING, bold=True)
        place = text_width(found.place, 12.5)
        self.width = max(inner, heading, place, LEAST_WIDTH) + 2 * MARGIN
        self.legend = self._legend()
        self.legend_columns = max(1, int((self.width - 2 * MARGIN) // LEGEND_WIDTH))
        legend_rows = ceil(len(self.legend) / self.legend_columns)
        self.top = MARGIN + 66 + legend_rows * 22 + 8
        rows = ceil(len(self.boxes) / self.columns)
        self.height = self.top + rows * (self.node_height + GAP) - GAP + MARGIN

    def _cell_need(self, axis: str) -> float:
        return text_width(f"{axis} {self.found.layout.size(axis) - 1}", 10.5)

    def _legend(self) -> list[tuple[int, str]]:
        axis, groups = self.found.axis, self.found.groups
        shown = groups[: len(GROUP_COLOURS)]
        return [(i, f"#{i} {axis}: {rank_list(group, 5)}") for i, group in enumerate(shown)]

    def draw(self) -> str:
        found = self.found
        canvas = Canvas(self.width, self.height, f"Ranks of {found.dims.summary()}")
        room = self.width - 2 * MARGIN
        canvas.text(MARGIN, MARGIN + 16, found.dims.summary(), size=HEADING, bold=True, room=room)
        canvas.text(MARGIN, MARGIN + 38, found.place, size=12.5, room=room, colour=FAINT)
        more = len(found.groups) - len(self.legend)
        size, count = len(found.groups[0]), len(found.groups)
        line = f"colour and #: {count} {found.axis} group{'s' * (count != 1)} "
        line += f"of {size} rank{'s' * (size != 1)}{' each' * (count != 1)}"
        line += f"; colours repeat after {len(self.legend)}, numbers do not" if more else ""
        canvas.text(MARGIN, MARGIN + 57, line, size=12.5, room=room, colour=FAINT)
        for i, (group, text) in enumerate(self.legend):
            row, column = divmod(i, self.legend_columns)
            x, y = MARGIN + column * LEGEND_WIDTH, MARGIN + 68 + row * 22
            canvas.box(x, y, 16, 14, fill=GROUP_COLOURS[group], edge=EDGE, kind="legend")
            canvas.text(x + 22, y + 12, text, size=12, room=LEGEND_WIDTH - 30)
        for i, node in enumerate(self.boxes):
            row, column = divmod(i, self.columns)
            x = MARGIN + column * (self.node_width + GAP)
            y = self.top + row * (self.node_height + GAP)
            if node is None:
                self._gap(canvas, x, y)
            else:
                self._node(canvas, x, y, node)
        return canvas.render()

    def _gap(self, canvas: Canvas, x: float, y: float) -> None:
        place = self.boxes.index(None)
        first, last = place, self.found.nodes - (len(self.boxes) - place - 1) - 1
        lines = [f"{last - first + 1} nodes left out"]
        lines.append(f"{first} to {last}")
        ranks = self.found.ranks_of(first)[0], self.found.ranks_of(last)[-1]
        lines.append(f"ranks {ranks[0]} to {ranks[1]}")
        width, height = self.node_width, self.node_height
        canvas.box(x, y, width, height, fill=PAPER, edge=EDGE, corner=8, dashed=True, kind="gap")
        for i, text in enumerate(lines):
            middle, base = x + width / 2, y + height / 2 - 14 + 18 * i
            canvas.text(middle, base, text, size=12, room=width - 8, anchor="middle", bold=i == 0)

    def _node(self, canvas: Canvas, x: float, y: float, node: int) -> None:
        canvas.box(
            x, y, self.node_width, self.node_height, fill=GROUND, edge=EDGE, corner=8, kind="node"
        )
        name = "all ranks" if self.found.ranks_per_node is None else f"node {node}"
        canvas.text(x + PAD, y + 17, name, size=12, bold=True, room=self.node_width - 2 * PAD)
        ranks = self.found.ranks_of(node)
        drawn = _with_gap(len(ranks), MOST_CELLS, FEWER_CELLS)
        for i, place in enumerate(drawn):
            row, column = divmod(i, self.across)
            left = x + PAD + column * (self.cell_width + 4)
            top = y + HEAD + row * (self.cell_height + 4)
            if place is None:
                text = f"{len(ranks) - len(drawn) + 1} more"
                middle = left + self.cell_width / 2
                canvas.text(middle, top + 16, text, size=11, room=self.cell_width, anchor="middle")
            else:
                self._cell(canvas, left, top, ranks[place])

    def _cell(self, canvas: Canvas, x: float, y: float, rank: int) -> None:
        group = self.found.group_of[rank]
        place = self.found.coordinates(rank)
        hint = f"rank {rank}: " + " ".join(f"{axis}={i}" for axis, i in place.items())
        canvas.box(
            x,
            y,
            self.cell_width,
            self.cell_height,
            fill=GROUP_COLOURS[group % len(GROUP_COLOURS)],
            edge=EDGE,
            corner=4,
            kind="rank",
            hint=hint,
        )
        number, mark = str(rank), f"#{group}"
        canvas.text(x + 6, y + 16, number, size=13, bold=True, room=self.cell_width - 12)
        left = self.cell_width - 12 - text_width(number, 13, bold=True)
        canvas.text(x + self.cell_width - 6, y + 16, mark, size=10, room=left, anchor="end")
        for i, (axis, index) in enumerate(place.items()):
            base = y + 22 + LINE * i + 10
            canvas.text(x + 6, base, f"{axis} {index}", size=10.5, room=self.cell_width - 12)


def _with_gap(count: int, most: int, fewer: int) -> list[int | None]:
    """Return which of ``count`` boxes to draw, None where the middle is left out."""
    head, tail = ends(count, most if count <= most else fewer)
    return [*head, *([None] if tail else []), *tail]


def _columns(count: int, wanted: float) -> int:
    """Return about as many columns as wanted, such that the last row is full if that can be."""
    near = [n for n in range(1, count + 1) if wanted / 1.6 <= n <= wanted * 1.6]
    return min(near or [1], key=lambda n: (count % n > 0, max(n / wanted, wanted / n)))
