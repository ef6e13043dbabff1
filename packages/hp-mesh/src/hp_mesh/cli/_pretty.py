"""Blocks as rich's tables and colours, for terminals."""

from collections.abc import Iterable
from typing import TextIO, assert_never

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ._blocks import Bars, Block, Cell, Line, Table, Tone
from ._palette import GROUP_COLOURS
from ._plain import bar_length

BAR_WIDTH = 30
STYLES: dict[Tone, str] = {
    "plain": "",
    "title": "bold",
    "good": "bold green",
    "warn": "yellow",
    "bad": "red",
    "dim": "dim",
}


def print_pretty(blocks: Iterable[Block], file: TextIO) -> None:
    """Print the blocks to a terminal; rich itself honours ``NO_COLOR`` and the width."""
    console = Console(file=file, highlight=False)
    for block in blocks:
        match block:
            case Line():
                console.print(Text(block.text, style=STYLES[block.tone]))
            case Table():
                console.print(_table(block))
            case Bars():
                console.print(_bars(block))
            case _:
                assert_never(block)


def _cell(cell: Cell) -> Text:
    if cell.group is None:
        return Text(cell.text, style=STYLES[cell.tone])
    colour = GROUP_COLOURS[cell.group % len(GROUP_COLOURS)]
    return Text(cell.text, style=f"black on {colour}")


def _table(table: Table) -> RichTable:
    drawn = RichTable(title=Text(table.title, style="bold"), title_justify="left")
    for column in table.columns:
        drawn.add_column(column, justify="right" if column in table.right else "left")
    for row in table.rows:
        drawn.add_row(*map(_cell, row))
    return drawn


def _bars(bars: Bars) -> RichTable:
    drawn = RichTable(
        title=Text(bars.title, style="bold"), title_justify="left", box=None, show_header=False
    )
    drawn.add_column()
    drawn.add_column(justify="right")
    drawn.add_column(style="cyan")
    for bar in bars.bars:
        drawn.add_row(Text(bar.label), Text(bar.text), "█" * bar_length(bar.share, BAR_WIDTH))
    return drawn
