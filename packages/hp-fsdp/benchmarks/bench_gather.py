"""Time one coalesced all-gather of several tensors against one flat all-gather, on gloo.

The same bytes travel: as one tensor, or as parts of one size in one coalesced call. What the parts
cost above the flat call, per part, is what gathering a parameter straight into place costs; packing
it costs a copy of its bytes instead. Both are printed, interleaved, for several sizes of a part.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from arms import Row, run_all
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import Axis, TorchCollectives

PARTS = 16
KILOBYTES = (1, 4, 16, 64, 256)


def timed_ms(axis: Axis, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """Return the milliseconds of one gather, all ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    TorchCollectives().all_gather(axis, inputs, outputs).wait()
    return 1e3 * (time.perf_counter() - start)


def rank_main(rank: int, world: int, store: str, out: str, quick: bool) -> None:
    """Be one gloo rank; rank 0 writes the rows."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    axis = Axis.of(init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",)))
    rows: list[Row] = []
    for kilobytes in KILOBYTES[:2] if quick else KILOBYTES:
        numel = kilobytes * 256
        source, target = torch.ones(PARTS * numel), torch.empty(world * PARTS * numel)
        inputs = list(source.split(numel))
        outputs = list(target.split(world * numel))
        packed = target.view(world, PARTS * numel)
        places = [torch.empty(world, numel) for _ in range(PARTS)]
        times: dict[str, list[float]] = {"flat": [], "coalesced": [], "copy": []}
        for _ in range(3 if quick else 40):
            times["flat"].append(timed_ms(axis, [source], [target]))
            start = time.perf_counter()
            torch.split_with_sizes_copy(packed, [numel] * PARTS, dim=1, out=places)
            times["copy"].append(1e3 * (time.perf_counter() - start))
            times["coalesced"].append(timed_ms(axis, inputs, outputs))
        median = {name: statistics.median(each) for name, each in times.items()}
        rows.append({"case": f"{world} ranks, {PARTS} parts of {kilobytes} KiB", **median})
    dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    os._exit(0)


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
            f"{row['case']}: flat {row['flat']:.3f} ms + copy-out {row['copy']:.3f} ms, coalesced "
            f"{row['coalesced']:.3f} ms"
        )
    if options.json:
        options.json.write_text(json.dumps({"name": "fsdp_gather", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
