"""Check and measure sharded models on GPUs, torch's `fully_shard` beside ours, in one table.

    python benchmarks/gpu.py                 on the GPUs that there are
    python benchmarks/gpu.py --device cpu    the same code on CPUs, to see that it runs

Worlds: one rank, and gloo with two and with 2 x 2 ranks on one GPU, for what several ranks compute;
NCCL with one rank for each GPU where there are several, also as 2 x n/2. NCCL's groups are made as
"cpu:gloo,cuda:nccl". In each world:

- the gradients of one process, in float32 and with bfloat16 parameters, in every layout and mode;
- host waits in a step, which ``torch.cuda.set_sync_debug_mode`` turns into errors. Offloaded shards
  are waited for once, by events, at the end of backward, which it does not count;
- accesses of streams that nothing orders, as ``torch.cuda._sanitizer`` finds them;
- the streams that copies and sums run on beside the computation's, and the names in a profile;
- which gradients are fused, whether the backend averages, and from which size on a parameter is
  gathered into place faster than packed: the number for ``DIRECT_BYTES_OF``;
- steps in turn, torch, ours, torch, ours, as medians of paired ratios, and the highest memory above
  rest.

A check that fails is a row that says so, and the script then ends with 1. Times on CPUs mean
nothing here, nor do those of gloo on GPUs.
"""

import copy
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from arms import Block, Net, Step, ours, rows_of, timed, torchs, training
from bench_gather import KILOBYTES, cheaper_from, sweep
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from hp_dtensor import Axis, TorchCollectives
from hp_fsdp import Ring

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from gpu_rows import Rows, World, main, nccl

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "exact, accumulate": {"grads": "accumulate"},
    "exact, fused": {"grads": "fused"},
    "exact, Ring(2)": {"ring": 2},
    "ragged": {"layout": "ragged"},
    "ragged, fused": {"layout": "ragged", "grads": "fused"},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "offload, not pinned": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "ragged, offload": {"layout": "ragged", "offload_policy": CPUOffloadPolicy()},
}
KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({}, 1e-4),
    "bfloat16": ({"mp_policy": BF16}, 5e-2),
}
TIMED = ("exact", "exact, fused", "exact, Ring(2)", "ragged", "ragged, fused", "offload")


@dataclass
class Bench:
    """What the checks of one world share."""

    world: World
    mesh: DeviceMesh
    base: Net
    batch: Tensor
    rounds: int
    on_gpu: bool

    def model(self, mode: str, **more: Any) -> Any:
        """Shard a copy of the model in one of the modes."""
        options = {**MODES[mode], **more}
        ring = Ring(options.pop("ring")) if "ring" in options else None
        return ours(self.base, self.mesh, ring, **options)

    def sync(self) -> None:
        """Wait for the device, or for the other ranks."""
        if self.on_gpu:
            torch.cuda.synchronize()
        else:
            dist.barrier()


def whole(gradient: Any) -> Tensor:
    """Return the gradient of the whole parameter."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # type: ignore[no-any-return]


def parity(bench: Bench, mode: str, kind: str) -> str:
    """Compare the gradients of two steps, the second added to the first, with one process's."""
    more, bound = KINDS[kind]
    model, plain, batch = bench.model(mode, **more), copy.deepcopy(bench.base), bench.batch
    parts = [torch.empty_like(batch) for _ in range(bench.world.ranks)]
    dist.all_gather(parts, batch)
    for _ in range(2):
        model(batch).pow(2).mean().backward()
        for part in parts:
            (plain(part).pow(2).mean() / len(parts)).backward()
    found = []
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if p.grad is None or q.grad is None:
            raise RuntimeError("a parameter without gradient")
        difference = whole(p.grad.to(batch.device)).float() - q.grad
        found.append(difference.norm() / q.grad.norm())
    worst = float(torch.stack(found).max())  # NaN if any is
    return f"{'' if worst < bound else 'FAILED: '}{worst:.1e} of one process's gradients"


def trained(bench: Bench, mode: str) -> str:
    """Compare what three steps of SGD change with what they change in one process."""
    model, plain, batch = bench.model(mode), copy.deepcopy(bench.base), bench.batch
    parts = [torch.empty_like(batch) for _ in range(bench.world.ranks)]
    dist.all_gather(parts, batch)
    sides = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    for _ in range(3):
        with torch.no_grad():  # gathers that no backward follows, before the shards change
            model(batch)
        model(batch).pow(2).mean().backward()
        for part in parts:
            (plain(part).pow(2).mean() / len(parts)).backward()
        for optimizer in sides:
            optimizer.step()
            optimizer.zero_grad()
    found = []
    with torch.no_grad():
        each = zip(model.parameters(), plain.parameters(), bench.base.parameters(), strict=True)
        for p, q, start in each:
            change = q - start
            difference = whole(p.to(batch.device)) - q
            found.append(difference.norm() / change.norm())
    worst = float(torch.stack(found).max())
    verdict = "" if worst < 1e-3 else "FAILED: "
    return f"{verdict}{worst:.1e} of the change in one process"


