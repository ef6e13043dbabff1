"""How many optimizer steps this process has begun or ended: what was gathered before may be old."""

import itertools
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


@cache
def _counter() -> list[int]:
    """Return the count; the first call registers the hooks, so that nobody else pays for them."""
    count = [0]
    numbers = itertools.count(1)

    def step(*_: Any) -> None:
        count[0] = next(numbers)

    uncompiled = torch.compiler.disable(step)
    register_optimizer_step_pre_hook(uncompiled)
    register_optimizer_step_post_hook(uncompiled)
    return count


def optimizer_steps() -> int:
    """Return a number that changes with each step of any ``torch.optim.Optimizer``.

    Version counters of parameters do not tell of all steps: ``foreach=True`` on DTensors,
    ``fused=True`` and writes to ``Parameter.data`` leave them as they are.
    """
    return _counter()[0]
