"""Fit the planner's constants to published runs, and print what they are off by.

Data: `published_runs.json`, `planner_runs.json`, `scale_runs.json` and `nanotron_runs.csv` beside
this file, each row with its source. No constant is fitted to `scale_runs.json`. Errors of the other
runs are given twice: with the constants of `hp_mesh.planner.CONSTANTS`, and cross-validated, where
the constants are fitted again without any row of the source that the row is from. The fit is a
penalised least-squares fit of logarithms: every constant is pulled towards its prior, a figure that
follows from hardware or from kernels, so that few rows cannot move it far.

    python benchmarks/calibrate.py            # tables with the constants as they are
    python benchmarks/calibrate.py --fit      # the same, and cross-validation; prints the fit
"""

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from hp_mesh import ParallelDims, ParallelDimsError
from hp_mesh.planner import (
    MODELS,
    Calibration,
    Candidate,
    Cluster,
    ModelShape,
    TrainSpec,
    estimate,
)

GIB = 2**30
HERE = Path(__file__).parent
# Sequences, vocabulary and models of the interactive benchmark behind `nanotron_runs.csv`.
NANOTRON = {
    "1B": ModelShape(
        name="1B", layers=16, hidden=2048, heads=32, ffn=8192, vocab=131072, tied=True
    ),
    "8B": ModelShape(name="8B", layers=32, hidden=4096, heads=32, ffn=14336, vocab=131072),
}
# The constants that are fitted: their priors, which follow from kernels and hardware, and by how
# much (a factor of e) each may leave its prior at the price of one row that is off by 10%.
FITTED: Mapping[str, tuple[float, float]] = {
    "gemm_efficiency": (0.70, 0.2),
    "fp8_efficiency": (0.62, 0.2),
    "attention_efficiency": (0.50, 0.2),
    "flash2_tflops": (550, 0.2),
    "ring_efficiency": (0.90, 0.05),
    "tp_hidden": (0.50, 0.3),
    "overlap_cost": (0.20, 0.3),
    "expert_half_side": (384, 0.5),
    "expert_layer_seconds": (1.5e-3, 0.5),
    "ep_hidden": (0.20, 0.3),
}
NOISE = 0.10
# Constants that are no shares.
LARGEST = {"flash2_tflops": 2000.0, "expert_half_side": 4096.0}


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One published run, as the planner is asked about it."""

    kind: str
    source: str
    name: str
    model: ModelShape
    cluster: Cluster
    train: TrainSpec
    dims: ParallelDims
    published: Mapping[str, float]

    @property
    def seconds(self) -> float | None:
        """Return the seconds of one step, from whichever rate was published."""
        tokens, world = self.train.tokens / self.cluster.world_size, self.published
        if "tps" in world:
            return tokens / world["tps"]
        if "tflops" in world:
            return tokens * self.model.flops_per_token(self.train.seq_len) / world["tflops"] / 1e12
        return world.get("step_seconds")

    def estimate(self, calibration: Calibration) -> Candidate:
        """Return what the planner says."""
        return estimate(self.model, self.cluster, self.train, self.dims, calibration=calibration)


def kind_of(model: ModelShape, train: TrainSpec) -> str:
    """Return the class whose errors are told together."""
    if model.experts:
        return "MoE"
    return "dense fp8" if train.float8 else "dense bf16"


def make(
    model: ModelShape,
    source: str,
    accelerator: str,
    world: int,
    degrees: Mapping[str, Any],
    train: Mapping[str, Any],
    published: Mapping[str, float],
) -> Run:
    """Return a run from the fields of a row."""
    spec = TrainSpec(**train)
    words = " ".join(f"{axis}={size}" for axis, size in degrees.items() if size and size != 1)
    return Run(
        kind=kind_of(model, spec),
        source=source.split(",")[0],
        name=f"{model.name} {accelerator} x{world} {words}",
        model=model,
        cluster=Cluster(world_size=world, accelerator=accelerator),
        train=spec,
        dims=ParallelDims(**degrees, world_size=world),
        published=published,
    )


def published_runs() -> list[Run]:
    """Return the runs of the planner's first edition."""
    facts = json.loads((HERE / "published_runs.json").read_text())
    rows = []
    for row in [*facts["runs"], *facts["held_out"]]:
        degrees = {"dp_shard": 1, **row["dims"]}
        # torch attends with FlashAttention-2, and its pipelining keeps all that it receives.
        torch = {"attention": "flash-2", "receive_buffers": "all"}
        train: dict[str, Any] = torch if "torchtitan" in row["source"] else {}
        train |= row["train"]
        rows.append(
            make(
                MODELS[row["model"]],
                row["source"],
                row["accelerator"],
                row["world_size"],
                degrees,
                train,
                row["published"],
            )
        )
    return rows


