"""A redistribution enters the modules that the page "inside" lists, from top to bottom."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor as dt
from rank_pool import RankPool, count_returns, modules_called
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import Layout, Replicate, Shard, redistribute
from hp_dtensor.testing import clear_caches

Ranks = Callable[[int], RankPool]
# The repository root, or the folder in which vendored tests run.
PAGES = Path("tools", "docs", "pages", "hp-dtensor")
INSIDE = next(up / PAGES for up in Path(__file__).parents if (up / PAGES).is_dir()) / "inside.md"
PACKAGE = Layout.__module__.rpartition("._")[0]
DOWN = ["_redistribute", "_run", "_prepare", "_execute", "_groups", "collectives._c10d"]
# Modules that only the first of several equal calls enters, from `_prepare` and `_execute`.
FIRST = {"_convert", "_planner", "_cost", "_transfer", "_boxes", "ragged._spec"}
# Comparisons of values, the interface, and private names of torch.
LEAVES = {"_placements", "_layout", "collectives._interface", "_torch"}


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
        found[name] = [modules_called(call, PACKAGE), modules_called(call, PACKAGE)]
    return found


def without_leaves(modules: list[str]) -> list[str]:
    return [module for module in modules if module not in LEAVES]


def test_a_redistribution_enters_six_modules_downwards(ranks: Ranks) -> None:
    for found in ranks(4).run(journeys):
        for first, later in found.values():
            assert list(dict.fromkeys(without_leaves(later))) == DOWN
            assert {*first} - LEAVES <= {*DOWN} | FIRST


def test_a_later_gather_makes_few_calls_and_returns_to_few_modules(ranks: Ranks) -> None:
    for found in ranks(4).run(journeys):
        first, later = found["S(0) -> R"]
        assert len(later) <= 30
        assert count_returns(without_leaves(later)) <= 3
        assert len(first) <= 500


def test_the_page_lists_the_modules_that_a_change_of_layout_enters() -> None:
    text = INSIDE.read_text(encoding="utf-8")
    listed = re.findall(r"^\d\. `([\w/]+)`:", text, re.MULTILINE)
    assert [name.replace("/", ".") for name in listed] == DOWN
