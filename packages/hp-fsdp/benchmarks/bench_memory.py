"""Measure the memory of sharded models: at rest, and what a step takes above it; ours and torch's.

A fake group of eight, where collectives move nothing. Every allocation and release of torch's CPU
allocator counts, in the order and with the sizes that its profiler reports, the same for all sides.
Rest is the memory between steps, without gradients: the shards and what a library keeps. The third
step is measured to the end of backward: unsharded parameters, packed and reduced gradients,
activations, temporaries. Allocations are those in addition to a local step's.
"""

import argparse
import copy
import gc
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from arms import Block, Net, Row, ours, torchs, two_buffers
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


class Use(NamedTuple):
    """Bytes at rest and the most above it in a step; how often and how much that allocates."""

    rest: int
    peak: int
    times: int
    allocated: int


def used(make: Callable[[], nn.Module], batch: Tensor) -> Use:
    """Return what the model and its third step use."""

    def step(model: nn.Module) -> None:
        model(batch).pow(2).mean().backward()

    gc.collect()  # what an earlier model left is not to go while this one is measured
    with profile(use_device=None, profile_memory=True) as before:
        model = make()
        for _ in range(2):
            step(model)
            model.zero_grad()
    with profile(use_device=None, profile_memory=True) as report:
        step(model)
    level = peak = 0
    sizes = sizes_of(report)
    for size in sizes:
        level += size
        peak = max(peak, level)
    gained = [size for size in sizes if size > 0]
    return Use(sum(sizes_of(before)), peak, len(gained), sum(gained))


def sizes_of(report: profile) -> list[int]:
    """Return what was allocated, and released as negative numbers, in order."""
    events: Any = report.kineto_results
    found = sorted(events.events(), key=lambda event: event.start_ns())
    return [event.nbytes() for event in found if event.name() == "[memory]"]


def main() -> None:
    """Run all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="narrow blocks")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",))
    width = 64 if options.quick else 512
    base = Net(Block, width, 2 if options.quick else 8)
    rows: list[Row] = []
    for tokens in (16, 256):
        batch = torch.randn(tokens, width)
        local = used(partial(copy.deepcopy, base), batch)
        arms: dict[str, Callable[[], nn.Module]] = {
            "torch": partial(torchs, base, mesh, tuned=False),
            "copy": partial(ours, base, mesh),
            "copy, two buffers": partial(two_buffers, base, mesh),
            "accumulate": partial(ours, base, mesh, grads="accumulate"),
            "accumulate, two buffers": partial(two_buffers, base, mesh, grads="accumulate"),
            "ragged": partial(ours, base, mesh, layout="ragged"),
            "ragged, accumulate": partial(ours, base, mesh, layout="ragged", grads="accumulate"),
        }
        found = {name: used(make, batch) for name, make in arms.items()}
        theirs = found["torch"]
        for name, use in found.items():
            rows.append(
                {
                    "case": f"{len(base.blocks)} x Block({width}), 8 ranks, {tokens} tokens",
                    "arm": name,
                    "rest_mb": use.rest / 1e6,
                    "peak_mb": use.peak / 1e6,
                    "peak_to_torch": use.peak / theirs.peak,
                    "whole_to_torch": (use.rest + use.peak) / (theirs.rest + theirs.peak),
                    "allocations": use.times - local.times,
                    "allocated_mb": (use.allocated - local.allocated) / 1e6,
                }
            )
    for row in rows:
        print(
            f"{row['case']}: {row['arm']} rest {row['rest_mb']:.1f} MB, peak above it "
            f"{row['peak_mb']:.1f} MB, to torch {row['peak_to_torch']:.3f} (with rest "
            f"{row['whole_to_torch']:.3f}), {row['allocations']} allocations of "
            f"{row['allocated_mb']:.1f} MB above a local step's"
        )
    if options.json:
        options.json.write_text(json.dumps({"name": "fsdp_memory", "rows": rows}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
