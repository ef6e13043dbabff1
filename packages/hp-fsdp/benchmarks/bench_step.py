"""Time a training step against torch's fully_shard, and host overhead on fake groups.

Both sides run in the same processes, one step each in turn. torch is given its defaults and, as
"tuned", asynchronous unshard, explicit prefetch of the next block in forward and of the previous
one in backward, and no reshard of the last block after forward. gloo on CPU: the figures say
something about overlap, copies and host time, nothing about GPU throughput.
"""

import argparse
import copy
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor import clip_grad_norm_
from hp_fsdp import fully_shard

Row = dict[str, object]
Step = Callable[[], None]
Clip = Callable[[Iterable[Tensor], float], Tensor]
DEADLINE = 900.0  # seconds for one case's processes


class Block(nn.Module):
    """A transformer block's linear layers, without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix channels twice."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(torch.sigmoid(q) * torch.tanh(k) * v)
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return y


class Small(nn.Module):
    """Many small layers: host time and small messages dominate."""

    def __init__(self, width: int, layers: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers with residuals."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Overhead(nn.Module):
    """Eighteen tiny parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        """Use every parameter once."""
        y = self.norm1(x)
        for linear in self.linears[:4]:
            x = x + linear(y)
        y = self.norm2(x)
        for linear in self.linears[4:]:
            x = x + linear(y)
        return x


