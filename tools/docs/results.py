"""Tables and bar charts of measurements, from JSON in the repository.

| marker in a page | replaced by |
|---|---|
| ``<!-- results -->`` | all benchmarks of the page's package, then its rows of the GPU checks |
| ``<!-- results: host -->`` | the benchmark ``bench_host.py`` of the page's package |
| ``<!-- results: gpu -->`` | the package's rows of the GPU checks |

Outside the folders of packages, ``<!-- results: whole -->`` is replaced by the benchmark
``tools/bench_whole.py``.
"""

import ast
import json
import math
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GPU_RESULTS = ROOT / "tools" / "gpu_results" / "nvidia-h200.json"
FOLDED_FROM = 16  # longer tables are folded
WIDTH, BAR_WIDTH, LINE = 480, 400, 44
INK = "fill: var(--md-default-fg-color, #222)"
FAINT = "stroke: var(--md-default-fg-color--light, #777)"
OURS = "fill: var(--md-accent-fg-color, #4c72b0); fill-opacity: 0.6"

Json = dict[str, Any]


def results(package: str, name: str | None, root: Path = ROOT) -> str:
    """Return Markdown with the measurements of a package: all, one benchmark's, or the GPU's.

    The package ``"tools"`` has one benchmark: whole training steps.

    Raises:
        ValueError: The package has no such benchmark, or a file of results is incomplete.
    """
    if package == "tools":
        return _of_tools(root / "tools", name)
    folder = root / "packages" / package / "benchmarks"
    benchmarks = sorted(path.stem.removeprefix("bench_") for path in folder.glob("bench_*.py"))
    if name == "gpu":
        return _gpu(package)
    if name is not None and name not in benchmarks:
        raise ValueError(f"{package} has no benchmark {name}; use gpu, {', '.join(benchmarks)}")
    if name is not None:
        return _of_package(folder, name)
    if left := {path.stem for path in folder.glob("results/*.json")} - {*benchmarks}:
        raise ValueError(f"{folder}/results has {sorted(left)}, but no benchmark of that name")
    measured = [each for each in benchmarks if (folder / "results" / f"{each}.json").exists()]
    parts = [f"### {each}\n\n{_of_package(folder, each)}" for each in measured]
    if waiting := [each for each in benchmarks if each not in measured]:
        names = ", ".join(f"`{each}`" for each in waiting)
        parts.append(
            f"Not measured in this run: {names}. `nox -s bench -- {package}` runs them. "
            "Tables further down are of earlier runs, with their dates."
        )
    cpu = "\n\n".join(parts)
    return f"## Measured on CPUs\n\n{cpu}\n\n## Measured on a GPU\n\n{_gpu(package)}"


def _of_package(folder: Path, name: str) -> str:
    script, path = folder / f"bench_{name}.py", folder / "results" / f"{name}.json"
    return _benchmark(script, path, folder.parents[2])


def _of_tools(folder: Path, name: str | None) -> str:
    if name != "whole":
        raise ValueError(f"tools has no benchmark {name}; use whole")
    path = folder / "bench_results" / "whole.json"
    text = _benchmark(folder / "bench_whole.py", path, folder.parent)
    picture = folder / "docs" / "pages" / "whole-steps.png"
    if path.exists() and picture.exists():
        about = "Time of a step above the computation, of both sides, and the bare collectives"
        text = f"![{about}]({picture.name})\n\n{text}"
    return text


def _benchmark(script: Path, path: Path, root: Path) -> str:
    source = ast.parse(script.read_text(encoding="utf-8"))
    first = (ast.get_docstring(source) or "").split("\n\n")[0].replace("\n", " ")
    command = f"nox -s bench -- {script.relative_to(root)}"
    if not path.exists():
        return f"{first}\n\nThis benchmark is still to be measured: `{command}`."
    found: Json = json.loads(path.read_text(encoding="utf-8"))
    if missing := {"date", "machine", "versions", "rows"} - {*found}:
        raise ValueError(f"{path} lacks {sorted(missing)}")
    versions = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
    how = f"Measured on {found['date']} with {found['machine']}; {versions}. Command: `{command}`."
    return "\n\n".join([first, how, _chart(found["rows"]), _table(found["rows"])])


