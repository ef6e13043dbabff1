"""Number of Python calls of one step in the package, and of returns to an earlier module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool, count_returns, count_upward_calls, modules_called
from torch import nn

from hp_fsdp import FSDPModule, fully_shard

from .models import mesh_of

Ranks = Callable[[int], RankPool]
PACKAGE = FSDPModule.__module__.rpartition("._")[0]
UNITS = 4


def journeys(rank: int) -> tuple[list[str], list[str], list[int]]:
    """Return the calls of a forward and its backward, after the steps that record the order.

    Also return how many calls of a forward and of a backward go back up.
    """
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
        forward = modules_called(lambda: losses.append(model(torch.ones(2, 8)).sum()), PACKAGE)
        backward = modules_called(lambda: losses.pop().backward(), PACKAGE)
    model.zero_grad()
    upward = [count_upward_calls(lambda: losses.append(model(torch.ones(2, 8)).sum()), PACKAGE)]
    upward.append(count_upward_calls(lambda: losses.pop().backward(), PACKAGE))
    return forward, backward, upward


@pytest.mark.gloo  # its calls are counted
def test_three_blocks_and_a_root_make_few_calls_and_returns(ranks: Ranks) -> None:
    for forward, backward, upward in ranks(2).run(journeys):
        assert len(forward) <= 175
        assert len(backward) <= 233
        assert count_returns(forward) <= 117
        assert count_returns(backward) <= 130
        assert upward == [6, 0]  # blocks inside the root's forward
