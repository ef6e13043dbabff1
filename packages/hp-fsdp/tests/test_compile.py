"""Blocks that are compiled before they are sharded, or after, train as they do uncompiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hp_fsdp import fully_shard

from .models import Gradients, Net, gradients, loss_of, make, mesh_of, tokens, worst

Ranks = Callable[[int], RankPool]
OPTIONS: dict[str, dict[str, Any]] = {
    "copy": {},
    "accumulate": {"grads": "accumulate", "direct_bytes": 0},
    "ragged": {"layout": "ragged"},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


def compiled(block: nn.Module, how: str) -> nn.Module:
    """Return the block, compiled in one graph: in a wrapper or in place."""
    if how == "in place":
        block.compile(backend="aot_eager", fullgraph=True)
        return block
    wrapper: Any = torch.compile(block, backend="aot_eager", fullgraph=True)
    return wrapper  # type: ignore[no-any-return]


def train(rank: int, options: str, how: str, when: str) -> tuple[list[Gradients], int]:
    """Return the gradients of three steps with SGD, and the number of graphs compiled."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = make(Net, torch.float32)
    if when == "before":
        model.blocks = nn.ModuleList(compiled(block, how) for block in model.blocks)
    for block in model.blocks:
        fully_shard(block, mesh_of((2,), ("fsdp",)), **OPTIONS[options])
    fully_shard(model, mesh_of((2,), ("fsdp",)), **OPTIONS[options])
    if when == "after":
        model.blocks = nn.ModuleList(compiled(block, how) for block in model.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        loss_of(model, tokens(rank, step)).backward()
        found = gradients(model)
        seen.append({name.replace("_orig_mod.", ""): found[name] for name in found})
        optimizer.step()
        optimizer.zero_grad()
    return seen, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("how", "options"),
    [
        *(("in place", options) for options in OPTIONS),
        ("in a wrapper", "copy"),
        *(
            pytest.param("in a wrapper", options, marks=pytest.mark.long)
            for options in OPTIONS
            if options != "copy"
        ),
    ],
)
def test_blocks_compiled_before_train_in_one_graph(ranks: Ranks, options: str, how: str) -> None:
    expected, _ = ranks(2).run(train, options, how, "never")[0]
    # Three blocks have one graph, and the steps after the first another at most: no hook breaks it.
    for steps, graphs in ranks(2).run(train, options, how, "before"):
        assert graphs <= 2
        for found, wanted in zip(steps, expected, strict=True):
            assert worst(found, wanted) < (0.05 if options == "bf16" else 1e-5)


@pytest.mark.parametrize("how", ["in place", "in a wrapper"])
def test_blocks_may_be_compiled_after(ranks: Ranks, how: str) -> None:
    expected, _ = ranks(2).run(train, "copy", how, "never")[0]
    for steps, graphs in ranks(2).run(train, "copy", how, "after"):
        assert graphs <= 2
        assert max(map(worst, steps, expected)) < 1e-5
