"""Several backwards before a step."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor

from .models import (
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


def accumulate(rank: int, shape: tuple[int, ...], how: str) -> tuple[Gradients, int]:
    mesh = mesh_of(shape, ("dp_replicate", "fsdp")[-len(shape) :])
    model = shard(make(Net), mesh)
    loss_of(model, tokens(rank, 7)).backward()
    model.zero_grad(set_to_none=how != "zeros")
    seen = -1
    for step in range(3):
        if how == "unsharded" and step < 2:
            with model.no_sync():
                loss_of(model, tokens(rank, step)).backward()
            seen = len(gradients(model))
        elif how == "setter" and step < 2:
            model.set_requires_gradient_sync(False)
            loss_of(model, tokens(rank, step)).backward()
            model.set_requires_gradient_sync(True)
        else:
            loss_of(model, tokens(rank, step)).backward()
    return gradients(model), seen


@pytest.mark.parametrize("how", ["sharded", "zeros", "unsharded", "setter"])
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2)], ids=["fsdp", "ddp", "hsdp"])
def test_gradients_of_three_backwards_add_up(
    ranks: Ranks, shape: tuple[int, ...], how: str
) -> None:
    world = torch.Size(shape).numel()
    expected = reference(world, steps=(0, 1, 2))
    for found, before in ranks(world).run(accumulate, shape, how):
        assert worst(found, expected) < 1e-12
        assert before == (0 if how == "unsharded" else -1)


def keep_old(rank: int) -> bool:
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    loss_of(model, tokens(rank, 0)).backward()
    kept = [(p.grad, p.grad.to_local().clone()) for p in model.parameters()]
    model.zero_grad()
    loss_of(model, tokens(rank, 1)).backward()
    return all(bool((gradient.to_local() == copy).all()) for gradient, copy in kept)


def test_gradients_that_someone_keeps_are_not_overwritten(ranks: Ranks) -> None:
    assert ranks(2).run(keep_old) == [True, True]


class Choosing(Net):
    """Runs only the blocks that it is told to."""

    chosen: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(tokens)
        for index in self.chosen:
            x = self.blocks[index](x)
        return cast(Tensor, self.head(x))


def choosing(rank: int) -> tuple[Gradients, list[bool]]:
    """Skip in the synchronised backward a block that ran without; then once more, alone."""
    model = shard(make(Choosing), mesh_of((2,), ("fsdp",)))
    model.chosen = (0, 2)
    with model.no_sync():
        loss_of(model, tokens(rank, 0)).backward()
    model.chosen = (1, 2)
    loss_of(model, tokens(rank, 1)).backward()
    seen = gradients(model)
    model.zero_grad()
    loss_of(model, tokens(rank, 2)).backward()
    return seen, [p.grad is None for p in model.blocks[0].parameters()]


def test_a_unit_that_the_synchronised_backward_skips_is_reduced_with_it(ranks: Ranks) -> None:
    plain = make(Choosing)
    for replica in range(2):
        for step, plain.chosen in enumerate([(0, 2), (1, 2)]):
            loss_of(plain, tokens(replica, step)).backward()
    expected = {name: gradient / 2 for name, gradient in gradients(plain).items()}
    for found, nothing_left in ranks(2).run(choosing):
        assert worst(found, expected) < 1e-12
        assert all(nothing_left)


def dropped(rank: int) -> Gradients:
    model = shard(make(Net), mesh_of((2,), ("fsdp",)))
    with model.no_sync():
        loss_of(model, tokens(rank, 9)).backward()
    model.reset()
    loss_of(model, tokens(rank)).backward()
    return gradients(model)


def test_reset_drops_the_gradients_of_no_sync(ranks: Ranks) -> None:
    expected = reference(2)
    for found in ranks(2).run(dropped):
        assert worst(found, expected) < 1e-12
