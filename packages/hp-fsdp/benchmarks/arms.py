"""What the benchmarks share: models, both sides' ways to shard them, steps, paired ratios.

torch is given its defaults and, as "tuned", asynchronous unshard, explicit prefetch of the next
block in forward and of the previous one in backward, and no reshard of the last block after
forward.
"""

import copy
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_fsdp import fully_shard, sharded_optimizer

Row = dict[str, Any]
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


def ours(base: Net, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard the blocks, then the root, with hp-fsdp."""
    model = copy.deepcopy(base)
    for block in model.blocks:
        fully_shard(block, mesh, **options)
    fully_shard(model, mesh, **options)
    return model


def two_buffers(base: Net, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard with two packed gradients alive at once; torch has one, as `ours` by default."""
    model: Any = ours(base, mesh, **options)
    model.set_reduce_scatter_max_input_buffers(2)
    return cast(nn.Module, model)


def torchs(base: Net, mesh: DeviceMesh, tuned: bool, **options: Any) -> nn.Module:
    """Shard with torch, as it comes or tuned."""
    model = copy.deepcopy(base)
    last = len(model.blocks) - 1
    for position, block in enumerate(model.blocks):
        keep = tuned and position == last
        theirs.fully_shard(block, mesh=mesh, reshard_after_forward=not keep, **options)
    theirs.fully_shard(model, mesh=mesh, **options)
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
    model: nn.Module,
    batch: Tensor,
    optimize: bool = True,
    clip: Clip | None = None,
    flat: bool = False,
) -> Step:
    """Return one step: forward, backward, clip if given, AdamW (``flat``: on shards), zero_grad."""
    optimizer: torch.optim.Optimizer = (
        sharded_optimizer(torch.optim.AdamW, model, lr=1e-4, foreach=True)
        if flat
        else torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    )

    def step() -> None:
        model(batch).pow(2).mean().backward()
        if clip is not None:
            clip(model.parameters(), 1.0)
        if optimize:
            optimizer.step()
        optimizer.zero_grad()

    return step


def rows_of(
    name: str,
    times: dict[str, list[float]],
    against: tuple[str, ...],
    arms: tuple[str, ...] = ("hp-fsdp",),
) -> list[Row]:
    """Return medians and paired ratios ``ours / theirs`` with their quartiles."""
    rows: list[Row] = []
    for arm, other in itertools.product(arms, against):
        ratios = sorted(a / b for a, b in zip(times[arm], times[other], strict=True))
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows.append(
            {
                "case": name,
                "arm": arm,
                "against": other,
                "ours_ms": statistics.median(times[arm]),
                "theirs_ms": statistics.median(times[other]),
                "ratio": statistics.median(ratios),
                "quartiles": [quartiles[0], quartiles[2]],
                "rounds": len(ratios),
            }
        )
    return rows


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


def show(rows: Sequence[Row]) -> None:
    """Print one line a row."""
    for row in rows:
        low, high = row["quartiles"]
        print(
            f"{row['case']}: {row['arm']} {row['ours_ms']:.1f} ms, {row['against']} "
            f"{row['theirs_ms']:.1f} ms, ratio {row['ratio']:.3f} ({low:.3f}-{high:.3f})",
            flush=True,
        )
