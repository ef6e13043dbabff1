"""Measure a stack of Llama blocks on GPUs, hp-fsdp beside torch's `fully_shard`.

    python benchmarks/gpu_speed.py                 on the GPUs that there are
    python benchmarks/gpu_speed.py --device cpu    the same code on CPUs, to see that it runs

Blocks of grouped-query attention by ``scaled_dot_product_attention`` and SwiGLU, in two widths,
eager and compiled; bfloat16 parameters, float32 reductions, fused AdamW. torch's side is tuned:
asynchronous unshard, prefetch of the next block in both directions, no reshard of the last block.
One rank with NCCL, or one for each GPU.

Rows: the time of a step to its end on the device, the host's time, the highest memory in a step,
and the number of kernels.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from arms import Net, Step, ours, torchs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from gpu_rows import Result, Rows, World, interleaved, main, nccl, peak_memory, skipped

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HEAD = 128


class LlamaBlock(nn.Module):
    """Grouped-query attention and SwiGLU with RMS norms, without rotary positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = max(2, width // HEAD), max(1, width // HEAD // 4)
        self.size = width // self.heads
        kv = 2 * self.kv_heads * self.size
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, kv, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        hidden = 256 * round(width * 8 / 3 / 256) or width
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, width]`` to the same shape."""
        batch, seq, _ = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, seq, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(y).view(batch, seq, 2, self.kv_heads, self.size).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, seq, -1))
        y = self.norm2(x)
        mixed: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return mixed


@dataclass
class Case:
    """A width, on one device, as both sides train it."""

    device: torch.device
    rounds: int
    sides: tuple[Step, Step]
    held: tuple[float, float]  # MiB between steps: parameters, their gradients' room, the optimizer


def training(model: nn.Module, batch: Tensor, compiles: bool) -> Step:
    """Return one step with AdamW."""
    if compiles:
        blocks: Any = model.blocks
        for block in blocks:
            block.compile(backend="inductor" if batch.is_cuda else "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(batch).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def host_time(case: Case) -> Result:
    """Return the host's milliseconds until a step is launched, the device being idle before it."""
    found: list[list[float]] = [[], []]
    for _ in range(case.rounds):
        for times, step in zip(found, case.sides, strict=True):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - began))
    ratio = statistics.median(a / b for a, b in zip(*found, strict=True))
    mine, theirs = (f"{statistics.median(times):.2f} ms" for times in found)
    return Result(mine, theirs, ratio)


def memory(case: Case) -> Result:
    """Return the peak memory of a step, including the memory held between steps."""

    sides = zip(case.held, case.sides, strict=True)
    mine, theirs = (held + peak_memory(step) for held, step in sides)
    return Result(f"{mine:.0f} MiB", f"{theirs:.0f} MiB", mine / theirs)


def allocated(device: torch.device) -> float:
    """Return the MiB that tensors take on a GPU."""
    return torch.cuda.memory_allocated() / 2**20 if device.type == "cuda" else 0.0


def kernels(case: Case) -> Result:
    """Return how many kernels, copies and fills a step launches."""

    def count(step: Step) -> int:
        step()
        torch.cuda.synchronize()
        kinds = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profiler:
            step()
            torch.cuda.synchronize()
        return sum(str(event.device_type).endswith("CUDA") for event in profiler.events() or ())

    mine, theirs = (count(step) for step in case.sides)
    return Result(str(mine), str(theirs), mine / theirs)


def checks(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    """Add the rows of one world."""
    mesh = init_device_mesh(device.type, world.shape, mesh_dim_names=("shard",))
    sizes = {2048: (8, 4, 2048), 4096: (4, 2, 4096)} if large else {64: (2, 1, 32)}
    for width, (blocks, batch_size, seq) in sizes.items():
        for compiles in (False, True):
            kind = "compiled" if compiles else "eager"
            names = [f"{width}, {kind}, {what}" for what in ("step", "memory", "host", "kernels")]
            torch.manual_seed(0)
            with device:
                base = Net(LlamaBlock, width, blocks)
                batch = torch.randn(batch_size, seq, width, dtype=torch.bfloat16)
            steps: list[Step] = []
            held: list[float] = []
            case = None
            gc.collect()  # what is freed later would count as memory of less
            for shard, options in ((ours, {}), (torchs, {"tuned": True})):
                before = allocated(device)
                step = training(shard(base, mesh, mp_policy=BF16, **options), batch, compiles)
                step()
                steps.append(step)
                held.append(allocated(device) - before)
            del base
            case = Case(device, 20 if large else 3, (steps[0], steps[1]), (held[0], held[1]))
            rows.add(names[0], interleaved, *case.sides, case.rounds, device)
            measures: tuple[Callable[[Case], Result], ...] = (memory, host_time, kernels)
            for name, measure in zip(names[1:], measures, strict=True):
                on_gpu = device.type == "cuda"
                rows.add(name, measure if on_gpu else lambda _: skipped("it needs a GPU"), case)


def worlds_of(on_gpu: bool) -> list[World]:
    """Return one rank, and one for each GPU if there are several."""
    gpus = torch.cuda.device_count() if on_gpu else 1
    worlds = [World("1 rank", nccl(on_gpu))]
    return worlds + [World(f"{gpus} ranks, NCCL", nccl(on_gpu), (gpus,))] * (gpus > 1)


if __name__ == "__main__":
    sys.exit(main("hp-fsdp, speed", __doc__, worlds_of, checks))
