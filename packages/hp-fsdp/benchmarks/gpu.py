"""Check sharded models on GPUs against torch's `fully_shard`, and look at streams and host waits.

    python benchmarks/gpu.py                 on the GPUs that there are
    python benchmarks/gpu.py --device cpu    the same code on CPUs, to see that it runs

Worlds: one rank, and gloo with two and with 2 x 2 ranks on one GPU. With several GPUs, also NCCL
with one rank for each GPU, and as 2 x n/2. NCCL's groups are made as "cpu:gloo,cuda:nccl". Each
world checks:

- losses and parameters after three steps of AdamW, equal to torch's, for each mode and option;
- host waits in a step, which ``torch.cuda.set_sync_debug_mode`` turns into errors. Offloaded shards
  are waited for once, by events, at the end of backward, which it does not count;
- accesses of streams that nothing orders, as ``torch.cuda._sanitizer`` finds them;
- the streams that copies and sums run on beside the computation's, and the names in a profile;
- whether the backend averages, and from which size on a parameter is gathered into place faster
  than packed: the number for ``DIRECT_BYTES_OF``.

`gpu_speed.py` measures times and memory.
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
from arms import Block, Net, Step, ours, torchs, training
from bench_gather import KILOBYTES, cheaper_from, sweep
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from hp_dtensor import Axis, Replicate, TorchCollectives, redistribute

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from gpu_rows import Result, Rows, World, main, nccl, skipped

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# What only hp-fsdp is given, and what both are given.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exact": ({}, {}),
    "ragged": ({"layout": "ragged"}, {}),
    "offload": ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "offload, pinned": ({}, {"offload_policy": CPUOffloadPolicy()}),
    "ragged, offload, pinned": ({"layout": "ragged"}, {"offload_policy": CPUOffloadPolicy()}),
}
OPTIONS = ("float32", "bfloat16", "accumulation", "checkpointing", "compile")
BOUNDS = {"bfloat16": 2e-2}
Trained = tuple[list[float], list[Tensor]]


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
        own, shared = MODES[mode]
        return ours(self.base, self.mesh, **own, **shared, **more)

    @property
    def over_nccl(self) -> bool:
        """Return whether NCCL communicates: over gloo, the host waits and copies by itself."""
        return self.on_gpu and "nccl" in self.world.backend

    def sync(self) -> None:
        """Wait for the device, or for the other ranks."""
        if self.on_gpu:
            torch.cuda.synchronize()
        else:
            dist.barrier()


def compared(bench: Bench, mode: str, option: str) -> str | Result:
    """Compare losses and parameters after three steps with those of torch's `fully_shard`."""
    own, shared = MODES[mode]
    if option == "bfloat16":
        shared = {**shared, "mp_policy": BF16}
    base = copy.deepcopy(bench.base)
    if option == "checkpointing":
        base.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in base.blocks)
    sides = (
        three_steps(bench, ours(base, bench.mesh, **own, **shared), option),
        three_steps(bench, torchs(base, bench.mesh, tuned=True, **shared), option),
    )
    losses = [abs(a - b) / abs(b) for a, b in zip(sides[0][0], sides[1][0], strict=True)]
    starts = bench.base.parameters()
    changes = []
    for mine, theirs, start in zip(sides[0][1], sides[1][1], starts, strict=True):
        changes.append(float((mine - theirs).norm() / (theirs - start).norm()))
    found = float(torch.tensor([*losses, *changes]).max())  # NaN if any is
    # The exact layout sums the same numbers in the same order, but for several ranks over NCCL.
    exact = "ragged" not in mode and not (bench.over_nccl and bench.world.ranks > 1)
    bound = 0.0 if exact else BOUNDS.get(option, 1e-4)
    status: Any = "passed" if found <= bound else "failed"
    return Result(
        f"losses {max(losses):.1e}, changes {max(changes):.1e} from torch's", status=status
    )


