"""Sharded modules inside a module that torch's composable `replicate` replicates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from rank_pool import RankPool
from torch import nn
from torch.distributed._composable.replicate import replicate

from hp_fsdp import ModuleError, fully_shard

from .models import WIDTH, Block, Gradients, gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]
# torch's replicate is DistributedDataParallel below, which asks for lazily made names.
pytestmark = pytest.mark.filterwarnings("default")


class Outer(nn.Module):
    """A block to shard, and a layer that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the layer's output for the block's output."""
        return self.last(self.block(x))


def input_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def replicated(rank: int, layout: Any) -> list[Gradients]:
    """Train two steps of a replicated model that has a sharded block."""
    model: Any = make(Outer)
    fully_shard(model.block, mesh_of((2,), ("fsdp",)), layout=layout)
    apply: Any = replicate
    apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        model(input_of(rank)).pow(2).mean().backward()
        found.append(gradients(model))
        optimizer.step()
    return found


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_replicate_leaves_sharded_modules_alone(ranks: Ranks, layout: str) -> None:
    plain: Any = make(Outer)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            (plain(input_of(rank)).pow(2).mean() / 2).backward()
        expected.append(gradients(plain))
        optimizer.step()
    for found in ranks(2).run(replicated, layout):
        assert [worst(a, b) < 1e-12 for a, b in zip(found, expected, strict=True)] == [True, True]


def twice(rank: int) -> list[str]:
    """Give a module to two functions of which each wants its parameters."""
    mesh = mesh_of((2,), ("fsdp",))
    apply: Any = replicate
    texts = []
    for first, second in (
        (apply, lambda block: fully_shard(block, mesh)),
        (lambda block: torch.distributed.fsdp.fully_shard(block, mesh=mesh), fully_shard),
        (fully_shard, lambda block: torch.distributed.fsdp.fully_shard(block, mesh=mesh)),
    ):
        block: Any = make(Block)
        first(block) if first is not fully_shard else fully_shard(block, mesh)
        try:
            second(block)
        except (ModuleError, AssertionError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_a_module_belongs_to_one_of_them(ranks: Ranks) -> None:
    for replicate_first, torch_first, ours_first in ranks(2).run(twice):
        assert "Block was passed to torch's replicate before" in replicate_first
        assert "Block was passed to torch's fully_shard before" in torch_first
        assert "fully_shard has already been applied" in ours_first
