"""Time whole training steps: hp against torch's FSDP2 and context parallelism and torchtitan's MoE.

    python tools/bench_whole.py                      2 and 4 gloo ranks on this machine
    python tools/bench_whole.py --quick              tiny sizes: does it run at all
    python tools/bench_whole.py --profile torch      the components of a side's time above compute
    python tools/bench_whole.py --settings first --only MoE    no choice of settings, some cases
    python tools/bench_whole.py --device cuda        one rank on one GPU

Both sides train the trainer's model in float32: a Llama (the built-in model without experts) and
the mixture of experts. They start from the same weights, take the same batches, clip gradients and
update with AdamW. Before the measurement, each arm is compared with one process: the losses of
three steps and the gradient norm of the first step must agree within 1e-4. Each rank has one
thread. Tensor parallelism is torch's on both sides, with the trainer's plan.

For each side, the fastest of several settings is chosen first. Of settings within 2 % of the
fastest, it is the one with the lowest peak memory. The chosen arms and the computation then run in
the same processes, one step each in random order. The slowest rank gives the time of a step. Ratios
are medians of paired ratios, with quartiles. In these rounds, the learning rate is 0, and all arms
have the same batch. So the experts of both sides receive the same rows. A fixed computation before
each step shows whether other programs use the machine. Disturbed rounds are repeated.

| row | meaning |
|---|---|
| step | time of forward, backward, clipping, AdamW and ``zero_grad`` |
| compute | the same ranks compute at the same time without communication, see below |
| above compute | step minus compute, in each round |
| bare collectives | as "above compute", of hp's collectives without hp's copies and hooks |
| tokens/s | tokens of all ranks per second |
| peak memory | the most memory of a rank at any time, by the profiler of torch's allocator |
| received | bytes that rank 0 receives from other ranks in a step, computed from the shapes |
| host time above compute | as "above compute", with tiny tensors on a fake process group |

Compute: each rank has a plain model with the shapes of its part, and the other parts of the step.
The docstring of `whole_step.sides.compute_arm` says exactly what differs from the sharded model.
Experts compute as many rows as they receive, so loads that differ between ranks count as compute.

The aim for "above compute" is half of the peer's. The ratio of the steps would then be
``1 - s / 2``, where ``s`` is the share of the peer's step above compute.

torch's public ``context_parallel`` raises on CPUs. The peer then runs its ring attention with the
kernels for CPUs, and the report shows the error. gloo on CPUs says something about bytes, copies,
calls, host time, memory and overlap. It says nothing about the time on GPUs.
"""

import argparse
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes
from train.model import LanguageModel, build_model
from whole_step import peer
from whole_step.cases import Case, Size, cases_of, host_case
from whole_step.instruments import (
    COMPONENTS,
    BareCollectives,
    Probe,
    components,
    named_waits,
    received,
    slowest,
    timed,
    with_memory,
)
from whole_step.sides import (
    Arm,
    HpSettings,
    Settings,
    TorchSettings,
    candidates,
    compute_arm,
    make_arm,
    number_of,
    plain_arm,
    received_rows,
    torch_mesh,
    whole_loss,
)

