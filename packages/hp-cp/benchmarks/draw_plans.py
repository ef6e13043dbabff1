"""Draw plans as SVG: who computes which part of the attention matrix, and what travels.

    python draw_plans.py plans.svg

A row of the matrix is a query, a column a key, a colour the rank that computes the pair: dark with
keys of its own, light with keys that it fetches. The strips show who holds the positions.
"""

import argparse
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

from hp_cp import AttentionPlan, Block, Contiguous, Greedy, MaskSpec, Zigzag, plan_attention

CELL, LEFT, TOP, GAP = 5, 40, 84, 70
DARK = ["#33588c", "#b3592a", "#3d7f50", "#7a4f94"]
LIGHT = ["#a9c1e3", "#f0bf9d", "#acd6b5", "#cdb3dd"]
DOCUMENTS = (0, 9, 13, 38, 45, 47, 64)
PLANS = [
    ("Zigzag, causal, direct", plan_attention(MaskSpec(causal=True), Zigzag(), 4, 64)),
    (
        "Contiguous, causal, window of 11",
        plan_attention(MaskSpec(causal=True, window=11), Contiguous(), 4, 64),
    ),
    (
        "Greedy(4), packed documents",
        plan_attention(MaskSpec(causal=True, cu_seqlens=DOCUMENTS), Greedy(4), 4, 64),
    ),
]


class Picture:
    """SVG elements on a sheet."""

    def __init__(self, width: int, height: int) -> None:
        size = {"viewBox": f"0 0 {width} {height}", "width": str(width), "height": str(height)}
        fonts = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
        name = "http://www.w3.org/2000/svg"
        self.root = ElementTree.Element("svg", {"xmlns": name, "font-family": fonts, **size})
        self.box(0, 0, width, height, "#ffffff")

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """Draw a rectangle."""
        given = {"x": x, "y": y, "width": width, "height": height, "fill": fill}
        ElementTree.SubElement(self.root, "rect", {k: str(v) for k, v in given.items()})

    def text(self, x: float, y: float, words: str, size: int = 11, ink: str = "#222222") -> None:
        """Write words from a point to the right."""
        given = {"x": x, "y": y, "font-size": size, "fill": ink}
        element = ElementTree.SubElement(self.root, "text", {k: str(v) for k, v in given.items()})
        element.text = words


def keys_seen(block: Block, row: int) -> range:
    """Return the local keys that the ``row``-th row of a block sees."""
    if block.kind == "full":
        return block.keys
    side = len(block.queries) // block.tiles
    start = block.keys.start + row // side * side
    diagonal = start + row % side
    return range(start, diagonal + 1) if block.kind == "causal" else range(diagonal, start + side)


def draw(picture: Picture, left: int, title: str, plan: AttentionPlan) -> None:
    """Draw one plan with its numbers below."""
    held = [[i for chunk in rank for i in chunk] for rank in plan.groups]
    side = plan.seq_len * CELL
    picture.text(left, 22, title, size=14)
    numbers = f"imbalance {plan.imbalance():.2f}"
    picture.text(left, 42, numbers, ink="#555555")
    picture.box(left, TOP, side, side, "#f4f4f4")
    for rank, positions in enumerate(held):
        for i in positions:
            picture.box(left + i * CELL, TOP - 12, CELL, 8, DARK[rank])
            picture.box(left - 12, TOP + i * CELL, 8, CELL, DARK[rank])
        for block in plan.blocks(rank):
            ink = DARK[rank] if block.source == rank else LIGHT[rank]
            for row, query in enumerate(block.queries):
                seen = sorted(held[block.source][key] for key in keys_seen(block, row))
                for _, run in groupby(enumerate(seen), key=lambda pair: pair[1] - pair[0]):
                    first, *rest = [key for _, key in run]
                    x, y = left + first * CELL, TOP + held[rank][query] * CELL
                    picture.box(x, y, CELL * (1 + len(rest)), CELL, ink)
        y = TOP + side + 24 + 34 * rank
        pairs = sum(block.pairs for block in plan.blocks(rank))
        fetched = {s: sum(map(len, rows)) for s, rows in plan.fetches(rank).items()}
        travels = ", ".join(f"{rows} of {s}" for s, rows in sorted(fetched.items())) or "nothing"
        picture.box(left, y - 10, 12, 12, DARK[rank])
        picture.text(left + 18, y, f"rank {rank}: {len(held[rank])} rows, {pairs} pairs")
        picture.text(left + 18, y + 14, f"fetches key rows: {travels}", ink="#555555")


def main() -> None:
    """Write the picture to the file that is named."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    args = parser.parse_args()
    side = 64 * CELL
    picture = Picture(LEFT + len(PLANS) * (side + GAP), TOP + side + 24 + 34 * 4)
    for i, (title, plan) in enumerate(PLANS):
        draw(picture, LEFT + i * (side + GAP), title, plan)
    text = ElementTree.tostring(picture.root, encoding="unicode")
    args.picture.write_text(text + "\n")


if __name__ == "__main__":
    main()