def _gpu(package: str) -> str:
    found: Json = json.loads(GPU_RESULTS.read_text(encoding="utf-8"))
    of_package = [row for row in found["rows"] if row["part"].split(",")[0] == package]
    rows = [_gpu_row(row) for row in of_package if row["ratio"] is not None]
    passed, failed = (
        sum(row["status"] == status for row in of_package) for status in ("passed", "failed")
    )
    checked = f"Of the checks that pass or fail, {passed} passed and {failed} failed; see "
    parts = [
        f"Machine: {'; '.join(found['machine'])}.",
        f"{checked}[GPU checks](../gpu-checks.md)." if of_package else "",
        _chart(rows),
        _table(rows) if rows else "No figure of this package was compared with a peer on a GPU.",
    ]
    return "\n\n".join(part for part in parts if part)


def _gpu_row(row: Json) -> Json:
    ours, _, unit = row["ours"].partition(" ")
    peer = float(row["peer"].partition(" ")[0])
    name = f"{row['world']}: {row['check']}"
    return {"name": name, "ours": float(ours), "peer": peer, "unit": unit, "ratio": row["ratio"]}


def _table(rows: list[Json]) -> str:
    """Return a table of rows, folded if it is long; columns that no row fills are left out."""
    columns = {
        "case": [row["name"] for row in rows],
        "ours": [_figure(row["ours"], row.get("unit")) for row in rows],
        "peer": [_figure(row.get("peer"), row.get("unit")) for row in rows],
        "against": [row.get("against") or "" for row in rows],
        "ours / peer": [_ratio(row) for row in rows],
    }
    shown = {head: cells for head, cells in columns.items() if any(cells)}
    lines = [list(shown), ["---"] * len(shown), *map(list, zip(*shown.values(), strict=True))]
    table = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines]
    if len(rows) < FOLDED_FROM:
        return "\n".join(table)
    return "\n".join([f'??? info "Table of {len(rows)} rows"', "", *(f"    {r}" for r in table)])


def _figure(value: float | None, unit: str | None) -> str:
    return "" if value is None else f"{_short(value)} {unit or ''}".strip()


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _ratio(row: Json) -> str:
    if row.get("ratio") is None:
        return ""
    spread = ""
    if row.get("low") is not None and row.get("high") is not None:
        spread = f" ({_plain(row['low'])} to {_plain(row['high'])})"
    return f"{_plain(row['ratio'])}{spread}"


def _plain(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.1g}"


def _chart(rows: list[Json]) -> str:
    """Return an SVG with a bar for the ratio of each row, on a logarithmic axis around 1."""
    drawn = [row for row in rows if row.get("ratio")]
    if not drawn:
        return ""
    ends = [row[key] for row in drawn for key in ("ratio", "low", "high") if row.get(key)]
    low, high = min(0.5, *ends), max(2.0, *ends)

    def x(ratio: float) -> float:
        return BAR_WIDTH * math.log(ratio / low) / math.log(high / low)

    height = LINE * len(drawn) + 30
    title, legend = "Ratio of our figure to the peer's", "1 = peer; left is better"
    if all(row.get("against") == "published" for row in drawn):  # estimates are not to be small
        title, legend = "Ratio of the estimate to the published figure", "1 = published figure"
    lines = [
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" class="ratios">',
        f"<title>{title}, on a logarithmic axis</title>",
        _text(x(1), height - 6, legend, "middle"),
    ]
    for number, row in enumerate(drawn):
        top = LINE * number
        against = f" / {row['against']}" if row.get("against") else ""
        start, end = sorted((x(row["ratio"]), x(1)))
        lines += [
            _text(0, top + 16, _fitted(f"{row['name']}{against}")),
            f'<line x1="{x(1):.1f}" y1="{top + 20}" x2="{x(1):.1f}" y2="{top + 38}" '
            f'style="{FAINT}"/>',
            f'<rect x="{start:.1f}" y="{top + 22}" width="{max(end - start, 1):.1f}" height="14" '
            f'style="{OURS}"/>',
        ]
        if row.get("low") and row.get("high"):
            lines.append(
                f'<line x1="{x(row["low"]):.1f}" y1="{top + 29}" x2="{x(row["high"]):.1f}" '
                f'y2="{top + 29}" style="{FAINT}; stroke-width: 2"/>'
            )
        lines.append(_text(WIDTH, top + 34, _plain(row["ratio"]), "end"))
    return "\n".join([*lines, "</svg>"])


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    style = f"{INK}; font-size: 14px; text-anchor: {anchor}"
    return f'<text x="{x:.1f}" y="{y}" style="{style}">{escape(words)}</text>'


def _fitted(words: str) -> str:
    """Cut words in the middle: the ends of names differ most."""
    return words if len(words) <= 64 else f"{words[:24]}…{words[-39:]}"
