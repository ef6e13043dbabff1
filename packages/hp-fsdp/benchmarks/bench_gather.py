"""Time gathering parameters straight into place against packing them, by their size, on gloo.

The same bytes travel: packed, as one flat all-gather and a copy-out, or direct, as parts of one
size in one coalesced call, which has a fixed cost for each part. Times are per part, interleaved,
medians. The last line says from which size on direct was the cheaper one; `fully_shard` takes the
``direct_bytes`` from which it gathers directly, 64 KiB per rank unless told otherwise.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from arms import Row, Step, run_all
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import Axis, TorchCollectives

PARTS = 16
KILOBYTES = (1, 4, 16, 32, 64, 128, 256, 512)


def timed_ms(act: Step, sync: Step) -> float:
    """Return the milliseconds of one act to its end, all ranks starting together."""
    dist.barrier()
    sync()
    start = time.perf_counter()
    act()
    sync()
    return 1e3 * (time.perf_counter() - start)


def nothing() -> None:
    """Wait for nothing: a CPU is done when a call returns."""


def sweep(
    axis: Axis,
    kilobytes: Sequence[int] = KILOBYTES,
    rounds: int = 40,
    device: str = "cpu",
    sync: Step = nothing,
) -> list[Row]:
    """Time both ways over the axis, a row for each size per rank; ``sync`` waits for the device."""
    world, rows, gather = axis.size, [], TorchCollectives().all_gather
    for size in kilobytes:
        numel = size * 256
        source = torch.ones(PARTS * numel, device=device)
        target = torch.empty(world * PARTS * numel, device=device)
        inputs, outputs = list(source.split(numel)), list(target.split(world * numel))
        packed = target.view(world, PARTS * numel)
        places = [torch.empty(world, numel, device=device) for _ in range(PARTS)]

        def flat(i: Tensor = source, o: Tensor = target) -> None:
            gather(axis, [i], [o]).wait()

        def copy_out(i: Tensor = packed, n: int = numel, o: list[Tensor] = places) -> None:
            torch.split_with_sizes_copy(i, [n] * PARTS, dim=1, out=o)

        def coalesced(i: list[Tensor] = inputs, o: list[Tensor] = outputs) -> None:
            gather(axis, i, o).wait()

        acts: dict[str, Step] = {"flat": flat, "copy": copy_out, "coalesced": coalesced}
        times: dict[str, list[float]] = {name: [] for name in acts}
        for _ in range(rounds):
            for name, act in acts.items():
                times[name].append(timed_ms(act, sync))
        part_us = {name: 1e3 * statistics.median(each) / PARTS for name, each in times.items()}
        packed_us = part_us["flat"] + part_us["copy"]
        rows.append(
            {
                "case": f"{world} ranks, {PARTS} parts",
                "kilobytes_per_rank": size,
                "flat_us": part_us["flat"],
                "packed_us": packed_us,
                "direct_us": part_us["coalesced"],
                "direct_to_packed": part_us["coalesced"] / packed_us,
            }
        )
    return rows


def rank_main(rank: int, world: int, store: str, out: str, quick: bool) -> None:
    """Be one gloo rank; rank 0 writes the rows."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    axis = Axis.of(init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",)))
    rows = sweep(axis, KILOBYTES[:2], 3) if quick else sweep(axis)
    dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    os._exit(0)


def cheaper_from(rows: list[Row], case: str) -> str:
    """Return the smallest size from which direct beats packed at every larger one."""
    found = "no size tried"
    for row in reversed([row for row in rows if row["case"] == case]):
        if row["direct_to_packed"] >= 1:
            break
        found = f"{row['kilobytes_per_rank']} KiB"
    return found


def main() -> None:
    """Run all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two sizes, three rounds")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, 4):
            out, store = str(Path(folder) / f"rows{world}"), str(Path(folder) / f"store{world}")
            run_all(
                [
                    context.Process(target=rank_main, args=(r, world, store, out, options.quick))
                    for r in range(world)
                ]
            )
            rows += json.loads(Path(out).read_text())
    for row in rows:
        print(
            f"{row['case']} of {row['kilobytes_per_rank']} KiB per rank: packed "
            f"{row['packed_us']:.0f} us a part (flat all-gather {row['flat_us']:.0f}), direct "
            f"{row['direct_us']:.0f} us, ratio {row['direct_to_packed']:.2f}"
        )
    for case in dict.fromkeys(row["case"] for row in rows):
        print(f"{case}: direct is cheaper from {cheaper_from(rows, case)} per rank on")
    if options.json:
        options.json.write_text(json.dumps({"name": "fsdp_gather", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
