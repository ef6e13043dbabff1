"""What a command has to say, before anyone decides how it looks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A command's result: ``document`` makes the one for programs, ``blocks`` are for people.

    ``draw`` makes the picture as SVG text, where the command has one. ``exit_code`` is 0, 1 where
    nothing was found that can be used, or 2 where the degrees that were given break a rule.
    """

    document: Callable[[], Mapping[str, object]]
    blocks: tuple[Block, ...]
    draw: Callable[[], str] | None = None
    exit_code: Literal[0, 1, 2] = 0


def cells(*texts: object) -> tuple[Cell, ...]:
    """Return a row of plain cells; cells among the texts stay as they are."""
    return tuple(text if isinstance(text, Cell) else Cell(text=str(text)) for text in texts)
