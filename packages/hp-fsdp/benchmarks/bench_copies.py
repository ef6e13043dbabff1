"""Count the bytes that a step copies beyond a local one: ours in each gradient mode, and torch's.

Counted by operator on a fake group of eight, where collectives move nothing; P is the bytes of all
parameters. Operators count that write what they only move: copies, concatenations, splits, clones.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from arms import Block, Net, Row, Step, ours, torchs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

MOVING = (
    "copy_",
    "clone",
    "cat.",
    "_chunk_cat",
    "split_with_sizes_copy",
    "_to_copy",
    "index_select",
)


class Moved(TorchDispatchMode):
    """Counts the bytes that moving operators write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count what it wrote."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = str(func)
        if any(word in name for word in MOVING):
            written = kwargs.get("out", args[0] if "copy_" in name else result)
            for each in written if isinstance(written, list | tuple) else [written]:
                self.bytes += each.nbytes if isinstance(each, Tensor) else 0
        return result


def moved(model: nn.Module, batch: Tensor) -> int:
    """Return the bytes that the second step moves."""

    def step() -> None:
        model(batch).pow(2).mean().backward()

    steps: list[Step] = [step, step]
    counter = Moved()
    for run in steps:
        counter = Moved()
        with counter:
            run()
        model.zero_grad()
    return counter.bytes


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
    batch = torch.randn(16, width)
    local = moved(copy.deepcopy(base), batch)
    whole = sum(p.nbytes for p in base.parameters())
    arms = {
        "copy": ours(base, mesh),
        "accumulate": ours(base, mesh, grads="accumulate"),
        "ragged": ours(base, mesh, layout="ragged"),
        "ragged, accumulate": ours(base, mesh, layout="ragged", grads="accumulate"),
        "torch": torchs(base, mesh, tuned=False),
    }
    rows: list[Row] = [
        {"case": f"{len(base.blocks)} x Block({width}), 8 ranks", "arm": name, "copied_in_p": value}
        for name, model in arms.items()
        for value in [(moved(model, batch) - local) / whole]
    ]
    for row in rows:
        print(f"{row['case']}: {row['arm']} copies {row['copied_in_p']:.3f} P")
    if options.json:
        options.json.write_text(json.dumps({"name": "fsdp_copies", "rows": rows}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
