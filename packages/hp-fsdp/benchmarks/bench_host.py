"""Time the host's part of a step on a fake group of eight, where communication takes no time.

Overhead is the time above that of the same step without sharding; see `by_hand` for what nobody can
leave out of it. All sides run in one process, one step each in turn.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from arms import Net, Overhead, Row, ours, rows_of, show, timed, torchs, training
from by_hand import host_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_dtensor import clip_grad_norm_

SIDES: dict[str, dict[str, Any]] = {
    "exact": {},
    "exact, sharded_optimizer": {"flat": True},
    "accumulate, sharded_optimizer": {"flat": True, "grads": "accumulate"},
    "ragged": {"layout": "ragged"},
    "ragged, sharded_optimizer": {"layout": "ragged", "flat": True},
}


def main() -> None:
    """Run all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two blocks, two rounds")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",))
    base = Net(Overhead, 8, 2 if options.quick else 48)
    batch = torch.randn(2, 8)
    rows: list[Row] = []
    for label, optimize in (("forward+backward", False), ("with clip and AdamW", True)):
        sides = {}
        for name, side in SIDES.items():
            flat = bool(side.get("flat"))
            if optimize or not flat:
                chosen = {key: value for key, value in side.items() if key != "flat"}
                clip = clip_grad_norm_ if optimize else None
                sides[name] = training(ours(base, mesh, **chosen), batch, optimize, clip, flat)
        if not optimize:
            sides["by hand"] = host_step(base, mesh, batch)
        own = tuple(sides)
        clip_theirs = nn.utils.clip_grad_norm_ if optimize else None
        sides["torch"] = training(torchs(base, mesh, tuned=False), batch, optimize, clip_theirs)
        sides["local"] = training(copy.deepcopy(base), batch, optimize, clip_theirs)
        times = timed(sides, 2 if options.quick else 12, lambda: None)
        over = {
            name: [whole - local for whole, local in zip(times[name], times["local"], strict=True)]
            for name in (*own, "torch")
        }
        name = f"host overhead over local, fake 8 ranks, {len(base.blocks)} blocks, {label}"
        rows += rows_of(name, over, ("torch",), own)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps({"name": "fsdp_host", "rows": rows}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
