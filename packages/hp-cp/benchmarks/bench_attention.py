"""Causal attention over gloo ranks, forward and backward: all schedules against two limits.

Every round runs each arm once, in turn, on the same inputs: this package's ring, direct and gather
schedules (zigzag) and Ulysses (contiguous); torch's ring algorithm (zigzag, both ways to rotate;
``_templated_ring_attention``) with the CPU kernel passed in, since its public entry raises on CPU;
and one process alone with one thread, whose time over two cores is the limit: what no split of the
same kernels over these cores can be below. In the case ``packed`` the sequence is 16 documents
(``--long``: 64) of 128 to 2,048 tokens, cut by ``Greedy(8)`` (contiguous for Ulysses); torch's
ring, which has no documents, is left out. There one process computes each document by itself, with
one launch forward and one backward, on the parts of one split, whose backward is one copy of each
gradient: of slices it would be a tensor of zeros as long as all documents, and a sum, for each of
them.

Processor time is that of all ranks over that of one process in the same round, without what ranks
wait: it says how much more is computed and copied, also where the machine has other work to do.
Launches are the forward and backward kernels of the rank that has most of them, counted as they are
called.

While times are taken the allocator of all processes keeps what is freed, as allocators for training
do: no arm waits for the system to clear pages. Peak memory is what the arm adds to the resident set
of the fullest rank, in a run of its own, whose allocator returns what is freed, so that no arm
starts with another's. Bytes are what a rank's connections received, as the system counts them: the
mean of all ranks. Needs Linux.
"""

import argparse
import contextlib
import json
import os
import random
import socket
import stat
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate, pairwise
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
from torch.utils._python_dispatch import TorchDispatchMode

from hp_cp import Contiguous, Greedy, Layout, MaskSpec, Zigzag, context_parallel_attention

ScheduleName = Literal["gather", "direct", "ring"]
Arm = Callable[[Tensor, Tensor, Tensor], Tensor]
CORES = 2
CASES = ("causal", "packed")
TIMEOUT = timedelta(minutes=2)  # a rank that waits longer has lost its peer
DEFAULT = {"rounds": 3, "seq_len": 4096, "documents": 16, "lengths": [128, 2048]}
LONG = {"rounds": 7, "seq_len": 8192, "documents": 64, "lengths": [128, 2048]}
QUICK = {"rounds": 1, "seq_len": 512, "documents": 64, "lengths": [8, 64]}
SINGLE = "one process"
TORCH = "torch ring, all-to-all"
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


def ours(
    mesh: DeviceMesh, mask: MaskSpec, layout: Layout, schedule: ScheduleName, degree: int = 1
) -> tuple[Layout, Arm]:
    """Return this package's attention, and the cut that it takes."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(
            q,
            k,
            v,
            mesh,
            mask=mask,
            layout=layout,
            schedule=schedule,
            ulysses_degree=degree,
            seq_len=seq_len,
        )

    seq_len = mask.ends[0][-1] if mask.ends else None
    return layout, attend


def mask_of(args: argparse.Namespace) -> MaskSpec:
    """Return the mask of a case: one causal sequence, or packed documents."""
    if args.case == "causal":
        return MaskSpec(causal=True)
    draw, (shortest, longest) = random.Random(0), args.lengths
    lengths = (draw.randint(shortest, longest) for _ in range(args.documents))
    return MaskSpec(causal=True, cu_seqlens=(0, *accumulate(lengths)))


def arms_of(mesh: DeviceMesh, mask: MaskSpec) -> dict[str, tuple[Layout, Arm]]:
    """Return every side and the cut that it takes."""
    n = mesh.size()
    if mask.cu_seqlens is not None:
        return {
            "ring greedy": ours(mesh, mask, Greedy(8), "ring"),
            "direct greedy": ours(mesh, mask, Greedy(8), "direct"),
            "gather greedy": ours(mesh, mask, Greedy(8), "gather"),
            "ulysses": ours(mesh, mask, Contiguous(), "direct", n),
        }
    return {
        "ring zigzag": ours(mesh, mask, Zigzag(), "ring"),
        "direct zigzag": ours(mesh, mask, Zigzag(), "direct"),
        "gather zigzag": ours(mesh, mask, Zigzag(), "gather"),
        "ulysses": ours(mesh, mask, Contiguous(), "direct", n),
        TORCH: (Zigzag(), torch_ring(mesh, "ALL_TO_ALL")),
        "torch ring, all-gather": (Zigzag(), torch_ring(mesh, "ALL_GATHER")),
    }


def alone(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> Tensor:
    """Return the attention of one process: document by document."""
    lengths = [b - a for a, b in pairwise(mask.ends[0] if mask.ends else (0, q.shape[2]))]
    parts = [
        F.scaled_dot_product_attention(*document, is_causal=True, enable_gqa=True)  # type: ignore[misc]
        for document in zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    ]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def received_bytes() -> int:
    """Return the bytes that the TCP connections of this process have received so far."""
    total = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # what was closed since, and sockets that are not TCP's
            if stat.S_ISSOCK(file.stat().st_mode):
                with socket.socket(fileno=os.dup(int(file.name))) as connection:
                    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                total += struct.unpack_from("Q", state, 128)[0]  # tcpi_bytes_received
    return total


def peak_kib() -> int:
    """Return the peak resident set since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith("VmHWM")).split()[1])


class Launches(TorchDispatchMode):
    """Counts the kernels of attention that are called, forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and call."""
        self.count += "attention" in str(func)
        return func(*args, **(kwargs or {}))


