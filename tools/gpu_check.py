"""Run the GPU checks of all packages in order of worth, within a time limit.

    tools/gpu_check.sh OUT --budget 420
    tools/gpu_check.sh OUT --budget 180 --resume OLD     only rows that OLD lacks or that failed
    tools/gpu_check.sh OUT --device cpu                  the same code on CPUs, in small sizes

OUT is a folder that is empty or does not exist yet. It gets rows.jsonl, with each row as soon as it
exists, and at the end table.md, table.json, picture.png (if matplotlib is installed), log.txt and
machine.txt. The exit status is 1 if a check of correctness failed or a part did not end in time.
"""

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu_rows import WHOLE, Row, append, line_of, read

ROOT = Path(__file__).resolve().parent.parent
WIDEST = 3.0  # a larger ratio has a bar of this length, and its number
END = 10.0  # seconds that are kept for the table and the picture


@dataclass(frozen=True)
class Part:
    """A script and its time limit in seconds."""

    name: str
    script: str
    seconds: float


PARTS = (
    Part("hp-dtensor", "packages/hp-dtensor/benchmarks/gpu.py", 70),
    Part("hp-fsdp", "packages/hp-fsdp/benchmarks/gpu.py", 110),
    Part("hp-fsdp, speed", "packages/hp-fsdp/benchmarks/gpu_speed.py", 110),
    Part("hp-ep", "packages/hp-ep/benchmarks/gpu.py", 80),
    Part("hp-cp", "packages/hp-cp/benchmarks/gpu.py", 120),
    Part("trainer", "tools/gpu_train.py", 120),
    Part("whole step", "tools/gpu_whole.py", 60),
)


def main() -> int:
    """Run the parts, write the table, and return 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--budget", type=time_limit, default=420.0, help="seconds in all")
    parser.add_argument("--resume", type=Path, metavar="OLD", help="a folder of earlier results")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", default="", help="only parts whose names hold this text")
    given = parser.parse_args()
    end = time.monotonic() + given.budget
    parts = [part for part in PARTS if given.parts in part.name]
    if not parts:
        names = ", ".join(part.name for part in PARTS)
        parser.error(f"--parts {given.parts} names no part; use {names}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu runs the same code on CPUs")
    old, about = [], machine(given.device)
    if given.resume is not None:
        old = earlier(given.resume, {part.name for part in parts}, parser)
        before = machine_of_earlier(given.resume, given.device, parser)
        if before not in ("", about):
            about += "rows of an earlier run: " + "; ".join(before.splitlines()) + "\n"
    prepare(given.out, about, parser)
    rows = given.out / "rows.jsonl"
    for row in old:
        append(rows, row)
    for part in parts:
        left = end - time.monotonic() - END
        run(part, given.device, rows, given.out / "log.txt", min(part.seconds, left))
    found = read(rows)
    write_table(found, given.out)
    failed = [row for row in found if row.status == "failed"]
    for row in failed:
        print(line_of(row))
    print(f"{len(found)} rows, {len(failed)} failed; the table is {given.out / 'table.md'}")
    return int(bool(failed))


def time_limit(text: str) -> float:
    """Return a time limit, which must be above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return number


def prepare(out: Path, about: str, parser: argparse.ArgumentParser) -> None:
    """Create the folder of results with the description of the machine."""
    try:
        if out.exists() and not out.is_dir():
            parser.error(f"{out} is not a folder; give a new one")
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            parser.error(f"{out} is not empty; give a new folder")
        (out / "machine.txt").write_text(about, encoding="utf-8")
    except OSError as error:
        parser.error(f"cannot use {out}: {error.strerror}")


def earlier(folder: Path, chosen: set[str], parser: argparse.ArgumentParser) -> list[Row]:
    """Return the rows of a folder that the new table keeps.

    Parts that are not chosen keep all rows. Chosen parts keep the rows that passed or were
    measured, which are not run again, and the skipped rows of checks. A check that runs again
    replaces its skipped row, but a world that was complete does not run again. Rows of whole worlds
    that were skipped are left out, because each run decides again which worlds it can start.
    """
    file = folder / "rows.jsonl"
    try:
        rows = read(file)
    except (ValueError, TypeError):
        parser.error(f"--resume {folder}: a line of {file.name} is not a row")
    if not any(row.status in ("passed", "measured") for row in rows):
        parser.error(f"--resume {folder} has no {file.name} with a row that passed")

    def is_kept(row: Row) -> bool:
        if row.part not in chosen or row.status in ("passed", "measured"):
            return True
        return row.status == "skipped" and row.check != WHOLE

    return [row for row in rows if is_kept(row)]


