"""A redistribution enters few modules, downwards, as the page "inside" says."""

import re
import sys
from collections.abc import Callable
from itertools import groupby
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
DOWN = ["_redistribute", "_run", "_prepare", "_execute", "_groups", "collectives._c10d"]
# Modules that only the first of several equal calls enters, from `_prepare` and `_execute`.
FIRST = {"_convert", "_planner", "_cost", "_transfer", "_boxes", "ragged._spec"}
# Values that are compared, the interface, and torch's private names.
LEAVES = {"_placements", "_layout", "collectives._interface", "_torch"}


def entered(call: Callable[[], Any]) -> list[str]:
    """Return the module of each Python call that a call makes in the package."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(f"{PACKAGE}."):
            found.append(name.removeprefix(f"{PACKAGE}."))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def journeys(rank: int) -> dict[str, list[list[str]]]:
    """Return the calls of a first and of a later redistribution."""
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
        clear_caches()  # Earlier calls filled them.
        found[name] = [entered(call), entered(call)]
    return found


def without_repeats(modules: list[str]) -> list[str]:
    return [name for name, _ in groupby(module for module in modules if module not in LEAVES)]


def test_a_redistribution_enters_six_modules_downwards(ranks: Ranks) -> None:
    for found in ranks(4).run(journeys):
        for first, later in found.values():
            route = without_repeats(later)
            assert list(dict.fromkeys(route)) == DOWN
            assert {*first} - LEAVES <= {*DOWN} | FIRST


def test_a_later_gather_makes_few_calls_and_returns_to_few_modules(ranks: Ranks) -> None:
    for found in ranks(4).run(journeys):
        first, later = found["S(0) -> R"]
        route = without_repeats(later)
        assert len(later) <= 30
        assert len(route) - len({*route}) <= 3
        assert len(first) <= 500


def test_the_page_lists_the_modules_that_a_change_of_layout_enters() -> None:
    text = INSIDE.read_text(encoding="utf-8")
    listed = re.findall(r"^\d\. `([\w/]+)`:", text, re.MULTILINE)
    assert [name.replace("/", ".") for name in listed] == DOWN
