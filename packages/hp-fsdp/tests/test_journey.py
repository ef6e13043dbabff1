"""Python calls of one step inside the package, and how often it returns to a module."""

import sys
from collections.abc import Callable
from itertools import groupby
from types import FrameType
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import nn

from hp_fsdp import FSDPModule, fully_shard

from .models import mesh_of

Ranks = Callable[[int], RankPool]
PACKAGE = FSDPModule.__module__.rpartition("._")[0]
UNITS = 4


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


def journeys(rank: int) -> tuple[list[str], list[str]]:
    """Return the calls of a forward and of its backward, after steps that learn the order."""
    mesh = mesh_of((2,), ("fsdp",))
    model: Any = nn.Sequential()
    for _ in range(UNITS - 1):
        block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        model.append(fully_shard(block, mesh))
    model.append(nn.Linear(8, 8))
    fully_shard(model, mesh)
    losses: list[Any] = []
    for _ in range(4):
        model.zero_grad()
        forward = entered(lambda: losses.append(model(torch.ones(2, 8)).sum()))
        backward = entered(lambda: losses.pop().backward())
    return forward, backward


def returns(modules: list[str]) -> int:
    """Return how often the calls come back to a module that they have entered before."""
    route = [name for name, _ in groupby(modules)]
    return len(route) - len({*route})


@pytest.mark.gloo  # whose calls are counted
def test_three_blocks_and_a_root_make_few_calls_and_returns(ranks: Ranks) -> None:
    for forward, backward in ranks(2).run(journeys):
        assert len(forward) <= 190
        assert len(backward) <= 261
        assert returns(forward) <= 131
        assert returns(backward) <= 168
