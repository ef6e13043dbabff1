"""Blocks as plain ASCII text, for pipes, files and terminals without rich."""

from collections.abc import Iterable, Iterator
from typing import assert_never

from ._blocks import Bars, Block, Line, Table

BAR_WIDTH = 30


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
