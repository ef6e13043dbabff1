"""Layout and meshes of a large world, against two ways of building them with torch alone.

"flattened": ``init_device_mesh`` with all axes, and the folds dp, fsdp and loss flattened.
"unflattened": one world axis unflattened into the data, dense and sparse views, loss flattened.
Fake process groups; a process of its own for each run, arms in turn.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ARMS = ("layout", "ours", "flattened", "unflattened")


def degrees(world: int) -> dict[str, int]:
    """Return degrees that suit a world, all axes above one where it is large."""
    pp, cp, replicas = min(4, max(1, world // 128)), min(4, max(1, world // 64)), min(2, world // 8)
    tp = min(8, world)
    return {"pp": pp, "dp_replicate": max(1, replicas), "cp": cp, "tp": tp, "ep": tp}


def measure(arm: str, world: int) -> dict[str, float]:
    """Build everything once and return seconds, megabytes and the number of group creations."""
    import torch.distributed as dist
    from torch.distributed import device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hp_mesh import ParallelDims, ParallelMesh

    del ParallelMesh  # imported here so that its module's loading is not timed
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    calls, new_group = 0, dist.new_group

    def counted(*args: Any, **settings: Any) -> object:
        nonlocal calls
        calls += 1
        return new_group(*args, **settings)

    for module in (dist, device_mesh):
        vars(module)["new_group"] = counted
    dims = ParallelDims.from_dict({**degrees(world), "world_size": world})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if arm == "layout":
        layout = dims.layout()
        for name in layout.names:
            layout.group(name, 0)
    elif arm == "ours":
        dims.build_mesh()
    elif arm == "flattened":
        base = dims.layout().views["base"]
        mesh = device_mesh.init_device_mesh("cpu", base.shape, mesh_dim_names=base.axes)
        mesh["dp_replicate", "dp_shard"]._flatten("dp")
        mesh["dp_shard", "cp"]._flatten("fsdp")
        mesh["dp_replicate", "dp_shard", "cp"]._flatten("loss")
    else:
        views = dims.layout().views
        root = device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("world",))
        for name in ("data", "dense", "sparse"):
            view = views[name]
            mesh = root._unflatten(0, view.shape, view.axes)
            if name == "data":
                mesh["dp", "cp"]._flatten("loss")
    seconds = time.perf_counter() - start
    megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    lookup = 0.0
    if arm == "ours":
        built = dims.build_mesh()
        _ = built["fsdp"]
        start = time.perf_counter()
        for _ in range(10_000):
            _ = built["fsdp"]
        lookup = (time.perf_counter() - start) / 10_000 * 1e6
        calls //= 2
    return {"seconds": seconds, "megabytes": megabytes, "new_group": calls, "lookup_us": lookup}


def run(arm: str, world: int) -> dict[str, float]:
    """Measure one arm in a process of its own."""
    command = [sys.executable, __file__, "--arm", arm, "--world", str(world)]
    result: dict[str, float] = json.loads(subprocess.check_output(command, text=True))
    return result


def main() -> None:
    """Run the arms in turn, print medians and paired ratios, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small worlds, two repeats")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(measure(options.arm, options.world)))
        return
    worlds, repeats = ([64, 256], 2) if options.quick else ([1024, 16384, 131072], 5)
    print(__doc__)
    print("ours builds all views: dense, sparse, base, data, loss and expert")
    rows = []
    for world in worlds:
        runs = [{arm: run(arm, world) for arm in ARMS} for _ in range(repeats)]
        row: dict[str, float] = {"world": world}
        for arm in ARMS:
            for key in runs[0][arm]:
                row[f"{arm}_{key}"] = statistics.median(r[arm][key] for r in runs)
        print(f"{world:,} ranks ({', '.join(f'{n}={d}' for n, d in degrees(world).items())})")
        for arm in ARMS:
            line = f"  {arm:11}  {row[f'{arm}_seconds'] * 1e3:9.2f} ms  "
            line += f"{row[f'{arm}_new_group']:9,.0f} new_group calls  "
            line += f"{row[f'{arm}_megabytes']:7.1f} MB"
            if arm in ("flattened", "unflattened"):
                ratios = sorted(r[arm]["seconds"] / r["ours"]["seconds"] for r in runs)
                row |= {f"{arm}_ratio": statistics.median(ratios)}
                row |= {f"{arm}_ratio_low": ratios[0], f"{arm}_ratio_high": ratios[-1]}
                line += f"  {row[f'{arm}_ratio']:.0f}x ours [{ratios[0]:.0f}-{ratios[-1]:.0f}]"
            print(line)
        print(f"  cached look-up of a name: {row['ours_lookup_us']:.2f} us", flush=True)
        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"name": "mesh-build", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