class Net(nn.Module):
    """Blocks in a row."""

    def __init__(self, kind: Callable[[int], nn.Module], width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def ours(base: Net, mesh: DeviceMesh) -> nn.Module:
    """Shard with hp-fsdp, as it comes."""
    model = copy.deepcopy(base)
    for block in model.blocks:
        fully_shard(block, mesh)
    fully_shard(model, mesh)
    return model


def torchs(base: Net, mesh: DeviceMesh, tuned: bool) -> nn.Module:
    """Shard with torch, as it comes or tuned."""
    model = copy.deepcopy(base)
    last = len(model.blocks) - 1
    for position, block in enumerate(model.blocks):
        keep = tuned and position == last
        theirs.fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
    theirs.fully_shard(model, mesh=mesh)
    if tuned:
        model._set_unshard_async_op(True)  # type: ignore[operator]
        sharded: list[Any] = list(model.blocks)
        for one, other in itertools.pairwise(sharded):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
    return model


def timed(sides: dict[str, Step], rounds: int, barrier: Step) -> dict[str, list[float]]:
    """Run the sides in turn and return each one's times in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 2):
        for name, step in sides.items():
            barrier()
            start = time.perf_counter()
            step()
            if turn >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def training(
    model: nn.Module, batch: Tensor, optimize: bool = True, clip: Clip | None = None
) -> Step:
    """Return one step: forward, backward, clip if given, AdamW, zero_grad."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> None:
        model(batch).pow(2).mean().backward()
        if clip is not None:
            clip(model.parameters(), 1.0)
        if optimize:
            optimizer.step()
        optimizer.zero_grad()

    return step


def case(
    base: Net, tokens: int, width: int, mesh: DeviceMesh, rounds: int
) -> dict[str, list[float]]:
    """Time the three sides of one case on this rank."""
    torch.manual_seed(1 + dist.get_rank())
    batch = torch.randn(tokens, width)
    sides = {
        "hp-fsdp": training(ours(base, mesh), batch),
        "torch": training(torchs(base, mesh, tuned=False), batch),
        "torch tuned": training(torchs(base, mesh, tuned=True), batch),
    }
    return timed(sides, rounds, dist.barrier)


def rows_of(name: str, times: dict[str, list[float]], against: tuple[str, ...]) -> list[Row]:
    """Return medians and paired ratios ``ours / theirs`` with their quartiles."""
    rows: list[Row] = []
    for other in against:
        ratios = sorted(a / b for a, b in zip(times["hp-fsdp"], times[other], strict=True))
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows.append(
            {
                "case": name,
                "against": other,
                "ours_ms": statistics.median(times["hp-fsdp"]),
                "theirs_ms": statistics.median(times[other]),
                "ratio": statistics.median(ratios),
                "quartiles": [quartiles[0], quartiles[2]],
                "rounds": len(ratios),
            }
        )
    return rows


def rank_main(rank: int, world: int, store: str, out: str, quick: bool) -> None:
    """Be one gloo rank; rank 0 writes the rows."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    torch.manual_seed(0)
    width, blocks, rounds = (64, 2, 2) if quick else (512, 8, 12)
    cases = [("8 x Block(512), 256 tokens, AdamW, no clip", Net(Block, width, blocks), 256, width)]
    if world == 2:
        cases.append(("8 x Block(512), 1024 tokens, AdamW, no clip", cases[0][1], 1024, width))
    small = 2 if quick else 16
    cases.append(("16 x 24 Linear(64), 256 tokens, AdamW, no clip", Net(Small, 64, small), 256, 64))
    rows: list[Row] = []
    for name, base, tokens, size in cases:
        label = f"{world} ranks, {'QUICK, ' if quick else ''}{name}"
        times = case(base, tokens, size, mesh, rounds)
        rows += rows_of(label, times, ("torch", "torch tuned"))
    dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    os._exit(0)


def fake_main(out: str, quick: bool) -> None:
    """Time the host's part on a fake group of eight, where communication takes no time."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",))
    base = Net(Overhead, 8, 2 if quick else 48)
    batch = torch.randn(2, 8)
    rows: list[Row] = []
    their_clip = nn.utils.clip_grad_norm_
    cases: list[tuple[str, bool, Clip | None, Clip | None]] = [
        ("forward+backward", False, None, None),
        ("with AdamW, no clip", True, None, None),
        ("with clip (hp-dtensor's, torch's) and AdamW", True, clip_grad_norm_, their_clip),
    ]
    for label, optimize, our_clip, torch_clip in cases:
        sides = {
            "hp-fsdp": training(ours(base, mesh), batch, optimize, our_clip),
            "torch": training(torchs(base, mesh, tuned=False), batch, optimize, torch_clip),
            "local": training(copy.deepcopy(base), batch, optimize, torch_clip),
        }
        times = timed(sides, 2 if quick else 12, lambda: None)
        over = {
            name: [whole - local for whole, local in zip(times[name], times["local"], strict=True)]
            for name in ("hp-fsdp", "torch")
        }
        name = f"host overhead over local, fake 8 ranks, {len(base.blocks)} blocks, {label}"
        rows += rows_of(name, over, ("torch",))
    Path(out).write_text(json.dumps(rows))
    os._exit(0)


def run_all(processes: Sequence[BaseProcess]) -> None:
    """Run the processes to their end; if one fails or time is up, end the rest and exit with 1."""
    for process in processes:
        process.start()
    end = time.monotonic() + DEADLINE
    while any(process.is_alive() for process in processes):
        if time.monotonic() > end or any(process.exitcode for process in processes):
            break
        time.sleep(0.05)
    failed = [p.name for p in processes if p.exitcode != 0]
    for process in processes:
        if process.is_alive():
            process.terminate()
        process.join()
    if failed:
        print(f"failed, or not done in {DEADLINE:.0f} s: {failed}", file=sys.stderr)
        sys.exit(1)


def main() -> None:
    """Run all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, 4, 0):
            out = str(Path(folder) / f"rows{world}")
            store = str(Path(folder) / f"store{world}")
            if world:
                processes: list[BaseProcess] = [
                    context.Process(target=rank_main, args=(r, world, store, out, options.quick))
                    for r in range(world)
                ]
            else:
                processes = [context.Process(target=fake_main, args=(out, options.quick))]
            run_all(processes)
            rows += json.loads(Path(out).read_text())
    for row in rows:
        low, high = row["quartiles"]  # type: ignore[misc]
        print(
            f"{row['case']}: ours {row['ours_ms']:.1f} ms, {row['against']} "
            f"{row['theirs_ms']:.1f} ms, ratio {row['ratio']:.3f} ({low:.3f}-{high:.3f})"
        )
    if options.json:
        options.json.write_text(json.dumps({"name": "fsdp_step", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
