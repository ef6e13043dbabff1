"""Whole training steps on one GPU: hp against torch's FSDP2 and torchtitan's MoE layer.

    python tools/gpu_whole.py                 on one GPU
    python tools/gpu_whole.py --device cpu    the same code on CPUs, in small sizes

Runs the cases, sides and checks of ``bench_whole.py`` for one rank in float32. One rank does not
communicate, so the time above compute consists of copies and host time.
"""

import sys
from collections.abc import Callable

import torch
from bench_whole import SIDES, Json, Plan, measure
from gpu_rows import Result, Rows, World, main, nccl, skipped
from whole_step import peer
from whole_step.cases import Case, cases_of
from whole_step.instruments import Probe

ROUNDS = 15


def worlds_of(on_gpu: bool) -> list[World]:
    """Return one world of one rank."""
    return [World("1 rank", nccl(on_gpu))]


def checks(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    """Add the rows of each case."""
    for case in cases_of(1, "gpu" if large else "quick"):
        missing = peer.without_torchtitan() if case.model == "MoE" else ""
        if missing:
            rows.write(f"{case.model}, step", skipped(missing))
        else:
            add(case, device, large, rows)


def add(case: Case, device: torch.device, large: bool, rows: Rows) -> None:
    """Add the rows of a case. The first row measures all of them."""
    found: list[Json] = []

    def of(result: Callable[[Json], str | Result]) -> Callable[[], str | Result]:
        def run() -> str | Result:
            if not found:
                plan = Plan(
                    cases=[case],
                    device=device.type,
                    rounds=ROUNDS if large else 2,
                    tune=large,
                    large=large,
                )
                found.append(measure(case, plan, 0, device, Probe(0)))
            return result(found[0])

        return run

    rows.add(
        f"{case.model}, losses", of(lambda row: "three losses equal the losses of plain modules")
    )
    rows.add(f"{case.model}, step", of(lambda row: _times(row, "step")))
    rows.add(f"{case.model}, above compute", of(lambda row: _times(row, "above")))
    if device.type == "cuda":
        rows.add(f"{case.model}, host above compute", of(lambda row: _times(row, "host")))
    rows.add(f"{case.model}, peak memory", of(_memory))


def _times(row: Json, key: str) -> Result:
    each = row[key]
    ours, theirs = f"{each['ours_ms']:.2f} ms", f"{each['theirs_ms']:.2f} ms"
    return Result(ours, theirs, each["ratio"])


def _memory(row: Json) -> Result:
    ours, theirs = (row[side]["peak_bytes"] / 2**20 for side in SIDES)
    return Result(f"{ours:.0f} MiB", f"{theirs:.0f} MiB", ours / theirs)


if __name__ == "__main__":
    sys.exit(main("whole step", __doc__, worlds_of, checks))
