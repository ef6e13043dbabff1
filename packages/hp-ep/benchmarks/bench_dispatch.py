"""Dispatch and combine, forward and backward, against torchtitan's all-to-all dispatcher.

Bytes are counted by the same instrument for all sides: what rank 0 receives from other ranks in one
step, forward and backward, by all collectives that torch runs.

    python bench_dispatch.py [--quick] [--json FILE] [--minutes 3.5] [--deadline SECONDS]

All sides run in the same gloo ranks (one thread each) in random order within each round, on the
same tokens, weights and expert ids, and their outputs and gradients are compared first. The other
side gets its counts per expert for free (its router has them), runs its plain-tensor path, and in
the rows with experts computes with this package's experts; there this side has the experts weigh
their rows, as its layer does. What both sides must do is timed alone beside them: the all-to-alls
of the rows without ``Dedup``, and the grouped products. Each line has the median of the ratios of
one round, their tenth and ninetieth percentile, and the aim. As many rounds are made as fit into
the minutes, 5 to 15. Times on gloo say something about copies, calls and host time, nothing about a
GPU: most of a large copy's time is the system's, which makes the pages of new memory.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import Case, dispatcher_config, is_missing, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from hp_ep import AllToAll, Dedup, GroupedExperts

Times = dict[str, list[list[float]]]
Step = Callable[[Tensor, Tensor], Tensor]
Compute = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _aim(case: Case, arm: str) -> float | None:
    """Return the ratio that this package wants to be below."""
    if arm not in ("AllToAll", "Dedup"):
        return None
    return 0.9 if case.hidden else {"AllToAll": 0.65, "Dedup": 0.40}[arm]


def _plain(ranks: int, tokens: int, hidden: int, skew: float = 0.0) -> Case:
    return Case(ranks=ranks, tokens=tokens, dim=512, hidden=hidden, experts=64, top_k=8, skew=skew)


CASES = [
    _plain(2, 2048, 0),
    _plain(2, 2048, 0, 6.0),
    _plain(2, 1024, 1024),
    _plain(4, 2048, 0),
    _plain(4, 1024, 1024),
]
QUICK = [Case(ranks=2, tokens=64, dim=16, hidden=hidden, experts=8, top_k=2) for hidden in (0, 32)]
FEWEST, MOST = 5, 15


def main() -> int:
    """Run all cases and print one line per arm; 1 where the other side is not there."""
    parser = argparse.ArgumentParser(description="dispatch + combine against torchtitan's")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--deadline", type=float, help="seconds for the ranks of one size (600, quick: 35)"
    )
    parser.add_argument(
        "--minutes", type=float, help="for all rounds of all cases (3.5, quick: none)"
    )
    options = parser.parse_args()
    minutes = options.minutes or (0.0 if options.quick else 3.5)
    deadline = options.deadline or (35.0 if options.quick else 600.0)
    if is_missing("bench_dispatch"):
        return 1
    rows = []
    every = QUICK if options.quick else CASES
    # Starting ranks and comparing sides take a part of the time.
    seconds = 0.8 * 60 * minutes / len(every)
    print("gloo, one thread per rank; torchtitan: plain-tensor path, counts for free")
    for size, group in itertools.groupby(every, lambda c: c.ranks):
        cases = list(group)
        found = run_ranks(_times, size, cases, seconds, deadline=deadline)[0]
        for case, times in zip(cases, found, strict=True):
            row = _row(case, times)
            rows.append(row)
            print(case)
            for name, arm in row["arms"].items():
                aim = "" if arm["aim"] is None else f", aim {arm['aim']:.2f}"
                print(
                    f"  {name:9s} wall {arm['ms']:8.1f} ms  ratio {arm['ratio']:.3f} "
                    f"({arm['ratio_low']:.3f} .. {arm['ratio_high']:.3f}) of {arm['rounds']}{aim}"
                    f"  CPU, all ranks "
                    f"{arm['cpu_s']:.3f} s  ratio {arm['cpu_ratio']:.3f}  "
                    f"received {arm['bytes'] / 2**20:.1f} MiB",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps({"name": "ep_dispatch", "rows": rows}, indent=2))
    return 0


def _row(case: Case, times: Times) -> dict[str, Any]:
    theirs = times["theirs"]
    arms = {}
    for name, ours in times.items():
        wall = sorted(a[0] / b[0] for a, b in zip(ours, theirs, strict=True))
        arms[name] = {
            "ms": 1e3 * statistics.median(t[0] for t in ours),
            "ratio": statistics.median(wall),
            "ratio_low": wall[len(wall) // 10],
            "ratio_high": wall[-1 - len(wall) // 10],
            "cpu_s": statistics.median(t[1] for t in ours),
            "cpu_ratio": statistics.median(a[1] / b[1] for a, b in zip(ours, theirs, strict=True)),
            "bytes": ours[0][2],
            "rounds": len(ours),
            "aim": _aim(case, name),
        }
    return asdict(case) | {"arms": arms}


def _times(rank: int, mesh: DeviceMesh, cases: list[Case], seconds: float) -> list[Times]:
    return [_case_times(rank, case, mesh, seconds) for case in cases]


def _case_times(rank: int, case: Case, mesh: DeviceMesh, seconds: float) -> Times:
    torch.manual_seed(rank)
    logits = torch.randn(case.tokens, case.experts)
    logits += case.skew * torch.linspace(1, 0, case.experts)
    chosen, ids = logits.softmax(-1).topk(case.top_k)
    weights = (chosen / chosen.sum(-1, keepdim=True)).requires_grad_()
    x = torch.randn(case.tokens, case.dim, requires_grad=True)
    grad = torch.randn(case.tokens, case.dim)
    compute = _experts(case)
    arms = {
        "theirs": _theirs(case, mesh, ids, compute),
        "AllToAll": _ours(AllToAll(mesh, case.experts), ids, compute, case.hidden > 0),
        "Dedup": _ours(Dedup(mesh, case.experts), ids, compute, case.hidden > 0),
    }
    _compare(arms, x, weights, grad)
    arms |= _floors(case, mesh, ids)
    received = {name: _received(step, x, weights, grad) for name, step in arms.items()}
    times: Times = {name: [] for name in arms}
    shuffle = random.Random(case.tokens)  # the same on every rank
    started, late = time.monotonic(), torch.zeros(1)
    for done in range(MOST + 1):
        for name in shuffle.sample(sorted(arms), len(arms)):
            times[name].append([*_timed(arms[name], x, weights, grad), received[name]])
        late.fill_(time.monotonic() - started > seconds)
        dist.broadcast(late, 0)
        if done >= FEWEST and late:
            break
    return {name: values[1:] for name, values in times.items()}  # the first round warms up


def _experts(case: Case) -> Compute:
    if case.hidden == 0:
        return lambda rows, _counts, _weights: rows * 2
    experts = GroupedExperts(case.dim, case.hidden, case.experts // case.ranks)
    return lambda rows, counts, weights: experts(rows, counts, weights)


def _ours(dispatcher: AllToAll | Dedup, ids: Tensor, compute: Compute, weigh_rows: bool) -> Step:
    def step(x: Tensor, weights: Tensor) -> Tensor:
        pending = dispatcher.start_dispatch(x, weights, ids, weigh_rows=weigh_rows)
        rows, counts, state = pending.wait()
        return dispatcher.combine(compute(rows, counts, state.row_weights), state)

    return step


def _theirs(case: Case, mesh: DeviceMesh, ids: Tensor, compute: Compute) -> Step:
    config = dispatcher_config(mesh.size(), case.experts, case.top_k)
    dispatcher = config.build()
    dispatcher.wire_meshes(ep_mesh=mesh)
    counts_here = torch.bincount(ids.view(-1), minlength=case.experts)

    def step(x: Tensor, weights: Tensor) -> Tensor:
        rows, counts, state = dispatcher.dispatch(x, weights, ids, counts_here)
        result: Tensor = dispatcher.combine(compute(rows, counts, None), state, x)
        return result

    return step


def _floors(case: Case, mesh: DeviceMesh, ids: Tensor) -> dict[str, Step]:
    """Return what takes part of the time on both sides, alone: no ratio can be below theirs.

    The four all-to-alls of rows, or the six grouped products of the experts.
    """
    size, group = mesh.size(), mesh.get_group()
    counts = torch.bincount(ids.view(-1), minlength=case.experts)
    came = torch.empty_like(counts)
    dist.all_to_all_single(came, counts, group=group)
    send, receive = (each.view(size, -1).sum(1).tolist() for each in (counts, came))
    here, there = torch.randn(sum(send), case.dim), torch.randn(sum(receive), case.dim)

    def exchange(x: Tensor, weights: Tensor) -> Tensor:
        for _ in range(2):
            rows = torch.empty_like(there)
            dist.all_to_all_single(rows, here, receive, send, group=group)
            back = torch.empty_like(here)
            dist.all_to_all_single(back, rows, send, receive, group=group)
        return x * weights.sum()

    if not case.hidden:
        return {"exchange": exchange}
    local = came.view(size, -1).sum(0)
    ends, number = local.cumsum(0, dtype=torch.int32), sum(receive)
    shape = case.experts // size, 2 * case.hidden, case.dim
    gate_up, down = torch.randn(shape), torch.randn(shape[0], case.dim, case.hidden)
    wide, hidden = torch.randn(number, 2 * case.hidden), torch.randn(number, case.hidden)

    def products(x: Tensor, weights: Tensor) -> Tensor:
        for a, b in (
            (there, gate_up.mT),
            (hidden, down.mT),
            (there, down),
            (wide, gate_up),
            (there.t(), hidden),
            (wide.t(), there),
        ):
            F.grouped_mm(a, b, offs=ends)
        return x * weights.sum()

    return {"exchange": exchange, "products": products}


def _compare(arms: dict[str, Step], x: Tensor, weights: Tensor, grad: Tensor) -> None:
    results = {
        name: (y, *torch.autograd.grad(y, (x, weights), grad))
        for name, y in ((name, step(x, weights)) for name, step in arms.items())
    }
    for name, ours in results.items():
        for a, b in zip(ours, results["theirs"], strict=True):
            if (a - b).abs().max() > 1e-5 * b.abs().max():
                raise RuntimeError(f"{name} does not compute the same as the other side")


class _Received(TorchDispatchMode):
    """Counts what all-to-alls bring from other ranks, whichever of torch's ways they go."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if "alltoall_base_" in name:  # output, input, group, splits of both
            self._add(args[0], args[3])
        elif "all_to_all_single" in name:  # input, splits of output and input, group
            self._add(result, args[1])
        elif any(word in name for word in ("all_reduce", "all_gather", "reduce_scatter")):
            raise RuntimeError(f"{name} is not counted")
        return result

    def _add(self, output: Tensor, splits: list[int]) -> None:
        size = dist.get_world_size()
        mine = splits[dist.get_rank()] if splits else output.shape[0] // size
        row = output[:1].numel() * output.element_size() if len(output) else 0
        self.bytes += (len(output) - mine) * row


def _received(step: Step, x: Tensor, weights: Tensor, grad: Tensor) -> float:
    with _Received() as counted:
        step(x, weights).backward(grad)
    return float(counted.bytes)


def _timed(step: Step, x: Tensor, weights: Tensor, grad: Tensor) -> list[float]:
    """Return seconds between barriers, and CPU seconds of all ranks."""
    dist.barrier()
    started, cpu = time.perf_counter(), time.process_time()
    x.grad = weights.grad = None
    step(x, weights).backward(grad)
    dist.barrier()
    seconds = time.perf_counter() - started
    used = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(used)
    return [seconds, used.item()]


if __name__ == "__main__":
    sys.exit(main())
