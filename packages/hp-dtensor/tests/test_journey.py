"""A redistribution enters few modules, downwards, as the page "inside" says."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed.tensor as dt
from rank_pool import RankPool
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import Layout, Replicate, Shard, redistribute
from hp_dtensor.testing import clear_caches

Ranks = Callable[[int], RankPool]
# The first parent with the pages: of the repository, or of the folder that vendored tests run in.
PAGES = Path("tools", "docs", "pages", "hp-dtensor")
INSIDE = next(up / PAGES for up in Path(__file__).parents if (up / PAGES).is_dir()) / "inside.md"
PACKAGE = Layout.__module__.rpartition("._")[0]
DOWN = ["_redistribute", "_prepare", "_groups", "_execute", "collectives._c10d"]
# What the first of all like calls enters besides, as `_prepare` and `_execute` ask them.
FIRST = {"_convert", "_planner", "_cost", "_transfer", "_boxes"}
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


def journeys(rank: int) -> dict[str, list[list[str]]]:
    """Return the modules that the first call enters, and a later one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = dt.distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [dt.Shard(0), dt.Shard(1)])
    one = init_device_mesh("cpu", (4,))
    y = dt.distribute_tensor(torch.arange(16.0).view(4, 4), one, [dt.Shard(0)])
    calls: dict[str, Callable[[], Any]] = {
        "S(0) -> R": lambda: redistribute(y, (Replicate(),)),
        "(S0, S1) -> (S1, S0)": lambda: redistribute(x, (Shard(1), Shard(0))),
    }
    found = {}
    for name, call in calls.items():
        clear_caches()  # what other calls worked out
        found[name] = [entered(call), entered(call)]
    return found


def test_a_change_of_layout_enters_five_modules_downwards(ranks: Ranks) -> None:
    for found in ranks(4).run(journeys):
        for first, later in found.values():
            rooms = [module for module in later if module not in NO_ROOMS]
            assert sorted(rooms) == sorted(DOWN)
            assert rooms[:4] == DOWN[:4]  # the last two are entered by turns
            assert {*first} - NO_ROOMS == {*DOWN} | FIRST
            order = [module for module in first if module in DOWN]
            assert order[:4] == DOWN[:4]
            assert first.index("_convert") < first.index("_planner") < first.index("_execute")


def test_the_page_lists_the_modules_that_a_change_of_layout_enters() -> None:
    text = INSIDE.read_text(encoding="utf-8")
    listed = re.findall(r"^\d\. `([\w/]+)`:", text, re.MULTILINE)
    assert [name.replace("/", ".") for name in listed] == DOWN
