"""Run the packages' benchmarks one at a time and keep their JSON.

    python tools/bench.py                      every benchmark
    python tools/bench.py hp-fsdp --quick      those of one package, with small sizes
    python tools/bench.py hp-fsdp --commit     also write what the documentation shows
    python tools/bench.py tools                whole training steps, of all packages together

Each benchmark measures both sides in one interleaved run and writes JSON of its own shape.
``--commit`` turns it into rows of one shape, and writes them with the date, the machine and the
versions to ``packages/*/benchmarks/results/``, or to ``tools/bench_results/`` for whole steps. Use
it on a machine that has no other work.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_rows import rows_of

ROOT = Path(__file__).resolve().parents[1]
SHOWN_VERSIONS = ("torch", "torchtitan", "numpy")
# Pictures that a benchmark draws, with --picture, for the documentation.
PICTURES = {"tools/whole": ROOT / "tools" / "docs" / "pages" / "whole-steps.png"}


def chosen(names: list[str]) -> list[Path]:
    """Return the benchmark files of the named packages or paths; without names all of them."""
    every = [*sorted(ROOT.glob("packages/*/benchmarks/bench_*.py")), ROOT / "tools/bench_whole.py"]
    if not names:
        return every
    matches = {n: [p for p in every if n == owner_of(p) or p == Path(n).resolve()] for n in names}
    if unknown := [name for name, found in matches.items() if not found]:
        known = sorted({owner_of(p) for p in every})
        raise SystemExit(f"no benchmark matches {unknown}; packages with benchmarks: {known}")
    return [p for p in every if any(p in found for found in matches.values())]


def owner_of(path: Path) -> str:
    """Return the package of a benchmark file, or ``tools``."""
    return path.parents[1].name if path.parent.name == "benchmarks" else path.parent.name


def label_of(path: Path) -> str:
    """Return the name of a benchmark file, such as ``hp-mesh/build`` or ``tools/whole``."""
    return f"{owner_of(path)}/{path.stem.removeprefix('bench_')}"


def results_of(path: Path) -> Path:
    """Return the file with the results of a benchmark that the documentation shows."""
    own = path.parent.name == "benchmarks"
    folder = path.parent / ("results" if own else "bench_results")
    return folder / f"{path.stem.removeprefix('bench_')}.json"


def machine() -> str:
    """Return the processor, its number of cores for this process, and the memory."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {cores} cores, {memory:.0f} GiB of memory"


def versions() -> dict[str, str]:
    """Return the versions of Python, of the packages and of their peers."""
    found = {"python": platform.python_version()}
    packages = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
    for name in (*packages, *SHOWN_VERSIONS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def committed(label: str, result: dict[str, Any]) -> dict[str, Any]:
    """Return what the documentation shows of one benchmark."""
    return {
        "benchmark": label,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "rows": rows_of(label, result),
    }


def main() -> int:
    """Run what the command line chooses; return 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="packages or files; all by default")
    parser.add_argument("--quick", action="store_true", help="small sizes, a smoke test")
    parser.add_argument(
        "--out", type=Path, help="folder for the JSON; runs/bench-<time> by default"
    )
    parser.add_argument(
        "--commit", action="store_true", help="also write the results for the documentation"
    )
    arguments = parser.parse_args()
    if arguments.commit and arguments.quick:
        parser.error("--commit is for full sizes, and --quick measures small ones")
    out: Path = arguments.out or ROOT / "runs" / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    failed = []
    for path in chosen(arguments.names):
        label = label_of(path)
        print(f"=== {label}", flush=True)
        written = out / f"{label}.json"
        written.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(path), "--json", str(written)]
        if arguments.commit and label in PICTURES:
            command += ["--picture", str(PICTURES[label])]
        if subprocess.run(command + ["--quick"] * arguments.quick, check=False).returncode:
            failed.append(label)
            continue
        shown = committed(label, json.loads(written.read_text(encoding="utf-8")))
        print(f"{len(shown['rows'])} rows for the documentation")
        if arguments.commit:
            target = results_of(path)
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    print(f"results: {out}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
