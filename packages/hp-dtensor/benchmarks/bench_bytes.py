"""Count received bytes over all pairs of placements: ours, torch's greedy and min-cost planners.

On CPU meshes, torch replaces its shard-to-shard all-to-all by an all-gather. This benchmark gives
torch the all-to-all that it runs on GPUs (for even sizes). Neither side has a flattened mesh. Both
sides may use the group of the world.

Bytes are counted, not timed: the payload received from other ranks for a tensor of 64 MB. An
all-reduce counts ``2 (n-1) / n`` times its tensor. Our plans are averaged over all ranks. torch's
collectives run on fake groups and on tensors without data. Our planner and torch's min-cost planner
both weigh bytes against calls. The sums are of plans with default costs. To count the pairs on
which ours receives more, calls cost nothing. The last row is the time of a plan over five axes.
"""

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.placement_types as placement_types
from placed import OURS, S0, S1, P, Placements, R, fake_world, five_axes_row, make_mesh
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import _redistribute as their_planner
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor import AlphaBeta, Layout, explain

LENGTH = 4096  # side of the square tensor of 64 MB


class Counter(TorchDispatchMode):
    """Adds up the bytes that torch's functional collectives receive."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.bytes = 0
        self._sizes = {mesh.get_group(i).group_name: mesh.size(i) for i in range(mesh.ndim)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if "_c10d_functional.all_reduce" in name:
            size = self._sizes[args[2]]
            self.bytes += 2 * (size - 1) * args[0].nbytes // size
        elif "_c10d_functional" in name and "wait" not in name:
            self.bytes += abs(out.nbytes - args[0].nbytes)
        return out

    def all_to_all(
        self, x: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, axis: int
    ) -> Tensor:
        """Replace torch's shard-to-shard step, and count it as an all-to-all over n ranks."""
        n = mesh.size(axis)
        self.bytes += x.nbytes * (n - 1) // n
        shape = list(x.shape)
        shape[gather_dim] *= n
        shape[shard_dim] //= n
        return x.new_empty(shape)


def rows_of(shapes: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Sum received bytes over all pairs of {R, S0, S1}, then over pairs with P in the source."""
    rows = []
    for shape in shapes:
        fake_world(math.prod(shape))
        mesh = make_mesh(shape)
        counter = Counter(mesh)
        placement_types.shard_dim_alltoall = counter.all_to_all
        plain = list(itertools.product((R, S0, S1), repeat=len(shape)))
        sources = itertools.product((R, S0, S1, P), repeat=len(shape))
        reducing = [source for source in sources if P in source]
        for kind, group in (("R, S0, S1", plain), ("with P in the source", reducing)):
            row = compared(f"{'x'.join(map(str, shape))} {kind}", group, plain, mesh, counter)
            rows.append(row)
            print(
                f"{row['case']:30s} {row['pairs']:4d} pairs  ours {row['ours_bytes'] / 2**20:9.1f} "
                f"greedy/ours {row['greedy_ratio']:.2f} min-cost/ours {row['min_cost_ratio']:.2f} "
                f"lower bound {row['lower_bound_ratio'] or math.nan:.3f}  ours more on "
                f"{row['pairs_more_than_greedy']}, {row['pairs_more_than_min_cost']}",
                flush=True,
            )
        dist.destroy_process_group()
    return rows


def compared(
    case: str,
    sources: Sequence[Placements],
    targets: Sequence[Placements],
    mesh: DeviceMesh,
    counter: Counter,
) -> dict[str, Any]:
    """Return one row: sums over all pairs, and the number of pairs on which ours receives more."""
    pairs = [pair for pair in itertools.product(sources, targets) if pair[0] != pair[1]]
    planners = []
    for graph in (False, True):
        # Both planners share one cache. Empty it, so that each makes its own plans.
        their_planner._gen_transform_infos.cache_clear()
        their_planner.clear_redistribute_planner_cache()
        planners.append([their_bytes(*pair, mesh, counter, graph) for pair in pairs])
    greedy, least = planners
    found = [our_bytes(*pair, tuple(mesh.shape), AlphaBeta()) for pair in pairs]
    ours, bound = (sum(column) for column in zip(*found, strict=True))
    fewest = [our_bytes(*pair, tuple(mesh.shape), AlphaBeta(alpha=0.0))[0] for pair in pairs]
    more = [
        sum(mine > theirs * (1 + 1e-9) for mine, theirs in zip(fewest, planner, strict=True))
        for planner in planners
    ]
    return {
        "part": "bytes",
        "case": case,
        "pairs": len(pairs),
        "ours_bytes": ours,
        "greedy_bytes": sum(greedy),
        "min_cost_bytes": sum(least),
        "greedy_ratio": sum(greedy) / ours,
        "min_cost_ratio": sum(least) / ours,
        # Without partial values, 1 means that every rank receives exactly the bytes that it lacks.
        "lower_bound_ratio": ours / bound if bound else None,
        "pairs_more_than_greedy": more[0],
        "pairs_more_than_min_cost": more[1],
    }


def their_bytes(
    source: Placements, target: Placements, mesh: DeviceMesh, counter: Counter, graph: bool
) -> float:
    """Return the bytes that a rank receives in torch for a tensor of 64 MB."""
    shape = [LENGTH, LENGTH]
    for axis, placement in enumerate(source):
        if isinstance(placement, Shard):
            shape[placement.dim] //= mesh.size(axis)
    x = DTensor.from_local(
        torch.empty(shape, device="meta"), mesh, source, shape=(LENGTH,) * 2, stride=(LENGTH, 1)
    )
    counter.bytes = 0
    planner = their_planner.use_min_cost_redistribution_plan(True) if graph else nullcontext()
    with torch.no_grad(), planner, counter:
        x.redistribute(mesh, target)
    return float(counter.bytes)


def our_bytes(
    source: Placements, target: Placements, mesh: tuple[int, ...], cost: AlphaBeta
) -> tuple[float, float]:
    """Return the bytes that a rank receives and lacks here, averaged over all ranks."""
    src, dst = (Layout(mesh, tuple(OURS[p] for p in which)) for which in (source, target))
    shape = (LENGTH, LENGTH)
    plans = [explain(src, dst, shape=shape, rank=rank, cost=cost) for rank in range(src.size)]
    lacking = 0
    if not src.has_partial:
        for rank in range(src.size):
            (held,), (needed,) = src.boxes(shape, rank), dst.boxes(shape, rank)
            common = math.prod(
                max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(held, needed, strict=True)
            )
            lacking += 4 * (math.prod(hi - lo for lo, hi in needed) - common)
    return sum(plan.bytes_received for plan in plans) / len(plans), lacking / len(plans)


def main() -> None:
    """Print the rows of all meshes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two small meshes")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    shapes: list[tuple[int, ...]] = [(2, 2), (2, 4)]
    if not options.quick:
        shapes += [(8, 8), (2, 2, 2), (2, 8, 4)]
    print("torch: real all-to-all between shards as on GPUs; nothing flattened on either side")
    print("MB received per rank, float32 [4096, 4096], summed over all pairs")
    rows = [*rows_of(shapes), five_axes_row(5 if options.quick else 50)]
    print(f"{rows[-1]['case']:30s} {rows[-1]['plan_us']:.0f} us")
    if options.json:
        options.json.write_text(json.dumps({"name": "bytes", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