def planner_runs() -> list[Run]:
    """Return the runs of the second edition.

    Megatron's distributed optimizer is ZeRO stage 1, and its recipes add gradients up in bf16;
    Automodel and MaxText train with FSDP.
    """
    facts = json.loads((HERE / "planner_runs.json").read_text())
    models = {name: ModelShape(name=name, **sizes) for name, sizes in facts["models"].items()}
    models |= {name: shape for name, shape in MODELS.items() if name not in models}
    rows = []
    for row in facts["runs"]:
        world = row["world"]
        dp = world // (row["tp"] * row["pp"] * row["cp"])
        shard = row["shard"] or dp
        degrees = {"dp_replicate": dp // shard, "dp_shard": shard}
        degrees |= {axis: row[axis] for axis in ("cp", "tp", "pp", "ep", "etp")}
        train = {
            "seq_len": row["seq"],
            "global_batch": row["gbs"],
            "micro_batch": row["mbs"],
            "recompute": row["recompute"],
            "float8": row["fp8"],
            "fused": row["fused"],
            "zero": None if row["shard"] or "Automodel" in row["source"] else 1,
            "gradient_dtype": "float32" if row["gpu"].startswith("A100") else "bfloat16",
            "dispatch": "deduplicated" if "DeepEP" in row["note"] else "copies",
            "schedule": "interleaved" if row["v"] > 1 else "1f1b",
            "virtual_stages": row["v"],
        }
        source, model, chip = row["source"], models[row["model"]], row["gpu"]
        rows.append(make(model, source, chip, world, degrees, train, row["published"]))
    return rows


def scale_runs() -> list[Run]:
    """Return the runs of FSDP and of ZeRO stage 3 at scale. No constant is fitted to them."""
    facts = json.loads((HERE / "scale_runs.json").read_text())
    models = {name: ModelShape(name=name, **sizes) for name, sizes in facts["models"].items()}
    rows = []
    for row in facts["runs"]:
        model, train, published = models[row["model"]], row["train"], dict(row["published"])
        if "tflops_hardware" in published:  # these count the recomputation, and whole scores
            width, layers = model.hidden, model.layers
            ends = train["seq_len"] / (6 * width) + model.vocab / (16 * layers * width)
            flops = 96 * train["global_batch"] * train["seq_len"] * layers * width**2 * (1 + ends)
            rate = published["tflops_hardware"] * 1e12 * row["world"]
            published = {"step_seconds": flops / rate}
        place = row["source"], row["gpu"], row["world"]
        rows.append(make(model, *place, row["dims"], train, published))
    return rows


def report_scale(runs: Sequence[Run]) -> None:
    """Print the errors of runs at scale by device, kind of sharding and number of devices."""
    groups: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for run, error in time_errors(runs, Calibration()).items():
        sharding = "FSDP" if run.train.zero is None else f"ZeRO {run.train.zero}"
        sharding += f", pp={run.dims.pp}" if run.dims.pp > 1 else ""
        groups[run.cluster.device.name, sharding, run.cluster.world_size].append(error)
    rows = [
        (
            *key,
            len(errors),
            f"{mean_size(errors):.1%}",
            f"{statistics.mean(exp(error) - 1 for error in errors):+.1%}",
            percent(min(errors)),
            percent(max(errors)),
        )
        for key, errors in sorted(groups.items())
    ]
    columns = ["device", "sharding", "devices", "runs", "error", "signed", "lowest", "highest"]
    show("mean absolute error of time at scale, no constant fitted to these runs", rows, columns)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One configuration of the interactive benchmark; ``seconds`` is None where it failed."""

    group: str
    run: Run
    failed: bool
    seconds: float
    memory_gib: float


@cache
def trials() -> tuple[Trial, ...]:
    """Return every configuration of `nanotron_runs.csv` that degrees can say."""
    found = []
    with (HERE / "nanotron_runs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            world, model = 8 * int(row["nodes"]), NANOTRON[row["model"]]
            failed = row["status"] != "ok"
            batch = int(row["mbs"]) * int(row["grad_acc"]) * int(row["dp"])
            train = {
                "seq_len": 4096,
                "global_batch": batch,
                "micro_batch": int(row["mbs"]),
                "recompute": "none",
                "fused": "attention",
                "zero": int(row["zero"]),
            }
            degrees = {"dp_shard": int(row["dp"]), "pp": int(row["pp"]), "tp": int(row["tp"])}
            rate = 0.0 if failed else float(row["tok_s_gpu"])
            run = make(model, "nanotron", "H100", world, degrees, train, {"tps": rate})
            found.append(
                Trial(
                    group=f"{row['model']} on {world}",
                    run=run,
                    failed=failed,
                    seconds=0.0 if failed else batch * 4096 / world / rate,
                    memory_gib=0.0 if failed else float(row["memory_gb"]),
                )
            )
    return tuple(found)


def time_errors(runs: Iterable[Run], calibration: Calibration) -> dict[Run, float]:
    """Return estimated over published time, as a logarithm, of the runs that have one."""
    errors = {}
    for run in runs:
        seconds = run.seconds
        if seconds:
            errors[run] = log(run.estimate(calibration).time.total / seconds)
    return errors


PRIOR = replace(Calibration(), **{name: prior for name, (prior, _) in FITTED.items()})


def fit(runs: Sequence[Run], rounds: int = 4) -> Calibration:
    """Return the constants with the least squared errors and distance from the priors."""
    values, names = PRIOR, list(FITTED)
    spreads = {name: spread for name, (_, spread) in FITTED.items()}
    # Rows of one table and model repeat each other at several sizes: together they count once.
    groups: dict[tuple[object, ...], int] = defaultdict(int)
    for run in runs:
        groups[run.source, run.model.name, run.train.float8] += 1
    for _ in range(rounds):
        base = time_errors(runs, values)
        rows = list(base)
        weights = np.array(
            [
                groups[run.source, run.model.name, run.train.float8] ** -0.5
                / (NOISE * max(1.0, abs(base[run]) / NOISE) ** 0.5)
                for run in rows
            ]
        )
        columns = []
        for name in names:
            moved = replace(values, **{name: getattr(values, name) * exp(0.02)})
            errors = time_errors(rows, moved)
            columns.append([(errors[run] - base[run]) / 0.02 for run in rows])
        slopes = np.array(columns).T * weights[:, None]
        wrong = np.array([base[run] for run in rows]) * weights
        away = np.array([log(getattr(values, n) / getattr(PRIOR, n)) / spreads[n] for n in names])
        pulls = np.diag([1 / spreads[name] for name in names])
        matrix, target = np.vstack([slopes, pulls]), -np.concatenate([wrong, away])
        step, *_ = np.linalg.lstsq(matrix, target, rcond=None)
        step = np.clip(step, -0.3, 0.3)
        changes = {n: getattr(values, n) * exp(s) for n, s in zip(names, step, strict=True)}
        values = replace(values, **{n: min(v, LARGEST.get(n, 0.98)) for n, v in changes.items()})
    return values


def show(title: str, rows: Sequence[Sequence[object]], columns: Sequence[str]) -> None:
    """Print a table."""
    lines = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())


def percent(error: float) -> str:
    """Return a logarithm of a ratio as a signed share."""
    return f"{exp(error) - 1:+.1%}"


def mean_size(errors: Iterable[float]) -> float:
    """Return the mean of the sizes of errors that are given as logarithms of ratios."""
    return statistics.mean(abs(exp(error) - 1) for error in errors)


def report_times(runs: Sequence[Run], validated: Mapping[Run, float] | None) -> None:
    """Print every row of every class, and the mean error of each class."""
    fitted, summary = time_errors(runs, Calibration()), []
    for kind in ("dense bf16", "dense fp8", "MoE"):
        rows = []
        for run in runs:
            if run.kind != kind or run not in fitted:
                continue
            out = percent(validated[run]) if validated else ""
            own = run.estimate(Calibration())
            rows.append(
                (
                    run.source.split()[-1][-40:],
                    run.name,
                    own.recompute,
                    f"{run.seconds:.3g}",
                    f"{own.time.total:.3g}",
                    percent(fitted[run]),
                    out,
                )
            )
        columns = ["source", "run", "recompute", "published s", "estimate s", "fit", "left out"]
        show(kind, rows, columns)
        own_rows = [run for run in fitted if run.kind == kind]
        left = f"{mean_size(validated[run] for run in own_rows):.1%}" if validated else ""
        fits = mean_size(fitted[run] for run in own_rows)
        summary.append((kind, len(own_rows), f"{fits:.1%}", left))
    show("mean absolute error of time", summary, ["class", "runs", "fit", "source left out"])


def report_schedules(runs: Sequence[Run], validated: Mapping[Run, float] | None) -> None:
    """Print the mean errors by device, class and pipeline schedule, as estimates tell them.

    The last column is what the trust of such an estimate says; empty, it says that no published run
    resembles it.
    """
    fitted = time_errors(runs, Calibration())
    groups: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    told: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for run in fitted:
        own, chip = run.estimate(Calibration()), run.cluster.device.name
        schedule = str(own.schedule) if own.dims.pp > 1 else "no stages"
        key = chip[:4], run.kind, schedule
        groups[key].append(run)
        if own.trust.error is not None:
            told[key].add(f"{own.trust.error:.0%} of {own.trust.runs}")
    rows = []
    for key, members in sorted(groups.items()):
        left = ""
        if validated:
            off = [exp(validated[run]) - 1 for run in members]
            left = f"{mean_size(validated[run] for run in members):.1%}"
            left += f" ({statistics.mean(off):+.1%})"
        fits = f"{mean_size(fitted[run] for run in members):.1%}"
        rows.append((*key, len(members), fits, left, ", ".join(sorted(told[key]))))
    columns = ["device", "class", "schedule", "runs", "fit", "left out (signed)", "trust says"]
    show("mean absolute error of time, by schedule", rows, columns)


def report_memory(runs: Sequence[Run]) -> None:
    """Print the memory of the runs that published it."""
    rows, errors = [], []
    for run in runs:
        if "memory_gib" in run.published:
            own = run.estimate(Calibration()).memory.total / GIB
            errors.append(log(own / run.published["memory_gib"]))
            rows.append((run.name, run.published["memory_gib"], f"{own:.1f}", percent(errors[-1])))
    show("memory", rows, ["run", "published GiB", "estimate GiB", "error"])
    print(f"mean absolute error {mean_size(errors):.1%}")


def ranks(values: Sequence[float]) -> list[float]:
    """Return the place of every value, equal values in the middle of their places."""
    order = sorted(values)
    return [(order.index(v) + len(order) - 1 - order[::-1].index(v)) / 2 for v in values]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation of two sequences."""
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def report_trials(calibration: Calibration) -> None:
    """Print order, level and failures of the interactive benchmark's configurations."""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    memory, caught, alarms, missed = [], 0, 0, defaultdict(int)
    for trial in trials():
        try:
            own = trial.run.estimate(calibration)
        except ParallelDimsError:
            predicted, own = True, None
        else:
            predicted = own.fit != "fits"
        caught += predicted and trial.failed
        alarms += predicted
        if trial.failed and not predicted:
            dims = trial.run.dims
            stages = "as many stages as layers" if dims.pp >= trial.run.model.layers else ""
            stage0 = "ZeRO 0 with stages" if trial.run.train.zero == 0 and dims.pp > 1 else ""
            missed[stages or stage0 or "others"] += 1
        if own and not trial.failed:
            times[trial.group].append((own.time.total, trial.seconds))
            memory.append(log(own.memory.total / GIB / trial.memory_gib))
    rows = []
    for group, pairs in times.items():
        ours, theirs = zip(*pairs, strict=True)
        errors = [abs(log(a / b)) for a, b in pairs]
        rows.append(
            (group, len(pairs), f"{spearman(ours, theirs):.3f}", f"{statistics.median(errors):.1%}")
        )
    columns = ["model and world", "runs", "Spearman", "median |log error| of time"]
    show("nanotron: order of the configurations", rows, columns)
    print(f"mean Spearman {statistics.mean(float(row[2]) for row in rows):.3f}")
    print(
        f"memory: mean absolute error {mean_size(memory):.1%}, "
        f"median ratio {exp(statistics.median(memory)):.2f}"
    )
    failures = sum(trial.failed for trial in trials())
    print(
        f"failed runs: {failures}, predicted {alarms}, recall {caught / failures:.1%}, "
        f"precision {caught / max(1, alarms):.1%}; missed: {dict(missed)}"
    )


def cross_validate(runs: Sequence[Run]) -> dict[Run, float]:
    """Return the error of every run with constants fitted without its source."""
    errors: dict[Run, float] = {}
    for source in {run.source for run in runs}:
        others = [run for run in runs if run.source != source]
        own = fit(others)
        errors |= time_errors([run for run in runs if run.source == source], own)
    return errors


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit, and leave each source out once")
    options = parser.parse_args()
    runs = [*published_runs(), *planner_runs()]
    validated = None
    if options.fit:
        best = fit(runs)
        validated = cross_validate(runs)
        rows = [
            (name, f"{getattr(Calibration(), name):.4g}", f"{getattr(best, name):.4g}")
            for name in FITTED
        ]
        show("constants", rows, ["constant", "in the table", "fitted"])
    report_times(runs, validated)
    report_schedules(runs, validated)
    report_scale(scale_runs())
    report_memory(runs)
    report_trials(Calibration())


if __name__ == "__main__":
    main()
