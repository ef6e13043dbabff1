"""Passes in another order than the one before, and parts of a list alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn

from hp_dtensor import RecordingCollectives
from hp_fsdp import fully_shard

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
    mesh = mesh_of((2,), ("fsdp",))
    model: Any = make(Chosen)
    for block in model.blocks:
        fully_shard(block, mesh, layout=layout)
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
def test_passes_may_have_any_order(ranks: Ranks, orders: Any, layout: str) -> None:
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


def prefetched_in_vain(rank: int, how: str) -> Gradients:
    """Run a backward in which a block is prefetched that it does not need."""
    mesh = mesh_of((2,), ("fsdp",))
    model: Any = make(Chosen)
    for block in model.blocks:
        fully_shard(block, mesh)
    fully_shard(model, mesh)
    if how == "told":
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[2]])
    loss = model(batch(rank), (2, 0, 1)).pow(2).mean()
    if how == "eval":
        with torch.no_grad():
            model(batch(rank), (0, 1, 2))
    loss.backward()
    return gradients(model)


@pytest.mark.parametrize("how", ["eval", "told"])
def test_a_prefetch_of_another_block_changes_no_gradient(ranks: Ranks, how: str) -> None:
    for found in ranks(2).run(prefetched_in_vain, how):
        assert worst(found, alone([(2, 0, 1)])) < 1e-12


def not_reached(rank: int) -> Gradients:
    """Leave the last block out of the first of two backwards in a step."""
    mesh = mesh_of((2,), ("fsdp",))
    model: Any = make(Beside)
    for block in model.blocks:
        fully_shard(block, mesh)
    fully_shard(model, mesh)
    for _ in range(3):
        model.zero_grad()
        model.set_is_last_backward(False)
        first, last = model(batch(rank))
        first.pow(2).mean().backward()
        model.set_is_last_backward(True)
        last.pow(2).mean().backward()
    return gradients(model)


class Beside(nn.Module):
    """Three blocks; the last one makes the second result only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of the head and of the last block."""
        x = torch.tanh(self.blocks[0](x))
        y = self.blocks[2](torch.tanh(self.blocks[1](x.detach())))
        return self.head(x), y


def test_a_block_may_wait_for_a_later_backward_of_the_step(ranks: Ranks) -> None:
    model = make(Beside)
    for rank in range(2):
        first, last = model(batch(rank))
        ((first.pow(2).mean() + last.pow(2).mean()) / 2).backward()
    for found in ranks(2).run(not_reached):
        assert worst(found, gradients(model)) < 1e-12


class Around(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.embedding, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Embed, apply the blocks and the head."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        made: Tensor = self.head(x)
        return made


def ends_in_one_unit(rank: int, grads: Any) -> tuple[list[int], Gradients]:
    """Return the gathers of each step, and the gradients of the last."""
    mesh = mesh_of((2,), ("fsdp",))
    model: Any = make(Around)
    record = RecordingCollectives()
    for block in model.blocks:
        fully_shard(block, mesh, collectives=record)
    ends = [model.embedding, model.head]
    fully_shard(ends, mesh, grads=grads, direct_bytes=0, collectives=record)
    fully_shard(model, mesh, collectives=record)
    calls = []
    for _ in range(3):
        record.reset()
        model.zero_grad()
        model(torch.arange(4) + rank).pow(2).mean().backward()
        calls.append(record.by_call["fsdp", "all_gather"].calls)
    return calls, gradients(model)


def test_a_unit_around_others_gathers_none_of_them_again(ranks: Ranks) -> None:
    model = make(Around)
    for rank in range(2):
        (model(torch.arange(4) + rank).pow(2).mean() / 2).backward()
    packed_late = ranks(2).run(ends_in_one_unit, "copy")
    for (calls, found), (expected, _) in zip(
        ranks(2).run(ends_in_one_unit, "accumulate"), packed_late, strict=True
    ):
        assert calls == expected
        assert worst(found, gradients(model)) < 1e-12
