"""Activation checkpointing in its several forms, with units of every grain."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from hp_fsdp import fully_shard

from .models import Gradients, Net, gradients, loss_of, make, mesh_of, reference, tokens, worst

Ranks = Callable[[int], RankPool]
WRAPPED = "_checkpoint_wrapped_module."


class Recomputing(nn.Module):
    """Runs a module and recomputes it in backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output."""
        found: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return found


def recomputed(block: nn.Module, how: str) -> nn.Module:
    if how == "wrapper":
        wrapped: nn.Module = wrapping.checkpoint_wrapper(block)
        return wrapped
    return Recomputing(block, how == "reentrant")


def steps(rank: int, how: str, grain: str, options: dict[str, Any]) -> list[Gradients]:
    """Return the gradients of two steps; a unit is a block, its layers, or the whole model."""
    mesh = mesh_of((2,), ("fsdp",))
    precise = "mp_policy" in options
    model: Any = make(Net, torch.float32 if precise else torch.float64)
    for position, block in enumerate(model.blocks):
        if grain == "layers":
            fully_shard([block.up, block.down], mesh, **options)
        if grain == "inside":
            fully_shard(block, mesh, **options)
        if how != "plain":
            model.blocks[position] = recomputed(block, how)
        if grain in ("outside", "layers"):
            fully_shard(model.blocks[position], mesh, **options)
    fully_shard(model, mesh, **options)
    seen = []
    for step in range(2):
        loss_of(model, tokens(rank, step)).backward()
        found = gradients(model)
        seen.append({n.replace(WRAPPED, "").replace("inner.", ""): g for n, g in found.items()})
        model.zero_grad()
    return seen


@pytest.mark.parametrize("how", ["not reentrant", "reentrant", "wrapper"])
@pytest.mark.parametrize("grain", ["inside", "outside", "layers", "root alone"])
def test_gradients_equal_those_without_recomputation(ranks: Ranks, how: str, grain: str) -> None:
    expected = [reference(2, steps=(step,)) for step in range(2)]
    for option in (True, False):
        for seen in ranks(2).run(steps, how, grain, {"reshard_after_forward": option}):
            assert max(map(worst, seen, expected)) < 1e-12


@pytest.mark.parametrize(("how", "grain"), [("not reentrant", "inside"), ("wrapper", "outside")])
def test_casts_are_the_same_when_recomputed(ranks: Ranks, how: str, grain: str) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options = {"mp_policy": policy}
    expected = ranks(2).run(steps, "plain", grain, options)
    for seen, wanted in zip(ranks(2).run(steps, how, grain, options), expected, strict=True):
        assert max(map(worst, seen, wanted)) == 0
