"""The planner's estimates against published runs, and the time that planning takes."""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from hp_mesh import ParallelDims
from hp_mesh.planner import (
    ACCELERATORS,
    CONSTANTS,
    MODELS,
    Candidate,
    Cluster,
    ModelShape,
    Plan,
    TrainSpec,
    estimate,
    plan,
)

GIB = 2**30
RUNS = Path(__file__).with_name("published_runs.json")
CHOSEN = (
    "the peak of H100-96 is chosen, as the page of its runs gives none; "
    "every time of these runs depends on it"
)


def describe(run: dict[str, Any]) -> tuple[ModelShape, Cluster, TrainSpec, ParallelDims]:
    """Return what a published run is to the planner."""
    cluster = Cluster(world_size=run["world_size"], accelerator=run["accelerator"])
    dims = ParallelDims(**run["dims"], world_size=run["world_size"])
    return MODELS[run["model"]], cluster, TrainSpec(**run["train"]), dims


def published_seconds(run: dict[str, Any], candidate: Candidate) -> float:
    """Return the seconds of one published step, from whichever rate was published."""
    published, world = run["published"], run["world_size"]
    if "tps" in published:
        return float(candidate.tokens / published["tps"] / world)
    if "tflops" in published:
        return float(candidate.flops / published["tflops"] / world / 1e12)
    return float(published["step_seconds"])


def degrees(candidate: Candidate) -> tuple[int, ...]:
    """Return the degrees that a published run gives."""
    dims = candidate.dims
    return (dims.dp_replicate, dims.dp_shard or 1, dims.cp, dims.tp, dims.pp)


def rank(found: Plan, own: Candidate, microbatches: int | None) -> tuple[int, int, float]:
    """Return the place of a run's degrees, of how many, and its time over the best one's.

    Every set of degrees counts once, with its best settings. Where the microbatches were published,
    only configurations with as many count.
    """
    best: dict[tuple[int, ...], Candidate] = {}
    for candidate in found.candidates:
        if microbatches in (None, candidate.microbatches):
            best.setdefault(degrees(candidate), candidate)
    place = list(best).index(degrees(own)) + 1
    first = next(iter(best.values()))
    return place, len(best), best[degrees(own)].time.total / first.time.total


def compare(run: dict[str, Any]) -> dict[str, Any]:
    """Return one row: estimates, published figures and errors."""
    model, cluster, train, dims = describe(run)
    own = estimate(model, cluster, train, dims)
    row: dict[str, Any] = {
        "model": model.name,
        "world": cluster.world_size,
        "degrees": " ".join(f"{axis}={degree}" for axis, degree in run["dims"].items()),
        "seq": train.seq_len,
        "recompute": own.recompute,
        "memory_gib": own.memory.total / GIB,
        "seconds": own.time.total,
        "tps": own.tokens_per_second_per_gpu,
    }
    seconds = published_seconds(run, own)
    row |= {"seconds_published": seconds, "seconds_error": own.time.total / seconds - 1}
    row["tps_published"] = own.tokens / seconds / cluster.world_size
    if "memory_gib" in run["published"]:
        memory = run["published"]["memory_gib"]
        row |= {"memory_published": memory, "memory_error": own.memory.total / GIB / memory - 1}
    return row


def place(run: dict[str, Any]) -> dict[str, Any]:
    """Return where a published configuration stands in the plan of its own run."""
    model, cluster, train, dims = describe(run)
    own = estimate(model, cluster, train, dims)
    found = plan(model, cluster, train)
    fixed = own.microbatches if train.micro_batch else None
    position, count, ratio = rank(found, own, fixed)
    anywhere = rank(found, own, None)
    return {
        "model": model.name,
        "world": cluster.world_size,
        "rank": position,
        "of": count,
        "ratio": ratio,
        "rank_any_microbatches": anywhere[0],
        "ratio_any_microbatches": anywhere[2],
    }


def experts(name: str, world: int, accelerator: str, seq_len: int) -> dict[str, Any]:
    """Return what the planner says of a model with experts, where nothing is published."""
    model = MODELS[name]
    cluster = Cluster(world_size=world, accelerator=accelerator)
    train = TrainSpec(seq_len=seq_len, global_batch=2 * world)
    start = time.perf_counter()
    found = plan(model, cluster, train)
    seconds = time.perf_counter() - start
    best = found.best
    if best is None:
        raise SystemExit(f"no configuration for {name} on {world}")
    dims, tokens = best.dims, best.micro_batch * seq_len / best.dims.cp
    owned = model.expert_parameters / dims.pp / (dims.ep * dims.etp * dims.efsdp)
    rows = tokens * model.top_k / (dims.tp if dims.etp == 1 else 1)
    return {
        "model": name,
        "world": world,
        "best": dims.summary(),
        "recompute": best.recompute,
        "memory_gib": best.memory.total / GIB,
        "expert_states_gib": 16 * owned / GIB,
        "dispatch_mib_per_layer": 2 * rows * model.hidden / 2**20,
        "ep_seconds": best.time.communication.get("ep", 0.0),
        "seconds": best.time.total,
        "tflops": best.tflops,
        "planning_seconds": seconds,
    }


