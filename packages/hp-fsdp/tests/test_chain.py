"""Units one after another: where the backward of one ends that of the one before begins."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import RecordingCollectives, TorchCollectives
from hp_fsdp import fully_shard

from .models import WIDTH, Block, Gradients, full, gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]


class Chain(nn.Module):
    """Blocks, and a head that some losses have of what comes out on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)


def straight(model: Any, x: Tensor) -> list[Tensor]:
    for block in model.blocks:
        x = block(x)
    return [model.head(x)]


def residual(model: Any, x: Tensor) -> list[Tensor]:
    for block in model.blocks:
        x = x + block(x)
    return [x]


def changed_between(model: Any, x: Tensor) -> list[Tensor]:
    for block in model.blocks:
        x = block(x).mul_(1.5)
    return [x]


def every_output(model: Any, x: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    for block in model.blocks:
        x = block(x)
        found.append(x * len(found))
    return found


def early_head(model: Any, x: Tensor) -> list[Tensor]:
    first = model.blocks[0](x)
    early = model.head(first)
    second = model.blocks[1](first)
    return [early, model.blocks[3](model.blocks[2](second)) + first]


def skipped(model: Any, x: Tensor) -> list[Tensor]:
    first = model.blocks[0](x)
    second = model.blocks[1](first)
    third = model.blocks[2](second)
    return [model.blocks[3](third + first), second]


def forked(model: Any, x: Tensor) -> list[Tensor]:
    first = model.blocks[0](x)
    return [model.blocks[1](first), model.blocks[2](first) * 2, model.blocks[3](first)]


def left_out(model: Any, x: Tensor) -> list[Tensor]:
    first = model.blocks[0](x)
    model.blocks[1](first)
    return [model.blocks[2](first)]


def twice(model: Any, x: Tensor) -> list[Tensor]:
    first = model.blocks[0](x)
    return [model.blocks[1](model.blocks[1](model.blocks[0](first)))]


def recomputed(model: Any, x: Tensor) -> list[Tensor]:
    first = model.blocks[0](x)

    def rest(y: Tensor) -> Tensor:
        return model.blocks[2](model.blocks[1](y))  # type: ignore[no-any-return]

    return [model.blocks[3](checkpoint(rest, first, use_reentrant=False))]


WAYS = [
    straight,
    residual,
    changed_between,
    every_output,
    early_head,
    skipped,
    forked,
    left_out,
    twice,
    recomputed,
]
Way = Callable[[Any, Tensor], list[Tensor]]


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(outputs: list[Tensor]) -> Tensor:
    return torch.stack([output.pow(2).mean() for output in outputs]).sum()


class Root(nn.Module):
    """Goes one way through the blocks of a chain."""

    def __init__(self, inner: nn.Module, way: Way) -> None:
        super().__init__()
        self.inner, self.way = inner, way

    def forward(self, x: Tensor) -> list[Tensor]:
        """Go one way through the blocks."""
        return self.way(self.inner, x)


def trained(rank: int, way: Way, apart: bool, options: dict[str, Any]) -> list[Gradients]:
    """Return the gradients of two steps, of one loss or of one loss for each output."""
    model: Any = Root(make(Chain), way)
    for block in model.inner.blocks:
        fully_shard(block, mesh_of((2,), ("fsdp",)), **options)
    fully_shard(model, mesh_of((2,), ("fsdp",)), **options)
    found = []
    for step in range(2):
        outputs = model(batch(rank, step))
        losses = [loss_of([output]) for output in outputs] if apart else [loss_of(outputs)]
        for position, loss in enumerate(losses):
            last = position == len(losses) - 1
            model.set_is_last_backward(last)
            loss.backward(retain_graph=not last)
        found.append(gradients(model))
        model.zero_grad()
    return found


def expected(way: Way) -> list[Gradients]:
    found = []
    for step in range(2):
        model: Any = Root(make(Chain), way)
        for rank in range(2):
            (loss_of(model(batch(rank, step))) / 2).backward()
        found.append({n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    return found


@pytest.mark.parametrize("apart", [False, True], ids=["one loss", "a loss each"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_whatever_else_takes_a_units_output_gradients_are_those_of_one_process(
    ranks: Ranks, way: Way, apart: bool
) -> None:
    for options in ({}, {"reshard_after_forward": False}, {"layout": "ragged"}):
        for found in ranks(2).run(trained, way, apart, options):
            for one, other in zip(found, expected(way), strict=True):
                used = {name: other[name] for name in one}
                assert worst(one, used) < 1e-12
                assert all(not other[name].any() for name in other.keys() - one.keys())


class Seen(TorchCollectives):
    """Notes what is started, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def all_gather(self, *args: Any, **how: Any) -> Any:
        """Gather."""
        self.names.append("gather")
        return super().all_gather(*args, **how)

    def reduce_scatter(self, *args: Any, **how: Any) -> Any:
        """Reduce."""
        self.names.append("reduce")
        return super().reduce_scatter(*args, **how)


def order(rank: int) -> tuple[list[str], set[str]]:
    """Return what the second backward starts, and which nodes of autograd are the package's."""
    model: Any = Root(make(Chain), straight)
    carrier = Seen()
    for block in model.inner.blocks:
        fully_shard(block, mesh_of((2,), ("fsdp",)), collectives=carrier)
    fully_shard(model, mesh_of((2,), ("fsdp",)), collectives=RecordingCollectives())
    nodes: set[str] = set()
    for step in range(2):
        loss = loss_of(model(batch(rank, step)))
        carrier.names.clear()
        waiting: list[Any] = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node.name() not in ("AccumulateGrad",):
                nodes.add(node.name())
                waiting += [each for each, _ in node.next_functions]
        loss.backward()
    return carrier.names, nodes


def test_each_unit_is_reduced_when_the_one_before_is_reached(ranks: Ranks) -> None:
    for names, nodes in ranks(2).run(order):
        # The last block stayed gathered; each gather is ahead of the reduction that it passes.
        assert names == ["gather", "reduce", "gather", "reduce", "gather", "reduce", "reduce"]
        assert not [name for name in nodes if "AfterBackward" in name]