def waits(bench: Bench, step: Step) -> str:
    """Run a step in which a wait of the host is an error."""
    if not bench.on_gpu:
        return "not asked on CPUs"
    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return f"FAILED: {error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def unordered(bench: Bench, step: Step) -> str:
    """Run steps under torch's sanitizer of streams; what NCCL's own streams do it does not see."""
    if not bench.on_gpu:
        return "not asked on CPUs"
    from torch.cuda import _sanitizer

    step()
    sanitizer = _sanitizer.CUDASanitizer()
    sanitizer.enable()
    try:
        for _ in range(2):
            step()
    except _sanitizer.CUDASanitizerErrors as errors:
        return f"FAILED: {len(errors.errors)}, first: {str(errors.errors[0])[:300]}"
    finally:
        sanitizer.disable()
    return "none"


def profiled(bench: Bench, step: Step) -> Any:
    """Return the events of the third step."""
    for _ in range(2):
        step()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if bench.on_gpu else []
    with torch.profiler.profile(activities=kinds) as profiler:
        step()
        bench.sync()
    return profiler.events()


def ranges(bench: Bench, mode: str) -> str:
    """Look for the names of what a block communicates and copies, with its path."""
    offloads = "offload_policy" in MODES[mode]
    events = profiled(bench, training(bench.model(mode), bench.batch))
    found = {event.name for event in events if event.name.startswith("hp_fsdp.")}
    shard, replicas = bench.world.shape[-1], bench.world.ranks // bench.world.shape[-1]
    expected = {"hp_fsdp.show_unsharded blocks.1"}
    if shard > 1:
        expected |= {f"hp_fsdp.{w} blocks.1 over shard" for w in ("all_gather", "reduce_scatter")}
    if replicas > 1:
        expected.add("hp_fsdp.all_reduce blocks.1 over replicate")
    if offloads and bench.on_gpu:
        expected |= {f"hp_fsdp.copy_{what} blocks.1" for what in ("shard", "gradients")}
    missing = sorted(expected - found)
    return f"FAILED: no {missing}" if missing else f"{len(found)} names, {sorted(expected)[0]}"


# What runs beside the computation, by what the names of its kernels and copies hold.
BESIDE = {
    "copies to the GPU": ("Memcpy HtoD",),
    "copies to the CPU": ("Memcpy DtoH",),
    "NCCL": ("ncclDevKernel", "ncclKernel"),
}


def streams(bench: Bench, mode: str) -> str:
    """Say which streams carry the products, copies and collectives of a step."""
    if not bench.on_gpu:
        return "not asked on CPUs"
    found: dict[str, Counter[int]] = {}
    for event in profiled(bench, training(bench.model(mode), bench.batch)):
        if str(event.device_type).endswith("CUDA"):
            kinds = [k for k, names in BESIDE.items() if any(n in event.name for n in names)]
            product = any(n in event.name for n in ("gemm", "cutlass", "nvjet"))
            for kind in [*kinds, *(["products"] if product else [])]:
                found.setdefault(kind, Counter())[event.device_resource_id] += 1
    said = ", ".join(f"{kind} on {dict(counts)}" for kind, counts in sorted(found.items()))
    computing = set(found.get("products", ()))
    # The batch and single numbers may travel on the stream of the computation.
    shared = [k for k in BESIDE if k in found and found[k].most_common(1)[0][0] in computing]
    return f"{f'FAILED: beside nothing: {shared}; ' if shared else ''}{said or 'nothing seen'}"


def fused(bench: Bench, mode: str) -> str:
    """Say how many gradients are fused, and why others are not."""
    report = bench.model(mode).plan_report()
    every = [p for group in report.groups for p in group.parameters]
    reasons = Counter(p.unfused for p in every if not p.fused)
    said = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    return f"{sum(p.fused for p in every)} of {len(every)} fused; {said}"


def averages(bench: Bench) -> str:
    """Check a mean over the axis, and say how it was asked for."""
    axis = Axis.of(bench.mesh, bench.mesh.ndim - 1)
    if axis.size == 1:
        return "one rank, nothing is communicated"
    asked = []
    all_reduce = dist.all_reduce

    def noted(tensor: Tensor, op: Any, **more: Any) -> Any:
        asked.append(str(op))
        return all_reduce(tensor, op=op, **more)

    given = torch.full((4,), float(axis.index), device=bench.batch.device)
    with mock.patch.object(dist, "all_reduce", noted):
        (mean,) = TorchCollectives().all_reduce(axis, [given], "avg").wait()
    expected = (axis.size - 1) / 2
    over_nccl = bench.on_gpu and "nccl" in bench.world.backend
    right = bool((mean == expected).all()) and ("AVG" in asked[0]) == over_nccl
    return f"{'' if right else 'FAILED: '}{asked[0]} gives {float(mean[0])}, expected {expected}"


