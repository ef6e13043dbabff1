"""Units in a chain: the end of one unit's backward starts the backward of the unit before."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import RecordingCollectives, TorchCollectives
from hp_fsdp import fully_shard

from .models import WIDTH, Block, Gradients, full, gradients, make, mesh_of, worst

Ranks = Callable[[int], RankPool]


class Chain(nn.Module):
    """Blocks that can be skipped, and a head for the intermediate outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.views, self.nested = Viewed(), Nested()
        self.skips = nn.ModuleList(Skipped() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)


class Nested(nn.Module):
    """Returns the output of a nested unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        return cast(Tensor, self.inner(torch.tanh(self.first(x))))


class Viewed(nn.Module):
    """Returns a view of its output. An in-place change of the view removes the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        found: Tensor = self.linear(x)
        return found.t().contiguous().t()


class Skipped(nn.Module):
    """Returns its input on the ranks below ``by``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.by = 0  # all of the ranks below skip it

    def forward(self, x: Tensor) -> Tensor:
        """Compute, or not."""
        skipped = dist.is_initialized() and dist.get_rank() < self.by
        return x if skipped else cast(Tensor, self.linear(x))


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


def first_of_two(model: Any, x: Tensor) -> list[Tensor]:
    first = model.nested(x)
    model.nested(x)
    return [first]


def views_changed(model: Any, x: Tensor) -> list[Tensor]:
    for block in model.blocks:
        x = model.views(block(x)).mul_(1.5)
    return [x]


def cut(model: Any, x: Tensor) -> list[Tensor]:
    first = model.blocks[0](x)
    return [model.blocks[1](model.blocks[2](first.detach_().requires_grad_()))]


def in_a_thread(model: Any, x: Tensor) -> list[Tensor]:
    first = model.blocks[0](x)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(model.blocks[1], first).result()
    return [model.blocks[2](second)]


def passed_on(model: Any, x: Tensor) -> list[Tensor]:
    return [model.blocks[2](model.skips[1](model.skips[0](model.blocks[0](x))))]


def frozen_for_one_call(model: Any, x: Tensor) -> list[Tensor]:
    critic = model.blocks[1].requires_grad_(False)
    judged = critic(model.blocks[0](x))
    critic.requires_grad_(True)
    return [judged, critic(x)]


def thawed_inside(model: Any, x: Tensor) -> list[Tensor]:
    first = model.blocks[0](x)
    model.blocks[3].requires_grad_(True)
    found = model.blocks[3](first)
    model.blocks[2](found)  # the last to run stays gathered
    return [found]


def units_of(model: Any) -> list[nn.Module]:
    nested = model.nested
    return [*model.blocks, *model.skips, model.views, nested.inner, nested]


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
    first_of_two,
    views_changed,
    cut,
    in_a_thread,
    passed_on,
    frozen_for_one_call,
    thawed_inside,
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
    for block in units_of(model.inner):
        fully_shard(block, mesh_of((2,), ("fsdp",)), **options)
    fully_shard(model, mesh_of((2,), ("fsdp",)), **options)
    found = []
    for step in range(2):
        if way is thawed_inside:
            model.inner.blocks[3].requires_grad_(False)
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
def test_gradients_equal_one_process_for_every_consumer_of_an_output(
    ranks: Ranks, way: Way, apart: bool
) -> None:
    cases: list[dict[str, Any]] = [
        {"reshard_after_forward": True},
        {},
        {"reshard_after_forward": False},
        {"layout": "ragged"},
    ]
    for options in cases:
        for found in ranks(2).run(trained, way, apart, options):
            for one, other in zip(found, expected(way), strict=True):
                used = {name: other[name] for name in one}
                assert worst(one, used) < 1e-12
                assert all(not other[name].any() for name in other.keys() - one.keys())


class Seen(TorchCollectives):
    """Records the started collectives in order."""

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


def skipping(rank: int, by: int) -> tuple[list[Gradients], list[int]]:
    """Return gradients and collectives of steps in which ranks below ``by`` skip a unit."""
    model: Any = Root(make(Chain), passed_on)
    carrier = Seen()
    for block in units_of(model.inner):
        fully_shard(block, mesh_of((2,), ("fsdp",)), collectives=carrier)
    fully_shard(model, mesh_of((2,), ("fsdp",)))
    found, calls = [], []
    for step in range(3):
        model.inner.skips[0].by = by if step else 0
        carrier.names.clear()
        loss_of(model(batch(rank, step))).backward()
        calls.append(carrier.names.count("reduce"))
        found.append(gradients(model))
        model.zero_grad()
    return found, calls


@pytest.mark.parametrize("by", [1, 2])
def test_a_unit_that_returns_its_input_is_reduced_once_on_all_ranks(ranks: Ranks, by: int) -> None:
    results = ranks(2).run(skipping, by)
    for found, calls in results:
        assert calls == [4, 4, 4]
        for step, (one, other) in enumerate(zip(found, results[0][0], strict=True)):
            assert worst(one, other) == 0
            linear = one.get("inner.skips.0.linear.weight")
            assert (linear is None) == (step > 0 and by == 2)


def order(rank: int) -> tuple[list[str], set[str]]:
    """Return the collectives of the second backward, and the package's autograd nodes."""
    model: Any = Root(make(Chain), straight)
    carrier = Seen()
    for block in units_of(model.inner):
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
