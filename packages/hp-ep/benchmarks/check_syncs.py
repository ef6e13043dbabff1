"""Counts how often the host waits for the GPU in one forward of each dispatcher and of a layer.

One rank alone (nccl, no peers). A first pass makes what is made once; a second one counts torch's
warnings of waits. Then dispatchers with a target of none run where any wait raises.
"""

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_ep import AllToAll, Dedup, Hierarchical, Local, MoE, Padded, TokenDispatcher

TARGETS = {"Local": 0, "AllToAll": 1, "Dedup": 1, "Hierarchical": 1, "Padded": 0}


def make(name: str, flat: DeviceMesh, grid: DeviceMesh, experts: int) -> TokenDispatcher:
    """Return the dispatcher of that name for all ``experts`` here."""
    if name == "Local":
        return Local(experts)
    if name == "Hierarchical":
        return Hierarchical(grid, experts)
    if name == "Padded":
        return Padded(flat, experts, capacity=64)
    return AllToAll(flat, experts) if name == "AllToAll" else Dedup(flat, experts)


def count(step: Callable[[], object]) -> int:
    """Return how often torch warns of a wait while ``step`` runs a second time."""
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in seen)


def refuses(step: Callable[[], object]) -> str:
    """Return what torch says where waiting is an error, '' if nothing waits."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def steps(dispatcher: TokenDispatcher, layer: MoE, x: Tensor) -> dict[str, Callable[[], object]]:
    """Return a dispatch with its combine, and a forward and backward of the layer."""
    weights, expert_ids = layer.router(x.detach())
    layer.dispatcher = dispatcher

    def alone() -> Tensor:
        rows, _, state = dispatcher.dispatch(x, weights.detach(), expert_ids)
        return dispatcher.combine(rows, state)

    return {
        "dispatch and combine": alone,
        "MoE forward": lambda: layer(x),
        "MoE forward and backward": lambda: layer(x).sum().backward(),
    }


def main() -> int:
    """Print the waits beside the targets; return 1 where there are more."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device: nothing was counted")
        return 0
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        meeting = "file://" + os.path.join(folder, "store")
        dist.init_process_group("nccl", init_method=meeting, rank=0, world_size=1)
        try:
            return _report()
        finally:
            dist.destroy_process_group()


def _report() -> int:
    flat = init_device_mesh("cuda", (1,), mesh_dim_names=("ep",))
    grid = init_device_mesh("cuda", (1, 1), mesh_dim_names=("node", "inside"))
    layer = MoE(256, 512, 8, 2, num_shared_experts=1, device="cuda", dtype=torch.bfloat16)
    products = int(torch.cuda.get_device_capability()[0] not in (9, 10))  # see the README
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    over = 0
    for name, target in TARGETS.items():
        for what, step in steps(make(name, flat, grid, 8), layer, x).items():
            most = target + products * what.startswith("MoE")
            waits = count(step)
            error = refuses(step) if most == 0 else ""
            bad = waits > most or bool(error)
            over += bad
            print(f"{name:13} {what:25} {waits} waits, target <= {most}", "OVER" * bad, error)
    return int(over > 0)


if __name__ == "__main__":
    raise SystemExit(main())