def planning(world: int, repeats: int) -> dict[str, Any]:
    """Return how long planning Llama 3 405B on a world takes."""
    cluster = Cluster(world_size=world, accelerator="H100")
    train = TrainSpec(seq_len=8192, global_batch=2048)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = plan(MODELS["llama3-405b"], cluster, train)
        seconds.append(time.perf_counter() - start)
    return {
        "world": world,
        "seconds": statistics.median(seconds),
        "considered": found.considered,
        "fits": found.fitting,
        "rejected": len(found.rejected),
    }


def accelerators(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what is taken for every accelerator of some runs, and for its links."""
    rows = []
    for name in sorted({run["accelerator"] for run in runs}):
        chip, cluster = ACCELERATORS[name], Cluster(world_size=1, accelerator=name)
        row = {field: getattr(chip, field) for field in chip.__dataclass_fields__}
        row |= {"intra_gbs": cluster.fast.bandwidth / 1e9}
        rows.append(row | {"inter_gbs": cluster.slow.bandwidth / 1e9})
    return rows


def show(title: str, rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Print some columns of the rows that have them."""
    print(f"\n{title}")
    lines = [columns]
    lines += [[_text(row[c], c) for c in columns] for row in rows if all(c in row for c in columns)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def _text(value: object, column: str) -> str:
    if isinstance(value, float):
        return f"{value:+.1%}" if column.endswith("error") else f"{value:.4g}"
    return str(value)


def report(title: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Print the tables of memory and time of some rows, and return their mean errors."""
    run = ["model", "world", "degrees", "seq", "recompute"]
    show(f"memory, {title}", rows, [*run, "memory_gib", "memory_published", "memory_error"])
    memory = [abs(row["memory_error"]) for row in rows if "memory_error" in row]
    near = sum(error <= 0.15 for error in memory)
    print(f"mean error {statistics.mean(memory):.1%}, {near} of {len(memory)} within 15%")
    rates = ["tps", "tps_published", "seconds", "seconds_published", "seconds_error"]
    show(f"time, {title}", rows, [*run, *rates])
    seconds = [abs(row["seconds_error"]) for row in rows]
    print(f"mean error {statistics.mean(seconds):.1%}")
    return {
        "memory_mean_error": statistics.mean(memory),
        "memory_within_15_percent": near / len(memory),
        "seconds_mean_error": statistics.mean(seconds),
    }


def main() -> None:
    """Print every table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small worlds, one repeat")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts = json.loads(RUNS.read_text())
    print("\n".join(facts["note"]))
    runs = [r for r in facts["runs"] if not options.quick or r["world_size"] <= 512]
    result: dict[str, Any] = {"name": "plan", "constants": dict(CONSTANTS)}
    result["accelerators"] = accelerators([*runs, *facts["held_out"]])
    show("accelerators", result["accelerators"], list(result["accelerators"][0]))
    print(CHOSEN)
    for name in ("runs", "held_out"):
        rows = [compare(run) for run in (runs if name == "runs" else facts[name])]
        title = "runs that the constants were chosen with"
        if name == "held_out":
            memory = sum("memory_error" in row for row in rows)
            title = f"held out ({len(rows)} runs: {memory} memory and {len(rows)} time figures)"
        result[name] = {"rows": rows, **report(title, rows)}
    result["places"] = [place(run) for run in runs]
    columns = list(result["places"][0])
    show("published configurations in the plan of their own run", result["places"], columns)
    moe = [("mixtral-8x7b", 64, "H100", 4096), ("qwen3-30b-a3b", 64, "H100", 4096)]
    if not options.quick:
        moe += [("llama4-maverick", 512, "H100", 8192), ("deepseek-v3", 2048, "H100", 4096)]
    result["experts"] = [experts(*case) for case in moe]
    title = "models with experts: no published figure to compare with"
    show(title, result["experts"], list(result["experts"][0]))
    worlds, repeats = ([2048], 1) if options.quick else ([2048, 16384], 5)
    result["planning"] = [planning(world, repeats) for world in worlds]
    show("planning llama3-405b", result["planning"], list(result["planning"][0]))
    print("\nconstants: " + ", ".join(f"{name}={value:g}" for name, value in CONSTANTS.items()))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
