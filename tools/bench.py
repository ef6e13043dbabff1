"""Run the packages' benchmarks one at a time and keep their JSON.

    python tools/bench.py                      every benchmark
    python tools/bench.py hp-fsdp --quick      one package's, with small sizes

Each benchmark prints both sides from one interleaved run; what it prints is what was seen.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def chosen(names: list[str]) -> list[Path]:
    """Return the benchmark files of the named packages or paths; without names all of them."""
    every = sorted(ROOT.glob("packages/*/benchmarks/bench_*.py"))
    if not names:
        return every
    wanted = [
        p for p in every if p.parents[1].name in names or p in {Path(n).resolve() for n in names}
    ]
    if not wanted:
        known = sorted({p.parents[1].name for p in every})
        raise SystemExit(f"no benchmark matches {names}; packages with benchmarks: {known}")
    return wanted


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
    arguments = parser.parse_args()
    out: Path = arguments.out or ROOT / "runs" / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for path in chosen(arguments.names):
        label = f"{path.parents[1].name}/{path.stem.removeprefix('bench_')}"
        print(f"=== {label}", flush=True)
        command = [sys.executable, str(path), "--json", str(out / f"{path.stem}.json")]
        if subprocess.run(command + ["--quick"] * arguments.quick, check=False).returncode:
            failed.append(label)
    print(f"results: {out}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
