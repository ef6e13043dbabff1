"""An int ``reshard_after_forward``: backward gathers over fewer ranks."""

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_dtensor import RecordingCollectives

from .models import (
    WIDTH,
    Gradients,
    Net,
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


def stepped(rank: int, size: int, shape: tuple[int, ...]) -> list[tuple[Gradients, bool]]:
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])
    model = shard(make(Net), mesh, reshard_after_forward=size)
    seen = []
    for _ in range(2):
        loss = loss_of(model, tokens(rank))
        sharded = all(isinstance(p, DTensor) for p in model.parameters())
        loss.backward()
        seen.append((gradients(model), sharded))
        model.zero_grad()
        loss_of(model, tokens(rank, 3))  # a loss that is thrown away leaves nothing behind
    return seen


@pytest.mark.parametrize(("size", "shape"), [(2, (4,)), (1, (4,)), (4, (4,)), (2, (1, 4))])
def test_gradients_equal_one_process(ranks: Ranks, size: int, shape: tuple[int, ...]) -> None:
    expected = reference(4)
    for steps in ranks(4).run(stepped, size, shape):
        for found, sharded in steps:
            assert worst(found, expected) < 1e-12
            assert sharded == (size != 1)


def gathered(rank: int) -> dict[str, tuple[int, int]]:
    record = RecordingCollectives()
    mesh = mesh_of((4,), ("fsdp",))
    model: Any = shard(make(Net), mesh, reshard_after_forward=2, collectives=record)
    loss_of(model, tokens(rank)).backward()
    traffic = record.by_call
    return {axis: (t.calls, t.bytes) for (axis, name), t in traffic.items() if name == "all_gather"}


def test_backward_gathers_over_the_neighbours_only(ranks: Ranks) -> None:
    for found in ranks(4).run(gathered):
        forward, backward = found["fsdp"], found["fsdp[2]"]
        assert forward[0] == backward[0] == 4  # units
        assert backward[1] * 3 == forward[1] * 2  # each rank receives half of the unit, not 3/4


def interrupted(rank: int) -> Gradients:
    """Call ``reshard`` between forward and backward, reset, and run a step."""
    model = shard(make(Net), mesh_of((4,), ("fsdp",)), reshard_after_forward=2)
    loss = loss_of(model, tokens(rank))
    block = model.blocks[1]
    block.reshard()
    block.reset()
    loss_of(model, tokens(rank)).backward()
    del loss
    return gradients(model)


def test_reset_from_between_forward_and_backward_is_clean(ranks: Ranks) -> None:
    expected = reference(4)
    for found in ranks(4).run(interrupted):
        assert worst(found, expected) < 1e-12


def living() -> list[Tensor]:
    """Return all tensors that live in this process."""
    gc.collect()
    return [x for x in gc.get_objects() if type(x) is torch.Tensor]


def rests(rank: int, option: bool | int) -> list[int]:
    """Return the growth of memory between steps after the first and the second step."""
    model = shard(make(Net), mesh_of((4,), ("fsdp",)), reshard_after_forward=option)
    earlier = living()  # not freed during the test: gloo can hold tensors of earlier tests
    known = {x.untyped_storage().data_ptr() for x in earlier}
    levels = []
    for step in range(2):
        loss_of(model, tokens(rank, step)).backward()
        model.zero_grad()
        sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in living()}
        levels.append(sum(size for place, size in sizes.items() if place not in known))
    return levels


def test_nothing_that_was_kept_for_backward_outlives_it(ranks: Ranks) -> None:
    assert ranks(4).run(rests, 2) == ranks(4).run(rests, True)


def groups_made(rank: int) -> tuple[int, int, Gradients]:
    """Count the process groups that a part's first pass makes, and then its root's."""
    mesh = mesh_of((4,), ("fsdp",))
    model: Any = shard(make(Net), mesh, reshard_after_forward=2)
    with mock.patch("torch.distributed.new_group", wraps=dist.new_group) as new_group:
        with torch.no_grad():
            model.blocks[0](torch.ones(2, WIDTH, dtype=torch.float64))
        by_part = new_group.call_count
        loss_of(model, tokens(rank)).backward()
        return by_part, new_group.call_count, gradients(model)


def test_a_root_uses_the_groups_that_a_part_made(ranks: Ranks) -> None:
    for by_part, by_both, found in ranks(4).run(groups_made):
        assert (by_part, by_both) == (1, 1)
        assert worst(found, reference(4)) < 1e-12
