"""How even ranks' loads are while the popularity of experts drifts, and what keeping up costs.

    python bench_balance.py [--quick] [--json FILE] [--plot FILE.svg]

The drawing of the documentation is tools/docs/pages/hp-ep/load.svg. In an SVG, text and axes have
the colour of the page, light or dark.

A trace of Zipf loads whose experts change places step by step is served by three placements:
contiguous blocks for ever, experts packed anew every few steps, and packed with replicas. A plan
sees only the loads before it, smoothed. Largest over mean rank load is how much longer the slowest
rank computes than it had to; bytes are what migrations send to other ranks, weights and two Adam
moments in float32 (12 bytes a parameter). Nothing is random but the trace, whose seed is fixed.
"""

import argparse
import json
import random
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_ep import Placement, plan_migration, plan_placement, smooth_load

INK = "#222222"
PAGE_INK = "var(--md-default-fg-color, #222)"
TITLE = "Load of the ranks over time and in the last step: contiguous, packed, and with replicas"


@dataclass(frozen=True)
class Setting:
    """The trace and the layer: ``swaps`` pairs of neighbours in popularity change each step."""

    experts: int = 256
    ranks: int = 32
    node_size: int = 8
    replicas: int = 32
    steps: int = 200
    every: int = 20
    swaps: int = 2
    zipf: float = 1.0
    tokens: int = 65536
    top_k: int = 8
    decay: float = 0.8
    expert_parameters: int = 3 * 7168 * 2048


def main() -> int:
    """Run the trace, print the table and write what the options ask for."""
    parser = argparse.ArgumentParser(description="rank loads under drifting expert loads")
    parser.add_argument("--quick", action="store_true", help="a short trace")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--plot", type=Path, help="draw the loads over time (needs matplotlib)")
    options = parser.parse_args()
    setting = Setting(steps=40) if options.quick else Setting()
    loads = trace(setting)
    series = {
        "contiguous": serve(setting, loads, None),
        "packed": serve(setting, loads, 0),
        "packed + replicas": serve(setting, loads, setting.replicas),
    }
    print(setting)
    print(
        f"{'placement':18s} {'mean':>7s} {'worst':>7s} {'moved experts':>14s} {'GiB a plan':>11s}"
    )
    rows = []
    for name, (imbalances, moved) in series.items():
        served = imbalances[setting.every :]  # once there was a load to plan for
        plans = max(1, len(moved))
        row = {
            "placement": name,
            "mean": statistics.mean(served),
            "worst": max(served),
            "moved": sum(moved),
            "bytes_per_plan": sum(moved) * setting.expert_parameters * 12 / plans,
        }
        rows.append(row)
        print(
            f"{name:18s} {row['mean']:7.2f} {row['worst']:7.2f} {row['moved']:7d} "
            f"{row['bytes_per_plan'] / 2**30:11.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps({"name": "ep_balance", "rows": rows}, indent=2))
    if options.plot:
        draw(options.plot, setting, loads, {name: s for name, (s, _) in series.items()})
        print(options.plot)
    return 0


def trace(setting: Setting) -> list[list[float]]:
    """Return each step's tokens per expert."""
    draw = random.Random(0)
    order = list(range(setting.experts))
    draw.shuffle(order)
    weights = [1 / (1 + place) ** setting.zipf for place in range(setting.experts)]
    scale = setting.tokens * setting.top_k / sum(weights)
    loads = []
    for _ in range(setting.steps):
        for _ in range(setting.swaps):
            # Popular experts change places as often as rare ones: what is hot moves.
            at = min(int(setting.experts ** draw.random()), setting.experts - 1)
            order[at - 1], order[at] = order[at], order[at - 1]
        load = [0.0] * setting.experts
        for place, expert in enumerate(order):
            load[expert] = scale * weights[place] * draw.uniform(0.9, 1.1)
        loads.append(load)
    return loads


def serve(
    setting: Setting, loads: list[list[float]], replicas: int | None
) -> tuple[list[float], list[int]]:
    """Return the imbalance of each step and the experts that each new plan moved."""
    placement = Placement.contiguous(setting.experts, setting.ranks)
    if replicas:
        even = [1.0] * setting.experts
        placement = plan_placement(even, setting.ranks, num_replicas=replicas)
    seen: tuple[float, ...] | None = None
    imbalances, moved = [], []
    for step, load in enumerate(loads):
        if replicas is not None and seen is not None and step % setting.every == 0:
            new = plan_placement(
                seen,
                setting.ranks,
                num_replicas=replicas,
                node_size=setting.node_size,
                near=placement,
            )
            moved.append(plan_migration(placement, new).moved)
            placement = new
        imbalances.append(placement.imbalance(load))
        seen = smooth_load(seen, load, setting.decay)
    return imbalances, moved


def draw(path: Path, setting: Setting, loads: Any, series: dict[str, list[float]]) -> None:
    """Draw the imbalance over time, and each rank's load in the last step."""
    import matplotlib

    matplotlib.use("Agg")  # files only: no display is needed
    matplotlib.rcParams.update({"svg.hashsalt": "hp-ep", "svg.fonttype": "none"})  # one file ever
    inked = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
    matplotlib.rcParams.update(dict.fromkeys(inked, INK))
    from matplotlib import pyplot

    colors = dict(zip(series, ("#b5482f", "#c9952b", "#2f6f8f"), strict=True))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for name, values in series.items():
        left.plot(values, label=name, color=colors[name], linewidth=1.6)
    left.set(xlabel="step", ylabel="largest / mean rank load", yscale="log")
    left.set_title(f"Zipf loads that drift, a new plan every {setting.every} steps", fontsize=10)
    left.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    left.minorticks_off()
    left.legend(frameon=False, fontsize=9)
    seen: tuple[float, ...] | None = None
    for load in loads[:-1]:
        seen = smooth_load(seen, load, setting.decay)
    before = Placement.contiguous(setting.experts, setting.ranks)
    after = plan_placement(seen or loads[-1], setting.ranks, num_replicas=setting.replicas)
    mean = sum(loads[-1]) / setting.ranks
    for placement, name, shift in ((before, "contiguous", -0.2), (after, "packed + replicas", 0.2)):
        values = [x / mean for x in placement.rank_load(loads[-1])]
        places = [rank + shift for rank in range(setting.ranks)]
        right.bar(places, values, 0.4, color=colors[name], label=name)
    right.axhline(1, color=INK, linewidth=0.8)
    right.set(xlabel="rank", ylabel="load / mean")
    right.set_title("ranks before and after balancing, last step", fontsize=10)
    right.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    if path.suffix == ".svg":
        figure.savefig(path, metadata={"Date": None}, transparent=True)
        path.write_text(for_a_page(path.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        figure.savefig(path)
    pyplot.close(figure)


def for_a_page(svg: str) -> str:
    """Return an SVG as part of an HTML page: with a title and the page's colours, as wide as it.

    Styles of the drawing would apply to the whole page, so they become attributes.
    """
    (box,) = re.findall(r'viewBox="([^"]*)"', svg[: svg.index("<metadata>")])
    body = svg.partition("</metadata>")[2]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{box}" width="100%" role="img" stroke-linejoin="round">\n<title>{TITLE}</title>'
    )
    return head + body.replace(INK, PAGE_INK)


if __name__ == "__main__":
    sys.exit(main())
