"""The picture of a plan: where the time and the memory of the best candidates go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..planner import Candidate, Plan
from ._choice import choose
from ._degrees import word_line
from ._palette import EDGE, FAINT, GROUND, LIMIT, MEMORY_COLOURS, TIME_COLOURS
from ._plan_blocks import NOTHING, format_seconds, plan_title, settings
from ._plan_rows import plan_rows
from ._reasons import GIB, memory_parts, time_parts
from ._svg import Canvas, text_width

MARGIN = 24
PANEL = 490
SCALE = 300  # the longest bar of a panel; its number stands behind
GAP = 40
MOST_ROWS = 8
MOST_OVER = 1.5  # times the limit; longer bars of memory are cut there
ROW = 46
BAR = 22
TOP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One column of bars, drawn to one scale from ``x`` on."""

    heading: str
    x: float
    most: float
    unit: str
    colours: Mapping[str, str]


def draw_plan(found: Plan) -> str:
    """Return the picture as SVG text: a bar of time and one of memory for the best candidates.

    The limit of the memory is a line.
    """
    rows = [row.candidate for row in plan_rows(found, choose(found), MOST_ROWS)]
    labels = [text_width(word_line(row.dims), 12.5, bold=True) for row in rows]
    labels += [text_width(settings(row), 10.5) for row in rows]
    first = MARGIN + max(labels, default=0) + 16
    second = first + PANEL + GAP
    width = second + PANEL + MARGIN
    canvas = Canvas(width, TOP + 30 + ROW * len(rows) + MARGIN, plan_title(found))
    room = width - 2 * MARGIN
    canvas.text(MARGIN, MARGIN + 14, plan_title(found), size=17, bold=True, room=room)
    if not rows:
        canvas.text(MARGIN, MARGIN + 36, NOTHING, size=12.5, room=room, colour=FAINT)
        return canvas.render()
    limit = rows[0].limit / GIB
    most = float("inf") if rows[0].fit == "does not fit" else MOST_OVER * limit
    canvas.text(
        MARGIN, MARGIN + 36, _subtitle(found, rows, most), size=12.5, room=room, colour=FAINT
    )
    seconds = [time_parts(row) for row in rows]
    gibibytes = [{n: part / GIB for n, part in memory_parts(row).items()} for row in rows]
    times = _panel("time of one step", first, seconds, TIME_COLOURS, "s")
    memories = _panel(
        "memory of one GPU", second, gibibytes, MEMORY_COLOURS, "GiB", least=limit, most=most
    )
    _legend(canvas, times)
    _legend(canvas, memories)
    for i, row in enumerate(rows):
        y = TOP + 30 + i * ROW
        if i % 2 == 0:
            canvas.box(MARGIN - 8, y - 6, room + 16, ROW - 2, fill=GROUND, corner=6)
        label = first - MARGIN
        canvas.text(MARGIN, y + 12, word_line(row.dims), size=12.5, bold=True, room=label)
        canvas.text(MARGIN, y + 28, settings(row), size=10.5, room=label, colour=FAINT)
        pace = row.time.total / found.candidates[0].time.total
        _bar(canvas, times, y, seconds[i], f"{format_seconds(row.time.total)} s {pace:.2f}x")
        need = f"{row.memory.total / GIB:.1f} GiB"
        _bar(canvas, memories, y, gibibytes[i], need if row.fit == "fits" else f"{need} {row.fit}")
    _limit(canvas, memories, limit, len(rows))
    return canvas.render()


def _subtitle(found: Plan, rows: Sequence[Candidate], most: float) -> str:
    text = (
        f"the best of {len(found.candidates)} candidates, estimated; splits of dp share a row; "
        "under an axis's name is communication that computing does not hide"
    )
    cut = any(row.memory.total / GIB > most for row in rows)
    return f"{text}; bars end at {MOST_OVER} times the memory limit" if cut else text


def _limit(canvas: Canvas, panel: _Panel, limit: float, rows: int) -> None:
    x = panel.x + limit / panel.most * SCALE
    canvas.line(x, TOP + 18, x, TOP + 30 + ROW * rows, colour=LIMIT)
    text = f"limit {limit:.1f} GiB"
    room = text_width(text, 11, bold=True)
    canvas.text(x, TOP + 13, text, size=11, bold=True, anchor="middle", room=room, colour=LIMIT)


def _panel(
    heading: str,
    x: float,
    rows: Sequence[Mapping[str, float]],
    colours: Mapping[str, str],
    unit: str,
    *,
    least: float = 0,
    most: float = float("inf"),
) -> _Panel:
    longest = max((sum(row.values()) for row in rows), default=0.0)
    names = {name for row in rows for name, amount in row.items() if amount > 0}
    return _Panel(
        heading=heading,
        x=x,
        most=min(max(longest, least), most),
        unit=unit,
        colours={name: colour for name, colour in colours.items() if name in names},
    )


def _legend(canvas: Canvas, panel: _Panel) -> None:
    canvas.text(panel.x, TOP - 42, panel.heading, size=13, bold=True, room=PANEL)
    x, y = panel.x, TOP - 30.0
    for name, colour in panel.colours.items():
        width = 18 + text_width(name, 11) + 10
        if x + width > panel.x + PANEL:
            x, y = panel.x, y + 18
        canvas.box(x, y, 13, 12, fill=colour, edge=EDGE, kind="legend")
        canvas.text(x + 18, y + 10, name, size=11, room=width - 18)
        x += width


def _bar(canvas: Canvas, panel: _Panel, y: float, parts: Mapping[str, float], text: str) -> None:
    start = panel.x
    for name, amount in parts.items():
        width = min(amount / panel.most * SCALE, panel.x + SCALE - start)
        if amount > 0:
            hint = f"{name}: {amount:.3g} {panel.unit}"
            canvas.box(start, y + 2, width, BAR, fill=panel.colours[name], kind="part", hint=hint)
        start += width
    canvas.text(panel.x + SCALE + 10, y + 17, text, size=12, room=PANEL - SCALE - 10)
