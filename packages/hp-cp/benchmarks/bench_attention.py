"""Causal attention over gloo ranks, forward and backward: all schedules against two limits.

Every round runs each arm once, in turn, on the same inputs: this package's ring, direct and gather
schedules (zigzag) and Ulysses (contiguous); torch's ring algorithm (zigzag, both ways to rotate;
``_templated_ring_attention``) with the CPU kernel passed in, since its public entry raises on CPU;
and one process alone with one thread, whose time over two cores is the limit. While times are taken
the allocator of all processes keeps what is freed, as allocators for training do: no arm waits for
the system to clear pages. Peak memory is what the arm adds to the resident set of the fullest rank,
in a run of its own, whose allocator returns what is freed, so that no arm starts with another's.
Bytes are what the loopback device carried per rank, so nothing else should use it. Needs Linux.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.multiprocessing.spawn import spawn

from hp_cp import Contiguous, Layout, MaskSpec, Zigzag, context_parallel_attention

ScheduleName = Literal["gather", "direct", "ring"]
Arm = Callable[[Tensor, Tensor, Tensor], Tensor]
CORES = 2
SINGLE = "one process"
KEEP_FREED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}


class TorchRing(torch.autograd.Function):
    """torch's ring attention on CPU kernels; load balance on, as its users run it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Any:
        """Run torch's forward."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        run: Any = ring._templated_ring_attention
        out, lse = run(group, 2, kernel, q, k, v, is_causal=True, dropout_p=0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run torch's backward."""

        def kernel(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
            op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            out, lse, causal = given["out"], given["logsumexp"], given["is_causal"]
            return op(given["grad_out"], query, key, value, out, lse, 0.0, causal)

        q, k, v, out, lse = ctx.saved_tensors
        run: Any = ring._templated_ring_attention_backward
        return (*run(ctx.group, 2, kernel, grads[0], "grad_out", q, k, v, out, lse, True), None)


def torch_ring(mesh: DeviceMesh, rotate: str) -> Arm:
    """Return torch's ring with one of its ways to rotate keys and values."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ring._cp_options.enable_load_balance = True
        ring._cp_options.rotate_method = ring._RotateMethod[rotate]
        out: Tensor = TorchRing.apply(q, k, v, mesh.get_group())  # type: ignore[no-untyped-call]
        return out

    return attend


def ours(mesh: DeviceMesh, layout: Layout, schedule: ScheduleName, degree: int = 1) -> Arm:
    """Return this package's attention."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(
            q,
            k,
            v,
            mesh,
            mask=MaskSpec(causal=True),
            layout=layout,
            schedule=schedule,
            ulysses_degree=degree,
        )

    return attend


def loopback_bytes() -> int:
    """Return the bytes received by the loopback device so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(x for x in lines if x.strip().startswith("lo:")).partition(":")[2].split()[0])


def peak_kib() -> int:
    """Return the peak resident set since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith("VmHWM")).split()[1])


