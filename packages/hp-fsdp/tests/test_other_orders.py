"""Passes in another order than the one before, parts of a list alone, and rings under them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn

from hp_fsdp import Ring, fully_shard

from .models import Gradients, gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]
WIDTH = 8


class Chosen(nn.Module):
    """Three blocks, run in the order that is asked for, and a weight of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        """Apply the blocks in that order."""
        for i in order:
            x = torch.tanh(self.blocks[i](x))
        return x @ self.last


def batch(rank: int) -> Tensor:
    return torch.sin(torch.arange(2.0 * WIDTH, dtype=torch.float64) + rank).view(2, WIDTH)


def alone(orders: Sequence[Sequence[int]]) -> Gradients:
    model = make(Chosen)
    for rank in range(2):
        for order in orders:
            (model(batch(rank), order).pow(2).mean() / 2).backward()
    return gradients(model)


def in_orders(rank: int, orders: Sequence[Sequence[int]], layout: Any) -> Gradients:
    mesh, ring = mesh_of((2,), ("fsdp",)), Ring(2)
    model: Any = make(Chosen)
    for block in model.blocks:
        fully_shard(block, mesh, buffers=ring, layout=layout)
    fully_shard(model, mesh, layout=layout)
    for order in orders:
        model(batch(rank), order).pow(2).mean().backward()
    return gradients(model)


ORDERS = [
    ((0, 1, 2), (1, 2)),
    ((0, 1, 2), (2, 0, 1)),
    ((2, 0, 1), (0, 1, 2)),
    ((0, 1, 2, 0), (0, 1, 2, 0)),
]


@pytest.mark.parametrize("layout", ["exact", "ragged"])
@pytest.mark.parametrize("orders", ORDERS, ids=str)
def test_a_ring_serves_passes_in_any_order(ranks: Ranks, orders: Any, layout: str) -> None:
    for found in ranks(2).run(in_orders, orders, layout):
        assert worst(found, alone(orders)) < 1e-12


def after_a_part(rank: int, backward: bool) -> Gradients:
    """Run the root, then one module of a list alone, then the root."""
    model: Any = make(Chosen)
    fully_shard([model.blocks[0], model.blocks[1]], mesh_of((2,), ("fsdp",)))
    fully_shard(model, mesh_of((2,), ("fsdp",)))
    model(batch(rank), (0, 1, 2)).pow(2).mean().backward()
    with torch.set_grad_enabled(backward):
        part = model.blocks[0](batch(rank))
    if backward:
        part.sum().backward()
    model.zero_grad()
    model(batch(rank), (0, 1, 2)).pow(2).mean().backward()
    return gradients(model)


@pytest.mark.parametrize("backward", [False, True])
def test_a_module_of_a_list_may_run_alone_before_the_root(ranks: Ranks, backward: bool) -> None:
    for found in ranks(2).run(after_a_part, backward):
        assert worst(found, alone([(0, 1, 2)])) < 1e-12
