"""A redistribution enters few modules, downwards: what the README says of it is true."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed.tensor as dt
from rank_pool import RankPool
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import Layout, Replicate, Shard, redistribute

Ranks = Callable[[int], RankPool]
PACKAGE = Layout.__module__.rpartition("._")[0]
DOWN = ["_redistribute", "_prepare", "_groups", "_execute", "collectives._c10d"]
# Values that are compared, the interface, and torch's private names.
NO_ROOMS = {"_placements", "_layout", "collectives._interface", "_torch"}


def entered(call: Callable[[], Any]) -> list[str]:
    """Return the modules of the package that a call enters, by the first time."""
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(f"{PACKAGE}."):
            found.setdefault(name.removeprefix(f"{PACKAGE}."), None)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def journeys(rank: int) -> dict[str, list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = dt.distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [dt.Shard(0), dt.Shard(1)])
    one = init_device_mesh("cpu", (4,))
    y = dt.distribute_tensor(torch.arange(16.0).view(4, 4), one, [dt.Shard(0)])
    calls: dict[str, Callable[[], Any]] = {
        "S(0) -> R": lambda: redistribute(y, (Replicate(),)),
        "(S0, S1) -> (S1, S0)": lambda: redistribute(x, (Shard(1), Shard(0))),
    }
    for call in calls.values():
        call()  # what is worked out once
    return {name: entered(call) for name, call in calls.items()}


def test_a_change_of_layout_enters_five_modules_downwards(ranks: Ranks) -> None:
    for found in ranks(4).run(journeys):
        for modules in found.values():
            rooms = [module for module in modules if module not in NO_ROOMS]
            assert sorted(rooms) == sorted(DOWN)
            assert rooms[:4] == DOWN[:4]  # the last two are entered by turns
