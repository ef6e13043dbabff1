"""Activation checkpointing, and checkpoints on disk."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hp_fsdp import fully_shard

from .models import (
    Block,
    Gradients,
    Net,
    full,
    gradients,
    in_one_run,
    loss_of,
    make,
    mesh_of,
    parameters,
    reference,
    shard,
    tokens,
    worst,
)

Ranks = Callable[[int], RankPool]


class Nested(nn.Module):
    """A block with a nested unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.outer = Block()

    def forward(self, x: Tensor) -> Tensor:
        """Return the outer block of the inner one's output."""
        return cast(Tensor, self.outer(self.inner(x)))


class Recomputing(Net):
    """The net, with every block's activations recomputed in backward."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Nested() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return cast(Tensor, self.head(x))


class Reentrant(Recomputing):
    """The same through autograd within autograd."""

    reentrant = True


def recomputing_steps(rank: int, kind: type[Recomputing]) -> list[Gradients]:
    mesh = mesh_of((2,), ("fsdp",))
    model = make(kind)
    for block in model.blocks:
        fully_shard(block.inner, mesh)
    shard(model, mesh)
    seen = []
    for _ in range(2):
        loss_of(model, tokens(rank)).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@pytest.mark.parametrize("kind", [Recomputing, Reentrant])
def test_recomputed_activations_give_the_same_gradients(
    ranks: Ranks, kind: type[Recomputing]
) -> None:
    expected = reference(2, kind)
    for steps in ranks(2).run(recomputing_steps, kind):
        assert [worst(found, expected) < 1e-12 for found in steps] == [True, True]


def moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> Gradients:
    return {
        f"{name}.{key}": full(value)
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }


def trained(rank: int) -> tuple[Any, torch.optim.Optimizer]:
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_and_load(rank: int, folder: str) -> dict[str, bool]:
    model, optimizer = trained(rank)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state_dict_saver.save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder
    )
    dist.barrier()
    torch.manual_seed(99)
    other = shard(Net().double(), mesh_of((2,), ("fsdp",)))
    its_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    other_state, its_state = get_state_dict(other, its_optimizer)
    state_dict_loader.load({"model": other_state, "optimizer": its_state}, checkpoint_id=folder)
    set_state_dict(other, its_optimizer, model_state_dict=other_state, optim_state_dict=its_state)
    same = equal(parameters(model), parameters(other))
    same_moments = equal(moments(optimizer, model), moments(its_optimizer, other))
    for each, its in ((model, optimizer), (other, its_optimizer)):
        loss_of(each, tokens(rank, 8)).backward()
        its.step()
    return {
        "parameters": same,
        "moments": same_moments,
        "dtensors": all(isinstance(value, DTensor) for value in other_state.values()),
        "next step": equal(parameters(model), parameters(other)),
    }


def equal(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.filterwarnings("default")
def test_saved_state_loads_bit_equal(ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in ranks(2).run(save_and_load, str(Path(folder) / "saved")):
            assert all(found.values()), found


def one_place(rank: int) -> bool:
    """Return whether each shard is still in its group's flat buffer after optimizer steps."""
    model, _ = trained(rank)
    return in_one_run(model.blocks[0].parameters())


@pytest.mark.nccl
def test_optimizer_steps_write_to_the_flat_shard(ranks: Ranks) -> None:
    assert ranks(2).run(one_place) == [True, True]