def three_steps(bench: Bench, model: Any, option: str) -> Trained:
    """Train, and return the losses and whole parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    if option == "compile":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    for step in range(3):
        parts = bench.batch.chunk(2) if option == "accumulation" else (bench.batch,)
        for number, part in enumerate(parts):
            model.set_requires_gradient_sync(number == len(parts) - 1)
            loss = model(part * (step + 1)).pow(2).mean()
            loss.backward()
            losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    whole = []
    for parameter in model.parameters():
        # torch's own full_tensor() ends the process for CUDA tensors over gloo (torch 2.11).
        full: Any = redistribute(parameter.detach(), [Replicate()] * bench.mesh.ndim)
        whole.append(full.to_local().to(bench.batch.device))
    return losses, whole


def waits(step: Step) -> str:
    """Run a step in which a wait of the host is an error."""
    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def unordered(step: Step) -> str:
    """Run steps under torch's sanitizer of streams; what NCCL's own streams do it does not see."""
    from torch.cuda import _sanitizer

    step()
    sanitizer = _sanitizer.CUDASanitizer()
    sanitizer.enable()
    try:
        for _ in range(2):
            step()
    except _sanitizer.CUDASanitizerErrors as errors:
        raise AssertionError(f"{len(errors.errors)}, first: {errors.errors[0]}") from None
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
    """Check that the profile names the collectives and copies of block 1."""
    offloads = "offload_policy" in MODES[mode][1]
    events = profiled(bench, training(bench.model(mode), bench.batch))
    found = {event.name for event in events if event.name.startswith("hp_fsdp.")}
    shard, replicas = bench.world.shape[-1], bench.world.ranks // bench.world.shape[-1]
    expected = {"hp_fsdp.register_unsharded blocks.1"}
    if shard > 1:
        expected |= {f"hp_fsdp.{w} blocks.1 over shard" for w in ("all_gather", "reduce_scatter")}
    if replicas > 1:
        expected.add("hp_fsdp.all_reduce blocks.1 over replicate")
    if offloads and bench.on_gpu:
        expected |= {f"hp_fsdp.copy_{what} blocks.1" for what in ("shard", "gradients")}
    missing = sorted(expected - found)
    assert not missing, f"no {missing}"
    return f"{len(found)} names, {sorted(expected)[0]}"


# What runs beside the computation, by what the names of its kernels and copies hold.
BESIDE = {
    "copies to the GPU": ("Memcpy HtoD",),
    "copies to the CPU": ("Memcpy DtoH",),
    "NCCL": ("ncclDevKernel", "ncclKernel"),
}


def streams(bench: Bench, mode: str) -> str:
    """Say which streams carry the products, copies and collectives of a step."""
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
    assert not shared, f"on the stream of the products: {shared}; {said}"
    assert computing, f"no products in the profile: {said}"
    return said


def averages(bench: Bench) -> str | Result:
    """Check a mean over the axis, and say how it was asked for."""
    axis = Axis.of(bench.mesh, bench.mesh.ndim - 1)
    if axis.size == 1:
        return skipped("one rank, nothing is communicated")
    asked = []
    all_reduce = dist.ProcessGroup.allreduce

    def noted(group: Any, tensors: Any, options: Any) -> Any:
        asked.append("AVG" if options.reduceOp == dist.ReduceOp.AVG else "SUM")
        return all_reduce(group, tensors, options)

    given = torch.full((4,), float(axis.index), device=bench.batch.device)
    with mock.patch.object(dist.ProcessGroup, "allreduce", noted):
        (mean,) = TorchCollectives().all_reduce(axis, [given], "avg").wait()
    expected = (axis.size - 1) / 2
    right = bool((mean == expected).all()) and ("AVG" in asked[0]) == bench.over_nccl
    assert right, f"{asked[0]} gives {float(mean[0])}, expected {expected}"
    return f"{asked[0]} gives {expected}"


def threshold(bench: Bench) -> Result:
    """Measure from which size on gathering into place is cheaper than packing."""
    axis = Axis.of(bench.mesh, bench.mesh.ndim - 1)
    if not (axis.size > 1 and bench.over_nccl):
        return skipped("it needs several GPUs")
    sizes = (*KILOBYTES, 1024, 2048, 4096)
    rows = sweep(axis, sizes, bench.rounds, bench.batch.device.type, torch.cuda.synchronize)
    said = ", ".join(f"{r['kilobytes_per_rank']}: {r['direct_to_packed']:.2f}" for r in rows)
    return Result(f"from {cheaper_from(rows, rows[0]['case'])} on; direct / packed by KiB: {said}")


def checks(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    """Add the rows of one world."""
    names = ("replicate", "shard")[-len(world.shape) :]
    mesh = init_device_mesh(device.type, world.shape, mesh_dim_names=names)
    width, blocks, tokens = (512, 4, 512) if large else (64, 3, 16)
    torch.manual_seed(0)
    base = Net(Block, width, blocks).to(device)
    batch = torch.randn(tokens, width, device=device) + dist.get_rank()
    bench = Bench(world, mesh, base, batch, 20 if large else 5, device.type == "cuda")
    for option in OPTIONS:
        for mode in MODES:
            if "pinned" not in mode or bench.on_gpu:
                rows.add(f"{mode}, {option}", compared, bench, mode, option)
    for mode in ("exact", "offload, pinned") if bench.on_gpu else ("exact",):
        rows.add(f"{mode}, names in a profile", ranges, bench, mode)
    for mode in ("exact", "ragged", "offload, pinned") if bench.over_nccl else ():
        step = training(bench.model(mode), bench.batch)
        rows.add(f"{mode}, host waits", waits, step)
        rows.add(f"{mode}, unordered accesses", unordered, step)
        rows.add(f"{mode}, streams", streams, bench, mode)
    if bench.over_nccl:
        mixed = training(bench.model("exact", mp_policy=BF16), bench.batch)
        rows.add("exact, bfloat16, host waits", waits, mixed)
        rows.add("exact, bfloat16, unordered accesses", unordered, mixed)
    rows.add("mean", averages, bench)
    rows.add("packing threshold", threshold, bench)


def worlds_of(on_gpu: bool) -> list[World]:
    """Return the worlds, also those that cannot be here; on CPUs the one with most of the code."""
    if not on_gpu:
        return [World("2 x 2 ranks, gloo", "gloo", (2, 2))]
    gpus = torch.cuda.device_count()
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
    sys.exit(main("hp-fsdp", __doc__, worlds_of, checks))
