"""Exceptions in the middle of a step, and explicit unshard, reshard and reset."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_fsdp import StateError, UnshardHandle, fully_shard

from .models import (
    Gradients,
    Net,
    full,
    gradients,
    loss_of,
    make,
    mesh_of,
    reference,
    shard,
    tokens,
    worst,
)

Ranks = Callable[[int], RankPool]


class Broken(RuntimeError):
    """What the tests raise."""


def fail(*_: Any) -> None:
    raise Broken


def failing_step(rank: int, where: str, warm: bool) -> tuple[Gradients, bool]:
    """Fail in one place, with a prefetch under way, reset, and do a clean step."""
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    if warm:
        loss_of(model, tokens(rank, 5)).backward()
        model.zero_grad()
    target = model.blocks[1].down
    if where == "forward":
        handle = target.register_forward_hook(fail)
        with pytest.raises(Broken):
            model(tokens(rank))
    else:
        handle = target.register_full_backward_hook(fail)
        with pytest.raises(Broken):
            loss_of(model, tokens(rank)).backward()
    handle.remove()
    refused = where == "forward"
    if where == "backward":
        with pytest.raises(StateError, match="reset"):
            model(tokens(rank))
        refused = True
    model.reset()
    clean = all(isinstance(p, DTensor) for p in model.parameters())
    model.zero_grad()
    loss_of(model, tokens(rank)).backward()
    return gradients(model), clean and refused


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("warm", [False, True])
def test_after_reset_the_next_step_is_clean(ranks: Ranks, where: str, warm: bool) -> None:
    expected = reference(2)
    for found, clean in ranks(2).run(failing_step, where, warm):
        assert clean
        assert worst(found, expected) < 1e-12


def by_hand(rank: int) -> dict[str, bool]:
    plain = dict(make(Net).named_parameters())
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    block = model.blocks[0]
    handle = block.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    waiting = isinstance(block.up.weight, DTensor)
    handle.wait()
    handle.wait()
    there = torch.equal(block.up.weight, plain["blocks.0.up.weight"])
    others = isinstance(model.head.weight, DTensor)
    block.reshard()
    block.reshard()
    back = isinstance(block.up.weight, DTensor)
    block.unshard(async_op=True)
    block.reset()
    after = isinstance(block.up.weight, DTensor)
    block.unshard()
    saved = all(isinstance(value, DTensor) for value in model.state_dict().values())
    return {"1": waiting, "2": there, "3": others, "4": back, "5": after, "6": saved}


def test_unshard_reshard_and_reset_by_hand(ranks: Ranks) -> None:
    for found in ranks(2).run(by_hand):
        assert all(found.values()), found


def mixed_passes(rank: int) -> Gradients:
    """Evaluate, run a part alone, run in another order, then step."""
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    with torch.no_grad():
        model(tokens(rank, 3))
    model.blocks[2](torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    model.zero_grad()
    loss_of(model, tokens(rank, 4)).backward()
    model.zero_grad()
    order = list(model.blocks)
    model.blocks = nn.ModuleList([order[2], order[0], order[1]])
    loss_of(model, tokens(rank, 4)).backward()
    model.zero_grad()
    model.blocks = nn.ModuleList(order)
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_a_step_is_right_after_other_passes(ranks: Ranks) -> None:
    expected = reference(2)
    for found in ranks(2).run(mixed_passes):
        assert worst(found, expected) < 1e-12


class Listed(nn.Module):
    """Two modules of one unit, the second of which may not run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(1)
        self.extra = nn.Linear(11, 11)

    def forward(self, batch: Tensor) -> Tensor:
        """Return logits without the extra layer."""
        logits: Tensor = self.net(batch)
        return logits


def listed(rank: int) -> list[Gradients]:
    model = make(Listed)
    fully_shard([model.net.head, model.extra], mesh_of((2,), ("fsdp",)))
    fully_shard(model, mesh_of((2,), ("fsdp",)))
    seen = []
    for _ in range(2):
        loss_of(model, tokens(rank)).backward()
        seen.append(gradients(model))
        model.zero_grad()
    return seen


def test_a_list_is_one_unit_even_if_half_of_it_runs(ranks: Ranks) -> None:
    expected = reference(2, Listed)
    for steps in ranks(2).run(listed):
        assert [worst(found, expected) < 1e-12 for found in steps] == [True, True]


def converted(rank: int) -> tuple[bool, bool, Gradients]:
    """Convert and load after sharding: parameters must come back to the flat shard."""
    model = shard(make(Net, torch.float32), mesh_of((2,), ("fsdp",)))
    before = list(model.parameters())
    model.double()
    same = all(x is y for x, y in zip(before, model.parameters(), strict=True))
    source = dict(make(Net).named_parameters())
    whole = {
        name: full(p) for name, p in shard(make(Net), mesh_of((2,), ("fsdp",))).named_parameters()
    }
    donor = shard(make(Net), mesh_of((2,), ("fsdp",)))
    model.load_state_dict(donor.state_dict(), assign=True)
    equal = all(torch.equal(full(p), source[name]) for name, p in model.named_parameters())
    equal &= all(torch.equal(whole[name], source[name]) for name in source)
    loss_of(model, tokens(rank)).backward()
    return same, equal, gradients(model)


def test_conversion_and_assigned_state_end_in_the_flat_shard(ranks: Ranks) -> None:
    expected = reference(2)
    for same, equal, found in ranks(2).run(converted):
        assert same
        assert equal
        assert worst(found, expected) < 1e-12
