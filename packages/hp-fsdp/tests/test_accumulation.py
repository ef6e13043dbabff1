"""Several backwards before a step."""

from collections.abc import Callable

import pytest
from rank_pool import RankPool

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
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=["fsdp", "ddp"])
def test_gradients_of_three_backwards_add_up(
    ranks: Ranks, shape: tuple[int, ...], how: str
) -> None:
    expected = reference(2, steps=(0, 1, 2))
    for found, before in ranks(2).run(accumulate, shape, how):
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