def measure(
    rank: int, n: int, store: str, args: argparse.Namespace, rounds: int, report: str
) -> None:
    """Run all arms on one rank; rank 0 writes the report."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=FileStore(store, n), rank=rank, world_size=n, timeout=TIMEOUT
    )
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    mask = mask_of(args)
    seq_len: int = mask.ends[0][-1] if mask.ends else args.seq_len
    arms = arms_of(mesh, mask)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, heads, seq_len, args.head_size, generator=generator)
        for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)
    )
    layouts = {layout for layout, _ in arms.values()}
    places = {layout: list(layout.indices(n, seq_len, mask)[rank]) for layout in layouts}
    cuts = {
        layout: [x[:, :, rows].clone() for x in (q, k, v, grad)] for layout, rows in places.items()
    }
    if rank:
        del q, k, v, grad
    seconds: dict[str, list[float]] = {name: [] for name in [SINGLE, *arms]}
    worked: dict[str, list[float]] = {name: [] for name in [SINGLE, *arms]}
    counted: dict[str, dict[str, int]] = {name: {} for name in arms}
    for round_ in range(rounds + 1):
        for name, (layout, attend) in arms.items():
            *mine, share = cuts[layout]
            local = [x.detach().requires_grad_() for x in mine]
            Path("/proc/self/clear_refs").write_text("5")
            before, carried, counts = peak_kib(), received_bytes(), counted[name]
            if round_ == 0:  # warms up allocators, connections and kernels
                with Launches() as launches:
                    attend(*local).backward(share)
                counts["launches"] = launches.count
                continue
            dist.barrier()
            start, begun = time.perf_counter(), time.process_time()
            attend(*local).backward(share)
            worked[name].append(time.process_time() - begun)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            counts["memory"] = max(counts.get("memory", 0), peak_kib() - before)
            counts["received"] = received_bytes() - carried
        dist.barrier()
        if rank == 0:
            a, b, c = (x.clone().requires_grad_() for x in (q, k, v))
            start, begun = time.perf_counter(), time.process_time()
            alone(a, b, c, mask).backward(grad)
            if round_:
                worked[SINGLE].append(time.process_time() - begun)
                seconds[SINGLE].append(time.perf_counter() - start)
        dist.barrier()
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, (worked, counted))
    if rank == 0:
        Path(report).write_text(json.dumps([seconds, everyone]))
    dist.barrier()
    dist.destroy_process_group()


def summarize(n: int, seconds: dict[str, list[float]], ranks: Any, ranks_in_memory: Any) -> Any:
    """Print and return a row per arm: median seconds, and ratios paired round by round.

    ``ranks`` are processor seconds and counts of all ranks, ``ranks_in_memory`` the same of the run
    in which memory was taken.
    """
    rows = []
    print(f"{n} ranks, median of {len(seconds[SINGLE])} rounds; limit = {SINGLE} / {min(n, CORES)}")
    single = ranks[0][0][SINGLE]
    for name in list(seconds)[1:]:
        limits = [t / min(n, CORES) for t in seconds[SINGLE]]
        row: dict[str, Any] = {"ranks": n, "arm": name}
        row["seconds"] = statistics.median(seconds[name])
        against = {"limit": limits}
        if TORCH in seconds:
            against["torch_ring"] = seconds[TORCH]
        for other, times in against.items():
            ratios = sorted(a / b for a, b in zip(seconds[name], times, strict=True))
            row[f"vs_{other}"] = statistics.median(ratios)
            row[f"vs_{other}_spread"] = [ratios[0], ratios[-1]]
        of_all = map(sum, zip(*(worked[name] for worked, _ in ranks), strict=True))
        row["processor"] = statistics.median(a / b for a, b in zip(of_all, single, strict=True))
        counts = [counted[name] for _, counted in ranks]
        row["launches"] = max(mine["launches"] for mine in counts)
        row["received_mib"] = sum(mine["received"] for mine in counts) / n / 2**20
        peaks = [counted[name]["memory"] for _, counted in ranks_in_memory]
        row["added_peak_mib"] = max(peaks) / 1024
        rows.append(row)
        ratios_shown = "".join(
            f"   vs {other} {row[f'vs_{other}']:.3f} "
            f"[{row[f'vs_{other}_spread'][0]:.3f}, {row[f'vs_{other}_spread'][1]:.3f}]"
            for other in against
        )
        print(
            f"  {name:24s} {row['seconds']:8.4f} s{ratios_shown}   "
            f"processor {row['processor']:.3f}   launches {row['launches']}   "
            f"peak +{row['added_peak_mib']:.1f} MiB   received {row['received_mib']:.1f} MiB",
            flush=True,
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
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="small sizes, one round")
    size.add_argument("--long", action="store_true", help="the documented sizes, seven rounds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--documents", type=int)
    parser.add_argument("--lengths", type=int, nargs=2)
    args = parser.parse_args()
    for name, value in (QUICK if args.quick else LONG if args.long else DEFAULT).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rows = []
    for n in args.ranks:
        for case in args.cases:
            chosen = argparse.Namespace(**vars(args), case=case)
            seconds, ranks = run(n, chosen, args.rounds, KEEP_FREED)
            _, in_memory = run(n, chosen, 1, RETURN_FREED)
            print(f"{case}, ", end="", flush=True)
            rows += [{"case": case, **row} for row in summarize(n, seconds, ranks, in_memory)]
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        answer = {"name": "attention", "settings": settings, "rows": rows}
        args.json.write_text(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
