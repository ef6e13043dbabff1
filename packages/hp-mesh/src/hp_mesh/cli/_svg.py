"""Pictures as self-contained SVG text, with words that stay inside their boxes."""

from typing import Literal
from xml.etree import ElementTree

from ._palette import EDGE, INK, PAPER

FONTS = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
SLIM = frozenset("ijltfrI.,:;|!'()[]/- ")
BROAD = frozenset("mwMW@%=+#<>~…")

Anchor = Literal["start", "middle", "end"]


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return an upper estimate of a text's width in pixels, for the widest of `FONTS`."""
    ems = sum(0.42 if c in SLIM else 1.0 if c in BROAD else 0.65 for c in text)
    return ems * size * (1.12 if bold else 1.0)


def fitted(text: str, size: float, room: float, *, bold: bool = False) -> str:
    """Return the text, or as much of its start as fits before an ellipsis."""
    if text_width(text, size, bold=bold) <= room:
        return text
    kept = text
    while kept and text_width(kept + "…", size, bold=bold) > room:
        kept = kept[:-1]
    return kept.rstrip() + "…" if kept else ""


class Canvas:
    """A picture of a fixed size in pixels, drawn from the top left corner."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width = round(width)
        self.height = round(height)
        self._root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {self.width} {self.height}",
                "width": str(self.width),
                "height": str(self.height),
                "font-family": FONTS,
                "role": "img",
            },
        )
        ElementTree.SubElement(self._root, "title").text = title
        self.box(0, 0, self.width, self.height, fill=PAPER)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        edge: str = "none",
        corner: float = 0,
        dashed: bool = False,
        kind: str = "",
        hint: str = "",
    ) -> None:
        """Draw a rectangle; ``kind`` becomes its class, ``hint`` what it says under a pointer."""
        attributes = {
            "x": _number(x),
            "y": _number(y),
            "width": _number(max(width, 0)),
            "height": _number(height),
            "fill": fill,
            "stroke": edge,
        }
        attributes |= {"rx": _number(corner)} if corner else {}
        attributes |= {"stroke-dasharray": "5 4"} if dashed else {}
        attributes |= {"class": kind} if kind else {}
        drawn = ElementTree.SubElement(self._root, "rect", attributes)
        if hint:
            ElementTree.SubElement(drawn, "title").text = hint

    def line(self, x1: float, y1: float, x2: float, y2: float, *, colour: str = EDGE) -> None:
        """Draw a straight line."""
        ends = {"x1": _number(x1), "y1": _number(y1), "x2": _number(x2), "y2": _number(y2)}
        ElementTree.SubElement(self._root, "line", {**ends, "stroke": colour, "stroke-width": "2"})

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float,
        room: float,
        bold: bool = False,
        anchor: Anchor = "start",
        colour: str = INK,
    ) -> None:
        """Write on the baseline ``y`` what fits into ``room`` pixels."""
        kept = fitted(text, size, room, bold=bold)
        if not kept:
            return
        attributes = {"x": _number(x), "y": _number(y), "font-size": _number(size), "fill": colour}
        attributes |= {"font-weight": "bold"} if bold else {}
        attributes |= {"text-anchor": anchor} if anchor != "start" else {}
        ElementTree.SubElement(self._root, "text", attributes).text = kept

    def render(self) -> str:
        """Return the picture as XML."""
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
