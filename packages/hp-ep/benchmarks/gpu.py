"""Check and measure expert parallel layers on GPUs, beside torch's plain operators, in one table.

    python benchmarks/gpu.py                 on the GPUs that there are
    python benchmarks/gpu.py --device cpu    the same code on CPUs, to see that it runs

Worlds: one rank, and gloo with two and with four ranks on one GPU, for what several ranks compute;
NCCL with one rank for each GPU where there are several. In each world, for each dispatcher:

- outputs and gradients of a layer in one process, by plain operators in float64;
- host waits of a forward and backward, which ``torch.cuda.set_sync_debug_mode`` counts, against
  their number in `guide-dispatchers.md` of the documentation;
- time and peak memory of a step, compared with the plain layer.

The plain layer is torchtitan's way, restated: it sorts the rows by expert, sends them by torch's
differentiable all-to-all, multiplies by ``torch._grouped_mm`` on GPUs from capability 9.0 on, else
in a loop over the experts, and adds by ``index_add``. Routing is even, as a random router has it,
and skewed, with three of four tokens on the same four of 16 experts.

Also the experts alone, float8 products against the same rounding on the CPU, and what
`choose_dispatcher` prices: an operator, a small all-to-all and the bandwidth of a large one. Times
on CPUs, and of gloo on GPUs, are not meaningful.
"""

import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor import Axis, TorchCollectives
from hp_ep import (
    AllToAll,
    Dedup,
    ExpertParallel,
    GroupedExperts,
    Hierarchical,
    Local,
    MoE,
    Padded,
    TokenDispatcher,
)

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from gpu_rows import Result, Rows, World, interleaved, main, nccl, peak_memory, skipped

Step = Callable[[], object]
WAITS = {"Local": 0, "AllToAll": 1, "Dedup": 1, "Hierarchical": 1, "Padded": 0}
DTYPES = {"float32": (torch.float32, 1e-4), "bfloat16": (torch.bfloat16, 5e-2)}
EXPERTS, TOP_K = 16, 4
NO_GPU = skipped("it needs a GPU")


@dataclass
class Bench:
    """What the checks of one world share."""

    world: World
    mesh: DeviceMesh
    nodes: DeviceMesh
    base: MoE
    batch: Tensor
    rounds: int
    on_gpu: bool

    @property
    def device(self) -> torch.device:
        """Return where everything is computed."""
        return self.batch.device

    def dispatcher(self, name: str) -> TokenDispatcher:
        """Make a dispatcher over all ranks, with room for every token."""
        if name == "Local":
            return Local(EXPERTS)
        if name == "Hierarchical":
            return Hierarchical(self.nodes, EXPERTS)
        if name == "Padded":
            return Padded(self.mesh, EXPERTS, capacity=self.batch.shape[0])
        return AllToAll(self.mesh, EXPERTS) if name == "AllToAll" else Dedup(self.mesh, EXPERTS)

    def layer(self, name: str, dtype: torch.dtype) -> MoE:
        """Spread a copy of the layer over all ranks."""
        layer = copy.deepcopy(self.base).to(dtype)
        if name != "Local":
            style = ExpertParallel(self.dispatcher(name), token_axes=self.mesh)
            style.apply(layer, self.mesh)
        return layer

    def sync(self) -> None:
        """Wait for the device, or for the other ranks."""
        if self.on_gpu:
            torch.cuda.synchronize()
        else:
            dist.barrier()

    def groups(self, dtype: torch.dtype) -> bool:
        """Return whether there are grouped products of a dtype."""
        able = self.on_gpu and torch.cuda.get_device_capability()[0] >= 9
        return able and dtype == torch.bfloat16