def measure(
    rank: int, n: int, store: str, args: argparse.Namespace, rounds: int, report: str
) -> None:
    """Run all arms on one rank; rank 0 writes the report."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, n), rank=rank, world_size=n)
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    arms: dict[str, tuple[Layout, Arm]] = {
        "ring zigzag": (Zigzag(), ours(mesh, Zigzag(), "ring")),
        "direct zigzag": (Zigzag(), ours(mesh, Zigzag(), "direct")),
        "gather zigzag": (Zigzag(), ours(mesh, Zigzag(), "gather")),
        "ulysses": (Contiguous(), ours(mesh, Contiguous(), "direct", n)),
        "torch ring, all-to-all": (Zigzag(), torch_ring(mesh, "ALL_TO_ALL")),
        "torch ring, all-gather": (Zigzag(), torch_ring(mesh, "ALL_GATHER")),
    }
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, heads, args.seq_len, args.head_size, generator=generator)
        for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)
    )
    seconds: dict[str, list[float]] = {name: [] for name in [SINGLE, *arms]}
    memory: dict[str, int] = {}
    received: dict[str, float] = {}
    for round_ in range(rounds + 1):
        for name, (layout, attend) in arms.items():
            mine = list(layout.indices(n, args.seq_len)[rank])
            local = [x[:, :, mine].clone().requires_grad_() for x in (q, k, v)]
            share = grad[:, :, mine].clone()
            Path("/proc/self/clear_refs").write_text("5")
            before, carried = peak_kib(), loopback_bytes()
            dist.barrier()
            start = time.perf_counter()
            attend(*local).backward(share)
            dist.barrier()
            elapsed = time.perf_counter() - start
            if round_ == 0:  # warms up allocators, connections and kernels
                continue
            memory[name] = max(memory.get(name, 0), peak_kib() - before)
            received[name] = (loopback_bytes() - carried) / n
            seconds[name].append(elapsed)
        dist.barrier()
        if rank == 0:
            a, b, c = (x.clone().requires_grad_() for x in (q, k, v))
            start = time.perf_counter()
            out = F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
            out.backward(grad)
            if round_:
                seconds[SINGLE].append(time.perf_counter() - start)
        dist.barrier()
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, memory)
    if rank == 0:
        peaks = {name: max(each[name] for each in everyone) for name in arms}
        Path(report).write_text(json.dumps([seconds, peaks, received]))
    dist.barrier()
    dist.destroy_process_group()


def summarize(n: int, seconds: dict[str, list[float]], peaks: Any, received: Any) -> list[Any]:
    """Print and return a row per arm: median seconds, and ratios paired round by round."""
    rows = []
    print(f"{n} ranks, median of {len(seconds[SINGLE])} rounds; limit = {SINGLE} / {min(n, CORES)}")
    for name in peaks:
        limits = [t / min(n, CORES) for t in seconds[SINGLE]]
        row: dict[str, Any] = {"ranks": n, "arm": name}
        row["seconds"] = statistics.median(seconds[name])
        against = {"limit": limits, "torch_ring": seconds["torch ring, all-to-all"]}
        for other, times in against.items():
            ratios = sorted(a / b for a, b in zip(seconds[name], times, strict=True))
            row[f"vs_{other}"] = statistics.median(ratios)
            row[f"vs_{other}_spread"] = [ratios[0], ratios[-1]]
        row["added_peak_mib"] = peaks[name] / 1024
        row["received_mib"] = received[name] / 2**20
        rows.append(row)
        print(
            f"  {name:24s} {row['seconds']:8.4f} s   vs limit {row['vs_limit']:.3f} "
            f"[{row['vs_limit_spread'][0]:.3f}, {row['vs_limit_spread'][1]:.3f}]   "
            f"vs torch ring, all-to-all {row['vs_torch_ring']:.3f} "
            f"[{row['vs_torch_ring_spread'][0]:.3f}, {row['vs_torch_ring_spread'][1]:.3f}]   "
            f"peak +{row['added_peak_mib']:.1f} MiB   received {row['received_mib']:.1f} MiB"
        )
    return rows


def run(n: int, args: argparse.Namespace, rounds: int, allocator: dict[str, str]) -> list[Any]:
    """Return what `measure` reports of ``n`` processes with these settings of glibc's allocator."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        os.environ.update(allocator)
        try:
            spawn(measure, (n, f"{folder}/store", args, rounds, str(report)), nprocs=n)
        finally:
            for name in allocator:
                del os.environ[name]
        answer: list[Any] = json.loads(report.read_text())
    return answer


def main() -> None:
    """Run on 2 and 4 ranks, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seq_len = 1, 512
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rows = []
    for n in args.ranks:
        seconds, _, received = run(n, args, args.rounds, KEEP_FREED)
        _, peaks, _ = run(n, args, 1, RETURN_FREED)
        rows += summarize(n, seconds, peaks, received)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        answer = {"name": "attention", "settings": settings, "rows": rows}
        args.json.write_text(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
