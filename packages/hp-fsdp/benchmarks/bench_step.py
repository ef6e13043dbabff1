"""Time a training step against torch's fully_shard on gloo ranks.

All sides run in the same processes, one step each in turn; see `arms` for what torch is given, and
`by_hand` for "apart", the step whose computation and communication do not overlap. gloo on CPU: the
figures say something about overlap, copies and host time, nothing about GPUs.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from arms import (
    Block,
    Net,
    Row,
    Small,
    ours,
    rows_of,
    run_all,
    show,
    timed,
    torchs,
    training,
    two_buffers,
)
from by_hand import apart
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TORCH = ("torch", "torch tuned")
ROUNDS = {"quick": 2, "default": 4, "long": 12}


def case(
    base: Net, tokens: int, width: int, mesh: DeviceMesh, rounds: int
) -> dict[str, list[float]]:
    """Time the sides of one case on this rank."""
    torch.manual_seed(1 + dist.get_rank())
    batch = torch.randn(tokens, width)
    sides = {
        "hp-fsdp": training(ours(base, mesh), batch),
        "two buffers": training(two_buffers(base, mesh), batch),
        "sharded_optimizer": training(ours(base, mesh), batch, flat=True),
        "accumulate": training(ours(base, mesh, grads="accumulate"), batch, flat=True),
        "ragged": training(ours(base, mesh, layout="ragged"), batch, flat=True),
        "apart": apart(base, mesh, batch),
        "torch": training(torchs(base, mesh, tuned=False), batch),
        "torch tuned": training(torchs(base, mesh, tuned=True), batch),
    }
    return timed(sides, rounds, dist.barrier)


def rank_main(rank: int, world: int, store: str, out: str, size: str) -> None:
    """Be one gloo rank; rank 0 prints the rows of each case as it ends, and writes all."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    torch.manual_seed(0)
    quick = size == "quick"
    width, blocks = (64, 2) if quick else (512, 8)
    cases = [("8 x Block(512), 256 tokens, AdamW, no clip", Net(Block, width, blocks), 256, width)]
    if world == 2 and size != "default":
        cases.append(("8 x Block(512), 1024 tokens, AdamW, no clip", cases[0][1], 1024, width))
    small = 2 if quick else 16
    cases.append(("16 x 24 Linear(64), 256 tokens, AdamW, no clip", Net(Small, 64, small), 256, 64))
    rows: list[Row] = []
    for name, base, tokens, width in cases:
        label = f"{world} ranks, {'QUICK, ' if quick else ''}{name}"
        times = case(base, tokens, width, mesh, ROUNDS[size])
        found = rows_of(label, times, TORCH, tuple(name for name in times if name not in TORCH))
        if rank == 0:
            show(found)
        rows += found
    dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    os._exit(0)


def main() -> None:
    """Run all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all")
    sizes.add_argument("--long", action="store_true", help="12 rounds, also with 1,024 tokens")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    size = "quick" if options.quick else "long" if options.long else "default"
    context = multiprocessing.get_context("spawn")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, 4):
            out = str(Path(folder) / f"rows{world}")
            store = str(Path(folder) / f"store{world}")
            run_all(
                [
                    context.Process(target=rank_main, args=(r, world, store, out, size))
                    for r in range(world)
                ]
            )
            rows += json.loads(Path(out).read_text())
    if options.json:
        options.json.write_text(json.dumps({"name": "fsdp_step", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
