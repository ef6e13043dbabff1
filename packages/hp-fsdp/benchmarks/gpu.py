"""Check and measure sharded models on GPUs, torch's `fully_shard` beside ours, in one table.

    python benchmarks/gpu.py                 on the GPUs that there are
    python benchmarks/gpu.py --device cpu    the same code on CPUs, to see that it runs

Worlds: NCCL with one rank; gloo with two ranks on one GPU, for what several ranks compute; NCCL
with one rank for each GPU where there are several. In each: the gradients of one process, in
float32 and with bfloat16 parameters, in every layout and mode; steps in turn, torch, ours, torch,
ours, as medians of paired ratios; the highest memory above rest; host waits in a step, which
``torch.cuda.set_sync_debug_mode`` turns into errors. A check that fails is a row that says so, and
the script then ends with 1. Times on CPUs mean nothing here.
"""

import argparse
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from arms import Block, Net, Step, ours, rows_of, timed, torchs, training
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from hp_fsdp import Ring

Row = tuple[str, str, str]  # world, what, result
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "exact, fused": {"grads": "fused"},
    "exact, Ring(2)": {"ring": 2},
    "ragged": {"layout": "ragged"},
    "ragged, fused": {"layout": "ragged", "grads": "fused"},
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


def sharded(base: Net, mesh: Any, mode: str, **more: Any) -> Any:
    """Shard a copy of the model in one of the modes."""
    options = {**MODES[mode], **more}
    ring = Ring(options.pop("ring")) if "ring" in options else None
    return ours(base, mesh, ring, **options)


def whole(gradient: Any) -> Tensor:
    """Return the gradient of the whole parameter."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # type: ignore[no-any-return]


def error_of(model: nn.Module, plain: nn.Module, batch: Tensor, ranks: int) -> float:
    """Return the largest relative difference of a gradient to that of one process."""
    model(batch).pow(2).mean().backward()
    for parameter in plain.parameters():
        parameter.grad = None
    parts = [torch.empty_like(batch) for _ in range(ranks)]
    dist.all_gather(parts, batch)
    for part in parts:
        (plain(part).pow(2).mean() / ranks).backward()
    worst = 0.0
    for (_, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        found, expected = whole(p.grad).to(batch.device).float(), q.grad
        worst = max(worst, float((found - expected).norm() / expected.norm()))
        p.grad = None
    return worst


def ratio_of(one: Step, other: Step, sync: Step, rounds: int) -> str:
    """Run both in turn, to their end on the device; return the median of the paired ratios."""

    def whole_step(step: Step) -> Step:
        def run() -> None:
            step()
            sync()

        return run

    times = timed({"hp-fsdp": whole_step(one), "torch": whole_step(other)}, rounds, sync)
    (row,) = rows_of("step", times, ("torch",))
    low, high = row["quartiles"]
    return f"{row['ratio']:.3f} ({low:.3f} to {high:.3f}) of torch's time"


def memory_of(step: Step, on_gpu: bool) -> float:
    """Return the highest memory above rest of the third step, in MB; 0 on CPUs."""
    for _ in range(2):
        step()
    if not on_gpu:
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    rest = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - rest) / 2**20


def waits_of(step: Step, on_gpu: bool) -> str:
    """Run a step in which a wait of the host is an error."""
    if not on_gpu:
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


def checks(rank: int, world: str, backend: str, ranks: int, given: dict[str, Any]) -> list[Row]:
    """Return the rows of one world, as this rank sees them."""
    on_gpu = given["device"] == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group(backend)
    mesh = init_device_mesh(given["device"], (ranks,))
    torch.manual_seed(0)
    base = Net(Block, given["width"], given["blocks"]).to(given["device"])
    batch = torch.randn(given["tokens"], given["width"], device=given["device"])
    batch += rank
    rows: list[Row] = []
    for mode in MODES:
        for kind, policy, bound in (("float32", None, 1e-4), ("bfloat16", BF16, 5e-2)):
            more = {} if policy is None else {"mp_policy": policy}
            try:
                found = error_of(sharded(base, mesh, mode, **more), base, batch, ranks)
                verdict = "" if found < bound else "FAILED: "
                result = f"{verdict}{found:.1e} of one process's gradients"
            except Exception as error:  # noqa: BLE001 - a row of the table, and the end of the run
                result = f"FAILED: {type(error).__name__}: {error}"
            rows.append((world, f"{mode}, {kind}", result))
    sync = torch.cuda.synchronize if on_gpu else dist.barrier
    theirs = training(torchs(copy.deepcopy(base), mesh, tuned=True), batch)
    rows.append((world, "torch, memory", f"{memory_of(theirs, on_gpu):.1f} MB above rest"))
    for mode in ("exact", "exact, fused", "exact, Ring(2)", "ragged", "ragged, fused"):
        step = training(sharded(base, mesh, mode), batch)
        rows.append((world, f"{mode}, step", ratio_of(step, theirs, sync, given["rounds"])))
        rows.append((world, f"{mode}, memory", f"{memory_of(step, on_gpu):.1f} MB above rest"))
        rows.append((world, f"{mode}, host waits", waits_of(step, on_gpu)))
    return rows


def serve(
    rank: int, world: str, backend: str, ranks: int, port: int, given: dict[str, Any], to: Any
) -> None:
    """Be one rank of a world; rank 0 sends the rows."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks)
    )
    rows = checks(rank, world, backend, ranks, given)
    if rank == 0:
        to.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Run all worlds, print the table, and return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("no GPU here; --device cpu runs the same code on CPUs")
        return 1
    small = arguments.quick or not on_gpu
    given = {
        "device": arguments.device,
        "width": 128 if small else 2048,
        "blocks": 3 if small else 8,
        "tokens": 32 if small else 2048,
        "rounds": 5 if small else 20,
    }
    single = "nccl" if on_gpu else "gloo"
    worlds = [("1 rank", single, 1), ("2 ranks, gloo", "gloo", 2)]
    if on_gpu and (gpus := torch.cuda.device_count()) > 1:
        worlds.append((f"{gpus} ranks, NCCL", "nccl", gpus))
    context = mp.get_context("spawn")
    rows: list[Row] = []
    for number, (world, backend, ranks) in enumerate(worlds):
        queue: Any = context.SimpleQueue()
        given_to = (world, backend, ranks, 29500 + number, given, queue)
        mp.start_processes(serve, given_to, nprocs=ranks, start_method="spawn")
        rows += queue.get()
    for world, what, result in rows:
        print(f"{world:18} {what:28} {result}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any(result.startswith("FAILED") for _, _, result in rows))


if __name__ == "__main__":
    sys.exit(main())
