"""Checkpoints between this package, torch's, and one process, on different numbers of ranks."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from rank_pool import RankPool
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hp_fsdp import fully_shard, sharded_optimizer

from .models import Gradients, Net, full, loss_of, make, mesh_of, parameters, tokens

Ranks = Callable[[int], RankPool]
Saved = tuple[Gradients, Gradients]


def built(kind: str, world: int, seed: int) -> tuple[Any, Any]:
    """Return a model and its optimizer, sharded as ``kind`` says."""
    torch.manual_seed(seed)
    model: Any = Net().double()
    if kind == "one process":
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)
    mesh = mesh_of((world,), ("fsdp",))
    wrap: Any = torch.distributed.fsdp.fully_shard if kind == "torch" else fully_shard
    options: dict[str, Any] = {"layout": "ragged"} if kind == "ragged" else {}
    for block in model.blocks:
        wrap(block, mesh=mesh, **options)
    wrap(model, mesh=mesh, **options)
    if kind == "flat optimizer":
        return model, sharded_optimizer(torch.optim.AdamW, model, lr=0.1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def state_of(model: Any, optimizer: Any) -> Saved:
    found = {
        f"{name}.{key}": full(value)
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    return parameters(model), found


def save(rank: int, kind: str, world: int, folder: str) -> Saved:
    model, optimizer = built(kind, world, 0)
    for step in range(2):
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    state_dict_saver.save(state, checkpoint_id=folder, no_dist=world == 1)
    if world > 1:
        dist.barrier()
    return state_of(model, optimizer)


def load(rank: int, kind: str, world: int, folder: str) -> tuple[Saved, bool]:
    model, optimizer = built(kind, world, 99)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    state_dict_loader.load(state, checkpoint_id=folder, no_dist=world == 1)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    found = state_of(model, optimizer)
    before = full(model.head.weight)
    loss_of(model, tokens(rank)).backward()
    optimizer.step()
    return found, not torch.equal(before, full(model.head.weight))


CASES = [
    (("ours", 4), ("ours", 2)),
    (("ours", 4), ("torch", 2)),
    (("torch", 4), ("ours", 2)),
    (("flat optimizer", 2), ("torch", 4)),
    (("one process", 1), ("flat optimizer", 2)),
    (("ragged", 4), ("ragged", 2)),
    (("torch", 2), ("ragged", 4)),
    (("ragged", 2), ("one process", 1)),
]
RARE = [
    (("ours", 2), ("ours", 4)),
    (("torch", 2), ("flat optimizer", 4)),
    (("flat optimizer", 4), ("ours", 2)),
    (("flat optimizer", 2), ("one process", 1)),
    (("ragged", 2), ("ragged", 4)),
    (("ragged", 4), ("torch", 2)),
    (("one process", 1), ("ragged", 2)),
]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("source", "target"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in RARE)],
    ids=lambda case: f"{case[0]} {case[1]}".replace(" ", "-"),
)
def test_parameters_and_moments_come_back_bit_by_bit(
    ranks: Ranks, source: tuple[str, int], target: tuple[str, int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "saved")
        saved = ranks(source[1]).run(save, *source, path)[0]
        loaded = ranks(target[1]).run(load, *target, path)
    expected = dict(make(Net).named_parameters())
    for (found_parameters, found_moments), moves in loaded:
        assert moves
        assert found_parameters.keys() == expected.keys()
        for found, wanted in zip((found_parameters, found_moments), saved, strict=True):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
