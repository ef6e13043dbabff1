"""Check and measure expert parallel layers on GPUs, beside torch's plain operators, in one table.

    python benchmarks/gpu.py                 on the GPUs that there are
    python benchmarks/gpu.py --device cpu    the same code on CPUs, to see that it runs

Worlds: one rank, and gloo with two and with four ranks on one GPU, for what several ranks compute;
NCCL with one rank for each GPU where there are several. In each world, for each dispatcher:

- outputs and gradients of a layer in one process, by plain operators in float64;
- host waits of a forward, which ``torch.cuda.set_sync_debug_mode`` counts, against their number in
  the README;
- steps of the layer in turn, plain operators, ours, plain, ours, as medians of paired ratios, and
  the highest memory above rest. The plain layer sorts, sends by torch's own differentiable
  all-to-all, loops over the experts and adds by ``index_add``.

Also the experts alone, and what `choose_dispatcher` prices: an operator, a small all-to-all and the
bandwidth of a large one. A check that fails is a row that says so, and the script then ends with 1.
Rows that need a GPU are skipped on CPUs and say so. Times on CPUs mean nothing here, nor do those
of gloo on GPUs.
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
    Hierarchical,
    Local,
    MoE,
    Padded,
    TokenDispatcher,
)

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from gpu_rows import Rows, World, main, nccl

Step = Callable[[], object]
WAITS = {"Local": 0, "AllToAll": 1, "Dedup": 1, "Hierarchical": 1, "Padded": 0}
DTYPES = {"float32": (torch.float32, 1e-4), "bfloat16": (torch.bfloat16, 5e-2)}
EXPERTS, TOP_K = 16, 4
SKIPPED = "SKIPPED: it needs a GPU"


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


def gated(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Return what one expert makes of its rows."""
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def plain_layer(layer: MoE, x: Tensor, ranks: int) -> Tensor:
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
    owner = torch.arange(here, device=x.device).repeat(ranks).repeat_interleave(got)
    by_expert = owner.argsort(stable=True)
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


def parity(bench: Bench, name: str, kind: str) -> str:
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
    return f"{'' if worst < bound else 'FAILED: '}{worst:.1e} of one process's output and gradients"


def waits(bench: Bench, name: str) -> str:
    """Count the host's waits in a second forward and backward of a bfloat16 layer."""
    if not bench.on_gpu:
        return SKIPPED
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
    return f"{'FAILED: ' if counted and number > most else ''}{number}, at most {most}"


def trained(layer: Callable[[Tensor], Tensor], x: Tensor) -> Step:
    """Return a forward and backward."""
    return lambda: layer(x).float().square().mean().backward()


def ratio(bench: Bench, name: str) -> str:
    """Run our step and the plain one in turn; return the median of the paired ratios."""
    x, plain = bench.batch.bfloat16().requires_grad_(), copy.deepcopy(bench.base).bfloat16()
    ranks = 1 if name == "Local" else bench.world.ranks
    sides = [
        trained(bench.layer(name, torch.bfloat16), x),
        trained(lambda rows: plain_layer(plain, rows, ranks), x),
    ]
    return compared(bench, *sides)


def compared(bench: Bench, ours: Step, theirs: Step) -> str:
    """Return the median and the quartiles of the ratios of neighbouring steps."""
    ratios = []
    for _ in range(bench.rounds + 2):
        seconds = []
        for step in (ours, theirs):
            bench.sync()
            started = time.perf_counter()
            step()
            bench.sync()
            seconds.append(time.perf_counter() - started)
        ratios.append(seconds[0] / seconds[1])
    low, middle, high = statistics.quantiles(ratios[2:], n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f}) of the plain operators' time"


def memory(bench: Bench, name: str) -> str:
    """Return the highest memory above rest of the second step."""
    if not bench.on_gpu:
        return SKIPPED
    step = trained(bench.layer(name, torch.bfloat16), bench.batch.bfloat16().requires_grad_())
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    rest = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return f"{(torch.cuda.max_memory_allocated() - rest) / 2**20:.1f} MB above rest"


def experts(bench: Bench) -> str:
    """Compare the experts alone with a loop of linear layers, in time."""
    ours = copy.deepcopy(bench.base.experts).bfloat16()
    theirs = copy.deepcopy(ours)
    rows = bench.batch.bfloat16().repeat(TOP_K, 1).requires_grad_()
    counts = torch.full((EXPERTS,), rows.shape[0] // EXPERTS, device=bench.device)

    def loop(x: Tensor) -> Tensor:
        gate, up = theirs.gate_up_proj.unbind(1)
        parts = (gate.unbind(), theirs.down_proj.unbind(), up.unbind())
        each = zip(x.chunk(EXPERTS), *parts, strict=True)
        return torch.cat([gated(part, w1, w2, w3) for part, w1, w2, w3 in each])

    return compared(bench, trained(lambda x: ours(x, counts), rows), trained(loop, rows))


def operator(bench: Bench) -> str:
    """Measure the host's time for an operator on a few numbers: `choose_dispatcher` prices it."""
    x = torch.ones(8, device=bench.device, requires_grad=True)
    for _ in range(2):
        bench.sync()
        started = time.perf_counter()
        y = x
        for _ in range(1000):
            y = y * 1.0
        spent = time.perf_counter() - started
    return f"{1e6 * spent / 1000:.1f} us"


def exchange(bench: Bench) -> str:
    """Measure a small all-to-all and the bandwidth of a large one, forward alone."""
    axis = Axis.of(bench.mesh, 0)
    if axis.size == 1:
        return "one rank, nothing is communicated"
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
    return f"{1e6 * found[0]:.0f} us a call, {moved / found[1] / 1e9:.2f} GB/s"


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
        rows.add(f"{name}, step", ratio, bench, name)
        rows.add(f"{name}, memory", memory, bench, name)
    if world.ranks == 1:
        rows.add("experts alone", experts, bench)
        rows.add("an operator", operator, bench)
    rows.add("an all-to-all", exchange, bench)


def worlds_of(on_gpu: bool) -> list[World]:
    """Return the worlds, also those that cannot be here."""
    gpus = torch.cuda.device_count() if on_gpu else 0
    most = max(n for n in (2, 4, 8, 16) if n <= max(gpus, 2))  # they divide the experts
    lack = None if gpus > 1 else "it needs two GPUs"
    return [
        World("1 rank", nccl(on_gpu)),
        World("2 ranks, gloo", "gloo", (2,)),
        World("4 ranks, gloo", "gloo", (4,)),
        World(f"{most} ranks, NCCL", nccl(on_gpu), (most,), lack),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, worlds_of, checks))
