"""Run the packages' benchmarks one at a time and keep their JSON.

    python tools/bench.py                      every benchmark
    python tools/bench.py hp-fsdp --quick      those of one package, with small sizes
    python tools/bench.py hp-fsdp --commit     also write what the documentation shows

Each benchmark measures both sides in one interleaved run and writes JSON of its own shape.
``--commit`` turns it into rows of one shape, and writes them with the date, the machine and the
versions to ``packages/*/benchmarks/results/``. Use it on a machine that has no other work.
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


def chosen(names: list[str]) -> list[Path]:
    """Return the benchmark files of the named packages or paths; without names all of them."""
    every = sorted(ROOT.glob("packages/*/benchmarks/bench_*.py"))
    if not names:
        return every
    matches = {
        n: [p for p in every if n == p.parents[1].name or p == Path(n).resolve()] for n in names
    }
    if unknown := [name for name, found in matches.items() if not found]:
        known = sorted({p.parents[1].name for p in every})
        raise SystemExit(f"no benchmark matches {unknown}; packages with benchmarks: {known}")
    return [p for p in every if any(p in found for found in matches.values())]


def label_of(path: Path) -> str:
    """Return the name of a benchmark file, such as ``hp-mesh/build``."""
    return f"{path.parents[1].name}/{path.stem.removeprefix('bench_')}"


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
        "--commit", action="store_true", help="also write packages/*/benchmarks/results/"
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
        if subprocess.run(command + ["--quick"] * arguments.quick, check=False).returncode:
            failed.append(label)
            continue
        shown = committed(label, json.loads(written.read_text(encoding="utf-8")))
        print(f"{len(shown['rows'])} rows for the documentation")
        if arguments.commit:
            target = path.parent / "results" / f"{label.partition('/')[2]}.json"
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    print(f"results: {out}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