def machine_of_earlier(folder: Path, device: str, parser: argparse.ArgumentParser) -> str:
    """Return the description of the machine of earlier rows; it must be the same kind of device."""
    file = folder / "machine.txt"
    about = file.read_text(encoding="utf-8") if file.exists() else ""
    on_gpu = any(line.startswith("GPU ") for line in about.splitlines())
    if about and on_gpu != (device == "cuda"):
        kind = "a GPU" if on_gpu else "CPUs"
        parser.error(f"--resume {folder} has rows of {kind}, and --device is {device}")
    return about


def run(part: Part, device: str, rows: Path, log: Path, seconds: float) -> None:
    """Run one script in its own process group, for so many seconds at most."""
    if seconds < 5:
        append(rows, Row(part.name, "-", WHOLE, "no time was left", "-", None, "failed"))
        return
    command = [sys.executable, str(ROOT / part.script), "--device", device]
    command += ["--rows", str(rows), "--done", str(rows)]
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    path = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    print(f"== {part.name}, at most {seconds:.0f} s", flush=True)
    began = time.monotonic()
    with log.open("a", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said = f"ended at its limit of {seconds:.0f} s"
            append(rows, Row(part.name, "-", WHOLE, said, "-", None, "failed"))
            status = None
    if status and not any(r.part == part.name and r.status == "failed" for r in read(rows)):
        said = f"exit status {status}; see {log.name}"
        append(rows, Row(part.name, "-", WHOLE, said, "-", None, "failed"))
    print(f"   {time.monotonic() - began:.0f} s", flush=True)


def machine(device: str) -> str:
    """Describe what the rows were measured on."""
    lines = [
        f"date {time.strftime('%Y-%m-%d')}",
        f"python {platform.python_version()}, torch {torch.__version__}",
        f"{os.cpu_count()} CPU cores, {platform.machine()}",
    ]
    if device == "cuda":
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            lines.append(f"GPU {index}: {found.name}, {found.total_memory / 2**30:.0f} GiB")
        lines.append(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
        lines.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    return "\n".join(lines) + "\n"


def write_table(rows: list[Row], folder: Path) -> None:
    """Write the rows as a table for readers and for programs, and the ratios as a picture."""
    machine_lines = (folder / "machine.txt").read_text(encoding="utf-8").splitlines()
    content = {"machine": machine_lines, "rows": [asdict(row) for row in rows]}
    (folder / "table.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    lines = [
        "; ".join(machine_lines),
        "",
        "| part | world | check | ours | peer | ratio | passed |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    passed = {"passed": "yes", "failed": "**no**", "measured": "-", "skipped": "skipped"}
    for row in rows:
        if row.check == WHOLE and row.status == "passed":
            continue
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        cells = (row.part, row.world, row.check, row.ours, row.peer, ratio, passed[row.status])
        lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
    (folder / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw([row for row in rows if row.ratio is not None], folder / "picture.png")


def draw(rows: list[Row], file: Path) -> None:
    """Draw the ratios of times, ours to the peer's, as bars."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    if not rows:
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    names = [f"{row.part}: {row.check} ({row.world})" for row in rows]
    ratios = [row.ratio or 0.0 for row in rows]
    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.24 * len(rows)))
    colors = ["#2f6f9f" if ratio <= 1 else "#c0562f" for ratio in ratios]
    bars = axes.barh(names, [min(ratio, WIDEST) for ratio in ratios], color=colors)
    axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=3, fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8, zorder=0)
    axes.set_xlim(0, 1.1 * min(WIDEST, max(1.1, *ratios)))
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("ours / peer; below 1 we are better")
    figure.tight_layout()
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