Json = dict[str, Any]
SIDES = ("hp", "torch")
BOUND = 1e-4  # largest relative difference of losses and norms between an arm and one process
TUNING = 4  # rounds among all settings of both sides
ALIKE = 1.02  # settings whose steps differ by less in these rounds count as equally fast
ROUNDS = 11
HOST_ROUNDS = 15
AIM = 0.5
# The allocator keeps freed memory, as allocators for training do. Otherwise large parts of all
# times are page faults.
KEEP_FREED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
QUIET = {"KINETO_LOG_LEVEL": "99"}  # no lines of the profiler
PRELOAD = ["__main__", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
TITAN = ["torchtitan.models.common.moe", "torchtitan.models.common.linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurements in one world.

    Attributes:
        cases: The cases.
        device: ``"cpu"`` or ``"cuda"``.
        rounds: Number of measured rounds.
        tune: If True, all settings are tried. Otherwise the first one of each side is used.
        large: False for ``--quick``, which takes few steps.
        profile: If given, only the components of this side's time are measured.
    """

    cases: Sequence[Case]
    device: str
    rounds: int
    tune: bool
    large: bool
    profile: str | None = None


def main() -> int:
    """Run the chosen cases, print the table, and return 1 if the ranks failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="2 and 4 by default")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one setting per side")
    parser.add_argument(
        "--settings",
        choices=["all", "first"],
        help="choose among all settings of a side, or use the first; default all, quick: first",
    )
    parser.add_argument("--rounds", type=int, help=f"measured rounds; default {ROUNDS}, quick: 2")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their name")
    parser.add_argument("--profile", choices=SIDES, help="show the components of this side's time")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--picture", type=Path, help="draw the times to this SVG or PNG file")
    parser.add_argument("--deadline", type=float, help="seconds for each world; 3600, quick: 300")
    given = parser.parse_args()
    if given.device == "cuda" and given.ranks not in (None, [1]):
        parser.error("one GPU has one rank: leave out --ranks")
    size: Size = "quick" if given.quick else "gpu" if given.device == "cuda" else "full"
    deadline = given.deadline or (300.0 if given.quick else 3600.0)
    rows: list[Json] = []
    skipped: dict[str, str] = {}
    for ranks in given.ranks or ([1] if given.device == "cuda" else [2, 4]):
        cases = []
        for case in cases_of(ranks, size):
            if given.only in case.name:
                missing = peer.without_torchtitan() if case.model == "MoE" else ""
                if missing:
                    skipped[case.name] = missing
                    print(f"{case.name}: skipped: {missing}", flush=True)
                else:
                    cases.append(case)
        plan = Plan(
            cases=cases,
            device=given.device,
            rounds=given.rounds or (2 if given.quick else ROUNDS),
            tune=(given.settings or ("first" if given.quick else "all")) == "all",
            large=not given.quick,
            profile=given.profile,
        )
        if cases:
            rows += run(plan, ranks, deadline)
    if given.json is not None and given.profile is None:
        found = {"name": "whole", "device": given.device, "rows": rows, "skipped": skipped}
        given.json.write_text(json.dumps(found, indent=1))
    if given.picture is not None and rows and given.profile is None:
        draw(rows, given.picture)
    return 0


def run(plan: Plan, ranks: int, deadline: float) -> list[Json]:
    """Measure all cases, then the host time of each. Prints each result at once."""
    rows: list[Json] = started(measured, ranks, deadline, plan)
    if plan.profile is None and plan.device == "cpu":
        hosts = started(host_times, 1, deadline, plan, rows)
        print("host time above compute, on a fake process group")
        for row, host in zip(rows, hosts, strict=True):
            row["host"] = host
            _show_times(row["case"], host)
    return rows


def started(function: Callable[..., Any], ranks: int, deadline: float, *given: Any) -> Any:
    """Run ``function(rank, ranks, store, *given)`` in ``ranks`` processes.

    Each process has one thread.

    Returns:
        The result on rank 0, which is passed on as JSON.

    Raises:
        TimeoutError: The processes did not end in time; they are killed.
    """
    plan: Plan = given[0]
    method = "forkserver" if plan.device == "cpu" else "spawn"
    context: Any = mp.get_context(method)
    if method == "forkserver":  # one process imports the libraries, and its forks are the ranks
        titan = [] if peer.without_torchtitan() else TITAN
        context.set_forkserver_preload([*PRELOAD, *titan])
    os.environ.update(KEEP_FREED | QUIET)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    end = time.monotonic() + deadline
    with tempfile.TemporaryDirectory() as folder:
        launch: Any = start_processes
        processes = launch(
            _process, (function, ranks, folder, given), ranks, join=False, start_method=method
        )
        try:
            while not processes.join(max(0.0, end - time.monotonic()), grace_period=1.0):
                if time.monotonic() >= end:
                    raise TimeoutError(f"the {ranks} ranks did not end in {deadline:.0f} s")
        finally:
            for process in processes.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return json.loads(Path(folder, "result").read_text())


def _process(
    rank: int, function: Callable[..., Any], ranks: int, folder: str, given: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    # torchtitan's router asks for autocast to float32, which CPUs do not have. Outputs of torch's
    # tensor parallel modules are views, of which FSDP2 warns.
    warnings.filterwarnings("ignore", message=".*(autocast|returned a view tensor)")
    found = function(rank, ranks, str(Path(folder, "store")), *given)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(rank: int, ranks: int, store: str, plan: Plan) -> list[Json]:
    """Measure all cases of a plan as one rank of a world."""
    backend = "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo"
    device = torch.device(plan.device, 0) if plan.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group(backend, store=FileStore(store, ranks), rank=rank, world_size=ranks)
    rows = []
    probe = Probe(rank)
    for case in plan.cases:
        with nullcontext() if plan.profile is None else named_waits():
            rows.append(measure(case, plan, rank, device, probe))
        if rank == 0:
            (show if plan.profile is None else show_components)(rows[-1])
    return rows


def measure(case: Case, plan: Plan, rank: int, device: torch.device, probe: Probe) -> Json:
    """Return the row of a case, from all ranks of the current world.

    Raises:
        RuntimeError: The losses or the norm of an arm differ from those of one process.
    """
    base = build_model(case.config, 0, torch.float32, device)
    expected = reference(base, case, rank, device)
    row: Json = {
        "case": case.name,
        "model": case.model,
        "layout": case.layout,
        "ranks": case.ranks,
        "tokens": case.tokens,
        "config": {name: getattr(case.config, name) for name in case.config.__slots__},
        "rows_per_rank": case.rows,
        "seq_len": case.seq_len,
        "rounds": plan.rounds,
        "notes": notes(case, device),
    }
    best: dict[str, Arm] = {}
    arms: dict[str, list[Arm]] = {}
    for side, settings in candidates(case).items():
        chosen = settings if plan.tune else settings[:1]
        arms[side], peaks = checked_arms(base, case, chosen, expected, rank, device)
        row[side] = {"candidates_peak_bytes": peaks}
    medians = medians_of([*arms["hp"], *arms["torch"]], device, probe) if plan.tune else {}
    for side, own in arms.items():
        peaks = row[side]["candidates_peak_bytes"]
        name = best_of({each.name: medians.get(each.name, 0.0) for each in own}, peaks)
        best[side] = arm = next(each for each in own if each.name == name)
        row[side] |= {
            "settings": arm.settings,
            "candidates_ms": {each.name: medians[each.name] for each in own if medians},
            "peak_bytes": peaks[name],
        }
    del arms
    rows = received_rows(best["hp"]) if case.model == "MoE" else None
    best["compute"] = compute_arm(base, case, rank, device, rows)
    row["rows_of_experts"] = rows
    del base
    if plan.profile is not None:
        steps = 3 if plan.large else 1
        names = (plan.profile, "compute")
        row["profile"] = of_slowest_rank({n: components(best[n], steps) for n in names})
        row["profiled"] = plan.profile
        return row
    bare = BareCollectives(best["hp"], best["compute"])
    found = timed([*best.values(), bare], plan.rounds, device, probe)
    times, host = slowest(found.seconds), slowest(found.host)
    row["discarded_rounds"] = found.discarded
    row["seconds"] = {name: times[arm.name] for name, arm in best.items()}
    row["seconds"]["bare"] = times[bare.name]
    if device.type == "cuda":
        row["host"] = _host({name: host[arm.name] for name, arm in best.items()})
    for side in SIDES:
        by_kind, calls = received(best[side])
        row[side] |= {"received_bytes": by_kind, "calls": calls}
    summarize(row)
    gc.collect()
    return row


def notes(case: Case, device: torch.device) -> list[str]:
    """Return notes about the peer for the report."""
    if case.cp == 1:
        return []
    mesh = torch_mesh(device.type, (case.ranks,), ("cp",))
    error = peer.context_parallel_error(mesh)
    if not error:
        return []
    return [
        f"torch's context_parallel raises here ({error}); the peer is its ring attention with the "
        "kernels for CPUs"
    ]


def reference(
    base: LanguageModel, case: Case, rank: int, device: torch.device
) -> list[list[float]]:
    """Train an unsharded model on rank 0 for three steps.

    Returns:
        The loss and the gradient norm of each step, on every rank.
    """
    found: list[Any] = [None]
    if rank == 0:
        arm = plain_arm(base, case, device)
        found = [[[x.item() for x in arm.step()] for _ in range(3)]]
    dist.broadcast_object_list(found)
    expected: list[list[float]] = found[0]
    return expected


def checked_arms(
    base: LanguageModel,
    case: Case,
    settings: Sequence[Settings],
    expected: list[list[float]],
    rank: int,
    device: torch.device,
) -> tuple[list[Arm], dict[str, int]]:
    """Create an arm for each of the settings, and compare it with one process.

    Returns:
        The arms, with a learning rate of 0; and the peak memory of each in bytes, by name. It is
        the peak of the rank with the highest one.
    """
    arms = []
    peaks = {}
    for each in settings:
        make = _maker(base, case, each, rank, device)
        arm, results, peak = with_memory(make, device)
        arm.name = f"{arm.name}: {each.name}"
        for step, (loss, norm) in enumerate(results):
            check(arm.name, case, step, [whole_loss(loss, case), number_of(norm)], expected[step])
        arm.freeze()
        peaks[arm.name] = peak
        arms.append(arm)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, peaks)
    return arms, {name: max(each[name] for each in every) for name in peaks}


def _maker(
    base: LanguageModel, case: Case, settings: Settings, rank: int, device: torch.device
) -> Callable[[], Arm]:
    return lambda: make_arm(base, case, settings, rank, device)


def check(name: str, case: Case, step: int, found: list[float], expected: list[float]) -> None:
    """Raise RuntimeError if the loss of a step, or the norm of the first, is not the expected one.

    In later steps of a mixture of experts, rounding may send a token whose router logits are almost
    equal to another expert. That changes the norm more than the loss.
    """
    for what, mine, other in zip(("loss", "gradient norm"), found, expected, strict=True):
        if (what == "loss" or step == 0) and not abs(mine - other) <= BOUND * abs(other):
            raise RuntimeError(
                f"{case.name}, {name}: {what} of step {step + 1} is {mine:.7g}, and "
                f"{other:.7g} in one process"
            )


def medians_of(arms: Sequence[Arm], device: torch.device, probe: Probe) -> dict[str, float]:
    """Return the median step of each arm in ms, by name. All arms alternate."""
    times = slowest(timed(arms, TUNING, device, probe).seconds)
    return {name: 1e3 * statistics.median(each) for name, each in times.items()}


def best_of(medians: dict[str, float], peaks: dict[str, int]) -> str:
    """Return the arm with the lowest peak memory among those that are about as fast as the fastest.

    Args:
        medians: Median step of each arm in ms.
        peaks: Peak memory of each arm in bytes.
    """
    longest = ALIKE * min(medians.values())
    return min((name for name, ms in medians.items() if ms <= longest), key=peaks.__getitem__)


def of_slowest_rank(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the figures of the rank with the longest computation.

    This rank waits least for the other ranks.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, figures)
    return max(found, key=lambda each: sum(each["compute"].values()))


def compared(ours: Sequence[float], theirs: Sequence[float]) -> Json:
    """Return medians in milliseconds, and the median and quartiles of the paired ratios.

    In a round in which the peer's figure is not above 0, the ratio counts as infinite. A median or
    quartile that would be infinite is None.
    """
    row: Json = {
        "ours_ms": 1e3 * statistics.median(ours),
        "theirs_ms": 1e3 * statistics.median(theirs),
        "ratio": None,
        "quartiles": None,
    }
    ratios = [a / b if b > 0 else math.inf for a, b in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    if math.isfinite(middle := statistics.median(ratios)):
        row["ratio"] = middle
    if math.isfinite(low) and math.isfinite(high):
        row["quartiles"] = [low, high]
    return row


def summarize(row: Json) -> None:
    """Add ``step``, ``above``, ``bare``, ``compute`` and ``tokens_per_second`` to a row."""
    ours, theirs, bare, compute = (row["seconds"][name] for name in (*SIDES, "bare", "compute"))
    above = [[a - c for a, c in zip(side, compute, strict=True)] for side in (ours, theirs, bare)]
    row["step"] = compared(ours, theirs)
    row["above"] = compared(above[0], above[1]) | {"aim": AIM}
    row["bare"] = compared(above[2], above[1])
    row["compute"] = {"ms": 1e3 * statistics.median(compute)}
    share = row["above"]["theirs_ms"] / row["step"]["theirs_ms"]
    row["step"]["aim"] = 1 - share * (1 - AIM)
    for side, key in zip(SIDES, ("ours_ms", "theirs_ms"), strict=True):
        row[side]["tokens_per_second"] = 1e3 * row["tokens"] / row["step"][key]


def _host(seconds: dict[str, list[float]]) -> Json:
    above = [
        [a - c for a, c in zip(seconds[side], seconds["compute"], strict=True)] for side in SIDES
    ]
    return compared(*above)


def host_times(rank: int, ranks: int, store: str, plan: Plan, rows: list[Json]) -> list[Json]:
    """Measure the host time of a step minus that of the computation, on fake process groups.

    Collectives take no time there, and tensors have a few elements. The backend is not gloo, so
    hp-dtensor's own operations over gloo do not count. The settings are the chosen ones.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = []
    world = plan.cases[0].ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    device = torch.device("cpu")
    for case, row in zip(plan.cases, rows, strict=True):
        small = host_case(case)
        base = build_model(small.config, 0, torch.float32)
        kinds: dict[str, Any] = {"hp": HpSettings, "torch": TorchSettings}
        arms = {}
        for side, kind in kinds.items():
            fields = {k: v for k, v in row[side]["settings"].items() if k in kind.__slots__}
            arms[side] = make_arm(base, small, kind(**fields), 0, device)
        arms["compute"] = compute_arm(base, small, 0, device)
        turns = HOST_ROUNDS if plan.large else 2
        times = timed(list(arms.values()), turns, device, Probe(rank)).seconds
        found.append(_host({name: times[arm.name] for name, arm in arms.items()}))
    return found


def show(row: Json) -> None:
    """Print the table of a case."""
    hp, other = row["hp"], row["torch"]
    print(
        f"{row['case']}: {row['tokens']:,} tokens per step, {row['rounds']} rounds, "
        f"{row['discarded_rounds']} left out"
    )
    print(f"  settings: hp {hp['settings']['name']}; torch {other['settings']['name']}")
    for note in row["notes"]:
        print(f"  note: {note}")
    names = {
        "step": "step",
        "above": "above compute",
        "bare": "bare collectives above compute",
        "host": "host time above compute",
    }
    for key, name in names.items():
        if key in row:
            _show_times(name, row[key])
    _line("compute", f"{row['compute']['ms']:.1f} ms", "", {})
    for name, unit, scale, key in (
        ("tokens/s", "", 1.0, "tokens_per_second"),
        ("peak memory", " MB", 1e-6, "peak_bytes"),
    ):
        a, b = hp[key], other[key]
        _line(name, f"{scale * a:,.0f}{unit}", f"{scale * b:,.0f}{unit}", {"ratio": a / b})
    a, b = (sum(side["received_bytes"].values()) / 1e6 for side in (hp, other))
    _line("received", f"{a:,.1f} MB", f"{b:,.1f} MB", {"ratio": a / b if b else None})
    sys.stdout.flush()


def _show_times(name: str, each: Json) -> None:
    _line(name, f"{each['ours_ms']:.1f} ms", f"{each['theirs_ms']:.1f} ms", each)
    sys.stdout.flush()


def _line(name: str, ours: str, theirs: str, each: Json) -> None:
    said = ""
    if each.get("ratio") is not None:
        said = f"ratio {each['ratio']:.3f}"
    if each.get("quartiles") is not None:
        low, high = each["quartiles"]
        said += f" ({low:.3f} to {high:.3f})"
    if each.get("aim") is not None:
        said += f", aim {each['aim']:.3f}"
    print(f"  {name:34s} {ours:>14s} {theirs:>14s}  {said}".rstrip())


def show_components(row: Json) -> None:
    """Print each component of the time above compute, on the rank with the longest computation."""
    side = row["profiled"]
    mine, floor = row["profile"][side], row["profile"]["compute"]
    print(f"{row['case']}: {side}, {row[side]['settings']['name']}; ms per step on one rank")
    for note in row["notes"]:
        print(f"  note: {note}")
    print(f"  {'':34s} {'step':>10s} {'compute':>10s} {'above':>10s}")
    order = sorted(COMPONENTS, key=lambda name: floor[name] - mine[name])
    for name in order:
        if mine[name] or floor[name]:
            above = mine[name] - floor[name]
            print(f"  {name:34s} {mine[name]:10.1f} {floor[name]:10.1f} {above:10.1f}")
    whole, compute = sum(mine.values()), sum(floor.values())
    print(f"  {'sum':34s} {whole:10.1f} {compute:10.1f} {whole - compute:10.1f}", flush=True)


def draw(rows: Sequence[Json], file: Path) -> None:
    """Draw the time above compute of both sides as bars, and the bare collectives as lines."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    sides = (("hp", "ours_ms", "#4c72b0"), ("torch", "theirs_ms", "#c0562f"))
    figure, axes = pyplot.subplots(figsize=(8, 1.0 + 0.62 * len(rows)))
    names: list[str] = []
    for number, row in enumerate(rows):
        for offset, (side, key, color) in enumerate(sides):
            place, above, step = 3 * number + offset, row["above"][key], row["step"][key]
            label = side if number == 0 else None
            axes.barh(place, above, color=color, label=label)
            said = f" {above:.0f} of {step:.0f} ms"
            axes.text(max(above, 0), place, said, va="center", fontsize=8)
        label = "bare collectives of hp" if number == 0 else None
        bare = row["bare"]["ours_ms"]
        axes.plot(
            [bare, bare],
            [3 * number - 0.4, 3 * number + 0.4],
            color="black",
            linewidth=2,
            label=label,
        )
        names.append(f"{row['model']}, {row['ranks']} ranks\n{row['layout']}")
    axes.set_yticks([3 * number + 0.5 for number in range(len(rows))], names, fontsize=8)
    axes.invert_yaxis()
    longest = max(row["above"][key] for row in rows for _, key, _ in sides)
    axes.set_xlim(0, 1.25 * max(longest, 1e-3))
    axes.set_xlabel("ms of a training step above the computation of the same ranks")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
