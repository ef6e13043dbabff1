"""Number of host calls per unit and step, without the calls of the model itself."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool, profile
from torch import Tensor, nn

from hp_fsdp import fully_shard

from .models import make, mesh_of

Ranks = Callable[[int], RankPool]
WIDTH = 8


class Block(nn.Module):
    """Eighteen small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        """Use every parameter once."""
        for layer in self.layers:
            x = x + layer(x)
        return x


class Calls:
    """Counts calls of Python functions and of functions in C."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        """Count one event of the profiler."""
        self.found[event] += event in ("call", "c_call")


def calls_of(blocks: int, options: dict[str, Any] | None) -> int:
    """Return the calls of the third step, which is the first one with a known order.

    If ``options`` is None, the model is not sharded.
    """
    model = make(lambda: nn.Sequential(*(Block() for _ in range(blocks))), torch.float32)
    if options is not None:
        for block in model:
            fully_shard(block, mesh_of((2,), ("fsdp",)), **options)
        fully_shard(model, mesh_of((2,), ("fsdp",)), **options)
    x, calls = torch.ones(2, WIDTH), Calls()

    def step() -> None:
        model(x).sum().backward()

    for _ in range(2):
        step()
        model.zero_grad()
    profile(step, calls)
    return calls.found["call"] + calls.found["c_call"]


def per_unit(rank: int, options: dict[str, Any]) -> float:
    few, many = 3, 7
    sharded, plain = [calls_of(many, chosen) - calls_of(few, chosen) for chosen in (options, None)]
    return (sharded - plain) / (many - few)


@pytest.mark.gloo  # its calls are counted
@pytest.mark.parametrize(
    ("options", "most"), [({}, 195), ({"layout": "ragged"}, 198)], ids=["exact", "ragged"]
)
def test_a_unit_of_eighteen_parameters_takes_few_calls_a_step(
    ranks: Ranks, options: dict[str, Any], most: int
) -> None:
    for found in ranks(2).run(per_unit, options):
        assert found <= most
