"""Training loops with clipping, a gradient scaler and other wrappers."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hp_dtensor import clip_grad_norm_
from hp_fsdp import fully_shard

from .models import (
    Block,
    Gradients,
    Net,
    full,
    gradients,
    loss_of,
    make,
    mesh_of,
    parameters,
    shard,
    tokens,
    worst,
)

Ranks = Callable[[int], RankPool]
NAMES = {1: ("fsdp",), 2: ("dp_replicate", "fsdp")}


def losses(rank: int, world: int, one_unit: bool, option: Any) -> tuple[list[float], Gradients]:
    """Return the losses of ten steps of Adam, gradients set to None or to zero in turn."""
    model: Any = make(Net)
    mesh = mesh_of((world,), NAMES[1])
    if one_unit:
        fully_shard(model, mesh, reshard_after_forward=option)
    else:
        shard(model, mesh, reshard_after_forward=option)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = []
    for step in range(10):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = loss_of(model, tokens(rank, step))
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen, parameters(model)


@pytest.mark.parametrize(
    ("world", "one_unit", "option"),
    [(2, True, None), (2, False, False), (4, False, True), (4, False, 2)],
)
def test_ten_steps_of_adam_equal_one_process(
    ranks: Ranks, world: int, one_unit: bool, option: Any
) -> None:
    plain = make(Net)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    expected: list[list[float]] = []
    for step in range(10):
        optimizer.zero_grad()
        expected.append([])
        for replica in range(world):
            loss = loss_of(plain, tokens(replica, step))
            (loss / world).backward()
            expected[-1].append(loss.item())
        optimizer.step()
    for rank, (seen, end) in enumerate(ranks(world).run(losses, world, one_unit, option)):
        for found, wanted in zip(seen, expected, strict=True):
            assert math.isclose(found, wanted[rank], rel_tol=1e-8)
        assert worst(end, parameters(plain)) < 1e-6


def against_torch(rank: int, world: int) -> tuple[Gradients, Gradients]:
    """Return float32 gradients of this package and of torch's second version."""
    found = []
    for wrap in (fully_shard, torch.distributed.fsdp.fully_shard):
        model: Any = make(Net, torch.float32)
        apply: Any = wrap
        for module in (*model.blocks, model):
            apply(module, mesh=mesh_of((world,), NAMES[1]))
        loss_of(model, tokens(rank)).backward()
        found.append(gradients(model))
    return found[0], found[1]


@pytest.mark.parametrize("world", [3, 4, 8])
def test_gradients_are_those_of_torch_within_rounding(ranks: Ranks, world: int) -> None:
    pool = ranks(world) if world == 4 else RankPool(world)
    try:
        for ours, theirs in pool.run(against_torch, world):
            assert worst(ours, theirs) < 1e-5
    finally:
        if world != 4:
            pool.close()  # no other test needs so many processes


def clipped(rank: int, shape: tuple[int, ...], norm_type: float) -> tuple[float, Gradients]:
    model: Any = shard(make(Net), mesh_of(shape, NAMES[len(shape)]))
    loss_of(model, tokens(rank)).backward()
    # torch's has no largest value of a shard without rows
    clip: Any = clip_grad_norm_ if math.isinf(norm_type) else nn.utils.clip_grad_norm_
    norm = clip(model.parameters(), 0.01, norm_type)
    return float(full(norm)), gradients(model)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_gradients_are_clipped_to_the_norm_of_the_whole_model(
    ranks: Ranks, shape: tuple[int, ...], norm_type: float
) -> None:
    plain = make(Net)
    for rank in range(4):
        (loss_of(plain, tokens(rank)) / 4).backward()
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type))
    for found, clip in ranks(4).run(clipped, shape, norm_type):
        assert math.isclose(found, norm, rel_tol=1e-12)
        assert worst(clip, gradients(plain)) < 1e-12


def scaled(rank: int) -> tuple[list[bool], list[float]]:
    """Scale losses; in the second step one element of one rank's gradients is infinite."""
    model: Any = shard(make(Net, torch.float32), mesh_of((2,), NAMES[1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    moved, scales = [], []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, tokens(rank, step))).backward()
        if step == 1 and rank == 1:
            model.head.bias.grad.to_local()[0] = math.inf
        before = [p.to_local().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        after = [p.to_local() for p in model.parameters()]
        pairs = itertools.starmap(torch.equal, zip(before, after, strict=True))
        moved.append(not all(pairs))
        scales.append(scaler.get_scale())
    return moved, scales


def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(ranks: Ranks) -> None:
    for moved, scales in ranks(2).run(scaled):
        assert moved == [True, False, True]
        assert scales == [4.0, 2.0, 2.0]


class Split(nn.Module):
    """A part to shard, and a part that something else looks after."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = Block()
        self.theirs = Block()

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        found: Tensor = self.theirs(self.ours(x))
        return found


def input_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 8, generator=generator, dtype=torch.float64)


def beside_ddp(rank: int) -> Gradients:
    model: Any = make(Split)
    model.theirs = DistributedDataParallel(model.theirs)
    fully_shard(model, mesh_of((2,), NAMES[1]), ignored_params=set(model.theirs.parameters()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        model(input_of(rank, step)).pow(2).mean().backward()
        optimizer.step()
    return {name.replace(".module", ""): value for name, value in parameters(model).items()}


def test_ignored_parameters_may_belong_to_torchs_data_parallelism(ranks: Ranks) -> None:
    plain = make(Split)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            (plain(input_of(rank, step)).pow(2).mean() / 2).backward()
        optimizer.step()
    for found in ranks(2).run(beside_ddp):
        assert worst(found, parameters(plain)) < 1e-9
