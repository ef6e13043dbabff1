"""Packed documents: balance and traffic of every layout, from plans alone.

Lengths are random and nothing divides them. Per set of documents, ranks and layout: the most work
of a rank over the mean (imbalance), the share of all other ranks' keys and values that the fullest
rank fetches and that ranks fetch on average, the longest local length over the mean, and the cost
by which `Auto` chooses, over that of the best. ``--svg`` draws imbalance and fetched share.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from hp_cp import Auto, Contiguous, Greedy, Layout, MaskSpec, PerDocument, Zigzag, plan_attention

LAYOUTS: dict[str, Layout] = {
    "Contiguous": Contiguous(),
    "Zigzag": Zigzag(),
    "PerDocument": PerDocument(),
    "Greedy(4)": Greedy(4),
    "Greedy(8)": Greedy(8),
    "Auto": Auto(),
}
DRAWN = 4
INKS = ["#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#555555"]


def one(seq_len: int, rng: random.Random) -> list[int]:
    """Return one document."""
    return [seq_len]


def uniform(seq_len: int, rng: random.Random) -> list[int]:
    """Return 32 documents, cut anywhere with equal chance."""
    ends = sorted(rng.sample(range(1, seq_len), 31))
    return [b - a for a, b in zip([0, *ends], [*ends, seq_len], strict=True)]


def lognormal(seq_len: int, rng: random.Random) -> list[int]:
    """Return documents as corpora have them: many short ones, few long ones."""
    lengths: list[int] = []
    while sum(lengths) < seq_len:
        lengths.append(min(seq_len - sum(lengths), 1 + round(rng.lognormvariate(6.5, 1.3))))
    return lengths


SETS: dict[str, Callable[[int, random.Random], list[int]]] = {
    "one document": one,
    "32 uniform": uniform,
    "lognormal": lognormal,
}


def measure(mask: MaskSpec, n: int, seq_len: int) -> dict[str, dict[str, float]]:
    """Return the figures of every layout for one set of documents."""
    rows: dict[str, dict[str, float]] = {}
    for name, layout in LAYOUTS.items():
        start = time.perf_counter()
        plan = plan_attention(mask, layout, n, seq_len, schedule="direct")
        fetched = [
            sum(len(part) for parts in plan.fetches(rank).values() for part in parts)
            for rank in range(n)
        ]
        work = [sum(block.pairs for block in plan.blocks(rank)) for rank in range(n)]
        share = seq_len * (n - 1) / n
        weight = Auto().pairs_per_row
        rows[name] = {
            "imbalance": plan.imbalance(),
            "fetched_most": max(fetched) / share,
            "fetched_mean": sum(fetched) / n / share,
            "longest": max(plan.lengths) * n / seq_len,
            "blocks": max(len(plan.blocks(rank)) for rank in range(n)),
            "cost": max(w + weight * f for w, f in zip(work, fetched, strict=True)),
            "plan_ms": 1000 * (time.perf_counter() - start),
        }
    best = min(row["cost"] for row in rows.values())
    for row in rows.values():
        row["cost"] /= best
    return rows


def averaged(draws: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the mean of every figure over several draws of documents."""
    return {
        name: {key: sum(d[name][key] for d in draws) / len(draws) for key in draws[0][name]}
        for name in LAYOUTS
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write bars of imbalance (up) and of the mean fetched share (down), a group per set."""
    rows = [row for row in rows if row["ranks"] == DRAWN]
    groups = list(dict.fromkeys((row["documents"], row["window"]) for row in rows))
    wide, bar, base, unit = 120 * len(groups) + 220, 16, 190, 80
    root = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {wide} 380",
            "width": str(wide),
            "height": "380",
            "font-family": "DejaVu Sans, Verdana, Arial, sans-serif",
            "font-size": "10",
        },
    )

    def put(tag: str, text: str = "", **attributes: float | str) -> None:
        given = {key.replace("_", "-"): str(value) for key, value in attributes.items()}
        ElementTree.SubElement(root, tag, given).text = text or None

    put("rect", width=wide, height=380, fill="#ffffff")
    put("text", f"imbalance - 1, upwards; a line is 1 ({DRAWN} ranks)", x=8, y=16, font_size=12)
    put(
        "text",
        "fetched share of the others' keys, downwards; a line is 1",
        x=8,
        y=372,
        font_size=12,
    )
    for line in (base - unit, base, base + 2 * unit):
        put("line", x1=60, x2=wide - 150, y1=line, y2=line, stroke="#bbbbbb")
    for i, group in enumerate(groups):
        x = 60 + 120 * i
        documents, window = group
        put("text", documents, x=x, y=46)
        put("text", f"window {window}" if window else "no window", x=x, y=60)
        found = [r for r in rows if (r["documents"], r["window"]) == group]
        for j, (row, ink) in enumerate(zip(found, INKS, strict=True)):
            up, down = min(1.5, row["imbalance"] - 1) * unit, row["fetched_mean"] * 2 * unit
            put("rect", x=x + j * bar, y=base - up, width=bar - 2, height=up, fill=ink)
            put("rect", x=x + j * bar, y=base, width=bar - 2, height=down, fill=ink, opacity=0.6)
    for j, (name, ink) in enumerate(zip(LAYOUTS, INKS, strict=True)):
        put("rect", x=wide - 130, y=60 + 20 * j, width=12, height=12, fill=ink)
        put("text", name, x=wide - 112, y=70 + 20 * j, font_size=12)
    path.write_text(ElementTree.tostring(root, encoding="unicode") + "\n")


def main() -> None:
    """Print the table, and write JSON and the plot where they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short sequences, one draw")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--seq-len", type=int, default=32749)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--window", type=int, default=1021)
    args = parser.parse_args()
    if args.quick:
        args.seq_len, args.draws, args.window = 4093, 1, 127
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for documents, lengths_of in SETS.items():
        for window in (None, args.window):
            masks = [
                MaskSpec(
                    causal=True,
                    window=window,
                    cu_seqlens=(0, *accumulate(lengths_of(args.seq_len, rng))),
                )
                for _ in range(args.draws)
            ]
            for n in (2, 4, 8):
                print(f"{documents}, window {window}, {n} ranks, mean of {args.draws} draws")
                found = averaged([measure(mask, n, args.seq_len) for mask in masks])
                for name, row in found.items():
                    rows.append(
                        {"documents": documents, "window": window, "ranks": n, "layout": name} | row
                    )
                    print(
                        f"  {name:12s} imbalance {row['imbalance']:.2f}   fetched mean "
                        f"{row['fetched_mean']:.2f}, most {row['fetched_most']:.2f}   longest "
                        f"{row['longest']:.2f}   blocks {row['blocks']:.0f}   cost / best "
                        f"{row['cost']:.2f}   plan {row['plan_ms']:.1f} ms"
                    )
    if args.svg:
        draw(rows, args.svg)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("json", "svg")}
        answer = {"name": "documents", "settings": settings, "rows": rows}
        args.json.write_text(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