def products(rows: Tensor, counts: Tensor, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Compute the experts of sorted rows by torch's grouped products."""
    ends = counts.cumsum(0).to(torch.int32)
    grouped: Any = torch._grouped_mm
    gate, down, up = (weight.transpose(-2, -1) for weight in parts)
    hidden = F.silu(grouped(rows, gate, offs=ends)) * grouped(rows, up, offs=ends)
    done: Tensor = grouped(hidden, down, offs=ends)
    return done


def gated(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Return what one expert makes of its rows."""
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def plain_layer(layer: MoE, x: Tensor, ranks: int, grouped: bool = False) -> Tensor:
    """Compute the layer by torch's own operators, experts split over all ``ranks`` or all here."""
    weights, ids = layer.router(x)
    order = ids.flatten().argsort(stable=True)
    tokens, counts = order // TOP_K, torch.bincount(ids.flatten(), minlength=EXPERTS)
    rows, parts = x[tokens], [p.chunk(ranks)[dist.get_rank() % ranks] for p in stacked(layer)]
    got = counts
    if ranks > 1:
        group: Any = dist.group.WORLD
        got = torch.empty_like(counts)
        dist.all_to_all_single(got, counts)
        send, receive = (c.view(ranks, -1).sum(1).tolist() for c in (counts, got))
        rows = all_to_all_single_autograd(rows, receive, send, group)
    here = EXPERTS // ranks
    total = rows.shape[0]  # given, so that the host need not wait for the sum
    owners = torch.arange(here, device=x.device).repeat(ranks)
    owner = owners.repeat_interleave(got, output_size=total)
    by_expert = owner.argsort(stable=True)
    if grouped:
        done = products(rows[by_expert], got.view(ranks, here).sum(0), parts)
    else:
        sizes = got.view(ranks, here).sum(0).tolist()
        each = zip(rows[by_expert].split(sizes), *parts, strict=True)
        done = torch.cat([gated(row, w1, w2, w3) for row, w1, w2, w3 in each])
    rows = torch.empty_like(done).index_copy(0, by_expert, done)
    if ranks > 1:
        rows = all_to_all_single_autograd(rows, send, receive, group)
    scaled = rows * weights.flatten()[order][:, None].to(rows.dtype)
    return torch.zeros_like(x).index_add(0, tokens, scaled)


def stacked(layer: MoE) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three weights of all experts."""
    gate, up = layer.experts.gate_up_proj.unbind(1)
    return gate, layer.experts.down_proj, up


def parity(bench: Bench, name: str, kind: str) -> Result:
    """Compare output and gradients with those of one process in float64."""
    dtype, bound = DTYPES[kind]
    layer = bench.layer(name, dtype)
    # The same router decides for both sides: another dtype may choose other experts.
    plain = copy.deepcopy(bench.base).to(dtype).double()
    x = bench.batch.to(dtype, copy=True).requires_grad_()
    wide = x.detach().double().requires_grad_()
    weights, ids = layer.router(x)
    vars(plain.router)["forward"] = lambda _: (weights.detach().double(), ids)
    vars(layer.router)["forward"] = lambda _: (weights.detach(), ids)
    y, expected = layer(x), plain_layer(plain, wide, 1)
    y.float().square().mean().backward()
    expected.square().mean().backward()
    pairs = [(y, expected), (x.grad, wide.grad)]
    weights_of = (layer.experts.parameters(), plain.experts.parameters())
    for ours, theirs in zip(*weights_of, strict=True):
        mine: Any = ours.grad
        whole: Any = theirs.grad
        if name != "Local":
            dist.all_reduce(whole)
            mine, whole = mine.to_local(), whole.chunk(bench.world.ranks)[dist.get_rank()]
        pairs.append((mine, whole))
    found = []
    for a, b in pairs:
        if a is None or b is None:
            raise RuntimeError("an input without gradient")
        found.append((a.double() - b).norm() / b.norm().clamp(min=1e-30))
    worst = float(torch.stack(found).detach().max())  # NaN if any is
    said = f"{worst:.1e} of one process's output and gradients"
    return Result(said, status="passed" if worst < bound else "failed")


def waits(bench: Bench, name: str) -> Result:
    """Count the host's waits in a second forward and backward of a bfloat16 layer."""
    if not bench.on_gpu:
        return NO_GPU
    layer, x = bench.layer(name, torch.bfloat16), bench.batch.bfloat16().requires_grad_()
    layer(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    number = sum("synchronizing CUDA operation" in str(warning.message) for warning in seen)
    # What gloo itself waits for is not ours.
    most = WAITS[name] + (torch.cuda.get_device_capability()[0] not in (9, 10))
    counted = "nccl" in bench.world.backend
    passed = not counted or number <= most
    return Result(f"{number}, at most {most}", status="passed" if passed else "failed")


def trained(layer: Callable[[Tensor], Tensor], x: Tensor) -> Step:
    """Return a forward and backward."""
    return lambda: layer(x).float().square().mean().backward()


def skew(layer: MoE) -> None:
    """Let three of four tokens choose the first experts, whatever the router chose."""
    router = layer.router

    def choose(x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = type(router).forward(router, x)
        most = (torch.arange(x.shape[0], device=x.device) % 4 > 0)[:, None]
        return weights, torch.where(most, torch.arange(TOP_K, device=x.device), ids)

    vars(router)["forward"] = choose


def step_time(bench: Bench, name: str, skewed: bool) -> Result:
    """Compare our step with the plain layer's."""
    x, plain = bench.batch.bfloat16().requires_grad_(), copy.deepcopy(bench.base).bfloat16()
    layer = bench.layer(name, torch.bfloat16)
    if skewed:
        skew(layer)
        skew(plain)
    ranks = 1 if name == "Local" else bench.world.ranks
    grouped = bench.groups(torch.bfloat16)
    theirs = trained(lambda rows: plain_layer(plain, rows, ranks, grouped), x)
    return interleaved(trained(layer, x), theirs, bench.rounds, bench.device)


def memory(bench: Bench, name: str) -> Result:
    """Compare the highest memory of a step above what is held between steps."""
    if not bench.on_gpu:
        return NO_GPU
    x, plain = bench.batch.bfloat16().requires_grad_(), copy.deepcopy(bench.base).bfloat16()
    ranks = 1 if name == "Local" else bench.world.ranks
    grouped = bench.groups(torch.bfloat16)

    mine = peak_memory(trained(bench.layer(name, torch.bfloat16), x))
    theirs = peak_memory(trained(lambda rows: plain_layer(plain, rows, ranks, grouped), x))
    return Result(f"{mine:.0f} MiB", f"{theirs:.0f} MiB", mine / theirs)


def experts(bench: Bench) -> Result:
    """Compare the experts alone with torch's grouped products, or a loop where there are none."""
    ours = copy.deepcopy(bench.base.experts).bfloat16()
    theirs = copy.deepcopy(ours)
    rows = bench.batch.bfloat16().repeat(TOP_K, 1).requires_grad_()
    counts = torch.full((EXPERTS,), rows.shape[0] // EXPERTS, device=bench.device)

    def plain(x: Tensor) -> Tensor:
        gate, up = theirs.gate_up_proj.unbind(1)
        if bench.groups(torch.bfloat16):
            return products(x, counts, (gate, theirs.down_proj, up))
        parts = (gate.unbind(), theirs.down_proj.unbind(), up.unbind())
        each = zip(x.chunk(EXPERTS), *parts, strict=True)
        return torch.cat([gated(part, w1, w2, w3) for part, w1, w2, w3 in each])

    sides = trained(lambda x: ours(x, counts), rows), trained(plain, rows)
    return interleaved(*sides, bench.rounds, bench.device)


def float8(bench: Bench) -> Result:
    """Compare float8 products with the CPU's, which round alike and multiply one by one."""
    torch.manual_seed(0)
    here = GroupedExperts(128, 256, EXPERTS, float8=True).bfloat16()
    there = copy.deepcopy(here).to(bench.device)
    rows = torch.randn(EXPERTS * 16, 128).bfloat16()
    counts = torch.full((EXPERTS,), 16)
    found = []
    for layer, device in ((there, bench.device), (here, torch.device("cpu"))):
        x = rows.to(device, copy=True).requires_grad_()
        y = layer(x, counts.to(device))
        y.float().square().mean().backward()
        grads = [p.grad for p in (x, *layer.parameters())]
        found.append([t.detach().float().cpu() for t in (y, *grads) if t is not None])
    pairs = zip(*found, strict=True)
    worst = float(torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max())
    said = f"{worst:.1e} of the CPU's output and gradients"
    return Result(said, status="passed" if worst < 2e-2 else "failed")


def operator(bench: Bench) -> Result:
    """Measure the host's time for an operator on a few numbers: `choose_dispatcher` prices it."""
    x = torch.ones(8, device=bench.device, requires_grad=True)
    for _ in range(2):
        bench.sync()
        started = time.perf_counter()
        y = x
        for _ in range(1000):
            y = y * 1.0
        spent = time.perf_counter() - started
    return Result(f"{1e6 * spent / 1000:.1f} us")


def exchange(bench: Bench) -> Result:
    """Measure a small all-to-all and the bandwidth of a large one, forward alone."""
    axis = Axis.of(bench.mesh, 0)
    if axis.size == 1:
        return skipped("one rank, nothing is communicated")
    found = []
    for number in (axis.size, axis.size * bench.batch.numel()):
        sent, seconds = torch.ones(number, device=bench.device), []
        for _ in range(bench.rounds):
            bench.sync()
            started = time.perf_counter()
            TorchCollectives().all_to_all(axis, sent).wait()
            bench.sync()
            seconds.append(time.perf_counter() - started)
        found.append(statistics.median(seconds))
    moved = 4 * bench.batch.numel() * (axis.size - 1)
    return Result(f"{1e6 * found[0]:.0f} us a call, {moved / found[1] / 1e9:.2f} GB/s")


def checks(world: World, device: torch.device, large: bool, rows: Rows) -> None:
    """Add the rows of one world."""
    inside = 2 if world.ranks % 2 == 0 else 1
    mesh = init_device_mesh(device.type, world.shape, mesh_dim_names=("ep",))
    shape = (world.ranks // inside, inside)
    nodes = init_device_mesh(device.type, shape, mesh_dim_names=("node", "inside"))
    width, tokens, rounds = (2048, 4096, 20) if large else (64, 32, 3)
    torch.manual_seed(0)
    base = MoE(width, 2 * width, EXPERTS, TOP_K, device=device)
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(tokens, width, device=device)
    bench = Bench(world, mesh, nodes, base, batch, rounds, device.type == "cuda")
    for name in WAITS:
        if name == "Local" and world.ranks > 1:
            continue
        for kind in DTYPES:
            rows.add(f"{name}, {kind}", parity, bench, name, kind)
        rows.add(f"{name}, host waits", waits, bench, name)
    if world.ranks == 1:
        rows.add("float8 products", float8, bench)
    names = [name for name in WAITS if (name == "Local") == (world.ranks == 1)]
    for name in names if large or not bench.on_gpu else ():
        rows.add(f"{name}, even routing, step", step_time, bench, name, False)
        rows.add(f"{name}, skewed routing, step", step_time, bench, name, True)
        rows.add(f"{name}, memory", memory, bench, name)
    if world.ranks == 1:
        rows.add("experts alone", experts, bench)
        rows.add("an operator", operator, bench)
    rows.add("an all-to-all", exchange, bench)


def worlds_of(on_gpu: bool) -> list[World]:
    """Return the worlds, also those that cannot be here; on CPUs those with most of the code."""
    if not on_gpu:
        return [World("1 rank", "gloo"), World("2 ranks, gloo", "gloo", (2,))]
    gpus = torch.cuda.device_count()
    most = max(n for n in (2, 4, 8, 16) if n <= max(gpus, 2))  # they divide the experts
    lack = None if gpus > 1 else "it needs two GPUs"
    return [
        World("1 rank", nccl(on_gpu)),
        World("2 ranks, gloo", "gloo", (2,)),
        World("4 ranks, gloo", "gloo", (4,)),
        World(f"{most} ranks, NCCL", nccl(on_gpu), (most,), lack),
    ]


if __name__ == "__main__":
    sys.exit(main("hp-ep", __doc__, worlds_of, checks))
