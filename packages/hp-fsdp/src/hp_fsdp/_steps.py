"""How many optimizer steps of shards this process began or ended: what was gathered may be old."""

import itertools
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hp_dtensor import RaggedTensor


@cache
def _counter() -> list[int]:
    """Return the count; the first call registers the hooks, so that nobody else pays for them."""
    count = [0]
    numbers = itertools.count(1)

    def step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = (p for group in optimizer.param_groups for p in group["params"])
        # One of other tensors may step on some ranks only, and what it steps is not gathered.
        if any(isinstance(p, DTensor | RaggedTensor) for p in held):
            count[0] = next(numbers)

    uncompiled = torch.compiler.disable(step)
    register_optimizer_step_pre_hook(uncompiled)
    register_optimizer_step_post_hook(uncompiled)
    return count


def optimizer_steps() -> int:
    """Return a number that changes with each step of a ``torch.optim.Optimizer`` of shards.

    Version counters of parameters do not tell of all steps: ``foreach=True`` on DTensors,
    ``fused=True`` and writes to ``Parameter.data`` leave them as they are.
    """
    return _counter()[0]