def threshold(bench: Bench) -> str:
    """Measure from which size on gathering into place is cheaper than packing."""
    axis = Axis.of(bench.mesh, bench.mesh.ndim - 1)
    if axis.size == 1:
        return "one rank, nothing is gathered"
    over_nccl = bench.on_gpu and "nccl" in bench.world.backend
    sizes = (*KILOBYTES, 1024, 2048, 4096) if over_nccl else KILOBYTES
    device = bench.batch.device.type
    sync = torch.cuda.synchronize if bench.on_gpu else bench.sync
    rows = sweep(axis, sizes, bench.rounds, device, sync)
    said = ", ".join(f"{r['kilobytes_per_rank']}: {r['direct_to_packed']:.2f}" for r in rows)
    return (
        f"direct from {cheaper_from(rows, rows[0]['case'])} on; direct / packed by KiB per rank: "
        f"{said}"
    )


def ratio(bench: Bench, one: Step, other: Step) -> str:
    """Run both in turn, to their end on the device; return the median of the paired ratios."""

    def to_end(step: Step) -> Step:
        def run() -> None:
            step()
            bench.sync()

        return run

    sides = {"hp-fsdp": to_end(one), "torch": to_end(other)}
    (row,) = rows_of("step", timed(sides, bench.rounds, bench.sync), ("torch",))
    low, high = row["quartiles"]
    return f"{row['ratio']:.3f} ({low:.3f} to {high:.3f}) of torch's time"


def memory(bench: Bench, step: Step) -> str:
    """Return the highest memory above rest of the third step."""
    for _ in range(2):
        step()
    if not bench.on_gpu:
        return "not asked on CPUs"
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    rest = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return f"{(torch.cuda.max_memory_allocated() - rest) / 2**20:.1f} MB above rest"


def checks(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    """Add the rows of one world."""
    names = ("replicate", "shard")[-len(world.shape) :]
    mesh = init_device_mesh(device.type, world.shape, mesh_dim_names=names)
    width, blocks, tokens, rounds = (2048, 8, 2048, 20) if large else (128, 3, 32, 5)
    torch.manual_seed(0)
    base = Net(Block, width, blocks).to(device)
    batch = torch.randn(tokens, width, device=device) + dist.get_rank()
    bench = Bench(world, mesh, base, batch, rounds, device.type == "cuda")
    for mode in MODES:
        for kind in KINDS:
            rows.add(f"{mode}, {kind}", parity, bench, mode, kind)
        rows.add(f"{mode}, trained", trained, bench, mode)
    for mode in ("exact", "offload"):
        rows.add(f"{mode}, profile", ranges, bench, mode)
        rows.add(f"{mode}, streams", streams, bench, mode)
    for mode in ("exact, fused", "ragged, fused"):
        rows.add(f"{mode}, plan", fused, bench, mode)
    rows.add("mean", averages, bench)
    rows.add("packing threshold", threshold, bench)
    policy = CPUOffloadPolicy(pin_memory=bench.on_gpu)
    theirs = {
        False: training(torchs(copy.deepcopy(base), bench.mesh, tuned=True), bench.batch),
        True: training(
            torchs(copy.deepcopy(base), bench.mesh, tuned=True, offload_policy=policy), bench.batch
        ),
    }
    for offloads, step in theirs.items():
        rows.add(f"torch{', offload' if offloads else ''}, memory", memory, bench, step)
    for mode in TIMED:
        step = training(bench.model(mode), bench.batch)
        rows.add(f"{mode}, step", ratio, bench, step, theirs["offload_policy" in MODES[mode]])
        rows.add(f"{mode}, memory", memory, bench, step)
        rows.add(f"{mode}, host waits", waits, bench, step)
        rows.add(f"{mode}, unordered", unordered, bench, step)
    mixed = training(bench.model("exact", mp_policy=BF16), bench.batch)
    rows.add("exact, bfloat16, host waits", waits, bench, mixed)
    rows.add("exact, bfloat16, unordered", unordered, bench, mixed)


def worlds_of(on_gpu: bool) -> list[World]:
    """Return the worlds, also those that cannot be here."""
    gpus = torch.cuda.device_count() if on_gpu else 0
    two, four = (None if gpus > n - 1 else f"it needs {n} GPUs" for n in (2, 4))
    pairs = max(2, gpus // 2)
    return [
        World("1 rank", nccl(on_gpu)),
        World("2 ranks, gloo", "gloo", (2,)),
        World("2 x 2 ranks, gloo", "gloo", (2, 2)),
        World(f"{max(2, gpus)} ranks, NCCL", nccl(on_gpu), (max(2, gpus),), two),
        World(f"2 x {pairs} ranks, NCCL", nccl(on_gpu), (2, pairs), four),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, worlds_of, checks))
